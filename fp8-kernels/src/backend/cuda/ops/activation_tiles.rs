//! Kernels of activations in bf16 over whole tiles: one for each function, direction and form of output that trains.
//!
//! They write the bits of the kernels for any shape in about half the instructions. What they lack (other element types,
//! ragged shapes, counters, further functions) is for `activation.cu`. Each function has its own file, so that a device
//! compiles only those that are used.

use super::activation_sink::Sink;
use super::tiles::{TILE, strips};
use super::{Buffer, Entry, Gpu, Grid, In, Out, kernels};
use crate::ops::Activation;
use crate::{DType, Encoding, Result, Tensor};

/// The kernels of one function.
struct Kernels {
    codes_e4m3: Entry<kernels::ActivationCodes>,
    high: Entry<kernels::ActivationHigh>,
    backward_codes: fn(Encoding) -> Entry<kernels::ActivationBackwardCodes>,
    backward_high: Entry<kernels::ActivationBackwardHigh>,
}

const fn kernels_of(activation: Activation) -> Option<Kernels> {
    match activation {
        Activation::Gelu => Some(Kernels {
            codes_e4m3: kernels::ACTIVATION_CODES_GELU_E4M3,
            high: kernels::ACTIVATION_HIGH_GELU,
            backward_codes: |encoding| match encoding {
                Encoding::E5M2 => kernels::ACTIVATION_BACKWARD_CODES_GELU_E5M2,
                // E2M1 is quantized by itself.
                Encoding::E4M3 | Encoding::E2M1 => kernels::ACTIVATION_BACKWARD_CODES_GELU_E4M3,
            },
            backward_high: kernels::ACTIVATION_BACKWARD_HIGH_GELU,
        }),
        Activation::Geglu => Some(Kernels {
            codes_e4m3: kernels::ACTIVATION_CODES_GEGLU_E4M3,
            high: kernels::ACTIVATION_HIGH_GEGLU,
            backward_codes: |encoding| match encoding {
                Encoding::E5M2 => kernels::ACTIVATION_BACKWARD_CODES_GEGLU_E5M2,
                // E2M1 is quantized by itself.
                Encoding::E4M3 | Encoding::E2M1 => kernels::ACTIVATION_BACKWARD_CODES_GEGLU_E4M3,
            },
            backward_high: kernels::ACTIVATION_BACKWARD_HIGH_GEGLU,
        }),
        Activation::Swiglu => Some(Kernels {
            codes_e4m3: kernels::ACTIVATION_CODES_SWIGLU_E4M3,
            high: kernels::ACTIVATION_HIGH_SWIGLU,
            backward_codes: |encoding| match encoding {
                Encoding::E5M2 => kernels::ACTIVATION_BACKWARD_CODES_SWIGLU_E5M2,
                // E2M1 is quantized by itself.
                Encoding::E4M3 | Encoding::E2M1 => kernels::ACTIVATION_BACKWARD_CODES_SWIGLU_E4M3,
            },
            backward_high: kernels::ACTIVATION_BACKWARD_HIGH_SWIGLU,
        }),
        _ => None,
    }
}

/// The size of a launch over whole tiles, and the kernels that it may take.
pub(super) struct Whole {
    kernels: Kernels,
    rows: u32,
    cols: u32,
    run: u32,
    grid: Grid,
}

impl Whole {
    /// Returns the launch for an output of `rows` · `cols` from these inputs, or `None` if a kernel for any shape has to
    /// do it.
    pub(super) fn of(
        gpu: &Gpu,
        op: &'static str,
        activation: Activation,
        inputs: &[&Tensor],
        [rows, cols]: [usize; 2],
        sink: &Sink,
    ) -> Result<Option<Self>> {
        let is_whole = rows.is_multiple_of(TILE[0]) && cols.is_multiple_of(TILE[1]);
        let is_bf16 = inputs.iter().all(|input| input.dtype() == DType::BF16);
        // Columns of both halves are counted in 32 bits, too.
        let sizes = (u32::try_from(rows), u32::try_from(2 * cols));
        let ((Ok(rows), Ok(_)), Some(kernels)) = (sizes, kernels_of(activation)) else { return Ok(None) };
        if !is_whole || !is_bf16 || sink.is_special {
            return Ok(None);
        }
        let (grid, run) = strips(gpu, op, rows as usize, cols)?;
        Ok(Some(Self { kernels, rows, cols: cols as u32, run: run as u32, grid }))
    }

    /// Launches the forward kernel, or returns false if none makes these codes.
    ///
    /// # Safety
    /// h and the sink's outputs hold what [`Whole::of`] was told.
    pub(super) unsafe fn forward(&self, gpu: &Gpu, h: &Buffer, sink: &Sink) -> Result<bool> {
        let Self { kernels: Kernels { codes_e4m3, high, .. }, rows, cols, run, grid } = *self;
        match sink.encoding {
            None => {
                let args =
                    kernels::ActivationHigh { h: In::u16(h), rows, cols, run, high: Out::u16(sink.high) };
                // SAFETY: as the caller says.
                unsafe { gpu.load(high)?.launch(gpu, grid, &args) }?;
            }
            Some(Encoding::E4M3) => {
                let args = kernels::ActivationCodes {
                    h: In::u16(h),
                    rows,
                    cols,
                    run,
                    whole_codes: sink.whole_codes(),
                };
                // SAFETY: as above.
                unsafe { gpu.load(codes_e4m3)?.launch(gpu, grid, &args) }?;
            }
            Some(Encoding::E5M2 | Encoding::E2M1) => return Ok(false),
        }
        Ok(true)
    }

    /// Launches the backward kernel.
    ///
    /// # Safety
    /// dy, h, the sink's outputs and the partial sums hold what [`Whole::of`] was told.
    pub(super) unsafe fn backward(
        &self,
        gpu: &Gpu,
        [dy, h]: [&Buffer; 2],
        sink: &Sink,
        partial: Option<&Buffer>,
    ) -> Result<()> {
        let Self { kernels: Kernels { backward_codes, backward_high, .. }, rows, cols, run, grid } = *self;
        let (dy, h, partial_sums) = (In::u16(dy), In::u16(h), Out::f32(partial));
        match sink.encoding {
            None => {
                let high = Out::u16(sink.high);
                let args = kernels::ActivationBackwardHigh { dy, h, rows, cols, run, high, partial_sums };
                // SAFETY: as the caller says.
                unsafe { gpu.load(backward_high)?.launch(gpu, grid, &args) }
            }
            Some(encoding) => {
                let whole_codes = sink.whole_codes();
                let args =
                    kernels::ActivationBackwardCodes { dy, h, rows, cols, run, whole_codes, partial_sums };
                // SAFETY: as above.
                unsafe { gpu.load(backward_codes(encoding))?.launch(gpu, grid, &args) }
            }
        }
    }
}
