//! A scope cannot be opened while another waits for its commit.
use fp8_recipe::{Recipe, Result, Scaling};

fn step(scaling: &mut Scaling, recipe: &Recipe) -> Result<()> {
    let forward = scaling.autocast(recipe)?;
    let backward = scaling.backward()?;
    backward.commit()?;
    drop(forward);
    Ok(())
}

/// Not even where the first guard is not used any more: it has something to put back.
fn forgetful(scaling: &mut Scaling, recipe: &Recipe) -> Result<()> {
    let _forward = scaling.autocast(recipe)?;
    scaling.backward()?.commit()
}

fn main() {}
