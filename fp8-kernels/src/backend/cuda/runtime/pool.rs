//! Freed blocks of device memory, and those that captured graphs still use.
//!
//! A captured graph contains addresses. Blocks that existed or were allocated during its capture are therefore held, not
//! reused, until the graph is dropped. A block that the capture itself frees can be reused within the same capture.

use std::collections::{BTreeMap, BTreeSet};

/// Freed blocks by size, and freed blocks that graphs still use.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: BTreeMap<usize, Vec<u64>>,
    pub(super) kept: usize,
    /// The number of captures begun plus the number ended. A block stores the count at its allocation, and a graph that of its
    /// capture. A graph may use blocks whose count is at most its own.
    pub(super) captures: u64,
    /// Blocks that were both allocated and freed by the current capture; `None` outside captures.
    recycled: Option<BTreeMap<usize, Vec<u64>>>,
    /// The graphs that have not been dropped, by the number of their capture.
    graphs: BTreeSet<u64>,
    held: Vec<Freed>,
}

/// A freed block, which captured graphs may still use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Freed {
    pub(super) address: u64,
    pub(super) bytes: usize,
    /// The count of captures when it was allocated.
    pub(super) born: u64,
}

impl Pool {
    pub(super) fn take(&mut self, bytes: usize) -> Option<u64> {
        if let Some(address) = self.recycled.as_mut().and_then(|all| all.get_mut(&bytes)).and_then(Vec::pop) {
            return Some(address);
        }
        let address = self.free.get_mut(&bytes)?.pop()?;
        self.kept -= bytes;
        Some(address)
    }

    pub(super) fn put(&mut self, address: u64, bytes: usize) {
        self.free.entry(bytes).or_default().push(address);
        self.kept += bytes;
    }

    /// Takes a freed block. Returns it if no graph may use it.
    pub(super) fn release(&mut self, freed: Freed, recycles: bool) -> Option<Freed> {
        match &mut self.recycled {
            Some(recycled) if recycles && freed.born == self.captures => {
                recycled.entry(freed.bytes).or_default().push(freed.address);
                None
            }
            recycled => {
                let is_named = recycled.is_some() || self.graphs.range(freed.born..).next().is_some();
                if is_named {
                    self.held.push(freed);
                }
                (!is_named).then_some(freed)
            }
        }
    }

    /// Begins a capture and returns its number.
    pub(super) fn begin_capture(&mut self) -> u64 {
        self.captures += 1;
        self.recycled = Some(BTreeMap::new());
        self.captures
    }

    /// Ends the capture, with or without a graph. Returns the blocks that are free now.
    pub(super) fn end_capture(&mut self, has_graph: bool) -> Vec<Freed> {
        let born = self.captures;
        let recycled = self.recycled.take().unwrap_or_default();
        let freed = |(bytes, addresses): (usize, Vec<u64>)| {
            addresses.into_iter().map(move |address| Freed { address, bytes, born })
        };
        self.held.extend(recycled.into_iter().flat_map(freed));
        if has_graph {
            self.graphs.insert(born);
        }
        // No existing graph uses blocks that are allocated from now on.
        self.captures += 1;
        self.drop_graph(if has_graph { 0 } else { born })
    }

    /// Removes the graph of a capture. Returns the held blocks that no other graph may use.
    pub(super) fn drop_graph(&mut self, capture: u64) -> Vec<Freed> {
        self.graphs.remove(&capture);
        let graphs = &self.graphs;
        let is_named = |freed: &mut Freed| graphs.range(freed.born..).next().is_none();
        self.held.extract_if(.., is_named).collect()
    }

    /// Removes and returns all free blocks.
    pub(super) fn drain(&mut self) -> Vec<u64> {
        self.kept = 0;
        std::mem::take(&mut self.free).into_values().flatten().collect()
    }

    /// Removes and returns all held blocks, once no graph is left.
    pub(super) fn drain_held(&mut self) -> Vec<u64> {
        self.held.drain(..).map(|freed| freed.address).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_gives_back_what_it_was_given() {
        let mut pool = Pool::default();
        pool.put(7, 256);
        assert_eq!((pool.take(512), pool.take(256), pool.take(256)), (None, Some(7), None));
        pool.put(7, 256);
        pool.put(9, 512);
        assert_eq!((pool.kept, pool.drain(), pool.kept), (768, vec![7, 9], 0));
    }

    #[test]
    fn what_a_graph_names_is_held_until_it_goes() {
        let mut pool = Pool::default();
        let block = |address, born| Freed { address, bytes: 256, born };
        assert_eq!(pool.release(block(1, 0), true), Some(block(1, 0)));
        let first = pool.begin_capture();
        assert_eq!(pool.release(block(2, 0), true), None); // older than the capture, which may have used it
        assert_eq!(pool.release(block(3, first), true), None);
        assert_eq!(pool.take(256), Some(3)); // freed by the capture itself
        assert_eq!(pool.release(block(3, first), true), None);
        assert_eq!(pool.end_capture(true), []);
        let second = pool.begin_capture();
        assert_eq!(pool.release(block(4, first), true), None);
        assert_eq!(pool.end_capture(true), []);
        assert_eq!(pool.release(block(5, second), true), None);
        assert_eq!(pool.drop_graph(first), []); // the second capture came later than all of them
        assert_eq!(pool.drop_graph(second).len(), 4);
        assert_eq!(pool.release(block(6, 0), true), Some(block(6, 0)));
        pool.begin_capture();
        assert_eq!(pool.release(block(7, 0), true), None);
        assert_eq!(pool.end_capture(false), [block(7, 0)]); // no graph came of it
    }
}
