use super::*;

fn line(options: &str) -> Vec<String> {
    options.split_whitespace().map(str::to_owned).collect()
}

fn command() -> clap::Command {
    Train::augment_args(clap::Command::new("train"))
}

fn refusal(options: &str) -> String {
    let failure = parse(line(options)).unwrap_err();
    assert_eq!(failure.code(), 2);
    failure.to_string()
}

#[test]
fn the_definition_of_the_options_is_sound() {
    command().debug_assert();
}

#[test]
fn wrong_values_are_refused_in_one_sentence() {
    for (options, sentence) in [
        ("--steps 0", "error: --steps 0: must be at least 1"),
        ("--batch 0", "error: --batch 0: must be at least 1"),
        ("--layers 0", "error: --layers 0: must be at least 1"),
        ("--layers -3", "error: --layers -3: must be a whole number from 1 to 1024"),
        ("--heads x", "error: --heads x: must be a whole number from 1 to 4096"),
        ("--threads 0", "error: --threads 0: must be at least 1"),
        ("--lr nan", "error: --lr nan: a learning rate must be finite and above zero (in f32)"),
        ("--lr inf", "error: --lr inf: a learning rate must be finite and above zero (in f32)"),
        ("--lr -1e-3", "error: --lr -1e-3: a learning rate must be finite and above zero (in f32)"),
        ("--lr 0", "error: --lr 0: a learning rate must be finite and above zero (in f32)"),
        ("--lr 1e-60", "error: --lr 1e-60: a learning rate must be finite and above zero (in f32)"),
        ("--lr fast", "error: --lr fast: a learning rate must be a number, finite and above zero"),
        (
            "--recipe mxfp4",
            "error: --recipe mxfp4: unknown; the known ones are delayed, current, te-v0, rowwise, rowwise-gw-hp, block, deepseek, mxfp8, nvfp4, none and \
             files *.toml",
        ),
        (
            "--compare current,none",
            "error: --compare current,none: high precision is always compared: leave none out",
        ),
        ("--seeds 1,x", "error: --seeds x: must be a whole number from 0 to 18446744073709551615"),
        ("--dtype f64", "error: --dtype f64: unknown; the known ones are f32, bf16, f16"),
        ("--format e5m2", "error: --format e5m2: unknown; the known ones are hybrid, e4m3"),
        ("--device gpu", "error: --device gpu: unknown device; the known ones are cpu, cuda and cuda:N"),
        (
            "--device cuda:-1",
            "error: --device cuda:-1: unknown device; the known ones are cpu, cuda and cuda:N",
        ),
        ("--seed -1", "error: --seed -1: must be a whole number from 0 to 18446744073709551615"),
        ("--margin 101", "error: --margin 101: must be a whole number from -100 to 100"),
        ("--dropout 1", "error: --dropout 1: must be a number of at least 0 and less than 1"),
        ("--dropout -0.1", "error: --dropout -0.1: must be a number of at least 0 and less than 1"),
        ("--stepz 3", "error: unknown option --stepz; did you mean --steps?"),
        ("--zzzzzz", "error: unknown option --zzzzzz; --help lists the options"),
        (
            "stray",
            "error: unexpected argument stray: put quotes around text with spaces; --help lists the arguments",
        ),
        ("--steps", "error: --steps needs a value"),
    ] {
        assert_eq!(refusal(options), sentence, "{options}");
    }
    assert_eq!(refusal("--seed 1 --seed 2").lines().count(), 1);
}

/// Checkpoints of earlier versions have no --dropout.
#[test]
fn settings_without_dropout_have_none() {
    let settings = parse(line("--dropout 0.25 --hidden 64")).unwrap().0.settings;
    let stored = settings.values();
    let value =
        |name: &str| stored.iter().find(|(option, _)| *option == name).map(|(_, value)| value.clone());
    assert_eq!(Settings::from_values(value).unwrap(), settings);
    let old = Settings::from_values(|name| value(name).filter(|_| name != "dropout")).unwrap();
    assert_eq!(old, Settings { dropout: 0.0, ..settings.clone() });
    // Nor --schedule.
    assert_eq!(Settings::from_values(|name| value(name).filter(|_| name != "schedule")).unwrap(), settings);
    assert!(Settings::from_values(|name| value(name).filter(|_| name != "lr")).is_err());
}

#[test]
fn help_explains_every_option_and_its_default() {
    let line = ["fp8 train", "--help"].map(Into::into);
    let Ok(Parsed::Help(help)) = command_line::parse::<Train>(command(), line) else { panic!("no help") };
    for argument in command().get_arguments() {
        let option = format!("--{}", argument.get_long().unwrap());
        assert!(help.contains(&option), "{option}");
        let explained = argument.get_help().map(ToString::to_string).unwrap_or_default();
        assert!(!explained.is_empty(), "{option}");
        let takes_value = argument.get_action().takes_values();
        let default = !argument.get_default_values().is_empty() || explained.contains("[default: ");
        assert!(default || !takes_value, "{option} tells no default");
    }
}

#[test]
fn settings_survive_as_text() {
    let (options, given) = parse(line(
        "--steps 7 --layers 2 --hidden 48 --heads 3 --seq 32 --batch 5 --lr 0.0012345678 --schedule wsd --dropout 0.1 \
         --seed 18446744073709551615 \
         --dtype bf16 --recipe current --format e4m3 --history-len 16 --margin -2 --fp8-attention --fp8-mha \
         --fp8-weights --model llama",
    ))
    .unwrap();
    let values = options.settings.values();
    for (option, _) in &values {
        assert!(given.contains(option), "{option}");
    }
    let find = |name: &str| values.iter().find(|(option, _)| *option == name).map(|(_, value)| value.clone());
    assert_eq!(Settings::from_values(find).unwrap(), options.settings);

    let Settings { fp8_attention, fp8_mha, fp8_weights, .. } = options.settings;
    assert!(fp8_attention && fp8_mha && fp8_weights);
    // Older checkpoints do not have them.
    let older = Settings::from_values(|name| find(name).filter(|_| !name.starts_with("fp8-"))).unwrap();
    let without =
        Settings { fp8_attention: false, fp8_mha: false, fp8_weights: false, ..options.settings.clone() };
    assert_eq!(older, without);

    let without = |name: &str| find(name).filter(|_| name != "margin");
    let failure = Settings::from_values(without).unwrap_err();
    assert_eq!(failure.to_string(), "error: it has no --margin");
}

#[test]
fn a_recipe_is_a_name_or_a_file() {
    for name in ["delayed", "current", "none", "a/b.toml", "x y.toml"] {
        let line = [format!("--recipe={name}")];
        let (options, _) = parse(line).unwrap();
        assert_eq!(options.settings.recipe.to_string(), name);
        assert_eq!(matches!(options.settings.recipe, RecipeName::File(_)), name.ends_with(".toml"));
    }
}

#[test]
fn only_what_the_line_names_is_given() {
    let (options, given) = parse(line("--history-len 3")).unwrap();
    assert_eq!(options.settings.history_len, 3);
    assert!(given.contains("history-len"));
    assert!(!given.contains("steps") && !given.contains("lr"));
}
