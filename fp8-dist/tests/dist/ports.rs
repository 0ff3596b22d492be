//! Ports for the groups of a test, below those that the system hands out by itself.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::sync::Mutex;

/// Ports in a row.
const ROW: u16 = 16;
const FIRST: u16 = 10_000;
const ROWS: u32 = 22_000 / (ROW as u32 + 1);
/// The number of rows that one process keeps for itself. Groups need theirs only while they form.
const KEPT: usize = 200;

/// Returns the first of 16 free ports, which this process alone uses: test programs run side by side. Each row has one port
/// more, whose listener tells the other processes that it is taken.
pub(crate) fn free() -> u16 {
    static TAKEN: Mutex<(u32, VecDeque<TcpListener>)> = Mutex::new((0, VecDeque::new()));
    let (next, kept) = &mut *TAKEN.lock().unwrap();
    let listen = |port: u16| TcpListener::bind(("127.0.0.1", port));
    loop {
        *next += 1;
        let row = std::process::id().wrapping_mul(257).wrapping_add(*next) % ROWS;
        let port = FIRST + row as u16 * (ROW + 1);
        let Ok(sign) = listen(port + ROW) else { continue };
        if (port..port + ROW).all(|port| listen(port).is_ok()) {
            kept.push_back(sign);
            if kept.len() > KEPT {
                kept.pop_front();
            }
            return port;
        }
    }
}
