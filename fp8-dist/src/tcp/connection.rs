//! Options and threads of a connection, for both of its ends.

use crate::timed::keep_watch;
use std::io;
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

/// The time that a leaving rank has to tell the others. A rank that cannot send to rank 0 also waits this long for the
/// cause.
pub(super) const GOODBYE: Duration = Duration::from_secs(1);

/// Sets the socket options of a group's connection. Reads wait as long as the connection lasts; writes are [`Timed`].
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    keep_watch(stream)
}

pub(super) fn spawn(what: &str, rank: usize, f: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(format!("{what} {rank}")).spawn(f).map(drop)
}

pub(super) fn closed(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::InvalidData => format!("{error}"),
        io::ErrorKind::TimedOut => format!("its machine does not answer ({error})"),
        io::ErrorKind::UnexpectedEof => "its connection closed; its process has probably ended".to_owned(),
        _ => format!("its connection closed; its process has probably ended ({error})"),
    }
}
