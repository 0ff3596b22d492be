//! Reference of `accumulate`.

use super::parallel;
use crate::ops::GradientMut;
use crate::{Result, Tensor};

pub(crate) fn accumulate(out: &mut Tensor, x: &Tensor, name: &str) -> Result<()> {
    let x = x.cpu_f32("accumulate")?;
    parallel::zip(out.as_mut_slice::<f32>(name)?, &x, |out, x| {
        out.iter_mut().zip(x).for_each(|(o, v)| *o += v);
    });
    Ok(())
}

/// Puts `sums`, f32 and of the gradient's shape, into a gradient.
pub(super) fn fill(gradient: &mut GradientMut<'_>, sums: &Tensor) -> Result<()> {
    if gradient.is_added {
        return accumulate(gradient.tensor, sums, gradient.name);
    }
    gradient.tensor.as_mut_slice::<f32>(gradient.name)?.copy_from_slice(sums.as_slice::<f32>()?);
    Ok(())
}
