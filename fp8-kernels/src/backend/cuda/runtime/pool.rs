//! Freed blocks of device memory, and those that captured graphs still use.
//!
//! A captured graph contains addresses. Blocks that existed or were allocated during its capture are therefore held, not
//! reused, until the graph is dropped. A block that the capture itself frees can be reused within the same capture.
//!
//! Of several free blocks of a size, the one with the lowest address is taken. Which one that is depends on what is free and
//! not on the order in which it was freed, so steps that allocate and free in the same order use the same addresses. What is
//! kept by address, such as the descriptors of products, is then found again.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Freed blocks by size, and freed blocks that graphs still use.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: BTreeMap<usize, BinaryHeap<Reverse<u64>>>,
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
        let Reverse(address) = self.free.get_mut(&bytes)?.pop()?;
        self.kept -= bytes;
        Some(address)
    }

    pub(super) fn put(&mut self, address: u64, bytes: usize) {
        self.free.entry(bytes).or_default().push(Reverse(address));
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

    /// Returns whether a graph exists.
    pub(super) fn has_graphs(&self) -> bool {
        !self.graphs.is_empty()
    }

    /// Removes the graph of a capture. Returns the held blocks that no other graph may use; none during a capture.
    pub(super) fn drop_graph(&mut self, capture: u64) -> Vec<Freed> {
        self.graphs.remove(&capture);
        if self.recycled.is_some() {
            // The capture under way may use any of them. Its end looks at all of them again.
            return Vec::new();
        }
        let graphs = &self.graphs;
        let is_named = |freed: &mut Freed| graphs.range(freed.born..).next().is_none();
        self.held.extract_if(.., is_named).collect()
    }

    /// Removes and returns all free blocks.
    pub(super) fn drain(&mut self) -> Vec<u64> {
        self.kept = 0;
        std::mem::take(&mut self.free).into_values().flatten().map(|Reverse(address)| address).collect()
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
    fn the_order_in_which_blocks_were_freed_does_not_matter() {
        for order in [[3, 1, 2], [1, 2, 3], [2, 3, 1]] {
            let mut pool = Pool::default();
            order.into_iter().for_each(|address| pool.put(address, 256));
            assert_eq!([(); 3].map(|()| pool.take(256)), [Some(1), Some(2), Some(3)]);
        }
    }

    /// A pool with its buffers and graphs, which knows the addresses that each graph may use.
    #[derive(Default)]
    struct World {
        pool: Pool,
        fresh: u64,
        live: Vec<Freed>,
        /// The current capture: its number, the addresses that it may use, and those that it has both allocated and freed.
        capture: Option<(u64, BTreeSet<u64>, BTreeSet<u64>)>,
        graphs: Vec<(u64, BTreeSet<u64>)>,
    }

    impl World {
        fn alloc(&mut self, bytes: usize) {
            let address = self.pool.take(bytes).unwrap_or_else(|| {
                self.fresh += 1;
                self.fresh
            });
            assert!(self.live.iter().all(|live| live.address != address), "{address} has two buffers");
            assert!(self.graphs.iter().all(|(_, used)| !used.contains(&address)), "a graph uses {address}");
            if let Some((_, used, recycled)) = &mut self.capture {
                assert!(!used.contains(&address) || recycled.remove(&address), "the capture uses {address}");
                used.insert(address);
            }
            self.live.push(Freed { address, bytes, born: self.pool.captures });
        }

        fn free(&mut self, index: usize) {
            let freed = self.live.swap_remove(index);
            match (&mut self.capture, self.pool.release(freed, true)) {
                (Some((number, _, recycled)), None) if freed.born == *number => {
                    recycled.insert(freed.address);
                }
                (Some(_), freed) => assert_eq!(freed, None, "freed while a capture may use it"),
                (None, Some(Freed { address, bytes, .. })) => self.pool.put(address, bytes),
                (None, None) => {}
            }
        }

        fn put(&mut self, freed: Vec<Freed>) {
            freed.into_iter().for_each(|Freed { address, bytes, .. }| self.pool.put(address, bytes));
        }

        fn toggle_capture(&mut self, has_graph: bool) {
            match self.capture.take() {
                None => {
                    let used = self.live.iter().map(|live| live.address).collect();
                    self.capture = Some((self.pool.begin_capture(), used, BTreeSet::new()));
                }
                Some((number, used, _)) => {
                    if has_graph {
                        self.graphs.push((number, used));
                    }
                    let freed = self.pool.end_capture(has_graph);
                    self.put(freed);
                }
            }
        }

        fn drop_graph(&mut self, index: usize) {
            let (number, _) = self.graphs.swap_remove(index);
            let freed = self.pool.drop_graph(number);
            self.put(freed);
        }
    }

    #[test]
    fn no_block_is_used_twice_or_lost_whatever_the_order() {
        for seed in 0..200u64 {
            let (mut world, mut state) = (World::default(), seed);
            let mut below = |most: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % most
            };
            for _ in 0..400 {
                match below(20) {
                    0..9 => world.alloc([256, 512, 4096][below(3)]),
                    9..17 if !world.live.is_empty() => world.free(below(world.live.len())),
                    17 | 18 => world.toggle_capture(below(4) > 0),
                    19 if !world.graphs.is_empty() => world.drop_graph(below(world.graphs.len())),
                    _ => {}
                }
            }
            if world.capture.is_some() {
                world.toggle_capture(true);
            }
            (0..world.live.len()).for_each(|_| world.free(0));
            (0..world.graphs.len()).for_each(|_| world.drop_graph(0));
            let mut all = world.pool.drain();
            assert!(world.pool.drain_held().is_empty(), "held by no graph");
            all.sort_unstable();
            assert_eq!(all, (1..=world.fresh).collect::<Vec<_>>(), "seed {seed}");
        }
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
