//! `quantize`, plain, with a bias gradient, and of many tensors, and `dequantize`, on a GPU.
//!
//! Codes alone are a stream; with the transpose or column sums the kernel goes by tiles.

use super::blocks::{self, Values};
use super::reduce::{self, Place, column_pieces, finish_columns};
use super::slot::{self, Output};
use super::tiles::{self, run, strips, tiles, whole_bf16};
use super::{
    Buffer, Entry, Gpu, Grid, In, Out, amax, dtype_number, format_number, kernels, launch, nvfp4, transpose,
};
use crate::ops::GradientMut;
use crate::{BlockRule, DType, Encoding, Fp8Tensor, Operand, Result, Slot, Tensor};
use fp8_format::Blocks;

const THREADS: u32 = 256;
/// Bytes that one step of a block of the flat kernels reads.
const STEP_BYTES: u64 = 256 * 4 * 16;

pub(crate) fn quantize(gpu: &Gpu, x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    let op = "quantize";
    if slot.is_off() {
        return hand_through(gpu, op, x, slot);
    }
    if let Some(rule) = slot.nvfp4() {
        return nvfp4::quantize(gpu, op, x, slot, rule, None);
    }
    if let Some(rule) = slot.block_rule() {
        return by_blocks(gpu, op, x, slot, &rule, None);
    }
    let output = output(gpu, op, x, slot)?;
    if x.numel() == 0 {
        return output.finish_inverse(gpu);
    }
    if output.columnwise().is_some() {
        by_tiles(gpu, op, x, &output, None)?;
    } else {
        flat(gpu, op, x, &output)?;
    }
    Ok(output.finish())
}

pub(crate) fn quantize_dbias(gpu: &Gpu, dy: &Tensor, slot: &Slot<'_>) -> Result<(Operand, Tensor)> {
    let cols = dy.shape().last_dim();
    let dbias = gpu.alloc(DType::F32, cols)?;
    let operand = quantize_dbias_at(gpu, "quantize_dbias", dy, slot, Place::new(&dbias))?;
    Ok((operand, Tensor::from_cuda(dbias, [cols].into(), dy.device())))
}

pub(crate) fn quantize_dbias_into(
    gpu: &Gpu,
    dy: &Tensor,
    slot: &Slot<'_>,
    dbias: &mut GradientMut<'_>,
) -> Result<Operand> {
    let place = Place::of(dbias)?;
    quantize_dbias_at(gpu, "quantize_dbias_into", dy, slot, place)
}

fn quantize_dbias_at(
    gpu: &Gpu,
    op: &'static str,
    dy: &Tensor,
    slot: &Slot<'_>,
    dbias: Place,
) -> Result<Operand> {
    if slot.is_off() || dy.numel() == 0 {
        let operand = quantize(gpu, dy, slot)?;
        reduce::column_sums_at(gpu, op, dy, dbias)?;
        return Ok(operand);
    }
    let [rows, cols] = dy.shape().matrix();
    let pieces = column_pieces(rows);
    let partial = gpu.alloc(DType::F32, pieces * cols)?;
    let operand = match (slot.nvfp4(), slot.block_rule()) {
        (Some(rule), _) => nvfp4::quantize(gpu, op, dy, slot, rule, Some(&partial))?,
        (None, Some(rule)) => by_blocks(gpu, op, dy, slot, &rule, Some(&partial))?,
        (None, None) => {
            let output = output(gpu, op, dy, slot)?;
            by_tiles(gpu, op, dy, &output, Some(&partial))?;
            output.finish()
        }
    };
    finish_columns(gpu, op, &partial, pieces, cols, dbias)?;
    Ok(operand)
}

pub(crate) fn quantize_many(gpu: &Gpu, tensors: &[(&Tensor, Slot<'_>)]) -> Result<Vec<Operand>> {
    let op = "quantize_many";
    let (mut whole, mut others) = (Table::default(), Table::default());
    let mut outputs = Vec::with_capacity(tensors.len());
    for (x, slot) in tensors {
        if slot.is_off() || slot.block_rule().is_some() || x.numel() == 0 {
            outputs.push(Done::Alone(quantize(gpu, x, slot)?));
            continue;
        }
        let output = output(gpu, op, x, slot)?;
        let [rows, cols] = x.shape().matrix();
        let address = |buffer: Option<&Buffer>| buffer.map_or(0, Buffer::ptr);
        let types = u64::from(dtype_number(x.dtype()).unsigned_abs())
            | u64::from(format_number(slot.encoding).unsigned_abs()) << 8;
        let counters = output.counters(op)?;
        let is_whole = counters == 0 && output.columnwise().is_some() && whole_bf16(x, tiles::TILE).is_some();
        let table = if is_whole { &mut whole } else { &mut others };
        table.entries.push([
            x.cuda(op)?.ptr(),
            address(output.rowwise()),
            address(output.columnwise()),
            output.scale(),
            address(output.scale_inv()),
            output.amax(op)?,
            counters,
            rows as u64,
            cols as u64,
            types,
            table.tiles as u64,
        ]);
        table.tiles += tiles(rows, cols);
        outputs.push(Done::Together(output));
    }
    if !whole.entries.is_empty() {
        let run = run(gpu, whole.tiles);
        let grid = Grid::new(op, whole.tiles.div_ceil(run) as u64, THREADS)?;
        let uploaded = gpu.upload(&whole.entries)?;
        let kernel = gpu.load(kernels::QUANTIZE_MANY_BF16)?;
        let args = kernels::QuantizeManyBf16 {
            table: In::u64(&uploaded),
            entries: launch::count(op, whole.entries.len())?,
            tiles: tiles::number(op, whole.tiles)?,
            run: tiles::number(op, run)?,
        };
        // SAFETY: as below; each tensor consists of whole tiles of bf16.
        unsafe { kernel.launch(gpu, grid, &args) }?;
    }
    if !others.entries.is_empty() {
        let run = run(gpu, others.tiles);
        let grid = Grid::new(op, others.tiles.div_ceil(run) as u64, THREADS)?;
        let uploaded = gpu.upload(&others.entries)?;
        let kernel = gpu.load(kernels::QUANTIZE_MANY)?;
        let args = kernels::QuantizeMany {
            table: In::u64(&uploaded),
            entries: launch::count(op, others.entries.len())?,
            tiles: others.tiles as u64,
            run: run as u64,
        };
        // SAFETY: each entry names a live tensor of rows · cols elements of its type, outputs of as many codes, cells
        // of its slot and the first of its tiles, which rise from 0.
        unsafe { kernel.launch(gpu, grid, &args) }?;
    }
    let finish = |done| match done {
        Done::Alone(operand) => operand,
        Done::Together(output) => Output::finish(output),
    };
    Ok(outputs.into_iter().map(finish).collect())
}

/// The tensors of one launch, as the kernel reads them, and the tiles that they have.
#[derive(Default)]
struct Table {
    entries: Vec<[u64; 11]>,
    tiles: usize,
}

/// A tensor of [`quantize_many`]: quantized by itself, or filled by the launch of all.
#[expect(clippy::large_enum_variant, reason = "a box would cost each tensor an allocation")]
enum Done<'a> {
    Alone(Operand),
    Together(Output<'a>),
}

fn by_blocks(
    gpu: &Gpu,
    op: &'static str,
    x: &Tensor,
    slot: &Slot<'_>,
    rule: &BlockRule,
    partial_sums: Option<&Buffer>,
) -> Result<Operand> {
    let [rows, cols] = x.shape().matrix();
    let (shape, dtype, device) = (*x.shape(), x.dtype(), x.device());
    let values = Values { op, shape, dtype, device, partial_sums };
    let whole = whole_blocks(x, slot);
    blocks::quantize(gpu, &values, slot, rule, |grid, block| {
        if let Some([rows, cols]) = whole {
            let kernel = gpu.load(whole_kernel(rule.blocks(), slot.encoding, block.measure != 0))?;
            let args = kernels::QuantizeBlocksBf16 { x: In::u16(x.cuda(op)?), rows, cols, block };
            // SAFETY: x holds rows · cols elements of bf16 in whole tiles, the rest is what `blocks` made for such a matrix; nothing
            // is counted.
            return unsafe { kernel.launch(gpu, grid, &args) };
        }
        let kernel = gpu.load(kernels::QUANTIZE_BLOCKS)?;
        let args = kernels::QuantizeBlocks {
            x: In::void(x.cuda(op)?),
            dtype: dtype_number(dtype),
            rows: rows as u64,
            cols: cols as u64,
            block,
        };
        // SAFETY: x holds rows · cols elements, the rest is what `blocks` made for such a matrix.
        unsafe { kernel.launch(gpu, grid, &args) }
    })
}

/// Rows and columns, if the kernels for whole tiles can give `x` a scale for each row or block.
fn whole_blocks(x: &Tensor, slot: &Slot<'_>) -> Option<[u32; 2]> {
    whole_bf16(x, [blocks::TILE; 2]).filter(|_| slot.counters.is_none())
}

const fn whole_kernel(
    blocks: Blocks,
    encoding: Encoding,
    measures: bool,
) -> Entry<kernels::QuantizeBlocksBf16> {
    match (blocks, encoding) {
        (Blocks::Row, _) if measures => kernels::QUANTIZE_BLOCKS_BF16_ROWS_MEASURE,
        (Blocks::Row, Encoding::E5M2) => kernels::QUANTIZE_BLOCKS_BF16_ROWS_E5M2,
        (Blocks::Row, _) => kernels::QUANTIZE_BLOCKS_BF16_ROWS_E4M3,
        (Blocks::B1x128, Encoding::E5M2) => kernels::QUANTIZE_BLOCKS_BF16_1X128_E5M2,
        (Blocks::B1x128, _) => kernels::QUANTIZE_BLOCKS_BF16_1X128_E4M3,
        (Blocks::B128x128, Encoding::E5M2) => kernels::QUANTIZE_BLOCKS_BF16_128X128_E5M2,
        (Blocks::B128x128, _) => kernels::QUANTIZE_BLOCKS_BF16_128X128_E4M3,
        // Rules for those of E2M1 are refused.
        (Blocks::Mx32 | Blocks::B1x16 | Blocks::B16x16, Encoding::E5M2) => {
            kernels::QUANTIZE_BLOCKS_BF16_MX_E5M2
        }
        (Blocks::Mx32 | Blocks::B1x16 | Blocks::B16x16, _) => kernels::QUANTIZE_BLOCKS_BF16_MX_E4M3,
    }
}

/// With a factor for each row or block.
fn dequantize_blocks(gpu: &Gpu, x: &Fp8Tensor, blocks: Blocks, dtype: DType) -> Result<Tensor> {
    let op = "dequantize";
    let layout = x.rowwise_layout(op)?;
    let (n, cols) = (layout.codes.numel(), x.matrix()[1] as u64);
    let out = gpu.alloc(dtype, n)?;
    let kernel = gpu.load(kernels::DEQUANTIZE_BLOCKS)?;
    let (codes, factors) = (layout.codes.cuda(op)?, layout.scale_inv.cuda(op)?);
    let (format, number) = (format_number(x.encoding()), blocks::blocks_number(blocks));
    let args = kernels::DequantizeBlocks {
        codes: In::u8(codes),
        n: n as u64,
        cols,
        format,
        blocks: number,
        scale_inv: In::void(factors),
        out: Out::void(&out),
        dtype: dtype_number(dtype),
    };
    let items = if cols.is_multiple_of(8) { n / 8 } else { n };
    // SAFETY: n codes of rows of cols, the factors of such a matrix, room for n elements.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, items as u64), &args) }?;
    Ok(Tensor::from_cuda(out, *x.shape(), x.device()))
}

pub(crate) fn dequantize(gpu: &Gpu, x: &Fp8Tensor, dtype: DType) -> Result<Tensor> {
    let op = "dequantize";
    if let Some(blocks) = x.blocks() {
        let is_packed = blocks.is_fp4();
        return if is_packed {
            nvfp4::dequantize(gpu, x, dtype)
        } else {
            dequantize_blocks(gpu, x, blocks, dtype)
        };
    }
    let turned;
    let codes = match (x.rowwise(), x.columnwise()) {
        (None, Some(columnwise)) => {
            turned = transpose::transpose(gpu, columnwise)?;
            &turned
        }
        (Some(rowwise), _) => rowwise,
        (None, None) => return Tensor::zeros(*x.shape(), dtype, x.device()),
    };
    let n = codes.numel() as u64;
    let out = gpu.alloc(dtype, codes.numel())?;
    let kernel = gpu.load(kernels::DEQUANTIZE)?;
    let grid = Grid { blocks: gpu.blocks(n, u64::from(THREADS) * 8, 16), threads: THREADS, shared: 0 };
    let format = format_number(x.encoding());
    let args = kernels::Dequantize {
        codes: In::u8(codes.cuda(op)?),
        n,
        format,
        scale_inv: In::f32(x.scale_inv().cuda(op)?),
        out: Out::void(&out),
        dtype: dtype_number(dtype),
    };
    // SAFETY: n codes, one factor, room for n elements.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    Ok(Tensor::from_cuda(out, *x.shape(), x.device()))
}

/// In high precision: the tensor itself, and its amax where somebody keeps it.
fn hand_through(gpu: &Gpu, op: &'static str, x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    if let Some(cell) = slot.amax {
        amax::record(gpu, op, x, &slot::AmaxRequest { unset: 0, cell: cell.cuda(op)? })?;
    }
    Ok(Operand::High(x.clone()))
}

fn output<'a>(gpu: &Gpu, op: &'static str, x: &'a Tensor, slot: &'a Slot<'a>) -> Result<Output<'a>> {
    let scale = slot::resolve(gpu, op, slot, |request| amax::record(gpu, op, x, &request))?;
    Output::new(gpu, slot, *x.shape(), x.device(), scale, x.dtype())
}

fn flat(gpu: &Gpu, op: &'static str, x: &Tensor, output: &Output<'_>) -> Result<()> {
    let n = x.numel() as u64;
    let kernel = gpu.load(match x.dtype() {
        DType::BF16 => kernels::QUANTIZE_BF16,
        DType::F16 => kernels::QUANTIZE_F16,
        DType::F32 | DType::I32 | DType::U8 => kernels::QUANTIZE_F32,
    })?;
    let bytes = n * x.dtype().size() as u64;
    let grid = Grid { blocks: gpu.blocks(bytes, STEP_BYTES, 8), threads: THREADS, shared: 0 };
    let args = kernels::Quantize {
        x: In::void(x.cuda(op)?),
        n,
        codes: Out::u8(output.rowwise()),
        format: output.format(),
        scale: In::f32(output.scale()),
        scale_inv: Out::f32(output.scale_inv()),
        amax: Out::i32(output.amax(op)?),
        counters: Out::u64(output.counters(op)?),
    };
    // SAFETY: x holds n elements of the kernel's type (checked by `ops`), codes n bytes; cells are alive: their slot
    // is borrowed.
    unsafe { kernel.launch(gpu, grid, &args) }
}

fn by_tiles(
    gpu: &Gpu,
    op: &'static str,
    x: &Tensor,
    output: &Output<'_>,
    partial: Option<&Buffer>,
) -> Result<()> {
    let [rows, cols] = x.shape().matrix();
    let (grid, run) = strips(gpu, op, rows, cols)?;
    let counts = output.counters(op)? != 0;
    let whole = whole_bf16(x, tiles::TILE).filter(|_| !counts);
    if let Some([rows, cols]) = whole {
        let kernel = gpu.load(match (output.format(), partial) {
            (0, None) => kernels::QUANTIZE_TILES_BF16_E4M3,
            (0, Some(_)) => kernels::QUANTIZE_TILES_BF16_E4M3_SUMS,
            (_, None) => kernels::QUANTIZE_TILES_BF16_E5M2,
            (_, Some(_)) => kernels::QUANTIZE_TILES_BF16_E5M2_SUMS,
        })?;
        let args = kernels::QuantizeTilesBf16 {
            x: In::u16(x.cuda(op)?),
            rows,
            cols,
            run: tiles::number(op, run as usize)?,
            codes: Out::u8(output.rowwise()),
            columnwise: Out::u8(output.columnwise()),
            scale: In::f32(output.scale()),
            scale_inv: Out::f32(output.scale_inv()),
            amax: Out::i32(output.amax(op)?),
            partial_sums: Out::f32(partial),
        };
        // SAFETY: as below; x consists of whole tiles of bf16, and without partial sums there is a transpose.
        return unsafe { kernel.launch(gpu, grid, &args) };
    }
    let kernel = gpu.load(kernels::QUANTIZE_TILES)?;
    let args = kernels::QuantizeTiles {
        x: In::void(x.cuda(op)?),
        dtype: dtype_number(x.dtype()),
        rows: rows as u64,
        cols: cols as u64,
        run,
        codes: Out::u8(output.rowwise()),
        columnwise: Out::u8(output.columnwise()),
        format: output.format(),
        scale: In::f32(output.scale()),
        scale_inv: Out::f32(output.scale_inv()),
        amax: Out::i32(output.amax(op)?),
        counters: Out::u64(output.counters(op)?),
        partial_sums: Out::f32(partial),
    };
    // SAFETY: x and both codes hold rows · cols elements, partial sums a row for each row of tiles; the blocks are
    // those of this run; cells are alive: their slot is borrowed.
    unsafe { kernel.launch(gpu, grid, &args) }
}
