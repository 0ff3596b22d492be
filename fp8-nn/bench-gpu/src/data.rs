//! Random numbers, made once and handed out in different stretches: tensors of gigabytes in a moment.

use crate::result::Result;
use fp8_nn::fp8_kernels::fp8_format::Encoding;
use fp8_nn::fp8_kernels::{
    Cell, DType, Device, Fp8Tensor, ScalePolicy, ScaleRule, Shape, Slot, Tensor, bf16, ops,
};

/// Delayed scaling's rule, of which measured slots never need the first scale.
pub(crate) const RULE: ScaleRule =
    ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// Puts the largest of some million normal numbers below E4M3's maximum.
pub(crate) const SCALE: f32 = 64.0;

/// Nearly normal numbers.
pub(crate) struct Pool {
    single: Vec<f32>,
    half: Vec<bf16>,
}

impl Pool {
    pub(crate) fn new(len: usize) -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        // The sum of eight bytes, less its mean, over its deviation.
        let mut normal = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let sum: u32 = state.to_le_bytes().iter().map(|&byte| u32::from(byte)).sum();
            (sum as f32 - 1020.0) / 209.0
        };
        let single: Vec<f32> = (0..len).map(|_| normal()).collect();
        let half = single.iter().map(|&x| bf16::from_f32(x)).collect();
        Self { single, half }
    }

    pub(crate) fn bytes(&self, len: usize) -> Vec<u8> {
        self.single.iter().cycle().flat_map(|x| x.to_bits().to_le_bytes()).take(len).collect()
    }

    /// A tensor in f32, or in bf16 for every other dtype.
    pub(crate) fn tensor(
        &self,
        shape: impl Into<Shape>,
        dtype: DType,
        seed: usize,
        device: &Device,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let (len, start) = (shape.numel(), seed.wrapping_mul(99_991) % self.single.len());
        Ok(match dtype {
            DType::F32 => Tensor::from_vec(stretch(&self.single, start, len), shape, device)?,
            _ => Tensor::from_vec(stretch(&self.half, start, len), shape, device)?,
        })
    }

    /// A tensor in FP8, without its transpose.
    pub(crate) fn fp8(
        &self,
        shape: [usize; 2],
        encoding: Encoding,
        seed: usize,
        device: &Device,
    ) -> Result<Fp8Tensor> {
        let x = self.tensor(shape, DType::BF16, seed, device)?;
        let scale = Cell::new(SCALE, device)?;
        let codes = ops::quantize(&x, &Slot::fixed(encoding, &scale, &RULE))?;
        Ok(codes.as_fp8().ok_or("a slot that quantizes did not")?.clone())
    }
}

/// `len` values from `start` on, round and round.
fn stretch<T: Copy>(pool: &[T], start: usize, len: usize) -> Vec<T> {
    let mut all = Vec::with_capacity(len);
    all.extend_from_slice(&pool[start..pool.len().min(start + len)]);
    while all.len() < len {
        all.extend_from_slice(&pool[..pool.len().min(len - all.len())]);
    }
    all
}
