//! Gathers and broadcasts: each rank sends what it has to all others.

use super::Job;
use std::ops::Range;

/// The bytes of some ranks, joined on every rank.
#[derive(Debug)]
pub(crate) struct Gather<'a> {
    rank: usize,
    /// The result, which contains this rank's bytes already.
    out: &'a mut [u8],
    /// The place of each rank's bytes in the result; empty if nothing comes from the rank.
    places: Vec<Range<usize>>,
}

impl<'a> Gather<'a> {
    pub(crate) const fn new(rank: usize, out: &'a mut [u8], places: Vec<Range<usize>>) -> Self {
        Self { rank, out, places }
    }

    fn place(&self, rank: usize) -> Range<usize> {
        self.places.get(rank).cloned().unwrap_or_default()
    }
}

impl Job for Gather<'_> {
    fn bytes_to(&self, _peer: usize) -> usize {
        self.place(self.rank).len()
    }

    fn bytes_from(&self, peer: usize) -> usize {
        self.place(peer).len()
    }

    fn bytes_owed(&self, peer: usize) -> usize {
        self.bytes_from(peer)
    }

    fn outgoing(&self, _peer: usize, sent: usize) -> &[u8] {
        let place = self.place(self.rank);
        self.out.get(place.start + sent..place.end).unwrap_or_default()
    }

    fn incoming(&mut self, peer: usize, received: usize) -> &mut [u8] {
        let place = self.place(peer);
        self.out.get_mut(place.start + received..place.end).unwrap_or_default()
    }

    fn arrived(&mut self, _peer: usize, _received: usize) {}
}
