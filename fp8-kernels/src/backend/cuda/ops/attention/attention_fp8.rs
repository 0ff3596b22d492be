//! `attention_fp8` on a GPU: one launch forward, three backward, none of which keeps scores in memory.
//!
//! Head sizes up to 128 that are multiples of 16 go through the tensor cores' FP8 products. Anything else is dequantized to
//! f32, exactly, and computed by [`attention`](super::attention), which does not round probabilities.

use super::grads::{Gradient, Grads};
use super::places::{address, is_aligned};
use super::{Owner, Sizes, attention, attention_backward};
use crate::backend::cuda::ops::dropout::Mask;
use crate::backend::cuda::ops::{Buffer, Entry, Gpu, Grid, In, Out, dtype_number, format_number, kernels};
use crate::ops::{self, AttentionGrads, AttentionSaved, BackwardCall, Call, Heads, Problem, TILE};
use crate::{DType, Encoding, Fp8Tensor, Result, Shape, Tensor};

/// Threads of a block.
const THREADS: u32 = 128;
/// Keys, or rows of the other side in backward, of one stage.
const COLUMNS: u32 = 64;
/// f32 that backward keeps for each row of scores.
const ROW: usize = 4;

pub(crate) fn attention_fp8(
    gpu: &Gpu,
    call: &Call<'_, Fp8Tensor>,
    dtype: DType,
) -> Result<(Tensor, AttentionSaved)> {
    let (op, p, sequences) = ("attention_fp8", &call.problem, call.sequences);
    let (q, k, v) = (Operand::new(op, call.q)?, Operand::new(op, call.k)?, Operand::new(op, call.v)?);
    let heads = [q.codes, k.codes, v.codes];
    let Some(kernels) = Kernels::new(p.head_dim, heads) else {
        let (o, saved) = attention(gpu, &call.of(&call.values()?))?;
        return Ok((ops::cast(&o, dtype)?, saved));
    };
    let sizes = Sizes::new(op, heads, sequences, p)?;
    let (shape, device) = (*call.q.shape(), call.q.tensor().device());
    let o = gpu.alloc(dtype, shape.numel())?;
    let rows = Shape::from([p.batch, p.heads, p.queries]);
    let (row_max, row_sum) = (gpu.alloc(DType::F32, rows.numel())?, gpu.alloc(DType::F32, rows.numel())?);
    let grid = Grid::new(op, sizes.query_blocks, THREADS)?.with_shared(kernels.forward_shared());
    let kernel = gpu.load(kernels.forward)?;
    let mask = p.dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose()?;
    let args = kernels::AttentionFp8 {
        q: q.codes(op)?,
        k: k.codes(op)?,
        v: v.codes(op)?,
        q_scale_inv: q.scale_inv(op)?,
        k_scale_inv: k.scale_inv(op)?,
        v_scale_inv: v.scale_inv(op)?,
        o: Out::void(&o),
        dtype: dtype_number(dtype),
        row_max: Out::f32(&row_max),
        row_sum: Out::f32(&row_sum),
        dropout_on: Mask::optional(mask.as_ref(), p.mask_heads),
        call: sizes.call(gpu, op, sequences, Owner::Queries, p.heads * p.head_dim)?,
    };
    // SAFETY: shapes and formats are checked by `ops::attention_fp8`, and that heads end within their tokens by
    // `ops::Heads`; they are aligned, head_dim is a multiple of 16 up to the
    // kernel's, the outputs were made above; a block for each tile of queries and head.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    let saved = AttentionSaved {
        row_max: Tensor::from_cuda(row_max, rows, device),
        row_sum: Some(Tensor::from_cuda(row_sum, rows, device)),
    };
    Ok((Tensor::from_cuda(o, shape, device), saved))
}

pub(crate) fn attention_fp8_backward(
    gpu: &Gpu,
    call: &BackwardCall<'_, Fp8Tensor>,
) -> Result<AttentionGrads> {
    let op = "attention_fp8_backward";
    let &BackwardCall { ref forward, dy, o, saved, layout } = call;
    let (p, sequences, dtype) = (&forward.problem, forward.sequences, o.dtype());
    let (q, k, v) =
        (Operand::new(op, forward.q)?, Operand::new(op, forward.k)?, Operand::new(op, forward.v)?);
    let heads = [q.codes, k.codes, v.codes];
    let Some(kernels) = Kernels::new(p.head_dim, heads) else {
        let (values, dy, o) = (forward.values()?, dy.dequantize(DType::F32)?, ops::cast(o, DType::F32)?);
        let forward = forward.of(&values);
        let grads = attention_backward(gpu, &BackwardCall { forward, dy: &dy, o: &o, saved, layout })?;
        return grads.map(|x| ops::cast(x, dtype));
    };
    let dy = Operand::new(op, dy.into())?;
    let sizes = Sizes::new(op, heads, sequences, p)?;
    let grads = Grads::new(gpu, dtype, layout, p)?;
    let rows = rows(gpu, op, &dy, o, saved, p)?;
    let mask = p.dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose()?;
    let grad = kernels.of(dy.encoding);
    let launches = [
        (Owner::Queries, grad.q, Gradient::Q, None, sizes.query_blocks),
        (Owner::Keys, grad.kv, Gradient::K, Some(Gradient::V), sizes.key_blocks),
    ];
    for (owner, kernel, first, second, blocks) in launches {
        let grid = Grid::new(op, blocks, THREADS)?.with_shared(kernels.backward_shared());
        let kernel = gpu.load(kernel)?;
        let args = kernels::AttentionFp8Backward {
            q: q.codes(op)?,
            k: k.codes(op)?,
            v: v.codes(op)?,
            dy: dy.codes(op)?,
            q_scale_inv: q.scale_inv(op)?,
            k_scale_inv: k.scale_inv(op)?,
            v_scale_inv: v.scale_inv(op)?,
            dy_scale_inv: dy.scale_inv(op)?,
            row_numbers: In::row(&rows),
            d_first: Out::void(grads.address(first)),
            d_second: Out::void(second.map_or(0, |which| grads.address(which))),
            dtype: dtype_number(dtype),
            dropout_on: Mask::optional(mask.as_ref(), p.mask_heads),
            call: sizes.call(gpu, op, sequences, owner, grads.pitch(first))?,
        };
        // SAFETY: shapes and formats are checked by `ops::attention_fp8_backward`, and that heads end within their tokens by
        // `ops::Heads`; they are aligned, head_dim is a multiple of 16 up to
        // the kernel's; d_first is dq, or dk beside dv, made above; four f32 for each row; a block for each tile of
        // queries and head, or of keys and group.
        unsafe { kernel.launch(gpu, grid, &args) }?;
    }
    grads.finish(op, forward.q.tensor().device())
}

/// Computes the numbers that backward reads for each row of scores.
fn rows(
    gpu: &Gpu,
    op: &'static str,
    dy: &Operand<'_>,
    o: &Tensor,
    saved: &AttentionSaved,
    p: &Problem<'_>,
) -> Result<Buffer> {
    let count = p.batch * p.heads * p.queries;
    let rows = gpu.alloc(DType::F32, ROW * count)?;
    let kernel = gpu.load(kernels::ATTENTION_FP8_ROWS)?;
    let args = kernels::AttentionFp8Rows {
        dy: dy.codes(op)?,
        format: format_number(dy.encoding),
        dy_scale_inv: In::f32(dy.scale_inv.cuda(op)?),
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
    // SAFETY: shapes and types are checked by `ops::attention_fp8_backward`, and that sizes fit 32 bits by
    // `Sizes::new`; head_dim is a multiple of 16 up to 128; four f32 for each row.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    Ok(rows)
}

/// One tensor as the kernels take it.
struct Operand<'a> {
    codes: Heads<'a>,
    scale_inv: &'a Tensor,
    encoding: Encoding,
}

impl<'a> Operand<'a> {
    fn new(op: &'static str, heads: Heads<'a, Fp8Tensor>) -> Result<Self> {
        let x = heads.tensor();
        let (scale_inv, encoding) = (x.scale_inv(), x.encoding());
        match x.rowwise() {
            Some(codes) => Ok(Self { codes: heads.of(codes), scale_inv, encoding }),
            None => Err(crate::Error::Option {
                op,
                option: "codes",
                value: "columnwise".to_owned(),
                remedy: "expected rowwise codes".to_owned(),
            }),
        }
    }

    fn codes(&self, op: &'static str) -> Result<In<u8>> {
        Ok(In::u8(address(op, self.codes)?))
    }

    fn scale_inv(&self, op: &'static str) -> Result<In<f32>> {
        Ok(In::f32(self.scale_inv.cuda(op)?))
    }
}

/// The kernels for one padded head size.
struct Kernels {
    /// Codes of a head in shared memory.
    padded: u32,
    forward: Entry<kernels::AttentionFp8>,
    e4m3: Backward,
    e5m2: Backward,
}

/// The kernels for one format of dy.
struct Backward {
    q: Entry<kernels::AttentionFp8Backward>,
    kv: Entry<kernels::AttentionFp8Backward>,
}

const KERNELS: [&Kernels; 2] = [
    &Kernels {
        padded: 64,
        forward: kernels::ATTENTION_FP8_64,
        e4m3: Backward {
            q: kernels::ATTENTION_FP8_BACKWARD_Q_E4M3_64,
            kv: kernels::ATTENTION_FP8_BACKWARD_KV_E4M3_64,
        },
        e5m2: Backward {
            q: kernels::ATTENTION_FP8_BACKWARD_Q_E5M2_64,
            kv: kernels::ATTENTION_FP8_BACKWARD_KV_E5M2_64,
        },
    },
    &Kernels {
        padded: 128,
        forward: kernels::ATTENTION_FP8_128,
        e4m3: Backward {
            q: kernels::ATTENTION_FP8_BACKWARD_Q_E4M3_128,
            kv: kernels::ATTENTION_FP8_BACKWARD_KV_E4M3_128,
        },
        e5m2: Backward {
            q: kernels::ATTENTION_FP8_BACKWARD_Q_E5M2_128,
            kv: kernels::ATTENTION_FP8_BACKWARD_KV_E5M2_128,
        },
    },
];

impl Kernels {
    /// `None` for a head size that the tensor cores' kernels do not take, or heads that are not aligned.
    fn new(head_dim: usize, heads: [Heads<'_>; 3]) -> Option<&'static Self> {
        if !heads.into_iter().all(is_aligned) {
            return None;
        }
        match head_dim {
            16..=64 if head_dim.is_multiple_of(16) => Some(KERNELS[0]),
            65..=128 if head_dim.is_multiple_of(16) => Some(KERNELS[1]),
            _ => None,
        }
    }

    fn of(&self, encoding: Encoding) -> &Backward {
        match encoding {
            Encoding::E5M2 => &self.e5m2,
            // Slots with E2M1 are refused.
            Encoding::E4M3 | Encoding::E2M1 => &self.e4m3,
        }
    }

    /// Bytes of dynamic shared memory: two stages of keys and values.
    const fn forward_shared(&self) -> u32 {
        2 * 2 * COLUMNS * self.padded
    }

    /// The same backward: the two tensors that a block owns rows of, and two stages of the other two, with the numbers of
    /// their rows.
    const fn backward_shared(&self) -> u32 {
        2 * TILE as u32 * self.padded + 2 * COLUMNS * (2 * self.padded + ROW as u32 * 4)
    }
}
