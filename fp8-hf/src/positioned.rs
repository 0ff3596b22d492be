//! Reads and writes at a place in a file, from many threads at once.

use std::fs::File;
use std::io;

/// Fills `buffer` with the bytes at `offset`.
#[cfg(unix)]
pub(super) fn read(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

/// Writes all of `bytes` at `offset`.
#[cfg(unix)]
pub(super) fn write(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Fills `buffer` with the bytes at `offset`.
#[cfg(windows)]
pub(super) fn read(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                buffer = &mut buffer[count..];
                offset += count as u64;
            }
        }
    }
    Ok(())
}

/// Writes all of `bytes` at `offset`.
#[cfg(windows)]
pub(super) fn write(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
        }
    }
    Ok(())
}

/// A place in a file that can be written to as a stream.
pub(super) struct Cursor<'a> {
    pub(super) file: &'a File,
    pub(super) offset: u64,
}

impl io::Write for Cursor<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write(self.file, bytes, self.offset)?;
        self.offset += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
