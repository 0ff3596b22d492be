//! Weight gradients that a backward scope leaves for later.

use fp8_kernels::Operand;
use fp8_kernels::ops::Accumulation;
use std::sync::Arc;

/// A weight gradient that was not computed yet: `dw[n, k] += dy[m, n]ᵀ · x[m, k]`.
///
/// [`Backward::delay_wgrad`](crate::Backward::delay_wgrad) says how it comes about.
///
/// ```
/// use fp8_recipe::fp8_kernels::{DType, Device, Operand, Tensor, ops};
/// use fp8_recipe::DelayedWgrad;
///
/// let ones = |shape: [usize; 2]| Tensor::full(1.0, shape, DType::F32, &Device::cpu());
/// let (dy, x) = (Operand::High(ones([4, 2])?), Operand::High(ones([4, 3])?));
/// let accumulation = ops::Accumulation::Split;
/// let delayed = DelayedWgrad { weight: "fc.weight".into(), dy, x, accumulation, lone_recipe: None };
/// let mut dw = Tensor::zeros([2, 3], DType::F32, &Device::cpu())?;
/// ops::wgrad(&delayed.dy, &delayed.x, &mut dw, &delayed.weight, delayed.accumulation)?;
/// assert_eq!(dw.to_f32_vec()?, [4.0; 6]);
/// # Ok::<(), fp8_recipe::fp8_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct DelayedWgrad {
    /// The name of the weight.
    pub weight: Arc<str>,
    /// The gradient of the output, `[m, n]`.
    pub dy: Operand,
    /// The input, `[m, k]`.
    pub x: Operand,
    /// The accumulation mode of the product.
    pub accumulation: Accumulation,
    /// The [`lone_recipe`](crate::Backward::lone_recipe) of the scope that delayed it.
    pub lone_recipe: Option<Arc<str>>,
}
