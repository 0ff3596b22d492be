//! A progress bar on a terminal, and Ctrl-C.

use crate::failure::Failure;
use fp8_nn::hf::Monitor;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Once, PoisonError, mpsc};
use std::time::Duration;

const INTERVAL: Duration = Duration::from_millis(100);
/// Set by Ctrl-C.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// The monitor of the work in progress, which Ctrl-C stops.
static CURRENT: Mutex<Option<Arc<Monitor>>> = Mutex::new(None);

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Bytes,
    Tokens,
}

/// Runs `work` and shows how far its monitor is. Ctrl-C stops it through the monitor, so that it leaves nothing behind.
pub(crate) fn watch<T>(unit: Unit, work: impl FnOnce(&Monitor) -> fp8_nn::Result<T>) -> Result<T, Failure> {
    let monitor = Arc::new(Monitor::default());
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&monitor));
    heed_interrupts();
    // A Ctrl-C between two works has stopped the monitor of the first.
    if INTERRUPTED.load(Relaxed) {
        return Err(Failure::Interrupted);
    }
    let bar = if std::io::stderr().is_terminal() { bar(unit) } else { ProgressBar::hidden() };
    let (done, is_done) = mpsc::channel::<()>();
    let result = std::thread::scope(|scope| {
        let monitor = &*monitor;
        if !bar.is_hidden() {
            let bar = &bar;
            scope.spawn(move || {
                while is_done.recv_timeout(INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                    let (done, total) = monitor.progress();
                    bar.set_length(total);
                    bar.set_position(done);
                }
            });
        }
        let result = work(monitor);
        drop(done);
        result
    });
    bar.finish_and_clear();
    match result {
        Err(_) if INTERRUPTED.load(Relaxed) => Err(Failure::Interrupted),
        result => Ok(result?),
    }
}

fn heed_interrupts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Without a handler, Ctrl-C ends the process at once, and the next run removes what it left.
        let _ = ctrlc::set_handler(|| {
            // The second Ctrl-C does not wait.
            if INTERRUPTED.swap(true, Relaxed) {
                std::process::exit(130);
            }
            if let Some(monitor) = &*CURRENT.lock().unwrap_or_else(PoisonError::into_inner) {
                monitor.stop();
            }
        });
    });
}

fn bar(unit: Unit) -> ProgressBar {
    let template = match unit {
        Unit::Bytes => "{wide_bar:.cyan/blue} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left",
        Unit::Tokens => "{wide_bar:.cyan/blue} {pos}/{len} tokens  {per_sec}  {eta} left",
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style.progress_chars("━╸─"))
}
