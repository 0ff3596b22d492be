//! Reference of `accumulate`.

use super::parallel;
use crate::ops::{GradientMut, Update};
use crate::{Result, Tensor};

pub(crate) fn store(out: &mut Tensor, x: &Tensor, how: Update, name: &str) -> Result<()> {
    let x = x.cpu_f32("accumulate")?;
    parallel::zip(out.as_mut_slice::<f32>(name)?, &x, |out, x| match how {
        Update::Add => out.iter_mut().zip(x).for_each(|(o, v)| *o += v),
        Update::Write => out.copy_from_slice(x),
    });
    Ok(())
}

/// Puts `sums`, f32 and of the gradient's shape, into a gradient.
pub(super) fn fill(gradient: &mut GradientMut<'_>, sums: &Tensor) -> Result<()> {
    store(gradient.tensor, sums, gradient.update, gradient.name)
}
