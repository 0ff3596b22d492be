//! Compiled kernels on disk. Anything wrong with a file means "not there": the kernel is compiled again.
//!
//! A file is magic, payload length (u64, little-endian), SHA-256 of the payload, payload. The driver takes a CUBIN's
//! length from the CUBIN itself, so a truncated file must never reach it. Files are written atomically ([`AtomicFile`]): a
//! reader sees a whole file or none, however many processes write. Failing to write is no error.

use crate::AtomicFile;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"fp8cubin";
const HEADER: usize = 8 + 8 + 32;

/// A folder of kernels, or none.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

/// Names one kernel's file.
pub(crate) fn key(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    hash.update(b"format 1");
    for part in parts {
        // Lengths first, so that no two lists of parts run together to the same bytes.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Cache {
    /// Below `dir`.
    pub(crate) fn new(dir: Option<&Path>) -> Self {
        Self { folder: dir.map(|dir| dir.join("cubin")) }
    }

    /// The payload, if the whole of it is there.
    pub(crate) fn read(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.folder.as_ref()?.join(key);
        let bytes = fs::read(&path).ok()?;
        let payload = checked(&bytes).map(<[u8]>::to_vec);
        if payload.is_none() {
            self.remove(key);
        }
        payload
    }

    /// Keeps `payload`.
    pub(crate) fn write(&self, key: &str, payload: &[u8]) {
        let Some(folder) = &self.folder else { return };
        let write = || -> std::io::Result<()> {
            let mut file = AtomicFile::create(&folder.join(key))?;
            file.write_all(MAGIC)?;
            file.write_all(&(payload.len() as u64).to_le_bytes())?;
            file.write_all(&Sha256::digest(payload))?;
            file.write_all(payload)?;
            file.commit()
        };
        // A cache that cannot be written costs the next process a compilation, nothing else.
        drop(write());
    }

    /// Forgets a payload that turned out to be of no use.
    pub(crate) fn remove(&self, key: &str) {
        if let Some(folder) = &self.folder {
            drop(fs::remove_file(folder.join(key)));
        }
    }
}

fn checked(bytes: &[u8]) -> Option<&[u8]> {
    let (header, payload) = bytes.split_at_checked(HEADER)?;
    let (magic, rest) = header.split_at_checked(MAGIC.len())?;
    let (length, digest) = rest.split_at_checked(8)?;
    let whole = magic == MAGIC
        && length == (payload.len() as u64).to_le_bytes()
        && digest == Sha256::digest(payload).as_slice();
    whole.then_some(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(dir: &Path) -> (Cache, String) {
        let cache = Cache::new(Some(dir));
        let key = key(&["text", "options"]);
        cache.write(&key, b"machine code");
        (cache, key)
    }

    #[test]
    fn keys_depend_on_every_part() {
        assert_eq!(key(&["a", "b"]).len(), 64);
        assert_ne!(key(&["a", "b"]), key(&["ab", ""]));
        assert_ne!(key(&["a", "b"]), key(&["a", "c"]));
    }

    #[test]
    fn what_was_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, key) = written(dir.path());
        assert_eq!(cache.read(&key).unwrap(), b"machine code");
        assert_eq!(fs::read_dir(dir.path().join("cubin")).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_damaged_file_is_absent_and_removed() {
        for damage in ["truncated", "flipped", "empty", "longer"] {
            let dir = tempfile::tempdir().unwrap();
            let (cache, key) = written(dir.path());
            let path = dir.path().join("cubin").join(&key);
            let mut bytes = fs::read(&path).unwrap();
            match damage {
                "truncated" => bytes.truncate(bytes.len() - 1),
                "flipped" => *bytes.last_mut().unwrap() ^= 1,
                "empty" => bytes.clear(),
                _ => bytes.push(0),
            }
            fs::write(&path, bytes).unwrap();
            assert_eq!(cache.read(&key), None, "{damage}");
            assert!(!path.exists(), "{damage}");
            cache.write(&key, b"again");
            assert_eq!(cache.read(&key).unwrap(), b"again");
        }
    }

    #[test]
    fn a_write_removes_what_killed_processes_left() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, key) = written(dir.path());
        let left = dir.path().join("cubin").join(format!("{}1-0-{key}", AtomicFile::PREFIX));
        fs::write(&left, b"half a kern").unwrap();
        cache.write("other", b"machine code");
        assert!(!left.exists());
        assert_eq!(cache.read(&key).unwrap(), b"machine code");
    }

    #[test]
    fn no_folder_and_a_file_in_its_place_are_no_errors() {
        let none = Cache::new(None);
        none.write("key", b"x");
        assert_eq!(none.read("key"), None);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cubin"), b"in the way").unwrap();
        let blocked = Cache::new(Some(dir.path()));
        blocked.write("key", b"x");
        assert_eq!(blocked.read("key"), None);
    }

    #[test]
    fn writers_at_once_leave_a_whole_file() {
        let dir = tempfile::tempdir().unwrap();
        let payloads: Vec<Vec<u8>> = (0..8).map(|i| vec![i; 100_000]).collect();
        std::thread::scope(|scope| {
            for payload in &payloads {
                scope.spawn(|| Cache::new(Some(dir.path())).write("key", payload));
            }
        });
        let read = Cache::new(Some(dir.path())).read("key").unwrap();
        assert!(payloads.contains(&read));
    }
}
