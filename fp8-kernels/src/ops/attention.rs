//! Attention in blocks: scores are never stored as a whole.

use super::{AttentionGrads, Diagonal, Dropout, GradLayout, Heads, Part, Problem, Sequences};
use crate::backend::dispatch;
use crate::{DType, Device, Error, Fp8Tensor, Result, Shape, Tensor};

/// Options of [`attention`](attention()): which keys of its sequence a query sees, and the scale.
///
/// Query i of a sequence stands at the key c = i, or, where the diagonal ends at the bottom right, c = i + keys − queries. It
/// sees the keys from c − left to c + right.
///
/// ```
/// use fp8_kernels::ops::{ScoreOptions, Diagonal};
///
/// // Four queries behind a cache of other keys, each of which sees itself and the 127 keys before it.
/// let options = ScoreOptions {
///     window: (Some(127), None),
///     diagonal: Diagonal::BottomRight,
///     ..Default::default()
/// };
/// assert!(options.causal); // so the window's right end is 0
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreOptions<'a> {
    /// Whether a query sees no key to the right of its own. Default: true.
    pub causal: bool,
    /// The number of keys that a query sees to the left and to the right of its own (a sliding window). Default:
    /// `(None, None)`, all.
    pub window: (Option<usize>, Option<usize>),
    /// The position of the diagonal that `causal` and `window` use. It matters only if the numbers of queries and keys differ.
    /// Default: [`Diagonal::TopLeft`].
    pub diagonal: Diagonal,
    /// The factor for scores; `None` means 1/√head_dim. Default: `None`.
    pub softmax_scale: Option<f32>,
    /// Dropout of the probabilities, after they were normalized. Element i of its mask is that of the probabilities
    /// `[batch, heads, queries, keys]`, in row-major order. Backward needs the same. Default: `None`.
    pub dropout: Option<&'a Dropout>,
    /// The place of q's heads among all heads of the layer, where this call has a part of them. The mask of `dropout` is that of
    /// all, so each head drops what it would drop in a call with all of them. Default: `None`, these are all.
    pub dropout_heads: Option<Part>,
    /// Whether the backward pass gives the same bits each time. If true, cuDNN computes it only where it sums the gradient of q
    /// in a fixed order: on compute capability 9.0 with version 9.25 or newer, and on 10.0 and 10.3. Elsewhere this crate's
    /// kernels do, which always use a fixed order. If false, cuDNN 9.19 or newer may sum in any order; two runs of the same
    /// training then differ. It changes nothing on the CPU or without cuDNN. Default: true.
    pub deterministic: bool,
}

impl Default for ScoreOptions<'_> {
    fn default() -> Self {
        Self {
            causal: true,
            window: (None, None),
            diagonal: Diagonal::TopLeft,
            softmax_scale: None,
            dropout: None,
            dropout_heads: None,
            deterministic: true,
        }
    }
}

/// The numbers that [`attention_backward`] needs besides the inputs and the output of [`attention`](attention()).
///
/// Two numbers per row turn scores back into probabilities: `p = exp(score − row_max) / row_sum`. The operations here do not combine
/// them into one log-sum-exp, which would lose digits of the sum if scores are large. Other libraries do, and so does cuDNN where it
/// computed the output: what they return is taken by [`from_log_sum_exp`](Self::from_log_sum_exp).
#[derive(Debug, Clone)]
pub struct AttentionSaved {
    /// The largest scaled score of each row, f32 `[batch, heads, queries]`; −∞ for a row that sees no key. Without `row_sum`,
    /// the logarithm of `Σ exp(score)`.
    pub row_max: Tensor,
    /// `Σ exp(score − row_max)`, f32 `[batch, heads, queries]`; 0 for a row that sees no key. `None` if each is 1.
    pub row_sum: Option<Tensor>,
}

impl AttentionSaved {
    /// Returns the rows of an attention that kept `log Σ exp(score)`, f32 `[batch, heads, queries]`, of its scaled scores; −∞
    /// for a row that sees no key.
    ///
    /// ```
    /// use fp8_kernels::ops::{self, AttentionSaved, ScoreOptions, Sequences};
    /// use fp8_kernels::{Device, Tensor};
    ///
    /// let x = Tensor::from_vec(vec![0.0f32, 0.0], [1, 2, 1, 1], &Device::cpu())?;
    /// let v = Tensor::from_vec(vec![1.0f32, 3.0], [1, 2, 1, 1], &Device::cpu())?;
    /// let (sequences, options) = (Sequences::Full, ScoreOptions::default());
    /// let (o, _) = ops::attention(&x, &x, &v, &sequences, options)?;
    /// // All scores are 0: the first row sees one, the second row two.
    /// let log_sum_exp = Tensor::from_vec(vec![0.0, 2f32.ln()], [1, 1, 2], &Device::cpu())?;
    /// let saved = AttentionSaved::from_log_sum_exp(log_sum_exp);
    /// let (_, _, dv) = ops::attention_backward(&v, &x, &x, &v, &o, &saved, &sequences, options)?;
    /// assert_eq!(dv.to_vec::<f32>()?, [2.5, 1.5]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub const fn from_log_sum_exp(log_sum_exp: Tensor) -> Self {
        Self { row_max: log_sum_exp, row_sum: None }
    }

    /// Returns `log Σ exp(score)` of each row, f32 `[batch, heads, queries]`; −∞ for a row that sees no key.
    ///
    /// # Errors
    /// Tensors of other shapes, dtypes or devices than attention returns.
    ///
    /// ```
    /// use fp8_kernels::ops::{self, ScoreOptions, Sequences};
    /// use fp8_kernels::{Device, Tensor};
    ///
    /// let x = Tensor::from_vec(vec![0.0f32, 0.0], [1, 2, 1, 1], &Device::cpu())?;
    /// let (_, saved) = ops::attention(&x, &x, &x, &Sequences::Full, ScoreOptions::default())?;
    /// assert_eq!(saved.log_sum_exp()?.to_vec::<f32>()?, [0.0, 2f32.ln()]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn log_sum_exp(&self) -> Result<Tensor> {
        let op = "log_sum_exp";
        let Some(row_sum) = &self.row_sum else { return Ok(self.row_max.clone()) };
        self.row_max.expect_dtype(op, "row_max", DType::F32)?;
        row_sum.expect_dtype(op, "row_sum", DType::F32)?;
        self.row_max.device().expect_same(op, row_sum.device())?;
        self.row_max.expect_same_shape(op, "row_max and row_sum", row_sum)?;
        dispatch!(row_sum.device(), attention::log_sum_exp(&self.row_max, row_sum))
    }

    /// Returns an error for rows of another call.
    pub(super) fn check(&self, op: &'static str, device: &Device, problem: &Problem<'_>) -> Result<()> {
        let rows = Shape::from([problem.batch, problem.heads, problem.queries]);
        for (what, tensor) in [("row_max", Some(&self.row_max)), ("row_sum", self.row_sum.as_ref())] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(op, what, DType::F32)?;
            device.expect_same(op, tensor.device())?;
            if *tensor.shape() != rows {
                let (lhs, rhs, what) = (*tensor.shape(), rows, "the saved rows and [batch, heads, queries]");
                return Err(Error::Shapes {
                    op,
                    what,
                    lhs,
                    rhs,
                    remedy: "pass what attention returned with o",
                });
            }
        }
        Ok(())
    }
}

/// A call after its arguments have been checked: the tensors and where their heads are, what the sequences are, and the sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a, T = Tensor> {
    pub(crate) q: Heads<'a, T>,
    /// Has the pitch of `v`.
    pub(crate) k: Heads<'a, T>,
    pub(crate) v: Heads<'a, T>,
    pub(crate) sequences: &'a Sequences,
    pub(crate) problem: Problem<'a>,
}

impl Call<'_, Fp8Tensor> {
    /// Returns the values of q's, k's and v's codes, which are one tensor where the heads are in one.
    pub(crate) fn values(&self) -> Result<[Tensor; 3]> {
        let [q, k, v] = [self.q, self.k, self.v].map(|heads| heads.tensor());
        let number = |x: &Fp8Tensor| [x.stored_codes(), x.scale_inv()].map(Tensor::storage_number);
        let is_one = |x: &Fp8Tensor, y: &Fp8Tensor| number(x) == number(y) && x.shape() == y.shape();
        let of_q = q.dequantize(DType::F32)?;
        let of_k = if is_one(k, q) { of_q.clone() } else { k.dequantize(DType::F32)? };
        let of_v = if is_one(v, k) { of_k.clone() } else { v.dequantize(DType::F32)? };
        Ok([of_q, of_k, of_v])
    }

    /// Returns the call with these tensors in place of its own.
    pub(crate) fn of<'a>(&'a self, [q, k, v]: &'a [Tensor; 3]) -> Call<'a> {
        let Self { sequences, problem, .. } = *self;
        Call { q: self.q.of(q), k: self.k.of(k), v: self.v.of(v), sequences, problem }
    }
}

/// A backward call after its arguments have been checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackwardCall<'a, T = Tensor> {
    pub(crate) forward: Call<'a, T>,
    pub(crate) dy: &'a T,
    pub(crate) o: &'a Tensor,
    pub(crate) saved: &'a AttentionSaved,
    pub(crate) layout: GradLayout,
}

/// Computes scaled dot-product attention, `o = softmax(softmax_scale · q·kᵀ + mask) · v`, for each batch entry and head.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q`, `o` | `[batch, queries, heads, head_dim]` | f32, bf16 or f16, the same for all |
/// | `k`, `v` | `[batch, keys, groups, head_dim]` | the same |
///
/// Each of `q`, `k` and `v` may be [`Heads`] of a larger tensor, such as the output of one projection of all three: they are
/// read where they are. Keys and values then have the same distance from token to token.
///
/// `groups` divides `heads`: query head i uses key and value head `i / (heads / groups)` (grouped-query attention). `sequences`
/// says which queries and keys are real and belong together, `options` which of those a query sees. A query that sees no key
/// gives 0 and has no gradient. Hidden keys and values are multiplied by 0, so an infinity or NaN in them can still reach the output: fill padding with
/// finite numbers.
///
/// With `options.dropout`, each probability is 0 with the probability p, and divided by 1 − p otherwise, before it is multiplied
/// by its value. `options.dropout_heads` is for a call with a part of a layer's heads.
///
/// Scores, softmax and sums are f32, and the result is rounded once; cuDNN also rounds the probabilities to the dtype before they
/// are multiplied by the values. Scores are computed in blocks and never stored as a whole, so memory grows linearly with the
/// sequence length. Returns `o` and what [`attention_backward`] needs.
///
/// # Errors
/// Shapes other than these; heads that are not a multiple of groups; a head_dim of 0; different dtypes; keys and values in
/// tensors with different numbers of features; a softmax scale that
/// is not finite; a length outside 0 ..= queries or keys, which a GPU reports at the next call that waits for it; a packing of
/// other sizes; dropout with a probability outside `[0, 1)` or a draw on another device; heads that do not end within those of
/// `options.dropout_heads`.
///
/// ```
/// use fp8_kernels::ops::{self, Sequences};
/// use fp8_kernels::{Device, Tensor};
///
/// let x = Tensor::from_vec(vec![1.0f32, 3.0], [1, 2, 1, 1], &Device::cpu())?;
/// let options = ops::ScoreOptions { softmax_scale: Some(0.0), ..Default::default() };
/// let (o, _) = ops::attention(&x, &x, &x, &Sequences::Full, options)?;
/// assert_eq!(o.to_vec::<f32>()?, [1.0, 2.0]); // the second query sees both keys, each with 1/2
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn attention<'a>(
    q: impl Into<Heads<'a>>,
    k: impl Into<Heads<'a>>,
    v: impl Into<Heads<'a>>,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
) -> Result<(Tensor, AttentionSaved)> {
    let call = check("attention", [q.into(), k.into(), v.into()], sequences, options)?;
    dispatch!(call.q.tensor().device(), attention::attention(&call))
}

/// Returns `(dq, dk, dv)`, the gradients of [`attention`](attention())'s inputs, given `dy`, the gradient of its output `o`.
///
/// Pass the inputs, options and results of the forward call. Scores are computed again, block by block. Each gradient has
/// the shape and dtype of its tensor; those of a key and value head sum over its query heads, in their order. cuDNN rounds the part
/// of each query head before they are summed.
///
/// # Errors
/// Those of [`attention`](attention()); a `dy` or `o` whose shape or dtype is not that of `q`; a `saved` of another call.
///
/// ```
/// use fp8_kernels::ops::{self, Sequences};
/// use fp8_kernels::{Device, Tensor};
///
/// let of = |value| Tensor::from_vec(vec![value], [1, 1, 1, 1], &Device::cpu());
/// let (q, k, v, dy) = (of(1.0f32)?, of(2.0)?, of(5.0)?, of(3.0)?);
/// let options = ops::ScoreOptions::default();
/// let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, options)?;
/// let (dq, dk, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &Sequences::Full, options)?;
/// // The only key has probability 1, whatever its score: o = v.
/// assert_eq!((o.to_f32_vec()?, dv.to_f32_vec()?), (vec![5.0], vec![3.0]));
/// assert_eq!((dq.to_f32_vec()?, dk.to_f32_vec()?), (vec![0.0], vec![0.0]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[expect(clippy::too_many_arguments, reason = "the tensors of the forward call, its results, and dy")]
pub fn attention_backward<'a>(
    dy: &Tensor,
    q: impl Into<Heads<'a>>,
    k: impl Into<Heads<'a>>,
    v: impl Into<Heads<'a>>,
    o: &Tensor,
    saved: &AttentionSaved,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let op = "attention_backward";
    let inputs = [q.into(), k.into(), v.into()];
    backward(op, dy, inputs, o, saved, sequences, options, GradLayout::Separate)?.separate(op)
}

/// Computes the gradients of [`attention_backward`] and returns them in the tensors that `layout` selects: side by side, as the backward pass of a projection
/// of queries, keys and values takes them. The values are the same in every layout.
///
/// # Errors
/// Those of [`attention_backward`]; gradients in one tensor of different numbers of queries and keys; a tensor that would be too
/// large.
///
/// ```
/// use fp8_kernels::ops::{self, AttentionGrads, GradLayout, Heads, ScoreOptions, Sequences};
/// use fp8_kernels::{Device, Tensor};
///
/// // A query, a key and a value of one element each, side by side.
/// let qkv = Tensor::from_vec(vec![1.0f32, 2.0, 5.0], [1, 1, 3], &Device::cpu())?;
/// let dy = Tensor::from_vec(vec![3.0f32], [1, 1, 1, 1], &Device::cpu())?;
/// let [q, k, v] = Heads::qkv(&qkv, 1, 1, 1)?;
/// let (sequences, options) = (Sequences::Full, ScoreOptions::default());
/// let (o, saved) = ops::attention(q, k, v, &sequences, options)?;
/// let grads = ops::attention_backward_to(&dy, q, k, v, &o, &saved, &sequences, options, GradLayout::Qkv)?;
/// let AttentionGrads::Qkv(dqkv) = grads else { unreachable!("as asked for") };
/// assert_eq!(dqkv.to_vec::<f32>()?, [0.0, 0.0, 3.0]); // the only key has probability 1, whatever its score
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[expect(clippy::too_many_arguments, reason = "the tensors of the forward call, its results, and dy")]
pub fn attention_backward_to<'a>(
    dy: &Tensor,
    q: impl Into<Heads<'a>>,
    k: impl Into<Heads<'a>>,
    v: impl Into<Heads<'a>>,
    o: &Tensor,
    saved: &AttentionSaved,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
    layout: GradLayout,
) -> Result<AttentionGrads> {
    let inputs = [q.into(), k.into(), v.into()];
    backward("attention_backward", dy, inputs, o, saved, sequences, options, layout)
}

#[expect(clippy::too_many_arguments, reason = "the arguments of a public function")]
fn backward(
    op: &'static str,
    dy: &Tensor,
    inputs: [Heads<'_>; 3],
    o: &Tensor,
    saved: &AttentionSaved,
    sequences: &Sequences,
    options: ScoreOptions<'_>,
    layout: GradLayout,
) -> Result<AttentionGrads> {
    let forward = check(op, inputs, sequences, options)?;
    let q = forward.q.tensor();
    for (what, pair, tensor) in [("dy", "q and dy", dy), ("o", "q and o", o)] {
        tensor.expect_dtype(op, what, q.dtype())?;
        q.device().expect_same(op, tensor.device())?;
        expect_same_shape(op, pair, forward.q.shape(), tensor.shape())?;
    }
    saved.check(op, q.device(), &forward.problem)?;
    layout.check(op, &forward.problem)?;
    let call = BackwardCall { forward, dy, o, saved, layout };
    dispatch!(q.device(), attention::attention_backward(&call))
}

fn check<'a>(
    op: &'static str,
    [q, k, v]: [Heads<'a>; 3],
    sequences: &'a Sequences,
    options: ScoreOptions<'a>,
) -> Result<Call<'a>> {
    let [of_q, of_k, of_v] = [q, k, v].map(|heads| heads.tensor());
    of_q.expect_float(op, "q")?;
    of_k.expect_dtype(op, "k", of_q.dtype())?;
    of_v.expect_dtype(op, "v", of_q.dtype())?;
    of_q.device().expect_same(op, of_k.device())?;
    of_q.device().expect_same(op, of_v.device())?;
    let problem = problem(op, [q, k, v], of_q.device(), sequences, options)?;
    Ok(Call { q, k, v, sequences, problem })
}

pub(super) fn expect_same_shape(
    op: &'static str,
    what: &'static str,
    lhs: &Shape,
    rhs: &Shape,
) -> Result<()> {
    if lhs == rhs {
        return Ok(());
    }
    let (lhs, rhs) = (*lhs, *rhs);
    Err(Error::Shapes { op, what, lhs, rhs, remedy: "both must have one shape" })
}

/// Checks the same as [`check`] except dtypes and devices, which differ if the elements are codes.
pub(super) fn problem<'a, T>(
    op: &'static str,
    [q, k, v]: [Heads<'_, T>; 3],
    device: &Device,
    sequences: &Sequences,
    options: ScoreOptions<'a>,
) -> Result<Problem<'a>> {
    expect_same_shape(op, "k and v", k.shape(), v.shape())?;
    let [batch, queries, heads, head_dim] = dims4(op, q.shape())?;
    let [k_batch, keys, groups, k_head_dim] = dims4(op, k.shape())?;
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
    if k.pitch() != v.pitch() {
        let value = format!("{} of keys and {} of values", k.pitch(), v.pitch());
        let remedy = "expected keys and values in tensors with the same number of features".to_owned();
        return Err(Error::Option { op, option: "features", value, remedy });
    }
    sequences.check(op, device, [batch, queries, keys])?;
    let scale = options.softmax_scale.unwrap_or((1.0 / (head_dim as f64).sqrt()) as f32);
    if !scale.is_finite() {
        let remedy = "give a finite number, or None for 1/sqrt(head_dim)".to_owned();
        return Err(Error::Option { op, option: "softmax_scale", value: scale.to_string(), remedy });
    }
    let right = if options.causal { Some(0) } else { options.window.1 };
    let (window, diagonal) = ([options.window.0, right], options.diagonal);
    let dropout = Dropout::checked(options.dropout, op, "dropout.p", device)?;
    let mask_heads = mask_heads(op, options.dropout_heads, [batch, heads, queries, keys])?;
    Ok(Problem {
        batch,
        queries,
        keys,
        heads,
        groups,
        head_dim,
        window,
        diagonal,
        scale,
        rounding: None,
        dropout,
        mask_heads,
        deterministic: options.deterministic,
    })
}

/// Returns the place of a call's heads in those of the mask. Backends count heads in 32 bits, and the mask's elements in 64.
fn mask_heads(
    op: &'static str,
    given: Option<Part>,
    [batch, heads, queries, keys]: [usize; 4],
) -> Result<Part> {
    let Some(part) = given else { return Ok(Part::whole(heads)) };
    part.check(op, "dropout_heads", heads)?;
    let elements = [batch, part.total, queries, keys]
        .iter()
        .try_fold(1u64, |product, &extent| product.checked_mul(extent as u64));
    if i32::try_from(part.total).is_err() || elements.is_none() {
        let remedy = "a mask has fewer than 2^31 heads and 2^64 elements".to_owned();
        let value = part.total.to_string();
        return Err(Error::Option { op, option: "dropout_heads.total", value, remedy });
    }
    Ok(part)
}

pub(super) fn dims4(op: &'static str, shape: &Shape) -> Result<[usize; 4]> {
    <[usize; 4]>::try_from(&**shape).map_err(|_| Error::Shape {
        op,
        shape: *shape,
        remedy: "expected [batch, sequence, heads, head_dim]".to_owned(),
    })
}
