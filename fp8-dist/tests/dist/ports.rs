//! Ports for groups of one test program, below those that the system hands out by itself.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// A port that nobody listens at, given to one caller only; so are the 15 behind it.
pub(crate) fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let offset =
            std::process::id().wrapping_mul(4096).wrapping_add(NEXT.fetch_add(16, Ordering::Relaxed));
        let port = 10_000 + (offset % 22_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
