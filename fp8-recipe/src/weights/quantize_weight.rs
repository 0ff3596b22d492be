//! Weights, quantized once for each version and recipe.

use crate::scopes::open_scope::Scope;
use crate::scopes::scope_settings::Mode;
use crate::weights::weight_cache::{Basis, Found, Wanted};
use crate::{Direction, Forward, Result, SlotName, WeightVersion};
use fp8_kernels::{MemoryKind, Operand, Scale, Slot, Tensor, TransposePolicy, ops};
use std::sync::Arc;

impl Forward<'_> {
    /// Quantizes a weight once per version and recipe. Versions are unique in the process: equal versions mean equal bytes, and
    /// a weight never returns to an earlier one. For a weight whose versions a [`WeightVersion`] counts, use
    /// [`quantize_parameter`](Self::quantize_parameter).
    ///
    /// The amax is recorded once, by the first committed scope that uses the version. All scopes then use the same codes until
    /// the weight has another version, even if the slot gets another scale. There is one exception: a scope in which the slot
    /// has no scale from a recorded amax yet quantizes with a first scale, and the scopes after its commit use the scale that
    /// the commit has computed.
    ///
    /// The FP8 copy is kept until the weight has another version, or other recipes have taken its place: see
    /// [`Scaling::cached_weights`](crate::Scaling::cached_weights). One that was not kept is made again with the same codes, and
    /// its amax is not recorded again.
    ///
    /// # Errors
    /// As [`slot`](Self::slot); all errors of quantizing.
    pub fn quantize_weight(&mut self, name: &SlotName, version: u64, weight: &Tensor) -> Result<Operand> {
        self.quantize_version(name, version, None, false, weight)
    }

    /// Quantizes a parameter once per version and recipe, as [`quantize_weight`](Self::quantize_weight) does. The parameter
    /// shares its `version`, so that three more things are known:
    ///
    /// - Whether it has changed since it was quantized. If it has not, [`Scaling::state`](crate::Scaling::state) contains the
    ///   scale of its copy, and a training that continues from the state quantizes it with this scale and records nothing.
    /// - Which scopes belong to one optimizer step. Under Transformer Engine's rules
    ///   ([`with_te_rules`](crate::DelayedScaling::with_te_rules)), a copy that was quantized before the slot had a scale serves
    ///   the scopes of its step, and is made again in the next.
    /// - Whether it is trainable. A recorded step quantizes a weight again at each replay. For one that is frozen and was
    ///   quantized before, it uses the same scale each time and records nothing, like a step that is not recorded.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor};
    /// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling, WeightVersion};
    /// use std::sync::Arc;
    ///
    /// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
    /// let (mut scaling, version) = (Scaling::new(&fc, &device)?, Arc::new(WeightVersion::new()));
    /// let w = Tensor::from_vec(vec![3.5f32], [1, 1], &device)?;
    /// let recipe = DelayedScaling::default().with_te_rules().into();
    /// let mut scales = Vec::new();
    /// for step in 0..2 {
    ///     for _microbatch in 0..2 {
    ///         let mut cx = scaling.autocast(&recipe)?;
    ///         let w8 = cx.quantize_parameter(&fc.weight, &version, false, &w)?;
    ///         scales.push(1.0 / w8.as_fp8().map_or(Ok(0.0), |w8| w8.scale_inv().item())?);
    ///         cx.commit()?;
    ///     }
    ///     version.end_step();
    /// }
    /// assert_eq!(scales, [1.0, 1.0, 128.0, 128.0]);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`quantize_weight`](Self::quantize_weight).
    pub fn quantize_parameter(
        &mut self,
        name: &SlotName,
        version: &Arc<WeightVersion>,
        is_trainable: bool,
        weight: &Tensor,
    ) -> Result<Operand> {
        self.quantize_version(name, version.current(), Some(version), !is_trainable, weight)
    }

    fn quantize_version(
        &mut self,
        name: &SlotName,
        version: u64,
        of: Option<&Arc<WeightVersion>>,
        is_constant: bool,
        weight: &Tensor,
    ) -> Result<Operand> {
        let slot = self.scaling.model_slots().index(name, Direction::Forward)?;
        let domain = self.scaling.domains().plan(self.settings.plan).domain(Direction::Forward, slot);
        let Some(domain) = domain.filter(|_| self.settings.enabled) else {
            return Ok(ops::quantize(weight, &self.scaling.lend(name, slot, self.settings, &self.mode)?)?);
        };
        let capture = weight.device().capture_number();
        let is_determined = self.scaling.domains()[domain].is_determined(slot);
        let wanted = Wanted { slot, domain, version, of, capture, is_constant, is_determined };
        let live = self.scaling.domains()[domain].updates(Direction::Forward);
        let found = match &self.mode {
            Mode::Record => self.scaling.weights_mut().for_training(&wanted),
            Mode::Evaluate => self.scaling.weights_mut().for_evaluation(&wanted, live),
            Mode::Replay { outcome, .. } => self
                .scaling
                .weights_mut()
                .for_replay(&wanted, outcome.scope())
                .map_or(Found::New, Found::Copy),
        };
        let is_settled = self.scaling.domains()[domain].settles_at_once(slot);
        let own = self.scaling.lend(name, slot, self.settings, &self.mode)?;
        let (lent, basis) = match &found {
            Found::Copy(operand) if !lacks_columnwise(operand, &own) => return Ok(operand.clone()),
            Found::Copy(operand) => {
                let whole = with_columnwise(operand, weight, &own)?;
                self.scaling.weights_mut().complete(&wanted, &whole);
                return Ok(whole);
            }
            Found::New => (own, None),
            Found::Again(cell, basis) => {
                let first = self.scaling.domains()[domain].rule_again(name.role());
                let scale = Scale::Cell { cell, first, keep: false };
                (Slot { scale, amax: None, counters: None, ..own }, Some(*basis))
            }
        };
        // What a replay quantizes is not kept.
        let kind = match &self.mode {
            Mode::Replay { .. } => None,
            _ => Some(MemoryKind::Parameters.enter()),
        };
        let operand = ops::quantize(weight, &lent)?;
        drop(kind);
        let copy = operand.clone();
        let Some(scope) = self.scaling.scopes().current().map(Scope::number) else {
            if matches!(self.mode, Mode::Evaluate) {
                let basis = basis.unwrap_or(Basis::Live(live));
                self.scaling.weights_mut().insert_evaluation(&wanted, copy, basis);
            }
            return Ok(operand);
        };
        match (&self.mode, basis) {
            (Mode::Record, None) => {
                let added = self.scaling.weights_mut().insert(&wanted, copy, is_settled, scope);
                if let Some(scope) = self.scaling.scopes_mut().current_mut() {
                    scope.cached.push(added);
                }
            }
            (Mode::Record, Some(basis)) => {
                self.scaling.weights_mut().insert_again(&wanted, copy, basis, scope);
            }
            (Mode::Evaluate | Mode::Replay { .. }, _) => {}
        }
        Ok(operand)
    }
}

/// Returns whether a copy has no columnwise codes although `slot` asks for some. A recipe of the same arena in which dgrad runs in high
/// precision makes such copies.
fn lacks_columnwise(copy: &Operand, slot: &Slot<'_>) -> bool {
    let Some(codes) = copy.as_fp8().filter(|codes| slot.columnwise && codes.columnwise().is_none()) else {
        return false;
    };
    matches!(slot.scale, Scale::Blocks(_) | Scale::Nvfp4(_))
        || codes.device().transpose_policy() == TransposePolicy::WithCast
}

/// Returns a copy with the columnwise codes that it would have been made with. Nothing is recorded.
fn with_columnwise(copy: &Operand, weight: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    let _kind = MemoryKind::Parameters.enter();
    match (copy, slot.scale) {
        (Operand::Fp8(_), Scale::Blocks(_) | Scale::Nvfp4(_)) => {
            Ok(ops::quantize(weight, &Slot { amax: None, counters: None, ..*slot })?)
        }
        (Operand::Fp8(codes), _) => Ok(Operand::Fp8(codes.clone().with_columnwise()?)),
        (Operand::High(_), _) => Ok(copy.clone()),
    }
}
