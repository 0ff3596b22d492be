//! The sweep over `exp`, `tanh` and `sigmoid`: the error against f64 in units of the last place, worst case and where it is.

use super::count::for_each_chunk;
use std::error::Error;
use std::sync::Mutex;
use std::time::Instant;

/// The bound that `exp` and `tanh` promise.
const MAX_ULP: f64 = 2.0;
/// The bound of `sigmoid`, whose divisor is rounded too.
const MAX_SIGMOID_ULP: f64 = 2.5;

pub(super) fn sweep_all(stride: u32) -> Result<(), Box<dyn Error>> {
    let exp = sweep("exp", stride, fp8_kernels::math::exp_slice, f64::exp);
    let tanh = sweep("tanh", stride, fp8_kernels::math::tanh_slice, f64::tanh);
    let sigmoid = sweep("sigmoid", stride, fp8_kernels::math::sigmoid_slice, sigmoid_of);
    for (worst, most) in [(&exp, MAX_ULP), (&tanh, MAX_ULP), (&sigmoid, MAX_SIGMOID_ULP)] {
        if worst.ulp > most {
            return Err(format!(
                "exhaustive --math: {} is off by {:.3} ulp at {:e} ({:#010x}): at most {most} are allowed",
                worst.name,
                worst.ulp,
                worst.at,
                worst.at.to_bits()
            )
            .into());
        }
    }
    Ok(())
}

/// σ(x), as it is promised: a result below 2⁻¹²⁸ is 0.
fn sigmoid_of(x: f64) -> f64 {
    let exact = 1.0 / (1.0 + (-x).exp());
    if exact < 2f64.powi(-128) { 0.0 } else { exact }
}

/// The largest error found, and the input where it occurs.
#[derive(Clone, Copy, Debug)]
struct Worst {
    name: &'static str,
    ulp: f64,
    at: f32,
}

/// Tries `f` on every `stride`-th f32 and prints one line.
fn sweep(name: &'static str, stride: u32, f: fn(&[f32], &mut [f32]), reference: fn(f64) -> f64) -> Worst {
    let start = Instant::now();
    let worst = Mutex::new((Worst { name, ulp: 0.0, at: 0.0 }, 0_u64));
    for_each_chunk(stride, |patterns| {
        let mut here = Worst { name, ulp: 0.0, at: 0.0 };
        let inputs: Vec<f32> = patterns.iter().map(|&bits| f32::from_bits(bits)).collect();
        let mut outputs = vec![0.0; inputs.len()];
        f(&inputs, &mut outputs);
        for (&x, &y) in inputs.iter().zip(&outputs) {
            let ulp = error_in_ulp(y, reference(f64::from(x)));
            if ulp > here.ulp {
                here = Worst { name, ulp, at: x };
            }
        }
        let mut worst = worst.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        worst.1 += patterns.len() as u64;
        if here.ulp > worst.0.ulp {
            worst.0 = here;
        }
    });
    let (worst, count) = *worst.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (ulp, at, bits) = (worst.ulp, worst.at, worst.at.to_bits());
    println!("{name}: {count} inputs, {:.1} s, worst {ulp:.4} ulp at {at:e} ({bits:#010x})", seconds(start));
    worst
}

fn seconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64()
}

/// Distance of `got` from the exact value, in ulps of f32 at that value. NaN where NaN belongs is no error, anything
/// else there is an infinite one; an infinity counts as 2¹²⁸, the value that would follow `f32::MAX`.
fn error_in_ulp(got: f32, exact: f64) -> f64 {
    if exact.is_nan() || got.is_nan() {
        return if exact.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    let beyond = 2_f64.powi(128);
    let finite = |x: f64| x.clamp(-beyond, beyond);
    let (got, exact) = (finite(f64::from(got)), finite(exact));
    let magnitude = exact.abs().max(f64::from(f32::MIN_POSITIVE)).min(f64::from(f32::MAX));
    let exponent = (magnitude.to_bits() >> 52) as i32 - 1023;
    (got - exact).abs() / 2_f64.powi(exponent - 23)
}

#[cfg(test)]
mod tests {
    use super::error_in_ulp;

    #[test]
    fn ulps() {
        assert_eq!(error_in_ulp(1.0, 1.0), 0.0);
        assert_eq!(error_in_ulp(1.0 + f32::EPSILON, 1.0), 1.0);
        assert_eq!(error_in_ulp(f32::from_bits(3), 0.0), 3.0);
        assert_eq!(error_in_ulp(f32::INFINITY, 1e300), 0.0);
        assert_eq!(error_in_ulp(f32::MAX, f64::INFINITY), 1.0);
        assert_eq!(error_in_ulp(f32::NAN, f64::NAN), 0.0);
        assert_eq!(error_in_ulp(0.0, f64::NAN), f64::INFINITY);
        assert_eq!(error_in_ulp(f32::NAN, 1.0), f64::INFINITY);
    }
}
