//! Delayed scaling by example: histories, a spike, an infinity, Transformer Engine's rules, a scope that failed.
//!
//! `cargo run -p fp8-recipe --example 03_delayed_scaling`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

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

/// Scale and history of a slot.
fn show(scaling: &Scaling, direction: Direction, name: &str) -> Result<String> {
    let state = scaling.state()?;
    let found = state.arenas.iter().find(|arena| arena.direction == direction).and_then(|arena| {
        let slot = arena.slots.iter().position(|slot| **slot == *name)?;
        let window: Vec<f32> = arena.amax_history.iter().map(|row| row[slot]).collect();
        Some(format!("scale {:<10} history {window:?}", arena.scale[slot]))
    });
    Ok(found.unwrap_or_default())
}

/// Three tensors that grow by 1 a step, with two bits of headroom.
fn worked_run() -> Result<()> {
    println!("input s + 0.25, weight s + 0.5, gradient s + 0.75; margin 2, HYBRID");
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

/// What the largest amax, an infinity and zeros do to a window of three.
fn a_spike(recipe: DelayedScaling, rules: &str) -> Result<()> {
    println!("\na spike, an infinity and zeros under {rules}");
    let fc = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&fc, &Device::cpu())?;
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..recipe });
    for amax in [1.0, 100.0, f32::INFINITY, 0.0, 1.0, 1.0, 1.0, 1.0] {
        let mut cx = scaling.autocast(&recipe)?;
        let x8 = ops::quantize(&constant(amax)?, &cx.slot(&fc.input)?)?;
        cx.commit()?;
        let used = x8.as_fp8().map_or(Ok(1.0), |x8| x8.scale_inv().item())?.recip();
        let after = show(&scaling, Direction::Forward, fc.input.name())?;
        println!("  amax {amax:<5} quantized with scale {used:<7.2} then {after}");
    }
    Ok(())
}

/// A guard that goes without commit leaves nothing behind.
fn a_failed_scope() -> Result<()> {
    println!("\na scope that fails");
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
        println!("  {error}");
    }
    println!("  state as before: {}", scaling.state()? == before);
    Ok(())
}

/// Without a model: one tensor, updated by each use.
fn one_tensor_alone() -> Result<()> {
    println!("\na tensor alone, powers of two");
    let recipe = DelayedScaling { amax_history_len: 4, ..DelayedScaling::te_v0() };
    let mut quantizer = Quantizer::new(recipe, Direction::Forward, &Device::cpu())?;
    for amax in [3.0, 5.0, 0.7] {
        quantizer.quantize(&constant(amax)?)?;
        println!("  amax {amax}: scale {:<4} history {:?}", quantizer.scale()?, quantizer.amax_history()?);
    }
    Ok(())
}
