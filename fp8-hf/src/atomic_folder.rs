//! Folders that appear whole or not at all.
//!
//! A temporary folder has a lock file beside it that stays locked while its writer lives. So a temporary folder whose lock file
//! is gone, or not locked, was left by a program that was killed.

use fp8_kernels::AtomicFile;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A folder that appears whole or not at all, also if the program is killed or the power fails.
///
/// Files are written to a temporary folder beside it, whose name begins with [`AtomicFile::PREFIX`].
/// [`commit`](Self::commit) flushes everything to disk and renames the folder. If the `AtomicFolder` is dropped instead, the
/// temporary folder is removed. One that a killed program left is removed by the next [`create`](Self::create) in the same place.
///
/// ```
/// use fp8_hf::AtomicFolder;
/// let place = std::env::temp_dir().join(format!("fp8-atomic-folder-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// let folder = AtomicFolder::create(&place.join("results"))?;
/// std::fs::write(folder.path().join("numbers.csv"), "1,2,3\n")?;
/// assert!(!place.join("results").exists());
/// folder.commit()?;
/// assert_eq!(std::fs::read_to_string(place.join("results/numbers.csv"))?, "1,2,3\n");
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct AtomicFolder {
    target: PathBuf,
    parent: PathBuf,
    temporary: PathBuf,
    lock: PathBuf,
    /// The lock file, locked; `None` after the folder has been renamed.
    locked: Option<File>,
}

/// The number of attempts to find a name that no other writer uses.
const ATTEMPTS: usize = 100;
/// The number of characters of the folder's own name in that of its temporary folder: with prefix and suffix, a name of 255 bytes,
/// the longest that most file systems take, would not fit.
const NAME_PART: usize = 40;
const LOCK: &str = ".lock";

impl AtomicFolder {
    /// Creates a temporary folder that will become `path`, and removes those of killed programs. The folder that contains
    /// `path` must exist.
    ///
    /// # Errors
    /// Something else than an empty folder exists at `path`; the folder around it does not exist or cannot be written to.
    pub fn create(path: &Path) -> io::Result<Self> {
        let refused = |kind, text: &str| Err(io::Error::new(kind, text));
        let Some(name) = path.file_name() else {
            return refused(ErrorKind::InvalidInput, "expected a path that ends in the name of a new folder");
        };
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        if !parent.is_dir() {
            return refused(
                ErrorKind::NotFound,
                "the folder around it does not exist: create that one first",
            );
        }
        // Without a `.` or `/` at its end, to which nothing can be renamed.
        let target = parent.join(name);
        if !is_free(&target)? {
            return refused(
                ErrorKind::AlreadyExists,
                "it exists already: name a new folder, or remove this one",
            );
        }
        remove_stale(&parent);
        for _ in 0..ATTEMPTS {
            static COUNT: AtomicU64 = AtomicU64::new(0);
            let mut unique = OsString::from(AtomicFile::PREFIX);
            unique.push(format!("{}-{}-", std::process::id(), COUNT.fetch_add(1, Relaxed)));
            unique.push(name.to_string_lossy().chars().take(NAME_PART).collect::<String>());
            let temporary = parent.join(&unique);
            unique.push(LOCK);
            let lock = parent.join(unique);
            let file = match OpenOptions::new().write(true).create_new(true).open(&lock) {
                Ok(file) => file,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            // On a file system without locks, nothing is removed: a killed writer's folder looks like a living one's.
            let _ = file.lock();
            // Another writer removes a lock file only while it holds the lock, so from here on it is gone or stays.
            if !lock.exists() {
                continue;
            }
            let folder = Self { target, parent, temporary, lock, locked: Some(file) };
            // If this fails, dropping `folder` removes the lock file.
            fs::create_dir(&folder.temporary)?;
            return Ok(folder);
        }
        refused(ErrorKind::AlreadyExists, "no name is free for a temporary folder")
    }

    /// Returns the path of the temporary folder, for the files.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Flushes all files to disk and renames the folder to its path.
    ///
    /// # Errors
    /// A file cannot be flushed, or the path is no longer free, which is [`ErrorKind::AlreadyExists`]; nothing is left then. Or the
    /// folder around it cannot be flushed; the error says that the new folder is in place.
    pub fn commit(self) -> io::Result<()> {
        self.commit_with(sync_folder)
    }

    fn commit_with(mut self, sync_parent: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        sync(&self.temporary)?;
        if cfg!(not(unix)) && self.target.is_dir() {
            // Only on Unix does a rename replace an empty folder.
            fs::remove_dir(&self.target)?;
        }
        fs::rename(&self.temporary, &self.target).map_err(|error| match is_free(&self.target) {
            Ok(false) => io::Error::new(
                ErrorKind::AlreadyExists,
                "something else was created there in the meantime: choose another name, or remove it",
            ),
            _ => error,
        })?;
        self.unlock();
        sync_parent(&self.parent).map_err(|error| {
            let text = format!(
                "the new folder is complete and in place, but the folder around it could not be flushed to disk ({error}): if the \
                 power fails now, it may be lost, so check after a restart"
            );
            io::Error::new(error.kind(), text)
        })
    }

    fn unlock(&mut self) {
        if let Some(file) = self.locked.take() {
            // If it cannot be removed now, a later `create` removes it.
            let _ = fs::remove_file(&self.lock);
            drop(file);
        }
    }
}

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        if self.locked.is_some() {
            let _ = fs::remove_dir_all(&self.temporary);
            self.unlock();
        }
    }
}

/// Returns true if nothing is at `path`, or an empty folder.
fn is_free(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
        Ok(metadata) if metadata.is_dir() => Ok(fs::read_dir(path)?.next().is_none()),
        Ok(_) => Ok(false),
    }
}

/// Flushes a folder with everything in it.
fn sync(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync(&entry.path())?;
        } else {
            // Windows flushes only files that are open for writing.
            OpenOptions::new().write(true).open(entry.path())?.sync_all()?;
        }
    }
    sync_folder(folder)
}

/// Flushes a folder's entries to disk. Only Unix has a call for it.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// Removes the temporary folders that no running program has locked. Failures are ignored: they cost only disk space.
fn remove_stale(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_temporary = name.as_encoded_bytes().starts_with(AtomicFile::PREFIX.as_bytes());
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_lock = name.as_encoded_bytes().ends_with(LOCK.as_bytes());
        if !is_temporary || !(is_folder || is_lock) {
            continue;
        }
        let mut lock_name = name.clone();
        if is_folder {
            lock_name.push(LOCK);
        }
        let lock = parent.join(lock_name);
        // Opening a pipe would wait for a writer.
        if fs::symlink_metadata(&lock).is_ok_and(|metadata| !metadata.is_file()) {
            continue;
        }
        let file = match File::open(&lock) {
            Ok(file) => Some(file),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(_) => continue,
        };
        // A writer creates and locks the file before the folder. The lock is held here until both are gone.
        if file.as_ref().is_none_or(|file| file.try_lock().is_ok()) {
            if is_folder {
                let _ = fs::remove_dir_all(entry.path());
            } else {
                let _ = fs::remove_dir_all(entry.path().with_extension(""));
            }
            let _ = fs::remove_file(&lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_appears_whole_or_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("out");
        let folder = AtomicFolder::create(&target).unwrap();
        fs::create_dir(folder.path().join("deep")).unwrap();
        fs::write(folder.path().join("deep/file"), "text").unwrap();
        assert!(!target.exists());
        folder.commit().unwrap();
        assert_eq!(names(place.path()), ["out"]);
        assert_eq!(fs::read_to_string(target.join("deep/file")).unwrap(), "text");
        let dropped = AtomicFolder::create(&place.path().join("other")).unwrap();
        fs::write(dropped.path().join("file"), "text").unwrap();
        drop(dropped);
        assert_eq!(names(place.path()), ["out"]);
    }

    #[test]
    fn folders_of_killed_writers_are_removed_and_those_of_living_ones_stay() {
        let place = tempfile::tempdir().unwrap();
        let living = AtomicFolder::create(&place.path().join("living")).unwrap();
        let left = ["1-0-a", "1-1-b"].map(|end| place.path().join(format!("{}{end}", AtomicFile::PREFIX)));
        fs::create_dir(&left[0]).unwrap(); // without its lock
        fs::create_dir(&left[1]).unwrap();
        fs::write(left[1].join("half"), "a fi").unwrap();
        fs::write(place.path().join(format!("{}1-1-b{LOCK}", AtomicFile::PREFIX)), "").unwrap();
        fs::write(place.path().join(format!("{}1-2-c{LOCK}", AtomicFile::PREFIX)), "").unwrap();
        fs::write(living.path().join("file"), "kept").unwrap();
        AtomicFolder::create(&place.path().join("new")).unwrap().commit().unwrap();
        living.commit().unwrap();
        assert_eq!(names(place.path()), ["living", "new"]);
        assert_eq!(names(&place.path().join("living")), ["file"]);
    }

    #[test]
    fn a_failed_flush_of_the_folder_around_it_says_that_the_folder_is_in_place() {
        let place = tempfile::tempdir().unwrap();
        let folder = AtomicFolder::create(&place.path().join("out")).unwrap();
        let failing = |_: &Path| Err(io::Error::other("the disk is on fire"));
        let error = folder.commit_with(failing).unwrap_err().to_string();
        assert!(error.starts_with("the new folder is complete and in place"), "{error}");
        assert!(error.contains("the disk is on fire"), "{error}");
        assert_eq!(names(place.path()), ["out"]);
    }

    #[test]
    fn the_longest_name_fits() {
        let place = tempfile::tempdir().unwrap();
        for length in [220, 255] {
            AtomicFolder::create(&place.path().join("n".repeat(length))).unwrap().commit().unwrap();
        }
        assert_eq!(names(place.path()).len(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_with_the_name_of_a_lock_file_is_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let pipe = place.path().join(format!("{}x{LOCK}", AtomicFile::PREFIX));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        AtomicFolder::create(&place.path().join("out")).unwrap().commit().unwrap();
        assert_eq!(names(place.path()).len(), 2);
    }

    #[test]
    fn what_exists_is_never_replaced() {
        let place = tempfile::tempdir().unwrap();
        let (full, empty, file) =
            (place.path().join("full"), place.path().join("empty"), place.path().join("file"));
        fs::create_dir(&full).unwrap();
        fs::write(full.join("x"), "mine").unwrap();
        fs::create_dir(&empty).unwrap();
        fs::write(&file, "mine").unwrap();
        for taken in [&full, &file] {
            let error = AtomicFolder::create(taken).unwrap_err().to_string();
            assert_eq!(error, "it exists already: name a new folder, or remove this one");
        }
        AtomicFolder::create(&empty.join(".")).unwrap().commit().unwrap();
        let late = AtomicFolder::create(&place.path().join("late")).unwrap();
        fs::create_dir(place.path().join("late")).unwrap();
        fs::write(place.path().join("late/x"), "theirs").unwrap();
        let error = late.commit().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.to_string().starts_with("something else was created there in the meantime"), "{error}");
        let error = AtomicFolder::create(&place.path().join("no/where")).unwrap_err().to_string();
        assert_eq!(error, "the folder around it does not exist: create that one first");
        let error = AtomicFolder::create(&file.join("below")).unwrap_err().to_string();
        assert_eq!(error, "the folder around it does not exist: create that one first");
        let error = AtomicFolder::create(&place.path().join("n".repeat(300))).unwrap_err().to_string();
        assert!(error.contains("too long"), "{error}");
        assert_eq!(names(place.path()), ["empty", "file", "full", "late"]);
    }
}
