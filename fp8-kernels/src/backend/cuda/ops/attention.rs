//! `attention` on a GPU: by cuDNN where it serves the call, else one launch forward and three backward, none of which keeps
//! scores in memory.
//!
//! 16-bit tensors whose head_dim is a multiple of eight, at most 128, go through the tensor cores; anything else through
//! plain f32 arithmetic, which computes scores again for every 64 columns of a head. On the tensor cores forward keeps the
//! probabilities' rounding below that of the result; backward narrows probabilities and the scores' gradients to the
//! tensors' type before it multiplies them. Queries, keys and values are read by strides, and gradients written so, where the
//! heads of others lie between them. A length out of range is told at the next call that waits for the device.

pub(crate) mod attention_fp8;
mod attention_library;
mod grads;
mod places;

use super::dropout::Mask;
use super::kernels::{CallParameters, DropoutOnParameters};
use super::{Buffer, Entry, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{
    AttentionGrads, AttentionSaved, BackwardCall, Call, Diagonal, Heads, Packing, Problem, Sequences, TILE,
};
use crate::{DType, Error, Result, Shape, Tensor};
use grads::{Gradient, Grads};
use places::{address, is_aligned};

/// Numbers of the kernels: the threads of a block, and the columns of a result that a block of a plain kernel computes.
const THREADS: u32 = 128;
const PART: u64 = 64;
/// f32 that backward keeps for each row of scores.
const ROW: usize = 4;

pub(crate) fn attention(gpu: &Gpu, call: &Call<'_>) -> Result<(Tensor, AttentionSaved)> {
    let (op, p) = ("attention", &call.problem);
    if let Some(served) = attention_library::attention(gpu, call)? {
        return Ok(served);
    }
    let &Call { q, k, v, sequences, .. } = call;
    let sizes = Sizes::new(op, [q, k, v], sequences, p)?;
    let (dtype, device) = (q.tensor().dtype(), q.tensor().device());
    let o = gpu.alloc(dtype, q.shape().numel())?;
    let rows = Shape::from([p.batch, p.heads, p.queries]);
    let (row_max, row_sum) = (gpu.alloc(DType::F32, rows.numel())?, gpu.alloc(DType::F32, rows.numel())?);
    let path = sizes.path;
    let grid = Grid::new(op, sizes.query_blocks, THREADS)?.with_shared(path.forward_shared());
    let mask = p.dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose()?;
    let call = sizes.call(gpu, op, sequences, Owner::Queries, p.heads * p.head_dim)?;
    let forward = Forward {
        inputs: [address(op, q)?, address(op, k)?, address(op, v)?],
        o: &o,
        row_max: Out::f32(&row_max),
        row_sum: Out::f32(&row_sum),
        dropout: mask.as_ref().map(|mask| mask.parameters(p.mask_heads)),
        call,
    };
    // SAFETY: shapes and types are checked by `ops::attention`, and that heads end within their tokens by `ops::Heads`; the
    // path is that of their head_dim and alignment, the outputs were made above; there is a block for each tile of queries and head, and on the plain path for each 64 columns of one.
    unsafe { forward.launch(gpu, path, grid) }?;
    let saved = AttentionSaved {
        row_max: Tensor::from_cuda(row_max, rows, device),
        row_sum: Some(Tensor::from_cuda(row_sum, rows, device)),
    };
    Ok((Tensor::from_cuda(o, *q.shape(), device), saved))
}

/// Returns `max + log(sum)` of each row.
pub(crate) fn log_sum_exp(gpu: &Gpu, row_max: &Tensor, row_sum: &Tensor) -> Result<Tensor> {
    let op = "log_sum_exp";
    let (count, out) = (row_max.numel(), gpu.alloc(DType::F32, row_max.numel())?);
    let kernel = gpu.load(kernels::ATTENTION_LOG_SUM_EXP)?;
    let args = kernels::AttentionLogSumExp {
        row_max: In::f32(row_max.cuda(op)?),
        row_sum: In::f32(row_sum.cuda(op)?),
        out: Out::f32(&out),
        count: count as u64,
    };
    // SAFETY: all three have `count` f32, which `AttentionSaved::log_sum_exp` checks.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, count as u64), &args) }?;
    Ok(Tensor::from_cuda(out, *row_max.shape(), row_max.device()))
}

pub(crate) fn attention_backward(gpu: &Gpu, call: &BackwardCall<'_>) -> Result<AttentionGrads> {
    let op = "attention_backward";
    if let Some(served) = attention_library::attention_backward(gpu, call)? {
        return Ok(served);
    }
    let &BackwardCall { forward: Call { q, k, v, sequences, ref problem }, dy, o, saved, layout } = call;
    let p = problem;
    let sizes = Sizes::new(op, [q, k, v], sequences, p)?;
    let grads = Grads::new(gpu, q.tensor().dtype(), layout, p)?;
    let rows = rows(gpu, op, dy, o, saved, p)?;
    let mask = p.dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose()?;
    let launches = [
        (Owner::Queries, Gradient::Q, None, sizes.query_blocks),
        (Owner::Keys, Gradient::K, Some(Gradient::V), sizes.key_blocks),
    ];
    for (owner, first, second, blocks) in launches {
        let grid = Grid::new(op, blocks, THREADS)?.with_shared(sizes.path.backward_shared());
        let backward = Backward {
            inputs: [address(op, q)?, address(op, k)?, address(op, v)?, dy.cuda(op)?.ptr()],
            row_numbers: In::row(&rows),
            first: grads.address(first),
            second: second.map_or(0, |which| grads.address(which)),
            dropout: mask.as_ref().map(|mask| mask.parameters(p.mask_heads)),
            call: sizes.call(gpu, op, sequences, owner, grads.pitch(first))?,
        };
        // SAFETY: shapes and types are checked by `ops::attention_backward`, and that heads end within their tokens by
        // `ops::Heads`; the path is that of their head_dim and alignment; the first result is dq, or dk beside dv, made above; four f32 for each row; there is a block for each tile of queries and
        // head, or of keys and group, and on the plain path for each 64 columns of one.
        unsafe { backward.launch(gpu, sizes.path, owner, grid) }?;
    }
    grads.finish(op, q.tensor().device())
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
        row_sum: In::f32(saved.row_sum.as_ref().map(|sums| sums.cuda(op)).transpose()?),
        rows: Out::row(&rows),
        count: count as u64,
        queries: p.queries as u32,
        heads: p.heads as u32,
        head_dim: p.head_dim as u32,
    };
    let grid = Grid { blocks: gpu.blocks(count as u64, THREADS.into(), 16), threads: THREADS, shared: 0 };
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
    /// The elements from one token to the next: of queries, and of keys and values.
    pitches: [u32; 2],
    /// The number of keys that a query sees to the left and to the right of its own.
    window: [u32; 2],
    bottom_right: i32,
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
    Matrices(&'static Kernels),
    /// With the number of the type.
    Plain(i32),
}

/// The side of the scores that a block of a kernel computes the results of: its queries, or its keys and values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Queries,
    Keys,
}

/// The kernels for one type and padded head size.
struct Kernels {
    /// Elements of a head in shared memory.
    padded: u32,
    forward: Entry<kernels::Attention>,
    backward_q: Entry<kernels::AttentionBackward>,
    backward_kv: Entry<kernels::AttentionBackward>,
    dropout: Entry<kernels::AttentionDropout>,
    dropout_backward_q: Entry<kernels::AttentionDropoutBackward>,
    dropout_backward_kv: Entry<kernels::AttentionDropoutBackward>,
}

const BF16: [&Kernels; 2] = [
    &Kernels {
        padded: 64,
        forward: kernels::ATTENTION_BF16_64,
        backward_q: kernels::ATTENTION_BACKWARD_Q_BF16_64,
        backward_kv: kernels::ATTENTION_BACKWARD_KV_BF16_64,
        dropout: kernels::ATTENTION_DROPOUT_BF16_64,
        dropout_backward_q: kernels::ATTENTION_DROPOUT_BACKWARD_Q_BF16_64,
        dropout_backward_kv: kernels::ATTENTION_DROPOUT_BACKWARD_KV_BF16_64,
    },
    &Kernels {
        padded: 128,
        forward: kernels::ATTENTION_BF16_128,
        backward_q: kernels::ATTENTION_BACKWARD_Q_BF16_128,
        backward_kv: kernels::ATTENTION_BACKWARD_KV_BF16_128,
        dropout: kernels::ATTENTION_DROPOUT_BF16_128,
        dropout_backward_q: kernels::ATTENTION_DROPOUT_BACKWARD_Q_BF16_128,
        dropout_backward_kv: kernels::ATTENTION_DROPOUT_BACKWARD_KV_BF16_128,
    },
];

const F16: [&Kernels; 2] = [
    &Kernels {
        padded: 64,
        forward: kernels::ATTENTION_F16_64,
        backward_q: kernels::ATTENTION_BACKWARD_Q_F16_64,
        backward_kv: kernels::ATTENTION_BACKWARD_KV_F16_64,
        dropout: kernels::ATTENTION_DROPOUT_F16_64,
        dropout_backward_q: kernels::ATTENTION_DROPOUT_BACKWARD_Q_F16_64,
        dropout_backward_kv: kernels::ATTENTION_DROPOUT_BACKWARD_KV_F16_64,
    },
    &Kernels {
        padded: 128,
        forward: kernels::ATTENTION_F16_128,
        backward_q: kernels::ATTENTION_BACKWARD_Q_F16_128,
        backward_kv: kernels::ATTENTION_BACKWARD_KV_F16_128,
        dropout: kernels::ATTENTION_DROPOUT_F16_128,
        dropout_backward_q: kernels::ATTENTION_DROPOUT_BACKWARD_Q_F16_128,
        dropout_backward_kv: kernels::ATTENTION_DROPOUT_BACKWARD_KV_F16_128,
    },
];

impl Path {
    /// The kernels of the tensor cores need heads that are aligned; the others read element by element.
    fn new(dtype: DType, head_dim: usize, is_aligned: bool) -> Self {
        let [narrow, wide] = match dtype {
            DType::BF16 if is_aligned => BF16,
            DType::F16 if is_aligned => F16,
            _ => return Self::Plain(dtype_number(dtype)),
        };
        match head_dim {
            1..=64 if head_dim.is_multiple_of(8) => Self::Matrices(narrow),
            65..=128 if head_dim.is_multiple_of(8) => Self::Matrices(wide),
            _ => Self::Plain(dtype_number(dtype)),
        }
    }

    /// Bytes of dynamic shared memory: two stages of up to 64 keys and values.
    fn forward_shared(self) -> u32 {
        match self {
            Self::Matrices(kernels) => 2 * 2 * 64 * kernels.padded * 2,
            Self::Plain(_) => 0,
        }
    }

    /// The same backward: the two tensors that a block owns rows of, and two stages of the other two, with the numbers of
    /// their rows.
    fn backward_shared(self) -> u32 {
        match self {
            Self::Matrices(kernels) => {
                let columns = if kernels.padded == 128 { 64 } else { 32 };
                2 * TILE as u32 * kernels.padded * 2 + 2 * columns * (2 * kernels.padded * 2 + ROW as u32 * 4)
            }
            Self::Plain(_) => 0,
        }
    }
}

impl Sizes {
    /// Sizes that the kernels count in 32 bits.
    pub(super) fn new(
        op: &'static str,
        heads: [Heads<'_>; 3],
        sequences: &Sequences,
        p: &Problem<'_>,
    ) -> Result<Self> {
        let [q, k, _] = heads;
        let number = |size: usize, tensor: Heads<'_>| {
            // The extents of an empty tensor decide nothing.
            let is_empty = tensor.shape().numel() == 0;
            let size = if is_empty { size.min(i32::MAX as usize) } else { size };
            // Half the range: the kernels look a tile beyond the end.
            i32::try_from(size).map(i32::unsigned_abs).map_err(|_| Error::Shape {
                op,
                shape: *tensor.shape(),
                remedy: format!("a GPU's attention takes sizes up to {}", i32::MAX),
            })
        };
        // A kernel that owns keys goes over all heads of a group, also where these have no queries.
        let (queries, of_q) = if q.shape().numel() == 0 { (0, p.groups) } else { (p.queries, p.heads) };
        let numbers = [
            number(queries, q)?,
            number(p.keys, k)?,
            number(of_q, q)?,
            number(p.groups, k)?,
            number(p.head_dim, q)?,
        ];
        let dtype = q.tensor().dtype();
        let path = Path::new(dtype, p.head_dim, heads.into_iter().all(is_aligned));
        let parts = match path {
            Path::Plain(_) if dtype.is_float() => (p.head_dim as u64).div_ceil(PART),
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
            pitches: [number(q.pitch(), q)?, number(k.pitch(), k)?],
            window: p.window.map(reach),
            bottom_right: i32::from(p.diagonal == Diagonal::BottomRight),
            scale: p.scale,
            path,
            query_blocks: blocks(tiles[0], p.queries, p.heads),
            key_blocks: blocks(tiles[1], p.keys, p.groups),
        })
    }

    /// The parameters that all kernels end with. `result_pitch` is that of what the kernel writes.
    pub(super) fn call(
        &self,
        gpu: &Gpu,
        op: &'static str,
        sequences: &Sequences,
        owner: Owner,
        result_pitch: usize,
    ) -> Result<CallParameters> {
        let result_pitch = i32::try_from(result_pitch).map_err(|_| Error::Option {
            op,
            option: "features of a token",
            value: result_pitch.to_string(),
            remedy: format!("a GPU's attention takes up to {}", i32::MAX),
        })?;
        let address = |tensor: Option<&Tensor>| -> Result<In<i32>> {
            Ok(In::i32(tensor.map(|tensor| tensor.cuda(op)).transpose()?))
        };
        let [query_lengths, key_lengths] = sequences.lengths();
        let side = usize::from(owner == Owner::Keys);
        let table = sequences.packing().and_then(Packing::tiles).map(|tables| &tables[side]);
        let ([queries, keys, heads, groups, head_dim], [left, right]) = (self.numbers, self.window);
        Ok(CallParameters {
            query_lengths: address(query_lengths)?,
            key_lengths: address(key_lengths)?,
            tile_table: address(table)?,
            fault: Out::i64(gpu.fault()),
            tiles: self.tiles[side],
            queries,
            keys,
            heads,
            groups,
            head_dim,
            q_pitch: self.pitches[0],
            k_pitch: self.pitches[1],
            result_pitch: result_pitch.unsigned_abs(),
            left,
            right,
            bottom_right: self.bottom_right,
            scale: self.scale,
        })
    }
}

/// One forward launch: the addresses of q, k and v, the results, the mask where probabilities are dropped, and the call.
struct Forward<'a> {
    inputs: [u64; 3],
    o: &'a Buffer,
    row_max: Out<f32>,
    row_sum: Out<f32>,
    dropout: Option<DropoutOnParameters>,
    call: CallParameters,
}

impl Forward<'_> {
    /// # Safety
    /// The tensors have the call's extents and the path's type; there are as many blocks as the path's kernel takes.
    unsafe fn launch(self, gpu: &Gpu, path: Path, grid: Grid) -> Result<()> {
        let Self { inputs: [q, k, v], o, row_max, row_sum, dropout, call } = self;
        match (path, dropout) {
            (Path::Matrices(kernels), None) => {
                let ([q, k, v], o) = ([q, k, v].map(In::u16), Out::u16(o));
                let args = kernels::Attention { q, k, v, o, row_max, row_sum, call };
                let kernel = gpu.load(kernels.forward)?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
            (Path::Matrices(kernels), Some(dropout_on)) => {
                let ([q, k, v], o) = ([q, k, v].map(In::u16), Out::u16(o));
                let args = kernels::AttentionDropout { q, k, v, o, row_max, row_sum, dropout_on, call };
                let kernel = gpu.load(kernels.dropout)?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
            (Path::Plain(dtype), None) => {
                let ([q, k, v], o) = ([q, k, v].map(In::void), Out::void(o));
                let args = kernels::AttentionPlain { q, k, v, o, dtype, row_max, row_sum, call };
                let kernel = gpu.load(kernels::ATTENTION_PLAIN)?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
            (Path::Plain(dtype), Some(dropout_on)) => {
                let ([q, k, v], o) = ([q, k, v].map(In::void), Out::void(o));
                let args =
                    kernels::AttentionDropoutPlain { q, k, v, o, dtype, row_max, row_sum, dropout_on, call };
                let kernel = gpu.load(kernels::ATTENTION_DROPOUT_PLAIN)?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
        }
    }
}

/// One backward launch: the addresses of q, k, v and dy, the numbers of rows, the addresses of the results (dq, or dk and dv), the mask where probabilities
/// were dropped, and the call.
struct Backward {
    inputs: [u64; 4],
    row_numbers: In<kernels::Row>,
    first: u64,
    second: u64,
    dropout: Option<DropoutOnParameters>,
    call: CallParameters,
}

impl Backward {
    /// # Safety
    /// The tensors have the call's extents and the path's type, `second` stands where the owner is keys; there are as many
    /// blocks as the kernel takes.
    unsafe fn launch(self, gpu: &Gpu, path: Path, owner: Owner, grid: Grid) -> Result<()> {
        let Self { inputs: [q, k, v, dy], row_numbers, first, second, dropout, call } = self;
        let keys = owner == Owner::Keys;
        match (path, dropout) {
            (Path::Matrices(kernels), None) => {
                let [q, k, v, dy] = [q, k, v, dy].map(In::u16);
                let (d_first, d_second) = (Out::u16(first), Out::u16(second));
                let args = kernels::AttentionBackward { q, k, v, dy, row_numbers, d_first, d_second, call };
                let kernel = if keys { kernels.backward_kv } else { kernels.backward_q };
                let kernel = gpu.load(kernel)?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
            (Path::Matrices(kernels), Some(dropout_on)) => {
                let [q, k, v, dy] = [q, k, v, dy].map(In::u16);
                let (d_first, d_second) = (Out::u16(first), Out::u16(second));
                let args = kernels::AttentionDropoutBackward {
                    q,
                    k,
                    v,
                    dy,
                    row_numbers,
                    d_first,
                    d_second,
                    dropout_on,
                    call,
                };
                let kernel = if keys { kernels.dropout_backward_kv } else { kernels.dropout_backward_q };
                let kernel = gpu.load(kernel)?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
            (Path::Plain(dtype), None) => {
                let [q, k, v, dy] = [q, k, v, dy].map(In::void);
                let (d_first, d_second) = (Out::void(first), Out::void(second));
                let args = kernels::AttentionPlainBackward {
                    q,
                    k,
                    v,
                    dy,
                    dtype,
                    row_numbers,
                    d_first,
                    d_second,
                    call,
                };
                let [own_q, own_kv] =
                    [kernels::ATTENTION_PLAIN_BACKWARD_Q, kernels::ATTENTION_PLAIN_BACKWARD_KV];
                let kernel = gpu.load(if keys { own_kv } else { own_q })?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
            (Path::Plain(dtype), Some(dropout_on)) => {
                let [q, k, v, dy] = [q, k, v, dy].map(In::void);
                let (d_first, d_second) = (Out::void(first), Out::void(second));
                let args = kernels::AttentionDropoutPlainBackward {
                    q,
                    k,
                    v,
                    dy,
                    dtype,
                    row_numbers,
                    d_first,
                    d_second,
                    dropout_on,
                    call,
                };
                let [own_q, own_kv] = [
                    kernels::ATTENTION_DROPOUT_PLAIN_BACKWARD_Q,
                    kernels::ATTENTION_DROPOUT_PLAIN_BACKWARD_KV,
                ];
                let kernel = gpu.load(if keys { own_kv } else { own_q })?;
                // SAFETY: the caller's.
                unsafe { kernel.launch(gpu, grid, &args) }
            }
        }
    }
}
