//! The scale update of delayed scaling, by numbers.

use super::support::{
    backward, forward, grad, input, scale_of, scaling, short, slot_state, step, updates, weight,
};
use fp8_recipe::{AmaxComputeAlgo, DelayedScaling, Direction, Format, Recipe, ScalingFactorComputeAlgo};

/// Constant tensors that grow by 1 a step, margin 2: input s + 0.25, weight s + 0.5, gradient s + 0.75.
#[test]
fn a_worked_run() {
    for amax_history_len in [5, 1024] {
        let recipe = DelayedScaling { margin: 2, amax_history_len, ..Default::default() }.into();
        let mut scaling = scaling(&["fc"]);
        let mut scales = Vec::new();
        for s in 0..4_u8 {
            let [x, w, dy] = [0.25, 0.5, 0.75].map(|offset| [f32::from(s) + offset; 16]);
            let mut cx = scaling.autocast(&recipe).unwrap();
            let (x8, origin) = forward(&mut cx, &input("fc"), &x);
            forward(&mut cx, &weight("fc"), &w);
            cx.commit().unwrap();
            let mut cx = scaling.backward().unwrap();
            let dy8 = backward(&mut cx, &origin, &grad("fc"), &dy);
            cx.commit().unwrap();
            // The first tensor calibrates itself; each later one is quantized with the scale of the one before.
            let previous = f32::from(s.saturating_sub(1));
            assert_eq!(x8.as_fp8().unwrap().scale_inv().item().unwrap(), (112.0 / (previous + 0.25)).recip());
            assert_eq!(
                dy8.as_fp8().unwrap().scale_inv().item().unwrap(),
                (14336.0 / (previous + 0.75)).recip()
            );
            scales.push([input("fc"), weight("fc"), grad("fc")].map(|slot| slot_state(&scaling, &slot).0));
        }
        let expected = [
            [448.0, 224.0, 19_114.666],
            [89.6, 74.666_664, 8192.0],
            [49.777_78, 44.8, 5_213.091],
            [34.461_54, 32.0, 3_822.933_3],
        ];
        assert_eq!(scales, expected);
        let (_, window) = slot_state(&scaling, &input("fc"));
        assert_eq!(window.len(), amax_history_len - 1);
        assert_eq!(window[window.len() - 4..], [0.25, 1.25, 2.25, 3.25]);
        let (_, window) = slot_state(&scaling, &grad("fc"));
        assert_eq!(window[window.len() - 4..], [0.75, 1.75, 2.75, 3.75]);
    }
}

#[test]
fn a_history_of_one_row() {
    for calibrate_first_step in [false, true] {
        for amax_compute_algo in [AmaxComputeAlgo::Max, AmaxComputeAlgo::MostRecent] {
            let recipe =
                DelayedScaling { amax_history_len: 1, amax_compute_algo, ..DelayedScaling::default() };
            let recipe: Recipe = DelayedScaling { calibrate_first_step, ..recipe.with_te_rules() }.into();
            for (amax, scale) in [
                (0.0, 1.0),
                (f32::INFINITY, 1.0),
                (f32::NAN, 1.0),
                (448.0 / f32::MAX / 2.0, f32::MAX),
                (3.5, 128.0),
            ] {
                let mut scaling = scaling(&["fc"]);
                let mut cx = scaling.autocast(&recipe).unwrap();
                cx.slot(&input("fc")).unwrap().amax.unwrap().merge_max(amax).unwrap();
                cx.commit().unwrap();
                let (stored, window) = slot_state(&scaling, &input("fc"));
                assert_eq!((stored.abs(), window.len()), (scale, 0), "amax {amax}");
                let calibrated = !calibrate_first_step || amax.is_finite() && amax > 0.0;
                assert_eq!(stored > 0.0, calibrated, "amax {amax}");
            }
        }
    }
}

#[test]
fn max_covers_the_row_that_drops_out() {
    let (mut scaling, recipe) = (scaling(&["fc"]), short().into());
    for amax in [4.0, 2.0, 1.0] {
        step(&mut scaling, &recipe, &input("fc"), &[amax]).unwrap();
    }
    assert_eq!(slot_state(&scaling, &input("fc")), (112.0, vec![4.0, 2.0, 1.0]));
    step(&mut scaling, &recipe, &input("fc"), &[0.5]).unwrap();
    assert_eq!(slot_state(&scaling, &input("fc")), (112.0, vec![2.0, 1.0, 0.5])); // 4 dropped out, and counted
    step(&mut scaling, &recipe, &input("fc"), &[0.5]).unwrap();
    assert_eq!(slot_state(&scaling, &input("fc")), (224.0, vec![1.0, 0.5, 0.5]));
}

#[test]
fn most_recent_looks_at_the_newest_alone() {
    let recipe = DelayedScaling { amax_compute_algo: AmaxComputeAlgo::MostRecent, ..short() }.into();
    let mut scaling = scaling(&["fc"]);
    for (amax, scale) in [(4.0, 112.0), (2.0, 224.0), (8.0, 56.0), (0.0, 56.0), (7.0, 64.0)] {
        step(&mut scaling, &recipe, &input("fc"), &[amax]).unwrap();
        assert_eq!(slot_state(&scaling, &input("fc")).0, scale, "after {amax}");
    }
}

#[test]
fn a_quantization_uses_the_scale_of_the_past() {
    let (mut scaling, recipe) = (scaling(&["fc"]), short().into());
    step(&mut scaling, &recipe, &input("fc"), &[3.5]).unwrap();
    let mut cx = scaling.autocast(&recipe).unwrap();
    let (x8, _) = forward(&mut cx, &input("fc"), &[14.0, 1.0]);
    cx.commit().unwrap();
    assert_eq!(scale_of(&x8), 128.0);
    // 14 · 128 is clipped to 448.
    assert_eq!(x8.dequantize(fp8_recipe::fp8_kernels::DType::F32).unwrap().to_f32_vec().unwrap(), [3.5, 1.0]);
    assert_eq!(slot_state(&scaling, &input("fc")), (32.0, vec![0.0, 3.5, 14.0]));
}

#[test]
fn margin_and_powers_of_two() {
    let exact = ScalingFactorComputeAlgo::Exact;
    let power = ScalingFactorComputeAlgo::PowerOfTwo;
    for (margin, policy, amax, scale) in [
        (0, &exact, 3.0, 448.0 / 3.0),
        (2, &exact, 3.0, 112.0 / 3.0),
        (-1, &exact, 3.0, 896.0 / 3.0),
        (0, &power, 3.0, 128.0),
        (1, &power, 3.0, 64.0),
        (-3, &power, 3.0, 1024.0),
        (0, &power, 3.5, 128.0),
        (0, &power, 3.500_000_2, 64.0), // one ulp more
        (0, &power, 1e-45, f32::powi(2.0, 127)),
        (100, &power, 3e38, f32::MIN_POSITIVE),
        (100, &exact, 3e38, f32::MIN_POSITIVE),
    ] {
        let scaling_factor_compute_algo = policy.clone();
        let recipe = DelayedScaling { margin, scaling_factor_compute_algo, ..short() }.into();
        let mut scaling = scaling(&["fc"]);
        step(&mut scaling, &recipe, &input("fc"), &[amax]).unwrap();
        assert_eq!(slot_state(&scaling, &input("fc")).0, scale, "margin {margin}, {policy:?}, amax {amax}");
    }
}

#[test]
fn formats_have_their_own_largest_values() {
    for (fp8_format, gradients) in [(Format::Hybrid, 57344.0), (Format::E4M3, 448.0)] {
        let (mut scaling, recipe) = (scaling(&["fc"]), DelayedScaling { fp8_format, ..short() }.into());
        let origin = step(&mut scaling, &recipe, &input("fc"), &[1.0]).unwrap();
        let mut cx = scaling.backward().unwrap();
        let dy8 = backward(&mut cx, &origin, &grad("fc"), &[1.0]);
        cx.commit().unwrap();
        assert_eq!(dy8.as_fp8().unwrap().encoding(), fp8_format.encoding(Direction::Backward));
        assert_eq!(slot_state(&scaling, &input("fc")).0, 448.0);
        assert_eq!(slot_state(&scaling, &grad("fc")).0, gradients);
    }
}

#[test]
fn scales_are_recomputed_at_every_nth_update_and_histories_roll_at_each() {
    let amaxes = [7.0, 1.0, 3.5, 14.0, 28.0, 56.0, 7.0];
    let run = |calibrate_first_step, expected: [f32; 7]| {
        let recipe =
            DelayedScaling { interval: 3, amax_compute_algo: AmaxComputeAlgo::MostRecent, ..short() };
        let recipe = DelayedScaling { calibrate_first_step, ..recipe }.into();
        let mut scaling = scaling(&["fc"]);
        for (amax, scale) in amaxes.into_iter().zip(expected) {
            step(&mut scaling, &recipe, &input("fc"), &[amax]).unwrap();
            let (stored, window) = slot_state(&scaling, &input("fc"));
            assert_eq!((stored, window[2]), (scale, amax));
        }
        assert_eq!(updates(&scaling, Direction::Forward), [7]);
    };
    run(false, [1.0, 1.0, 128.0, 128.0, 128.0, 8.0, 8.0]);
    run(true, [64.0, 64.0, 128.0, 128.0, 128.0, 8.0, 8.0]); // a slot without scale gets one at once
}

#[test]
fn a_slot_that_joins_between_two_recomputations_gets_its_scale_at_once() {
    let recipe = DelayedScaling { interval: 100, ..short() }.into();
    let mut scaling = scaling(&["a", "b"]);
    for (path, amax) in [("a", 1.0), ("a", 2.0), ("b", 4.0), ("b", 8.0)] {
        step(&mut scaling, &recipe, &input(path), &[amax]).unwrap();
    }
    assert_eq!(slot_state(&scaling, &input("a")), (448.0, vec![0.0, 1.0, 2.0]));
    assert_eq!(slot_state(&scaling, &input("b")), (112.0, vec![0.0, 4.0, 8.0]));
}

#[test]
fn a_slot_that_does_not_run_stays_as_it_is() {
    let (mut scaling, recipe) = (scaling(&["a", "b"]), short().into());
    step(&mut scaling, &recipe, &input("a"), &[1.0]).unwrap();
    let before = slot_state(&scaling, &input("a"));
    step(&mut scaling, &recipe, &input("b"), &[2.0]).unwrap();
    let mut cx = scaling.autocast(&recipe).unwrap();
    forward(&mut cx, &input("a"), &[]); // an expert without tokens
    cx.commit().unwrap();
    assert_eq!(slot_state(&scaling, &input("a")), before);
}

#[test]
fn a_module_run_twice_in_one_scope_keeps_the_larger_amax() {
    for amaxes in [[3.5, 1.0], [1.0, 3.5]] {
        let (mut scaling, recipe) = (scaling(&["fc"]), short().into());
        let mut cx = scaling.autocast(&recipe).unwrap();
        let [first, second] = amaxes.map(|amax| forward(&mut cx, &input("fc"), &[amax]).0);
        cx.commit().unwrap();
        assert_eq!(scale_of(&first), scale_of(&second)); // the first step's scale is kept within the scope
        assert_eq!(slot_state(&scaling, &input("fc")), (128.0, vec![0.0, 0.0, 3.5]));
    }
}
