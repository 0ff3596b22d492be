//! `activation` and its gradients on a GPU: one kernel, plain or gated, for every way a result may leave.

use super::blocks::{self, Values};
use super::reduce::{column_pieces, finish_columns};
use super::slot::{self, AmaxRequest, Output};
use super::tiles::strips;
use super::{Buffer, Gpu, Joined, Source, args, dtype_number};
use crate::ops::Activation;
use crate::{DType, Encoding, Operand, Result, Shape, Slot, Tensor};

/// Returns the kernels' number for a function.
const fn kind(activation: Activation) -> i32 {
    match activation {
        Activation::Gelu | Activation::Geglu => 0,
        Activation::Silu | Activation::Swiglu => 1,
        Activation::Qgelu | Activation::Qgeglu => 2,
        Activation::Relu | Activation::Reglu => 3,
        Activation::Srelu | Activation::Sreglu => 4,
        Activation::Glu => 5,
    }
}

/// The addresses and the format with which a launch stores its results. An address is 0 if there is none.
#[derive(Default)]
struct Sink {
    codes: u64,
    columnwise: u64,
    format: i32,
    scale: u64,
    scale_inv: u64,
    high: u64,
    unset: u64,
    amax: u64,
    counters: u64,
}

impl Sink {
    fn amax(request: &AmaxRequest) -> Self {
        Self { unset: request.unset, amax: request.cell, ..Self::default() }
    }

    fn output(output: &Output<'_>, op: &'static str) -> Result<Self> {
        let address = |buffer: Option<&Buffer>| buffer.map_or(0, Buffer::ptr);
        Ok(Self {
            codes: address(output.rowwise()),
            columnwise: address(output.columnwise()),
            format: output.format(),
            scale: output.scale(),
            scale_inv: address(output.scale_inv()),
            high: address(output.high()),
            unset: 0,
            amax: output.amax(op)?,
            counters: output.counters(op)?,
        })
    }
}

pub(crate) fn activation(
    gpu: &Gpu,
    h: &Tensor,
    activation: Activation,
    shape: Shape,
    slot: &Slot<'_>,
) -> Result<Operand> {
    let op = "activation";
    let [rows, cols] = shape.matrix();
    if let Some(rule) = slot.block_rule() {
        let values = Values { op, shape, dtype: DType::F32, device: h.device(), partial_sums: None };
        return blocks::quantize(gpu, &values, slot, &rule, |grid, sink| {
            let name = if activation.is_gated() { "activation_blocks_gated" } else { "activation_blocks" };
            let kernel = gpu.kernel(Source::ActivationBlocks, name)?;
            let own = args![h.cuda(op)?, dtype_number(h.dtype()), kind(activation), rows as u64, cols as u64];
            // SAFETY: the kernel's parameters (h, dtype, kind, rows, cols, BLOCK_PARAMS); h holds rows · cols elements, or twice
            // as many where gated (checked by `ops::activation`); the rest is what `blocks` made for the output.
            unsafe { kernel.launch(gpu, grid, &Joined::new(own, *sink)) }
        });
    }
    let launch = |sink: &Sink| {
        let name = if activation.is_gated() { "activation_gated" } else { "activation" };
        let kernel = gpu.kernel(Source::Activation, name)?;
        let (grid, run) = strips(gpu, op, rows, cols)?;
        let args = args![
            h.cuda(op)?,
            dtype_number(h.dtype()),
            kind(activation),
            rows as u64,
            cols as u64,
            run,
            sink.codes,
            sink.columnwise,
            sink.format,
            sink.scale,
            sink.scale_inv,
            sink.high,
            sink.unset,
            sink.amax,
            sink.counters,
        ];
        // SAFETY: the kernel's parameters (h, dtype, kind, rows, cols, run, codes, columnwise, format, scale, scale_inv,
        // high, unset, amax, counters); outputs hold rows · cols elements, h as many, or twice as many where gated (checked
        // by `ops::activation`); the blocks are those of this run; cells are alive: their slot is borrowed.
        unsafe { kernel.launch(gpu, grid, &args) }
    };
    let scale = slot::resolve(gpu, op, slot, |request| launch(&Sink::amax(&request)))?;
    let output = Output::new(gpu, slot, shape, h.device(), scale, h.dtype())?;
    if shape.numel() == 0 {
        return output.finish_inverse(gpu);
    }
    launch(&Sink::output(&output, op)?)?;
    Ok(output.finish())
}

pub(crate) fn activation_backward(
    gpu: &Gpu,
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    // A slot that is off rounds to h's dtype.
    let slot = Slot::off(Encoding::E5M2);
    let dh = backward(gpu, "activation_backward", dy, h, activation, &slot, None)?;
    dh.dequantize(h.dtype())
}

pub(crate) fn activation_backward_quantize_dbias(
    gpu: &Gpu,
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
) -> Result<(Operand, Tensor)> {
    let op = "activation_backward_quantize_dbias";
    let [rows, cols] = h.shape().matrix();
    // Without elements there is nothing to add up.
    let pieces = if h.numel() == 0 { 0 } else { column_pieces(rows) };
    let partial = gpu.alloc(DType::F32, pieces * cols)?;
    let dh = backward(gpu, op, dy, h, activation, slot, Some(&partial))?;
    let dbias = finish_columns(gpu, op, &partial, pieces, cols)?;
    Ok((dh, Tensor::from_cuda(dbias, Shape::from([cols]), h.device())))
}

fn backward(
    gpu: &Gpu,
    op: &'static str,
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
    partial: Option<&Buffer>,
) -> Result<Operand> {
    let [rows, cols] = dy.shape().matrix();
    if let Some(rule) = slot.block_rule() {
        let values =
            Values { op, shape: *h.shape(), dtype: DType::F32, device: h.device(), partial_sums: partial };
        return blocks::quantize(gpu, &values, slot, &rule, |grid, sink| {
            let gated = activation.is_gated();
            let name = if gated { "activation_backward_blocks_gated" } else { "activation_backward_blocks" };
            let kernel = gpu.kernel(Source::ActivationBlocks, name)?;
            let (dy_number, h_number) = (dtype_number(dy.dtype()), dtype_number(h.dtype()));
            let (rows, cols) = (rows as u64, cols as u64);
            let own = args![dy.cuda(op)?, dy_number, h.cuda(op)?, h_number, kind(activation), rows, cols];
            // SAFETY: the kernel's parameters (dy, dy_dtype, h, dtype, kind, rows, cols, BLOCK_PARAMS); dy holds rows · cols
            // elements, h and the output as many, or twice as many where gated (checked by `ops`); the rest is what `blocks`
            // made for the output.
            unsafe { kernel.launch(gpu, grid, &Joined::new(own, *sink)) }
        });
    }
    let launch = |sink: &Sink, partial: Option<&Buffer>| {
        let name = if activation.is_gated() { "activation_backward_gated" } else { "activation_backward" };
        let kernel = gpu.kernel(Source::Activation, name)?;
        let (grid, run) = strips(gpu, op, rows, cols)?;
        let args = args![
            dy.cuda(op)?,
            dtype_number(dy.dtype()),
            h.cuda(op)?,
            dtype_number(h.dtype()),
            kind(activation),
            rows as u64,
            cols as u64,
            run,
            sink.codes,
            sink.columnwise,
            sink.format,
            sink.scale,
            sink.scale_inv,
            sink.high,
            sink.unset,
            sink.amax,
            sink.counters,
            partial,
        ];
        // SAFETY: the kernel's parameters (dy, dy_dtype, h, dtype, kind, rows, cols, run, codes, columnwise, format, scale,
        // scale_inv, high, unset, amax, counters, partial_sums); dy holds rows · cols elements, h and the outputs as many,
        // or twice as many where gated (checked by `ops`), partial sums a row of h's columns for each row of tiles; the
        // blocks are those of this run; cells are alive: their slot is borrowed.
        unsafe { kernel.launch(gpu, grid, &args) }
    };
    let scale = slot::resolve(gpu, op, slot, |request| launch(&Sink::amax(&request), None))?;
    let output = Output::new(gpu, slot, *h.shape(), h.device(), scale, h.dtype())?;
    if h.numel() == 0 {
        return output.finish_inverse(gpu);
    }
    launch(&Sink::output(&output, op)?, partial)?;
    Ok(output.finish())
}
