//! Quantization with a scale for each row or block: the host's side of `blocks.cuh`, for every operation that quantizes.

use super::kernels::BlockParams;
use super::{Buffer, Gpu, Grid, Out, format_number};
use crate::fp8_tensor::Layout;
use crate::{BlockRule, DType, Device, Fp8Tensor, Operand, Result, Shape, Slot, Tensor, bf16};
use fp8_format::Blocks;
use fp8_format::slice::{BlockScaling, MxRounding};

/// Rows and columns of a thread block's tile, and its threads, as `blocks.cuh` has them.
pub(super) const TILE: usize = 128;
const THREADS: u32 = 512;

/// The number by which kernels know blocks.
pub(super) const fn blocks_number(blocks: Blocks) -> i32 {
    match blocks {
        Blocks::Row => 0,
        Blocks::B1x128 => 1,
        Blocks::B128x128 => 2,
        // Rules for those of E2M1 are refused.
        Blocks::Mx32 | Blocks::B1x16 | Blocks::B16x16 => 3,
    }
}

/// The values that an operation quantizes.
pub(super) struct Values<'a> {
    pub(super) op: &'static str,
    pub(super) shape: Shape,
    /// The type that the values had in memory, or f32 for computed ones: it bounds scales that overflow.
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
    /// Room for the column sums of each row of tiles.
    pub(super) partial_sums: Option<&'a Buffer>,
}

/// Quantizes with a scale for each row or block. `launch` starts the operation's kernel with a thread block for each tile and
/// the parameters of the quantization, at most twice.
pub(super) fn quantize(
    gpu: &Gpu,
    values: &Values<'_>,
    slot: &Slot<'_>,
    rule: &BlockRule,
    launch: impl Fn(Grid, BlockParams) -> Result<()>,
) -> Result<Operand> {
    let Values { op, shape, .. } = *values;
    let matrix @ [rows, cols] = shape.matrix();
    let [sharing, turned_sharing] = rule.sharing();
    let rowwise = Target::new(gpu, Some(rule.blocks()), matrix)?;
    let turned =
        slot.columnwise.then(|| Target::new(gpu, rule.columnwise_blocks(), [cols, rows])).transpose()?;
    if shape.numel() == 0 {
        rowwise.fill_empty(gpu, slot, rule)?;
        turned.as_ref().map_or(Ok(()), |turned| turned.fill_empty(gpu, slot, rule))?;
    } else {
        // Amaxes of rows and columns rest at 0, as NaN counts nothing.
        let amaxes = |wanted: bool, len| wanted.then(|| gpu.zeros(DType::F32, len)).transpose();
        let by_rows = rule.blocks() == Blocks::Row;
        let is_one = turned_sharing.blocks().is_none();
        let amaxes =
            [amaxes(by_rows, rows)?, amaxes(by_rows && turned.is_some(), if is_one { 1 } else { cols })?];
        let params = |measures: bool| -> Result<BlockParams> {
            let Scaling { rule: number, epsilon, scale_max } = Scaling::new(rule, values.dtype);
            let [row_amaxes, col_amaxes] = amaxes.each_ref().map(Option::as_ref);
            let amax = slot.amax.filter(|_| !measures).map_or(Ok(0), |cell| cell.cuda(op))?;
            let counters = slot.counters.filter(|_| !measures).map_or(Ok(0), |counters| counters.cuda(op))?;
            Ok(BlockParams {
                blocks: blocks_number(rule.blocks()),
                rule: number,
                fp8_max: slot.encoding.max(),
                epsilon,
                scale_max,
                codes: Out::u8(&rowwise.codes),
                columnwise: Out::u8(turned.as_ref().map(|turned| &turned.codes)),
                format: format_number(slot.encoding),
                scale_inv: Out::void(&rowwise.factors),
                columnwise_scale_inv: Out::void(turned.as_ref().map(|turned| &turned.factors)),
                row_amaxes: Out::i32(row_amaxes),
                col_amaxes: Out::i32(col_amaxes),
                one_column: is_one.into(),
                measure: measures.into(),
                amax: Out::i32(amax),
                counters: Out::u64(counters),
                partial_sums: Out::f32(values.partial_sums),
            })
        };
        let tiles = rows.div_ceil(TILE) * cols.div_ceil(TILE);
        let grid = Grid::new(op, tiles as u64, THREADS)?;
        if by_rows {
            launch(grid, params(true)?)?;
        }
        launch(grid, params(false)?)?;
    }
    let tensor = |buffer, shape| Tensor::from_cuda(buffer, shape, values.device);
    let layout = |target: Target, shape, sharing| Layout {
        codes: tensor(target.codes, shape),
        scale_inv: tensor(target.factors, target.grid),
        tensor_scale: None,
        sharing,
    };
    let turned = turned.map(|turned| layout(turned, Shape::from([cols, rows]), turned_sharing));
    let rowwise = layout(rowwise, shape, sharing);
    Ok(Operand::Fp8(Fp8Tensor::from_layouts(shape, slot.encoding, rowwise, turned)))
}

/// Room for the codes of a matrix, and for its factors.
struct Target {
    codes: Buffer,
    factors: Buffer,
    grid: Shape,
}

impl Target {
    fn new(gpu: &Gpu, blocks: Option<Blocks>, [rows, cols]: [usize; 2]) -> Result<Self> {
        let grid = blocks.map_or(Shape::from([]), |blocks| Shape::from(blocks.grid(rows, cols)));
        let dtype = if blocks == Some(Blocks::Mx32) { DType::U8 } else { DType::F32 };
        let codes = gpu.alloc(DType::U8, rows * cols)?;
        Ok(Self { codes, factors: gpu.alloc(dtype, grid.numel())?, grid })
    }

    /// The factors of rows without elements, and of a tensor without any.
    fn fill_empty(&self, gpu: &Gpu, slot: &Slot<'_>, rule: &BlockRule) -> Result<()> {
        let (BlockRule::F32(scaling) | BlockRule::RowsThenTensor(scaling)) = rule else { return Ok(()) };
        let factor = 1.0 / scaling.scale::<f32>(0.0, slot.encoding);
        gpu.fill_f32(self.factors.ptr(), factor, self.grid.numel())
    }
}

/// The rule that turns an amax into a scale, as kernels take it.
struct Scaling {
    /// 0 exact, 1 power of two, 2 MX rounded up, 3 MX rounded down.
    rule: i32,
    epsilon: f32,
    scale_max: f32,
}

impl Scaling {
    fn new(rule: &BlockRule, dtype: DType) -> Self {
        match rule {
            BlockRule::Mx(MxRounding::Ceil) => Self { rule: 2, epsilon: 0.0, scale_max: 0.0 },
            BlockRule::Mx(MxRounding::Floor) => Self { rule: 3, epsilon: 0.0, scale_max: 0.0 },
            BlockRule::F32(scaling) | BlockRule::RowsThenTensor(scaling) => {
                let &BlockScaling { blocks, power_2_scales, epsilon, scale_max } = scaling;
                let largest = match dtype {
                    DType::BF16 if blocks != Blocks::Row => bf16::MAX.to_f32(),
                    DType::F16 if blocks != Blocks::Row => 65504.0,
                    _ => f32::MAX,
                };
                Self { rule: power_2_scales.into(), epsilon, scale_max: scale_max.unwrap_or(largest) }
            }
        }
    }
}
