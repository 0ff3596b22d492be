//! Blocks of the operands, decoded to words in the order in which the micro-kernel reads them.
//!
//! Rows of `a` are read a word at a time, so a block of it may have either layout: rows of words where the operand is contiguous
//! along k, steps of words where it is not. `b` is packed into *panels* of two vectors' width (the last one may have one), each
//! with one row a step; columns beyond the last are zeros. With pairs, a step is two values of k, and a last odd one has a zero
//! beside it, whose product adds nothing.

use super::super::{Floats, codec};
use super::lanes::Lanes;
use super::tile::Left;
use crate::element::Float;
use crate::{Encoding, Result};
use fp8_format::{E4M3, E5M2, Source, TensorScale, slice};
use half::bf16;
use std::ops::Range;

/// The elements of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Elements<'a> {
    Floats(Floats<'a>),
    Codes(&'a [u8], Encoding),
    Packed(Packed<'a>),
}

/// Values of a block of NVFP4.
pub(super) const BLOCK: usize = 16;

/// Codes of NVFP4, two a byte, which count as code · scale: the factor of the tensor is left to the sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) scales: &'a [E4M3],
    /// The bytes of a row.
    pub(crate) width: usize,
    /// The scales of a row, and the rows that share them.
    pub(crate) across: usize,
    pub(crate) height: usize,
}

impl Packed<'_> {
    /// Returns the scales of four blocks of a row from `block` on, as they are stored; zeros for those beyond its last.
    #[inline(always)]
    pub(super) fn scale_word(&self, row: usize, block: usize) -> u32 {
        let scales = &self.scales[row / self.height * self.across..][..self.across];
        let mut bytes = [0; 4];
        bytes
            .iter_mut()
            .zip(scales.get(block..).unwrap_or_default())
            .for_each(|(byte, s)| *byte = s.to_bits());
        u32::from_ne_bytes(bytes)
    }

    /// Returns the codes and the scales of a row, from the beginning of a block on.
    #[inline(always)]
    pub(super) fn line(&self, row: usize, ks: &Range<usize>) -> (&[u8], &[E4M3]) {
        debug_assert!(ks.start.is_multiple_of(BLOCK));
        let codes = &self.codes[row * self.width + ks.start / 2..][..ks.len().div_ceil(2)];
        let first = row / self.height * self.across + ks.start / BLOCK;
        (codes, &self.scales[first..][..ks.len().div_ceil(BLOCK)])
    }

    /// Reads values of a row, from the beginning of a block on. They are exact in bf16: six bits and a small exponent.
    fn values<D: Source>(&self, row: usize, ks: &Range<usize>, values: &mut [D]) -> Result<()> {
        let (codes, scales) = self.line(row, ks);
        let one = TensorScale::from_encode(1.0);
        let blocks = fp8_format::Blocks::B1x16;
        Ok(slice::dequantize_nvfp4(codes, 1, values.len(), blocks, scales, one, values)?)
    }
}

/// An operand, `[outer, k]`, where outer is m or n.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(super) elements: Elements<'a>,
    /// Elements from one line to the next. A line is contiguous: a row of `[outer, k]` if `is_along_k`, else a column.
    stride: usize,
    is_along_k: bool,
}

impl<'a> Matrix<'a> {
    /// Returns the matrix whose rows are contiguous and `stride` elements apart.
    pub(crate) fn along_k(elements: Elements<'a>, stride: usize) -> Self {
        Self { elements, stride, is_along_k: true }
    }

    /// Returns the matrix whose columns are contiguous and `stride` elements apart.
    pub(crate) fn across_k(elements: Elements<'a>, stride: usize) -> Self {
        Self { elements, stride, is_along_k: false }
    }

    /// Whether products of the elements are exact in f32, and far from its subnormal numbers.
    pub(crate) fn has_codes(&self) -> bool {
        matches!(self.elements, Elements::Codes(..) | Elements::Packed(_))
    }

    /// Whether the elements are codes of four bits, which take the same time to decode to f32 values as to pairs.
    pub(super) fn is_packed(&self) -> bool {
        matches!(self.elements, Elements::Packed(_))
    }

    pub(super) fn is_along_k(&self) -> bool {
        self.is_along_k
    }
}

/// The room that a block of `a` needs, in words.
pub(super) fn left_words(rows: usize, steps: usize) -> usize {
    (rows * line_words(steps)).max(rows.next_multiple_of(WORDS_PER_LINE) * steps)
}

/// The room that a block of `b` needs, in words; lines of it before they are transposed included.
pub(super) fn right_words<L: Lanes>(cols: usize, steps: usize) -> usize {
    let panels = cols.next_multiple_of(L::WIDTH) * steps;
    panels + (L::WIDTH * line_words(steps)).max(cols)
}

const WORDS_PER_LINE: usize = 16;

/// Words from one line of a block to the next: whole cache lines and one more, so that lines do not compete for the same sets.
pub(super) fn line_words(steps: usize) -> usize {
    steps.next_multiple_of(WORDS_PER_LINE) + WORDS_PER_LINE
}

/// Lines of words, `stride` words apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines<'a> {
    pub(super) words: &'a [u32],
    pub(super) stride: usize,
}

/// Returns `ks` of the lines at `outers`, at most `L::WIDTH`, of an operand that is contiguous along k: as they lie, or decoded into
/// `spare`, which has room for `L::WIDTH` lines, with zeros for those beyond the last.
#[inline(always)]
pub(super) fn lines<'a, L: Lanes>(
    x: &Matrix<'a>,
    outers: Range<usize>,
    ks: Range<usize>,
    spare: &'a mut [u32],
) -> Result<Lines<'a>> {
    if let (Elements::Floats(Floats::F32(data)), true) = (x.elements, outers.len() == L::WIDTH) {
        // Nothing to decode or to fill.
        let words = bytemuck::cast_slice(&data[outers.start * x.stride + ks.start..]);
        return Ok(Lines { words, stride: x.stride });
    }
    let steps = steps::<L>(ks.len());
    let stride = line_words(steps);
    for (j, words) in spare.chunks_exact_mut(stride).take(L::WIDTH).enumerate() {
        if j < outers.len() {
            along::<L>(x, outers.start + j, ks.clone(), &mut words[..steps])?;
        } else {
            words[..steps].fill(0);
        }
    }
    Ok(Lines { words: spare, stride })
}

/// Returns the lines from `outer` and `k` on of an operand that is contiguous along k, in the words in which codes or bf16 values are
/// stored; `None` for other elements, and where a line does not begin with a word. `k` is even.
pub(super) fn stored<'a>(x: &Matrix<'a>, outer: usize, k: usize) -> Option<Lines<'a>> {
    let (bytes, stride, first): (&[u8], _, _) = match x.elements {
        Elements::Codes(codes, _) => (codes, x.stride, k),
        Elements::Floats(Floats::BF16(values)) => (bytemuck::cast_slice(values), x.stride * 2, k * 2),
        Elements::Packed(Packed { codes, width, .. }) => (codes, width, k / 2),
        Elements::Floats(_) => return None,
    };
    let (before, words, _) = bytemuck::pod_align_to(&bytes[outer * stride + first..]);
    let words = Lines { words, stride: stride / size_of::<u32>() };
    (before.is_empty() && stride.is_multiple_of(size_of::<u32>())).then_some(words)
}

/// Packs `rows` × `ks` of `a`.
#[inline(always)]
pub(super) fn left<L: Lanes>(
    a: &Matrix<'_>,
    rows: Range<usize>,
    ks: Range<usize>,
    block: &mut [u32],
) -> Result<Left> {
    let steps = steps::<L>(ks.len());
    if a.is_along_k {
        let line = line_words(steps);
        for (row, words) in rows.zip(block.chunks_exact_mut(line)) {
            along::<L>(a, row, ks.clone(), &mut words[..steps])?;
        }
        Ok(Left { words: block.as_ptr(), row: line, step: 1 })
    } else {
        let width = rows.len().next_multiple_of(WORDS_PER_LINE);
        for (step, words) in block.chunks_exact_mut(width).take(steps).enumerate() {
            across::<L>(a, rows.clone(), step, &ks, &mut words[..rows.len()])?;
        }
        Ok(Left { words: block.as_ptr(), row: 1, step: width })
    }
}

/// Packs `cols` × `ks` of `b` into panels at the start of `block`, which has [`right_words`]. The panel of column j, counted from
/// the first, begins at word `j · steps`.
#[inline(always)]
pub(super) fn right<L: Lanes>(
    lanes: L,
    b: &Matrix<'_>,
    cols: Range<usize>,
    ks: Range<usize>,
    block: &mut [u32],
) -> Result<()> {
    let steps = steps::<L>(ks.len());
    if steps == 0 {
        return Ok(());
    }
    let padded = cols.len().next_multiple_of(L::WIDTH);
    let (panels, spare) = block.split_at_mut(padded * steps);
    if b.is_along_k {
        for first in (0..padded).step_by(L::WIDTH) {
            let count = L::WIDTH.min(cols.len() - first);
            let (start, width) = panel::<L>(first, padded, steps);
            let panel = &mut panels[start + first % (2 * L::WIDTH)..];
            let outers = cols.start + first..cols.start + first + count;
            let lines = lines::<L>(b, outers, ks.clone(), spare)?;
            transpose(lanes, lines, panel, width, steps);
        }
    } else {
        let spare = &mut spare[..cols.len()];
        for step in 0..steps {
            let words = match b.elements {
                Elements::Floats(Floats::F32(data)) => {
                    let start = (ks.start + step) * b.stride + cols.start;
                    bytemuck::cast_slice(&data[start..start + cols.len()])
                }
                _ => {
                    across::<L>(b, cols.clone(), step, &ks, spare)?;
                    &*spare
                }
            };
            for (first, words) in (0..padded).step_by(2 * L::WIDTH).zip(words.chunks(2 * L::WIDTH)) {
                let (start, width) = panel::<L>(first, padded, steps);
                let row = &mut panels[start + step * width..][..width];
                if words.len() == 2 * L::WIDTH {
                    // A length that the compiler knows.
                    row[..2 * L::WIDTH].copy_from_slice(&words[..2 * L::WIDTH]);
                } else {
                    let (row, rest) = row.split_at_mut(words.len());
                    row.copy_from_slice(words);
                    rest.fill(0);
                }
            }
        }
    }
    Ok(())
}

/// Returns where the panel with column `col` begins and how wide it is; `padded` is the width of all panels.
#[inline(always)]
pub(super) fn panel<L: Lanes>(col: usize, padded: usize, steps: usize) -> (usize, usize) {
    let first = col - col % (2 * L::WIDTH);
    (first * steps, (2 * L::WIDTH).min(padded - first))
}

/// The steps of `ks` values of k.
#[inline(always)]
pub(super) fn steps<L: Lanes>(ks: usize) -> usize {
    if L::PAIRS { ks.div_ceil(2) } else { ks }
}

/// Transposes `L::WIDTH` lines of `steps` words each into columns of `to`.
#[inline(always)]
pub(super) fn transpose<L: Lanes>(lanes: L, from: Lines<'_>, to: &mut [u32], width: usize, steps: usize) {
    let Lines { words: from, stride } = from;
    // `stride` is at least `steps`, so this is the last word that is read.
    assert!(steps > 0 && from.len() >= (L::WIDTH - 1) * stride + steps);
    assert!(to.len() >= (steps - 1) * width + L::WIDTH);
    let whole = steps - steps % L::WIDTH;
    for step in (0..whole).step_by(L::WIDTH) {
        let (from, to) = (from[step..].as_ptr(), to[step * width..].as_mut_ptr());
        // SAFETY: the steps up to step + WIDTH are among the `steps` whose bounds were just checked.
        unsafe { lanes.transpose(from, stride, to, width) };
    }
    for step in whole..steps {
        for (j, word) in to[step * width..][..L::WIDTH].iter_mut().enumerate() {
            *word = from[j * stride + step];
        }
    }
}

/// Reads `ks` of line `outer` of a matrix that is contiguous along k.
#[inline(always)]
fn along<L: Lanes>(x: &Matrix<'_>, outer: usize, ks: Range<usize>, words: &mut [u32]) -> Result<()> {
    let line = outer * x.stride + ks.start..outer * x.stride + ks.end;
    match x.elements {
        Elements::Codes(codes, encoding) if L::PAIRS => {
            let mut values = [bf16::ZERO; RUN];
            for (codes, words) in codes[line].chunks(RUN).zip(words.chunks_mut(RUN / 2)) {
                let values = &mut values[..codes.len()];
                to_bf16(codes, encoding, values)?;
                let pairs = values.chunks_exact(2);
                if let [last] = pairs.remainder() {
                    words[words.len() - 1] = pair(*last, bf16::ZERO);
                }
                for (word, values) in words.iter_mut().zip(pairs) {
                    *word = pair(values[0], values[1]);
                }
            }
            Ok(())
        }
        Elements::Packed(packed) if L::PAIRS => {
            let mut values = [bf16::ZERO; RUN];
            for (first, words) in ks.clone().step_by(RUN).zip(words.chunks_mut(RUN / 2)) {
                let ks = first..ks.end.min(first + RUN);
                // An odd last value has a zero beside it.
                values[ks.len() - 1..].iter_mut().take(2).for_each(|value| *value = bf16::ZERO);
                packed.values(outer, &ks, &mut values[..ks.len()])?;
                for (word, values) in words.iter_mut().zip(values.chunks_exact(2)) {
                    *word = pair(values[0], values[1]);
                }
            }
            Ok(())
        }
        Elements::Packed(packed) => packed.values(outer, &ks, bytemuck::cast_slice_mut::<u32, f32>(words)),
        elements => singles(elements, line, words),
    }
}

/// Reads `outers` of the step-th step of a matrix that is contiguous across k.
#[inline(always)]
fn across<L: Lanes>(
    x: &Matrix<'_>,
    outers: Range<usize>,
    step: usize,
    ks: &Range<usize>,
    words: &mut [u32],
) -> Result<()> {
    let line = |k: usize| k * x.stride + outers.start..k * x.stride + outers.end;
    match x.elements {
        Elements::Codes(codes, encoding) if L::PAIRS => {
            let k = ks.start + 2 * step;
            let (mut high, mut low) = ([bf16::ZERO; RUN], [bf16::ZERO; RUN]);
            // The partner of a last odd k: it is not read.
            let second = if k + 1 < ks.end { line(k + 1) } else { line(k) };
            let lines = codes[line(k)].chunks(RUN).zip(codes[second].chunks(RUN));
            for ((first, second), words) in lines.zip(words.chunks_mut(RUN)) {
                let (high, low) = (&mut high[..first.len()], &mut low[..second.len()]);
                to_bf16(first, encoding, high)?;
                if k + 1 < ks.end {
                    to_bf16(second, encoding, low)?;
                }
                for ((word, high), low) in words.iter_mut().zip(high).zip(low) {
                    *word = pair(*high, *low);
                }
            }
            Ok(())
        }
        elements => singles(elements, line(ks.start + step), words),
    }
}

/// Codes that are decoded at a time.
const RUN: usize = 256;

#[inline(always)]
fn pair(high: bf16, low: bf16) -> u32 {
    u32::from(high.to_bits()) << 16 | u32::from(low.to_bits())
}

#[inline(always)]
fn to_bf16(codes: &[u8], encoding: Encoding, values: &mut [bf16]) -> Result<()> {
    match encoding {
        Encoding::E4M3 => slice::to_bf16::<E4M3>(bytemuck::cast_slice(codes), values)?,
        Encoding::E5M2 => slice::to_bf16::<E5M2>(bytemuck::cast_slice(codes), values)?,
        Encoding::E2M1 => return Err(codec::packed("gemm_fp8")),
    }
    Ok(())
}

/// Reads a line of elements as f32 words.
#[inline(always)]
fn singles(elements: Elements<'_>, line: Range<usize>, words: &mut [u32]) -> Result<()> {
    let values = bytemuck::cast_slice_mut::<u32, f32>(words);
    match elements {
        Elements::Floats(Floats::F32(data)) => values.copy_from_slice(&data[line]),
        Elements::Floats(Floats::BF16(data)) => Float::widen(&data[line], values),
        Elements::Floats(Floats::F16(data)) => Float::widen(&data[line], values),
        Elements::Codes(codes, encoding) => codec::decode(&codes[line], encoding, values)?,
        // Such operands are contiguous along k, and read in blocks.
        Elements::Packed(_) => {}
    }
    Ok(())
}
