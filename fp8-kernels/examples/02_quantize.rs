//! Quantizes a small tensor to FP8, prints the error of each value, and compares an FP8 matrix product with the f32 one.
//!
//! `cargo run -p fp8-kernels --example 02_quantize`
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, REST, Result, Scale, ScalePolicy, ScaleRule, Slot, Tensor,
    UNSET, ops,
};

fn main() -> Result<()> {
    let device = Device::cpu();

    // 1. A slot says how to quantize one tensor: the format, the source of the scale, and where to record the amax. The
    //    scale of this one is unset, so the first tensor determines it: 448 / amax.
    let rule = ScaleRule::Delayed { fp8_max: Encoding::E4M3.max(), margin: 0, policy: ScalePolicy::Exact };
    let (scale, amax, counters) =
        (Cell::new(UNSET, &device)?, Cell::new(REST, &device)?, Counters::new(&device)?);
    let slot = Slot {
        encoding: Encoding::E4M3,
        scale: Scale::Cell { cell: &scale, first: &rule, keep: true },
        amax: Some(&amax),
        counters: Some(&counters),
        columnwise: false,
    };

    // 2. One call computes the codes and the dequantization factor, and records the amax of the unscaled values.
    let values = vec![0.01f32, -0.1, 0.25, 1.0 / 3.0, -1.0, 1.5, 2.999, -3.5];
    let x = Tensor::from_vec(values.clone(), [2, 4], &device)?;
    let quantized = ops::quantize(&x, &slot)?;
    let scale = scale.read()?.abs();
    println!(
        "amax = {}, scale = 448 / amax = {scale}, scale_inv = 1 / scale = {}",
        amax.read()?,
        scale.recip()
    );

    // 3. Each value, its code, and the value that the code represents.
    let codes = quantized.as_fp8().map(|q| q.codes()).transpose()?.unwrap_or_default();
    let back = quantized.dequantize(DType::F32)?.to_vec::<f32>()?;
    println!("\n   value    code   dequantized   relative error");
    for ((value, code), back) in values.iter().zip(&codes).zip(&back) {
        println!(
            "{value:>8.4}    {code:#04x}   {back:>11.4}   {:>12.2} %",
            100.0 * (back - value).abs() / value.abs()
        );
    }
    let counts = counters.read()?;
    println!(
        "\nOf {} values, {} saturated and {} underflowed to 0.",
        counts.elements, counts.saturated, counts.underflowed
    );

    // 4. A later tensor uses the same scale. Values that are too large for it saturate and are counted.
    ops::quantize(&Tensor::from_vec(vec![1.0f32, 14.0], [2], &device)?, &slot)?;
    let saturated = counters.read()?.saturated;
    println!("After a tensor with the value 14: amax = {}, {saturated} value saturated.", amax.read()?);

    // 5. The product of two E4M3 matrices, each with the scale of current scaling (448 / its own amax), summed in f32.
    let (m, n, k) = (64, 96, 256);
    let a = Tensor::from_vec(noise(m * k, 1), [m, k], &device)?;
    let b = Tensor::from_vec(noise(n * k, 2), [n, k], &device)?;
    let own = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: Scale::FromTensor(&own), ..Slot::off(Encoding::E4M3) };
    let y8 = ops::fprop(
        &ops::quantize(&a, &slot)?,
        &ops::quantize(&b, &slot)?,
        None,
        DType::F32,
        ops::Accumulation::Fast,
    )?;
    let y = ops::gemm(&a, &b, ops::Layout::Nt, None, DType::F32)?;
    println!(
        "\nRelative error of [{m}, {k}] · [{n}, {k}]ᵀ in FP8, compared with f32: {:.2} %",
        100.0 * distance(&y8, &y)?
    );
    Ok(())
}

/// Returns bell-shaped noise around 0: sums of four numbers of a linear congruential generator.
fn noise(len: usize, mut seed: u32) -> Vec<f32> {
    let mut uniform = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| uniform() + uniform() + uniform() + uniform()).collect()
}

/// Returns ‖a − b‖ / ‖b‖.
fn distance(a: &Tensor, b: &Tensor) -> Result<f64> {
    let (a, b) = (a.to_f32_vec()?, b.to_f32_vec()?);
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    Ok(norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()))
}
