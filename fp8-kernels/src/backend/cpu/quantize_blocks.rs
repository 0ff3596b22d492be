//! Quantization with a scale for each row or block: the codec of `fp8-format` on tensors.
//!
//! The columnwise copy is quantized from the source together with the rowwise one; that of 128 × 128 blocks has the same codes
//! and scales, transposed.

use super::{codec, parallel, transpose};
use crate::element::Float;
use crate::fp8_tensor::Layout;
use crate::host::Array;
use crate::{BlockRule, Device, Encoding, Fp8Tensor, Operand, Result, Shape, Slot, Tensor};
use fp8_format::slice::{BlockOutput, Codec, MxOutput, MxRounding};
use fp8_format::{Blocks, E4M3, E5M2, E8M0, Fp8};

pub(super) fn quantize_blocks<T: Float>(
    op: &'static str,
    data: &[T],
    shape: Shape,
    device: &Device,
    slot: &Slot<'_>,
    rule: &BlockRule,
) -> Result<Operand> {
    let matrix @ [rows, cols] = shape.matrix();
    let [sharing, turned_sharing] = rule.sharing();
    let mut rowwise = Parts::new(op, rule.blocks(), matrix)?;
    let mut columnwise = match rule.columnwise_blocks().filter(|_| slot.columnwise) {
        Some(blocks) => Some(Parts::new(op, blocks, [cols, rows])?),
        None => None,
    };
    match slot.encoding {
        Encoding::E4M3 => encode::<T, E4M3>(data, matrix, rule, &mut rowwise, columnwise.as_mut())?,
        Encoding::E5M2 => encode::<T, E5M2>(data, matrix, rule, &mut rowwise, columnwise.as_mut())?,
        Encoding::E2M1 => return Err(codec::packed(op)),
    }
    let amax = rowwise.amaxes.iter().copied().fold(0.0, f32::max);
    if !data.is_empty() {
        slot.record(amax)?;
    }
    count(data, matrix, rule, &rowwise, slot)?;
    let layout = |parts: Parts, shape: Shape, blocks: Blocks, [rows, cols]: [usize; 2], sharing| Layout {
        codes: Tensor::on_cpu(parts.codes, shape, device),
        scale_inv: parts.factors.tensor(Shape::from(blocks.grid(rows, cols)), device),
        tensor_scale: None,
        sharing,
    };
    let turned_shape = Shape::from([cols, rows]);
    let columnwise = match (columnwise, rule) {
        (Some(parts), _) => Some(layout(parts, turned_shape, rule.blocks(), [cols, rows], turned_sharing)),
        (None, BlockRule::RowsThenTensor(scaling)) if slot.columnwise => {
            let scale = scaling.scale::<f32>(amax, slot.encoding);
            let mut codes = Array::for_overwrite(op, rows * cols)?;
            codec::encode(data, scale, slot.encoding, &mut codes)?;
            Some(Layout {
                codes: Tensor::on_cpu(transpose::transpose_codes(&codes, rows, cols)?, turned_shape, device),
                scale_inv: Tensor::on_cpu(vec![scale.recip()], Shape::from([]), device),
                tensor_scale: None,
                sharing: turned_sharing,
            })
        }
        (None, _) => None,
    };
    let rowwise = layout(rowwise, shape, rule.blocks(), matrix, sharing);
    Ok(Operand::Fp8(Fp8Tensor::from_layouts(shape, slot.encoding, rowwise, columnwise)))
}

/// The outputs of one direction of a quantization.
struct Parts {
    codes: Array<u8>,
    factors: Factors,
    amaxes: Array<f32>,
}

enum Factors {
    F32(Array<f32>),
    Mx(Array<u8>),
}

impl Parts {
    fn new(op: &'static str, blocks: Blocks, [rows, cols]: [usize; 2]) -> Result<Self> {
        let [height, width] = blocks.grid(rows, cols);
        let count = height * width; // at most one for each element and row
        Ok(Self {
            codes: Array::for_overwrite(op, rows * cols)?,
            factors: match blocks {
                // Rules for those of E2M1 are refused.
                Blocks::Mx32 | Blocks::B1x16 | Blocks::B16x16 => {
                    Factors::Mx(Array::for_overwrite(op, count)?)
                }
                Blocks::Row | Blocks::B1x128 | Blocks::B128x128 => {
                    Factors::F32(Array::for_overwrite(op, count)?)
                }
            },
            amaxes: Array::for_overwrite(op, count)?,
        })
    }
}

impl Factors {
    fn tensor(self, shape: Shape, device: &Device) -> Tensor {
        match self {
            Self::F32(factors) => Tensor::on_cpu(factors, shape, device),
            Self::Mx(factors) => Tensor::on_cpu(factors, shape, device),
        }
    }
}

fn encode<T: Float, F: Fp8>(
    data: &[T],
    [rows, cols]: [usize; 2],
    rule: &BlockRule,
    rowwise: &mut Parts,
    columnwise: Option<&mut Parts>,
) -> Result<()> {
    fn f32_parts<F: Fp8>(parts: &mut Parts) -> Option<BlockOutput<'_, F>> {
        let Factors::F32(factors) = &mut parts.factors else { return None };
        let out = BlockOutput::new(bytemuck::cast_slice_mut(&mut parts.codes), factors);
        Some(BlockOutput { amax: Some(&mut parts.amaxes), ..out })
    }
    fn mx_parts<F: Fp8>(parts: &mut Parts) -> Option<MxOutput<'_, F>> {
        let Factors::Mx(factors) = &mut parts.factors else { return None };
        let out = MxOutput::new(
            bytemuck::cast_slice_mut(&mut parts.codes),
            bytemuck::cast_slice_mut::<u8, E8M0>(factors),
        );
        Some(MxOutput { amax: Some(&mut parts.amaxes), ..out })
    }
    let codec = Codec::new();
    match rule {
        BlockRule::F32(scaling) | BlockRule::RowsThenTensor(scaling) => {
            let Some(out) = f32_parts::<F>(rowwise) else { return Ok(()) };
            match columnwise.and_then(f32_parts::<F>) {
                None => codec.quantize_blocks(data, rows, cols, scaling, out)?,
                Some(turned) => {
                    codec.quantize_blocks_transpose(data, rows, cols, scaling, Some(out), turned)?
                }
            }
        }
        BlockRule::Mx(rounding) => {
            let Some(out) = mx_parts::<F>(rowwise) else { return Ok(()) };
            match columnwise.and_then(mx_parts::<F>) {
                None => codec.quantize_mx(data, rows, cols, *rounding, out)?,
                Some(turned) => {
                    codec.quantize_mx_transpose(data, rows, cols, *rounding, Some(out), turned)?
                }
            }
        }
    }
    Ok(())
}

/// Adds to the slot's counters. Only blocks with values that may saturate are read again.
fn count<T: Float>(
    data: &[T],
    [rows, cols]: [usize; 2],
    rule: &BlockRule,
    parts: &Parts,
    slot: &Slot<'_>,
) -> Result<()> {
    let Some(counters) = slot.counters.filter(|_| !data.is_empty()) else { return Ok(()) };
    let [height, width] = rule.blocks().size(cols);
    let across = rule.blocks().grid(rows, cols)[1];
    let step = parallel::row_elements(cols);
    let chunks = data.chunks(step).zip(parts.codes.chunks(step)).enumerate();
    parallel::try_for_each(chunks, |(index, (data, codes))| {
        let mut values = codec::count_codes(data, codes);
        for (row, data) in data.chunks(cols).enumerate() {
            let row = index * (step / cols) + row;
            let amaxes = &parts.amaxes[row / height * across..][..across];
            if amaxes.iter().any(|&amax| may_saturate(rule, amax)) {
                for (data, &amax) in data.chunks(width).zip(amaxes) {
                    let scale = match rule {
                        BlockRule::F32(scaling) | BlockRule::RowsThenTensor(scaling) => {
                            scaling.scale::<T>(amax, slot.encoding)
                        }
                        BlockRule::Mx(rounding) => rounding.scale(amax, slot.encoding).scale(),
                    };
                    values.saturated += codec::saturated(data, scale, amax, slot.encoding);
                }
            }
        }
        counters.add(values)
    })
}

/// Whether a block with this amax may have finite values that round beyond the largest code.
///
/// A scale that brings the amax to the largest code does so within an ulp, which rounds back. The scale of an infinite amax is 1
/// for f32 scales, and tiny for MX; MX scales that are rounded down may make the amax almost twice the largest code.
#[inline(always)]
fn may_saturate(rule: &BlockRule, amax: f32) -> bool {
    match rule {
        BlockRule::F32(_) | BlockRule::RowsThenTensor(_) => amax == f32::INFINITY,
        BlockRule::Mx(MxRounding::Ceil) => false,
        BlockRule::Mx(MxRounding::Floor) => true,
    }
}

pub(super) fn dequantize_blocks<T: Float>(x: &Fp8Tensor, blocks: Blocks) -> Result<Array<T>> {
    fn of<T: Float, F: Fp8>(
        layout: &Layout,
        [rows, cols]: [usize; 2],
        blocks: Blocks,
        out: &mut [T],
    ) -> Result<()> {
        let codec = Codec::new();
        let codes: &[F] = bytemuck::cast_slice(layout.codes.as_slice::<u8>()?);
        if blocks == Blocks::Mx32 {
            let scales: &[E8M0] = bytemuck::cast_slice(layout.scale_inv.as_slice::<u8>()?);
            return Ok(codec.dequantize_mx(codes, rows, cols, scales, out)?);
        }
        Ok(codec.dequantize_blocks(codes, rows, cols, blocks, layout.scale_inv.as_slice()?, out)?)
    }
    let (layout, matrix) = (x.rowwise_layout("dequantize")?, x.matrix());
    let mut out = Array::for_overwrite("dequantize", matrix[0] * matrix[1])?;
    match x.encoding() {
        Encoding::E4M3 => of::<T, E4M3>(&layout, matrix, blocks, &mut out)?,
        Encoding::E5M2 => of::<T, E5M2>(&layout, matrix, blocks, &mut out)?,
        Encoding::E2M1 => return Err(codec::packed("dequantize")),
    }
    Ok(out)
}
