//! Ctrl-C and the other signals that end a program: what they stop, and what is removed before the program leaves.

use crate::table::printable;
use fp8_hf::Monitor;
use fp8_nn::fp8_kernels::AtomicFile;
use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The sentence of an interrupted program.
pub(crate) const SENTENCE: &str = "interrupted; nothing was written";
/// Exit code, as shells expect it of SIGINT.
pub(crate) const CODE: u8 = 130;
/// The most characters of an output's name that the name of its temporary file contains.
const NAME_PART: usize = 40;

/// The sentence of a training that a signal has come to.
const SAVING: &str = "finishing the step and saving; a second signal ends at once";
/// A second signal so soon is the first one, told twice.
const ECHO: Duration = Duration::from_secs(1);

/// The end of the name of what is being removed.
const REMOVED: &str = "-removed";
/// Another thread may be creating or removing a temporary file right now. So many looks in a row must find none, each after a
/// pause; there are not more than `MOST_LOOKS` of them.
const LOOKS: u32 = 3;
const MOST_LOOKS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

/// The number of SIGINT.
const CTRL_C: i32 = 2;

/// Set by the first signal.
static REQUESTED: AtomicBool = AtomicBool::new(false);
/// Set once a thread ends the process: it alone prints the sentence.
static LEAVING: AtomicBool = AtomicBool::new(false);
/// The time of the first signal, if it was one to save.
static FIRST: Mutex<Option<Instant>> = Mutex::new(None);
/// Folders from which this process's temporary files are removed if a signal ends it.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static PHASE: Mutex<Phase> = Mutex::new(Phase::Leave);
/// The outputs that are being written.
static OUTPUTS: Mutex<Vec<Output>> = Mutex::new(Vec::new());

/// A file or folder that is being written.
#[derive(Debug)]
struct Output {
    path: PathBuf,
    /// The folder around it, with its temporary files.
    parent: PathBuf,
    /// The part of its name that the names of its temporary files contain.
    name: String,
    /// Whether it was a folder with files already, which is an error that the command finds.
    was_full: bool,
    /// Whether it is a file that is complete.
    is_written: bool,
    /// Temporary files that were there before, which are not this program's.
    others: Vec<OsString>,
}

/// The effect of the first signal. The second one ends the program at once, but for [`Forward`](Self::Forward).
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// Removes partial outputs and leaves.
    Leave,
    /// Stops the operation, which then removes what it has written. Once it is done and only flushes, the signal leaves.
    Stop(Arc<Monitor>),
    /// Only notes it for [`is_requested`], which the operation asks.
    Note,
    /// Passes every signal on, to processes that end by themselves.
    Forward(Sender<i32>),
    /// Notes it, too. The second signal ends the process without a word: what a training has saved stays.
    Save,
}

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs the handlers of signals. Without one, a signal ends the process at once, and the next run removes what it left.
pub(crate) fn install() {
    let _ = ctrlc::set_handler(|| receive(CTRL_C));
    #[cfg(unix)]
    install_others();
}

/// Handles SIGTERM and SIGHUP.
#[cfg(unix)]
fn install_others() {
    use signal_hook::consts::{SIGHUP, SIGTERM};
    let mut others = vec![SIGTERM];
    // A program that `nohup` starts ignores SIGHUP.
    if !is_hangup_ignored() {
        others.push(SIGHUP);
    }
    if let Ok(mut signals) = signal_hook::iterator::Signals::new(others) {
        let _ = std::thread::Builder::new().spawn(move || signals.forever().for_each(receive));
    }
}

/// Does what the first signal, or a later one, asks for.
fn receive(signal: i32) {
    let is_first = !REQUESTED.swap(true, Relaxed);
    let phase = lock(&PHASE).clone();
    match phase {
        Phase::Forward(processes) => drop(processes.send(signal)),
        Phase::Note if is_first => {}
        Phase::Save if is_first => {
            *lock(&FIRST) = Some(Instant::now());
            let _ = writeln!(std::io::stderr(), "{SAVING}");
        }
        // Launchers and shells pass on a signal that this process has had, too.
        Phase::Save if lock(&FIRST).is_some_and(|first| first.elapsed() < ECHO) => {}
        Phase::Save => std::process::exit(i32::from(CODE)),
        Phase::Stop(monitor) if is_first && !is_done(&monitor) => monitor.stop(),
        _ => leave(),
    }
}

/// Returns whether all work is done, and only the flush to disk is left.
pub(crate) fn is_done(monitor: &Monitor) -> bool {
    let (done, total) = monitor.progress();
    total > 0 && done >= total
}

#[cfg(unix)]
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

/// Returns the flag that the first signal sets.
pub(crate) fn requested() -> &'static AtomicBool {
    &REQUESTED
}

/// Notes an output, whose temporary files are removed if a signal ends the program.
pub(crate) fn note_output(path: &Path) {
    let Some(name) = path.file_name() else { return };
    let name = name.to_string_lossy().chars().take(NAME_PART).collect();
    let parent = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new(".")).to_owned();
    let others = temporaries(&parent);
    let (path, was_full) = (path.to_owned(), is_full(path));
    lock(&OUTPUTS).push(Output { path, parent, name, was_full, is_written: false, others });
}

/// Notes a folder in which files are written whose names are not known before.
pub(crate) fn note_folder(path: &Path) {
    lock(&FOLDERS).push(path.to_owned());
}

/// Notes that a file is complete and in its place.
pub(crate) fn note_written(path: &Path) {
    lock(&OUTPUTS)
        .iter_mut()
        .filter(|output| output.path == path)
        .for_each(|output| output.is_written = true);
}

/// Returns the names of the temporary files and folders in `folder` that have this process's number.
fn temporaries(folder: &Path) -> Vec<OsString> {
    let prefix = format!("{}{}-", AtomicFile::PREFIX, std::process::id());
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes())).collect()
}

/// Returns whether it is a folder that has files.
fn is_full(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some())
}

/// Returns in the one thread that ends the process; others wait for the end, so that there is one sentence alone.
pub(crate) fn begin_to_leave() {
    while LEAVING.swap(true, Relaxed) {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn leave() -> ! {
    begin_to_leave();
    let mut sentence = SENTENCE.to_owned();
    let mut found_none = 0;
    for _ in 0..MOST_LOOKS {
        found_none = if remove_temporaries() { 0 } else { found_none + 1 };
        if found_none == LOOKS {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    for output in lock(&OUTPUTS).iter() {
        // The signal came after the renaming, which makes a folder appear as a whole.
        if output.is_written || (!output.was_full && is_full(&output.path)) {
            sentence =
                format!("interrupted, but {} is complete", printable(&output.path.display().to_string()));
        }
    }
    let _ = writeln!(std::io::stderr(), "error: {sentence}");
    std::process::exit(i32::from(CODE))
}

/// Removes the temporary files and folders of this process. Returns whether there was one.
fn remove_temporaries() -> bool {
    let mut has_found = false;
    for folder in lock(&FOLDERS).iter() {
        for found in temporaries(folder) {
            let _ = fs::remove_file(folder.join(found));
            has_found = true;
        }
    }
    for output in lock(&OUTPUTS).iter() {
        has_found |= remove_partial(output);
    }
    has_found
}

/// Removes the temporary files and folders that this process has created for an output. Returns whether there was one.
fn remove_partial(output: &Output) -> bool {
    let mut has_found = false;
    for found in temporaries(&output.parent) {
        // They are called PREFIX, process, number, the output's name, and perhaps `.lock`, joined by dashes.
        let text = found.to_string_lossy().into_owned();
        let (text, is_removed) = match text.strip_suffix(REMOVED) {
            Some(text) => (text, true),
            None => (&*text, false),
        };
        let text = text.strip_suffix(".lock").unwrap_or(text);
        let is_own = text.strip_prefix(AtomicFile::PREFIX).and_then(|rest| rest.splitn(3, '-').nth(2));
        if is_own != Some(output.name.as_str()) || output.others.contains(&found) {
            continue;
        }
        has_found = true;
        // Renamed first: what is being removed must not take its place any more.
        let mut doomed = found.clone();
        if !is_removed {
            doomed.push(REMOVED);
        }
        let (found, doomed) = (output.parent.join(found), output.parent.join(doomed));
        if is_removed || fs::rename(found, &doomed).is_ok() {
            let _ = fs::remove_dir_all(&doomed).or_else(|_| fs::remove_file(&doomed));
        }
    }
    has_found
}
