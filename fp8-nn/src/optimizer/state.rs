//! The moments of one parameter, and its f32 copy.

use super::moments::MomentDtype;
use super::rule::Rule;
use crate::parameter::overwrite;
use crate::{Parameter, Result};
use fp8_kernels::ops::{self, Moment};
use fp8_kernels::{DType, MemoryKind, Tensor};

/// One parameter's moments, and its f32 copy.
#[derive(Debug)]
pub(crate) struct AdamWState {
    pub(super) exp_avg: Stored,
    /// The second moment, for the rules that have one.
    pub(super) exp_avg_sq: Option<Stored>,
    pub(crate) main_param: Option<Tensor>,
}

/// A moment: its values, or its codes and their scales.
#[derive(Debug)]
pub(super) struct Stored {
    values: Tensor,
    scale_inv: Option<Tensor>,
}

impl Stored {
    fn zeros(parameter: &Parameter, moments: MomentDtype) -> Result<Self> {
        let (shape, device) = (parameter.shape(), parameter.device());
        let scales = || Tensor::zeros(ops::moment_scales(shape), DType::F32, device);
        let scale_inv = (moments == MomentDtype::Fp8).then(scales).transpose()?;
        Ok(Self { values: Tensor::zeros(*shape, moments.tensor_dtype(), device)?, scale_inv })
    }

    /// Lends it to an update.
    pub(super) fn moment(&mut self) -> Moment<'_> {
        Moment { values: &mut self.values, scale_inv: self.scale_inv.as_mut() }
    }
}

impl AdamWState {
    /// The state of a parameter before its first step: moments of 0, and an f32 copy if `main_params` asks for one.
    pub(super) fn new(
        parameter: &Parameter,
        rule: Rule,
        moments: MomentDtype,
        has_main_param: bool,
    ) -> Result<Self> {
        let main_param = has_main_param.then(|| Self::main_param_of(parameter)).transpose()?;
        Self::with_main_param(parameter, rule, moments, main_param)
    }

    /// An f32 copy of a parameter.
    pub(super) fn main_param_of(parameter: &Parameter) -> Result<Tensor> {
        let _kind = MemoryKind::Optimizer.enter();
        parameter.values(DType::F32)
    }

    /// The state of a parameter before its first step, with this f32 copy.
    pub(crate) fn with_main_param(
        parameter: &Parameter,
        rule: Rule,
        moments: MomentDtype,
        main_param: Option<Tensor>,
    ) -> Result<Self> {
        let _kind = MemoryKind::Optimizer.enter();
        let zeros = || Stored::zeros(parameter, moments);
        let exp_avg_sq = rule.has_second_moment().then(zeros).transpose()?;
        Ok(Self { exp_avg: zeros()?, exp_avg_sq, main_param })
    }

    /// Its tensors, with their names in a checkpoint.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let Self { exp_avg, exp_avg_sq, main_param } = self;
        let all = [
            ("exp_avg", Some(&exp_avg.values)),
            ("exp_avg_scale_inv", exp_avg.scale_inv.as_ref()),
            ("exp_avg_sq", exp_avg_sq.as_ref().map(|moment| &moment.values)),
            ("exp_avg_sq_scale_inv", exp_avg_sq.as_ref().and_then(|moment| moment.scale_inv.as_ref())),
            ("main_param", main_param.as_ref()),
        ];
        all.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)))
    }

    /// Its moments, with their names in a checkpoint.
    pub(super) fn moments_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut Tensor)> {
        let Self { exp_avg, exp_avg_sq, .. } = self;
        let (values, scale_inv) =
            exp_avg_sq.as_mut().map(|moment| (&mut moment.values, moment.scale_inv.as_mut())).unzip();
        let all = [
            ("exp_avg", Some(&mut exp_avg.values)),
            ("exp_avg_scale_inv", exp_avg.scale_inv.as_mut()),
            ("exp_avg_sq", values),
            ("exp_avg_sq_scale_inv", scale_inv.flatten()),
        ];
        all.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)))
    }

    /// Whether it is that of a parameter of this shape.
    pub(super) fn fits(&self, parameter: &Parameter) -> bool {
        self.exp_avg.values.shape() == parameter.shape()
    }

    pub(crate) fn expect_shape_of(&self, parameter: &Parameter) -> Result<()> {
        let (lhs, rhs) = (*parameter.shape(), *self.exp_avg.values.shape());
        if lhs == rhs {
            return Ok(());
        }
        let (what, remedy) = ("parameter and its moments", "each model has an optimizer of its own");
        let op = if self.exp_avg_sq.is_some() { "AdamW" } else { "optimizer" };
        Err(fp8_kernels::Error::Shapes { op, what, lhs, rhs, remedy }.into())
    }

    /// Sets the f32 copy, if there is one, to the value of the parameter.
    pub(super) fn reload(&mut self, parameter: &Parameter) -> Result<()> {
        let Some(main_param) = &mut self.main_param else { return Ok(()) };
        overwrite(main_param, parameter.values(DType::F32)?, parameter.name())
    }
}
