//! Peers that send or take one byte at a time, or nothing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[cfg(target_os = "linux")]
use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
#[cfg(target_os = "linux")]
use std::net::{Shutdown, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

/// Connects as soon as something listens at `port`.
pub(crate) fn connect(port: u16) -> TcpStream {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < until, "nothing listens at port {port}: {error}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Sends `bytes`, one every `pace`, until they are sent or the connection closes.
pub(crate) fn drip(mut stream: &TcpStream, bytes: &[u8], pace: Duration) {
    for byte in bytes {
        if stream.write_all(&[*byte]).is_err() {
            return;
        }
        thread::sleep(pace);
    }
}

/// An address of this machine other than 127.0.0.1: all of Linux's loopback network is its own.
#[cfg(target_os = "linux")]
pub(crate) const NEAR: &str = "127.0.0.2";

/// Passes on what comes to and from `port` of [`NEAR`] to the same port of 127.0.0.1. Whenever `up` or `down` returns a
/// pause, each byte that goes to 127.0.0.1 or comes from there waits for so long.
#[cfg(target_os = "linux")]
pub(crate) fn proxy<F: Fn() -> Option<Duration> + Copy + Send + 'static>(port: u16, up: F, down: F) {
    let listener = TcpListener::bind((NEAR, port)).unwrap();
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            for (from, to, pace) in [(&near, &far, up), (&far, &near, down)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || {
                    pass_on(&from, &to, &pace);
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
}

#[cfg(target_os = "linux")]
fn pass_on(mut from: &TcpStream, mut to: &TcpStream, pace: &impl Fn() -> Option<Duration>) {
    let mut buffer = [0; 4096];
    loop {
        let Ok(len) = from.read(&mut buffer) else { return };
        let sent = match pace() {
            None => to.write_all(&buffer[..len]),
            Some(pace) => buffer[..len].iter().try_for_each(|byte| {
                thread::sleep(pace);
                to.write_all(&[*byte])
            }),
        };
        if len == 0 || sent.is_err() {
            return;
        }
    }
}
