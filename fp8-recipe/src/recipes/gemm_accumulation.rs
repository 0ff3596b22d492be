//! The accumulation modes of a layer's GEMMs.

use fp8_kernels::ops::Accumulation;

/// The accumulation mode of each of a Linear's three GEMMs, for those that run in FP8: Transformer Engine's `MMParams`.
/// A layer gets it from [`Forward::accumulation`](crate::Forward::accumulation) or
/// [`Backward::accumulation`](crate::Backward::accumulation) and passes it to its GEMMs.
///
/// Under a recipe [by name](crate::Recipe::by_name) a GEMM uses split accumulation if the recipe of either operand asks for it.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, ops::Accumulation};
/// use fp8_recipe::{CurrentScaling, GemmSlots, Scaling};
///
/// let fc = GemmSlots::new("fc");
/// let mut scaling = Scaling::new(&fc, &Device::cpu())?;
/// let recipe = CurrentScaling { use_split_accumulator: (true, true, false), ..Default::default() };
/// let cx = scaling.autocast(&recipe.into())?;
/// let accumulation = cx.accumulation(&fc.input);
/// assert_eq!((accumulation.fprop, accumulation.wgrad), (Accumulation::Split, Accumulation::Fast));
/// cx.discard()?;
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmAccumulation {
    /// `y = x · wᵀ`.
    pub fprop: Accumulation,
    /// `dx = dy · w`.
    pub dgrad: Accumulation,
    /// `dw = dyᵀ · x`.
    pub wgrad: Accumulation,
}

/// Whether fprop, dgrad and wgrad use split accumulation, in this order, unless a recipe says otherwise.
pub(crate) const SPLIT_BY_DEFAULT: (bool, bool, bool) = (false, true, true);

/// Fast for fprop, and split for dgrad and wgrad.
impl Default for GemmAccumulation {
    fn default() -> Self {
        Self::new(SPLIT_BY_DEFAULT)
    }
}

impl GemmAccumulation {
    /// Takes whether fprop, dgrad and wgrad use split accumulation.
    pub(crate) fn new((fprop, dgrad, wgrad): (bool, bool, bool)) -> Self {
        let of = |split| if split { Accumulation::Split } else { Accumulation::Fast };
        Self { fprop: of(fprop), dgrad: of(dgrad), wgrad: of(wgrad) }
    }
}
