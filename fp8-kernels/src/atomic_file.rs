//! Files that are replaced as a whole or not at all.
//!
//! A temporary file stays locked while its writer lives. So a file with the prefix that is not locked was left by a program
//! that was killed.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A file that is replaced as a whole or not at all, also if the program is killed or the power fails.
///
/// Writes go to a temporary file in the same folder, whose name begins with [`PREFIX`](Self::PREFIX).
/// [`commit`](Self::commit) flushes it to disk and renames it. If the `AtomicFile` is dropped instead, the temporary file is
/// removed and the old file, if any, stays. A temporary file that a killed program left is removed by the next
/// [`create`](Self::create) in the folder. If the path is a link to a file, that file is replaced and the link stays.
///
/// ```
/// use fp8_kernels::AtomicFile;
/// use std::io::Write;
/// let folder = std::env::temp_dir().join(format!("fp8-atomic-file-{}", std::process::id()));
/// let path = folder.join("numbers.csv");
/// let mut file = AtomicFile::create(&path)?; // creates the folder, too
/// writeln!(file, "1,2,3")?;
/// assert!(!path.exists());
/// file.commit()?;
/// assert_eq!(std::fs::read_to_string(&path)?, "1,2,3\n");
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    folder: PathBuf,
    /// The temporary file, locked; `None` after it has been closed.
    file: Option<BufWriter<File>>,
}

/// The size of the write buffer in bytes.
const BUFFER: usize = 1 << 20;
/// The number of attempts to find a name that no other writer uses.
const ATTEMPTS: usize = 100;
/// The number of characters of the file's own name in that of its temporary file: with a prefix, a name of 255 bytes, the
/// longest that most file systems take, would not fit.
const NAME_PART: usize = 40;
/// The longest chain of links that is followed; a longer one is taken for a loop.
const MOST_LINKS: usize = 40;

impl AtomicFile {
    /// The beginning of the names of temporary files.
    pub const PREFIX: &str = ".fp8-partial-";

    /// Creates a temporary file that will replace `path`.
    ///
    /// Creates the folder if it does not exist, and removes temporary files of killed programs from it. Those of programs
    /// that are still writing stay.
    ///
    /// # Errors
    /// A path without a file name; a path where something other than a file exists, such as a folder or a device; a folder that
    /// cannot be created or written to.
    pub fn create(path: &Path) -> io::Result<Self> {
        let (path, name) = &follow(path)?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        create_folder(&folder)?;
        remove_stale(&folder);
        for _ in 0..ATTEMPTS {
            if let Some((temporary, file)) = Self::temporary(&folder, name)? {
                let file = Some(BufWriter::with_capacity(BUFFER, file));
                return Ok(Self { target: path.to_owned(), temporary, folder, file });
            }
        }
        Err(io::Error::new(ErrorKind::AlreadyExists, "no name is free for a temporary file"))
    }

    /// Checks that `path` can be that of a file, before work whose result would be lost otherwise. Its folder may be missing.
    ///
    /// ```
    /// use fp8_kernels::AtomicFile;
    /// AtomicFile::check("report.html".as_ref())?;
    /// assert!(AtomicFile::check(&std::env::temp_dir()).is_err()); // a folder
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// A path without a file name; a path where something other than a file exists.
    pub fn check(path: &Path) -> io::Result<()> {
        follow(path).map(drop)
    }

    /// Creates a file and locks it; returns `None` if its name is taken, or if another writer removed it before it was locked.
    fn temporary(folder: &Path, name: &OsStr) -> io::Result<Option<(PathBuf, File)>> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut temporary = OsString::from(Self::PREFIX);
        temporary.push(format!("{}-{}-", std::process::id(), COUNT.fetch_add(1, Relaxed)));
        temporary.push(name.to_string_lossy().chars().take(NAME_PART).collect::<String>());
        let path = folder.join(temporary);
        // Created with the permissions of any other new file.
        let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(error),
        };
        // On a file system without locks, nothing is removed: a killed writer's files look like a living one's.
        let _ = file.lock();
        // A writer removes a file only while it holds the lock, so from here on the file either is gone or stays.
        Ok(path.exists().then_some((path, file)))
    }

    /// Flushes the file to disk and renames it to its path, where it replaces the old file.
    ///
    /// # Errors
    /// The file cannot be flushed or renamed; the old file is unchanged. Or the folder cannot be flushed; the error says that
    /// the new file is in place.
    pub fn commit(self) -> io::Result<()> {
        self.commit_with(sync_folder)
    }

    fn commit_with(mut self, sync_folder: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        if let Some(mut file) = self.file.take() {
            // Taken out first, so that the temporary file is removed on any failure.
            let written = file.flush().and_then(|()| file.get_ref().sync_all());
            let renamed = written.and_then(|()| fs::rename(&self.temporary, &self.target));
            if let Err(error) = renamed {
                drop(file.into_parts());
                self.discard();
                return Err(error);
            }
        }
        sync_folder(&self.folder).map_err(|error| {
            let text = format!(
                "the new file is complete and in place, but its folder could not be flushed to disk ({error}): after a power \
                 failure, the old file may be back; save again"
            );
            io::Error::new(error.kind(), text)
        })
    }

    fn discard(&self) {
        // If it cannot be removed now, a later `create` removes it.
        let _ = fs::remove_file(&self.temporary);
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.as_mut().map_or(Ok(0), |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // Discards the buffer without writing it.
            drop(file.into_parts());
            self.discard();
        }
    }
}

/// Returns where a link leads, with the name of the file, and refuses what a rename would replace although it is no file: a device,
/// a pipe, a folder, and `/dev/stdout` wherever that leads.
fn follow(path: &Path) -> io::Result<(PathBuf, OsString)> {
    let refused = |text: &str| Err(io::Error::new(ErrorKind::InvalidInput, text));
    let not_a_file = "it exists and is not a file: expected the path of a file";
    let mut target = path.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(next) = fs::read_link(&target) else {
            let Some(name) = target.file_name().map(OsStr::to_owned) else {
                let text = format!("{}: expected a path that ends in a file name", target.display());
                return refused(&text);
            };
            return match fs::metadata(&target) {
                Ok(metadata) if !metadata.is_file() => refused(not_a_file),
                // A name that the file system does not take.
                Err(error) if error.kind() == ErrorKind::InvalidFilename => Err(error),
                // Without a slash at its end, to which nothing can be renamed.
                _ => Ok((target.with_file_name(&name), name)),
            };
        };
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = fs::canonicalize(folder.unwrap_or(Path::new(".")))?;
        // The links there are open files, which a rename would take away from their reader.
        if folder.starts_with("/proc") {
            return refused(not_a_file);
        }
        target = folder.join(next);
    }
    refused("the link leads to itself: expected the path of a file")
}

/// Creates `folder` and its parents, and flushes the new entries to disk.
fn create_folder(folder: &Path) -> io::Result<()> {
    let missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let new: Vec<&Path> = folder.ancestors().take_while(missing).collect();
    fs::create_dir_all(folder)?;
    for made in new {
        let above = made.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync_folder(above).map_err(|error| {
            let text = format!(
                "the new folder {} could not be flushed to disk ({error}): nothing has been written to it",
                made.display()
            );
            io::Error::new(error.kind(), text)
        })?;
    }
    Ok(())
}

/// Flushes a folder's entries to disk. Only Unix has a call for it.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// Removes the temporary files that no running program has locked. Failures are ignored: they cost only disk space.
fn remove_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let is_temporary = entry.file_name().as_encoded_bytes().starts_with(AtomicFile::PREFIX.as_bytes())
            && entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_temporary {
            // The lock is held until the file is removed, so that a writer that has just created it waits and notices.
            let removed = File::open(entry.path()).map_err(TryLockError::Error).and_then(|file| {
                file.try_lock()?;
                fs::remove_file(entry.path()).map_err(TryLockError::Error)
            });
            drop(removed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names
    }

    fn written(path: &Path, text: &str) -> AtomicFile {
        let mut file = AtomicFile::create(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn a_file_appears_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/file");
        let text = "twice the buffer ".repeat(2 * BUFFER / 17);
        let file = written(&path, &text);
        assert!(!path.exists());
        file.commit().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        drop(written(&path, "never committed"));
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        written(&path.join(""), "new").commit().unwrap(); // a path that ends in a slash
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(path.parent().unwrap()), ["file"]);
    }

    #[test]
    fn files_of_killed_writers_are_removed_and_those_of_living_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let stale = folder.path().join(format!("{}4711-0-file", AtomicFile::PREFIX));
        fs::write(&stale, "half of a fi").unwrap(); // nothing locks it any more
        fs::write(folder.path().join(".other"), "kept").unwrap();
        fs::create_dir(folder.path().join(format!("{}folder", AtomicFile::PREFIX))).unwrap();
        let living = written(&path, "first");
        assert!(!stale.exists());
        written(&path, "second").commit().unwrap();
        assert!(living.temporary.exists(), "a save in progress was removed");
        living.commit().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        assert_eq!(names(folder.path()), [&format!("{}folder", AtomicFile::PREFIX), ".other", "file"]);
    }

    #[test]
    fn a_failed_flush_of_the_folder_says_what_is_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        let failing = |_: &Path| Err(io::Error::other("the disk is on fire"));
        let error = written(&path, "new").commit_with(failing).unwrap_err().to_string();
        assert!(error.starts_with("the new file is complete and in place"), "{error}");
        assert!(
            error.contains("the disk is on fire") && error.contains("the old file may be back"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn a_failed_rename_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join("taken");
        let file = written(&taken, "new");
        fs::create_dir_all(taken.join("by a folder")).unwrap();
        assert!(file.commit().is_err());
        assert_eq!(names(folder.path()), ["taken"]);
        assert_eq!(names(&taken), ["by a folder"]);
    }

    #[test]
    fn the_longest_name_fits_and_a_longer_one_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        for length in [220, 254, 255] {
            let path = folder.path().join("n".repeat(length));
            written(&path, "text").commit().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        }
        let path = folder.path().join("n".repeat(256));
        assert!(AtomicFile::check(&path).is_err() && AtomicFile::create(&path).is_err());
        assert_eq!(names(folder.path()).len(), 3);
    }

    #[test]
    fn paths_that_cannot_be_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        assert!(AtomicFile::create(&file.join("below")).is_err());
        let error = AtomicFile::create(folder.path()).unwrap_err().to_string();
        assert_eq!(error, "it exists and is not a file: expected the path of a file");
        let error = AtomicFile::create(Path::new("/")).unwrap_err().to_string();
        assert_eq!(error, "/: expected a path that ends in a file name");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn links_stay_and_devices_are_refused() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let [file, link, device, nowhere] =
            ["deep/file", "link", "device", "nowhere"].map(|name| folder.path().join(name));
        written(&file, "old").commit().unwrap();
        symlink("deep/file", &link).unwrap();
        symlink("/dev/null", &device).unwrap();
        symlink("nowhere", &nowhere).unwrap();
        for open in ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
            let error = AtomicFile::create(Path::new(open)).unwrap_err().to_string();
            assert_eq!(error, "it exists and is not a file: expected the path of a file", "{open}");
        }
        written(&link, "new").commit().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        let error = AtomicFile::create(&device).unwrap_err().to_string();
        assert_eq!(error, "it exists and is not a file: expected the path of a file");
        let error = AtomicFile::create(&nowhere).unwrap_err().to_string();
        assert_eq!(error, "the link leads to itself: expected the path of a file");
        assert_eq!(names(folder.path()), ["deep", "device", "link", "nowhere"]);
    }

    #[test]
    fn many_writers_at_once_all_succeed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::thread::scope(|scope| {
            for writer in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..20 {
                        written(path, &writer.to_string().repeat(1000)).commit().unwrap();
                    }
                });
            }
        });
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.len() == 1000 && text.bytes().all(|byte| byte == text.as_bytes()[0]), "{text}");
        assert_eq!(names(folder.path()), ["file"]);
    }
}
