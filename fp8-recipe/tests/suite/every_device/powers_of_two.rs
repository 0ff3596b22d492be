//! Dequantizing with scales that are powers of two rounds nothing, and reports mark the slots of other recipes.

use super::support::{device, input, scaling, short, step};
use fp8_recipe::fp8_kernels::fp8_format::{Blocks, E4M3, E5M2};
use fp8_recipe::fp8_kernels::{DType, Encoding, Fp8Tensor, Tensor, ops};
use fp8_recipe::{
    BlockScaling, CurrentScaling, CustomRecipe, DelayedScaling, Mxfp8, QParams, Recipe, Result,
    ScalingFactorComputeAlgo, SlotUpdate,
};
use proptest::prelude::*;

/// The value of a code in f64, which holds it exactly.
fn value(code: u8, encoding: Encoding) -> f64 {
    match encoding {
        Encoding::E4M3 => E4M3::from_bits(code).to_f32().into(),
        Encoding::E5M2 => E5M2::from_bits(code).to_f32().into(),
        Encoding::E2M1 => encoding.to_f32(code).into(),
    }
}

/// Checks `value = code · scale_inv` without rounding: the product of both is exact in f64. Only beyond the largest f32 it
/// is infinite.
fn check(found: f32, code: u8, encoding: Encoding, scale_inv: f64) -> Result<(), String> {
    let exact = value(code, encoding) * scale_inv;
    let is_right = match exact {
        exact if exact.is_nan() => found.is_nan(),
        exact if exact.abs() > f64::from(f32::MAX) => {
            found.is_infinite() && found.is_sign_positive() == (exact > 0.0)
        }
        exact => f64::from(found) == exact && found.is_sign_negative() == exact.is_sign_negative(),
    };
    if is_right {
        Ok(())
    } else {
        Err(format!("{encoding:?} code {code:#x}, scale_inv {scale_inv:e}: {found:e}"))
    }
}

#[test]
fn dequantizing_by_a_power_of_two_is_exact_for_every_code_and_exponent() {
    let codes = Tensor::from_vec((0..=255u8).collect::<Vec<_>>(), [8, 32], &device()).unwrap();
    for encoding in [Encoding::E4M3, Encoding::E5M2] {
        let expect = |tensor: &Fp8Tensor, scale_inv: f64| {
            let found = tensor.dequantize(DType::F32).unwrap().to_vec::<f32>().unwrap();
            for (code, found) in (0..=255).zip(found) {
                check(found, code, encoding, scale_inv).unwrap();
            }
        };
        // One scale, or one for each row or block: 2⁻¹²⁶ … 2¹²⁷, so a factor of 2¹²⁶ … 2⁻¹²⁷, which is subnormal.
        for exponent in -126..=127 {
            let scale_inv = f32::powi(2.0, exponent).recip();
            assert_eq!(f64::from(scale_inv), f64::powi(2.0, -exponent));
            let factor = Tensor::scalar(scale_inv, &device()).unwrap();
            let tensor = Fp8Tensor::from_codes(codes.clone(), [8, 32], encoding, factor).unwrap();
            expect(&tensor, scale_inv.into());
            let factors = Tensor::from_vec(vec![scale_inv; 8], [8, 1], &device()).unwrap();
            let tensor =
                Fp8Tensor::from_blocks(codes.clone(), [8, 32], encoding, Blocks::Row, factors).unwrap();
            expect(&tensor, scale_inv.into());
        }
        // E8M0: factors of 2⁻¹²⁷ … 2¹²⁷.
        for bits in 0..=254u8 {
            let factors = Tensor::from_vec(vec![bits; 8], [8, 1], &device()).unwrap();
            let tensor =
                Fp8Tensor::from_blocks(codes.clone(), [8, 32], encoding, Blocks::Mx32, factors).unwrap();
            expect(&tensor, f64::powi(2.0, i32::from(bits) - 127));
        }
    }
}

fn power_of_two(margin: i32) -> Recipe {
    let scaling_factor_compute_algo = ScalingFactorComputeAlgo::PowerOfTwo;
    DelayedScaling { margin, scaling_factor_compute_algo, ..short() }.into()
}

/// Every recipe whose scales are powers of two.
fn rounded(margin: i32) -> [Recipe; 6] {
    [
        power_of_two(margin),
        CurrentScaling { quant: QParams::POWER_2.into(), ..Default::default() }.into(),
        CurrentScaling { quant: QParams::POWER_2.into(), ..CurrentScaling::rowwise() }.into(),
        CurrentScaling::rowwise_gw_hp().into(),
        BlockScaling::default().into(),
        Mxfp8::default().into(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the tensor: subnormal numbers, the largest, zeros.
    #[test]
    fn recipes_of_powers_of_two_dequantize_exactly(
        bits in prop::collection::vec(0..0x7F80_0000_u32, 1..5),
        margin in -100..=100,
    ) {
        let row: Vec<f32> = (0..32).map(|i| f32::from_bits(bits[i % bits.len()])).collect();
        let x = Tensor::from_vec(row, [1, 32], &device()).unwrap();
        for recipe in rounded(margin) {
            let mut scaling = scaling(&["fc"]);
            let mut cx = scaling.autocast(&recipe).unwrap();
            let operand = ops::quantize(&x, &cx.slot(&input("fc")).unwrap()).unwrap();
            cx.commit().unwrap();
            let x8 = operand.as_fp8().unwrap();
            let scale_inv = match x8.blocks() {
                Some(Blocks::Mx32) => {
                    f64::powi(2.0, i32::from(x8.scale_inv().to_vec::<u8>().unwrap()[0]) - 127)
                }
                _ => x8.scale_inv().to_vec::<f32>().unwrap()[0].into(),
            };
            prop_assert!(scale_inv.is_normal() && scale_inv.log2().fract() == 0.0, "{recipe}: {scale_inv:e}");
            prop_assert!((-127.0..=127.0).contains(&scale_inv.log2()), "{recipe}: {scale_inv:e}");
            let found = x8.dequantize(DType::F32).unwrap().to_vec::<f32>().unwrap();
            for (code, found) in x8.codes().unwrap().into_iter().zip(found) {
                let checked = check(found, code, x8.encoding(), scale_inv);
                prop_assert!(checked.is_ok(), "{recipe}: {checked:?}");
            }
        }
    }
}

#[derive(Debug)]
struct Own;

impl CustomRecipe for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn scale(&self, _: &SlotUpdate<'_>, _: &mut [f32]) -> f32 {
        1.0
    }
}

#[test]
fn reports_mark_slots_whose_scales_are_not_powers_of_two() {
    let marks = |recipe: &Recipe| {
        let mut scaling = scaling(&["fc"]);
        scaling.set_counting(true);
        step(&mut scaling, recipe, &input("fc"), &[3.5]).unwrap();
        let report = scaling.slot_reports().unwrap().swap_remove(0);
        assert_eq!(report.name, *input("fc").name());
        let is_marked = report.to_string().contains(", scales not powers of two");
        assert_eq!(is_marked, !report.has_powers_of_two, "{recipe}");
        is_marked
    };
    for recipe in rounded(0) {
        assert!(!marks(&recipe), "{recipe}");
    }
    let inputs_alone = CurrentScaling {
        quant: fp8_recipe::QParamsByRole { input: QParams::POWER_2, ..Default::default() },
        ..Default::default()
    };
    assert!(!marks(&inputs_alone.into()));
    for recipe in [
        short().into(),
        CurrentScaling::default().into(),
        CurrentScaling::rowwise().into(),
        BlockScaling::deepseek().into(),
        Recipe::custom(Own),
    ] {
        assert!(marks(&recipe), "{recipe}");
    }
}
