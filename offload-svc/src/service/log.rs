//! The log: tracing to stderr.
//!
//! Owns its set-up. Must not know what is logged. Invariant: what came from a peer is escaped by whoever logs it, and the
//! text format escapes control characters besides.

use tracing_subscriber::EnvFilter;

use crate::config::schema::{LogFormat, Service};

/// Sends the log to stderr as the configuration says. A second call changes nothing.
pub fn log_to_stderr(service: &Service) {
    let filter = EnvFilter::builder().parse(&service.log).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // An error says that there is a log already.
    let _ = match service.log_format {
        LogFormat::Text => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            builder.with_ansi(colours).try_init()
        }
        LogFormat::Json => builder.json().try_init(),
    };
}
