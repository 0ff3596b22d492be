//! Softmax over the last dimension: `yᵢ = exp(scale·xᵢ − m) / Σⱼ exp(scale·xⱼ − m)`, m the row's largest `scale·x`.
//!
//! `x` is `[.., q, k]`, f32, bf16 or f16; computed in f32, rounded once to the type of `x`. Masked scores, and scores of
//! −∞, count as −∞: their probability is 0, and a row of nothing else is 0 throughout. NaN makes its row NaN.
//! `dxᵢ = scale · yᵢ · (dyᵢ − Σⱼ yⱼ·dyⱼ)`.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Tensor};

/// Probabilities of `scale · x`. `causal` masks keys behind the query (column > row, the diagonal at the top left).
/// `mask` holds bytes, 1 = masked out; its dimensions are those of `x`, or 1 where it is the same all along one, as in
/// `[batch, 1, 1, k]`.
///
/// # Errors
/// Fewer than two dimensions, a dtype that is not a float, a mask of another type than u8 or that does not broadcast.
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

/// The gradient of [`softmax`]'s input, in the type of `y`. Masks need not be given again: `y` is 0 there.
///
/// # Errors
/// Two shapes, a dtype that is not a float.
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
