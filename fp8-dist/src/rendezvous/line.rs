//! A connection that never blocks: what has come of a message, and what has not been sent yet.

use crate::timed::Until;
use std::io::{self, Read, Write};
use std::net::TcpStream;

#[derive(Debug)]
pub(super) struct Line {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// When its exchange must be done.
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

    /// Back to a stream that blocks.
    pub(super) fn into_stream(self) -> io::Result<TcpStream> {
        self.stream.set_nonblocking(false)?;
        Ok(self.stream)
    }

    pub(super) fn say(&mut self, words: &[u8]) {
        self.output.extend_from_slice(words);
    }

    /// Whether all that was said has been handed to the system.
    pub(super) fn is_flushed(&self) -> bool {
        self.output.is_empty()
    }

    pub(super) fn is_late(&self) -> bool {
        self.until.is_past()
    }

    /// Sends what the system takes now.
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

    /// The next `len` bytes once they have all come; reads no byte behind them.
    pub(super) fn read(&mut self, len: usize) -> io::Result<Option<Vec<u8>>> {
        Ok(self.has(len)?.then(|| std::mem::take(&mut self.input)))
    }

    /// The next text behind its length (u32), of at most `most` bytes, with `tail` bytes more.
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

    /// Drops what has come. An error: the other side has closed the connection.
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

    /// Whether the other side, which has nothing to say now, still holds the connection.
    pub(super) fn is_alive(&self) -> bool {
        matches!(self.stream.peek(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// A text behind its length.
pub(super) fn with_length(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes(), text].concat()
}

pub(super) fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer does not speak the protocol of fp8-dist")
}
