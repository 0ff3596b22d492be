//! The codec by example: one value, its neighbours, the two answers to an overflow, a tensor with a scale.
//!
//! `cargo run -p fp8-format --example 01_codec`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_format::{E4M3, E5M2, Fp8, Result, slice};

fn main() -> Result<()> {
    println!("value         E4M3               E5M2");
    for x in [1.0, 0.3, 3.3, 0.001, 448.0, 464.0, 465.0, 1e6, f32::NAN] {
        let (a, b) = (E4M3::from_f32(x), E5M2::from_f32(x));
        println!("{x:<12}  {:#04x} = {:<10}  {:#04x} = {:<10}", a, a, b, b);
    }

    let (a, b) = (E4M3::from_f32_saturating(1e6), E5M2::from_f32_saturating(1e6));
    println!("\nsaturating, 1e6 is {a} in E4M3 and {b} in E5M2");

    let ups = (0..1000_u32).filter(|i| E4M3::from_f32_stochastic(3.3, i * 4_294_967).to_f32() == 3.5).count();
    println!("stochastic, 3.3 becomes 3.5 in {ups} of 1000 draws and 3.25 in the others");

    let x: Vec<f32> = (0..1000_i16).map(|i| (f32::from(i) * 0.37).sin() * 0.02).collect();
    show_tensor::<E4M3>(&x)?;
    show_tensor::<E5M2>(&x)
}

/// Quantizes with the scale that puts the largest magnitude on the largest code.
fn show_tensor<T: Fp8>(x: &[f32]) -> Result<()> {
    let scale = T::MAX / slice::amax(x);
    let mut codes = vec![T::default(); x.len()];
    let amax = slice::quantize(x, scale, &mut codes)?;

    let mut back = vec![0.0_f32; x.len()];
    slice::dequantize(&codes, 1.0 / scale, &mut back)?;
    let square = |it: &mut dyn Iterator<Item = f32>| it.map(|v| f64::from(v * v)).sum::<f64>();
    let error = square(&mut x.iter().zip(&back).map(|(x, y)| x - y)) / square(&mut x.iter().copied());
    println!(
        "{}: 1000 values up to {amax}, scale {scale}: relative RMS error {:.4}, {} bytes instead of {}",
        T::ENCODING,
        error.sqrt(),
        codes.len(),
        size_of_val(x)
    );
    Ok(())
}
