//! Users' functions from window to amax and from amax to scale.

use super::support::{device, forward, input, message, scaling, short, slot_state, slot_states, step};
use fp8_recipe::fp8_kernels::{Tensor, ops};
use fp8_recipe::{
    AmaxComputeAlgo, CustomAmax, CustomScale, DelayedScaling, Direction, Error, Format, Quantizer, Recipe,
    ScalingFactorComputeAlgo,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn amax(name: &str, function: impl Fn(&[f32]) -> f32 + Send + Sync + 'static) -> AmaxComputeAlgo {
    AmaxComputeAlgo::Custom(CustomAmax { name: name.into(), function: Arc::new(function) })
}

fn scale(
    name: &str,
    function: impl Fn(f32, f32, f32, &DelayedScaling) -> f32 + Send + Sync + 'static,
) -> ScalingFactorComputeAlgo {
    ScalingFactorComputeAlgo::Custom(CustomScale { name: name.into(), function: Arc::new(function) })
}

/// Refuses amaxes above 10.
fn picky() -> DelayedScaling {
    let function = |amax: f32, _: f32, _: f32, _: &DelayedScaling| if amax > 10.0 { f32::NAN } else { 2.0 };
    DelayedScaling { scaling_factor_compute_algo: scale("picky", function), ..short() }
}

#[test]
fn an_amax_function_sees_the_window_oldest_to_newest() {
    // Digits of a base-10 number, newest last.
    let digits = |window: &[f32]| window.iter().fold(0.0, |sum, amax| sum * 10.0 + amax);
    let recipe: Recipe = DelayedScaling { amax_compute_algo: amax("digits", digits), ..short() }.into();
    assert!(format!("{recipe:?}").contains("CustomAmax(digits)"));
    let mut scaling = scaling(&["fc"]);
    for (newest, expected) in [(1.0, 1.0), (2.0, 12.0), (3.0, 123.0), (4.0, 1234.0), (5.0, 2345.0)] {
        step(&mut scaling, &recipe, &input("fc"), &[newest]).unwrap();
        assert_eq!(slot_state(&scaling, &input("fc")).0, 448.0 / expected);
    }
}

#[test]
fn an_amax_that_says_nothing_keeps_the_scale() {
    for nothing in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
        let choose = move |window: &[f32]| if window[3] == 1.0 { 1.0 } else { nothing };
        let recipe = DelayedScaling { amax_compute_algo: amax("nothing", choose), ..short() }.into();
        let mut scaling = scaling(&["fc"]);
        step(&mut scaling, &recipe, &input("fc"), &[1.0]).unwrap();
        step(&mut scaling, &recipe, &input("fc"), &[2.0]).unwrap();
        assert_eq!(slot_state(&scaling, &input("fc")), (448.0, vec![0.0, 1.0, 2.0]), "{nothing}");
    }
}

/// The example of [`CustomScale`], which divides by the amax. It fails if it is called with anything but a finite amax > 0.
fn half() -> ScalingFactorComputeAlgo {
    scale("half", |amax, _, fp8_max, _| {
        assert!(amax.is_finite() && amax > 0.0, "called with {amax}");
        0.5 * fp8_max / amax
    })
}

#[test]
fn a_scale_function_never_sees_an_amax_of_zero_or_one_that_is_not_finite() {
    let nothing =
        |value: f32| amax("nothing", move |window: &[f32]| if window[3] == 3.5 { 3.5 } else { value });
    for algo in [
        AmaxComputeAlgo::Max,
        AmaxComputeAlgo::MostRecent,
        AmaxComputeAlgo::MaxOfLast(1),
        AmaxComputeAlgo::Average { decay: 0.5 },
        nothing(0.0),
        nothing(-1.0),
        nothing(f32::NAN),
        nothing(f32::INFINITY),
    ] {
        let recipe = || DelayedScaling {
            amax_compute_algo: algo.clone(),
            scaling_factor_compute_algo: half(),
            ..short()
        };
        let everything = DelayedScaling { record_non_finite: true, ..recipe() };
        for (recipe, unset) in [
            (recipe(), -1.0),
            (recipe().with_te_rules(), 1.0),
            (recipe().with_jax_rules(), 1.0),
            (everything, -1.0),
        ] {
            let (mut scaling, recipe) = (scaling(&["fc"]), Recipe::from(recipe));
            for (newest, expected) in
                [(0.0, unset), (3.5, 64.0), (0.0, 64.0), (f32::INFINITY, 64.0), (0.0, 64.0), (3.5, 64.0)]
            {
                step(&mut scaling, &recipe, &input("fc"), &[newest]).unwrap();
                assert_eq!(slot_state(&scaling, &input("fc")).0, expected, "{recipe}: {newest}");
            }
        }
        let mut quantizer = Quantizer::new(recipe(), Direction::Forward, &device()).unwrap();
        for newest in [0.0, 3.5, 0.0] {
            quantizer.quantize(&Tensor::from_vec(vec![newest], [1], &device()).unwrap()).unwrap();
        }
        assert_eq!(quantizer.scale().unwrap(), 64.0);
    }
}

#[test]
fn a_recipe_that_starts_from_amaxes_of_zeros_never_asks_its_scale_function() {
    let mut scaling = scaling(&["fc"]);
    step(&mut scaling, &short().into(), &input("fc"), &[0.0]).unwrap();
    let recipe = Recipe::from(DelayedScaling { scaling_factor_compute_algo: half(), ..short() });
    scaling.autocast(&recipe).unwrap().commit().unwrap();
    let states = slot_states(&scaling, &input("fc"));
    assert!(states.iter().all(|(scale, _)| *scale == -1.0), "{states:?}");
    step(&mut scaling, &recipe, &input("fc"), &[3.5]).unwrap();
    assert_eq!(super::support::of_recipe(&scaling, "half", &input("fc")).0, 64.0);
}

#[test]
fn a_scale_function_gets_amax_old_scale_largest_value_and_recipe() {
    let function = |amax: f32, old: f32, fp8_max: f32, recipe: &DelayedScaling| {
        amax + old * 1000.0 + fp8_max * 1e-6 + recipe.margin as f32 * 100.0
    };
    let algo = scale("all", function);
    let recipe = DelayedScaling { margin: 3, scaling_factor_compute_algo: algo, ..short() }.with_te_rules();
    assert!(format!("{recipe:?}").contains("CustomScale(all)"));
    let (mut scaling, recipe) = (scaling(&["fc"]), recipe.into());
    step(&mut scaling, &recipe, &input("fc"), &[2.0]).unwrap();
    let first = 2.0 + 1000.0 + 448.0 * 1e-6 + 300.0;
    assert_eq!(slot_state(&scaling, &input("fc")).0, first);
    step(&mut scaling, &recipe, &input("fc"), &[4.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("fc")).0, 4.0 + first * 1000.0 + 448.0 * 1e-6 + 300.0);
}

#[test]
fn a_result_that_is_no_scale_is_an_error_and_changes_nothing() {
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45, f32::MIN_POSITIVE.next_down()] {
        let function =
            move |amax: f32, _: f32, _: f32, _: &DelayedScaling| if amax > 10.0 { bad } else { 2.0 };
        let recipe =
            DelayedScaling { scaling_factor_compute_algo: scale("mine", function), ..short() }.into();
        let mut scaling = scaling(&["a", "b"]);
        step(&mut scaling, &recipe, &input("a"), &[1.0]).unwrap();
        let before = scaling.state().unwrap();
        let mut cx = scaling.autocast(&recipe).unwrap();
        forward(&mut cx, &input("a"), &[11.0]);
        let error = cx.commit().unwrap_err();
        assert!(matches!(error, Error::Kernels(_)));
        let text = format!(
            "scale policy `mine` returned {bad} for amax 11: expected a finite scale of at least 2^-126, so that its \
             inverse is finite, too"
        );
        assert_eq!(error.to_string(), text);
        assert_eq!(scaling.state().unwrap(), before);
        step(&mut scaling, &recipe, &input("a"), &[2.0]).unwrap(); // nothing of 11 is left
        assert_eq!(slot_state(&scaling, &input("a")), (2.0, vec![0.0, 1.0, 2.0]));
    }
}

#[test]
fn a_bad_scale_in_one_arena_leaves_the_others_too() {
    // Arenas are updated in the order of their keys, which begin with the margin: the picky one comes last.
    let margin = |margin| DelayedScaling { margin, ..short() }.into();
    let recipes: [Recipe; 3] = [margin(0), margin(1), DelayedScaling { margin: 2, ..picky() }.into()];
    let mut scaling = scaling(&["fc"]);
    let run = |scaling: &mut fp8_recipe::Scaling, amax: f32| {
        let mut cx = scaling.autocast(&recipes[0]).unwrap();
        forward(&mut cx, &input("fc"), &[amax]);
        for recipe in &recipes[1..] {
            let mut cx = cx.nested(recipe).unwrap();
            // Not by `forward`: the first scale of an unset slot is checked as well.
            cx.slot(&input("fc")).unwrap().amax.unwrap().merge_max(amax).unwrap();
        }
        cx.commit()
    };
    run(&mut scaling, 1.0).unwrap();
    let before = scaling.state().unwrap();
    assert_eq!(
        slot_states(&scaling, &input("fc")).iter().map(|s| s.0).collect::<Vec<_>>(),
        [448.0, 224.0, 2.0]
    );
    assert!(message(run(&mut scaling, 11.0)).starts_with("scale policy `picky`"));
    assert_eq!(scaling.state().unwrap(), before);
    run(&mut scaling, 2.0).unwrap();
    assert!(slot_states(&scaling, &input("fc")).iter().all(|(_, window)| window == &[0.0, 1.0, 2.0]));
}

#[test]
fn a_function_that_changes_its_mind_between_two_calls_leaves_no_staged_amax() {
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = calls.clone();
    let fickle = move |_: f32, _: f32, _: f32, _: &DelayedScaling| {
        if seen.fetch_add(1, Ordering::Relaxed) == 1 { f32::NAN } else { 2.0 }
    };
    let recipe =
        DelayedScaling { scaling_factor_compute_algo: scale("fickle", fickle), ..short() }.with_te_rules();
    let (mut scaling, recipe) = (scaling(&["fc"]), recipe.into());
    assert!(step(&mut scaling, &recipe, &input("fc"), &[8.0]).is_err());
    assert_eq!(slot_state(&scaling, &input("fc")), (1.0, vec![0.0; 3]));
    step(&mut scaling, &recipe, &input("fc"), &[4.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("fc")), (2.0, vec![0.0, 0.0, 4.0]));
    assert!(calls.load(Ordering::Relaxed) >= 3);
}

#[test]
fn a_bad_first_scale_is_an_error_of_quantizing() {
    let mut scaling = scaling(&["fc"]);
    let mut cx = scaling.autocast(&picky().into()).unwrap();
    let x = Tensor::from_vec(vec![11.0_f32], [1, 1], &device()).unwrap();
    let error = ops::quantize(&x, &cx.slot(&input("fc")).unwrap()).unwrap_err();
    assert!(error.to_string().starts_with("scale policy `picky` returned NaN for amax 11"));
}

#[test]
fn a_function_that_panics_changes_nothing() {
    let panics = |window: &[f32]| if window[3] > 10.0 { panic!("too large") } else { window[3] };
    let recipe = DelayedScaling { amax_compute_algo: amax("panics", panics), ..short() }.into();
    let mut scaling = scaling(&["fc"]);
    step(&mut scaling, &recipe, &input("fc"), &[1.0]).unwrap();
    let before = scaling.state().unwrap();
    let result = catch_unwind(AssertUnwindSafe(|| step(&mut scaling, &recipe, &input("fc"), &[11.0])));
    assert!(result.is_err());
    assert_eq!(scaling.state().unwrap(), before);
    step(&mut scaling, &recipe, &input("fc"), &[2.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("fc")), (224.0, vec![0.0, 1.0, 2.0]));
}

#[test]
fn an_evaluation_of_zeros_never_asks_the_function() {
    let function = |amax: f32, _: f32, fp8_max: f32, _: &DelayedScaling| fp8_max / amax;
    let recipe = DelayedScaling { scaling_factor_compute_algo: scale("bare", function), ..short() }.into();
    let mut scaling = scaling(&["fc"]);
    let mut cx = scaling.eval(&recipe).unwrap();
    let (x8, _) = forward(&mut cx, &input("fc"), &[0.0]);
    assert_eq!(super::support::scale_of(&x8), 1.0);
}

#[test]
fn a_tensor_alone_with_its_quantizer() {
    let device = device();
    let x = |amax: f32| Tensor::from_vec(vec![amax, 0.5], [2], &device).unwrap();
    let mut quantizer = Quantizer::new(short(), Direction::Backward, &device).unwrap();
    assert_eq!((quantizer.scale().unwrap(), quantizer.amax_history().unwrap()), (1.0, vec![0.0; 4]));
    let scales = [1.0, 4.0, 2.0].map(|amax| super::support::scale_of(&quantizer.quantize(&x(amax)).unwrap()));
    assert_eq!(scales, [57344.0, 57344.0, 14336.0]); // its own first; then what came before
    assert_eq!(
        (quantizer.scale().unwrap(), quantizer.amax_history().unwrap()),
        (14336.0, vec![0.0, 1.0, 4.0, 2.0])
    );

    let mut quantizer = Quantizer::new(picky(), Direction::Forward, &device).unwrap();
    quantizer.quantize(&x(1.0)).unwrap();
    assert!(message(quantizer.quantize(&x(11.0))).starts_with("scale policy `picky`"));
    assert_eq!(
        (quantizer.scale().unwrap(), quantizer.amax_history().unwrap()),
        (2.0, vec![0.0, 0.0, 0.0, 1.0])
    );
    quantizer.quantize(&x(3.0)).unwrap();
    assert_eq!(quantizer.amax_history().unwrap(), [0.0, 0.0, 1.0, 3.0]);

    let recipe = DelayedScaling { fp8_format: Format::E4M3, ..short() };
    let quantizer = Quantizer::new(recipe, Direction::Backward, &device).unwrap();
    assert_eq!(quantizer.scale().unwrap(), 1.0);
}
