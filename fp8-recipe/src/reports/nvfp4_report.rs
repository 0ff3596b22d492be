//! The blocks of a slot in NVFP4 that lost values, and how exact its tensor is beside what it would be in FP8.

use crate::recipes::policy::Policy;
use crate::reports::error_squares::Squares;
use crate::{CurrentScaling, Mxfp8, Result, SlotRole};
use fp8_kernels::fp8_format::{Blocks, E4M3, TensorScale};
use fp8_kernels::{DType, Fp8Tensor, Slot, Tensor, ops};

/// The blocks of a slot in NVFP4, and how exact the same tensor would be under recipes of FP8: see [`SlotReport::nvfp4`].
///
/// A block has 16 values of a row, or 16 × 16 of a weight. The blocks are those of the codes that fprop reads of inputs and weights, and
/// dgrad of gradients. The copy for wgrad is quantized from the same values, transformed, and is not counted.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{GemmSlots, Nvfp4, Nvfp4Report, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// scaling.set_counting(true);
/// scaling.set_measuring_sqnr(true);
/// // The amax of the second block is less than 1 / 458,752 of the tensor's: its scale is 0, and so are its values.
/// let x = Tensor::from_vec([vec![1e6f32; 16], vec![1.0; 16]].concat(), [1, 32], &device)?;
/// let mut cx = scaling.autocast(&Nvfp4::default().into())?;
/// let x4 = ops::quantize(&x, &cx.slot(&fc.input)?)?;
/// cx.measure_sqnr(&fc.input, &x, &x4)?; // the layers of fp8-nn do this
/// cx.commit()?;
/// let report = &scaling.slot_reports()?[0];
/// let Some(Nvfp4Report { blocks, lost, saturated, .. }) = report.nvfp4 else { panic!("{report}") };
/// assert_eq!((blocks, lost, saturated), (2, 1, 0));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
///
/// [`SlotReport::nvfp4`]: crate::SlotReport::nvfp4
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Nvfp4Report {
    /// The number of blocks.
    pub blocks: u64,
    /// The number of blocks that lost all of their values: their scale is 0, although a value is not.
    pub lost: u64,
    /// The number of blocks with a finite value that rounded beyond 6, the largest code. Lost blocks are not among them.
    pub saturated: u64,
    /// The number of blocks with a NaN, whose scale is NaN, and so are all of their values.
    pub nan: u64,
    /// The number of blocks with an infinite value. One makes the factor of the tensor 1: blocks whose values are all below about 0.006
    /// are lost.
    pub infinite: u64,
    /// The SQNR in decibels that the tensor would have under [`Mxfp8::default`], which has a scale for 32 values.
    pub mxfp8_sqnr: Option<f64>,
    /// The SQNR in decibels that the tensor would have under [`CurrentScaling::default`], which has one scale: in E4M3, or in E5M2 for a
    /// gradient.
    pub fp8_sqnr: Option<f64>,
}

/// The sums of one slot in NVFP4 in one scope.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Nvfp4Sums {
    counts: Nvfp4Report,
    mxfp8: Squares,
    fp8: Squares,
}

impl Nvfp4Sums {
    /// Adds a tensor, the same as f32 on the host, and its codes.
    pub(crate) fn add(
        &mut self,
        role: SlotRole,
        tensor: &Tensor,
        values: &[f32],
        codes: &Fp8Tensor,
    ) -> Result<()> {
        self.mxfp8.add(values, &under(&Mxfp8::default(), role, tensor)?);
        self.fp8.add(values, &under(&CurrentScaling::default(), role, tensor)?);
        let (scales, factors) = (codes.scale_inv().to_vec::<u8>()?, codes.tensor_scale());
        let factors = factors.map_or(Ok(Vec::new()), Tensor::to_vec::<f32>)?;
        let encode = factors.first().copied().unwrap_or(1.0);
        let blocks = codes.blocks().unwrap_or(Blocks::B1x16);
        self.count(values, codes.matrix(), blocks, &scales, TensorScale::from_encode(encode));
        Ok(())
    }

    /// Counts the blocks of a `[rows, cols]` matrix.
    fn count(
        &mut self,
        values: &[f32],
        [_, cols]: [usize; 2],
        blocks: Blocks,
        scales: &[u8],
        tensor: TensorScale,
    ) {
        let ([height, width], across) = (blocks.size(cols), cols.div_ceil(16));
        if cols == 0 {
            return;
        }
        for (rows, scales) in values.chunks(height * cols).zip(scales.chunks(across)) {
            for (at, bits) in scales.iter().enumerate() {
                let block = rows.chunks(cols).flat_map(|row| row.iter().skip(at * width).take(width));
                self.count_block(block.copied(), E4M3::from_bits(*bits), tensor);
            }
        }
    }

    fn count_block(&mut self, values: impl Iterator<Item = f32>, scale: E4M3, tensor: TensorScale) {
        let (factor, is_zero) = (tensor.block_factor(scale), scale.to_f32() == 0.0);
        let (mut has_value, mut has_infinity, mut saturates) = (false, false, false);
        for value in values {
            has_value |= value != 0.0;
            has_infinity |= value.is_infinite();
            saturates |= value.is_finite() && (value * factor).abs() >= 7.0;
        }
        let counts = &mut self.counts;
        counts.blocks += 1;
        counts.lost += u64::from(is_zero && has_value);
        counts.saturated += u64::from(saturates && !is_zero);
        counts.nan += u64::from(scale.is_nan());
        counts.infinite += u64::from(has_infinity);
    }

    /// Returns the report of the sums.
    pub(crate) fn report(self) -> Nvfp4Report {
        let (mxfp8_sqnr, fp8_sqnr) = (self.mxfp8.decibels(), self.fp8.decibels());
        Nvfp4Report { mxfp8_sqnr, fp8_sqnr, ..self.counts }
    }
}

/// Returns the values of a tensor as a recipe would represent it in a slot of this role.
fn under(policy: &dyn Policy, role: SlotRole, tensor: &Tensor) -> Result<Vec<f32>> {
    let (rule, encoding) = (policy.rule(role), policy.format().encoding(role.direction()));
    let slot = Slot { scale: policy.scale(role, &rule), ..Slot::off(encoding) };
    Ok(ops::quantize(tensor, &slot)?.dequantize(DType::F32)?.to_f32_vec()?)
}
