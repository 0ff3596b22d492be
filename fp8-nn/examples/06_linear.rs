//! One Linear in FP8: its scales step by step, its error against high precision, what overriding a GEMM does, and what a
//! scope that failed leaves behind.
//!
//! `cargo run --release -p fp8-nn --example 06_linear`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};

const SIZES: [usize; 3] = [128, 96, 256]; // rows, out, in

fn main() -> Result<()> {
    let [rows, out_features, in_features] = SIZES;
    let (device, mut rng) = (Device::cpu(), StdRng::seed_from_u64(1));
    let options = LinearOptions { in_features, out_features, ..Default::default() };
    let mut fc = Linear::new("fc", options, &device, &mut rng)?;
    println!("fc: [{rows}, {in_features}] · [{out_features}, {in_features}]ᵀ");

    // The first scale comes from the tensor itself, later ones from the amaxes of the steps before.
    let mut scaling = Scaling::new(&fc, &device)?;
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    println!("\nstep   amax of x   scale for the next x   amax of dy   scale for the next dy");
    for step in 0..5 {
        let grow = (step + 1) as f32;
        let (x, dy) = (
            noise([rows, in_features], grow, &mut rng)?,
            noise([rows, out_features], 0.01 / grow, &mut rng)?,
        );
        let (_y, saved) = scaling.in_autocast(&recipe, |cx| fc.forward(cx, &x))?;
        scaling.in_backward(|cx| fc.backward(cx, saved, &dy))?;
        let reports = scaling.slot_reports()?;
        let slot = |name: &str| reports.iter().find(|slot| *slot.name == *name);
        if let (Some(x), Some(dy)) = (slot("fc.input"), slot("fc.grad_output")) {
            println!("{step:4}   {:9.3}   {:20.2}   {:10.5}   {:21.0}", x.amax, x.scale, dy.amax, dy.scale);
        }
    }

    // Each GEMM can stay in high precision.
    let (x, dy) = (noise([rows, in_features], 1.0, &mut rng)?, noise([rows, out_features], 1.0, &mut rng)?);
    let exact = step(&mut fc, &recipe, false, &x, &dy)?;
    println!("\noverride_linear_precision (fprop, dgrad, wgrad)   error of y, dx, dw");
    for high in [(false, false, false), (true, false, false), (false, true, false), (false, false, true)] {
        let recipe = DelayedScaling { override_linear_precision: high, ..Default::default() }.into();
        let fp8 = step(&mut fc, &recipe, true, &x, &dy)?;
        let errors: Vec<String> =
            exact.iter().zip(&fp8).map(|(e, a)| format!("{:5.2} %", 100.0 * error(e, a))).collect();
        println!("{:<49} {}", format!("{high:?}"), errors.join("  "));
    }

    // A scope left by an error has changed nothing.
    let before = scaling.state()?;
    let failed = scaling.in_autocast(&recipe, |cx| {
        fc.forward(cx, &noise([rows, in_features], 1e6, &mut rng)?)?;
        fc.forward(cx, &noise([rows, in_features + 1], 1.0, &mut rng)?)
    });
    if let Err(error) = failed {
        println!("\na failed scope: {error}");
    }
    println!("the scaling state is as before: {}", before == scaling.state()?);
    Ok(())
}

/// y, dx and dw of a first step.
fn step(fc: &mut Linear, recipe: &Recipe, enabled: bool, x: &Tensor, dy: &Tensor) -> Result<[Vec<f32>; 3]> {
    let mut scaling = Scaling::new(fc, x.device())?;
    zero_grad(fc)?;
    let mut cx = scaling.scope(recipe, &AutocastOptions { enabled, ..Default::default() })?;
    let (y, saved) = fc.forward(&mut cx, x)?;
    cx.commit()?;
    let dx = scaling.in_backward(|cx| fc.backward(cx, saved, dy))?;
    Ok([y.to_f32_vec()?, dx.to_f32_vec()?, fc.weight().main_grad().to_f32_vec()?])
}

/// Relative root mean square.
fn error(exact: &[f32], approximate: &[f32]) -> f32 {
    let difference: f32 = exact.iter().zip(approximate).map(|(e, a)| (e - a) * (e - a)).sum();
    (difference / exact.iter().map(|e| e * e).sum::<f32>()).sqrt()
}

fn noise(shape: [usize; 2], size: f32, rng: &mut StdRng) -> Result<Tensor> {
    let values =
        (0..shape[0] * shape[1]).map(|_| size * (0..4).map(|_| rng.random_range(-1.0..1.0)).sum::<f32>());
    Ok(Tensor::from_vec(values.collect(), shape, &Device::cpu())?)
}
