//! Reference of `accumulate`.

use super::parallel;
use crate::{Result, Tensor};

pub(crate) fn accumulate(out: &mut Tensor, x: &Tensor, name: &str) -> Result<()> {
    let x = x.cpu_f32("accumulate")?;
    parallel::zip(out.as_mut_slice::<f32>(name)?, &x, |out, x| {
        out.iter_mut().zip(x).for_each(|(o, v)| *o += v);
    });
    Ok(())
}
