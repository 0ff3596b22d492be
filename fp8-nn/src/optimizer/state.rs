//! The moments of one parameter, and its f32 copy.

use crate::parameter::overwrite;
use crate::{Parameter, Result};
use fp8_kernels::{DType, MemoryKind, Tensor};

/// One parameter's moments, and its f32 copy.
#[derive(Debug)]
pub(crate) struct AdamWState {
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    pub(crate) main_param: Option<Tensor>,
}

impl AdamWState {
    /// The state of a parameter before its first step: moments of 0, and an f32 copy if `main_params` asks for one.
    pub(super) fn new(parameter: &Parameter, has_main_param: bool) -> Result<Self> {
        let main_param = has_main_param.then(|| Self::main_param_of(parameter)).transpose()?;
        Self::with_main_param(parameter, main_param)
    }

    /// An f32 copy of a parameter.
    pub(super) fn main_param_of(parameter: &Parameter) -> Result<Tensor> {
        let _kind = MemoryKind::Optimizer.enter();
        parameter.values(DType::F32)
    }

    /// The state of a parameter before its first step, with this f32 copy.
    pub(crate) fn with_main_param(parameter: &Parameter, main_param: Option<Tensor>) -> Result<Self> {
        let _kind = MemoryKind::Optimizer.enter();
        let zeros = || Tensor::zeros(*parameter.shape(), DType::F32, parameter.device());
        Ok(Self { exp_avg: zeros()?, exp_avg_sq: zeros()?, main_param })
    }

    /// Its tensors, with their names in a checkpoint.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let main_param = self.main_param.as_ref().map(|copy| ("main_param", copy));
        [("exp_avg", &self.exp_avg), ("exp_avg_sq", &self.exp_avg_sq)].into_iter().chain(main_param)
    }

    pub(crate) fn expect_shape_of(&self, parameter: &Parameter) -> Result<()> {
        let (lhs, rhs) = (*parameter.shape(), *self.exp_avg.shape());
        if lhs == rhs {
            return Ok(());
        }
        let (what, remedy) = ("parameter and its moments", "each model has an optimizer of its own");
        Err(fp8_kernels::Error::Shapes { op: "AdamW", what, lhs, rhs, remedy }.into())
    }

    /// Sets the f32 copy, if there is one, to the value of the parameter.
    pub(super) fn reload(&mut self, parameter: &Parameter) -> Result<()> {
        let Some(main_param) = &mut self.main_param else { return Ok(()) };
        overwrite(main_param, parameter.values(DType::F32)?, parameter.name())
    }
}
