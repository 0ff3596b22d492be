//! A range of a tensor along its first dimension.

use crate::backend::dispatch;
use crate::{Error, Result, Shape, Tensor};
use std::ops::Range;

/// Returns `x[range]`, a range along the first dimension: `[n, ..]` → `[range.len(), ..]`, such as some sequences of a batch.
///
/// The elements, of any dtype, are copied. [`split`](super::split()) does this along the last dimension.
///
/// # Errors
/// A range that does not lie in the first dimension; a scalar, which has no dimension.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 6], [3, 2], &Device::cpu())?;
/// let y = ops::rows(&x, 1..3)?;
/// assert_eq!((y.shape().to_string(), y.to_vec::<i32>()?), ("[2, 2]".to_owned(), vec![3, 4, 5, 6]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn rows(x: &Tensor, range: Range<usize>) -> Result<Tensor> {
    let n = x.shape().first().copied();
    let fits = n.is_some_and(|n| range.start <= range.end && range.end <= n);
    let mut dims = x.shape().to_vec();
    let shape = dims.first_mut().filter(|_| fits).map(|first| *first = range.len());
    match shape.and_then(|()| Shape::from_slice(&dims)) {
        Some(shape) => dispatch!(x.device(), rows::rows(x, range.start, shape)),
        None => {
            let remedy = match n {
                Some(n) => format!("rows {}..{}: expected a range in 0..{n}", range.start, range.end),
                None => "expected at least one dimension".to_owned(),
            };
            Err(Error::Shape { op: "rows", shape: *x.shape(), remedy })
        }
    }
}
