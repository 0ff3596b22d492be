//! Compares current and delayed scaling for tensors whose magnitude grows, and nests one recipe in the other.
//!
//! `cargo run -p fp8-recipe --example 04_current_scaling`
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use fp8_recipe::fp8_kernels::{DType, Device, Tensor, ops};
use fp8_recipe::{CurrentScaling, DelayedScaling, GemmSlots, QParams, Recipe, Result, Scaling};

fn main() -> Result<()> {
    println!("Relative RMS error of quantized tensors whose magnitude grows tenfold in each step:");
    let power_2 = CurrentScaling { quant: QParams::POWER_2.into(), ..Default::default() };
    compare(&[
        ("current", CurrentScaling::default().into()),
        ("current, powers of two", power_2.into()),
        ("delayed", DelayedScaling::default().into()),
        ("delayed, margin 4", DelayedScaling { margin: 4, ..Default::default() }.into()),
    ])?;
    nested()
}

/// Returns 4096 values with a bell-shaped distribution.
fn tensor(magnitude: f32) -> Result<Tensor> {
    let mut seed = 1_u32;
    let mut uniform = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let values = (0..4096).map(|_| magnitude * (uniform() + uniform() + uniform() + uniform())).collect();
    Ok(Tensor::from_vec(values, [64, 64], &Device::cpu())?)
}

fn compare(recipes: &[(&str, Recipe)]) -> Result<()> {
    for (name, recipe) in recipes {
        let fc = GemmSlots::new("fc");
        let mut scaling = Scaling::new(&fc, &Device::cpu())?;
        scaling.set_counting(true);
        print!("  {name:<23}");
        for exponent in -1..3 {
            let x = tensor(f32::powi(10.0, exponent))?;
            let mut cx = scaling.autocast(recipe)?;
            let x8 = ops::quantize(&x, &cx.slot(&fc.input)?)?;
            cx.commit()?;
            let (x, y) = (x.to_f32_vec()?, x8.dequantize(DType::F32)?.to_f32_vec()?);
            let error: f32 = x.iter().zip(&y).map(|(x, y)| (x - y) * (x - y)).sum();
            let norm: f32 = x.iter().map(|x| x * x).sum();
            print!("  {:.4}", (error / norm).sqrt());
        }
        let report = scaling.slot_reports()?.into_iter().find(|report| report.name == *fc.input.name());
        let (saturated, elements) = report.map_or((0, 0), |report| (report.saturated, report.elements));
        println!("   {saturated} of {elements} values saturated");
    }
    println!(
        "  Delayed scaling adapts to a new magnitude one step late; a margin leaves headroom for growth."
    );
    Ok(())
}

/// Uses current scaling for a model's head and delayed scaling for its body.
fn nested() -> Result<()> {
    let (body, head) = (GemmSlots::new("body"), GemmSlots::new("head"));
    let model = [&body, &head];
    struct Model<'a>([&'a GemmSlots; 2]);
    impl fp8_recipe::Slots for Model<'_> {
        fn slots(&self, f: &mut dyn FnMut(&fp8_recipe::SlotName)) {
            self.0.iter().for_each(|layer| layer.slots(f));
        }
    }
    let mut scaling = Scaling::new(&Model(model), &Device::cpu())?;
    let [delayed, current] = [DelayedScaling::default().into(), Recipe::from(CurrentScaling::default())];
    println!("\nScales of a body with delayed scaling and a head with current scaling, nested in it:");
    for magnitude in [1.0, 4.0, 0.5] {
        let x = tensor(magnitude)?;
        let mut cx = scaling.autocast(&delayed)?;
        let h = ops::quantize(&x, &cx.slot(&body.input)?)?;
        let y = ops::quantize(&x, &cx.nested(&current)?.slot(&head.input)?)?;
        cx.commit()?;
        let scale =
            |x: &fp8_recipe::fp8_kernels::Operand| x.as_fp8().map_or(Ok(1.0), |x| x.scale_inv().item());
        println!("  magnitude {magnitude:<4} body {:<10} head {}", scale(&h)?.recip(), scale(&y)?.recip());
    }
    Ok(())
}
