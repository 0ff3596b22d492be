//! Which GEMMs of a layer run in FP8.

/// Which of the three GEMMs of a Linear run in FP8.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
/// let override_linear_precision = (false, false, true); // wgrad in high precision
/// let recipe = DelayedScaling { override_linear_precision, ..Default::default() };
/// let cx = scaling.autocast(&recipe.into())?;
/// let gemms = cx.fp8_gemms();
/// assert_eq!((gemms.fprop, gemms.dgrad, gemms.wgrad), (true, true, false));
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
    /// All GEMMs except those that `override_linear_precision` runs in high precision.
    pub(crate) const fn except((fprop, dgrad, wgrad): (bool, bool, bool)) -> Self {
        Self { fprop: !fprop, dgrad: !dgrad, wgrad: !wgrad }
    }
}
