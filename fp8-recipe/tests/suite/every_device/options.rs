//! Options of recipes: defaults, ranges, names.

use super::support::{device, forward, grad, input, message, scaling, short};
use fp8_recipe::fp8_kernels::DType;
use fp8_recipe::{
    AmaxComputeAlgo, AutocastOptions, BlockScaling, CurrentScaling, CustomAmax, DelayedScaling, Direction,
    Encoding, Format, Fp8Gemms, QParams, QParamsByRole, Quantizer, Recipe, ScalingFactorComputeAlgo,
    SlotRole,
};
use std::sync::Arc;

#[test]
fn defaults() {
    let recipe = DelayedScaling::default();
    assert_eq!((recipe.margin, recipe.interval, recipe.fp8_format), (0, 1, Format::Hybrid));
    assert_eq!((recipe.amax_history_len, recipe.reduce_amax), (1024, true));
    assert_eq!(recipe.override_linear_precision, (false, false, false));
    assert!(matches!(recipe.amax_compute_algo, AmaxComputeAlgo::Max));
    assert!(matches!(recipe.scaling_factor_compute_algo, ScalingFactorComputeAlgo::Exact));
    assert!(recipe.calibrate_first_step && !recipe.record_non_finite && !recipe.zero_is_skipped);

    let current = CurrentScaling::default();
    assert_eq!(current.fp8_format, Format::Hybrid);
    assert_eq!(current.quant, QParamsByRole::default());
    assert_eq!(current.quant.weight, QParams { power_2_scale: false, amax_epsilon: 0.0 });
    assert_eq!(current.use_split_accumulator, (false, true, true));
    let block = BlockScaling::default();
    assert_eq!(block.quant, QParams { power_2_scale: true, amax_epsilon: 0.0 }.into());
    assert_eq!(block.use_split_accumulator, (true, true, true));
    assert_eq!(current.override_linear_precision, (false, false, false));

    let options = AutocastOptions::default();
    assert!(options.enabled && !options.calibrating);
    assert!(options.amax_reduction_group.is_none() && options.compute_dtype.is_none());
}

#[test]
fn defaults_of_the_old_api() {
    let recipe = DelayedScaling::te_v0();
    assert_eq!((recipe.margin, recipe.interval, recipe.fp8_format), (0, 1, Format::E4M3));
    assert_eq!((recipe.amax_history_len, recipe.reduce_amax), (1, true));
    assert_eq!(recipe.override_linear_precision, (false, false, false));
    assert!(matches!(recipe.amax_compute_algo, AmaxComputeAlgo::MostRecent));
    assert!(matches!(recipe.scaling_factor_compute_algo, ScalingFactorComputeAlgo::PowerOfTwo));
    assert!(!recipe.calibrate_first_step && recipe.record_non_finite && recipe.zero_is_skipped);
}

#[test]
fn encodings() {
    for (format, forward, backward) in [
        (Format::Hybrid, Encoding::E4M3, Encoding::E5M2),
        (Format::E4M3, Encoding::E4M3, Encoding::E4M3),
        (Format::E5M2, Encoding::E5M2, Encoding::E5M2),
    ] {
        assert_eq!(Direction::ALL.map(|direction| format.encoding(direction)), [forward, backward]);
        assert_eq!(format.to_string().parse::<Format>().unwrap(), format);
        assert_eq!(format.name().to_lowercase().parse::<Format>().unwrap(), format);
    }
    assert_eq!(message("e3m4".parse::<Format>()), "recipe: fp8_format = e3m4: expected hybrid or e4m3");
}

#[test]
fn pure_e5m2_is_refused_with_the_reason() {
    let reason = "fp8_format = E5M2: no FP8 GEMM multiplies E5M2 by E5M2, and weights and activations need E4M3's \
                  precision; use HYBRID (E5M2 for gradients only) or E4M3";
    let delayed = DelayedScaling { fp8_format: Format::E5M2, ..Default::default() };
    let current = CurrentScaling { fp8_format: Format::E5M2, ..Default::default() };
    let quantizer = Quantizer::new(delayed.clone(), Direction::Forward, &device());
    assert_eq!(message(quantizer), format!("DelayedScaling: {reason}"));
    let mut scaling = scaling(&["fc"]);
    assert_eq!(message(scaling.autocast(&delayed.into())), format!("DelayedScaling: {reason}"));
    assert_eq!(message(scaling.eval(&current.into())), format!("CurrentScaling: {reason}"));
}

#[test]
fn every_option_out_of_range() {
    let delayed = |recipe: DelayedScaling| message(Recipe::from(recipe).validate());
    for (margin, valid) in [(-101, false), (-100, true), (100, true), (101, false), (i32::MIN, false)] {
        assert_eq!(Recipe::from(DelayedScaling { margin, ..short() }).validate().is_ok(), valid, "{margin}");
    }
    assert_eq!(
        delayed(DelayedScaling { margin: 101, ..short() }),
        "DelayedScaling: margin = 101: expected -100 to 100, in powers of two"
    );
    for amax_history_len in [0, (1 << 20) + 1, usize::MAX] {
        assert_eq!(
            delayed(DelayedScaling { amax_history_len, ..short() }),
            format!("DelayedScaling: amax_history_len = {amax_history_len}: expected 1 to 1048576 rows")
        );
    }
    assert_eq!(
        delayed(DelayedScaling { interval: 0, ..short() }),
        "DelayedScaling: interval = 0: expected at least 1 (recompute at every update)"
    );
    for amax_epsilon in [-1.0, f32::NAN, f32::INFINITY] {
        let weight = QParams { amax_epsilon, ..Default::default() };
        let quant = QParamsByRole { weight, ..Default::default() };
        let recipe = Recipe::from(CurrentScaling { quant, ..Default::default() });
        assert_eq!(
            message(recipe.validate()),
            format!("CurrentScaling: quant.weight.amax_epsilon = {amax_epsilon}: expected finite and ≥ 0")
        );
    }
    let options = AutocastOptions { compute_dtype: Some(DType::U8), ..Default::default() };
    let mut scaling = scaling(&["fc"]);
    let expected = "autocast: compute_dtype = u8: expected f32, bf16 or f16";
    assert_eq!(message(scaling.scope(&short().into(), &options)), expected);
    let mut cx = scaling.autocast(&short().into()).unwrap();
    assert_eq!(message(cx.with_compute_dtype(DType::U8)), expected);
    assert_eq!(
        message(cx.nested(&DelayedScaling { interval: 0, ..short() }.into())).split(':').next(),
        Some("DelayedScaling")
    );
}

#[test]
fn recipes_by_name() {
    for name in Recipe::NAMES {
        Recipe::from_name(name).unwrap().validate().unwrap();
    }
    let te_v0 = Recipe::from_name("te-v0").unwrap();
    assert_eq!(te_v0.options::<DelayedScaling>().unwrap().amax_history_len, 1);
    assert!(te_v0.options::<CurrentScaling>().is_none());
    assert!(Recipe::from_name("current").unwrap().options::<CurrentScaling>().is_some());
    let error = message(Recipe::from_name("nonsense"));
    assert!(error.starts_with("recipe: name = nonsense: known recipes are delayed, current"), "{error}");
}

#[test]
fn override_linear_precision_in_all_eight_combinations() {
    let mut scaling = scaling(&["fc"]);
    for bits in 0..8_u8 {
        let high = [0, 1, 2].map(|gemm| bits >> gemm & 1 == 1);
        let override_linear_precision = high.into();
        let expected = Fp8Gemms { fprop: !high[0], dgrad: !high[1], wgrad: !high[2] };
        let recipes: [Recipe; 2] = [
            DelayedScaling { override_linear_precision, ..short() }.into(),
            CurrentScaling { override_linear_precision, ..Default::default() }.into(),
        ];
        for recipe in recipes {
            let mut cx = scaling.autocast(&recipe).unwrap();
            assert_eq!(cx.fp8_gemms(&input("fc")), expected);
            let (_, origin) = forward(&mut cx, &input("fc"), &[1.0]);
            cx.commit().unwrap();
            let cx = scaling.backward().unwrap();
            assert_eq!(cx.fp8_gemms(&origin), expected);
            cx.commit().unwrap();
            assert_eq!(scaling.eval(&recipe).unwrap().fp8_gemms(&input("fc")), expected);
        }
    }
}

#[test]
fn each_recipe_has_arenas_of_its_own() {
    let named =
        |name: &str| AmaxComputeAlgo::Custom(CustomAmax { name: name.into(), function: Arc::new(|_| 1.0) });
    let recipes = [
        short(),
        DelayedScaling { margin: 1, ..short() },
        DelayedScaling { interval: 2, ..short() },
        DelayedScaling { fp8_format: Format::E4M3, ..short() },
        DelayedScaling { amax_history_len: 5, ..short() },
        DelayedScaling { amax_compute_algo: AmaxComputeAlgo::MostRecent, ..short() },
        DelayedScaling { amax_compute_algo: named("max"), ..short() }, // not the built-in of that name
        DelayedScaling { amax_compute_algo: named("mine"), ..short() },
        DelayedScaling { scaling_factor_compute_algo: ScalingFactorComputeAlgo::PowerOfTwo, ..short() },
        DelayedScaling { override_linear_precision: (false, false, true), ..short() },
        DelayedScaling { reduce_amax: false, ..short() },
        DelayedScaling { calibrate_first_step: false, ..short() },
        DelayedScaling { record_non_finite: true, ..short() },
        DelayedScaling { zero_is_skipped: true, ..short() },
    ];
    let mut scaling = scaling(&["fc"]);
    for _ in 0..2 {
        for recipe in &recipes {
            scaling.autocast(&recipe.clone().into()).unwrap().commit().unwrap();
        }
    }
    let updates = super::support::updates(&scaling, Direction::Forward);
    assert_eq!(updates, vec![2; recipes.len()]);
}

#[test]
fn names_of_slots() {
    let slot = grad("blocks.3.fc1");
    assert_eq!((&**slot.layer(), &**slot.name()), ("blocks.3.fc1", "blocks.3.fc1.grad_output"));
    assert_eq!((slot.role(), slot.direction()), (SlotRole::GradOutput, Direction::Backward));
    let scaling = scaling(&["b", "a"]);
    let names =
        |direction| scaling.slot_names(direction).iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let forward = ["a.input", "a.weight", "b.input", "b.weight"];
    assert_eq!(names(Direction::Forward), forward);
    assert_eq!(names(Direction::Backward), ["a.grad_output", "b.grad_output"]);
}
