//! The vector operations of the micro-kernel, and an implementation of them in plain Rust.

use super::decoding::{Decoding, FP4_VALUES};
use crate::Result;
use half::bf16;

/// Operations on vectors of f32 sums. The micro-kernel is written once over them.
///
/// A value of an implementing type is a proof that the CPU has the instructions: [`CpuPath`](super::CpuPath) makes one only
/// after asking.
///
/// Operands are vectors of 32-bit *words*. A word is one f32, or, where [`PAIRS`](Self::PAIRS) holds, two bf16 values of
/// neighboring k with the first in the high half.
pub(crate) trait Lanes: Copy + Send + Sync {
    type Vector: Copy;
    /// [`WIDTH`](Self::WIDTH) vectors.
    type Square: AsRef<[Self::Vector]>;

    /// Sums per vector.
    const WIDTH: usize;
    /// Rows of the largest tile. Together with two vectors per row and the operands they fill the registers.
    const ROWS: usize;
    /// Whether a word holds two bf16 values.
    const PAIRS: bool;
    /// Added to each byte of the first operand of [`block_sum`](Self::block_sum), so that none is below 0; 0 where the instructions take
    /// signed bytes.
    const OFFSET: u8;

    fn zero(self) -> Self::Vector;

    /// Returns a vector that holds `word` in each lane.
    fn splat(self, word: u32) -> Self::Vector;

    /// Reads [`WIDTH`](Self::WIDTH) words.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn words(self, from: *const u32) -> Self::Vector;

    /// Reads [`WIDTH`](Self::WIDTH) sums.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn sums(self, from: *const f32) -> Self::Vector;

    /// Writes [`WIDTH`](Self::WIDTH) sums.
    ///
    /// # Safety
    /// They must be writable.
    unsafe fn store(self, sums: Self::Vector, to: *mut f32);

    /// Adds the products of two vectors of words to `sums`: one fused multiply-add per f32, or two per pair, the high halves
    /// first.
    fn multiply_add(self, sums: Self::Vector, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// Adds sums times their factors, which are f32 for all lanes: one fused multiply-add.
    fn add_product(self, sums: Self::Vector, others: Self::Vector, factors: Self::Vector) -> Self::Vector;

    /// Multiplies two vectors of f32 values.
    fn multiply(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// Returns the entry of `table` for each of 16 codes of E2M1, the first of a byte in its lower half: bytes in four words.
    #[inline(always)]
    fn look_up(self, codes: [u8; 8], table: &[u8; 16]) -> [u32; 4] {
        let mut bytes = [0; 16];
        for (pair, codes) in bytes.chunks_exact_mut(2).zip(codes) {
            pair[0] = table[usize::from(codes & 0xF)];
            pair[1] = table[usize::from(codes >> 4)];
        }
        bytemuck::cast(bytes)
    }

    /// Returns the sums of the products of blocks of 16 integers of at most 12 in magnitude, which are bytes of four vectors of words,
    /// as f32. `start` is [`block_start`](Self::block_start) of `b`.
    fn block_sum(self, a: [Self::Vector; 4], b: [Self::Vector; 4], start: Self::Vector) -> Self::Vector;

    /// Returns the integers from which sums of products with `b` start, so that [`OFFSET`](Self::OFFSET) adds nothing.
    fn block_start(self, b: [Self::Vector; 4]) -> Self::Vector;

    /// Replaces every NaN by `f32::NAN`, whose bits are the same on every CPU.
    fn canonical(self, sums: Self::Vector) -> Self::Vector;

    /// Reads a block of [`WIDTH`](Self::WIDTH) × [`WIDTH`](Self::WIDTH) words by its columns: vector i holds word i of each row,
    /// and rows are `stride` words apart.
    ///
    /// # Safety
    /// Every word of the block must be readable.
    unsafe fn columns(self, from: *const u32, stride: usize) -> Self::Square;

    /// Transposes a block of [`WIDTH`](Self::WIDTH) × [`WIDTH`](Self::WIDTH) words: `to[i · to_stride + j] = from[j · from_stride + i]`.
    ///
    /// # Safety
    /// Every word of the block must be readable in `from` and writable in `to`.
    #[inline(always)]
    unsafe fn transpose(self, from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize) {
        // SAFETY: the caller vouches for every word of the block.
        let columns = unsafe { self.columns(from, from_stride) };
        for (i, column) in columns.as_ref().iter().enumerate() {
            // SAFETY: the caller vouches for the words of row i.
            unsafe { self.store(*column, to.wrapping_add(i * to_stride).cast()) };
        }
    }

    /// Returns the words of one step of vectors of four FP8 codes of neighboring k, as they are stored: the value of code
    /// `step`, or with pairs those of the codes 2 · `step` and 2 · `step` + 1.
    fn decode<const IS_E5M2: bool>(self, codes: Self::Vector, step: usize) -> Self::Vector;

    /// Returns the words of one step of vectors of eight codes of E2M1 of neighboring k, as they are stored, the first in the lowest
    /// bits: the value of code `step`, or with pairs those of the codes 2 · `step` and 2 · `step` + 1.
    fn decode_fp4(self, codes: Self::Vector, step: usize) -> Self::Vector;

    /// Returns the f32 values of one step of vectors of two bf16 values of neighboring k, as they are stored: of the low halves, then of
    /// the high ones.
    fn widen(self, values: Self::Vector, step: usize) -> Self::Vector;

    /// Begins to read the cache line at `address`, which need not be readable.
    fn prefetch(self, address: *const u32);
}

/// Work that is compiled for each kind of lanes.
pub(super) trait Job {
    /// `#[inline(always)]`, and so is all that it calls with `lanes`: only then is it compiled for their instructions.
    fn run<L: Lanes>(self, lanes: L) -> Result<()>;
}

/// Vectors of `N` lanes as arrays: the model of every other implementation, and what a CPU without vector instructions runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable<const N: usize, const PAIRS: bool>;

impl<const N: usize, const PAIRS: bool> Lanes for Portable<N, PAIRS> {
    type Vector = [f32; N];
    type Square = [[f32; N]; N];

    const WIDTH: usize = N;
    // As the vector units that it models: 32 registers, but 16 where vectors have 8 lanes.
    const ROWS: usize = if N == 8 { 6 } else { 12 };
    const PAIRS: bool = PAIRS;
    const OFFSET: u8 = 0;

    #[inline(always)]
    fn zero(self) -> [f32; N] {
        [0.0; N]
    }

    #[inline(always)]
    fn splat(self, word: u32) -> [f32; N] {
        [f32::from_bits(word); N]
    }

    #[inline(always)]
    unsafe fn words(self, from: *const u32) -> [f32; N] {
        // SAFETY: the caller vouches for the N words, and an f32 has their size and alignment.
        unsafe { from.cast::<[f32; N]>().read() }
    }

    #[inline(always)]
    unsafe fn sums(self, from: *const f32) -> [f32; N] {
        // SAFETY: the caller vouches for the N values.
        unsafe { from.cast::<[f32; N]>().read() }
    }

    #[inline(always)]
    unsafe fn store(self, sums: [f32; N], to: *mut f32) {
        // SAFETY: the caller vouches for the N values.
        unsafe { to.cast::<[f32; N]>().write(sums) };
    }

    #[inline(always)]
    fn multiply_add(self, mut sums: [f32; N], a: [f32; N], b: [f32; N]) -> [f32; N] {
        let high = |word: f32| f32::from_bits(word.to_bits() & 0xFFFF_0000);
        let low = |word: f32| f32::from_bits(word.to_bits() << 16);
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum = match PAIRS {
                false => a.mul_add(b, *sum),
                true => low(a).mul_add(low(b), high(a).mul_add(high(b), *sum)),
            };
        }
        sums
    }

    #[inline(always)]
    fn add_product(self, sums: [f32; N], others: [f32; N], factors: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| others[i].mul_add(factors[i], sums[i]))
    }

    #[inline(always)]
    fn multiply(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn block_sum(self, a: [[f32; N]; 4], b: [[f32; N]; 4], _: [f32; N]) -> [f32; N] {
        let mut sums = [0i16; N];
        for (a, b) in a.iter().zip(&b) {
            for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
                let [a, b] = [a, b].map(|word| bytemuck::cast::<f32, [i8; 4]>(*word));
                *sum += a.iter().zip(b).map(|(a, b)| i16::from(*a) * i16::from(b)).sum::<i16>();
            }
        }
        sums.map(f32::from)
    }

    #[inline(always)]
    fn block_start(self, _: [[f32; N]; 4]) -> [f32; N] {
        [0.0; N]
    }

    #[inline(always)]
    fn canonical(self, sums: [f32; N]) -> [f32; N] {
        sums.map(|sum| if sum.is_nan() { f32::NAN } else { sum })
    }

    #[inline(always)]
    unsafe fn columns(self, from: *const u32, stride: usize) -> [[f32; N]; N] {
        // SAFETY: the caller vouches for N words of each of N rows.
        let word = |i: usize, j: usize| unsafe { *from.wrapping_add(j * stride + i) };
        std::array::from_fn(|i| std::array::from_fn(|j| f32::from_bits(word(i, j))))
    }

    #[inline(always)]
    fn decode<const IS_E5M2: bool>(self, codes: [f32; N], step: usize) -> [f32; N] {
        codes.map(|codes| {
            let codes = codes.to_bits().to_ne_bytes();
            let value = |i: usize| Decoding::<IS_E5M2>::value(codes[i]);
            if !PAIRS {
                return value(step);
            }
            let [high, low] = [value(2 * step), value(2 * step + 1)].map(f32::to_bits);
            f32::from_bits(high & 0xFFFF_0000 | low >> 16)
        })
    }

    #[inline(always)]
    fn decode_fp4(self, codes: [f32; N], step: usize) -> [f32; N] {
        codes.map(|codes| {
            let value = |i: usize| FP4_VALUES[(codes.to_bits().to_le() >> (4 * i) & 0xF) as usize];
            f32::from_bits(if PAIRS { value(2 * step) | value(2 * step + 1) >> 16 } else { value(step) })
        })
    }

    #[inline(always)]
    fn widen(self, values: [f32; N], step: usize) -> [f32; N] {
        values.map(|values| bytemuck::cast::<f32, [bf16; 2]>(values)[step].to_f32())
    }

    #[inline(always)]
    fn prefetch(self, _: *const u32) {}
}
