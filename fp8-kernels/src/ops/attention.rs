//! Attention in blocks: scores are never stored as a whole.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Options of [`attention`](attention()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions {
    /// Whether query i sees keys 0 ..= i only. The diagonal starts at the top left, even if there are more keys than
    /// queries. Default: true.
    pub causal: bool,
    /// The factor for scores; `None` means 1/√head_dim. Default: `None`.
    pub softmax_scale: Option<f32>,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        Self { causal: true, softmax_scale: None }
    }
}

/// What [`attention_backward`] needs besides the inputs and the output of [`attention`](attention()).
///
/// Two numbers per row turn scores back into probabilities: `p = exp(score − row_max) / row_sum`. They are not combined into
/// one log-sum-exp, which would lose digits of the sum if scores are large.
#[derive(Debug, Clone)]
pub struct AttentionSaved {
    /// The largest scaled score of each row, f32 `[batch, heads, queries]`; −∞ for a row that sees no key.
    pub row_max: Tensor,
    /// `Σ exp(score − row_max)`, f32 `[batch, heads, queries]`; 0 for a row that sees no key.
    pub row_sum: Tensor,
}

/// The arguments of a call after they have been checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) head_dim: usize,
    pub(crate) causal: bool,
    pub(crate) scale: f32,
}

impl Problem {
    /// Returns how many keys `query` sees if only the first `length` are not padding.
    pub(crate) fn seen(&self, query: usize, length: usize) -> usize {
        if self.causal { length.min(query + 1) } else { length }
    }
}

/// Computes scaled dot-product attention, `o = softmax(softmax_scale · q·kᵀ + mask) · v`, for each batch entry and head.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q`, `o` | `[batch, queries, heads, head_dim]` | f32, bf16 or f16, the same for all |
/// | `k`, `v` | `[batch, keys, groups, head_dim]` | the same |
/// | `key_lengths` | `[batch]` | i32 |
///
/// `groups` divides `heads`: query head i uses key and value head `i / (heads / groups)` (grouped-query attention). Batch
/// entry b sees its first `key_lengths[b]` keys; the others are padding. A row that sees no key gives 0 and has no gradient.
/// Hidden keys and values are multiplied by 0, so an infinity or NaN in them can still reach the output: fill padding with
/// finite numbers.
///
/// Scores, softmax and sums are f32, and the result is rounded once. Scores are computed in blocks and never stored as a
/// whole, so memory grows linearly with the sequence length. Returns `o` and what [`attention_backward`] needs.
///
/// # Errors
/// Shapes other than these; heads that are not a multiple of groups; a head_dim of 0; different dtypes; a softmax scale that
/// is not finite; a key length outside 0 ..= keys, which a GPU reports at the next call that waits for it.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 3.0], [1, 2, 1, 1], &Device::cpu())?;
/// let options = ops::AttentionOptions { causal: true, softmax_scale: Some(0.0) };
/// let (o, _) = ops::attention(&x, &x, &x, None, options)?;
/// assert_eq!(o.to_vec::<f32>()?, [1.0, 2.0]); // the second query sees both keys, each with 1/2
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    key_lengths: Option<&Tensor>,
    options: AttentionOptions,
) -> Result<(Tensor, AttentionSaved)> {
    let problem = check("attention", q, k, v, key_lengths, options)?;
    dispatch!(q.device(), attention::attention(q, k, v, key_lengths, &problem))
}

/// Returns `(dq, dk, dv)`, the gradients of [`attention`](attention())'s inputs, given `dy`, the gradient of its output `o`.
///
/// Pass the inputs, options and results of the forward call. Scores are computed again, block by block. Each gradient has
/// the shape and dtype of its tensor; those of a key and value head sum over its query heads, in their order.
///
/// # Errors
/// Those of [`attention`](attention()); a `dy` or `o` whose shape or dtype is not that of `q`; a `saved` of another call.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let of = |value| Tensor::from_vec(vec![value], [1, 1, 1, 1], &Device::cpu());
/// let (q, k, v, dy) = (of(1.0f32)?, of(2.0)?, of(5.0)?, of(3.0)?);
/// let options = ops::AttentionOptions::default();
/// let (o, saved) = ops::attention(&q, &k, &v, None, options)?;
/// let (dq, dk, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, None, options)?;
/// // The only key has probability 1, whatever its score: o = v.
/// assert_eq!((o.to_f32_vec()?, dv.to_f32_vec()?), (vec![5.0], vec![3.0]));
/// assert_eq!((dq.to_f32_vec()?, dk.to_f32_vec()?), (vec![0.0], vec![0.0]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[expect(clippy::too_many_arguments, reason = "the tensors of the forward call, its results, and dy")]
pub fn attention_backward(
    dy: &Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &Tensor,
    saved: &AttentionSaved,
    key_lengths: Option<&Tensor>,
    options: AttentionOptions,
) -> Result<(Tensor, Tensor, Tensor)> {
    let op = "attention_backward";
    let problem = check(op, q, k, v, key_lengths, options)?;
    for (what, pair, tensor) in [("dy", "q and dy", dy), ("o", "q and o", o)] {
        tensor.expect_dtype(op, what, q.dtype())?;
        q.device().expect_same(op, tensor.device())?;
        q.expect_same_shape(op, pair, tensor)?;
    }
    let rows = Shape::from([problem.batch, problem.heads, problem.queries]);
    for (what, tensor) in [("row_max", &saved.row_max), ("row_sum", &saved.row_sum)] {
        tensor.expect_dtype(op, what, DType::F32)?;
        q.device().expect_same(op, tensor.device())?;
        if *tensor.shape() != rows {
            let (lhs, rhs, what) = (*tensor.shape(), rows, "the saved rows and [batch, heads, queries]");
            return Err(Error::Shapes { op, what, lhs, rhs, remedy: "pass what attention returned with o" });
        }
    }
    dispatch!(q.device(), attention::attention_backward([dy, q, k, v, o], saved, key_lengths, &problem))
}

fn check(
    op: &'static str,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    key_lengths: Option<&Tensor>,
    options: AttentionOptions,
) -> Result<Problem> {
    q.expect_float(op, "q")?;
    k.expect_dtype(op, "k", q.dtype())?;
    v.expect_dtype(op, "v", q.dtype())?;
    q.device().expect_same(op, k.device())?;
    q.device().expect_same(op, v.device())?;
    k.expect_same_shape(op, "k and v", v)?;
    let [batch, queries, heads, head_dim] = dims4(op, q)?;
    let [k_batch, keys, groups, k_head_dim] = dims4(op, k)?;
    let (lhs, rhs, what) = (*q.shape(), *k.shape(), "q and k");
    if (batch, head_dim) != (k_batch, k_head_dim) {
        let remedy = "both need the same batch and head_dim, [batch, sequence, heads, head_dim]";
        return Err(Error::Shapes { op, what, lhs, rhs, remedy });
    }
    if groups == 0 || !heads.is_multiple_of(groups) {
        let remedy = "the number of groups (k's third dimension) must divide the number of heads (q's)";
        return Err(Error::Shapes { op, what, lhs, rhs, remedy });
    }
    if head_dim == 0 {
        return Err(Error::Shape { op, shape: lhs, remedy: "head_dim must be at least 1".to_owned() });
    }
    if let Some(lengths) = key_lengths {
        lengths.expect_dtype(op, "key_lengths", DType::I32)?;
        q.device().expect_same(op, lengths.device())?;
        if **lengths.shape() != [batch] {
            let (lhs, rhs) = (*lengths.shape(), Shape::from([batch]));
            let what = "key_lengths and the batch";
            return Err(Error::Shapes { op, what, lhs, rhs, remedy: "give one length per batch entry" });
        }
    }
    let scale = options.softmax_scale.unwrap_or((1.0 / (head_dim as f64).sqrt()) as f32);
    if !scale.is_finite() {
        let remedy = "give a finite number, or None for 1/sqrt(head_dim)".to_owned();
        return Err(Error::Option { op, option: "softmax_scale", value: scale.to_string(), remedy });
    }
    Ok(Problem { batch, queries, keys, heads, groups, head_dim, causal: options.causal, scale })
}

fn dims4(op: &'static str, x: &Tensor) -> Result<[usize; 4]> {
    <[usize; 4]>::try_from(&**x.shape()).map_err(|_| Error::Shape {
        op,
        shape: *x.shape(),
        remedy: "expected [batch, sequence, heads, head_dim]".to_owned(),
    })
}
