//! Attention whose products read FP8 codes.

use super::attention::{BackwardCall, Call, dims4, expect_same_shape, problem};
use super::{AttentionGrads, AttentionSaved, GradLayout, Heads, Problem, ScoreOptions, Sequences};
use crate::backend::dispatch;
use crate::{DType, Encoding, Error, Fp8Tensor, Result, Shape, Tensor};

/// Computes attention of FP8 tensors, `o = softmax(softmax_scale · q·kᵀ + mask) · v`, with both products in FP8.
///
/// | tensor | shape | |
/// |---|---|---|
/// | `q` | `[batch, queries, heads, head_dim]` | E4M3 codes with one factor |
/// | `k`, `v` | `[batch, keys, groups, head_dim]` | the same |
/// | `o` | that of `q` | `dtype`: f32, bf16 or f16 |
///
/// Each of `q`, `k` and `v` may be [`Heads`] of a larger tensor, such as the output of one projection with one factor. Masks, sequences
/// and grouped heads are those of [`attention`](crate::ops::attention()), and so are the rows that it returns for
/// the backward pass. Scores, softmax and sums are f32:
///
/// - `score = Σ q_code · k_code · q_scale_inv · k_scale_inv · softmax_scale`.
/// - Probabilities become E4M3 codes with the fixed scale 256. While a row is computed, they are relative to its largest score
///   so far, so they are at most 1 and never saturate, and their scale needs no amax and no history. Transformer Engine has a
///   slot for them instead.
/// - `row_sum` sums the probabilities before they are rounded, and before any is dropped.
/// - `options.dropout` drops the probabilities that it drops in [`attention`](crate::ops::attention()): the mask is the same. The
///   others become codes as they are, and their factor `1 / (1 − p)`, with which codes could saturate, multiplies `o`.
///
/// Backends round probabilities relative to different running maxima, so results agree within a tolerance. The relative RMS
/// error of `o` is about 0.02 against exact attention of the dequantized tensors, and about 0.04 with the error of the codes,
/// for normally distributed values. On a GPU, a `head_dim` that is not a multiple of 16 or is larger than 128 is computed in f32
/// from the dequantized tensors, with exact probabilities.
///
/// # Errors
/// Codes other than E4M3; factors for rows or blocks; a `dtype` that is not a float; the shapes, sequences and options
/// that [`attention`](crate::ops::attention()) refuses.
///
/// ```
/// use fp8_kernels::ops::{self, ScoreOptions, Sequences};
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
///
/// let cpu = Device::cpu();
/// let codes = Tensor::from_vec(vec![0x38u8, 0x44], [1, 2, 1, 1], &cpu)?; // 1 and 3
/// let x = Fp8Tensor::from_codes(codes, [1, 2, 1, 1], Encoding::E4M3, Tensor::scalar(1.0, &cpu)?)?;
/// let options = ScoreOptions { softmax_scale: Some(0.0), ..Default::default() };
/// let (o, saved) = ops::attention_fp8(&x, &x, &x, &Sequences::Full, options, DType::F32)?;
/// assert_eq!(o.to_vec::<f32>()?, [1.0, 2.0]); // the second query sees both keys, each with 1/2
/// assert_eq!(saved.row_sum.unwrap().to_vec::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn attention_fp8<'a>(
    q: impl Into<Heads<'a, Fp8Tensor>>,
    k: impl Into<Heads<'a, Fp8Tensor>>,
    v: impl Into<Heads<'a, Fp8Tensor>>,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
    dtype: DType,
) -> Result<(Tensor, AttentionSaved)> {
    let op = "attention_fp8";
    super::check_output(op, dtype)?;
    let codes = Checked::new(op, [q.into(), k.into(), v.into()], sequences, options)?;
    let call = codes.call(sequences);
    dispatch!(call.q.tensor().device(), attention_fp8::attention_fp8(&call, dtype))
}

/// Returns `(dq, dk, dv)`, the gradients of [`attention_fp8`](attention_fp8())'s inputs, with all five products in FP8.
///
/// `dy` is the quantized gradient of the output: E5M2 or E4M3 codes with one factor, of the shape of `q`. Pass the inputs,
/// options and results of the forward call. Each gradient has the shape of its tensor and the dtype of `o`.
///
/// With the probabilities `p`, computed again from the codes of `q` and `k`:
///
/// | product | left | right |
/// |---|---|---|
/// | `dp = dy · vᵀ` | dy's format | E4M3 |
/// | `dq = softmax_scale · ds · k` | dy's format | E4M3 |
/// | `dk = softmax_scale · dsᵀ · q` | dy's format | E4M3 |
/// | `dv = pᵀ · dy` | E4M3 | dy's format |
///
/// `ds = p · (dp − Σ dy · o)` is the gradient of the scores, computed in f32 from dy's values and `o`. `p` is quantized to E4M3
/// and `ds` to dy's format as operands of these products. Their scales are powers of two that the kernel finds while it runs:
/// each row of a product's left operand, which is a row of its result, has a scale that brings the row's largest magnitude near
/// the top of the format without saturating. Such scales need no amax, no history and no second pass, are the same under every
/// recipe, and follow rows whose gradients differ by orders of magnitude. Transformer Engine has one slot each for `p` and for
/// `dp` instead. With dropout, `dp` is multiplied by the mask and its factor. Of `p`, those that were kept become codes, and the
/// factor multiplies `dv`.
///
/// # Errors
/// Those of [`attention_fp8`](attention_fp8()); a `dy` or `o` of another shape or device than `q`; a `saved` of another call.
///
/// ```
/// use fp8_kernels::ops::{self, ScoreOptions, Sequences};
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
///
/// let cpu = Device::cpu();
/// let of = |code: u8, encoding| {
///     let codes = Tensor::from_vec(vec![code], [1, 1, 1, 1], &cpu)?;
///     Fp8Tensor::from_codes(codes, [1, 1, 1, 1], encoding, Tensor::scalar(0.5, &cpu)?)
/// };
/// let (x, dy) = (of(0x44, Encoding::E4M3)?, of(0x42, Encoding::E5M2)?); // 3 · 0.5 each
/// let options = ScoreOptions::default();
/// let (o, saved) = ops::attention_fp8(&x, &x, &x, &Sequences::Full, options, DType::F32)?;
/// let (dq, dk, dv) = ops::attention_fp8_backward(&dy, &x, &x, &x, &o, &saved, &Sequences::Full, options)?;
/// // The only key has probability 1, whatever its score: o = v.
/// assert_eq!((o.to_f32_vec()?, dv.to_f32_vec()?), (vec![1.5], vec![1.5]));
/// assert_eq!((dq.to_f32_vec()?, dk.to_f32_vec()?), (vec![0.0], vec![0.0]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[expect(clippy::too_many_arguments, reason = "the tensors of the forward call, its results, and dy")]
pub fn attention_fp8_backward<'a>(
    dy: &Fp8Tensor,
    q: impl Into<Heads<'a, Fp8Tensor>>,
    k: impl Into<Heads<'a, Fp8Tensor>>,
    v: impl Into<Heads<'a, Fp8Tensor>>,
    o: &Tensor,
    saved: &AttentionSaved,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let inputs = [q.into(), k.into(), v.into()];
    backward(dy, inputs, o, saved, sequences, options, GradLayout::Separate)?.separate(BACKWARD)
}

/// Computes the gradients of [`attention_fp8_backward`](attention_fp8_backward()) and returns them in the tensors that `layout`
/// selects.
///
/// # Errors
/// Those of [`attention_fp8_backward`](attention_fp8_backward()); gradients in one tensor of different numbers of queries and
/// keys; a tensor that would be too large.
///
/// ```
/// use fp8_kernels::ops::{self, AttentionGrads, GradLayout, Heads, ScoreOptions, Sequences};
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
///
/// let cpu = Device::cpu();
/// let of = |codes: Vec<u8>, shape: &[usize], encoding| {
///     let shape = fp8_kernels::Shape::from_slice(shape).expect("a shape");
///     Fp8Tensor::from_codes(Tensor::from_vec(codes, shape, &cpu)?, shape, encoding, Tensor::scalar(0.5, &cpu)?)
/// };
/// let qkv = of(vec![0x38, 0x38, 0x44], &[1, 1, 3], Encoding::E4M3)?; // 1, 1 and 3, times 0.5
/// let dy = of(vec![0x42], &[1, 1, 1, 1], Encoding::E5M2)?; // 3, times 0.5
/// let [q, k, v] = Heads::qkv(&qkv, 1, 1, 1)?;
/// let (sequences, options) = (Sequences::Full, ScoreOptions::default());
/// let (o, saved) = ops::attention_fp8(q, k, v, &sequences, options, DType::F32)?;
/// let grads =
///     ops::attention_fp8_backward_to(&dy, q, k, v, &o, &saved, &sequences, options, GradLayout::Qkv)?;
/// let AttentionGrads::Qkv(dqkv) = grads else { unreachable!("as asked for") };
/// assert_eq!((o.to_f32_vec()?, dqkv.to_f32_vec()?), (vec![1.5], vec![0.0, 0.0, 1.5]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[expect(clippy::too_many_arguments, reason = "the tensors of the forward call, its results, and dy")]
pub fn attention_fp8_backward_to<'a>(
    dy: &Fp8Tensor,
    q: impl Into<Heads<'a, Fp8Tensor>>,
    k: impl Into<Heads<'a, Fp8Tensor>>,
    v: impl Into<Heads<'a, Fp8Tensor>>,
    o: &Tensor,
    saved: &AttentionSaved,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
    layout: GradLayout,
) -> Result<AttentionGrads> {
    backward(dy, [q.into(), k.into(), v.into()], o, saved, sequences, options, layout)
}

const BACKWARD: &str = "attention_fp8_backward";

fn backward(
    dy: &Fp8Tensor,
    inputs: [Heads<'_, Fp8Tensor>; 3],
    o: &Tensor,
    saved: &AttentionSaved,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
    layout: GradLayout,
) -> Result<AttentionGrads> {
    let op = BACKWARD;
    let codes = Checked::new(op, inputs, sequences, options)?;
    let forward = codes.call(sequences);
    let q = forward.q.tensor();
    expect_one_factor(op, dy)?;
    o.expect_float(op, "o")?;
    for (pair, shape, device) in [("q and dy", dy.shape(), dy.device()), ("q and o", o.shape(), o.device())] {
        q.device().expect_same(op, device)?;
        expect_same_shape(op, pair, forward.q.shape(), shape)?;
    }
    saved.check(op, q.device(), &codes.problem)?;
    layout.check(op, &codes.problem)?;
    let dy = dy.rowwise_only(op)?;
    let call = BackwardCall { forward, dy: &dy, o, saved, layout };
    dispatch!(q.device(), attention_fp8::attention_fp8_backward(&call))
}

/// Arguments that have been checked.
struct Checked<'a> {
    /// q, k and v, with rowwise codes. Heads of one tensor share them.
    tensors: [Fp8Tensor; 3],
    heads: [Heads<'a, Fp8Tensor>; 3],
    problem: Problem<'a>,
}

impl<'a> Checked<'a> {
    fn new(
        op: &'static str,
        heads: [Heads<'a, Fp8Tensor>; 3],
        sequences: &Sequences,
        options: ScoreOptions<'a>,
    ) -> Result<Self> {
        for (name, x) in ["q", "k", "v"].into_iter().zip(heads.map(|heads| heads.tensor())) {
            if x.encoding() != Encoding::E4M3 {
                let value = format!("{} of {name}", x.encoding());
                let remedy =
                    "q, k and v are quantized to E4M3: use a format whose forward pass has it".to_owned();
                return Err(Error::Option { op, option: "encoding", value, remedy });
            }
            expect_one_factor(op, x)?;
        }
        let [q, k, v] = heads.map(|heads| heads.tensor());
        q.device().expect_same(op, k.device())?;
        q.device().expect_same(op, v.device())?;
        dims4(op, heads[0].shape())?;
        let problem = problem(op, heads, q.device(), sequences, options)?;
        let rowwise = |x: &Fp8Tensor| x.rowwise_only(op);
        let q_codes = rowwise(q)?;
        let again = |x: &Fp8Tensor| if std::ptr::eq(x, q) { Ok(q_codes.clone()) } else { rowwise(x) };
        let k_codes = again(k)?;
        let v_codes = if std::ptr::eq(v, k) { k_codes.clone() } else { again(v)? };
        Ok(Self { tensors: [q_codes, k_codes, v_codes], heads, problem })
    }

    fn call(&'a self, sequences: &'a Sequences) -> Call<'a, Fp8Tensor> {
        let ([q, k, v], [of_q, of_k, of_v]) = (&self.tensors, self.heads);
        Call { q: of_q.of(q), k: of_k.of(k), v: of_v.of(v), sequences, problem: self.problem }
    }
}

fn expect_one_factor(op: &'static str, x: &Fp8Tensor) -> Result<()> {
    match x.blocks() {
        None => Ok(()),
        Some(blocks) => {
            let remedy =
                "expected one factor for the tensor: quantize it with delayed or current scaling".to_owned();
            Err(Error::Option { op, option: "blocks", value: blocks.to_string(), remedy })
        }
    }
}

impl Fp8Tensor {
    /// The tensor with rowwise codes in its shape and no others.
    fn rowwise_only(&self, op: &'static str) -> Result<Self> {
        let layout = self.rowwise_layout(op)?;
        let shape: Shape = *self.shape();
        let codes = layout.codes.reshape(shape)?;
        Ok(Self::from_parts(shape, codes, None, self.encoding(), layout.scale_inv))
    }
}
