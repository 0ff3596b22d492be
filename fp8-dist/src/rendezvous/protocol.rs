//! The protocol's constants, times and answers.

use std::time::Duration;

/// The number of ports that rank 0 may choose from.
pub(super) const PORTS: u16 = 16;

pub(super) const MAGIC: [u8; 8] = *b"fp8-dist";

/// The version of the protocol. Elements are sent in the sender's byte order, so machines of different byte order have different
/// versions.
pub(super) const VERSION: u32 = if cfg!(target_endian = "little") { 7 } else { 7 | 1 << 16 };

pub(super) const VERSION_NAME: &str = "the version of the protocol";

/// The time limit for two processes to introduce themselves.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The time that a seated rank waits for rank 0's message after the deadline, which rank 0 enforces.
pub(super) const GRACE: Duration = Duration::from_secs(2);

pub(super) const TICK: Duration = Duration::from_millis(2);

/// The longest group id or run id, in bytes.
pub(super) const MAX_TEXT: usize = 4096;

/// Rank 0's answer to a guest's proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Verdict {
    /// The proof is wrong. Nothing follows.
    Token = 0,
    /// Rank 0's hello and proof follow.
    Hello = 1,
    /// This process is already connected. Nothing follows.
    Seated = 2,
}

impl Verdict {
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        [Self::Token, Self::Hello, Self::Seated].into_iter().find(|verdict| bytes == [*verdict as u8])
    }
}
