//! The moments of an optimizer and its f32 copies, one entry per parameter.

use super::{AdamW, Counts};
use crate::parameter::overwrite;
use crate::{Layer, Parameter, Result, parameters};
use fp8_kernels::{DType, MemoryKind, Tensor, ops};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Reads the part of a parameter's state that has this name, such as `exp_avg`; `None` if there is none.
type ReadState<'a> = dyn FnMut(&Arc<str>, &str, &Tensor) -> Result<Option<Tensor>> + 'a;

/// One parameter's moments, and its f32 copy.
#[derive(Debug)]
pub(crate) struct AdamWState {
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    pub(crate) main_param: Option<Tensor>,
}

impl AdamWState {
    /// The state of a parameter before its first step: moments of 0, and an f32 copy if `main_params` asks for one.
    pub(super) fn new(parameter: &Tensor, main_params: bool) -> Result<Self> {
        let _kind = MemoryKind::Optimizer.enter();
        let zeros = || Tensor::zeros(*parameter.shape(), DType::F32, parameter.device());
        let wants = main_params && parameter.dtype() != DType::F32;
        let main_param = wants.then(|| ops::cast(parameter, DType::F32)).transpose()?;
        Ok(Self { exp_avg: zeros()?, exp_avg_sq: zeros()?, main_param })
    }

    /// Its tensors, with their names in a checkpoint.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let main_param = self.main_param.as_ref().map(|copy| ("main_param", copy));
        [("exp_avg", &self.exp_avg), ("exp_avg_sq", &self.exp_avg_sq)].into_iter().chain(main_param)
    }

    pub(super) fn expect_shape_of(&self, parameter: &Parameter) -> Result<()> {
        let (lhs, rhs) = (*parameter.tensor().shape(), *self.exp_avg.shape());
        if lhs == rhs {
            return Ok(());
        }
        let (what, remedy) = ("parameter and its moments", "each model has an optimizer of its own");
        Err(fp8_kernels::Error::Shapes { op: "AdamW", what, lhs, rhs, remedy }.into())
    }

    /// Sets the f32 copy, if there is one, to the value of the parameter.
    pub(super) fn reload(&mut self, parameter: &Parameter) -> Result<()> {
        let Some(main_param) = &mut self.main_param else { return Ok(()) };
        overwrite(main_param, ops::cast(parameter.tensor(), DType::F32)?, parameter.name())
    }
}

impl AdamW {
    /// Allocates state for the parameters whose moments are about to be loaded, unless they have state of their shape.
    pub(crate) fn new_state(
        &self,
        model: &(impl Layer + ?Sized),
        moments: &BTreeSet<Arc<str>>,
    ) -> Result<BTreeMap<Arc<str>, AdamWState>> {
        let mut new = BTreeMap::new();
        for parameter in parameters(model) {
            let (name, tensor) = (parameter.name(), parameter.tensor());
            let fits = |state: &AdamWState| {
                state.exp_avg.shape() == tensor.shape()
                    && state.main_param.is_some() == self.has_main_param(tensor)
            };
            if moments.contains(name) && !self.state.get(name).is_some_and(fits) {
                new.insert(name.clone(), AdamWState::new(tensor, self.options().main_params)?);
            }
        }
        Ok(new)
    }

    /// Continues after `counts`, with what `read` returns for a parameter's name, the part of its state and a
    /// tensor of its shape. If it returns `None`, the parameter starts from an initial state. Existing state stays at its
    /// address in memory, which recorded steps use. `new` is the state of other parameters.
    pub(crate) fn resume(
        &mut self,
        model: &(impl Layer + ?Sized),
        counts: Counts,
        new: BTreeMap<Arc<str>, AdamWState>,
        read: &mut ReadState<'_>,
    ) -> Result<()> {
        self.state.extend(new);
        let mut names = BTreeSet::new();
        for parameter in parameters(model) {
            let (name, tensor) = (parameter.name(), parameter.tensor());
            names.insert(name);
            let Some(state) = self.state.get_mut(name) else { continue };
            if state.exp_avg.shape() != tensor.shape() {
                // The file has no moments for it, or `new` would have its state.
                *state = AdamWState::new(tensor, state.main_param.is_some())?;
            }
            for (part, moment) in [("exp_avg", &mut state.exp_avg), ("exp_avg_sq", &mut state.exp_avg_sq)] {
                let value = match read(name, part, tensor)? {
                    Some(value) => value,
                    None => Tensor::zeros(*tensor.shape(), DType::F32, tensor.device())?,
                };
                overwrite(moment, value, name)?;
            }
            if let Some(main_param) = &mut state.main_param {
                let value = match read(name, "main_param", tensor)? {
                    Some(value) => value,
                    None => ops::cast(tensor, DType::F32)?,
                };
                overwrite(main_param, value, name)?;
            }
        }
        self.state.retain(|name, _| names.contains(name));
        self.progress.resume(counts)
    }
}
