//! Recipes from TOML files: every option of every recipe, and every mistake.

use crate::every_device::support::message;
use fp8_recipe::{
    AmaxComputeAlgo, CurrentScaling, DelayedScaling, Format, Granularity, Nvfp4, QParams, QParamsByRole,
    Recipe, ScalingFactorComputeAlgo,
};

fn details(recipe: &Recipe) -> String {
    format!("{recipe:?}")
}

#[test]
fn every_option_can_be_written() {
    let text = r#"
        recipe = "delayed"
        margin = -2
        interval = 3
        fp8_format = "e4m3"
        amax_history_len = 16
        amax_compute_algo = "most_recent"
        scaling_factor_compute_algo = "power_of_two"
        override_linear_precision = [false, true, false]
        reduce_amax = false
        calibrate_first_step = false
        record_non_finite = true
        zero_is_skipped = true
        fp8_dpa = true
        fp8_mha = true
    "#;
    let expected = DelayedScaling {
        margin: -2,
        interval: 3,
        fp8_format: Format::E4M3,
        amax_history_len: 16,
        amax_compute_algo: AmaxComputeAlgo::MostRecent,
        scaling_factor_compute_algo: ScalingFactorComputeAlgo::PowerOfTwo,
        override_linear_precision: (false, true, false),
        reduce_amax: false,
        calibrate_first_step: false,
        record_non_finite: true,
        zero_is_skipped: true,
        fp8_dpa: true,
        fp8_mha: true,
    };
    assert_eq!(details(&Recipe::from_toml(text).unwrap()), details(&expected.into()));
    let text = r#"
        recipe = "current"
        granularity = "row"
        fp8_format = "e4m3"
        power_2_scale = true
        amax_epsilon = [0, 1, 1e-4]
        use_split_accumulator = [true, false, true]
        override_linear_precision = [true, false, true]
        fp8_dpa = true
    "#;
    let expected = CurrentScaling {
        granularity: Granularity::Row,
        fp8_format: Format::E4M3,
        quant: QParamsByRole {
            input: QParams::POWER_2,
            weight: QParams { amax_epsilon: 1.0, ..QParams::POWER_2 },
            grad_output: QParams { amax_epsilon: 1e-4, ..QParams::POWER_2 },
        },
        fp8_dpa: true,
        fp8_mha: false,
        use_split_accumulator: (true, false, true),
        override_linear_precision: (true, false, true),
    };
    assert_eq!(details(&Recipe::from_toml(text).unwrap()), details(&expected.into()));
}

/// The names of a recipe's fields, from its own `Debug`. Those of `QParams` are listed once.
fn fields(recipe: &Recipe) -> Vec<String> {
    let text = details(recipe);
    let inside = text.split_once('{').unwrap().1;
    let words = inside.split(['{', ',']).filter_map(|part| part.trim().split_once(": "));
    let options = words.filter(|(_, value)| !value.starts_with("QParams"));
    let mut names: Vec<String> = options.map(|(name, _)| name.to_owned()).collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn no_option_of_any_recipe_is_left_out() {
    for name in Recipe::NAMES {
        let plain = Recipe::from_toml(&format!("recipe = {name:?}")).unwrap();
        let preset = Recipe::from_name(name).unwrap();
        assert_eq!(details(&plain), details(&preset));
        let error = message(Recipe::from_toml(&format!("recipe = {name:?}\nnonsense = 1")));
        let known = error.split_once(" are ").unwrap().1;
        // Another name of what an option says.
        let known = known.replace(", backward_override", "");
        assert_eq!(known.split(", ").collect::<Vec<_>>().len(), fields(&preset).len(), "{error}");
        for field in fields(&preset) {
            assert!(known.split(", ").any(|option| option == field), "{field}: {error}");
        }
    }
}

#[test]
fn nvfp4_has_transformer_engines_switches() {
    let text = "recipe = \"nvfp4\"\ndisable_rht = true\ndisable_stochastic_rounding = true\ndisable_2d_quantization = true";
    let all = Nvfp4 {
        disable_rht: true,
        disable_stochastic_rounding: true,
        disable_2d_quantization: true,
        ..Nvfp4::default()
    };
    assert_eq!(details(&Recipe::from_toml(text).unwrap()), details(&all.into()));
    let backward = "recipe = \"nvfp4\"\nbackward_override = \"high_precision\"";
    let high = Nvfp4 { override_linear_precision: (false, true, true), ..Nvfp4::default() };
    assert_eq!(details(&Recipe::from_toml(backward).unwrap()), details(&high.into()));
    let error = message(Recipe::from_toml("recipe = \"nvfp4\"\nbackward_override = \"dequantized\""));
    assert!(error.contains("expected \"high_precision\" (\"dequantized\""), "{error}");
    // Its format is its own.
    let error =
        message(Recipe::from_toml("recipe = \"current\"\nfp8_format = \"e2m1\"").and_then(|recipe| {
            recipe.validate()?;
            Ok(recipe)
        }));
    assert!(error.contains("use the recipe nvfp4"), "{error}");
}

#[test]
fn patterns_keep_their_order() {
    let text = r#"
        recipe = "off"

        [[slots]]
        pattern = "z.*"
        recipe = "te-v0"
        margin = 1

        [[slots]]
        pattern = "a.*"
        recipe = "off"

        [[slots]]
        pattern = "*"
        recipe = "current"
        amax_epsilon = 1
    "#;
    let expected = "by name (z.*: te-v0 (margin=1); a.*: off; *: current (amax_epsilon=1); default: off)";
    assert_eq!(Recipe::from_toml(text).unwrap().to_string(), expected);
    assert_eq!(Recipe::from_toml("recipe = \"off\"").unwrap().to_string(), "off");
}

#[test]
fn every_mistake_is_named() {
    let slot = "recipe = \"off\"\n[[slots]]\n";
    let names = Recipe::NAMES.join(", ");
    for (text, problem) in [
        ("", "`recipe` is missing: expected one of NAMES, off"),
        ("recipe = 3", "recipe = 3: expected one of NAMES, off"),
        ("recipe = \"mxfp9\"", "recipe = \"mxfp9\": expected one of NAMES, off"),
        (
            "recipe = \"current\"\nmargin = 1",
            "unknown key `margin`: the options of current are granularity, fp8_format, power_2_scale, amax_epsilon, \
             use_split_accumulator, override_linear_precision, fp8_dpa, fp8_mha",
        ),
        ("recipe = \"off\"\nmargin = 1", "unknown key `margin`: off has no options"),
        ("recipe = \"delayed\"\nmargin = 1.5", "margin = 1.5: expected a whole number"),
        ("recipe = \"delayed\"\ninterval = -1", "interval = -1: expected a whole number"),
        ("recipe = \"delayed\"\nreduce_amax = 1", "reduce_amax = 1: expected true or false"),
        (
            "recipe = \"current\"\namax_epsilon = \"x\"",
            "amax_epsilon = \"x\": expected a number, or three, for inputs, weights and gradients: [0, 0, 1e-4]",
        ),
        (
            "recipe = \"block\"\npower_2_scale = [true, false]",
            "power_2_scale = [true, false]: expected true or false, or three of them, for inputs, weights and gradients: \
             [false, false, true]",
        ),
        (
            "recipe = \"current\"\nfp8_format = \"e3m4\"",
            "fp8_format = \"e3m4\": expected \"hybrid\" or \"e4m3\"",
        ),
        (
            "recipe = \"delayed\"\namax_compute_algo = \"mean\"",
            "amax_compute_algo = \"mean\": expected \"max\", \"most_recent\", \"max_of_last(n)\" or \
             \"average(decay)\"",
        ),
        (
            "recipe = \"delayed\"\nscaling_factor_compute_algo = 1",
            "scaling_factor_compute_algo = 1: expected \"exact\" or \"power_of_two\"",
        ),
        (
            "recipe = \"current\"\noverride_linear_precision = [true]",
            "override_linear_precision = [true]: expected three of true and false, for fprop, dgrad and wgrad: [false, \
             false, true]",
        ),
        ("recipe = \"off\"\nslots = 1", "slots = 1: expected [[slots]] tables"),
        (
            &format!("{slot}recipe = \"off\""),
            "[[slots]] number 1: `pattern` is missing: expected a text, such as \"*.fc2.grad_output\"",
        ),
        (
            &format!("{slot}pattern = 1"),
            "[[slots]] number 1: pattern = 1: expected a text, such as \"*.fc2.grad_output\"",
        ),
        (
            &format!("{slot}pattern = \"a\"\nrecipe = \"off\"\n[[slots]]\npattern = \"b\""),
            "[[slots]] number 2: `recipe` is missing: expected one of NAMES, off",
        ),
        ("recipe = \"off\"\nslots = [1]", "[[slots]] number 1: 1: expected a table"),
    ] {
        let problem = problem.replace("NAMES", &names);
        assert_eq!(message(Recipe::from_toml(text)), format!("recipe file: {problem}"), "{text}");
    }
    let error = message(Recipe::from_toml("recipe = \"off\"\n\nmargin = = 1"));
    assert!(error.starts_with("recipe file: line 3: "), "{error}");
    let error =
        message(Recipe::from_toml(&format!("{slot}pattern = \"a\"\nrecipe = \"delayed\"\ninterval = 0")));
    assert_eq!(error, "DelayedScaling: interval = 0: expected at least 1 (recompute at every update)");
}
