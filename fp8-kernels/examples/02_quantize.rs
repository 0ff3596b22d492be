//! Quantizes a tensor to FP8, shows what became of each value, then multiplies two matrices in FP8 and in f32.
//!
//! `cargo run -p fp8-kernels --example 02_quantize`
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, REST, Result, Scale, ScalePolicy, ScaleRule, Slot, Tensor,
    UNSET, ops,
};

fn main() -> Result<()> {
    let device = Device::cpu();

    // 1. A slot knows the format, where the scale comes from and where the amax goes. This one has no scale yet: it takes
    //    the tensor's own, 448 / amax.
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

    // 2. One call: codes, the amax of the values before scaling, and the factor back.
    let values = vec![0.01f32, -0.1, 0.25, 1.0 / 3.0, -1.0, 1.5, 2.999, -3.5];
    let x = Tensor::from_vec(values.clone(), [2, 4], &device)?;
    let quantized = ops::quantize(&x, &slot)?;
    let scale = scale.read()?.abs();
    println!("amax {}   scale {scale}   1/scale {}", amax.read()?, scale.recip());

    // 3. What became of the values.
    let codes = quantized.as_fp8().map(|q| q.codes()).transpose()?.unwrap_or_default();
    let back = quantized.dequantize(DType::F32)?.to_vec::<f32>()?;
    println!("\n   value    code       back   relative error");
    for ((value, code), back) in values.iter().zip(&codes).zip(&back) {
        println!(
            "{value:>8.4}    {code:#04x}   {back:>8.4}   {:>8.2} %",
            100.0 * (back - value).abs() / value.abs()
        );
    }
    let counts = counters.read()?;
    println!("\nsaturated {}, became zero {}, of {}", counts.saturated, counts.underflowed, counts.elements);

    // 4. A later tensor under the same scale: what is too large for it saturates, and is counted.
    ops::quantize(&Tensor::from_vec(vec![1.0f32, 14.0], [2], &device)?, &slot)?;
    println!("after a value of 14: amax {}, saturated {}", amax.read()?, counters.read()?.saturated);

    // 5. A product of two matrices: E4M3 × E4M3, summed in f32.
    let (m, n, k) = (64, 96, 256);
    let a = Tensor::from_vec(noise(m * k, 1), [m, k], &device)?;
    let b = Tensor::from_vec(noise(n * k, 2), [n, k], &device)?;
    let own = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: Scale::FromTensor(&own), ..Slot::off(Encoding::E4M3) };
    let y8 = ops::fprop(&ops::quantize(&a, &slot)?, &ops::quantize(&b, &slot)?, None, DType::F32)?;
    let y = ops::gemm(&a, &b, ops::Layout::Nt, None, DType::F32)?;
    println!("\n[{m}, {k}] · [{n}, {k}]ᵀ in FP8 against f32: relative error {:.4}", distance(&y8, &y)?);
    Ok(())
}

/// Sums of four numbers of a linear congruential generator: a bell around 0.
fn noise(len: usize, mut seed: u32) -> Vec<f32> {
    let mut uniform = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| uniform() + uniform() + uniform() + uniform()).collect()
}

/// ‖a − b‖ / ‖b‖.
fn distance(a: &Tensor, b: &Tensor) -> Result<f64> {
    let (a, b) = (a.to_f32_vec()?, b.to_f32_vec()?);
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    Ok(norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()))
}
