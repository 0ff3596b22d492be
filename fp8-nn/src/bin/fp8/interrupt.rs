//! Ctrl-C and the other signals that end a program: what they stop, and what is removed before the program leaves.

use crate::table::printable;
use fp8_nn::fp8_kernels::AtomicFile;
use fp8_nn::hf::Monitor;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The sentence of an interrupted program.
pub(crate) const SENTENCE: &str = "interrupted; nothing was written";
/// Exit code, as shells expect it of SIGINT.
pub(crate) const CODE: u8 = 130;
/// How much of an output's name is in that of its temporary file, at least.
const NAME_PART: usize = 40;

/// Set by the first signal.
static REQUESTED: AtomicBool = AtomicBool::new(false);
/// Set once the signal handler is about to end the process.
static LEAVING: AtomicBool = AtomicBool::new(false);
static PHASE: Mutex<Phase> = Mutex::new(Phase::Leave);
/// The outputs that are being written.
static OUTPUTS: Mutex<Vec<Output>> = Mutex::new(Vec::new());

/// A file or folder that is being written.
#[derive(Debug)]
struct Output {
    path: PathBuf,
    /// The folder around it, with its temporary files.
    parent: PathBuf,
    /// What of its name is in that of a temporary file.
    name: String,
    /// Whether it was a folder with files already, which is an error that the command finds.
    was_full: bool,
}

/// What the first signal does. The second one always leaves at once.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// Removes partial outputs and leaves.
    Leave,
    /// Stops the operation, which then removes what it has written. Once it is done and only flushes, the signal leaves.
    Stop(Arc<Monitor>),
    /// Only notes it for [`is_requested`], which the operation asks.
    Note,
}

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs the handler of signals.
pub(crate) fn install() {
    // `nohup` makes a program ignore SIGHUP. The handler could not tell that signal from the others.
    if is_hangup_ignored() {
        return;
    }
    // Without a handler, a signal ends the process at once, and the next run removes what it left.
    let _ = ctrlc::set_handler(|| {
        let is_first = !REQUESTED.swap(true, Relaxed);
        let phase = lock(&PHASE).clone();
        match phase {
            Phase::Note if is_first => {}
            Phase::Stop(monitor) if is_first && !is_done(&monitor) => monitor.stop(),
            _ => leave(),
        }
    });
}

/// Returns whether all work is done, and only the flush to disk is left.
pub(crate) fn is_done(monitor: &Monitor) -> bool {
    let (done, total) = monitor.progress();
    total > 0 && done >= total
}

fn is_hangup_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // SIGHUP is signal 1, the lowest bit.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

/// Sets what a signal does while `work` runs.
pub(crate) fn during<T>(phase: Phase, work: impl FnOnce() -> T) -> T {
    let before = std::mem::replace(&mut *lock(&PHASE), phase);
    let result = work();
    *lock(&PHASE) = before;
    result
}

/// Returns whether a signal has asked the program to end.
pub(crate) fn is_requested() -> bool {
    REQUESTED.load(Relaxed)
}

/// Notes an output, whose temporary files are removed if a signal ends the program.
pub(crate) fn note_output(path: &Path) {
    let Some(name) = path.file_name() else { return };
    let name = name.to_string_lossy().chars().take(NAME_PART).collect();
    let parent = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new(".")).to_owned();
    lock(&OUTPUTS).push(Output { path: path.to_owned(), parent, name, was_full: is_full(path) });
}

/// Returns whether it is a folder that has files.
fn is_full(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some())
}

/// Waits for the end if the signal handler is ending the process, so that there is one sentence alone.
pub(crate) fn wait_if_leaving() {
    while LEAVING.load(Relaxed) {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn leave() -> ! {
    LEAVING.store(true, Relaxed);
    let mut sentence = SENTENCE.to_owned();
    for output in lock(&OUTPUTS).iter() {
        remove_partial(&output.parent, &output.name);
        // The signal came behind the renaming, which makes a folder appear as a whole.
        if !output.was_full && is_full(&output.path) {
            sentence =
                format!("interrupted after {} was written", printable(&output.path.display().to_string()));
        }
    }
    let _ = writeln!(std::io::stderr(), "error: {sentence}");
    std::process::exit(i32::from(CODE))
}

/// Removes the temporary files and folders that this process has created for an output.
fn remove_partial(folder: &Path, name: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let prefix = format!("{}{}-", AtomicFile::PREFIX, std::process::id());
    for entry in entries.flatten() {
        let found = entry.file_name();
        let found = found.to_string_lossy();
        if !found.starts_with(&prefix) || !found.contains(name) {
            continue;
        }
        // Renamed first: what is being removed must not take its place any more.
        let doomed = folder.join(format!("{found}-removed"));
        if fs::rename(entry.path(), &doomed).is_ok() {
            let _ = fs::remove_dir_all(&doomed).or_else(|_| fs::remove_file(&doomed));
        }
    }
}
