//! The side of rank 0: one that has connected, of whom nothing is known yet.

use super::hello::{Hello, MAX_HELLO, array};
use super::line::{Line, invalid, with_length};
use super::proof::{Challenge, NONCE, Nonce, Role, TAG, random};
use super::{MAGIC, PATIENCE, VERSION, Verdict};
use crate::timed::Until;
use std::io;
use std::net::TcpStream;

/// A conversation with one that has connected.
#[derive(Debug)]
pub(super) struct Visit {
    line: Line,
    nonce: Nonce,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Nothing has come yet.
    New,
    /// The challenge is sent; the rank that the other side says it is, and its nonce.
    Challenged(u64, Nonce),
    /// The last words are on their way.
    Leaving,
    /// They are, to a process of another version, which may still be talking: a connection that is closed with bytes unread
    /// is reset, and that might take the words along.
    Differing,
}

/// What a visitor turned out to be.
#[derive(Debug)]
pub(super) enum Visitor {
    /// Nothing yet.
    Unknown,
    /// A process of another version that says it is this rank.
    Version(u64, u32),
    /// One that says it is this rank and has another token.
    Token(u64),
    /// One that knows the token, with its words and its nonce.
    Known(Box<Hello>, Nonce),
}

impl Visit {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        let line = Line::new(stream, Until::after(PATIENCE))?;
        Ok(Self { line, nonce: random()?, state: State::New })
    }

    /// Goes on as far as it can without waiting. An error ends the visit.
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

    /// Tells one that is known that it is connected already.
    pub(super) fn say_seated(&mut self) -> io::Result<()> {
        self.line.say(&[Verdict::Seated as u8]);
        self.line.flush()
    }

    /// Answers one that is known with the own words and their proof.
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
