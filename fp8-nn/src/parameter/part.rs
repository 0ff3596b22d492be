//! A parameter of which this rank may have a part: joining the parts of all ranks, and setting one.

use super::Parameter;
use crate::{Placement, Result};
use fp8_kernels::{DType, Tensor};

impl Parameter {
    /// Returns the whole of a tensor of this parameter's shape, such as its gradient, on all ranks. They all call it.
    ///
    /// # Errors
    /// A failure of the group.
    pub(crate) fn joined(&self, what: &str, part: &Tensor) -> Result<Tensor> {
        match (&self.placement, &self.tensor_parallel) {
            (Placement::Cut(cut), Some(ranks)) => {
                let flat = part.reshape([part.numel()])?;
                cut.join(&ranks.group().all_gather(&format!("{what} of {}", self.name), &flat)?)
            }
            _ => Ok(part.clone()),
        }
    }

    /// Returns the value of the whole parameter, of which this rank may have a part. All ranks that share it call this, in the same
    /// order.
    ///
    /// # Errors
    /// A dtype that is not a float; a failure of the group; the device is out of memory or failed.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// let w = Parameter::new("w", Tensor::full(1.0, [2], DType::F32, &Device::cpu())?)?;
    /// assert_eq!(w.gather_values(DType::F32)?.to_f32_vec()?, [1.0, 1.0]); // this rank has all of it
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn gather_values(&self, dtype: DType) -> Result<Tensor> {
        self.joined("value", &self.values(dtype)?)
    }

    /// Returns the gradient of the whole parameter: see [`gather_values`](Self::gather_values).
    ///
    /// # Errors
    /// A gradient that is a part of a sum; a failure of the group; the device is out of memory or failed.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// let w = Parameter::new("w", Tensor::full(1.0, [2], DType::F32, &Device::cpu())?)?;
    /// assert_eq!(w.gather_main_grad()?.to_f32_vec()?, [0.0, 0.0]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn gather_main_grad(&self) -> Result<Tensor> {
        self.expect_complete_gradient()?;
        self.joined("gradient", self.main_grad())
    }

    /// Returns an error if the gradient is this rank's part of a sum over ranks.
    pub(crate) fn expect_complete_gradient(&self) -> Result<()> {
        self.gradient.expect_here(&self.name)?;
        match (&self.placement, &self.tensor_parallel) {
            (Placement::Partial, Some(ranks)) if self.is_trainable => {
                self.gradient.expect_summed(&self.name, ranks.group().id())
            }
            _ => Ok(()),
        }
    }

    /// Replaces the value by this rank's part of `whole`, which has the [global shape](Self::global_shape): see [`set`](Self::set).
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// let whole = Tensor::full(2.0, [3], DType::F32, &Device::cpu())?;
    /// let mut w = Parameter::new("w", Tensor::full(1.0, [3], DType::F32, &Device::cpu())?)?;
    /// w.set_part_of(&whole)?; // this rank has all of it
    /// assert_eq!(w.tensor().to_f32_vec()?, [2.0; 3]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Another shape or dtype; the device failed.
    pub fn set_part_of(&mut self, whole: &Tensor) -> Result<()> {
        let Placement::Cut(cut) = &self.placement else { return self.set(whole.clone()) };
        if whole.shape() != cut.global() {
            let (op, what, remedy) = ("set_part_of", "parameter and value", "a parameter keeps its shape");
            let (lhs, rhs) = (*cut.global(), *whole.shape());
            return Err(fp8_kernels::Error::Shapes { op, what, lhs, rhs, remedy }.into());
        }
        self.set(cut.part(whole)?)
    }
}
