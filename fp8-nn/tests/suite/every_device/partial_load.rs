//! Files that have only some parameters in common with the model.

use super::support::{bits, block, device, error, linear, parameter_bits};
use fp8_nn::checkpoint::{
    LoadParametersOptions, load_parameters, load_parameters_with_options, save, save_parameters,
};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

fn stack(layers: impl IntoIterator<Item = Linear>) -> Stack {
    Stack(layers.into_iter().map(|layer| Box::new(layer) as Box<dyn DynModule>).collect())
}

fn tensor(model: &Stack, name: &str) -> Vec<u32> {
    bits(parameters(model).into_iter().find(|parameter| **parameter.name() == *name).unwrap().tensor())
}

fn loose() -> LoadParametersOptions {
    LoadParametersOptions { allow_missing: true, allow_extra: true, ..Default::default() }
}

#[test]
fn what_both_have_is_loaded_and_the_rest_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("all.safetensors");
    let pretrained = stack([linear("body", 4, 6, 1), linear("head", 6, 9, 2)]);
    save_parameters(&path, &pretrained).unwrap();
    let new = || stack([linear("body", 4, 6, 3), linear("classes", 6, 3, 4)]);
    let mut model = new();
    let report = load_parameters_with_options(&path, &mut model, &loose()).unwrap();
    let names = |names: &[&str]| names.iter().map(|&name| name.into()).collect::<Vec<_>>();
    assert_eq!(report.loaded, names(&["body.weight", "body.bias"]));
    assert_eq!(report.missing, names(&["classes.weight", "classes.bias"]));
    assert_eq!(report.extra, ["head.bias", "head.weight"]);
    assert_eq!(tensor(&model, "body.weight"), tensor(&pretrained, "body.weight"));
    assert_eq!(tensor(&model, "classes.weight"), tensor(&new(), "classes.weight"));

    // Each permission is needed, and a refusal changes nothing.
    let mut model = new();
    let before = parameter_bits(&model);
    let refused = error(load_parameters_with_options(
        &path,
        &mut model,
        &LoadParametersOptions { allow_missing: false, ..loose() },
    ));
    assert!(refused.contains("it has no tensor `classes.weight`"), "{refused}");
    let refused = error(load_parameters_with_options(
        &path,
        &mut model,
        &LoadParametersOptions { allow_extra: false, ..loose() },
    ));
    assert!(refused.ends_with("tensor `head.bias` has no place in this model"), "{refused}");
    let (strict, with_defaults) = (
        error(load_parameters(&path, &mut model)),
        error(load_parameters_with_options(&path, &mut model, &LoadParametersOptions::default())),
    );
    assert_eq!(strict, with_defaults);
    assert!(before == parameter_bits(&model));
}

#[test]
fn a_parameter_of_another_shape_is_refused_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("all.safetensors");
    save_parameters(&path, &stack([linear("body", 4, 6, 1), linear("head", 6, 9, 2)])).unwrap();
    let mut model = stack([linear("body", 4, 6, 3), linear("head", 6, 3, 4)]);
    let before = parameter_bits(&model);
    let refused = error(load_parameters_with_options(&path, &mut model, &loose()));
    assert!(refused.contains("`head.weight` has shape [9, 6]: expected [3, 6]"), "{refused}");
    assert!(before == parameter_bits(&model));
    let only = vec!["body".to_owned()];
    let report = load_parameters_with_options(
        &path,
        &mut model,
        &LoadParametersOptions { only, ..Default::default() },
    )
    .unwrap();
    assert_eq!((report.loaded.len(), report.missing.len(), report.extra.len()), (2, 0, 0));
    let mut twice = stack([linear("body", 4, 6, 3), linear("body", 4, 6, 3)]);
    let refused = error(load_parameters_with_options(&path, &mut twice, &loose()));
    assert_eq!(refused, "parameter `body.weight` occurs twice: give the two layers different paths");
}

#[test]
fn patterns_select_on_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("block.safetensors");
    let pretrained = block("block", 1);
    save_parameters(&path, &pretrained).unwrap();
    let mut model = block("block", 2);
    let before = parameter_bits(&model);
    let options =
        LoadParametersOptions { only: vec!["*.mlp.*".to_owned(), "qkv".to_owned()], ..Default::default() };
    let report = load_parameters_with_options(&path, &mut model, &options).unwrap();
    assert!(report.missing.is_empty() && report.extra.is_empty(), "{report:?}");
    for (parameter, before) in parameters(&model).into_iter().zip(&before) {
        let is_selected = before.0.contains(".mlp.") || before.0.contains("qkv");
        let source = parameters(&pretrained).into_iter().find(|p| p.name() == parameter.name()).unwrap();
        let expected = if is_selected { bits(source.tensor()) } else { before.1.clone() };
        assert_eq!(bits(parameter.tensor()), expected, "{}", before.0);
        assert_eq!(report.loaded.contains(parameter.name()), is_selected, "{}", before.0);
    }
    let only = vec!["*.mlp.*".to_owned(), "fc3".to_owned()];
    let refused =
        error(load_parameters_with_options(&path, &mut model, &LoadParametersOptions { only, ..options }));
    assert_eq!(
        refused,
        "load_parameters_with_options: only = \"fc3\": it matches no parameter of the model: expected a pattern such as \
         \"*.blocks.0.*\" or \"head\""
    );
}

#[test]
fn the_prefix_reads_a_training_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (model, scaling) = (block("block", 1), Scaling::new(&block("block", 1), &device()).unwrap());
    let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    save(dir.path(), &model, &optimizer, &scaling, &BTreeMap::new()).unwrap();
    let path = checkpoint::path(dir.path());
    let mut other = block("block", 2);
    assert!(error(load_parameters(&path, &mut other)).contains("it has no tensor `block.attention"));
    let options = LoadParametersOptions { prefix: "model.".to_owned(), ..Default::default() };
    let report = load_parameters_with_options(&path, &mut other, &options).unwrap();
    assert_eq!(report.loaded.len(), parameters(&model).len());
    assert!(parameter_bits(&model) == parameter_bits(&other));
}

#[test]
fn codes_are_loaded_with_their_factors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fp8.safetensors");
    let mut pretrained = stack([linear("body", 16, 16, 1), linear("head", 16, 16, 2)]);
    quantize_weights(&mut pretrained, &Recipe::from(CurrentScaling::default())).unwrap();
    save_parameters(&path, &pretrained).unwrap();
    let mut model = stack([linear("body", 16, 16, 3)]);
    let report = load_parameters_with_options(&path, &mut model, &loose()).unwrap();
    assert_eq!(report.loaded.len(), 2);
    assert_eq!(report.extra, ["head.bias", "head.weight", "head.weight_scale_inv"]);
    let expected = parameters(&pretrained)[0].values(DType::F32).unwrap();
    assert_eq!(tensor(&model, "body.weight"), bits(&expected));
}
