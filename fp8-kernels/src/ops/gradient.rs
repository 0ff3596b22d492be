//! A gradient that an operation writes or adds to, instead of returning one for `accumulate`.

use super::Update;
use crate::{DType, Device, Error, Result, Shape, Tensor};

/// A gradient that an operation fills in place: a main gradient, f32 `[cols]`, which the operation adds to or overwrites.
///
/// A gradient that the operation returned instead would have to be written to memory, read again and added by
/// [`accumulate`](super::accumulate()), which is one more launch on a GPU. The bits are the same.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// let mut dbias = Tensor::full(0.5, [2], DType::F32, &Device::cpu())?;
/// ops::column_sums_into(&x, &mut ops::GradientMut::new(&mut dbias, "fc1.bias", ops::Update::Add))?;
/// assert_eq!(dbias.to_vec::<f32>()?, [4.5, 6.5]);
/// ops::column_sums_into(&x, &mut ops::GradientMut::new(&mut dbias, "fc1.bias", ops::Update::Write))?;
/// assert_eq!(dbias.to_vec::<f32>()?, [4.0, 6.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientMut<'a> {
    pub(crate) tensor: &'a mut Tensor,
    pub(crate) name: &'a str,
    pub(crate) update: Update,
}

impl<'a> GradientMut<'a> {
    /// The gradient in `tensor`, which is added to, or overwritten whatever it holds. `name` identifies it in errors.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, Tensor, ops};
    /// let mut main_grad = Tensor::zeros([2], DType::F32, &Device::cpu())?;
    /// let first = ops::GradientMut::new(&mut main_grad, "norm.weight", ops::Update::Write);
    /// # let _ = first;
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn new(tensor: &'a mut Tensor, name: &'a str, update: Update) -> Self {
        Self { tensor, name, update }
    }

    /// Checks that it can take the sums of `cols` columns that are on `device`.
    pub(crate) fn expect(
        &self,
        op: &'static str,
        what: &'static str,
        cols: usize,
        device: &Device,
    ) -> Result<()> {
        self.tensor.expect_dtype(op, what, DType::F32)?;
        device.expect_same(op, self.tensor.device())?;
        let (lhs, rhs) = (*self.tensor.shape(), Shape::from([cols]));
        if lhs == rhs {
            return Ok(());
        }
        Err(Error::Shapes { op, what, lhs, rhs, remedy: "a gradient has one element per column" })
    }
}
