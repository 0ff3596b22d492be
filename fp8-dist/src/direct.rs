//! Moving tensors between ranks directly, without rank 0 in between.
//!
//! The ranks have compared their call before, by an exchange of messages without elements. Each rank then knows how many bytes go to
//! every other rank and come from it, so nothing but elements is sent.

mod moves;
mod reduce;

use crate::Result;
use crate::exchange::Exchange;
pub(crate) use moves::Moves;
pub(crate) use reduce::Reduce;
use std::fmt::Debug;

/// Tensors of more bytes go directly from rank to rank. Smaller ones travel with the messages that the ranks compare, which takes
/// one journey less.
pub(crate) const LARGE: usize = 1 << 17;

/// Connections between all ranks.
pub(crate) trait Direct: Debug + Send + Sync {
    /// Moves the bytes of a job. Every rank calls it after the same exchange. If it fails, the group has failed; the error names
    /// `call`.
    fn run(&self, exchange: &dyn Exchange, call: &str, job: &mut dyn Job) -> Result<()>;
}

/// A rank's part in moving bytes. The other ranks are its peers.
pub(crate) trait Job {
    /// Returns the number of bytes that go to a peer.
    fn bytes_to(&self, peer: usize) -> usize;

    /// Returns the number of bytes that come from a peer.
    fn bytes_from(&self, peer: usize) -> usize;

    /// Returns how many of the bytes that come from a peer do not depend on those of others. If they are late, so is the peer itself.
    fn bytes_owed(&self, peer: usize) -> usize;

    /// Returns bytes that can be sent to a peer that has been sent `sent` bytes. None if they must first be computed.
    fn outgoing(&self, peer: usize, sent: usize) -> &[u8];

    /// Returns room for bytes of a peer that has sent `received` bytes. None if other peers must send first.
    fn incoming(&mut self, peer: usize, received: usize) -> &mut [u8];

    /// Tells that a peer has now sent `received` bytes, which are in the room that it was given.
    fn arrived(&mut self, peer: usize, received: usize);
}
