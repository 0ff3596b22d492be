//! The dimensions of a tensor in another order.

use crate::backend::dispatch;
use crate::{Error, Result, Shape, Tensor};

/// The order in which a result takes its elements: its extents, and the stride of the source along each of its dimensions.
/// Dimensions that stay together are one. The first ones may be filled up with extents of 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub(crate) dims: [usize; Shape::MAX_RANK],
    pub(crate) strides: [usize; Shape::MAX_RANK],
}

/// Returns the elements with the dimensions in another order: dimension i of the result is dimension `axes[i]` of `x`.
///
/// The elements, of any dtype, are copied, unless none of them moves: then the result shares the storage of `x`.
///
/// # Errors
/// Axes that do not name each dimension once.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// // [batch, seq, heads] to [heads, batch, seq]
/// let x = Tensor::from_vec((0..12).collect::<Vec<i32>>(), [2, 3, 2], &Device::cpu())?;
/// let y = ops::permute(&x, &[2, 0, 1])?;
/// assert_eq!(y.shape().to_string(), "[2, 2, 3]");
/// assert_eq!(y.to_vec::<i32>()?, [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn permute(x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    let rank = x.shape().len();
    let dims: Vec<usize> = axes.iter().filter_map(|&axis| x.shape().get(axis).copied()).collect();
    let is_order = axes.len() == rank && (0..rank).all(|axis| axes.contains(&axis));
    let Some(shape) = Shape::from_slice(&dims).filter(|_| is_order) else {
        let remedy = format!("axes {axes:?}: expected each of 0..{rank} once");
        return Err(Error::Shape { op: "permute", shape: *x.shape(), remedy });
    };
    if x.numel() == 0 {
        return x.reshape(shape);
    }
    let mut groups: Vec<(usize, usize)> = Vec::new();
    for &axis in axes {
        let (dim, stride) = (x.shape()[axis], x.shape()[axis + 1..].iter().product::<usize>());
        match groups.last_mut() {
            _ if dim == 1 => {}
            // One step here is a walk over all of the next dimension: they are one.
            Some((outer, apart)) if *apart == dim * stride => (*outer, *apart) = (*outer * dim, stride),
            _ => groups.push((dim, stride)),
        }
    }
    match groups[..] {
        [] | [_] => x.reshape(shape),
        [(cols, 1), (rows, _)] => {
            let x = x.reshape([rows, cols])?;
            super::transpose(&x)?.reshape(shape)
        }
        _ => {
            let mut order = Order { dims: [1; Shape::MAX_RANK], strides: [0; Shape::MAX_RANK] };
            let first = Shape::MAX_RANK - groups.len();
            for (place, (dim, stride)) in (first..).zip(groups) {
                (order.dims[place], order.strides[place]) = (dim, stride);
            }
            dispatch!(x.device(), permute::permute(x, &order, shape))
        }
    }
}
