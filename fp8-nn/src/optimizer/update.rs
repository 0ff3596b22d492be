//! The update of all parameters: gathers what the kernels need, and stores what they return.

use super::moments::MomentDtype;
use super::progress::{OnDevice, Versions};
use super::rule::Rule;
use super::{AdamW, AdamWState};
use crate::loss_scaler::StepScale;
use crate::parameter::{Parts, ValueMut, overwrite_codes};
use crate::{Error, Parameter, Result};
use fp8_kernels::ops::{
    self, AdamWGroup, AdamWTensor, NormCheck, OptimizerGroup, OptimizerTensor, ScaledStep, StepCheck,
    UpdateRule,
};
use fp8_kernels::{DType, Device, Fp8Tensor, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;

impl AdamW {
    /// Updates all parameters, with one launch for each learning rate and weight decay.
    pub(super) fn update(
        &mut self,
        device: &Device,
        parameters: Vec<&mut Parameter>,
        norm: Option<&Tensor>,
        scaled: Option<StepScale<'_>>,
    ) -> Result<()> {
        let mut states: BTreeMap<&str, &mut AdamWState> =
            self.state.iter_mut().map(|(name, state)| (&**name, state)).collect();
        let progress = self.progress.clone();
        let is_stochastic = progress.options.stochastic_rounding;
        let mut tensors: Vec<Vec<OptimizerTensor<'_>>> =
            progress.groups.rates().map(|_| Vec::new()).collect();
        // The stored codes of each tensor of a group that has some.
        let mut stored: Vec<Vec<Option<&mut Fp8Tensor>>> =
            progress.groups.rates().map(|_| Vec::new()).collect();
        let mut versions = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let Parts { name, value, main_grad, version } = parameter.parts_mut();
            versions.push(version.clone());
            // `prepare` has made the state of every parameter, and `check` has found no name twice.
            let Some(AdamWState { exp_avg, exp_avg_sq, main_param }) = states.remove(&**name) else {
                return Err(Error::DuplicateParameter(name.clone()));
            };
            let group = progress.groups.of(&progress.options, name, main_grad.shape());
            let (param, main_param, slot, codes) = match (value, main_param) {
                (ValueMut::High(param), main_param) => (param, main_param.as_mut(), None, None),
                // The f32 copy is what is updated. It is quantized in the same pass.
                (ValueMut::Fp8(codes, quantizer), Some(main_param)) => {
                    (main_param, None, Some(quantizer.slot(true)), Some(codes))
                }
                // `prepare` has made the copy.
                (ValueMut::Fp8(..), None) => return Err(Error::StoredInFp8 { parameter: name.clone() }),
            };
            let rule = match (progress.rule, exp_avg_sq) {
                (Rule::Lion, _) => UpdateRule::Lion,
                (Rule::Sgd { nesterov }, _) => UpdateRule::Sgd { nesterov },
                (Rule::AdamW, Some(exp_avg_sq)) => UpdateRule::AdamW { exp_avg_sq: exp_avg_sq.moment() },
                // `prepare` has made both moments.
                (Rule::AdamW, None) => return Err(Error::DuplicateParameter(name.clone())),
            };
            let is_rounded_stochastically =
                is_stochastic && param.dtype() == DType::BF16 && main_param.is_none();
            tensors[group].push(OptimizerTensor {
                name,
                param,
                main_grad,
                exp_avg: exp_avg.moment(),
                rule,
                main_param,
                slot,
                is_rounded_stochastically,
                seed: seed_of(name),
            });
            stored[group].push(codes);
        }
        let OnDevice { factors, skipped } = progress.on_device(device)?;
        let check = match progress.update_count(device, false)? {
            Some(updates) => {
                let gradients_are_scaled = scaled.as_ref().is_some_and(|scaled| scaled.gradients_are_scaled);
                let loss_scale = scaled.map(|scaled| scaled.scale);
                StepCheck::Scaled(ScaledStep { updates, loss_scale, gradients_are_scaled, norm, skipped })
            }
            None => norm.map_or(StepCheck::Never, |norm| StepCheck::Norm(NormCheck { norm, skipped })),
        };
        let names: Vec<&str> = tensors.iter().flatten().map(|tensor| tensor.name).collect();
        // One call checks all groups, so an error before the first launch changes nothing.
        let is_plain = progress.options.moments == MomentDtype::F32 && !is_stochastic;
        let codes = if is_plain && progress.rule == Rule::AdamW {
            let mut tensors: Vec<Vec<_>> =
                tensors.into_iter().map(|of| of.into_iter().filter_map(in_f32).collect()).collect();
            let mut groups: Vec<AdamWGroup<'_, '_>> =
                tensors.iter_mut().map(|of| &mut **of).zip(factors).collect();
            match check {
                StepCheck::Scaled(step) => ops::adamw_groups_scaled(&mut groups, &step)?,
                StepCheck::Norm(check) => ops::adamw_groups(&mut groups, Some(check))?,
                StepCheck::Never => ops::adamw_groups(&mut groups, None)?,
            }
        } else {
            let mut groups: Vec<OptimizerGroup<'_, '_>> =
                tensors.iter_mut().map(|of| &mut **of).zip(factors).collect();
            ops::optimizer_step(&mut groups, check)?
        };
        // An error before the first launch has changed no value; one after it makes the device unusable.
        versions.iter().for_each(|version| version.advance());
        device.on_replay(Arc::new(Versions(versions)));
        let codes = codes.into_iter().flatten().zip(stored.into_iter().flatten());
        for ((new, stored), name) in codes.zip(names) {
            if let (Some(new), Some(stored)) = (new, stored) {
                overwrite_codes(stored, new, name)?;
            }
        }
        Ok(())
    }
}

/// The same tensor for the operations of AdamW with moments in f32; `None` for another rule.
fn in_f32(tensor: OptimizerTensor<'_>) -> Option<AdamWTensor<'_>> {
    let OptimizerTensor { name, param, main_grad, exp_avg, rule, main_param, slot, .. } = tensor;
    let UpdateRule::AdamW { exp_avg_sq } = rule else { return None };
    let (exp_avg, exp_avg_sq) = (exp_avg.values, exp_avg_sq.values);
    Some(AdamWTensor { name, param, main_grad, exp_avg, exp_avg_sq, main_param, slot })
}

/// The FNV-1a hash of a parameter's name, which is the same on every rank and in every run.
fn seed_of(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    name.bytes().fold(0xCBF2_9CE4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::seed_of;

    #[test]
    fn seeds_are_the_published_hashes() {
        // The test vectors of the hash's authors.
        for (text, hash) in
            [("", 0xCBF2_9CE4_8422_2325), ("a", 0xAF63_DC4C_8601_EC8C), ("foobar", 0x8594_4171_F739_67E8)]
        {
            assert_eq!(seed_of(text), hash, "{text}");
        }
    }
}
