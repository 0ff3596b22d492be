//! Counts of what a rank has sent to the others of its group.

use crate::ReduceOp;
use crate::message::Operation;
use fp8_kernels::Tensor;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The collectives that a rank has called in one group, and the bytes that it has sent in them.
///
/// Bytes are those of elements, as a ring or a full mesh of n ranks sends them: of a tensor of s bytes, `all_reduce` sends
/// 2 (n − 1) / n · s, `reduce_scatter` (n − 1) / n · s, `all_gather` (n − 1) · s, and the root of a `broadcast` (n − 1) · s. Names,
/// shapes and small tensors that travel by way of rank 0 take a little more, and NCCL may choose another way. Replays of a graph
/// count like the steps that they repeat.
///
/// ```
/// use fp8_dist::{ReduceOp, local};
/// use fp8_kernels::{DType, Device, Tensor};
/// use std::{thread, time::Duration};
///
/// thread::scope(|scope| {
///     for group in local("dp", 2, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || {
///             let x = Tensor::zeros([100], DType::F32, &Device::cpu()).unwrap();
///             group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
///             let sent = group.traffic().reductions;
///             assert_eq!((sent.calls, sent.bytes), (1, 400));
///         });
///     }
/// });
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Sums, averages and maxima: `all_reduce`, `all_reduce_in_place`, `start_all_reduce`, `reduce_scatter`.
    pub reductions: Sent,
    /// Reductions of amaxes: [`AmaxGroup::all_reduce_max`](crate::AmaxGroup::all_reduce_max).
    pub amaxes: Sent,
    /// Gathers and broadcasts, of codes and values.
    pub moves: Sent,
}

impl Traffic {
    /// Returns the bytes of all collectives together.
    pub const fn bytes(&self) -> u64 {
        self.reductions.bytes + self.amaxes.bytes + self.moves.bytes
    }
}

/// Collectives of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sent {
    /// How many there were.
    pub calls: u64,
    /// The bytes of elements that this rank has sent in them.
    pub bytes: u64,
}

/// The counts of a group.
#[derive(Debug, Default)]
pub(crate) struct Counter([Kind; 3]);

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
            Operation::AgreeOnNames
            | Operation::AgreeOnState
            | Operation::Barrier
            | Operation::Split
            | Operation::Connect => return None,
        };
        Some(Self { kind, bytes })
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
        if let Some((entry, kind)) = entry.and_then(|entry| Some((entry, self.0.get(entry.kind)?))) {
            kind.calls.fetch_add(1, Relaxed);
            kind.bytes.fetch_add(entry.bytes, Relaxed);
        }
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let [reductions, amaxes, moves] = [0, 1, 2].map(|kind: usize| {
            let Kind { calls, bytes } = &self.0[kind];
            Sent { calls: calls.load(Relaxed), bytes: bytes.load(Relaxed) }
        });
        Traffic { reductions, amaxes, moves }
    }
}
