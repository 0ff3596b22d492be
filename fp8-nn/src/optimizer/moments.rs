//! The formats of moments.

use fp8_kernels::DType;
use std::fmt;

/// The format in which [`AdamW`](super::AdamW) stores its two moments. Every step computes in f32 and rounds the new moments
/// stochastically, so that what is stored is right in the mean.
///
/// | | bytes a parameter | m | v |
/// |---|---|---|---|
/// | `F32` | 8 | f32 | f32 |
/// | `BF16` | 4 | bf16 | bf16 |
/// | `Fp8` | 2.06 | E4M3 | E4M3 of √v |
///
/// In FP8, 128 consecutive elements of a row share a scale, so parameters with short rows need more: 8 bytes for each row and moment.
/// With e the smallest integer, −126 or more, for which the block's largest |m| or √v is at most 448 · 2ᵉ:
///
/// ```text
/// m is stored as c = E4M3(m · 2⁻ᵉ), and is c · 2ᵉ in the next step
/// v is stored as c = E4M3(√v · 2⁻ᵉ), and is (c · 2ᵉ)² in the next step
/// ```
///
/// m is rounded up with the probability that makes the mean of c · 2ᵉ equal m, and v with the one that makes the mean of (c · 2ᵉ)² equal
/// v. A v that is not 0 is never stored as 0, since updates are divided by its root.
///
/// The random numbers are those of Philox4x32-10. Their key is the FNV-1a hash of the parameter's name, and their counter is
/// made of the step's number and the element: see [`optimizer_step`](fp8_kernels::ops::optimizer_step). So
/// training continues with the same bits after a checkpoint, on any number of threads and data-parallel ranks, and on
/// another backend. Of a parameter that is cut (tensor parallelism), each rank numbers the elements of its own part, so the rounding
/// depends on the number of ranks.
///
/// Rounding makes v fluctuate. With gradients of normal noise, 90 % of all √v in FP8 are 0.81 to 1.19 times what they would be in f32
/// for the default `beta2` of 0.95, and 0.76 to 1.25 times for 0.999; in bf16 0.99 to 1.01 times and 0.94 to 1.05 times. E5M2 was tried
/// for √v, and fluctuates between 0.71 and 1.31 for 0.95. Rounding to nearest was tried, too: the median of √v is then wrong by a factor of
/// 1.7 for 0.95, and of 0.4 for 0.999, where most updates are too small to change a code.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LinearOptions { in_features: 256, out_features: 64, bias: false, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let mut optimizer = AdamW::new(AdamWOptions { moments: MomentDtype::Fp8, ..Default::default() })?;
/// *parameters_mut(&mut fc)[0].main_grad_mut() = Tensor::full(3.0, [64, 256], DType::F32, &Device::cpu())?;
/// let before = fc.weight().tensor().to_f32_vec()?;
/// optimizer.step(&mut fc, 0.5)?;
/// // The first step is as long as the learning rate: moments are rounded only after they are used.
/// let (before, after) = (before[0], fc.weight().tensor().to_f32_vec()?[0]);
/// assert!((after - (before * 0.95 - 0.5)).abs() < 1e-6);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MomentDtype {
    /// f32, 8 bytes a parameter.
    #[default]
    F32,
    /// bf16, 4 bytes a parameter.
    BF16,
    /// FP8 with an f32 scale for each 128 elements of a row, 2.06 bytes a parameter.
    Fp8,
}

impl MomentDtype {
    /// The dtype of a moment's tensor; that of codes for FP8.
    pub(crate) fn tensor_dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::BF16 => DType::BF16,
            Self::Fp8 => DType::U8,
        }
    }
}

impl fmt::Display for MomentDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::Fp8 => "FP8",
        })
    }
}
