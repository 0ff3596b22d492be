//! Progress bars on a terminal.

use crate::failure::Failure;
use crate::interrupt::{self, Phase};
use fp8_hf::Monitor;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal as _;
use std::sync::{Arc, mpsc};
use std::time::Duration;

const INTERVAL: Duration = Duration::from_millis(100);

/// The unit that a progress bar counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Bytes that are read.
    Bytes,
    /// Bytes that are written, and flushed to disk at the end.
    Written,
    Tokens,
    /// So many blocks of a model, one after the other.
    Blocks(u64),
}

/// Runs `work` and shows how far its monitor is. A signal stops it through the monitor, so that it leaves nothing behind.
pub(crate) fn watch<T>(unit: Unit, work: impl FnOnce(&Monitor) -> fp8_hf::Result<T>) -> Result<T, Failure> {
    if interrupt::is_requested() {
        return Err(Failure::Interrupted);
    }
    let monitor = Arc::new(Monitor::default());
    let bar = if std::io::stderr().is_terminal() { bar(unit) } else { ProgressBar::hidden() };
    let (done, is_done) = mpsc::channel::<()>();
    let result = interrupt::during(Phase::Stop(Arc::clone(&monitor)), || {
        std::thread::scope(|scope| {
            let monitor = &*monitor;
            if !bar.is_hidden() {
                let bar = &bar;
                scope.spawn(move || {
                    while is_done.recv_timeout(INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                        show(bar, unit, monitor);
                    }
                });
            }
            let result = work(monitor);
            drop(done);
            result
        })
    });
    bar.finish_and_clear();
    match result {
        Err(_) if interrupt::is_requested() => Err(Failure::Interrupted),
        result => Ok(result?),
    }
}

fn show(bar: &ProgressBar, unit: Unit, monitor: &Monitor) {
    let (done, total) = monitor.progress();
    let (done, total) = match unit {
        // The monitor counts each token once for each block.
        Unit::Blocks(blocks) => (done.saturating_mul(blocks) / total.max(1), blocks),
        _ => (done, total),
    };
    bar.set_length(total);
    bar.set_position(done);
    let is_flushing = unit == Unit::Written && interrupt::is_done(monitor);
    bar.set_message(if is_flushing { "flushing to disk  " } else { "" });
}

/// Runs `work`, whose length is not known, and shows that the program is at it.
pub(crate) fn spin<T>(what: &'static str, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let bar =
        if std::io::stderr().is_terminal() { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    if !bar.is_hidden() {
        bar.set_message(what);
        bar.enable_steady_tick(INTERVAL);
    }
    let result = work();
    bar.finish_and_clear();
    result
}

fn bar(unit: Unit) -> ProgressBar {
    let template = match unit {
        Unit::Bytes | Unit::Written => {
            "{wide_bar:.cyan/blue} {msg}{bytes}/{total_bytes}  {bytes_per_sec}  {eta} left"
        }
        Unit::Tokens => "{wide_bar:.cyan/blue} {pos}/{len} tokens  {rate}/s  {eta} left",
        Unit::Blocks(_) => "{wide_bar:.cyan/blue} {pos}/{len} blocks  {eta} left",
    };
    let rate = |state: &ProgressState, text: &mut dyn Write| {
        let _ = write!(text, "{:.0}", state.per_sec());
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style.with_key("rate", rate).progress_chars("━╸─"))
}
