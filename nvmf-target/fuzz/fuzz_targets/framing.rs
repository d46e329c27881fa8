//! See `nvmf_target::fuzz_entry::framing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvmf_target::fuzz_entry::framing(bytes));
