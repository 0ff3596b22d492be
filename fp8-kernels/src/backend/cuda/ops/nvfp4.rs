//! NVFP4 on a GPU: quantization of both copies from one read, the way back, and what products need of operands.

use super::{Buffer, Gpu, Grid, In, Out, dropout, dtype_number, kernels, tiles};
use crate::fp8_tensor::{Layout, Sharing, packed_width};
use crate::{DType, Encoding, Fp8Tensor, Nvfp4Rule, Operand, Result, Shape, Slot, Tensor};
use fp8_format::Blocks;

/// Rows and columns of a thread block's tile in `nvfp4_transpose`.
const TURNED: usize = 128;

pub(crate) fn amax(gpu: &Gpu, x: &Tensor, hadamard: bool) -> Result<Tensor> {
    let out = gpu.zeros(DType::F32, 2)?;
    if x.numel() > 0 {
        let op = "nvfp4_amax";
        let [rows, cols] = x.shape().matrix();
        let args = kernels::Nvfp4Amax {
            x: In::void(x.cuda(op)?),
            dtype: dtype_number(x.dtype()),
            rows: rows as u64,
            cols: cols as u64,
            hadamard: hadamard.into(),
            amax: Out::i32(&out),
        };
        let grid = tiles::grid(gpu, tiles::tiles(rows, cols), 8);
        // SAFETY: x holds rows · cols elements of that type, the output two f32.
        unsafe { gpu.load(kernels::NVFP4_AMAX)?.launch(gpu, grid, &args) }?;
    }
    Ok(Tensor::from_cuda(out, Shape::from([2]), x.device()))
}

/// Quantizes `x`; with room for the column sums of each row of tiles, if they are wanted.
pub(super) fn quantize(
    gpu: &Gpu,
    op: &'static str,
    x: &Tensor,
    slot: &Slot<'_>,
    rule: &Nvfp4Rule<'_>,
    partial_sums: Option<&Buffer>,
) -> Result<Operand> {
    let shape = *x.shape();
    let matrix @ [rows, cols] = shape.matrix();
    let hadamard = rule.hadamard && slot.columnwise;
    let [sharing, turned_sharing] = rule.sharing();
    let rowwise = Target::new(gpu, rule.blocks, matrix, false)?;
    let turned =
        slot.columnwise.then(|| Target::new(gpu, rule.blocks, [cols, rows], hadamard)).transpose()?;
    if x.numel() == 0 && rule.amax.is_some() {
        return of_no_values(gpu, op, x, slot, rule);
    }
    if x.numel() == 0 {
        for target in [Some(&rowwise), turned.as_ref()].into_iter().flatten() {
            gpu.fill_f32(target.factors.ptr(), 1.0, 2)?;
        }
    } else {
        let own;
        let amax = match rule.amax {
            Some(given) => given,
            None => {
                own = amax(gpu, x, hadamard)?;
                &own
            }
        };
        let key = rule.random.as_ref().map(|random| dropout::key(gpu, op, random.draw)).transpose()?;
        let counters = |columnwise: bool| {
            rule.random.as_ref().map_or([0; 2], |random| {
                let draw = if columnwise { random.draw.mask(1) } else { random.draw.clone() };
                let [first, step] = random.counters(matrix, columnwise);
                [draw.first.wrapping_add(first), step]
            })
        };
        let ([first, step], [columnwise_first, columnwise_step]) = (counters(false), counters(true));
        let args = kernels::QuantizeNvfp4 {
            x: In::void(x.cuda(op)?),
            dtype: dtype_number(x.dtype()),
            rows: rows as u64,
            cols: cols as u64,
            amax: In::f32(amax.cuda(op)?),
            tiles: i32::from(rule.blocks == Blocks::B16x16),
            hadamard: hadamard.into(),
            codes: Out::u8(&rowwise.codes),
            scales: Out::u8(&rowwise.scales),
            tensor: Out::f32(&rowwise.factors),
            columnwise: Out::u8(turned.as_ref().map(|turned| &turned.codes)),
            columnwise_scales: Out::u8(turned.as_ref().map(|turned| &turned.scales)),
            columnwise_tensor: Out::f32(turned.as_ref().map(|turned| &turned.factors)),
            key: In::new(key.as_ref().map_or(0, Buffer::ptr)),
            first,
            step,
            columnwise_first,
            columnwise_step,
            counters: Out::u64(slot.counters.map_or(Ok(0), |counters| counters.cuda(op))?),
            partial_sums: Out::f32(partial_sums),
        };
        let grid = Grid::new(op, tiles::tiles(rows, cols) as u64, tiles::THREADS)?;
        // SAFETY: x holds rows · cols elements of that type, both targets were made for such a matrix, the key is two u64, the
        // amaxes are two f32, the sums a row for each row of tiles.
        unsafe { gpu.load(kernels::QUANTIZE_NVFP4)?.launch(gpu, grid, &args) }?;
        if let Some(cell) = slot.amax {
            let args = kernels::CellsMergeMax {
                cells: Out::i32(cell.cuda(op)?),
                values: In::i32(amax.cuda(op)?),
                n: 1,
            };
            // SAFETY: the slot's cell, and the first of two amaxes.
            unsafe { gpu.load(kernels::CELLS_MERGE_MAX)?.launch(gpu, Grid::strided(gpu, 1), &args) }?;
        }
    }
    let rowwise = rowwise.layout(shape, sharing, x);
    let turned = turned.map(|turned| turned.layout(Shape::from([cols, rows]), turned_sharing, x));
    Ok(Operand::Fp8(Fp8Tensor::from_layouts(shape, Encoding::E2M1, rowwise, turned)))
}

/// Quantizes a tensor without elements, a part of one with given amaxes: the factors are those of any other part, such as a zero.
fn of_no_values(
    gpu: &Gpu,
    op: &'static str,
    x: &Tensor,
    slot: &Slot<'_>,
    rule: &Nvfp4Rule<'_>,
) -> Result<Operand> {
    let zero = Tensor::from_cuda(gpu.zeros(DType::F32, 1)?, Shape::from([1, 1]), x.device());
    let nearest = Nvfp4Rule { random: None, ..*rule };
    let zero = quantize(gpu, op, &zero, &Slot { counters: None, ..*slot }, &nearest, None)?;
    let shape = *x.shape();
    let [rows, cols] = shape.matrix();
    let Operand::Fp8(zero) = zero else { return Ok(zero) };
    let layout = |matrix: [usize; 2], shape, sharing: Sharing, factors: Option<&Tensor>| {
        let target = Target::new(gpu, rule.blocks, matrix, sharing.has_hadamard())?;
        Ok::<_, crate::Error>(Layout { tensor_scale: factors.cloned(), ..target.layout(shape, sharing, x) })
    };
    let [sharing, turned_sharing] = rule.sharing();
    let rowwise = layout([rows, cols], shape, sharing, zero.tensor_scale())?;
    let turned = zero
        .columnwise_tensor_scale()
        .map(|factors| layout([cols, rows], Shape::from([cols, rows]), turned_sharing, Some(factors)));
    Ok(Operand::Fp8(Fp8Tensor::from_layouts(shape, Encoding::E2M1, rowwise, turned.transpose()?)))
}

/// Room for the codes of a matrix, their scales and the tensor's factors.
struct Target {
    codes: Buffer,
    scales: Buffer,
    factors: Buffer,
    grid: [usize; 2],
}

impl Target {
    fn new(gpu: &Gpu, blocks: Blocks, [rows, cols]: [usize; 2], hadamard: bool) -> Result<Self> {
        let grid = blocks.grid(rows, cols);
        Ok(Self {
            codes: gpu.alloc(DType::U8, rows * packed_width(cols, hadamard))?,
            scales: gpu.alloc(DType::U8, grid[0] * grid[1])?,
            factors: gpu.alloc(DType::F32, 2)?,
            grid,
        })
    }

    fn layout(self, shape: Shape, sharing: Sharing, x: &Tensor) -> Layout {
        let tensor = |buffer, shape| Tensor::from_cuda(buffer, shape, x.device());
        Layout {
            codes: tensor(self.codes, sharing.codes_shape(shape)),
            scale_inv: tensor(self.scales, Shape::from(self.grid)),
            tensor_scale: Some(tensor(self.factors, Shape::from([2]))),
            sharing,
        }
    }
}

pub(super) fn dequantize(gpu: &Gpu, x: &Fp8Tensor, dtype: DType) -> Result<Tensor> {
    let op = "dequantize";
    let (layout, [rows, cols]) = (x.rowwise_layout(op)?, x.matrix());
    let out = gpu.alloc(dtype, rows * cols)?;
    let args = kernels::DequantizeNvfp4 {
        codes: In::u8(layout.codes.cuda(op)?),
        scales: In::u8(layout.scale_inv.cuda(op)?),
        tensor: In::f32(factors(op, &layout)?),
        tiles: has_tiles(&layout),
        rows: rows as u64,
        cols: cols as u64,
        out: Out::void(&out),
        dtype: dtype_number(dtype),
    };
    let items = rows as u64 * cols.div_ceil(8) as u64;
    // SAFETY: packed codes and scales of such a matrix, two factors, room for its elements.
    unsafe { gpu.load(kernels::DEQUANTIZE_NVFP4)?.launch(gpu, Grid::strided(gpu, items), &args) }?;
    Ok(Tensor::from_cuda(out, *x.shape(), x.device()))
}

/// The factors of a tensor in NVFP4, encode and decode.
pub(super) fn factors<'l>(op: &'static str, layout: &'l Layout) -> Result<&'l Buffer> {
    // A layout of NVFP4 has them.
    layout.tensor_scale.as_ref().unwrap_or(&layout.scale_inv).cuda(op)
}

/// The number by which kernels know blocks: 0 for 1 × 16, 1 for 16 × 16.
pub(super) fn has_tiles(layout: &Layout) -> i32 {
    i32::from(layout.sharing.blocks() == Some(Blocks::B16x16))
}

/// Packed codes of the transpose of a `[rows, cols]` matrix.
pub(crate) fn transpose(
    gpu: &Gpu,
    op: &'static str,
    codes: &Tensor,
    [rows, cols]: [usize; 2],
) -> Result<Tensor> {
    let turned = packed_width(rows, false);
    let out = gpu.alloc(DType::U8, cols * turned)?;
    if rows * cols > 0 {
        let args = kernels::Nvfp4Transpose {
            codes: In::u8(codes.cuda(op)?),
            rows: rows as u64,
            cols: cols as u64,
            out: Out::u8(&out),
        };
        let grid = Grid::new(op, rows.div_ceil(TURNED) as u64 * cols.div_ceil(TURNED) as u64, 256)?;
        // SAFETY: packed codes of such a matrix, room for those of its transpose.
        unsafe { gpu.load(kernels::NVFP4_TRANSPOSE)?.launch(gpu, grid, &args) }?;
    }
    Ok(Tensor::from_cuda(out, [cols, turned].into(), codes.device()))
}
