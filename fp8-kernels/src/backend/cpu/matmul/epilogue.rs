//! The steps from a sum to its stored value: factors, addend, bias, rounding, accumulation.

use super::super::Floats;
use super::pack::BLOCK;
use crate::element::Float;
use half::{bf16, f16};
use std::marker::PhantomData;

/// The factors of a sum: `(sum · a) · b`, in f32, each multiplication an operation of its own.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Factors<'a> {
    #[default]
    None,
    /// One factor for each operand.
    Tensors([f32; 2]),
    /// A factor for each row of `a` and for each row of `b`.
    Rows { a: &'a [f32], b: &'a [f32] },
    /// Factors for each block of `length` values of k: those of all rows for the first block, then for the second, … The sum of
    /// a block is multiplied by its factors and added to that of the blocks before it.
    Blocks { a: &'a [f32], b: &'a [f32], length: usize },
    /// One factor for each operand, and sums of their own for each 16 values of k, which are added up: they are exact in
    /// NVFP4, whose blocks have this length.
    Segments([f32; 2]),
}

impl Factors<'_> {
    fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    fn is_some(&self) -> bool {
        !self.is_none()
    }
}

/// A matrix that is added to the sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addend<'a> {
    /// Row-major, of the output's shape.
    pub(crate) values: Floats<'a>,
    pub(crate) cols: usize,
}

impl Addend<'_> {
    /// Adds the values of `row` from column `col` on.
    #[inline(always)]
    fn add_to(&self, sums: &mut [f32], row: usize, col: usize) {
        let start = row * self.cols + col;
        match self.values {
            Floats::F32(all) => sums.iter_mut().zip(&all[start..]).for_each(|(sum, value)| *sum += value),
            Floats::BF16(all) => add_widened(sums, &all[start..]),
            Floats::F16(all) => add_widened(sums, &all[start..]),
        }
    }
}

#[inline(always)]
fn add_widened<T: Float>(sums: &mut [f32], values: &[T]) {
    let mut wide = [0.0; 32];
    for (sums, values) in sums.chunks_mut(wide.len()).zip(values.chunks(wide.len())) {
        let count = sums.len();
        T::widen(&values[..count], &mut wide[..count]);
        sums.iter_mut().zip(&wide).for_each(|(sum, value)| *sum += value);
    }
}

/// `(sum · factors + addend) + bias`, in f32, each an operation of its own.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Epilogue<'a> {
    pub(crate) factors: Factors<'a>,
    pub(crate) addend: Option<Addend<'a>>,
    /// One value for each column.
    pub(crate) bias: Option<&'a [f32]>,
    /// Whether the result is added to what the output holds: without factors, sums start from it; with factors, it is added
    /// last. The output must be f32.
    pub(crate) accumulate: bool,
}

impl Epilogue<'_> {
    /// The values of k whose products are summed by themselves, if not all are.
    #[inline(always)]
    pub(super) fn segment(&self) -> Option<usize> {
        matches!(self.factors, Factors::Segments(_)).then_some(BLOCK)
    }

    /// Whether sums are stored as they are.
    #[inline(always)]
    pub(super) fn is_plain(&self) -> bool {
        self.factors.is_none() && self.addend.is_none() && self.bias.is_none()
    }

    /// Whether sums start from what the output holds.
    #[inline(always)]
    pub(super) fn starts_from_output(&self) -> bool {
        self.accumulate && self.factors.is_none()
    }

    /// Whether the output is needed until the last moment, so that no unfinished sum may be stored in it.
    #[inline(always)]
    pub(super) fn adds_to_output(&self) -> bool {
        self.accumulate && self.factors.is_some()
    }

    /// Applies everything to the sums of one row from column `col` on, and stores them in `out`. Factors of blocks have been
    /// applied before.
    #[inline(always)]
    pub(super) fn store(&self, sums: &mut [f32], row: usize, col: usize, out: RowMut<'_>) {
        match self.factors {
            Factors::None | Factors::Blocks { .. } => {}
            Factors::Tensors([a, b]) | Factors::Segments([a, b]) => {
                sums.iter_mut().for_each(|sum| *sum = *sum * a * b)
            }
            Factors::Rows { a, b } => {
                let a = a[row];
                sums.iter_mut().zip(&b[col..]).for_each(|(sum, b)| *sum = *sum * a * b);
            }
        }
        if let Some(addend) = &self.addend {
            addend.add_to(sums, row, col);
        }
        if let Some(bias) = self.bias {
            sums.iter_mut().zip(&bias[col..]).for_each(|(sum, bias)| *sum += bias);
        }
        match out {
            RowMut::F32(out) if self.adds_to_output() => {
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = canonical(*out + *sum));
            }
            RowMut::F32(out) => out.iter_mut().zip(sums).for_each(|(out, sum)| *out = canonical(*sum)),
            RowMut::BF16(out) => round(sums, out),
            RowMut::F16(out) => round(sums, out),
        }
    }
}

#[inline(always)]
fn canonical(value: f32) -> f32 {
    if value.is_nan() { f32::NAN } else { value }
}

#[inline(always)]
fn round<T: Float>(sums: &mut [f32], out: &mut [T]) {
    sums.iter_mut().for_each(|sum| *sum = canonical(*sum));
    T::round(sums, out);
}

/// A row-major output, of which several threads write different parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<'a> {
    elements: Pointer,
    len: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

#[derive(Clone, Copy, Debug)]
enum Pointer {
    F32(*mut f32),
    BF16(*mut bf16),
    F16(*mut f16),
}

// SAFETY: an `Out` is a unique borrow of plain values. Threads that share it write different elements: `row` demands it.
unsafe impl Send for Out<'_> {}
// SAFETY: as above.
unsafe impl Sync for Out<'_> {}

/// Part of one row.
pub(super) enum RowMut<'a> {
    F32(&'a mut [f32]),
    BF16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl<'a> Out<'a> {
    pub(crate) fn f32(data: &'a mut [f32]) -> Self {
        Self { elements: Pointer::F32(data.as_mut_ptr()), len: data.len(), lifetime: PhantomData }
    }

    pub(crate) fn bf16(data: &'a mut [bf16]) -> Self {
        Self { elements: Pointer::BF16(data.as_mut_ptr()), len: data.len(), lifetime: PhantomData }
    }

    pub(crate) fn f16(data: &'a mut [f16]) -> Self {
        Self { elements: Pointer::F16(data.as_mut_ptr()), len: data.len(), lifetime: PhantomData }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The first element, if they are f32.
    pub(super) fn as_f32(&self) -> Option<*mut f32> {
        match self.elements {
            Pointer::F32(data) => Some(data),
            Pointer::BF16(_) | Pointer::F16(_) => None,
        }
    }

    /// Returns `len` elements from `start` on.
    ///
    /// # Safety
    /// They are in the output, and no other reference to any of them is alive, on this thread or another.
    #[inline(always)]
    pub(super) unsafe fn row(&self, start: usize, len: usize) -> RowMut<'_> {
        match self.elements {
            Pointer::F32(data) => {
                // SAFETY: the caller's promise.
                RowMut::F32(unsafe { std::slice::from_raw_parts_mut(data.wrapping_add(start), len) })
            }
            Pointer::BF16(data) => {
                // SAFETY: as above.
                RowMut::BF16(unsafe { std::slice::from_raw_parts_mut(data.wrapping_add(start), len) })
            }
            Pointer::F16(data) => {
                // SAFETY: as above.
                RowMut::F16(unsafe { std::slice::from_raw_parts_mut(data.wrapping_add(start), len) })
            }
        }
    }
}
