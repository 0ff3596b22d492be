//! Heads of queries, keys and values, and products of their rows.

use super::super::matmul::{Strided, Unpacked, product, transpose};
use super::super::{Widened, parallel};
use crate::host::Array;
use crate::ops::{Heads, Problem};
use crate::{DType, Result};

/// The heads of an operand in f32, of all batch entries.
pub(super) struct AllHeads<'a> {
    data: Widened<'a>,
    /// The values from one row to the next, and the first one that is a head's.
    stride: usize,
    first: usize,
    /// The rows of a batch entry that are there.
    rows: usize,
    dim: usize,
}

impl<'a> AllHeads<'a> {
    pub(super) fn of(op: &'static str, heads: Heads<'a>) -> Result<Self> {
        Self::firsts(op, heads, usize::MAX)
    }

    /// At least the first `count` rows of each batch entry.
    pub(super) fn firsts(op: &'static str, heads: Heads<'a>, count: usize) -> Result<Self> {
        let [rows, number, dim] = [1, 2, 3].map(|i| heads.shape().get(i).copied().unwrap_or_default());
        let (tensor, width) = (heads.tensor(), number * dim);
        if tensor.dtype() == DType::F32 {
            let data = tensor.cpu_f32(op)?;
            return Ok(Self { data, stride: heads.pitch(), first: heads.first(), rows, dim });
        }
        // What is not read as it is, is converted, and nothing else.
        if heads.is_whole() {
            if count >= rows {
                return Ok(Self { data: tensor.cpu_f32(op)?, stride: width, first: 0, rows, dim });
            }
            let data = tensor.cpu_buffer(op)?.read_f32_parts(op, rows * width, 0..count * width)?;
            return Ok(Self { data: Widened::Copied(data), stride: width, first: 0, rows: count, dim });
        }
        let part = heads.first()..heads.first() + width;
        let data = tensor.cpu_buffer(op)?.read_f32_parts(op, heads.pitch(), part)?;
        Ok(Self { data: Widened::Copied(data), stride: width, first: 0, rows, dim })
    }

    pub(super) fn head(&self, batch: usize, head: usize) -> Head<'_> {
        let start = batch * self.rows * self.stride + self.first + head * self.dim;
        Head { data: self.data.get(start..).unwrap_or_default(), stride: self.stride, dim: self.dim }
    }
}

/// One head of one batch entry.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
}

impl<'a> Head<'a> {
    #[inline(always)]
    pub(super) fn row(self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..i * self.stride + self.dim]
    }

    /// Without the first `rows`.
    pub(super) fn skip(self, rows: usize) -> Self {
        Self { data: self.data.get(rows * self.stride..).unwrap_or_default(), ..self }
    }

    /// The rows from `first` on.
    #[inline(always)]
    pub(super) fn from(self, first: usize) -> Strided<'a> {
        Strided { data: &self.data[first * self.stride..], row: self.stride, step: 1 }
    }
}

/// Keys of one block of scores.
pub(in super::super) const KEYS: usize = 64;
/// Queries of one block of scores. Fewer than keys: less is computed of what a causal mask hides.
pub(in super::super) const QUERIES: usize = 32;
/// Rows of scores are computed up to a multiple of this, in vectors without a rest.
pub(super) const LANES: usize = 16;
// Whole blocks of queries end where blocks of keys do: a row is multiplied with no hidden key behind its own block of keys.
const _: () = assert!(KEYS.is_multiple_of(LANES) && KEYS.is_multiple_of(QUERIES));

/// A block of scores, one row a query. What a row holds behind its last key is not defined.
pub(in super::super) type Block = [f32; QUERIES * KEYS];

/// `[head_dim, keys]` for each batch entry and group, with rows of `stride` values, a multiple of [`LANES`].
pub(super) struct Transposed {
    data: Array<f32>,
    stride: usize,
    dim: usize,
}

impl Transposed {
    /// Transposes the first `seen` keys of each batch entry.
    pub(super) fn new(op: &'static str, keys: &AllHeads<'_>, seen: usize, p: &Problem<'_>) -> Result<Self> {
        // A sequence may begin at any key, and its last vector of scores reaches beyond its keys.
        let (stride, dim) = (seen.next_multiple_of(LANES) + LANES, p.head_dim);
        let mut out = Array::zeroed(op, p.batch * p.groups * dim * stride)?;
        if seen > 0 {
            parallel::try_for_each(out.chunks_mut(dim * stride).enumerate(), |(index, out)| {
                let x = keys.head(index / p.groups, index % p.groups);
                transpose([seen, dim], x.data, x.stride, out, stride)
            })?;
        }
        Ok(Self { data: out, stride, dim })
    }

    pub(super) fn head(&self, index: usize) -> TransposedHead<'_> {
        let len = self.dim * self.stride;
        TransposedHead { data: &self.data[index * len..(index + 1) * len], stride: self.stride }
    }
}

#[derive(Clone, Copy)]
pub(super) struct TransposedHead<'a> {
    data: &'a [f32],
    stride: usize,
}

impl TransposedHead<'_> {
    /// Without the first `keys`.
    pub(super) fn skip(self, keys: usize) -> Self {
        Self { data: self.data.get(keys..).unwrap_or_default(), ..self }
    }
}

/// The keys of a head.
pub(super) enum Keys<'a> {
    Transposed(TransposedHead<'a>),
    /// Rows, and room for a block of them, transposed.
    Rows(Head<'a>, Array<f32>),
}

impl Keys<'_> {
    /// `out = q · kᵀ` for `count` rows of `q` from `first` on and `cols` keys from `start` on.
    #[inline(always)]
    pub(super) fn scores(
        &mut self,
        rows: [usize; 2],
        [start, cols]: [usize; 2],
        q: Head<'_>,
        out: &mut Block,
    ) -> Result<()> {
        match self {
            Self::Transposed(keys) => scores(rows, [start, cols], q, *keys, out),
            Self::Rows(keys, room) => {
                transpose([cols, keys.dim], keys.from(start).data, keys.stride, room, KEYS)?;
                scores(rows, [0, cols], q, TransposedHead { data: room, stride: KEYS }, out)
            }
        }
    }
}

/// `out = x · yᵀ` for `count` rows of `x` from `first` on and `cols` keys of `y` from `start` on.
#[inline(always)]
pub(super) fn scores(
    [first, count]: [usize; 2],
    [start, cols]: [usize; 2],
    x: Head<'_>,
    y: TransposedHead<'_>,
    out: &mut Block,
) -> Result<()> {
    let dims = [count, cols.next_multiple_of(LANES), x.dim];
    let (b, b_stride, out_stride) = (&y.data[start..], y.stride, KEYS);
    product(Unpacked { dims, a: x.from(first), b, b_stride, out, out_stride, accumulate: false })
}

/// `out += x · y`, where `out` has rows of `head_dim`, and `y` begins with row `first`.
#[inline(always)]
pub(super) fn add_product(
    rows: usize,
    x: Strided<'_>,
    y: Head<'_>,
    [first, k]: [usize; 2],
    out: &mut [f32],
) -> Result<()> {
    let (dims, out_stride) = ([rows, y.dim, k], y.dim);
    let (b, b_stride) = (y.from(first).data, y.stride);
    product(Unpacked { dims, a: x, b, b_stride, out, out_stride, accumulate: true })
}
