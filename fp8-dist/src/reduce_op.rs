//! The operations of reductions.

use std::fmt;

/// The operation that combines the values of all ranks, elementwise.
///
/// f32, bf16 and f16 have all operations, i32 has `Sum` and `Max`. See the example of [`ProcessGroup`](crate::ProcessGroup).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. `local` and `tcp` add in rank order, `((rank 0 + rank 1) + rank 2) + …`, in f32, and round the sum to the dtype
    /// once. `nccl` adds in an order of its own, and may round 16-bit values after each addition. All ranks of a group get the
    /// same bits. A sum of i32 that does not fit into i32 is an error.
    Sum,
    /// The sum, as `Sum` computes it in f32, divided by the number of ranks before it is rounded. `nccl` multiplies each value by
    /// 1 / n instead, in its dtype, and adds then. Not for i32.
    Avg,
    /// The maximum. −0 is less than 0; NaN is greater than infinity, so it wins. (NCCL does not define the maximum of NaN.)
    Max,
}

impl ReduceOp {
    /// Returns `sum`, `avg` or `max`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Max => "max",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
