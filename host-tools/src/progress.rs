//! Progress bars on standard error, and the flag that Ctrl-C sets.
//!
//! Owns what a person sees while a tool runs. Must not know what runs. Invariants: nothing of it goes to standard output,
//! and nothing at all appears where standard error is no terminal; the first signal asks for an orderly end, the second
//! ends at once.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};

/// A bar that counts bytes up to `total`.
pub fn bytes_bar(label: &str, total: u64) -> ProgressBar {
    bar(label, total, "{msg:24} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}")
}

/// A bar that counts steps up to `total`.
pub fn steps_bar(label: &str, total: u64) -> ProgressBar {
    bar(label, total, "{msg:24} [{wide_bar}] {pos}/{len} {eta}")
}

/// A line that counts up without an end.
pub fn counter(label: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} {human_pos} in {elapsed}");
    draw(ProgressBar::no_length(), label, style)
}

fn bar(label: &str, total: u64, template: &str) -> ProgressBar {
    draw(ProgressBar::new(total), label, ProgressStyle::with_template(template))
}

fn draw(bar: ProgressBar, label: &str, style: Result<ProgressStyle, indicatif::style::TemplateError>) -> ProgressBar {
    if io::stderr().is_terminal() {
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(label.to_owned());
    } else {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar
}

/// What a long piece of work looks at and moves.
#[derive(Debug, Clone, Copy)]
pub struct Watch<'a> {
    /// An end was asked for.
    pub stop: &'a StopFlag,
    /// How far it is.
    pub bar: &'a ProgressBar,
}

/// Set once the user or the system asks for an end.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that SIGINT and SIGTERM set; a second one of them ends the process with code 130.
    pub fn on_signals() -> io::Result<Self> {
        let flag = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag down, goes by, and raises it.
            signal_hook::flag::register_conditional_shutdown(signal, crate::exit::INTERRUPTED, Arc::clone(&flag.0))?;
            signal_hook::flag::register(signal, Arc::clone(&flag.0))?;
        }
        Ok(flag)
    }

    /// Asks for an end.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// An end was asked for.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
