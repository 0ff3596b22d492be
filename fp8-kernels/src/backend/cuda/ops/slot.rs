//! The slot of a quantizing operation: its scale as an address, resolved on the device, and the output's buffers.
//!
//! Kernels decide whether a cell is set, and which scale a tensor's own amax gives, so the host never waits. A user's scale
//! policy is the exception, since it runs on the host.

use super::rule::RuleArgs;
use super::{Buffer, Gpu, Grid, In, Out, format_number, kernels};
use crate::{
    Cell, DType, Device, Error, Fp8Tensor, Operand, REST, Result, Scale, Shape, Slot, Tensor, TransposePolicy,
};

/// Finds the amax of what is to be quantized: max-combines it into the cell at `cell`, or does nothing where `unset`, the
/// address of a scale cell, is not 0 and that cell is set.
pub(super) struct AmaxRequest {
    pub(super) unset: u64,
    pub(super) cell: u64,
}

/// A scale that work queued from now on finds on the device.
#[derive(Debug)]
pub(super) struct DeviceScale {
    address: u64,
    /// The buffer that holds the scale, if no cell of the caller's holds it.
    _owned: Option<Buffer>,
}

impl DeviceScale {
    /// Returns the address of one f32, whose magnitude is the scale.
    pub(super) const fn address(&self) -> u64 {
        self.address
    }

    fn owned(buffer: Buffer, index: u64) -> Self {
        Self { address: buffer.ptr() + 4 * index, _owned: Some(buffer) }
    }
}

/// The scale to quantize with, or `None` in high precision. `amax` is called at most once; for a tensor of no elements it
/// need do nothing.
pub(super) fn resolve(
    gpu: &Gpu,
    op: &'static str,
    slot: &Slot<'_>,
    amax: impl FnOnce(AmaxRequest) -> Result<()>,
) -> Result<Option<DeviceScale>> {
    let (cell, rule, keep) = match slot.scale {
        Scale::Off => return Ok(None),
        // `ops` refuses such slots on a GPU. Should one get here, it is an error, too.
        Scale::Blocks(_) | Scale::Nvfp4(_) => return slot.resolve(|| Ok(0.0)).map(|_| None),
        Scale::Cell { cell, .. } if cell.is_known_set() => {
            return Ok(Some(DeviceScale { address: cell.cuda(op)?, _owned: None }));
        }
        Scale::FromAmax { amax, rule } => {
            let scale = rule.scale(amax, 1.0)?;
            return Ok(Some(DeviceScale::owned(gpu.filled_f32(scale, 1)?, 0)));
        }
        Scale::Cell { .. } if gpu.is_capturing() => return Err(uncalibrated(op)),
        Scale::Cell { cell, first, keep } => (Some(cell), first, keep),
        Scale::FromTensor(rule) => (None, rule, false),
    };
    let Some(rule) = RuleArgs::new(rule) else {
        gpu.expect_eager(op, "a user's scale policy runs on the host: use a named rule")?;
        return on_host(gpu, slot, cell, amax).map(Some);
    };
    let cell = cell.map_or(Ok(0), |cell| cell.cuda(op))?;
    // The amax, then the scale.
    let found = gpu.filled_f32(REST, 2)?;
    amax(AmaxRequest { unset: cell, cell: found.ptr() })?;
    let scale = DeviceScale::owned(found, 1);
    launch_scale(gpu, [cell, scale.address - 4], keep, rule, scale.address)?;
    Ok(Some(scale))
}

/// Writes to `scale` what to quantize with: the cell's magnitude, or while the cell is unset or its address is 0 the rule's
/// scale for the amax, which an unset cell keeps if `keep`. The three are addresses of one f32 each.
pub(super) fn launch_scale(
    gpu: &Gpu,
    [cell, amax]: [u64; 2],
    keep: bool,
    rule: RuleArgs,
    scale: u64,
) -> Result<()> {
    let RuleArgs { kind, fp8_max, scaled_max, margin, epsilon } = rule;
    let kernel = gpu.load(kernels::QUANTIZE_SCALE)?;
    let args = kernels::QuantizeScale {
        cell: Out::f32(cell),
        keep: i32::from(keep),
        amax: In::f32(amax),
        kind,
        fp8_max,
        scaled_max,
        margin,
        epsilon,
        scale: Out::f32(scale),
    };
    // SAFETY: cell is null or an f32, amax and scale are one f32 each, as the caller says.
    unsafe { kernel.launch(gpu, Grid { blocks: 1, threads: 32, shared: 0 }, &args) }
}

/// A graph whose slots have scales reads each tensor once; and it stays as it was recorded.
fn uncalibrated(op: &'static str) -> Error {
    let remedy = "a slot has no scale yet: run and commit steps until every quantized tensor has had a finite amax > 0";
    Error::Capture { op: op.to_owned(), remedy }
}

/// With a user's policy: waits for the device where the cell or the tensor has to be read.
fn on_host(
    gpu: &Gpu,
    slot: &Slot<'_>,
    cell: Option<&Cell>,
    amax: impl FnOnce(AmaxRequest) -> Result<()>,
) -> Result<DeviceScale> {
    let read = || {
        let found = gpu.filled_f32(REST, 1)?;
        amax(AmaxRequest { unset: 0, cell: found.ptr() })?;
        let mut value = [0.0f32];
        gpu.download(found.ptr(), &mut value)?;
        Ok(value[0].max(0.0))
    };
    // In high precision there is no scale, and nobody comes here.
    let scale = slot.resolve(read)?.unwrap_or(1.0);
    debug_assert!(cell.is_none() || !slot.is_off(), "a slot that is off has no scale to resolve");
    Ok(DeviceScale::owned(gpu.filled_f32(scale, 1)?, 0))
}

/// The buffers that a quantizing operation fills, and the slot and shape of the operand that they become.
#[derive(Debug)]
pub(super) struct Output<'a> {
    slot: &'a Slot<'a>,
    shape: Shape,
    device: &'a Device,
    buffers: Buffers,
}

/// The buffers of an output.
#[derive(Debug)]
enum Buffers {
    /// Values in high precision.
    High(Buffer),
    Fp8 {
        scale: DeviceScale,
        /// Codes as stored.
        rowwise: Buffer,
        /// Codes of the transpose.
        columnwise: Option<Buffer>,
        scale_inv: Buffer,
    },
}

impl<'a> Output<'a> {
    /// Allocates room for codes if there is a scale, else for values of `dtype`.
    pub(super) fn new(
        gpu: &Gpu,
        slot: &'a Slot<'a>,
        shape: Shape,
        device: &'a Device,
        scale: Option<DeviceScale>,
        dtype: DType,
    ) -> Result<Self> {
        let len = shape.numel();
        let buffers = match scale {
            None => Buffers::High(gpu.alloc(dtype, len)?),
            Some(scale) => {
                let rowwise = gpu.alloc(DType::U8, len)?;
                let is_wanted = slot.columnwise && device.transpose_policy() == TransposePolicy::WithCast;
                let columnwise = is_wanted.then(|| gpu.alloc(DType::U8, len)).transpose()?;
                Buffers::Fp8 { scale, rowwise, columnwise, scale_inv: gpu.alloc(DType::F32, 1)? }
            }
        };
        Ok(Self { slot, shape, device, buffers })
    }

    /// The buffer of codes as stored.
    pub(super) fn rowwise(&self) -> Option<&Buffer> {
        match &self.buffers {
            Buffers::High(_) => None,
            Buffers::Fp8 { rowwise, .. } => Some(rowwise),
        }
    }

    /// The buffer of the transpose's codes.
    pub(super) fn columnwise(&self) -> Option<&Buffer> {
        match &self.buffers {
            Buffers::High(_) => None,
            Buffers::Fp8 { columnwise, .. } => columnwise.as_ref(),
        }
    }

    /// The buffer of values in high precision.
    pub(super) fn high(&self) -> Option<&Buffer> {
        match &self.buffers {
            Buffers::High(values) => Some(values),
            Buffers::Fp8 { .. } => None,
        }
    }

    /// The buffer of the dequantization factor.
    pub(super) fn scale_inv(&self) -> Option<&Buffer> {
        match &self.buffers {
            Buffers::High(_) => None,
            Buffers::Fp8 { scale_inv, .. } => Some(scale_inv),
        }
    }

    /// The address of the scale, or 0.
    pub(super) fn scale(&self) -> u64 {
        match &self.buffers {
            Buffers::High(_) => 0,
            Buffers::Fp8 { scale, .. } => scale.address,
        }
    }

    pub(super) fn format(&self) -> i32 {
        format_number(self.slot.encoding)
    }

    /// The address of the slot's amax cell, or 0: a tensor of no elements has no amax.
    pub(super) fn amax(&self, op: &'static str) -> Result<u64> {
        self.slot.amax.filter(|_| self.shape.numel() > 0).map_or(Ok(0), |cell| cell.cuda(op))
    }

    /// The address of the slot's counters, or 0: nothing is counted in high precision.
    pub(super) fn counters(&self, op: &'static str) -> Result<u64> {
        match (&self.buffers, self.slot.counters) {
            (Buffers::Fp8 { .. }, Some(counters)) => counters.cuda(op),
            (Buffers::High(_), _) | (_, None) => Ok(0),
        }
    }

    /// Writes the dequantization factor if no kernel of the operation does: for a tensor of no elements, and for codes that
    /// a library made.
    pub(super) fn finish_inverse(self, gpu: &Gpu) -> Result<Operand> {
        if let Buffers::Fp8 { scale, scale_inv, .. } = &self.buffers {
            let kernel = gpu.load(kernels::QUANTIZE_F32)?;
            let args = kernels::Quantize {
                x: In::void(0),
                n: 0,
                codes: Out::u8(0),
                format: 0,
                scale: In::f32(scale.address),
                scale_inv: Out::f32(scale_inv),
                amax: Out::i32(0),
                counters: Out::u64(0),
            };
            // SAFETY: n is 0, the scale and its inverse are one f32 each.
            unsafe { kernel.launch(gpu, Grid { blocks: 1, threads: 256, shared: 0 }, &args) }?;
        }
        Ok(self.finish())
    }

    /// Returns what the launch before fills.
    pub(super) fn finish(self) -> Operand {
        let [rows, cols] = self.shape.matrix();
        let tensor = |buffer, shape| Tensor::from_cuda(buffer, shape, self.device);
        match self.buffers {
            Buffers::High(values) => Operand::High(tensor(values, self.shape)),
            Buffers::Fp8 { rowwise, columnwise, scale_inv, .. } => Operand::Fp8(Fp8Tensor::from_parts(
                self.shape,
                tensor(rowwise, self.shape),
                columnwise.map(|codes| tensor(codes, Shape::from([cols, rows]))),
                self.slot.encoding,
                tensor(scale_inv, Shape::from([])),
            )),
        }
    }
}
