//! A non-blocking connection with buffers for partial messages in both directions.

use crate::timed::Until;
use std::io::{self, Read, Write};
use std::net::TcpStream;

#[derive(Debug)]
pub(super) struct Line {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// The deadline of its conversation.
    until: Until,
}

impl Line {
    pub(super) fn new(stream: TcpStream, until: Until) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, input: Vec::new(), output: Vec::new(), until })
    }

    pub(super) const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Converts it back to a blocking stream.
    pub(super) fn into_stream(self) -> io::Result<TcpStream> {
        self.stream.set_nonblocking(false)?;
        Ok(self.stream)
    }

    pub(super) fn say(&mut self, words: &[u8]) {
        self.output.extend_from_slice(words);
    }

    /// Returns true if all output has been passed to the system.
    pub(super) fn is_flushed(&self) -> bool {
        self.output.is_empty()
    }

    pub(super) fn is_late(&self) -> bool {
        self.until.is_past()
    }

    /// Sends as much as the system accepts now.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => drop(self.output.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the next `len` bytes once they have all arrived. Reads no byte beyond them.
    pub(super) fn read(&mut self, len: usize) -> io::Result<Option<Vec<u8>>> {
        Ok(self.has(len)?.then(|| std::mem::take(&mut self.input)))
    }

    /// Returns the next text of at most `most` bytes, which follows its length (u32), with `tail` more bytes.
    pub(super) fn read_text(&mut self, most: usize, tail: usize) -> io::Result<Option<Vec<u8>>> {
        if !self.has(4)? {
            return Ok(None);
        }
        let len = self.input.first_chunk().map_or(usize::MAX, |len| u32::from_le_bytes(*len) as usize);
        if len > most {
            return Err(invalid());
        }
        Ok(self.read(4 + len + tail)?.map(|bytes| bytes.get(4..).unwrap_or_default().to_vec()))
    }

    /// Discards input. Returns an error if the other side has closed the connection.
    pub(super) fn skip(&mut self) -> io::Result<()> {
        while self.has(512)? {
            self.input.clear();
        }
        self.input.clear();
        Ok(())
    }

    fn has(&mut self, len: usize) -> io::Result<bool> {
        while self.input.len() < len {
            let have = self.input.len();
            self.input.resize(len, 0);
            let read = self.stream.read(&mut self.input[have..]);
            self.input.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Returns true if the other side, which sends nothing at this point, still has the connection open.
    pub(super) fn is_alive(&self) -> bool {
        matches!(self.stream.peek(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Returns a text preceded by its length.
pub(super) fn with_length(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes(), text].concat()
}

pub(super) fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer does not speak the protocol of fp8-dist")
}
