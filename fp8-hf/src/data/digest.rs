//! Digests of files, by which kept tokens are found again and runs are compared.

use crate::files::{exists, open, unreadable};
use crate::{Error, Result, positioned};
use sha2::{Digest as _, Sha256};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Larger files are read in parts.
const WHOLE: u64 = 64 << 20;
/// The number of these parts, and their bytes.
const PARTS: u64 = 64;
const PART: u64 = 1 << 16;

/// The files of a tokenizer that decide about tokens and texts.
const TOKENIZER: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"];

/// A digest of the contents of files, and one that also changes with the time at which a large file was changed.
pub(super) fn of_files(files: &[PathBuf]) -> Result<[[u8; 32]; 2]> {
    let (mut contents, mut changed) = (Sha256::new(), Sha256::new());
    for path in files {
        let file = open(path)?;
        let metadata = file.metadata().map_err(|error| unreadable(path, &error))?;
        let len = metadata.len();
        let digest = if len <= WHOLE {
            let mut whole = Sha256::new();
            io::copy(&mut &file, &mut Hashed(&mut whole)).map_err(|error| unreadable(path, &error))?;
            whole.finalize()
        } else {
            let mut parts = Sha256::new();
            let mut bytes = vec![0; PART as usize];
            for part in 0..PARTS {
                // From the start to the end.
                let offset = u128::from(len - PART) * u128::from(part) / u128::from(PARTS - 1);
                let read = positioned::read(&file, &mut bytes, offset as u64);
                read.map_err(|source| Error::Io { path: path.clone(), source })?;
                parts.update(&bytes);
            }
            let time = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            changed.update(format!("{time:?}"));
            parts.finalize()
        };
        contents.update(len.to_le_bytes());
        contents.update(digest);
    }
    let contents: [u8; 32] = contents.finalize().into();
    changed.update(contents);
    Ok([contents, changed.finalize().into()])
}

/// A digest of the files of a tokenizer.
pub(super) fn of_tokenizer(folder: &Path) -> Result<[u8; 32]> {
    let present: Vec<PathBuf> =
        TOKENIZER.iter().map(|name| folder.join(name)).filter(|path| exists(path)).collect();
    let names: Vec<_> = present.iter().filter_map(|path| path.file_name()).collect();
    let mut digest = Sha256::new().chain_update(format!("{names:?}"));
    for path in &present {
        let mut file = open(path)?;
        io::copy(&mut file, &mut Hashed(&mut digest)).map_err(|error| unreadable(path, &error))?;
    }
    Ok(digest.finalize().into())
}

/// A digest of parts, none of which can be taken for another.
pub(super) fn of_parts(parts: &[&[u8]]) -> [u8; 32] {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

/// Writes a digest in hexadecimal digits.
pub(super) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A digest that can be written to.
struct Hashed<'a>(&'a mut Sha256);

impl io::Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
