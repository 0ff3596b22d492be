//! Reductions: the elements are cut into one part for each rank, its owner. Every rank sends the owner its values of the part; the
//! owner combines them in rank order, piece by piece as they arrive, and returns the result to all.
//!
//! Each rank so sends and receives as many bytes as in a ring, and the order of every sum is that of the ranks.

use super::Job;
use crate::ReduceOp;
use crate::host::Reducible;
use std::ops::Range;

/// The elements that are combined at a time: those of some ranks stay in the cache.
const PIECE: usize = 1 << 14;
/// The elements of a peer that may wait for those of others.
const RING: usize = 16 * PIECE;

/// A reduction of `data`, in place.
#[derive(Debug)]
pub(crate) struct Reduce<'a, T> {
    rank: usize,
    data: &'a mut [T],
    parts: Vec<Range<usize>>,
    op: ReduceOp,
    /// Whether every rank gets the whole result, and not its own part alone.
    gathers: bool,
    /// The newest elements that each peer has sent for this rank's part: element i is at i modulo [`RING`].
    rings: Vec<Vec<T>>,
    /// The number of whole elements that each peer has sent for this rank's part.
    received: Vec<usize>,
    /// The number of elements of this rank's part that are combined.
    done: usize,
    combined: Vec<T>,
}

impl<'a, T: Reducible> Reduce<'a, T> {
    /// A reduction whose result every rank gets.
    pub(crate) fn to_all(rank: usize, world_size: usize, data: &'a mut [T], op: ReduceOp) -> Self {
        // In u128, since the product may not fit.
        let bound = |rank: usize| (data.len() as u128 * rank as u128 / world_size as u128) as usize;
        let parts: Vec<_> = (0..world_size).map(|rank| bound(rank)..bound(rank + 1)).collect();
        let own = parts.get(rank).map_or(0, Range::len);
        let ring = |peer| if peer == rank { Vec::new() } else { vec![T::default(); RING.min(own)] };
        let rings = (0..world_size).map(ring).collect();
        let combined = vec![T::default(); PIECE.min(own)];
        let received = vec![0; world_size];
        Self { rank, data, parts, op, gathers: true, rings, received, done: 0, combined }
    }

    /// A reduction after which each rank has the result in its own part of the data. Its other values are not changed.
    pub(crate) fn to_owners(rank: usize, world_size: usize, data: &'a mut [T], op: ReduceOp) -> Self {
        Self { gathers: false, ..Self::to_all(rank, world_size, data, op) }
    }

    fn part(&self, rank: usize) -> Range<usize> {
        self.parts.get(rank).cloned().unwrap_or_default()
    }

    fn part_bytes(&self, rank: usize) -> usize {
        self.part(rank).len() * size_of::<T>()
    }

    /// The bytes of the elements that are returned to the ranks.
    fn returned_bytes(&self, owner: usize) -> usize {
        if self.gathers { self.part_bytes(owner) } else { 0 }
    }

    /// Combines the elements up to `end` of this rank's part.
    fn combine(&mut self, end: usize) {
        let own = self.part(self.rank);
        let own = own.start + self.done..own.start + end;
        let (first, len) = (self.done % RING, own.len());
        let parts: Vec<&[T]> = self
            .rings
            .iter()
            .enumerate()
            .map(
                |(rank, ring)| {
                    if rank == self.rank { &self.data[own.clone()] } else { &ring[first..first + len] }
                },
            )
            .collect();
        T::combine(&parts, self.op, &mut self.combined[..len]);
        self.data[own].copy_from_slice(&self.combined[..len]);
        self.done = end;
    }
}

impl<T: Reducible> Job for Reduce<'_, T> {
    fn bytes_to(&self, peer: usize) -> usize {
        self.part_bytes(peer) + self.returned_bytes(self.rank)
    }

    fn bytes_from(&self, peer: usize) -> usize {
        self.part_bytes(self.rank) + self.returned_bytes(peer)
    }

    fn bytes_owed(&self, _peer: usize) -> usize {
        self.part_bytes(self.rank)
    }

    fn outgoing(&self, peer: usize, sent: usize) -> &[u8] {
        let (mut range, mut skip) = (self.part(peer), sent);
        let bytes = self.part_bytes(peer);
        if sent >= bytes {
            let start = self.part(self.rank).start;
            (range, skip) = (start..start + self.done, sent - bytes);
        }
        let data: &[u8] = bytemuck::cast_slice(self.data.get(range).unwrap_or_default());
        data.get(skip..).unwrap_or_default()
    }

    fn incoming(&mut self, peer: usize, received: usize) -> &mut [u8] {
        let (size, own) = (size_of::<T>(), self.part_bytes(self.rank));
        if received >= own {
            // The owner has had this rank's values, which it replaces here.
            let part = self.part(peer);
            let data: &mut [u8] = bytemuck::cast_slice_mut(self.data.get_mut(part).unwrap_or_default());
            return data.get_mut(received - own..).unwrap_or_default();
        }
        let room = own.min((self.done + RING) * size) - received;
        let first = received % (RING * size);
        let ring: &mut [u8] =
            self.rings.get_mut(peer).map(|ring| bytemuck::cast_slice_mut(ring)).unwrap_or_default();
        let end = ring.len().min(first + room);
        ring.get_mut(first..end).unwrap_or_default()
    }

    fn arrived(&mut self, peer: usize, received: usize) {
        let own = self.part(self.rank).len();
        if let Some(count) = self.received.get_mut(peer) {
            *count = (received / size_of::<T>()).min(own);
        }
        let others = (0..self.received.len()).filter(|&other| other != self.rank);
        let least = others.map(|other| self.received[other]).min().unwrap_or(own);
        while self.done < own {
            let end = own.min(self.done + PIECE);
            if least < end {
                break;
            }
            self.combine(end);
        }
    }
}
