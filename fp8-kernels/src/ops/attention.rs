//! Attention: `o = softmax(softmax_scale · q·kᵀ + mask) · v` for each batch and head, in blocks.
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | q, o, dy, dq | `[batch, queries, heads, head_dim]` | f32, bf16 or f16, one for all |
//! | k, v, dk, dv | `[batch, keys, groups, head_dim]` | the same |
//! | key_lengths | `[batch]` | i32 |
//!
//! Query head i reads group `i / (heads / groups)`. Scores, softmax and sums are f32; each result is rounded once.
//! Scores exist one block at a time, in forward and in backward, which computes them again from two numbers a row:
//! memory grows linearly with the sequence. A row that sees no key gives 0 and sends no gradient.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Options of [`attention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions {
    /// Query i sees keys 0 ..= i: the diagonal starts at the top left, also where there are more keys than queries.
    pub causal: bool,
    /// What scores are multiplied by; `None` is 1/√head_dim.
    pub softmax_scale: Option<f32>,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        Self { causal: true, softmax_scale: None }
    }
}

/// What [`attention_backward`] needs beyond inputs and output: the two numbers that make scores probabilities again,
/// `p = exp(score − row_max) / row_sum`. They are kept apart because their one logarithm would lose the digits of the sum
/// where scores are large.
#[derive(Debug, Clone)]
pub struct AttentionSaved {
    /// The largest scaled score of each row, f32 `[batch, heads, queries]`; −∞ for a row that sees no key.
    pub row_max: Tensor,
    /// `Σ exp(score − row_max)`, f32 `[batch, heads, queries]`; 0 for a row that sees no key.
    pub row_sum: Tensor,
}

/// One checked call.
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
    /// How many keys `query` sees where `length` are not padding.
    pub(crate) fn seen(&self, query: usize, length: usize) -> usize {
        if self.causal { length.min(query + 1) } else { length }
    }
}

/// `o`, and what backward needs. Keys from `key_lengths` on are padding: no query of that batch entry sees them. A NaN or an
/// infinity in a key or value that is hidden from a query may reach its output all the same, as 0 · NaN: keep padding finite.
///
/// # Errors
/// Shapes other than the module's table, heads that groups do not divide, a head_dim of 0, different dtypes, a key length
/// outside 0 ..= keys, a softmax scale that is not finite.
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

/// `(dq, dk, dv)`. A group's gradients add its query heads in their order.
///
/// # Errors
/// As [`attention`]; dy or o of another shape or type than q, a saved state of another call.
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
