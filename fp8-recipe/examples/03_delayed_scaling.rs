//! Shows delayed scaling at work: histories, a spike, an infinity, Transformer Engine's rules, and a scope that fails.
//!
//! `cargo run -p fp8-recipe --example 03_delayed_scaling`
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use fp8_recipe::fp8_kernels::{Device, Operand, Tensor, ops};
use fp8_recipe::{DelayedScaling, Direction, GemmSlots, Quantizer, Recipe, Result, Scaling};

fn main() -> Result<()> {
    worked_run()?;
    a_spike(DelayedScaling::default(), "default rules")?;
    a_spike(DelayedScaling::default().with_te_rules(), "Transformer Engine's rules")?;
    a_failed_scope()?;
    one_tensor_alone()
}

fn constant(value: f32) -> Result<Tensor> {
    Ok(Tensor::from_vec(vec![value; 64], [4, 16], &Device::cpu())?)
}

/// Returns the scale and the amax history of a slot as text.
fn show(scaling: &Scaling, direction: Direction, name: &str) -> Result<String> {
    let state = scaling.state()?;
    let found = state.arenas.iter().find(|arena| arena.direction == direction).and_then(|arena| {
        let slot = arena.slots.iter().position(|slot| **slot == *name)?;
        let window: Vec<f32> = arena.amax_history.iter().map(|row| row[slot]).collect();
        Some(format!("scale {:<10} history {window:?}", arena.scale[slot]))
    });
    Ok(found.unwrap_or_default())
}

/// Quantizes an input, a weight and a gradient that grow by 1 in each step, with two bits of headroom.
fn worked_run() -> Result<()> {
    println!(
        "In step s the input is s + 0.25, the weight s + 0.5 and the gradient s + 0.75 (HYBRID, margin 2):"
    );
    let fc = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&fc, &Device::cpu())?;
    let recipe = Recipe::from(DelayedScaling { margin: 2, amax_history_len: 5, ..Default::default() });
    for step in 0..4_u8 {
        let s = f32::from(step);
        let mut cx = scaling.autocast(&recipe)?;
        ops::quantize(&constant(s + 0.25)?, &cx.slot(&fc.input)?)?;
        cx.quantize_weight(&fc.weight, u64::from(step), &constant(s + 0.5)?)?;
        let origin = cx.origin(&fc.input);
        cx.commit()?;

        let mut cx = scaling.backward()?;
        ops::quantize(&constant(s + 0.75)?, &cx.slot(&origin, &fc.grad_output)?)?;
        cx.commit()?;

        println!("  step {step}  input        {}", show(&scaling, Direction::Forward, fc.input.name())?);
        println!("          weight       {}", show(&scaling, Direction::Forward, fc.weight.name())?);
        println!("          grad_output  {}", show(&scaling, Direction::Backward, fc.grad_output.name())?);
    }
    Ok(())
}

/// Shows how a spike, an infinity and zeros affect the scale, with a window of three amaxes.
fn a_spike(recipe: DelayedScaling, rules: &str) -> Result<()> {
    println!("\nA spike, an infinity and zeros, with {rules}:");
    let fc = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&fc, &Device::cpu())?;
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..recipe });
    for amax in [1.0, 100.0, f32::INFINITY, 0.0, 1.0, 1.0, 1.0, 1.0] {
        let mut cx = scaling.autocast(&recipe)?;
        let x8 = ops::quantize(&constant(amax)?, &cx.slot(&fc.input)?)?;
        cx.commit()?;
        let used = x8.as_fp8().map_or(Ok(1.0), |x8| x8.scale_inv().item())?.recip();
        let after = show(&scaling, Direction::Forward, fc.input.name())?;
        println!("  amax {amax:<5} quantized with scale {used:<7.2}  after the step: {after}");
    }
    Ok(())
}

/// Shows that a scope that is dropped without commit changes nothing.
fn a_failed_scope() -> Result<()> {
    println!("\nA scope that fails:");
    let fc = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&fc, &Device::cpu())?;
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    let mut cx = scaling.autocast(&recipe)?;
    ops::quantize(&constant(1.0)?, &cx.slot(&fc.input)?)?;
    cx.commit()?;
    let before = scaling.state()?;
    let stranger = GemmSlots::new("head");
    let mut step = || -> Result<Operand> {
        let mut cx = scaling.autocast(&recipe)?;
        ops::quantize(&constant(1e6)?, &cx.slot(&fc.input)?)?;
        let logits = ops::quantize(&constant(1.0)?, &cx.slot(&stranger.input)?)?;
        cx.commit()?;
        Ok(logits)
    };
    if let Err(error) = step() {
        println!("  error: {error}");
    }
    println!("  The state is as before: {}.", scaling.state()? == before);
    Ok(())
}

/// Quantizes one tensor without a model, with a `Quantizer`, which updates its history with each use.
fn one_tensor_alone() -> Result<()> {
    println!("\nOne tensor with a history of its own, and scales that are powers of two:");
    let recipe = DelayedScaling { amax_history_len: 4, ..DelayedScaling::te_v0() };
    let mut quantizer = Quantizer::new(recipe, Direction::Forward, &Device::cpu())?;
    for amax in [3.0, 5.0, 0.7] {
        quantizer.quantize(&constant(amax)?)?;
        println!("  amax {amax}: scale {:<4} history {:?}", quantizer.scale()?, quantizer.amax_history()?);
    }
    Ok(())
}
