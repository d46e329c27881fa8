//! Whether this program was compiled rightly, as far as can be told by running it.
//!
//! Owns one trial of a known fault. Must not know anything else. Invariant: it is compiled as the rest of the program is.
//!
//! Before 1.96.1, rustc can drop a comparison whose result is used twice (rust-lang/rust issue 158206): safe code then
//! reads what was never written. `.cargo/rustc` compiles around it; a build that went past that file must not serve.

use std::sync::atomic::{AtomicBool, Ordering};

/// A flag, and whether it was ever seen set.
struct Latch {
    flag: AtomicBool,
    ever: bool,
}

impl Latch {
    #[inline(always)]
    fn take(&mut self) -> bool {
        let set = self.flag.swap(false, Ordering::Relaxed);
        self.ever |= set;
        set
    }
}

#[inline(never)]
fn take_and_count(latch: &mut Latch, seen: &mut u32) {
    if latch.take() {
        *seen += 1;
    }
}

/// Whether a comparison that is used twice comes out right both times.
pub fn compiles_rightly() -> bool {
    let (mut latch, mut seen) = (Latch { flag: AtomicBool::new(false), ever: false }, 0);
    take_and_count(std::hint::black_box(&mut latch), &mut seen);
    !latch.ever && seen == 0
}

#[cfg(test)]
mod tests {
    /// Fails where `.cargo/rustc` is not used, with a compiler that has the fault.
    #[test]
    fn this_build_is_compiled_rightly() {
        assert!(super::compiles_rightly());
    }
}
