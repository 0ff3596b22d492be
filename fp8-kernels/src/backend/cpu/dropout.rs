//! Reference of `dropout`.

use super::floats::{Floats, build_flat};
use super::parallel;
use crate::cells::Counts;
use crate::ops::{Dropout, DropoutKey};
use crate::{Device, Result, Tensor};
use fp8_format::philox::philox4x32_10;
use std::ops::Range;

/// Random numbers of one counter.
const LANES: usize = 4;
// Every piece of work starts at a whole counter.
const _: () = assert!(parallel::CHUNK.is_multiple_of(LANES));

/// A mask whose key was read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mask {
    key: DropoutKey,
    threshold: u32,
    /// The factor that elements are multiplied by if they are kept.
    pub(super) factor: f32,
}

impl Mask {
    pub(super) fn new(dropout: &Dropout) -> Result<Self> {
        let (threshold, factor) = (dropout.threshold(), dropout.factor());
        Ok(Self { key: dropout.draw.read()?, threshold, factor })
    }

    /// Calls `f` with the position of each of these elements, from 0 on, and whether it is kept.
    #[inline(always)]
    pub(super) fn each(&self, elements: Range<u64>, mut f: impl FnMut(usize, bool)) {
        let (mut at, mut position) = (elements.start, 0);
        while at < elements.end {
            let random = philox4x32_10(self.key.offset.wrapping_add(at / LANES as u64), self.key.seed);
            let first = (at % LANES as u64) as usize;
            for &r in &random[first..LANES.min(first + (elements.end - at).min(LANES as u64) as usize)] {
                f(position, r >= self.threshold);
                position += 1;
            }
            at = elements.start + position as u64;
        }
    }

    fn keeps(&self, element: u64) -> bool {
        let counter = self.key.offset.wrapping_add(element / LANES as u64);
        philox4x32_10(counter, self.key.seed)[(element % LANES as u64) as usize] >= self.threshold
    }
}

pub(crate) fn dropout(op: &'static str, x: &Tensor, dropout: &Dropout) -> Result<Tensor> {
    let (data, mask) = (Floats::of(x, op, "x")?, Mask::new(dropout)?);
    build_flat(op, *x.shape(), x.dtype(), x.device(), |first, out| {
        let mut scratch = Vec::new();
        let data = data.read(first..first + out.len(), &mut scratch);
        mask.each(first as u64..(first + out.len()) as u64, |i, kept| {
            out[i] = if kept { data[i] * mask.factor } else { 0.0 };
        });
    })
}

/// The sum with `residual`, of its dtype, or without one the dropped elements alone.
pub(crate) fn dropout_add(
    op: &'static str,
    residual: Option<&Tensor>,
    x: &Tensor,
    hidden: Option<&Dropout>,
    path: Option<&Dropout>,
) -> Result<Tensor> {
    let data = Floats::of(x, op, "x")?;
    let added = residual.map(|residual| Floats::of(residual, op, "residual")).transpose()?;
    let [hidden, path] = [hidden, path].map(|dropout| dropout.map(Mask::new).transpose());
    let (hidden, path) = (hidden?, path?);
    let entry = entry_len(x).max(1);
    let dtype = residual.unwrap_or(x).dtype();
    build_flat(op, *x.shape(), dtype, x.device(), |first, out| {
        let range = first..first + out.len();
        let (mut scratch, mut other) = (Vec::new(), Vec::new());
        out.copy_from_slice(data.read(range.clone(), &mut scratch));
        if let Some(mask) = &hidden {
            mask.each(first as u64..range.end as u64, |i, kept| {
                out[i] = if kept { out[i] * mask.factor } else { 0.0 };
            });
        }
        if let Some(mask) = &path {
            let mut start = 0;
            while start < out.len() {
                let index = (first + start) / entry;
                let end = ((index + 1) * entry - first).min(out.len());
                let kept = mask.keeps(index as u64);
                out[start..end].iter_mut().for_each(|v| *v = if kept { *v * mask.factor } else { 0.0 });
                start = end;
            }
        }
        if let Some(added) = added {
            out.iter_mut().zip(added.read(range, &mut other)).for_each(|(v, residual)| *v += residual);
        }
    })
}

/// The elements of an entry of the first dimension.
fn entry_len(x: &Tensor) -> usize {
    x.shape().iter().skip(1).product()
}

/// The next key of a state, which has one key fewer then.
pub(crate) fn advance(state: &Counts, device: &Device) -> Result<Counts> {
    let (values, key) = (state.read(0..2)?, Counts::new(2, device)?);
    if let &[seed, taken] = &*values {
        let taken = taken.wrapping_add(1);
        key.write(&[split_mix(seed.wrapping_add(taken.wrapping_mul(0x9E37_79B9_7F4A_7C15))), 0])?;
        state.write(&[seed, taken])?;
    }
    Ok(key)
}

/// The output function of SplitMix64.
fn split_mix(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
