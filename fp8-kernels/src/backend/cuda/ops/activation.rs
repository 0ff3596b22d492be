//! `activation` and its gradients on a GPU: one kernel, plain or gated, for every way a result may leave, and those of
//! `activation_tiles` for what trains.

use super::activation_sink::Sink;
use super::activation_tiles::Whole;
use super::blocks::{self, Values};
use super::reduce::{Place, column_pieces, finish_columns};
use super::slot::{self, Output};
use super::tiles::strips;
use super::{Buffer, Gpu, In, Out, dtype_number, kernels};
use crate::ops::{Activation, GradientMut};
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
        return blocks::quantize(gpu, &values, slot, &rule, |grid, block| {
            let kernel = gpu.load(match activation.is_gated() {
                true => kernels::ACTIVATION_BLOCKS_GATED,
                false => kernels::ACTIVATION_BLOCKS,
            })?;
            let args = kernels::ActivationBlocks {
                h: In::void(h.cuda(op)?),
                dtype: dtype_number(h.dtype()),
                kind: kind(activation),
                rows: rows as u64,
                cols: cols as u64,
                block,
            };
            // SAFETY: h holds rows · cols elements, or twice as many where gated (checked by `ops::activation`); the rest is
            // what `blocks` made for the output.
            unsafe { kernel.launch(gpu, grid, &args) }
        });
    }
    let launch = |sink: &Sink| {
        if let Some(whole) = Whole::of(gpu, op, activation, &[h], [rows, cols], sink)? {
            // SAFETY: as below; whole tiles and bf16 are what `of` has found.
            if unsafe { whole.forward(gpu, h.cuda(op)?, sink) }? {
                return Ok(());
            }
        }
        let kernel = gpu.load(match activation.is_gated() {
            true => kernels::ACTIVATION_GATED,
            false => kernels::ACTIVATION,
        })?;
        let (grid, run) = strips(gpu, op, rows, cols)?;
        let args = kernels::Activation {
            h: In::void(h.cuda(op)?),
            dtype: dtype_number(h.dtype()),
            kind: kind(activation),
            rows: rows as u64,
            cols: cols as u64,
            run,
            codes: Out::u8(sink.codes),
            columnwise: Out::u8(sink.columnwise),
            format: sink.format(),
            scale: In::f32(sink.scale),
            scale_inv: Out::f32(sink.scale_inv),
            high: Out::void(sink.high),
            unset: In::f32(sink.unset),
            amax: Out::i32(sink.amax),
            counters: Out::u64(sink.counters),
        };
        // SAFETY: outputs hold rows · cols elements, h as many, or twice as many where gated (checked by
        // `ops::activation`); the blocks are those of this run; cells are alive: their slot is borrowed.
        unsafe { kernel.launch(gpu, grid, &args) }
    };
    let scale = slot::resolve(gpu, op, slot, |request| launch(&Sink::amax(&request, slot)))?;
    let output = Output::new(gpu, slot, shape, h.device(), scale, h.dtype())?;
    if shape.numel() == 0 {
        return output.finish_inverse(gpu);
    }
    launch(&Sink::output(&output, op, slot)?)?;
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
    let cols = h.shape().last_dim();
    let dbias = gpu.alloc(DType::F32, cols)?;
    let op = "activation_backward_quantize_dbias";
    let dh = backward_dbias(gpu, op, dy, h, activation, slot, Place::new(&dbias))?;
    Ok((dh, Tensor::from_cuda(dbias, Shape::from([cols]), h.device())))
}

pub(crate) fn activation_backward_quantize_dbias_into(
    gpu: &Gpu,
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
    dbias: &mut GradientMut<'_>,
) -> Result<Operand> {
    let place = Place::of(dbias)?;
    backward_dbias(gpu, "activation_backward_quantize_dbias_into", dy, h, activation, slot, place)
}

fn backward_dbias(
    gpu: &Gpu,
    op: &'static str,
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
    dbias: Place,
) -> Result<Operand> {
    let [rows, cols] = h.shape().matrix();
    // Without elements there is nothing to add up.
    let pieces = if h.numel() == 0 { 0 } else { column_pieces(rows) };
    let partial = gpu.alloc(DType::F32, pieces * cols)?;
    let dh = backward(gpu, op, dy, h, activation, slot, Some(&partial))?;
    finish_columns(gpu, op, &partial, pieces, cols, dbias)?;
    Ok(dh)
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
        return blocks::quantize(gpu, &values, slot, &rule, |grid, block| {
            let kernel = gpu.load(match activation.is_gated() {
                true => kernels::ACTIVATION_BACKWARD_BLOCKS_GATED,
                false => kernels::ACTIVATION_BACKWARD_BLOCKS,
            })?;
            let args = kernels::ActivationBackwardBlocks {
                dy: In::void(dy.cuda(op)?),
                dy_dtype: dtype_number(dy.dtype()),
                h: In::void(h.cuda(op)?),
                dtype: dtype_number(h.dtype()),
                kind: kind(activation),
                rows: rows as u64,
                cols: cols as u64,
                block,
            };
            // SAFETY: dy holds rows · cols elements, h and the output as many, or twice as many where gated (checked by
            // `ops`); the rest is what `blocks` made for the output.
            unsafe { kernel.launch(gpu, grid, &args) }
        });
    }
    let launch = |sink: &Sink, partial: Option<&Buffer>| {
        if let Some(whole) = Whole::of(gpu, op, activation, &[dy, h], [rows, cols], sink)? {
            // SAFETY: as below; whole tiles and bf16 are what `of` has found.
            return unsafe { whole.backward(gpu, [dy.cuda(op)?, h.cuda(op)?], sink, partial) };
        }
        let kernel = gpu.load(match activation.is_gated() {
            true => kernels::ACTIVATION_BACKWARD_GATED,
            false => kernels::ACTIVATION_BACKWARD,
        })?;
        let (grid, run) = strips(gpu, op, rows, cols)?;
        let args = kernels::ActivationBackward {
            dy: In::void(dy.cuda(op)?),
            dy_dtype: dtype_number(dy.dtype()),
            h: In::void(h.cuda(op)?),
            dtype: dtype_number(h.dtype()),
            kind: kind(activation),
            rows: rows as u64,
            cols: cols as u64,
            run,
            codes: Out::u8(sink.codes),
            columnwise: Out::u8(sink.columnwise),
            format: sink.format(),
            scale: In::f32(sink.scale),
            scale_inv: Out::f32(sink.scale_inv),
            high: Out::void(sink.high),
            unset: In::f32(sink.unset),
            amax: Out::i32(sink.amax),
            counters: Out::u64(sink.counters),
            partial_sums: Out::f32(partial),
        };
        // SAFETY: dy holds rows · cols elements, h and the outputs as many, or twice as many where gated (checked by
        // `ops`), partial sums a row of h's columns for each row of tiles; the blocks are those of this run; cells are
        // alive: their slot is borrowed.
        unsafe { kernel.launch(gpu, grid, &args) }
    };
    let scale = slot::resolve(gpu, op, slot, |request| launch(&Sink::amax(&request, slot), None))?;
    let output = Output::new(gpu, slot, *h.shape(), h.device(), scale, h.dtype())?;
    if h.numel() == 0 {
        return output.finish_inverse(gpu);
    }
    launch(&Sink::output(&output, op, slot)?, partial)?;
    Ok(output.finish())
}
