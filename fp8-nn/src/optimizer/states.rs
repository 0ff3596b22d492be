//! The moments of an optimizer and its f32 copies, one entry per parameter.

use super::{AdamW, AdamWState, Counts};
use crate::module::trainable;
use crate::parameter::overwrite;
use crate::{Layer, Parameter, Result, parameters};
use fp8_kernels::{DType, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Reads the part of a parameter's state that has this name, such as `exp_avg`, and the shape and dtype of this tensor; `None` if
/// there is none.
type ReadState<'a> = dyn FnMut(&Parameter, &str, &Tensor) -> Result<Option<Tensor>> + 'a;

impl AdamW {
    /// Allocates the state that parameters about to be updated lack: all of it, or the f32 copy of a weight that was stored in FP8
    /// without this optimizer.
    pub(super) fn prepare(&mut self, parameters: &[&Parameter]) -> Result<()> {
        let (mut new, mut copies) = (Vec::new(), Vec::new());
        let moments = self.progress.options.moments;
        for &parameter in parameters {
            let state = self.state.get(parameter.name());
            if state.is_some_and(|state| state.main_param.is_some() || parameter.fp8().is_none()) {
                continue;
            }
            let remedy = "the optimizer's first step makes its state: run it before";
            parameter.device().expect_eager(self.progress.rule.name(), remedy)?;
            let name = parameter.name().clone();
            match state {
                Some(_) => copies.push((name, AdamWState::main_param_of(parameter)?)),
                None => new.push((
                    name,
                    AdamWState::new(parameter, self.progress.rule, moments, self.has_main_param(parameter))?,
                )),
            }
        }
        self.state.extend(new);
        for (name, copy) in copies {
            self.state.entry(name).and_modify(|state| state.main_param = Some(copy));
        }
        Ok(())
    }

    /// Frees the state of the model's frozen parameters.
    pub(super) fn drop_frozen(&mut self, model: &(impl Layer + ?Sized)) {
        for parameter in parameters(model).into_iter().filter(|parameter| !parameter.is_trainable()) {
            self.drop_state(parameter.name());
        }
    }

    /// Frees the state of one frozen parameter.
    pub(crate) fn drop_state(&mut self, name: &Arc<str>) {
        self.state.remove(name);
        self.frozen.insert(name.clone());
    }

    /// Returns the state of a parameter that is trained; `None` for a frozen one, whose state the next step frees.
    pub(crate) fn state_of(&self, parameter: &Parameter) -> Option<&AdamWState> {
        self.state.get(parameter.name()).filter(|_| parameter.is_trainable())
    }

    /// Returns whether a parameter without state is one that the optimizer may have taken steps without: it is frozen, or was.
    pub(crate) fn may_lack_state(&self, parameter: &Parameter) -> bool {
        !parameter.is_trainable() || self.frozen.contains(parameter.name())
    }

    /// Allocates state for the parameters whose moments are about to be loaded, unless they have state of their shape.
    pub(crate) fn new_state(
        &self,
        model: &(impl Layer + ?Sized),
        moments: &BTreeSet<Arc<str>>,
    ) -> Result<BTreeMap<Arc<str>, AdamWState>> {
        let mut new = BTreeMap::new();
        for parameter in trainable(model) {
            let (name, has_main_param) = (parameter.name(), self.has_main_param(parameter));
            let fits =
                |state: &AdamWState| state.fits(parameter) && state.main_param.is_some() == has_main_param;
            if moments.contains(name) && !self.state.get(name).is_some_and(fits) {
                new.insert(
                    name.clone(),
                    AdamWState::new(
                        parameter,
                        self.progress.rule,
                        self.progress.options.moments,
                        has_main_param,
                    )?,
                );
            }
        }
        Ok(new)
    }

    /// Continues after `counts`, with what `read` returns for a parameter and the part of its state. If it returns `None`, the
    /// parameter starts from an initial state. Existing state stays at its
    /// address in memory, which recorded steps use. `new` is the state of other parameters. Frozen parameters have none afterwards.
    pub(crate) fn resume(
        &mut self,
        model: &(impl Layer + ?Sized),
        counts: Counts,
        new: BTreeMap<Arc<str>, AdamWState>,
        read: &mut ReadState<'_>,
    ) -> Result<()> {
        self.state.extend(new);
        let trainable = trainable(model);
        let names: BTreeSet<_> = trainable.iter().map(|parameter| parameter.name()).collect();
        self.state.retain(|name, _| names.contains(name));
        let without_state = |name: &&Arc<str>| counts.steps > 0 && !self.state.contains_key(*name);
        self.frozen =
            parameters(model).into_iter().map(Parameter::name).filter(without_state).cloned().collect();
        let (rule, moments) = (self.progress.rule, self.progress.options.moments);
        for parameter in trainable {
            let name = parameter.name();
            let Some(state) = self.state.get_mut(name) else { continue };
            if !state.fits(parameter) {
                // The file has no moments for it, or `new` would have its state.
                *state = AdamWState::new(parameter, rule, moments, state.main_param.is_some())?;
            }
            for (part, moment) in state.moments_mut() {
                let value = match read(parameter, part, moment)? {
                    Some(value) => value,
                    None => Tensor::zeros(*moment.shape(), moment.dtype(), parameter.device())?,
                };
                overwrite(moment, value, name)?;
            }
            if let Some(main_param) = &mut state.main_param {
                let value = match read(parameter, "main_param", main_param)? {
                    Some(value) => value,
                    None => parameter.values(DType::F32)?,
                };
                overwrite(main_param, value, name)?;
            }
        }
        self.progress.resume(counts)
    }

    /// Returns whether the optimizer stores an f32 copy of a parameter.
    pub(crate) fn has_main_param(&self, parameter: &Parameter) -> bool {
        let is_16_bit = parameter.dtype() != DType::F32;
        parameter.fp8().is_some() || (self.progress.options.main_params && is_16_bit)
    }
}
