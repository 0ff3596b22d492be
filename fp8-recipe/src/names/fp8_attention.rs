//! Identifies the recipes that run attention in FP8, and the slots that only they use.
//!
//! A model registers the slots of its attention whether or not a recipe uses them, because layers are made before recipes are
//! chosen. A recipe's arenas have the slots that the recipe uses and no others. The slots of a model are ordered so that those
//! of each recipe are contiguous: see [`SlotUse`].

/// The extent to which a recipe runs attention in FP8, from its options `fp8_dpa` and `fp8_mha`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Fp8Attention {
    /// Attention runs in high precision.
    #[default]
    Off,
    /// Attention runs in FP8 (`fp8_dpa`).
    Dpa,
    /// Attention and its projections also exchange FP8 (`fp8_mha`, which implies `fp8_dpa`).
    Mha,
}

impl Fp8Attention {
    pub(crate) const ALL: [Self; 3] = [Self::Off, Self::Dpa, Self::Mha];

    pub(crate) const fn new(fp8_dpa: bool, fp8_mha: bool) -> Self {
        match (fp8_dpa, fp8_mha) {
            (_, true) => Self::Mha,
            (true, false) => Self::Dpa,
            (false, false) => Self::Off,
        }
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// The recipes that use the slot of a tensor that attention reads: see
/// [`SlotName::of_attention`](crate::SlotName::of_attention).
///
/// The other recipes leave the slot off, and it is in none of their arenas, checkpoints and reports.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{CurrentScaling, DelayedScaling, Recipe, Scaling, SlotName, SlotRole, SlotUse, Slots};
///
/// struct Attention(SlotName);
///
/// impl Slots for Attention {
///     fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
///         f(&self.0);
///     }
/// }
///
/// let q = Attention(SlotName::of_attention("q", SlotRole::Input, SlotUse::DpaOrMha));
/// let mut scaling = Scaling::new(&q, &Device::cpu())?;
/// assert!(scaling.autocast(&DelayedScaling::default().into())?.slot(&q.0)?.is_off());
/// let recipe = Recipe::from(DelayedScaling { fp8_dpa: true, ..Default::default() });
/// assert!(!scaling.autocast(&recipe)?.slot(&q.0)?.is_off());
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
// In this order the slots of each recipe are contiguous: those of `fp8_dpa` are the first three, those of `fp8_mha` the last
// three.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SlotUse {
    /// Recipes with `fp8_dpa` and without `fp8_mha`.
    Dpa,
    /// All recipes.
    Always,
    /// Recipes with `fp8_dpa` or `fp8_mha`.
    DpaOrMha,
    /// Recipes with `fp8_mha`.
    Mha,
}

impl SlotUse {
    pub(crate) const fn is_by(self, attention: Fp8Attention) -> bool {
        match self {
            Self::Always => true,
            Self::Dpa => matches!(attention, Fp8Attention::Dpa),
            Self::DpaOrMha => !matches!(attention, Fp8Attention::Off),
            Self::Mha => matches!(attention, Fp8Attention::Mha),
        }
    }
}
