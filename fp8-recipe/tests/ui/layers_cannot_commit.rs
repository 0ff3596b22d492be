//! Layers hold `&mut`, and `commit` takes `self`.
use fp8_recipe::{Backward, Forward, Result};

fn forward(cx: &mut Forward<'_>) -> Result<()> {
    cx.commit()
}

fn backward(cx: &mut Backward<'_>) -> Result<()> {
    cx.discard()
}

fn main() {}
