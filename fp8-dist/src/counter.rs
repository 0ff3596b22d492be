//! Counting what a rank sends.

use crate::message::Operation;
use crate::{ReduceOp, Sent, Traffic};
use fp8_kernels::Tensor;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The counts of a group.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    kinds: [Kind; 3],
    exchanges: AtomicU64,
}

#[derive(Debug, Default)]
struct Kind {
    calls: AtomicU64,
    bytes: AtomicU64,
}

/// One collective, as it is counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    kind: usize,
    bytes: u64,
}

impl Entry {
    /// The entry of a call with `x`; `None` for one that only compares.
    pub(crate) fn of(operation: Operation, x: &Tensor, rank: usize, ranks: usize) -> Option<Self> {
        let (size, ranks) = ((x.numel() * x.dtype().size()) as u64, ranks as u64);
        let others = ranks.saturating_sub(1);
        let (kind, bytes) = match operation {
            Operation::AllReduce(_) => (0, 2 * size * others / ranks.max(1)),
            Operation::ReduceScatter(_) => (0, size * others / ranks.max(1)),
            Operation::AllReduceArena => (1, 2 * size * others / ranks.max(1)),
            Operation::AllGather => (2, size * others),
            Operation::Broadcast { root } => (2, if root == rank { size * others } else { 0 }),
            Operation::Send { .. } => (2, size),
            Operation::AgreeOnNames
            | Operation::AgreeOnState
            | Operation::Barrier
            | Operation::Split
            | Operation::Connect
            | Operation::AllToAll
            | Operation::Receive { .. } => return None,
        };
        Some(Self { kind, bytes })
    }

    /// The entry of an `all_to_all` that sends so many bytes to other ranks.
    pub(crate) const fn of_all_to_all(bytes: usize) -> Option<Self> {
        Some(Self { kind: 2, bytes: bytes as u64 })
    }

    /// The entry of a reduction of so many amaxes.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_amaxes(len: usize, ranks: usize) -> Option<Self> {
        let (bytes, ranks) = ((len * size_of::<f32>()) as u64, ranks as u64);
        Some(Self { kind: 1, bytes: 2 * bytes * ranks.saturating_sub(1) / ranks.max(1) })
    }

    /// The entry of a reduction of several tensors in one call.
    pub(crate) fn of_all(op: ReduceOp, tensors: &[Tensor], rank: usize, ranks: usize) -> Option<Self> {
        let each = tensors.iter().filter_map(|x| Self::of(Operation::AllReduce(op), x, rank, ranks));
        each.reduce(|sum, entry| Self { bytes: sum.bytes + entry.bytes, ..sum })
    }
}

impl Counter {
    pub(crate) fn add(&self, entry: Option<Entry>) {
        if let Some((entry, kind)) = entry.and_then(|entry| Some((entry, self.kinds.get(entry.kind)?))) {
            kind.calls.fetch_add(1, Relaxed);
            kind.bytes.fetch_add(entry.bytes, Relaxed);
        }
    }

    pub(crate) fn add_exchange(&self) {
        self.exchanges.fetch_add(1, Relaxed);
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let [reductions, amaxes, moves] = [0, 1, 2].map(|kind: usize| {
            let Kind { calls, bytes } = &self.kinds[kind];
            Sent { calls: calls.load(Relaxed), bytes: bytes.load(Relaxed) }
        });
        Traffic { reductions, amaxes, moves, exchanges: self.exchanges.load(Relaxed) }
    }
}
