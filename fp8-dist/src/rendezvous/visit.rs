//! Rank 0's side of a connection whose process is not known yet.

use super::hello::{Hello, MAX_HELLO, array};
use super::line::{Line, invalid, with_length};
use super::proof::{Challenge, NONCE, Nonce, Role, TAG, random};
use super::protocol::{MAGIC, PATIENCE, VERSION, Verdict};
use crate::timed::Until;
use std::io;
use std::net::TcpStream;

/// A conversation with a connected process.
#[derive(Debug)]
pub(super) struct Visit {
    line: Line,
    nonce: Nonce,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Nothing has been received.
    New,
    /// The challenge has been sent. Contains the rank that the other side claims, and its nonce.
    Challenged(u64, Nonce),
    /// The last message is being sent.
    Leaving,
    /// The last message is being sent to a process of another version, which may still be sending. Closing a connection with unread
    /// bytes would reset it, and the message might be lost.
    Differing,
}

/// The facts known so far about a connected process.
#[derive(Debug)]
pub(super) enum Visitor {
    /// Nothing.
    Unknown,
    /// It has another version, and claims this rank.
    Version(u64, u32),
    /// It has another token, and claims this rank.
    Token(u64),
    /// It knows the token. Contains its hello and its nonce.
    Known(Box<Hello>, Nonce),
}

impl Visit {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        let line = Line::new(stream, Until::after(PATIENCE))?;
        Ok(Self { line, nonce: random()?, state: State::New })
    }

    /// Advances as far as possible without blocking. An error ends the conversation.
    pub(super) fn advance(&mut self, token: &str) -> io::Result<Visitor> {
        self.line.flush()?;
        if self.line.is_late() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if matches!(self.state, State::New) {
            let Some(words) = self.line.read(MAGIC.len() + 4 + 8 + NONCE)? else {
                return Ok(Visitor::Unknown);
            };
            let mut words = words.strip_prefix(&MAGIC).ok_or_else(invalid)?;
            let words = &mut words;
            let version = u32::from_le_bytes(array(words).ok_or_else(invalid)?);
            let rank = u64::from_le_bytes(array(words).ok_or_else(invalid)?);
            let nonce = array(words).ok_or_else(invalid)?;
            self.line.say(&[&MAGIC[..], &VERSION.to_le_bytes(), &self.nonce].concat());
            self.line.flush()?;
            if version != VERSION {
                self.state = State::Differing;
                return Ok(Visitor::Version(rank, version));
            }
            self.state = State::Challenged(rank, nonce);
        }
        let (rank, nonce) = match self.state {
            State::Challenged(rank, nonce) => (rank, nonce),
            State::Leaving if self.line.is_flushed() => return Err(io::ErrorKind::ConnectionAborted.into()),
            State::Differing => return self.line.skip().map(|()| Visitor::Unknown),
            State::New | State::Leaving => return Ok(Visitor::Unknown),
        };
        let Some(bytes) = self.line.read_text(MAX_HELLO, TAG)? else { return Ok(Visitor::Unknown) };
        let (words, tag) = bytes.split_last_chunk::<TAG>().ok_or_else(invalid)?;
        let challenge = Challenge { token, nonces: [nonce, self.nonce] };
        self.state = State::Leaving;
        if !challenge.is_proven(Role::Guest, &[words], tag)? {
            self.line.say(&[Verdict::Token as u8]);
            self.line.flush()?;
            return Ok(Visitor::Token(rank));
        }
        let hello = Hello::parse(words).filter(|hello| hello.rank == rank).ok_or_else(invalid)?;
        Ok(Visitor::Known(Box::new(hello), nonce))
    }

    /// Tells a known process that it is already connected.
    pub(super) fn say_seated(&mut self) -> io::Result<()> {
        self.line.say(&[Verdict::Seated as u8]);
        self.line.flush()
    }

    /// Answers a known process with rank 0's hello and its proof.
    pub(super) fn answer(&mut self, guest: &Hello, nonce: Nonce, own: &Hello, token: &str) -> io::Result<()> {
        let challenge = Challenge { token, nonces: [nonce, self.nonce] };
        let words = own.bytes();
        let tag = challenge.prove(Role::Host, &[&guest.bytes(), &words])?;
        self.line.say(&[&[Verdict::Hello as u8][..], &with_length(&words), &tag].concat());
        self.line.flush()
    }

    pub(super) fn into_line(self) -> Line {
        self.line
    }
}
