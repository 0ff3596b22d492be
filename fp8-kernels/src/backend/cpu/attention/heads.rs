//! Heads of queries, keys and values, and products of their rows.

use super::super::matmul::{Strided, Unpacked, product, transpose};
use super::super::parallel;
use crate::Result;
use crate::host::Array;
use crate::ops::Problem;

/// One head of one batch entry: rows of `[.., heads, head_dim]`.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
}

impl<'a> Head<'a> {
    pub(super) fn new(
        data: &'a [f32],
        rows: usize,
        heads: usize,
        dim: usize,
        batch: usize,
        head: usize,
    ) -> Self {
        let start = batch * rows * heads * dim + head * dim;
        Self { data: data.get(start..).unwrap_or_default(), stride: heads * dim, dim }
    }

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
    /// Transposes the first `seen` of the `keys` that each batch entry has.
    pub(super) fn new(
        op: &'static str,
        data: &[f32],
        [keys, seen]: [usize; 2],
        p: &Problem<'_>,
    ) -> Result<Self> {
        // A sequence may begin at any key, and its last vector of scores reaches beyond its keys.
        let (stride, dim) = (seen.next_multiple_of(LANES) + LANES, p.head_dim);
        let mut out = Array::zeroed(op, p.batch * p.groups * dim * stride)?;
        if seen > 0 {
            parallel::try_for_each(out.chunks_mut(dim * stride).enumerate(), |(index, out)| {
                let x = Head::new(data, keys, p.groups, dim, index / p.groups, index % p.groups);
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
