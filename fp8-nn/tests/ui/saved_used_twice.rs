//! What forward saved serves one backward.

use fp8_nn::prelude::*;

fn twice(fc: &mut Linear, scaling: &mut Scaling, recipe: &Recipe, x: &Tensor) -> Result<()> {
    let (y, saved) = scaling.autocast_with(recipe, |cx| fc.forward(cx, x))?;
    let mut cx = scaling.backward()?;
    fc.backward(&mut cx, saved, &y)?;
    fc.backward(&mut cx, saved, &y)?;
    cx.commit()?;
    Ok(())
}

fn main() {}
