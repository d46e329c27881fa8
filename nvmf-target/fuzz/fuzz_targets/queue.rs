//! See `nvmf_target::fuzz_entry::queue`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvmf_target::fuzz_entry::queue(bytes));
