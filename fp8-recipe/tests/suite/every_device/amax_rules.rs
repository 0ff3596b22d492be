//! The named rules by which delayed scaling takes an amax from a window, from file to checkpoint.

use super::support::{device, input, message, of_recipe, scaling, short, slot_state, step};
use fp8_recipe::{AmaxComputeAlgo, DelayedScaling, Direction, Quantizer, Recipe};

fn with(amax_compute_algo: AmaxComputeAlgo) -> DelayedScaling {
    DelayedScaling { amax_compute_algo, ..short() }
}

/// 16, 1, 4, 2 give the window 1, 4, 2; the oldest, 16, counts once more in the fourth update.
const AMAXES: [f32; 4] = [16.0, 1.0, 4.0, 2.0];

#[test]
fn max_of_last_takes_the_largest_of_the_newest_amaxes() {
    for (n, chosen) in [(1, 2.0), (2, 4.0), (3, 4.0), (4, 16.0)] {
        let recipe = Recipe::from(with(AmaxComputeAlgo::MaxOfLast(n)));
        let mut scaling = scaling(&["fc"]);
        for amax in AMAXES {
            step(&mut scaling, &recipe, &input("fc"), &[amax]).unwrap();
        }
        assert_eq!(slot_state(&scaling, &input("fc")), (448.0 / chosen, vec![1.0, 4.0, 2.0]), "{n}");
    }
}

#[test]
fn an_average_follows_the_window_and_never_saturates_the_newest_amax() {
    let recipe = Recipe::from(with(AmaxComputeAlgo::Average { decay: 0.75 }));
    let mut scaling = scaling(&["fc"]);
    // 16; 0.75 · 16 + 0.25 · 1 = 12.25; 0.75 · 12.25 + 0.25 · 4 = 10.1875; then 0.75 · 10.1875 + 0.25 · 2 = 8.140625.
    for (amax, chosen) in AMAXES.into_iter().zip([16.0, 12.25, 10.1875, 8.140625]) {
        step(&mut scaling, &recipe, &input("fc"), &[amax]).unwrap();
        assert_eq!(slot_state(&scaling, &input("fc")).0, 448.0 / chosen);
    }
    // 16 has dropped out: the average is that of the window alone. 1; 0.75 + 1 = 1.75; 1.3125 + 0.5; then 32 is larger.
    step(&mut scaling, &recipe, &input("fc"), &[32.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("fc")), (448.0 / 32.0, vec![4.0, 2.0, 32.0]));
}

#[test]
fn a_recipe_that_starts_from_other_amaxes_computes_these_rules() {
    for (algo, name, chosen) in [
        (AmaxComputeAlgo::MaxOfLast(2), "max_of_last(2)", 4.0),
        // 1; then 0.5 · 1 + 0.5 · 4 = 2.5; then 0.5 · 2.5 + 0.5 · 2.
        (AmaxComputeAlgo::Average { decay: 0.5 }, "average(0.5)", 2.25),
    ] {
        let mut scaling = scaling(&["fc"]);
        for amax in AMAXES {
            step(&mut scaling, &short().into(), &input("fc"), &[amax]).unwrap();
        }
        scaling.autocast(&with(algo).into()).unwrap().commit().unwrap();
        let (scale, window) = of_recipe(&scaling, &format!("amax={name},"), &input("fc"));
        assert_eq!((scale, window), (448.0 / chosen, vec![1.0, 4.0, 2.0]), "{name}");
        // The state is saved under this name, and loaded.
        let state = scaling.state().unwrap();
        let mut resumed = super::support::scaling(&["fc"]);
        resumed.load_state(&state).unwrap();
        assert_eq!(resumed.state().unwrap(), state);
    }
}

#[test]
fn amax_rules_out_of_range_are_refused() {
    for (algo, problem) in [
        (AmaxComputeAlgo::MaxOfLast(0), "max_of_last(0): expected 1 to amax_history_len amaxes"),
        (AmaxComputeAlgo::MaxOfLast(5), "max_of_last(5): expected 1 to amax_history_len amaxes"),
        (AmaxComputeAlgo::Average { decay: 0.0 }, "average(0): expected a decay between 0 and 1, exclusive"),
        (AmaxComputeAlgo::Average { decay: 1.0 }, "average(1): expected a decay between 0 and 1, exclusive"),
        (
            AmaxComputeAlgo::Average { decay: f32::NAN },
            "average(NaN): expected a decay between 0 and 1, exclusive",
        ),
    ] {
        let expected = format!("DelayedScaling: amax_compute_algo = {problem}");
        assert_eq!(message(Recipe::from(with(algo.clone())).validate()), expected);
        assert_eq!(message(Quantizer::new(with(algo), Direction::Forward, &device())), expected);
    }
    Recipe::from(with(AmaxComputeAlgo::MaxOfLast(4))).validate().unwrap();
}

#[test]
fn short_names_show_amax_rules_as_recipe_files_write_them() {
    let shown = |algo| Recipe::from(with(algo)).to_string();
    let expected = "delayed (amax_compute_algo=max_of_last(3), amax_history_len=4)";
    assert_eq!(shown(AmaxComputeAlgo::MaxOfLast(3)), expected);
    let expected = "delayed (amax_compute_algo=average(0.9), amax_history_len=4)";
    assert_eq!(shown(AmaxComputeAlgo::Average { decay: 0.9 }), expected);
}

#[cfg(feature = "toml")]
#[test]
fn recipe_files_have_both_amax_rules() {
    for algo in [AmaxComputeAlgo::MaxOfLast(16), AmaxComputeAlgo::Average { decay: 0.9 }] {
        let text = format!("recipe = \"delayed\"\namax_compute_algo = \"{algo}\"");
        let expected = DelayedScaling { amax_compute_algo: algo, ..Default::default() };
        assert_eq!(Recipe::from_toml(&text).unwrap().to_string(), Recipe::from(expected).to_string());
    }
    let bad = "recipe = \"delayed\"\namax_compute_algo = \"max_of_last(1025)\"";
    let problem = "amax_compute_algo = max_of_last(1025): expected 1 to amax_history_len amaxes";
    assert_eq!(message(Recipe::from_toml(bad)), format!("DelayedScaling: {problem}"));
    for name in ["max_of_last", "max_of_last()", "max_of_last(-1)", "max_of_last(2", "average(x)", "average"]
    {
        let text = format!("recipe = \"delayed\"\namax_compute_algo = \"{name}\"");
        let expected = "expected \"max\", \"most_recent\", \"max_of_last(n)\" or \"average(decay)\"";
        assert!(message(Recipe::from_toml(&text)).ends_with(expected), "{name}");
    }
}
