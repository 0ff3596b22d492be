//! Gathers, broadcasts and exchanges: bytes that go from rank to rank as they are.

use super::Job;
use std::ops::Range;

/// The bytes that this rank has for each of the others, and the room for theirs.
#[derive(Debug)]
pub(crate) struct Moves<'a> {
    own: &'a [u8],
    out: &'a mut [u8],
    /// The place in `own` of each rank's bytes; empty if the rank gets none.
    sent: Vec<Range<usize>>,
    /// The place in `out` of the bytes of each rank; empty if none come from it.
    received: Vec<Range<usize>>,
}

impl<'a> Moves<'a> {
    pub(crate) const fn new(
        own: &'a [u8],
        out: &'a mut [u8],
        sent: Vec<Range<usize>>,
        received: Vec<Range<usize>>,
    ) -> Self {
        Self { own, out, sent, received }
    }
}

fn place(places: &[Range<usize>], rank: usize) -> Range<usize> {
    places.get(rank).cloned().unwrap_or_default()
}

impl Job for Moves<'_> {
    fn bytes_to(&self, peer: usize) -> usize {
        place(&self.sent, peer).len()
    }

    fn bytes_from(&self, peer: usize) -> usize {
        place(&self.received, peer).len()
    }

    fn bytes_owed(&self, peer: usize) -> usize {
        self.bytes_from(peer)
    }

    fn outgoing(&self, peer: usize, sent: usize) -> &[u8] {
        let place = place(&self.sent, peer);
        self.own.get(place.start + sent..place.end).unwrap_or_default()
    }

    fn incoming(&mut self, peer: usize, received: usize) -> &mut [u8] {
        let place = place(&self.received, peer);
        self.out.get_mut(place.start + received..place.end).unwrap_or_default()
    }

    fn arrived(&mut self, _peer: usize, _received: usize) {}
}
