//! Stochastic rounding to NVFP4 over ten million draws a copy: how often it rounds up, how far the sums are, and that no two copies draw
//! alike.
//!
//! The expected values are those of the rule in f64: of a step between two codes, a value passes ⌊256 · fraction⌋ of 256 parts.

#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use fp8_format::{E2M1, E4M3};
use fp8_kernels::ops::DropoutKey;
use fp8_kernels::{Device, DropoutDraw, Encoding, Nvfp4Rule, Scale, Slot, StochasticRounding, Tensor, ops};

/// Multiples of 16, so that every block is whole.
const SHAPE: [usize; 2] = [2512, 4000];

/// The magnitudes of codes.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The number of standard deviations that a sum may be off.
const DEVIATIONS: f64 = 4.0;

/// Sums over draws, and those that the rule expects. All are in steps between two codes.
#[derive(Clone, Copy, Default)]
struct Sums {
    count: f64,
    /// The sum of how far magnitudes are from those before they were rounded.
    errors: f64,
    /// The sum of how far magnitudes are from what is expected of them.
    residuals: f64,
    squares: f64,
    /// The expected value of `squares`, and its variance.
    variance: f64,
    variance_of_squares: f64,
}

impl Sums {
    /// Adds a magnitude that is this part of a step above a code, and was rounded up or not. Returns the residual and its variance.
    fn add(&mut self, fraction: f64, is_up: bool) -> [f64; 2] {
        let chance = (256.0 * fraction).floor() / 256.0;
        let up = if is_up { 1.0 } else { 0.0 };
        let (residual, variance) = (up - chance, chance * (1.0 - chance));
        self.count += 1.0;
        self.errors += up - fraction;
        self.residuals += residual;
        self.squares += residual * residual;
        self.variance += variance;
        self.variance_of_squares += variance * (1.0 - 2.0 * chance).powi(2);
        [residual, variance]
    }
}

/// The code below a magnitude, and the part of the step to the next one that it has passed.
fn place(magnitude: f64) -> (usize, f64) {
    let low = MAGNITUDES.iter().rposition(|code| *code <= magnitude).unwrap();
    (low, (magnitude - MAGNITUDES[low]) / (MAGNITUDES[low + 1] - MAGNITUDES[low]))
}

/// Uniform numbers below 6 in magnitude, and a 6 in each block of 16 of a row and of a column: all factors of blocks are 1.
fn values() -> Vec<f32> {
    let mut state = 1_u64;
    let mut value = |at: usize| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        let uniform = (state >> 40) as f32 / (1_u32 << 24) as f32;
        if (at / SHAPE[1] + at % SHAPE[1]).is_multiple_of(16) { 6.0 } else { 12.0 * uniform - 6.0 }
    };
    (0..SHAPE[0] * SHAPE[1]).map(&mut value).map(|v| if v == -6.0 { 0.0 } else { v }).collect()
}

#[test]
fn ten_million_draws_have_the_mean_and_the_variance_of_the_rule() {
    let (device, [rows, cols], values) = (Device::cpu(), SHAPE, values());
    let x = Tensor::from_vec(values.clone(), SHAPE, &device).unwrap();
    let draw = DropoutDraw::from(DropoutKey { seed: 2026, offset: 1 << 50 });
    let rule = Nvfp4Rule { random: Some(StochasticRounding::new(&draw)), ..Nvfp4Rule::default() };
    let slot = Slot { scale: Scale::Nvfp4(rule), columnwise: true, ..Slot::off(Encoding::E2M1) };
    let quantized = ops::quantize(&x, &slot).unwrap();
    let quantized = quantized.as_fp8().unwrap();
    let bytes = |tensor: Option<&Tensor>| tensor.unwrap().to_vec::<u8>().unwrap();
    for scales in [Some(quantized.scale_inv()), quantized.columnwise_scale_inv()] {
        assert!(bytes(scales).iter().all(|scale| E4M3::from_bits(*scale).to_f32() == 448.0));
    }
    let [rowwise, columnwise] = [quantized.rowwise(), quantized.columnwise()].map(bytes);
    let code = |bytes: &[u8], at: usize| E2M1::unpack(bytes[at / 2])[at % 2];

    // Both copies, and each of the 16 bytes of a block.
    let (mut all, mut parts) = ([Sums::default(); 2], [[Sums::default(); 16]; 2]);
    let [mut products, mut variance_of_products] = [0.0; 2];
    for (at, v) in values.iter().enumerate().filter(|(_, v)| v.abs() < 6.0) {
        let (row, col) = (at / cols, at % cols);
        let codes = [code(&rowwise, at), code(&columnwise, col * rows + row)];
        let (low, fraction) = place(f64::from(v.abs()));
        let mut drawn = [[0.0; 2]; 2];
        for (which, position) in [(0, col % 16), (1, row % 16)] {
            let bits = codes[which].to_bits();
            let magnitude = usize::from(bits & 7);
            assert!(magnitude == low || magnitude == low + 1, "{v} became {}", codes[which].to_f32());
            assert_eq!(bits >> 3 == 1, v.is_sign_negative(), "{v}");
            assert!(magnitude == low || fraction >= 1.0 / 256.0, "{v} is never rounded up");
            drawn[which] = all[which].add(fraction, magnitude > low);
            parts[which][position].add(fraction, magnitude > low);
        }
        products += drawn[0][0] * drawn[1][0];
        variance_of_products += drawn[0][1] * drawn[1][1];
    }
    for (sums, parts) in all.iter().zip(&parts) {
        assert!(sums.count > 9e6);
        assert!(sums.residuals.abs() <= DEVIATIONS * sums.variance.sqrt(), "{}", sums.residuals);
        let squares = sums.squares - sums.variance;
        assert!(squares.abs() <= DEVIATIONS * sums.variance_of_squares.sqrt(), "{squares}");
        // What the floor takes away is half of a 256th of a step. Its own spread is that of a uniform number.
        let deviation = (sums.variance + sums.count / (12.0 * 256.0 * 256.0)).sqrt() / sums.count;
        let error = sums.errors / sums.count;
        assert!((error + 1.0 / 512.0).abs() <= DEVIATIONS * deviation, "{error} of a step");
        assert!(DEVIATIONS * deviation < 1.0 / 1024.0, "fewer draws would not show it");
        // 32 sums: one of them may be farther off than the sum of all.
        for (position, part) in parts.iter().enumerate() {
            let bound = (DEVIATIONS + 1.0) * part.variance.sqrt();
            assert!(part.residuals.abs() <= bound, "byte {position}: {}", part.residuals);
        }
    }
    assert!(products.abs() <= DEVIATIONS * variance_of_products.sqrt(), "both copies draw alike: {products}");
}
