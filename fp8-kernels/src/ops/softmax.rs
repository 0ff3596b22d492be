//! Softmax over the last dimension, with masks, and its gradient.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Tensor};

/// Returns the softmax of `scale · x` over the last dimension: `yᵢ = exp(scale·xᵢ − m) / Σⱼ exp(scale·xⱼ − m)`, where m is the
/// row's largest `scale·x`.
///
/// `x` is `[.., q, k]` in f32, bf16 or f16; computed in f32 and rounded once to the dtype of `x`. Use it to turn logits into
/// probabilities, and to write an attention that [`attention`](super::attention()) does not cover.
///
/// `causal` masks the keys after the query: column > row, with the diagonal at the top left. `mask` is u8 and 1 where a
/// score is masked out; each of its dimensions is that of `x` or 1, as in `[batch, 1, 1, k]`. Masked scores and scores of −∞
/// get probability 0, and a row without any other score is all 0. A NaN makes its row NaN.
///
/// # Errors
/// Fewer than two dimensions; a dtype that is not a float; a mask that is not u8 or does not broadcast to `x`.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 9.0, 2.0, 2.0], [2, 2], &Device::cpu())?;
/// assert_eq!(ops::softmax(&x, 0.5, true, None)?.to_vec::<f32>()?, [1.0, 0.0, 0.5, 0.5]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn softmax(x: &Tensor, scale: f32, causal: bool, mask: Option<&Tensor>) -> Result<Tensor> {
    let op = "softmax";
    x.expect_float(op, "x")?;
    if x.shape().len() < 2 {
        let remedy = "scores are [.., queries, keys]; reshape a single row to [1, keys]".to_owned();
        return Err(Error::Shape { op, shape: *x.shape(), remedy });
    }
    if let Some(mask) = mask {
        check_mask(op, x, mask)?;
    }
    dispatch!(x.device(), softmax::softmax(x, scale, causal, mask))
}

/// Returns the gradient of [`softmax`](softmax())'s input: `dxᵢ = scale · yᵢ · (dyᵢ − Σⱼ yⱼ·dyⱼ)`.
///
/// `y` is the output of the forward call, and `dy` its gradient, of the same shape; the result has `y`'s dtype. Masks are
/// not needed again, since `y` is 0 where a score was masked.
///
/// # Errors
/// Different shapes; a dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let y = Tensor::from_vec(vec![0.5f32, 0.5], [1, 2], &Device::cpu())?;
/// let dy = Tensor::from_vec(vec![1.0f32, 0.0], [1, 2], &Device::cpu())?;
/// assert_eq!(ops::softmax_backward(&dy, &y, 1.0)?.to_vec::<f32>()?, [0.25, -0.25]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn softmax_backward(dy: &Tensor, y: &Tensor, scale: f32) -> Result<Tensor> {
    let op = "softmax_backward";
    dy.expect_float(op, "dy")?;
    y.expect_float(op, "y")?;
    y.device().expect_same(op, dy.device())?;
    y.expect_same_shape(op, "y and dy", dy)?;
    dispatch!(y.device(), softmax::softmax_backward(dy, y, scale))
}

fn check_mask(op: &'static str, x: &Tensor, mask: &Tensor) -> Result<()> {
    mask.expect_dtype(op, "mask", DType::U8)?;
    x.device().expect_same(op, mask.device())?;
    let (lhs, rhs) = (*x.shape(), *mask.shape());
    if lhs.len() == rhs.len() && lhs.iter().zip(&*rhs).all(|(x, mask)| mask == x || *mask == 1) {
        return Ok(());
    }
    let remedy = "a mask has as many dimensions as x, each equal to x's or 1";
    Err(Error::Shapes { op, what: "x and mask", lhs, rhs, remedy })
}
