//! `attention` on a GPU: one launch forward, three backward, none of which keeps scores in memory.
//!
//! 16-bit tensors whose head_dim is a multiple of eight, at most 128, go through the tensor cores; anything else through
//! plain f32 arithmetic, which computes scores again for every 64 columns of a head. On the tensor cores forward keeps the
//! probabilities' rounding below that of the result; backward narrows probabilities and the scores' gradients to the
//! tensors' type before it multiplies them. A length out of range is told at the next call that waits for the device.

use super::dropout::Mask;
use super::{Arg, Buffer, Gpu, Grid, In, Joined, Out, Source, args, dtype_number, kernels};
use crate::ops::{AttentionSaved, Diagonal, Packing, Problem, Sequences, TILE};
use crate::{DType, Error, Result, Shape, Tensor};

/// Numbers of the kernels: the threads of a block, and the columns of a result that a block of a plain kernel computes.
const THREADS: u32 = 128;
const PART: u64 = 64;
/// f32 that backward keeps for each row of scores.
const ROW: usize = 4;

pub(crate) fn attention(
    gpu: &Gpu,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &Sequences,
    p: &Problem<'_>,
) -> Result<(Tensor, AttentionSaved)> {
    let op = "attention";
    let sizes = Sizes::new(op, q, k, sequences, p)?;
    let o = gpu.alloc(q.dtype(), q.numel())?;
    let rows = Shape::from([p.batch, p.heads, p.queries]);
    let (row_max, row_sum) = (gpu.alloc(DType::F32, rows.numel())?, gpu.alloc(DType::F32, rows.numel())?);
    let (queries, keys, values) = (q.cuda(op)?, k.cuda(op)?, v.cuda(op)?);
    let path = sizes.path;
    let grid = Grid::new(op, sizes.query_blocks, THREADS)?.with_shared(path.forward_shared());
    let mask = p.dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose()?;
    let call = sizes.args(gpu, op, sequences, 0, mask.as_ref())?;
    match path {
        Path::Matrices(names) => {
            let (source, name) = names.forward(p.dropout.is_some());
            let kernel = gpu.kernel(source, name)?;
            let args = call.behind(args![queries, keys, values, &o, &row_max, &row_sum]);
            // SAFETY: shapes and types are checked by `ops::attention`, head_dim is a multiple of eight up to the
            // kernel's, the outputs were made above; a block for each tile of queries and head.
            unsafe { kernel.launch(gpu, grid, &args) }?;
        }
        Path::Plain(dtype) => {
            let (source, name) = match p.dropout {
                Some(_) => (Source::AttentionDropoutPlain, "attention_dropout_plain"),
                None => (Source::AttentionPlain, "attention_plain"),
            };
            let kernel = gpu.kernel(source, name)?;
            let args = call.behind(args![queries, keys, values, &o, dtype, &row_max, &row_sum]);
            // SAFETY: as above with the type behind o; a block for each tile of queries and 64 columns of a head.
            unsafe { kernel.launch(gpu, grid, &args) }?;
        }
    }
    let saved = AttentionSaved {
        row_max: Tensor::from_cuda(row_max, rows, q.device()),
        row_sum: Tensor::from_cuda(row_sum, rows, q.device()),
    };
    Ok((Tensor::from_cuda(o, *q.shape(), q.device()), saved))
}

pub(crate) fn attention_backward(
    gpu: &Gpu,
    [dy, q, k, v, o]: [&Tensor; 5],
    saved: &AttentionSaved,
    sequences: &Sequences,
    p: &Problem<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let op = "attention_backward";
    let sizes = Sizes::new(op, q, k, sequences, p)?;
    let [dq, dk, dv] = [q, k, v].map(|tensor| gpu.alloc(tensor.dtype(), tensor.numel()));
    let (dq, dk, dv) = (dq?, dk?, dv?);
    let rows = rows(gpu, op, dy, o, saved, p)?;
    let (queries, keys, values, dys) = (q.cuda(op)?, k.cuda(op)?, v.cuda(op)?, dy.cuda(op)?);
    let none = None::<&Buffer>;
    let shared = sizes.path.backward_shared();
    let mask = p.dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose()?;
    let launches = [
        (sizes.path.backward_q(mask.is_some()), &dq, none, sizes.query_blocks),
        (sizes.path.backward_kv(mask.is_some()), &dk, Some(&dv), sizes.key_blocks),
    ];
    for (side, ((source, name), first, second, blocks)) in launches.into_iter().enumerate() {
        let grid = Grid::new(op, blocks, THREADS)?.with_shared(shared);
        let call = sizes.args(gpu, op, sequences, side, mask.as_ref())?;
        let kernel = gpu.kernel(source, name)?;
        match sizes.path {
            Path::Matrices(_) => {
                let args = call.behind(args![queries, keys, values, dys, &rows, first, second]);
                // SAFETY: shapes and types are checked by `ops::attention_backward`, head_dim is a multiple of eight
                // up to the kernel's; d_first is dq, or dk beside dv, made above; four f32 for each row; a block for
                // each tile of queries and head, or of keys and group.
                unsafe { kernel.launch(gpu, grid, &args) }?;
            }
            Path::Plain(dtype) => {
                let args = call.behind(args![queries, keys, values, dys, dtype, &rows, first, second]);
                // SAFETY: as above with the type behind dy; blocks for each 64 columns besides.
                unsafe { kernel.launch(gpu, grid, &args) }?;
            }
        }
    }
    let tensor = |buffer, like: &Tensor| Tensor::from_cuda(buffer, *like.shape(), like.device());
    Ok((tensor(dq, q), tensor(dk, k), tensor(dv, v)))
}

/// Computes the numbers that backward reads for each row of scores.
fn rows(
    gpu: &Gpu,
    op: &'static str,
    dy: &Tensor,
    o: &Tensor,
    saved: &AttentionSaved,
    p: &Problem<'_>,
) -> Result<Buffer> {
    let count = p.batch * p.heads * p.queries;
    let rows = gpu.alloc(DType::F32, ROW * count)?;
    let kernel = gpu.load(kernels::ATTENTION_BACKWARD_ROWS)?;
    let args = kernels::AttentionBackwardRows {
        dy: In::void(dy.cuda(op)?),
        o: In::void(o.cuda(op)?),
        dtype: dtype_number(o.dtype()),
        row_max: In::f32(saved.row_max.cuda(op)?),
        row_sum: In::f32(saved.row_sum.cuda(op)?),
        rows: Out::row(&rows),
        count: count as u64,
        queries: p.queries as u32,
        heads: p.heads as u32,
        head_dim: p.head_dim as u32,
    };
    let grid =
        Grid { blocks: gpu.blocks(count as u64, (THREADS / 32).into(), 16), threads: THREADS, shared: 0 };
    // SAFETY: shapes and types are checked by `ops::attention_backward`, and that sizes fit 32 bits by `Sizes::new`;
    // four f32 for each row.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    Ok(rows)
}

/// One call, as the kernels take it.
pub(super) struct Sizes {
    /// Tiles of queries and of keys, of a batch entry.
    tiles: [u32; 2],
    /// queries, keys, heads, groups, head_dim
    numbers: [u32; 5],
    /// The number of keys that a query sees to the left and to the right of its own.
    window: [u32; 2],
    bottom_right: u32,
    scale: f32,
    path: Path,
    /// Blocks of the launches that own queries, and of the one that owns keys.
    pub(super) query_blocks: u64,
    pub(super) key_blocks: u64,
}

/// The window's end where there is none.
const UNLIMITED: u32 = u32::MAX;

#[derive(Clone, Copy)]
enum Path {
    Matrices(&'static Names),
    /// With the number of the type.
    Plain(i32),
}

/// The kernels for one type and padded head size.
struct Names {
    /// Elements of a head in shared memory.
    padded: u32,
    /// Without and with dropout.
    forward: [&'static str; 2],
    backward_q: [&'static str; 2],
    backward_kv: [&'static str; 2],
}

impl Names {
    fn forward(&self, drops: bool) -> (Source, &'static str) {
        let source = if drops { Source::AttentionDropout } else { Source::Attention };
        (source, self.forward[usize::from(drops)])
    }
}

macro_rules! names {
    ($type:literal, $padded:literal) => {
        Names {
            padded: $padded,
            forward: names!("", $type, $padded),
            backward_q: names!("backward_q_", $type, $padded),
            backward_kv: names!("backward_kv_", $type, $padded),
        }
    };
    ($pass:literal, $type:literal, $padded:literal) => {
        [
            concat!("attention_", $pass, $type, "_", $padded),
            concat!("attention_dropout_", $pass, $type, "_", $padded),
        ]
    };
}

static BF16: [Names; 2] = [names!("bf16", 64), names!("bf16", 128)];
static F16: [Names; 2] = [names!("f16", 64), names!("f16", 128)];

impl Path {
    fn new(dtype: DType, head_dim: usize) -> Self {
        let names = match dtype {
            DType::BF16 => &BF16,
            DType::F16 => &F16,
            _ => return Self::Plain(dtype_number(dtype)),
        };
        match head_dim {
            1..=64 if head_dim.is_multiple_of(8) => Self::Matrices(&names[0]),
            65..=128 if head_dim.is_multiple_of(8) => Self::Matrices(&names[1]),
            _ => Self::Plain(dtype_number(dtype)),
        }
    }

    /// Bytes of dynamic shared memory: two stages of up to 64 keys and values.
    fn forward_shared(self) -> u32 {
        match self {
            Self::Matrices(names) => 2 * 2 * 64 * names.padded * 2,
            Self::Plain(_) => 0,
        }
    }

    /// The same backward: the two tensors that a block owns rows of, and two stages of the other two, with the numbers of
    /// their rows.
    fn backward_shared(self) -> u32 {
        match self {
            Self::Matrices(names) => {
                let columns = if names.padded == 128 { 64 } else { 32 };
                2 * TILE as u32 * names.padded * 2 + 2 * columns * (2 * names.padded * 2 + ROW as u32 * 4)
            }
            Self::Plain(_) => 0,
        }
    }

    fn backward_q(self, drops: bool) -> (Source, &'static str) {
        match (self, drops) {
            (Self::Matrices(names), false) => (Source::AttentionBackwardQ, names.backward_q[0]),
            (Self::Matrices(names), true) => (Source::AttentionDropoutBackwardQ, names.backward_q[1]),
            (Self::Plain(_), false) => (Source::AttentionPlain, "attention_plain_backward_q"),
            (Self::Plain(_), true) => (Source::AttentionDropoutPlain, "attention_dropout_plain_backward_q"),
        }
    }

    fn backward_kv(self, drops: bool) -> (Source, &'static str) {
        match (self, drops) {
            (Self::Matrices(names), false) => (Source::AttentionBackwardKv, names.backward_kv[0]),
            (Self::Matrices(names), true) => (Source::AttentionDropoutBackwardKv, names.backward_kv[1]),
            (Self::Plain(_), false) => (Source::AttentionPlain, "attention_plain_backward_kv"),
            (Self::Plain(_), true) => (Source::AttentionDropoutPlain, "attention_dropout_plain_backward_kv"),
        }
    }
}

impl Sizes {
    /// Sizes that the kernels count in 32 bits.
    pub(super) fn new(
        op: &'static str,
        q: &Tensor,
        k: &Tensor,
        sequences: &Sequences,
        p: &Problem<'_>,
    ) -> Result<Self> {
        let number = |size: usize, tensor: &Tensor| {
            // The extents of an empty tensor decide nothing.
            let size = if tensor.numel() == 0 { size.min(i32::MAX as usize) } else { size };
            // Half the range: the kernels look a tile beyond the end.
            i32::try_from(size).map(i32::unsigned_abs).map_err(|_| Error::Shape {
                op,
                shape: *tensor.shape(),
                remedy: format!("a GPU's attention takes sizes up to {}", i32::MAX),
            })
        };
        // A kernel that owns keys goes over all heads of a group, also where these have no queries.
        let (queries, heads) = if q.numel() == 0 { (0, p.groups) } else { (p.queries, p.heads) };
        let numbers = [
            number(queries, q)?,
            number(p.keys, k)?,
            number(heads, q)?,
            number(p.groups, k)?,
            number(p.head_dim, q)?,
        ];
        let path = Path::new(q.dtype(), p.head_dim);
        let parts = match path {
            Path::Plain(_) if q.dtype().is_float() => (p.head_dim as u64).div_ceil(PART),
            // The kernels of FP8 codes compute whole rows, too.
            Path::Matrices(_) | Path::Plain(_) => 1,
        };
        let tables = sequences.packing().and_then(Packing::tiles);
        let tiles = |rows: usize, table: usize| match tables {
            Some(tables) => tables[table].shape().matrix()[0],
            None => rows.div_ceil(TILE),
        };
        let tiles = [tiles(p.queries, 0), tiles(p.keys, 1)];
        let blocks = |tiles: usize, rows: usize, owners: usize| {
            let each = (p.batch as u64).saturating_mul(owners as u64).saturating_mul(parts);
            if rows == 0 { 0 } else { (tiles as u64).saturating_mul(each) }
        };
        // Any window that reaches so far reaches everything.
        let reach = |keys: Option<usize>| match keys.map(i32::try_from) {
            Some(Ok(keys)) => keys.unsigned_abs(),
            None | Some(Err(_)) => UNLIMITED,
        };
        Ok(Self {
            // At most the sizes above, or a table's, which are at most as many.
            tiles: tiles.map(|tiles| tiles as u32),
            numbers,
            window: p.window.map(reach),
            bottom_right: u32::from(p.diagonal == Diagonal::BottomRight),
            scale: p.scale,
            path,
            query_blocks: blocks(tiles[0], p.queries, p.heads),
            key_blocks: blocks(tiles[1], p.keys, p.groups),
        })
    }

    /// The parameters that all kernels end with, for one that owns queries (side 0) or keys (side 1): query_lengths,
    /// key_lengths, tile_table, fault, tiles, queries, keys, heads, groups, head_dim, left, right, bottom_right, scale. With
    /// dropout those of the mask come before them: key, first, threshold, factor.
    pub(super) fn args(
        &self,
        gpu: &Gpu,
        op: &'static str,
        sequences: &Sequences,
        side: usize,
        mask: Option<&Mask>,
    ) -> Result<Call> {
        let buffer =
            |tensor: Option<&Tensor>| tensor.map(|tensor| tensor.cuda(op).map(Arg::from)).transpose();
        let none = Arg::from(None::<&Buffer>);
        let [query_lengths, key_lengths] = sequences.lengths();
        let table = sequences.packing().and_then(Packing::tiles).map(|tables| &tables[side]);
        let ([n, m, heads, groups, dim], [left, right]) = (self.numbers, self.window);
        let [query_lengths, key_lengths, table] = [query_lengths, key_lengths, table].map(buffer);
        let sizes = args![
            query_lengths?.unwrap_or(none),
            key_lengths?.unwrap_or(none),
            table?.unwrap_or(none),
            gpu.fault(),
            self.tiles[side],
            n,
            m,
            heads,
            groups,
            dim,
            left,
            right,
            self.bottom_right,
            self.scale,
        ];
        Ok(Call { mask: mask.map(Mask::args), sizes })
    }
}

/// The parameters that kernels end with.
pub(super) struct Call {
    mask: Option<[Arg; 4]>,
    sizes: [Arg; 14],
}

impl Call {
    /// With parameters of the mask even if nothing is dropped, for kernels that take both.
    pub(super) fn with_mask(self) -> Self {
        Self { mask: Some(self.mask.unwrap_or_else(Mask::none)), ..self }
    }

    /// All parameters of a kernel that begins with `first`.
    pub(super) fn behind<const N: usize>(&self, first: [Arg; N]) -> Joined {
        match self.mask {
            Some(mask) => {
                let [key, start, threshold, factor] = mask;
                let mut rest = [key; 18];
                rest[1..4].copy_from_slice(&[start, threshold, factor]);
                rest[4..].copy_from_slice(&self.sizes);
                Joined::new(first, rest)
            }
            None => Joined::new(first, self.sizes),
        }
    }
}
