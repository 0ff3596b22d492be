//! Streams with one deadline for a whole exchange.
//!
//! A socket's own time-outs apply to each read and write separately, so a peer that sends or receives one byte at a time never
//! exceeds them. [`Timed`] sets them before each call to the time that is left until a deadline.

use socket2::{SockRef, TcpKeepalive};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The longest time-out that a socket is given.
const DAY: Duration = Duration::from_secs(86_400);

/// A point in time; none if it is beyond the range of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Until(Option<Instant>);

impl Until {
    pub(crate) fn after(deadline: Duration) -> Self {
        Self(Instant::now().checked_add(deadline))
    }

    /// Returns the earlier of this and `patience` from now.
    pub(crate) fn within(self, patience: Duration) -> Self {
        Self(Instant::now().checked_add(self.left(patience)))
    }

    pub(crate) fn plus(self, grace: Duration) -> Self {
        Self(self.0.and_then(|until| until.checked_add(grace)))
    }

    pub(crate) fn is_past(self) -> bool {
        self.0.is_some_and(|until| until <= Instant::now())
    }

    /// Returns the time that is left, at most `most`.
    pub(crate) fn left(self, most: Duration) -> Duration {
        self.0.map_or(most, |until| until.saturating_duration_since(Instant::now()).min(most))
    }

    /// `None`: no limit.
    pub(crate) const fn instant(self) -> Option<Instant> {
        self.0
    }
}

/// A blocking stream whose reads and writes fail with [`io::ErrorKind::TimedOut`] from a point in time on.
#[derive(Debug)]
pub(crate) struct Timed {
    pub(crate) stream: TcpStream,
    pub(crate) until: Until,
}

impl Timed {
    pub(crate) const fn new(stream: TcpStream, until: Until) -> Self {
        Self { stream, until }
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.until.left(DAY);
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }

    /// The error of a socket's time-out differs between operating systems.
    fn named(&self, error: io::Error) -> io::Error {
        match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            io::ErrorKind::TimedOut if self.until.is_past() => io::ErrorKind::TimedOut.into(),
            _ => error,
        }
    }
}

/// Returns true if a [`Timed`] stream has reached its deadline. The system's own time-out, which has an error number, means that
/// the other machine no longer answers.
pub(crate) fn is_late(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut && error.raw_os_error().is_none()
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buffer).map_err(|error| self.named(error))
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes).map_err(|error| self.named(error))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// The time after which a machine that answers nothing is taken for gone.
#[cfg(target_os = "linux")]
const SILENCE: Duration = Duration::from_secs(8);

/// Lets the operating system ask whether the other machine still answers, while neither side sends data: a connection to a machine
/// that is gone ends after 8 seconds. The other machine's system answers by itself, so a process that is busy or stopped keeps its
/// connections.
pub(crate) fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(3))
        .with_interval(Duration::from_secs(1))
        .with_retries(5);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Like [`keep_alive`], and also while data that was sent is not acknowledged, where the system can say so. A process that is stopped
/// does not read, so this is not for more data than the other machine's system holds for it.
pub(crate) fn keep_watch(stream: &TcpStream) -> io::Result<()> {
    keep_alive(stream)?;
    #[cfg(target_os = "linux")]
    SockRef::from(stream).set_tcp_user_timeout(Some(SILENCE))?;
    // As much as the system allows, for the message of a rank to one that is stopped.
    let _ = SockRef::from(stream).set_recv_buffer_size(ROOM);
    Ok(())
}

/// Room for the messages that wait for a process to read them, in bytes.
const ROOM: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn a_peer_that_drips_does_not_move_the_deadline() {
        let (near, mut far) = pair();
        let dripping = thread::spawn(move || {
            while far.write_all(&[7]).is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let started = Instant::now();
        let mut timed = Timed::new(near, Until::after(Duration::from_millis(300)));
        let error = timed.read_exact(&mut [0; 1000]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(started.elapsed() < Duration::from_millis(600), "{:?}", started.elapsed());
        drop(timed);
        dripping.join().unwrap();
    }

    #[test]
    fn a_time_out_of_the_system_is_the_deadline_only_once_that_has_passed() {
        let system = || io::Error::new(io::ErrorKind::TimedOut, "the system's own");
        let (near, _far) = pair();
        let early = Timed::new(near, Until::after(Duration::from_secs(60)));
        assert_eq!(early.named(system()).to_string(), "the system's own");
        assert_eq!(early.named(io::ErrorKind::WouldBlock.into()).kind(), io::ErrorKind::TimedOut);
        let late = Timed { until: Until::after(Duration::ZERO), ..early };
        assert!(late.named(system()).get_ref().is_none(), "the deadline's error has no text of the system's");
    }

    #[test]
    fn a_peer_that_takes_a_byte_at_a_time_does_not_move_the_deadline() {
        let (near, mut far) = pair();
        let taking = thread::spawn(move || {
            while far.read(&mut [0; 1]).is_ok_and(|len| len > 0) {
                thread::sleep(Duration::from_millis(5));
            }
        });
        let started = Instant::now();
        let mut timed = Timed::new(near, Until::after(Duration::from_millis(300)));
        let error = timed.write_all(&vec![0; 32 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(started.elapsed() < Duration::from_millis(900), "{:?}", started.elapsed());
        let _ = timed.stream.shutdown(std::net::Shutdown::Both);
        drop(timed);
        drop(taking); // it reads what was sent before it sees the end
    }
}
