//! The part of a parameter that a rank has.

use crate::Result;
use fp8_kernels::{DType, Element, Shape, Tensor, bf16, f16};
use std::ops::Range;
use std::sync::Arc;

/// Tells which part of a parameter, and of its gradient, is on this rank. Reductions, norms, comparisons of replicas and checkpoints
/// follow it.
///
/// | placement | value | gradient after backward |
/// |---|---|---|
/// | `Whole` | equal on all ranks | equal on all ranks |
/// | `Partial` | equal on all ranks | a part of the sum, which [`all_reduce_gradients`](crate::all_reduce_gradients) completes |
/// | `Cut` | this rank's rows or columns | those of the value |
///
/// Without [tensor parallelism](crate::TensorParallel), parameters are `Whole`.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::{Placement, TensorParallel, TensorParallelOptions};
/// use std::{thread, time::Duration};
///
/// let run = |group| -> Result<()> {
///     let tensor_parallel = TensorParallel::new(group, &TensorParallelOptions::default())?;
///     let options = LinearOptions { in_features: 4, out_features: 6, tensor_parallel, ..Default::default() };
///     let fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
///     let Placement::Cut(cut) = fc.weight().placement() else { panic!("its rows are cut") };
///     assert_eq!((cut.dim(), &**cut.global(), &**fc.weight().shape()), (0, &[6, 4][..], &[3, 4][..]));
///     Ok(())
/// };
/// thread::scope(|scope| {
///     let groups = local("tp", 2, Duration::from_secs(10))?.into_iter();
///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Placement {
    /// Equal on all ranks, with its gradient.
    #[default]
    Whole,
    /// Equal on all ranks. Each rank computes a part of its gradient.
    Partial,
    /// This rank has some rows or columns.
    Cut(Cut),
}

/// The ranges of a dimension of a parameter that each rank has. See [`Placement`] for an example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    dim: usize,
    global: Shape,
    /// For each rank, in ascending order. Together they cover the dimension.
    of_ranks: Arc<[Vec<Range<usize>>]>,
    rank: usize,
}

impl Cut {
    /// Cuts dimension `dim` of `global`, whose consecutive `parts` are cut evenly each: rank r of n has elements ⌊p·r/n⌋ to
    /// ⌊p·(r + 1)/n⌋ of a part of p.
    pub(crate) fn of_parts(dim: usize, global: Shape, parts: &[usize], rank: usize, ranks: usize) -> Self {
        let of_rank = |rank: usize| {
            let mut start = 0;
            let range = |&part: &usize| {
                let range = start + share(part, rank, ranks)..start + share(part, rank + 1, ranks);
                start += part;
                range
            };
            parts.iter().map(range).collect()
        };
        Self { dim, global, of_ranks: (0..ranks).map(of_rank).collect(), rank }
    }

    /// The cut of a tensor of which this one's dimension is the range `of`, as low-rank adapters have some rows of a weight.
    pub(crate) fn within(&self, dim: usize, global: Shape, of: &Range<usize>) -> Self {
        let inside = |range: &Range<usize>| {
            let (start, end) = (range.start.max(of.start), range.end.min(of.end));
            (start < end).then(|| start - of.start..end - of.start)
        };
        let of_ranks =
            self.of_ranks.iter().map(|ranges| ranges.iter().filter_map(inside).collect()).collect();
        Self { dim, global, of_ranks, rank: self.rank }
    }

    /// Returns the rows of this rank's part that are in the range `of` of the whole: where they begin, and how many.
    pub(crate) fn local_range(&self, of: &Range<usize>) -> Range<usize> {
        let (mut start, mut before, mut len) = (None, 0, 0);
        for range in self.ranges() {
            let inside = range.start.max(of.start)..range.end.min(of.end);
            if !inside.is_empty() {
                start.get_or_insert(before + (inside.start - range.start));
                len += inside.len();
            }
            before += range.len();
        }
        let start = start.unwrap_or(before);
        start..start + len
    }

    /// Returns the first rank that has nothing, if there is one.
    pub(crate) fn rank_without_any(&self) -> Option<usize> {
        self.of_ranks.iter().position(Vec::is_empty)
    }

    /// Returns the dimension that is cut.
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Returns the shape of the whole parameter.
    pub const fn global(&self) -> &Shape {
        &self.global
    }

    /// Returns the ranges of the whole along [`dim`](Self::dim) that this rank has, in ascending order.
    pub fn ranges(&self) -> &[Range<usize>] {
        self.of_ranks.get(self.rank).map_or(&[], Vec::as_slice)
    }

    /// Returns the cut of a tensor that has an element for each `block` consecutive elements of a row, all dimensions but the last being
    /// rows; `None` if a rank has a part of a block.
    pub(crate) fn of_blocks(&self, block: usize) -> Option<Self> {
        let [rows, cols] = self.global.matrix();
        let global = Shape::from([rows, cols.div_ceil(block)]);
        if self.global.len() == 2 && self.dim == 0 {
            return Some(Self { global, ..self.clone() });
        }
        let is_whole = |range: &Range<usize>| {
            range.start.is_multiple_of(block) && (range.end.is_multiple_of(block) || range.end == cols)
        };
        let mut all = self.of_ranks.iter().flatten();
        if self.dim + 1 != self.global.len() || !all.all(is_whole) {
            return None;
        }
        let blocks = |range: &Range<usize>| range.start / block..range.end.div_ceil(block);
        let of_ranks = self.of_ranks.iter().map(|ranges| ranges.iter().map(blocks).collect()).collect();
        Some(Self { dim: 1, global, of_ranks, rank: self.rank })
    }

    /// Returns the shape of a rank's part.
    pub(crate) fn shape_of(&self, rank: usize) -> Shape {
        let ranges = self.of_ranks.get(rank).map_or(&[][..], Vec::as_slice);
        let mut dims = self.global.to_vec();
        if let Some(size) = dims.get_mut(self.dim) {
            *size = ranges.iter().map(Range::len).sum();
        }
        Shape::from_slice(&dims).unwrap_or(self.global)
    }

    /// Returns the shape of this rank's part.
    pub(crate) fn shape(&self) -> Shape {
        self.shape_of(self.rank)
    }

    /// The runs of consecutive elements of the whole that a rank's part consists of.
    fn runs(&self, rank: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let size = self.global.get(self.dim).copied().unwrap_or(1);
        let inner: usize = self.global.iter().skip(self.dim + 1).product();
        let outer: usize = self.global.iter().take(self.dim).product();
        let ranges = self.of_ranks.get(rank).map_or(&[][..], Vec::as_slice);
        (0..outer).flat_map(move |row| {
            let run = move |range: &Range<usize>| {
                (row * size + range.start) * inner..(row * size + range.end) * inner
            };
            ranges.iter().map(run)
        })
    }

    /// Returns this rank's part of the elements of the whole.
    pub(crate) fn part_of<T: Copy>(&self, whole: &[T]) -> Vec<T> {
        self.runs(self.rank).flat_map(|run| whole.get(run).unwrap_or_default()).copied().collect()
    }

    /// Cuts this rank's part out of a tensor of the whole.
    pub(crate) fn part(&self, whole: &Tensor) -> Result<Tensor> {
        fn of<T: Element>(cut: &Cut, whole: &Tensor) -> Result<Tensor> {
            let part = match whole.as_slice::<T>() {
                Ok(whole) => cut.part_of(whole),
                Err(_) => cut.part_of(&whole.to_vec::<T>()?),
            };
            Ok(Tensor::from_vec(part, cut.shape(), whole.device())?)
        }
        match whole.dtype() {
            DType::F32 => of::<f32>(self, whole),
            DType::BF16 => of::<bf16>(self, whole),
            DType::F16 => of::<f16>(self, whole),
            DType::I32 => of::<i32>(self, whole),
            DType::U8 => of::<u8>(self, whole),
        }
    }

    /// Writes a rank's part to its places in the elements of the whole.
    pub(crate) fn place<T: Copy>(&self, rank: usize, part: &[T], whole: &mut [T]) {
        let mut rest = part;
        for run in self.runs(rank) {
            let Some((part, others)) = rest.split_at_checked(run.len()) else { return };
            if let Some(place) = whole.get_mut(run) {
                place.copy_from_slice(part);
            }
            rest = others;
        }
    }

    /// Joins the parts of all ranks, whose elements follow each other in `all`.
    pub(crate) fn join(&self, all: &Tensor) -> Result<Tensor> {
        fn of<T: Element + Default>(cut: &Cut, all: &Tensor) -> Result<Tensor> {
            let parts = all.to_vec::<T>()?;
            let mut whole = vec![T::default(); cut.global.numel()];
            let mut rest = parts.as_slice();
            for rank in 0..cut.of_ranks.len() {
                let Some((part, others)) = rest.split_at_checked(cut.shape_of(rank).numel()) else { break };
                cut.place(rank, part, &mut whole);
                rest = others;
            }
            Ok(Tensor::from_vec(whole, cut.global, all.device())?)
        }
        match all.dtype() {
            DType::F32 => of::<f32>(self, all),
            DType::BF16 => of::<bf16>(self, all),
            DType::F16 => of::<f16>(self, all),
            DType::I32 => of::<i32>(self, all),
            DType::U8 => of::<u8>(self, all),
        }
    }
}

/// The first element of rank `rank` of `ranks` in a dimension of `size`.
pub(crate) fn share(size: usize, rank: usize, ranks: usize) -> usize {
    let (quotient, remainder) = (size / ranks, size % ranks);
    quotient * rank + remainder * rank / ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_kernels::Device;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_of_all_ranks_are_the_whole(
            dims in prop::collection::vec(1usize..6, 1..4),
            dim in 0usize..3,
            first in 0usize..6,
            ranks in 1usize..5,
        ) {
            let dim = dim % dims.len();
            let first = first.min(dims[dim]);
            let shape = Shape::from_slice(&dims).unwrap();
            let whole: Vec<i32> = (0..shape.numel() as i32).collect();
            let whole = Tensor::from_vec(whole, shape, &Device::cpu()).unwrap();
            let cut = |rank| Cut::of_parts(dim, shape, &[first, dims[dim] - first], rank, ranks);
            let parts: Vec<i32> = (0..ranks)
                .flat_map(|rank| {
                    let part = cut(rank).part(&whole).unwrap();
                    assert_eq!(*part.shape(), cut(rank).shape());
                    part.to_vec::<i32>().unwrap()
                })
                .collect();
            let all = Tensor::from_vec(parts, [shape.numel()], &Device::cpu()).unwrap();
            let joined = cut(0).join(&all).unwrap();
            prop_assert_eq!(joined.to_vec::<i32>().unwrap(), whole.to_vec::<i32>().unwrap());
        }
    }

    #[test]
    fn blocks_of_a_row_are_cut_where_ranks_have_whole_ones() {
        let cut = |dim, global: &[usize], parts: &[usize], ranks| {
            Cut::of_parts(dim, Shape::from_slice(global).unwrap(), parts, 1, ranks)
        };
        let of_blocks = |cut: &Cut| {
            let blocks = cut.of_blocks(128)?;
            // What a rank computes from the shape of its part.
            assert_eq!(*blocks.shape(), *fp8_kernels::ops::moment_scales(&cut.shape()));
            let starts_and_ends = blocks.ranges().iter().map(|range| [range.start, range.end]);
            Some((blocks.global().to_vec(), blocks.dim(), starts_and_ends.collect::<Vec<_>>()))
        };
        let rows = cut(0, &[8, 200], &[4, 4], 2);
        assert_eq!(of_blocks(&rows), Some((vec![8, 2], 0, vec![[2, 4], [6, 8]])));
        let columns = cut(1, &[3, 512], &[256, 256], 2);
        assert_eq!(of_blocks(&columns), Some((vec![3, 4], 1, vec![[1, 2], [3, 4]])));
        // The last block has 44 elements.
        let of_ranks = [0..128, 128..300].map(|range| vec![range]).into();
        let ragged = Cut { of_ranks, ..cut(0, &[300], &[300], 2) };
        assert_eq!(of_blocks(&ragged), Some((vec![1, 3], 1, vec![[1, 3]])));
        assert_eq!(of_blocks(&cut(0, &[256], &[256], 4)), None);
        assert_eq!(of_blocks(&cut(1, &[3, 512], &[128, 384], 2)), None);
    }

    #[test]
    fn shares_are_even_and_cover_all() {
        let shares: Vec<_> = (0..=4).map(|rank| share(50, rank, 4)).collect();
        assert_eq!(shares, [0, 12, 25, 37, 50]);
        assert_eq!(share(usize::MAX, 3, 3), usize::MAX);
    }

    #[test]
    fn rows_of_an_adapter_are_found_in_the_part() {
        // q, k and v of 8, 4 and 4 rows on two ranks: rank 1 has 4..8, 10..12 and 14..16.
        let cut = Cut::of_parts(0, [16, 2].into(), &[8, 4, 4], 1, 2);
        assert_eq!(cut.local_range(&(8..12)), 4..6);
        assert_eq!(cut.local_range(&(0..16)), 0..8);
        assert_eq!(cut.within(0, [4, 2].into(), &(8..12)).ranges(), std::slice::from_ref(&(2..4)));
    }
}
