//! The GEMMs of a layer that run in FP8.

use crate::SlotRole;

/// For each of the three GEMMs of a Linear, whether it runs in FP8.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let fc = GemmSlots::new("fc");
/// let mut scaling = Scaling::new(&fc, &Device::cpu())?;
/// let override_linear_precision = (false, false, true); // wgrad in high precision
/// let recipe = DelayedScaling { override_linear_precision, ..Default::default() };
/// let cx = scaling.autocast(&recipe.into())?;
/// let gemms = cx.fp8_gemms(&fc.input);
/// assert_eq!((gemms.fprop, gemms.dgrad, gemms.wgrad), (true, true, false));
/// assert_eq!(gemms.count(), 2);
/// cx.discard()?;
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Gemms {
    /// `y = x · wᵀ`.
    pub fprop: bool,
    /// `dx = dy · w`.
    pub dgrad: bool,
    /// `dw = dyᵀ · x`.
    pub wgrad: bool,
}

impl Fp8Gemms {
    /// All GEMMs in high precision.
    pub(crate) const NONE: Self = Self { fprop: false, dgrad: false, wgrad: false };

    /// All GEMMs in FP8.
    pub(crate) const ALL: Self = Self::except((false, false, false));

    /// Returns whether one of them reads the transpose of the tensor in this role: dgrad that of a weight, wgrad those of an input
    /// and of `dy`.
    pub(crate) const fn read_transpose(self, role: SlotRole) -> bool {
        match role {
            SlotRole::Weight => self.dgrad,
            SlotRole::Input | SlotRole::GradOutput => self.wgrad,
            SlotRole::Output | SlotRole::GradInput => false,
        }
    }

    /// Returns how many of the three run in FP8.
    pub fn count(self) -> usize {
        [self.fprop, self.dgrad, self.wgrad].into_iter().filter(|&runs| runs).count()
    }

    /// All GEMMs except those that `override_linear_precision` runs in high precision.
    pub(crate) const fn except((fprop, dgrad, wgrad): (bool, bool, bool)) -> Self {
        Self { fprop: !fprop, dgrad: !dgrad, wgrad: !wgrad }
    }
}
