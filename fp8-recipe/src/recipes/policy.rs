//! The decisions of a recipe: the interface that each kind of recipe implements in a file of its own.
//!
//! The rest of the crate asks a [`Policy`] and never which kind it is. A further recipe is one new file with its list of options,
//! its module, its re-export in `lib.rs`, and its names in `presets.rs`.

use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::gemm_accumulation::SPLIT_BY_DEFAULT;
use crate::{Error, Format, Result, SlotRole};
use fp8_kernels::ops::ScaleUpdate;
use fp8_kernels::{ArenaOptions, Scale, ScaleRule};
use std::any::Any;
use std::fmt::Debug;

/// One kind of recipe with its options.
pub(crate) trait Policy: Any + Debug + Send + Sync {
    /// The FP8 formats.
    fn format(&self) -> Format;

    /// Checks every option.
    fn validate(&self) -> Result<()>;

    /// Whether fprop, dgrad and wgrad run in high precision, in this order.
    fn override_linear_precision(&self) -> (bool, bool, bool);

    /// Whether fprop, dgrad and wgrad use split accumulation, in this order.
    fn use_split_accumulator(&self) -> (bool, bool, bool) {
        SPLIT_BY_DEFAULT
    }

    /// The extent to which attention runs in FP8.
    fn fp8_attention(&self) -> Fp8Attention {
        Fp8Attention::Off
    }

    /// Whether a tensor of this role has one scale, as attention needs it.
    fn has_one_scale(&self, role: SlotRole) -> bool {
        self.state().is_some()
            || !matches!(self.scale(role, &self.rule(role)), Scale::Blocks(_) | Scale::Nvfp4(_))
    }

    /// The identity of the recipe's state in checkpoints, `kind(option=value,…)`: all options except the length of a history,
    /// which may change.
    fn state_key(&self) -> String;

    /// The identity of the recipe: all options. Arenas and cached weights of equal recipes are shared.
    fn key(&self) -> String {
        self.state_key()
    }

    /// The rule that computes a per-tensor scale from an amax. Without [`state`](Self::state) the amax is that of the tensor
    /// itself. With it, the rule gives first scales, and all slots of a pass have the same rule.
    fn rule(&self, role: SlotRole) -> ScaleRule;

    /// The scale of slots of this role, if there is no [`state`](Self::state). `rule` is this policy's for the role.
    fn scale<'a>(&'a self, role: SlotRole, rule: &'a ScaleRule) -> Scale<'a> {
        let _ = role;
        Scale::FromTensor(rule)
    }

    /// Whether tensors of this role are rounded stochastically in training, with random numbers of the scope.
    fn rounds_stochastically(&self, role: SlotRole) -> bool {
        let _ = role;
        false
    }

    /// The state that outlasts a scope. `None` if every scale comes from the tensor that it quantizes: such a recipe
    /// has no amax cells, no collective, and nothing in checkpoints.
    fn state(&self) -> Option<&dyn State> {
        None
    }
}

/// The part of a policy that keeps a scale and some numbers for each slot from scope to scope, in an arena.
pub(crate) trait State {
    /// The options that arenas are created with. The rows after row 0 are saved in checkpoints. The last one is the
    /// newest amax, if there is one.
    fn arena_options(&self) -> ArenaOptions;

    /// Whether a commit replaces amaxes by their maximum over the ranks of the group.
    fn reduce_amax(&self) -> bool;

    /// The update that a commit makes to an arena. `rule` is the policy's rule for the arena's pass.
    fn update<'a>(&'a self, rule: &'a ScaleRule) -> Update<'a>;

    /// Whether a slot's first scale, which it takes from its own tensor, is the one that a commit then computes, unless ranks
    /// reduce amaxes.
    fn first_scale_is_final(&self) -> bool;

    /// Whether the copy of a weight that was quantized before its slot had a scale serves until the end of the optimizer step.
    fn keeps_first_copies(&self) -> bool {
        false
    }

    /// Whether an amax enters the window.
    fn records(&self, amax: f32) -> bool;
}

/// The update that a commit makes to an arena.
pub(crate) enum Update<'a> {
    /// The rows are past amaxes, and the device updates all slots.
    Window(ScaleUpdate<'a>),
    /// The rows are numbers of a user's code, followed by the newest amax. The code runs on the host, slot by slot.
    OnHost(&'a dyn HostUpdate),
}

/// A user's code that computes scales.
pub(crate) trait HostUpdate {
    /// Returns the scale of a slot that has run, and replaces its numbers in `state`.
    fn update(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> Result<f32>;

    /// Returns the name of the recipe for errors.
    fn name(&self) -> &str;
}

/// A slot whose scale a commit computes: what [`CustomRecipe::scale`](crate::CustomRecipe::scale) gets, which has an example.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SlotUpdate<'a> {
    /// The slot's name, such as `blocks.3.mlp.fc2.grad_output`.
    pub name: &'a str,
    /// The part that the tensor plays in its GEMM.
    pub role: SlotRole,
    /// The largest magnitude in the tensor, before scaling, over all ranks and all uses in the scope. It is finite and greater
    /// than 0.
    pub amax: f32,
    /// The largest finite value of the slot's format: 448 for E4M3, 57344 for E5M2.
    pub fp8_max: f32,
    /// The scale so far. `None` if no committed scope has set it: the tensor was then quantized with a scale of its own.
    pub scale: Option<f32>,
}

/// Returns the error of an option that is out of range.
pub(crate) fn out_of_range(
    recipe: &'static str,
    option: &'static str,
    value: impl ToString,
    remedy: &'static str,
) -> Error {
    Error::Recipe { recipe, option, value: value.to_string(), remedy }
}
