//! The connecting side: a rank that looks for its rank 0, or a rank 0 that looks for the rank 0 of another job.

use super::hello::{Hello, MAX_HELLO};
use super::line::{Line, invalid, with_length};
use super::proof::{Challenge, NONCE, Nonce, Role, TAG, random};
use super::protocol::{MAGIC, PATIENCE, VERSION, Verdict};
use crate::timed::Until;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::net::SocketAddr;

/// A conversation with the listener at an address.
#[derive(Debug)]
pub(super) struct Call {
    state: State,
    nonce: Nonce,
    until: Until,
}

#[derive(Debug)]
enum State {
    Connecting(Socket),
    /// The greeting has been sent.
    Asked(Line),
    /// The hello has been sent.
    Introduced(Line, Nonce),
    /// The other side has accepted the proof.
    Accepted(Line, Nonce),
    Over,
}

/// The result of a call.
#[derive(Debug)]
pub(super) enum Answer {
    /// The call has not ended.
    None,
    /// A rank 0 that has proved that it knows the token, and the connection to it.
    Rank0(Box<Hello>, Line),
    /// A rank 0 with another version of the protocol.
    Version(u32),
    /// A rank 0 with another token.
    Token,
    /// A rank 0 to which this process is already connected.
    Seated,
}

impl Call {
    /// Starts connecting.
    pub(super) fn new(address: SocketAddr, until: Until) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        // Errors, including one that says that connecting takes time, are handled later.
        let begun = socket.connect(&SockAddr::from(address));
        if let Err(error) = begun
            && !is_pending(&error)
        {
            return Err(error);
        }
        Ok(Self { state: State::Connecting(socket), nonce: random()?, until: until.within(PATIENCE) })
    }

    /// Returns true if something that speaks the protocol has answered.
    pub(super) const fn is_answered(&self) -> bool {
        matches!(self.state, State::Introduced(..) | State::Accepted(..))
    }

    /// Advances as far as possible without blocking. An error or an answer ends the call.
    pub(super) fn advance(&mut self, own: &Hello, token: &str) -> io::Result<Answer> {
        if self.until.is_past() {
            let silent = match self.state {
                State::Connecting(_) => "no connection",
                _ => "no answer of a rank",
            };
            return Err(io::Error::new(io::ErrorKind::TimedOut, silent));
        }
        loop {
            // Put back if it must wait.
            match std::mem::replace(&mut self.state, State::Over) {
                State::Connecting(socket) => {
                    if let Some(error) = socket.take_error()? {
                        return Err(error);
                    }
                    let Ok(peer) = socket.peer_addr() else {
                        self.state = State::Connecting(socket);
                        return Ok(Answer::None);
                    };
                    // If nothing listens there, the system may assign the socket the port that it connects to.
                    if socket.local_addr()?.as_socket() == peer.as_socket() {
                        return Err(io::ErrorKind::ConnectionRefused.into());
                    }
                    let mut line = Line::new(socket.into(), self.until)?;
                    let version = VERSION.to_le_bytes();
                    line.say(&[&MAGIC[..], &version, &own.rank.to_le_bytes(), &self.nonce].concat());
                    self.state = State::Asked(line);
                }
                State::Asked(mut line) => {
                    line.flush()?;
                    let Some(words) = line.read(MAGIC.len() + 4 + NONCE)? else {
                        self.state = State::Asked(line);
                        return Ok(Answer::None);
                    };
                    let words = words.strip_prefix(&MAGIC).and_then(<[u8]>::split_first_chunk);
                    let (version, nonce) = words.ok_or_else(invalid)?;
                    let version = u32::from_le_bytes(*version);
                    if version != VERSION {
                        return Ok(Answer::Version(version));
                    }
                    let nonce = Nonce::try_from(nonce).map_err(|_| invalid())?;
                    let hello = own.bytes();
                    let tag = self.challenge(token, nonce).prove(Role::Guest, &[&hello])?;
                    line.say(&with_length(&hello));
                    line.say(&tag);
                    self.state = State::Introduced(line, nonce);
                }
                State::Introduced(mut line, nonce) => {
                    line.flush()?;
                    let Some(verdict) = line.read(1)? else {
                        self.state = State::Introduced(line, nonce);
                        return Ok(Answer::None);
                    };
                    match Verdict::parse(&verdict).ok_or_else(invalid)? {
                        Verdict::Token => return Ok(Answer::Token),
                        Verdict::Seated => return Ok(Answer::Seated),
                        Verdict::Hello => self.state = State::Accepted(line, nonce),
                    }
                }
                State::Accepted(mut line, nonce) => {
                    let Some(bytes) = line.read_text(MAX_HELLO, TAG)? else {
                        self.state = State::Accepted(line, nonce);
                        return Ok(Answer::None);
                    };
                    let (hello, tag) = bytes.split_last_chunk::<TAG>().ok_or_else(invalid)?;
                    let challenge = self.challenge(token, nonce);
                    if !challenge.is_proven(Role::Host, &[&own.bytes(), hello], tag)? {
                        return Ok(Answer::Token);
                    }
                    let hello = Hello::parse(hello).ok_or_else(invalid)?;
                    return Ok(Answer::Rank0(Box::new(hello), line));
                }
                State::Over => return Ok(Answer::None),
            }
        }
    }

    const fn challenge<'a>(&self, token: &'a str, nonce: Nonce) -> Challenge<'a> {
        Challenge { token, nonces: [self.nonce, nonce] }
    }
}

/// Returns true for the error of a connection in progress: "in progress" on Unix, "would block" on Windows.
fn is_pending(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error().is_some_and(is_in_progress)
}

#[cfg(unix)]
fn is_in_progress(code: i32) -> bool {
    const LINUX: i32 = 115;
    const BSD: i32 = 36;
    code == if cfg!(any(target_os = "linux", target_os = "android")) { LINUX } else { BSD }
}

#[cfg(not(unix))]
fn is_in_progress(_code: i32) -> bool {
    false
}
