//! Overriding a GEMM leaves the others' numbers alone: a slot's amax, scale and codes depend on its tensor and scale only.
//!
//! An override may change a tensor itself: with fprop in high precision everything that is computed from a Linear's output
//! differs, and with dgrad in high precision so does everything that is computed from a Linear's input gradient. All other
//! slots must have the bits of a run without overrides.

use super::overrides::{RECIPES, overridden};
use super::support::{
    bits, block_options, device, in_dtype, linear, noise, parameter_bits, rng, step, unless_simulated,
    with_noise,
};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

/// fprop, dgrad and wgrad: true where a GEMM runs in high precision.
type Overrides = (bool, bool, bool);

/// A layer, and the slots that its own input and output gradient reach without passing through a GEMM.
struct Case {
    name: &'static str,
    layer: fn() -> Box<dyn DynModule>,
    first: &'static [&'static str],
    hidden: usize,
}

const CASES: [Case; 7] = [
    Case {
        name: "Linear",
        layer: || Box::new(linear("a", 32, 32, 1)),
        first: &["a.input", "a.grad_output"],
        hidden: 32,
    },
    Case {
        name: "LayerNormLinear",
        layer: || Box::new(norm_linear(Norm::LayerNorm)),
        first: &["a.input", "a.grad_output"],
        hidden: 32,
    },
    Case {
        name: "LayerNormLinear with RMSNorm",
        layer: || Box::new(norm_linear(Norm::RmsNorm)),
        first: &["a.input", "a.grad_output"],
        hidden: 32,
    },
    Case {
        name: "LayerNormMlp",
        layer: || Box::new(super::support::mlp("a", Activation::Gelu, Norm::LayerNorm, 1)),
        first: &["a.fc1.input", "a.fc2.grad_output"],
        hidden: 24,
    },
    Case {
        name: "LayerNormMlp with swiglu",
        layer: || Box::new(super::support::mlp("a", Activation::Swiglu, Norm::RmsNorm, 1)),
        first: &["a.fc1.input", "a.fc2.grad_output"],
        hidden: 24,
    },
    Case {
        name: "MultiheadAttention",
        layer: || Box::new(attention()),
        first: &["a.qkv.input", "a.proj.grad_output"],
        hidden: 32,
    },
    Case {
        name: "TransformerLayer",
        layer: || Box::new(TransformerLayer::new("a", block_options(), &device(), &mut rng(1)).unwrap()),
        first: &["a.attention.qkv.input", "a.mlp.fc2.grad_output"],
        hidden: 32,
    },
];

fn norm_linear(normalization: Norm) -> LayerNormLinear {
    let sizes = LayerNormLinearOptions { in_features: 32, out_features: 32, ..Default::default() };
    let options =
        LayerNormLinearOptions { norm: NormOptions { normalization, ..sizes.norm }, init_std: 0.2, ..sizes };
    with_noise(LayerNormLinear::new("a", options, &device(), &mut rng(1)).unwrap(), 1)
}

fn attention() -> MultiheadAttention {
    let options = MultiheadAttentionOptions {
        hidden_size: 32,
        attention: AttentionOptions { num_attention_heads: 4, num_gqa_groups: Some(2), ..Default::default() },
        input_layernorm: Some(NormOptions::default()),
        init: InitOptions { init_std: 0.2, output_layer_init_std: 0.2 },
        ..Default::default()
    };
    with_noise(MultiheadAttention::new("a", options, &device(), &mut rng(1)).unwrap(), 1)
}

/// The results of two steps.
struct Outcome {
    /// Every slot's history and scale.
    slots: BTreeMap<String, Vec<u32>>,
    /// Every parameter's gradient.
    gradients: BTreeMap<String, Vec<u32>>,
    y: Vec<u32>,
    dx: Vec<u32>,
}

fn run(case: &Case, recipe: &str, overrides: Overrides, dtype: DType) -> Outcome {
    let recipe = overridden(recipe, overrides);
    let mut layer = (case.layer)();
    let mut scaling = Scaling::new(&layer, &device()).unwrap();
    // Recipes without state show what each slot quantized by its counts.
    scaling.set_counting(true);
    let mut out = Outcome { slots: BTreeMap::new(), gradients: BTreeMap::new(), y: vec![], dx: vec![] };
    // The first step quantizes with scales of its own tensors, the second with those of the first.
    for seed in 0..2 {
        let on = |seed| ops::cast(&noise([2, 8, case.hidden], seed), dtype).unwrap();
        let mut wrapped = Stack(vec![layer]);
        let (x, dy) = (on(2 + seed), on(12 + seed));
        let (y, dx) = step(&mut scaling, &recipe, &in_dtype(dtype), &mut wrapped, &x, &dy).unwrap();
        layer = wrapped.0.remove(0);
        for slot in scaling.slot_reports().unwrap() {
            let counts = [slot.saturated, slot.underflowed, slot.elements].map(|count| count as u32);
            let cells = out.slots.entry(slot.name.to_string()).or_default();
            cells.extend([slot.amax.to_bits(), slot.scale.to_bits()].into_iter().chain(counts));
        }
        out.y.extend(bits(&y));
        out.dx.extend(bits(&dx));
    }
    for arena in scaling.state().unwrap().arenas {
        for (index, name) in arena.slots.iter().enumerate() {
            let history = arena.amax_history.iter().map(|row| row[index].to_bits());
            let cells = history.chain([arena.scale[index].to_bits()]);
            out.slots.entry(name.to_string()).or_default().extend(cells);
        }
    }
    out.gradients = parameter_bits(&*layer).into_iter().map(|(name, _, gradient)| (name, gradient)).collect();
    out
}

/// Whether the overrides change the tensor that `slot` quantizes.
fn changes(case: &Case, slot: &str, (fprop, dgrad, _): Overrides) -> bool {
    let backward = slot.ends_with(".grad_output");
    // Weights change by no GEMM, and slots of outputs and input gradients are not used.
    (backward || slot.ends_with(".input")) && !case.first.contains(&slot) && (fprop || dgrad && backward)
}

fn check(case: &Case, recipe: &str, overrides: Overrides, dtype: DType, plain: &Outcome) {
    let what = format!("{} under {recipe} in {dtype}, {overrides:?}", case.name);
    let (fprop, dgrad, wgrad) = overrides;
    let overridden = run(case, recipe, overrides, dtype);
    let mut changed = false;
    for (slot, cells) in &overridden.slots {
        if changes(case, slot, overrides) {
            changed |= *cells != plain.slots[slot];
        } else {
            assert_eq!(*cells, plain.slots[slot], "{what}: history and scale of {slot}");
        }
    }
    let changeable = overridden.slots.keys().any(|slot| changes(case, slot, overrides));
    assert_eq!(changed, changeable, "{what}: a GEMM in high precision changes what is computed from it");

    assert_eq!(overridden.y == plain.y, !fprop, "{what}: y");
    assert_eq!(overridden.dx == plain.dx, !(fprop || dgrad) || dx_is_dgrads(case, overrides), "{what}: dx");
    // Weight gradients are products of codes, bias gradients sums of what is quantized.
    for (name, gradient) in &overridden.gradients {
        let Some((path, kind)) = name.rsplit_once('.').filter(|(path, _)| !path.ends_with("norm")) else {
            continue;
        };
        let kept = |role: &str| !changes(case, &format!("{path}.{role}"), overrides);
        let equal = match kind {
            "weight" => !wgrad && kept("input") && kept("grad_output"),
            _ => kept("grad_output"),
        };
        if equal {
            assert_eq!(*gradient, plain.gradients[name], "{what}: gradient of {name}");
        } else {
            assert_ne!(*gradient, plain.gradients[name], "{what}: gradient of {name}");
        }
    }
}

/// A Linear's input gradient is dgrad's alone: no other GEMM's result is in it.
fn dx_is_dgrads(case: &Case, (_, dgrad, _): Overrides) -> bool {
    case.first.contains(&"a.input") && !dgrad
}

fn check_all(recipe: &str, cases: &[Case], dtype: DType) {
    for case in cases {
        let plain = run(case, recipe, (false, false, false), dtype);
        for i in 1..8 {
            let overrides = (i & 1 != 0, i & 2 != 0, i & 4 != 0);
            // wgrad's alone, and two pairs: the simulated GPU has no time for all.
            if unless_simulated(true, [3, 4, 5, 6].contains(&i)) {
                check(case, recipe, overrides, dtype, &plain);
            }
        }
    }
}

#[test]
fn overriding_a_gemm_leaves_the_others_numbers_alone_in_bf16() {
    check_all("delayed", &CASES, DType::BF16);
}

#[test]
fn overriding_a_gemm_leaves_the_others_numbers_alone_in_f16() {
    check_all("delayed", &CASES, DType::F16);
}

#[test]
fn overriding_a_gemm_leaves_the_others_numbers_alone_in_f32() {
    check_all("delayed", &CASES, DType::F32);
}

#[test]
fn overriding_a_gemm_leaves_the_others_numbers_alone_under_every_recipe() {
    for recipe in RECIPES.into_iter().filter(|recipe| *recipe != "delayed") {
        for (first, dtype) in [(0, DType::BF16), (3, DType::F16), (5, DType::BF16)] {
            let cases = unless_simulated(&CASES[first..=first], &[]);
            check_all(recipe, cases, dtype);
        }
    }
}
