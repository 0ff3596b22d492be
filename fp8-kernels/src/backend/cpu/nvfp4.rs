//! NVFP4: the codec of `fp8-format` on tensors.

use super::Buffer;
use crate::element::Float;
use crate::fp8_tensor::{Layout, packed_width};
use crate::host::Array;
use crate::ops::DropoutKey;
use crate::{
    CounterValues, Device, Encoding, Fp8Tensor, Nvfp4Rule, Operand, Result, Shape, Slot, StochasticRounding,
    Tensor,
};
use fp8_format::philox::BlockRandom;
use fp8_format::slice::{Codec, Nvfp4Copy, Nvfp4Options, Nvfp4Output};
use fp8_format::{Blocks, E2M1, E4M3, TensorScale};
use half::{bf16, f16};

pub(crate) fn amax(x: &Tensor, hadamard: bool) -> Result<Tensor> {
    let op = "nvfp4_amax";
    let values = match x.cpu_buffer(op)? {
        Buffer::F32(data) => amaxes(data, x.shape().matrix(), hadamard)?,
        Buffer::BF16(data) => amaxes::<bf16>(data, x.shape().matrix(), hadamard)?,
        Buffer::F16(data) => amaxes::<f16>(data, x.shape().matrix(), hadamard)?,
        _ => [0.0; 2],
    };
    Ok(Tensor::on_cpu(values.to_vec(), Shape::from([2]), x.device()))
}

/// The amaxes of the rowwise and of the columnwise copy.
fn amaxes<T: Float>(data: &[T], [rows, cols]: [usize; 2], hadamard: bool) -> Result<[f32; 2]> {
    let codec = Codec::new();
    let plain = codec.nvfp4_amax(data, rows, cols, Nvfp4Copy::Rowwise)?;
    let columnwise = if hadamard { codec.nvfp4_amax(data, rows, cols, Nvfp4Copy::Hadamard)? } else { plain };
    Ok([plain, columnwise])
}

pub(super) fn quantize<T: Float>(
    op: &'static str,
    data: &[T],
    shape: Shape,
    device: &Device,
    slot: &Slot<'_>,
    rule: &Nvfp4Rule<'_>,
) -> Result<Operand> {
    let matrix = shape.matrix();
    let hadamard = rule.hadamard && slot.columnwise;
    let amaxes = match rule.amax {
        None => amaxes(data, matrix, hadamard)?,
        Some(amax) => {
            let values: Vec<f32> = amax.to_vec()?;
            // As a GPU takes an amax that is none, without asking the host: NaN as 0, a negative number as its magnitude.
            let magnitude = |amax: f32| if amax.is_nan() { 0.0 } else { amax.abs() };
            [0, 1].map(|i| values.get(i).copied().map_or(0.0, magnitude))
        }
    };
    let [sharing, turned_sharing] = rule.sharing();
    let copy = |copy: Nvfp4Copy, amax: f32, shape: Shape, sharing| -> Result<Layout> {
        let [height, width] = copy.shape(matrix[0], matrix[1]);
        let columnwise = copy != Nvfp4Copy::Rowwise;
        let random = rule.random.as_ref().map(|random| numbers(random, matrix, columnwise)).transpose()?;
        let options = Nvfp4Options { copy, blocks: rule.blocks, random };
        let grid = rule.blocks.grid(height, width);
        let mut codes = Array::for_overwrite(op, height * packed_width(width, false))?;
        let mut scales: Array<u8> = Array::for_overwrite(op, grid[0] * grid[1])?;
        let out = Nvfp4Output::new(&mut codes, bytemuck::cast_slice_mut::<u8, E4M3>(&mut scales));
        let factors = Codec::new().quantize_nvfp4(data, matrix[0], matrix[1], amax, &options, out)?;
        let factors = vec![factors.encode(), factors.decode()];
        Ok(Layout {
            codes: Tensor::on_cpu(codes, shape.with_last(packed_width(width, false)), device),
            scale_inv: Tensor::on_cpu(scales, Shape::from(grid), device),
            tensor_scale: Some(Tensor::on_cpu(factors, Shape::from([2]), device)),
            sharing,
        })
    };
    let rowwise = copy(Nvfp4Copy::Rowwise, amaxes[0], shape, sharing)?;
    let turned = if rule.hadamard { Nvfp4Copy::Hadamard } else { Nvfp4Copy::Columnwise };
    let turned_shape = Shape::from([matrix[1], matrix[0]]);
    let columnwise =
        slot.columnwise.then(|| copy(turned, amaxes[1], turned_shape, turned_sharing)).transpose()?;
    if !data.is_empty() {
        slot.record(amaxes[0])?;
        if let Some(counters) = slot.counters {
            counters.add(count(data, matrix, rule.blocks, &rowwise)?)?;
        }
    }
    Ok(Operand::Fp8(Fp8Tensor::from_layouts(shape, Encoding::E2M1, rowwise, columnwise)))
}

/// The random bytes of a copy of a `[rows, cols]` matrix.
fn numbers(random: &StochasticRounding<'_>, matrix: [usize; 2], columnwise: bool) -> Result<BlockRandom> {
    let draw = if columnwise { random.draw.mask(1) } else { random.draw.clone() };
    let DropoutKey { seed, offset } = draw.read()?;
    let [first, step] = random.counters(matrix, columnwise);
    Ok(BlockRandom::new(seed, offset).part(first, step))
}

/// Counts the values that the rowwise codes saturated, and those that became 0, be it by their codes or by the scale of their block.
/// Blocks with a NaN count their NaNs alone.
fn count<T: Float>(
    data: &[T],
    [rows, cols]: [usize; 2],
    blocks: Blocks,
    layout: &Layout,
) -> Result<CounterValues> {
    let tensor = factors(layout)?;
    let (codes, scales) = (layout.codes.as_slice::<u8>()?, layout.scale_inv.as_slice::<u8>()?);
    let [height, _] = blocks.size(cols);
    let (width, across) = (packed_width(cols, false), cols.div_ceil(16));
    let mut values = CounterValues { elements: data.len() as u64, ..CounterValues::default() };
    for (row, data) in data.chunks(cols).take(rows).enumerate() {
        for (block, data) in data.chunks(16).enumerate() {
            let scale = E4M3::from_bits(scales[row / height * across + block]);
            let (factor, lost) = (tensor.block_factor(scale), scale.to_f32() == 0.0);
            for (i, v) in data.iter().map(|x| x.to_f32()).enumerate() {
                values.nan += u64::from(v.is_nan());
                if scale.is_nan() {
                    // Its codes are those without the NaN, whose scale is not known any more.
                    continue;
                }
                let [low, high] = E2M1::unpack(codes[row * width + block * 8 + i / 2]);
                let code = if i % 2 == 0 { low } else { high };
                let is_beyond = v.abs() < f32::INFINITY && (v * factor).abs() >= 7.0;
                values.saturated += u64::from(is_beyond && !lost);
                values.underflowed += u64::from(v != 0.0 && (lost || code.is_zero()));
            }
        }
    }
    Ok(values)
}

/// The factors of a tensor.
fn factors(layout: &Layout) -> Result<TensorScale> {
    let encode = match &layout.tensor_scale {
        Some(factors) => factors.as_slice::<f32>()?.first().copied().unwrap_or(1.0),
        None => 1.0,
    };
    Ok(TensorScale::from_encode(encode))
}

/// The factor that brings code · scale back.
pub(super) fn decode(layout: &Layout) -> Result<f32> {
    match &layout.tensor_scale {
        Some(factors) => Ok(factors.as_slice::<f32>()?.get(1).copied().unwrap_or(1.0)),
        None => Ok(1.0),
    }
}

pub(super) fn dequantize<T: Float>(x: &Fp8Tensor, blocks: Blocks) -> Result<Array<T>> {
    let op = "dequantize";
    let (layout, [rows, cols]) = (x.rowwise_layout(op)?, x.matrix());
    let mut out = Array::for_overwrite(op, rows * cols)?;
    let scales: &[E4M3] = bytemuck::cast_slice(layout.scale_inv.as_slice::<u8>()?);
    let (codes, tensor) = (layout.codes.as_slice::<u8>()?, factors(&layout)?);
    Codec::new().dequantize_nvfp4(codes, rows, cols, blocks, scales, tensor, &mut out)?;
    Ok(out)
}

/// Packed codes of the transpose of a `[rows, cols]` matrix.
pub(crate) fn transpose(op: &'static str, codes: &Tensor, [rows, cols]: [usize; 2]) -> Result<Tensor> {
    let from = codes.as_slice::<u8>()?;
    let (width, turned) = (packed_width(cols, false), packed_width(rows, false));
    let mut to: Array<u8> = Array::zeroed(op, cols * turned)?;
    // Rows of no columns may be many.
    for row in 0..if cols == 0 { 0 } else { rows } {
        for col in 0..cols {
            let code = from[row * width + col / 2] >> (col % 2 * 4) & 0xF;
            to[col * turned + row / 2] |= code << (row % 2 * 4);
        }
    }
    Ok(Tensor::on_cpu(to, Shape::from([cols, turned]), codes.device()))
}
