//! Checks layers in NVFP4: how far they are from high precision, what they draw, and what they refuse.

use super::support::{
    bits, block, device, error, grads, linear, noise, off, relative_rms, rng, step, values,
};
use fp8_nn::fp8_recipe::{DropoutProgress, Encoding, Nvfp4};
use fp8_nn::prelude::*;

const PLAIN: Nvfp4 = Nvfp4 {
    disable_rht: true,
    disable_stochastic_rounding: true,
    disable_2d_quantization: true,
    override_linear_precision: (false, false, false),
};

/// The relative errors of y, dx and dw of a Linear on normal data.
fn errors(recipe: Nvfp4) -> [f64; 3] {
    let run = |recipe: Option<Nvfp4>| {
        let options = if recipe.is_some() { AutocastOptions::default() } else { off() };
        let mut fc = linear("fc", 128, 96, 1);
        let weight = noise([96, 128], 7);
        parameters_mut(&mut fc).swap_remove(0).set(weight).unwrap();
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        let recipe = recipe.unwrap_or_default().into();
        let (x, dy) = (noise([4, 64, 128], 2), noise([4, 64, 96], 3));
        let (y, dx) = step(&mut scaling, &recipe, &options, &mut fc, &x, &dy).unwrap();
        [values(&y), values(&dx), grads(&fc).swap_remove(0).1]
    };
    let (want, got) = (run(None), run(Some(recipe)));
    std::array::from_fn(|i| relative_rms(&want[i], &got[i]))
}

#[test]
fn a_linear_is_as_far_from_high_precision_as_its_rules_say() {
    let nearest = Nvfp4 { disable_stochastic_rounding: true, ..Nvfp4::default() };
    for (recipe, bounds) in [
        (Nvfp4::default(), [0.12..=0.16, 0.12..=0.19, 0.12..=0.19]),
        (nearest, [0.12..=0.16, 0.12..=0.16, 0.12..=0.16]),
        (PLAIN, [0.12..=0.15, 0.12..=0.15, 0.12..=0.15]),
    ] {
        let found = errors(recipe);
        for ((found, bounds), what) in found.iter().zip(bounds).zip(["y", "dx", "dw"]) {
            assert!(bounds.contains(found), "{recipe:?}: {what} is off by {found:.3}, not {bounds:?}");
        }
    }
    // High precision in backward alone.
    let backward = Nvfp4 { override_linear_precision: (false, true, true), ..Nvfp4::default() };
    let [y, dx, dw] = errors(backward);
    assert!((0.12..=0.16).contains(&y) && dx < 1e-6 && dw < 1e-6, "{y} {dx} {dw}");
}

/// The relative errors of y, of what the layer adds to x, and of dx, of a TransformerLayer on normal data whose weights keep the size of
/// values.
fn layer_errors(recipe: Nvfp4) -> [f64; 3] {
    let options = TransformerLayerOptions {
        hidden_size: 64,
        ffn_hidden_size: 256,
        attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 32, ..Default::default() },
        init: InitOptions { init_std: 0.125, output_layer_init_std: 0.125 },
        ..Default::default()
    };
    let (x, dy) = (noise([2, 32, 64], 2), noise([2, 32, 64], 3));
    let run = |autocast: &AutocastOptions| {
        let mut layer = TransformerLayer::new("block", options.clone(), &device(), &mut rng(1)).unwrap();
        let mut scaling = Scaling::new(&layer, &device()).unwrap();
        let (y, dx) = step(&mut scaling, &recipe.into(), autocast, &mut layer, &x, &dy).unwrap();
        let added = values(&y).iter().zip(values(&x)).map(|(y, x)| y - x).collect();
        [values(&y), added, values(&dx)]
    };
    let (want, got): ([Vec<f32>; 3], _) = (run(&off()), run(&AutocastOptions::default()));
    std::array::from_fn(|i| relative_rms(&want[i], &got[i]))
}

#[test]
fn a_transformer_layer_adds_up_the_errors_of_its_linears() {
    let nearest = Nvfp4 { disable_stochastic_rounding: true, ..Nvfp4::default() };
    for (recipe, most) in [(Nvfp4::default(), 0.33), (nearest, 0.3), (PLAIN, 0.3)] {
        let [y, added, dx] = layer_errors(recipe);
        assert!(
            0.1 < y && y < added && added < 0.3,
            "{recipe:?}: y is off by {y:.3}, what was added by {added:.3}"
        );
        assert!((0.1..most).contains(&dx), "{recipe:?}: dx is off by {dx:.3}");
    }
}

/// y, dx and all gradients of a block, twice, and how many keys were drawn.
fn run_block(recipe: &Recipe, seed: u64) -> (Vec<Vec<u32>>, Option<DropoutProgress>) {
    let mut model = block("block", 1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_dropout_seed(seed).unwrap();
    let mut out = Vec::new();
    for _ in 0..2 {
        let (x, dy) = (noise([2, 16, 32], 2), noise([2, 16, 32], 3));
        let (y, dx) = step(&mut scaling, recipe, &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
        out.extend([bits(&y), bits(&dx)]);
    }
    (out, scaling.state().unwrap().dropout)
}

#[test]
fn only_gradients_draw_and_each_step_draws_anew() {
    let recipe = Recipe::from(Nvfp4::default());
    let (first, drawn) = run_block(&recipe, 5);
    assert_eq!(drawn, Some(DropoutProgress { seed: 5, scopes: 2 }), "a key for each backward scope");
    assert_eq!((first.clone(), drawn), run_block(&recipe, 5));
    assert!(first[0] == first[2] && first[1] != first[3], "y is rounded to nearest, dx is not");
    let (other, _) = run_block(&recipe, 6);
    assert!(first[0] == other[0] && first[1] != other[1]);
    let nearest = Nvfp4 { disable_stochastic_rounding: true, ..Nvfp4::default() };
    let (nearest, _) = run_block(&nearest.into(), 5);
    assert_eq!(nearest[..2], nearest[2..]);
}

#[test]
fn a_resumed_training_goes_on_with_the_numbers_that_would_follow() {
    let recipe = Recipe::from(Nvfp4::default());
    let (x, dy) = (noise([2, 16, 32], 2), noise([2, 16, 32], 3));
    let mut model = linear("fc", 32, 32, 1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_dropout_seed(9).unwrap();
    let mut steps = |scaling: &mut Scaling, count: usize| {
        let one =
            |_| bits(&step(scaling, &recipe, &AutocastOptions::default(), &mut model, &x, &dy).unwrap().1);
        (0..count).map(one).collect::<Vec<_>>()
    };
    steps(&mut scaling, 1);
    let state = scaling.state().unwrap();
    let want = steps(&mut scaling, 2);
    let fc = linear("fc", 32, 32, 1);
    let mut again = Scaling::new(&fc, &device()).unwrap();
    again.load_state(&state).unwrap();
    // The layer belongs to the first one's slots: the second has the same names.
    assert_eq!(again.state().unwrap().dropout, state.dropout);
    scaling.load_state(&state).unwrap();
    assert_eq!(steps(&mut scaling, 2), want);
}

#[test]
fn attention_and_norms_stay_in_high_precision() {
    let model = super::support::gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_counting(true);
    let mut cx = scaling.autocast(&Nvfp4::default().into()).unwrap();
    model.forward(&mut cx, &super::support::ids([2, 8], 8, 1)).unwrap();
    cx.commit().unwrap();
    let reports = scaling.slot_reports().unwrap();
    let ran: Vec<_> = reports.iter().filter(|report| report.elements > 0).collect();
    for report in &ran {
        let layer = ["qkv", "proj", "fc1", "fc2"].iter().any(|name| report.name.contains(name));
        assert!(layer, "{report}");
    }
    assert!(ran.len() >= 8, "{ran:?}");
}

#[test]
fn a_stored_weight_takes_about_an_eighth_of_f32_and_multiplies_as_in_training() {
    for (recipe, most) in [(Nvfp4::default(), 0.128), (PLAIN, 0.142)] {
        let recipe = Recipe::from(recipe);
        let (mut plain, mut stored) = (linear("fc", 128, 96, 1), linear("fc", 128, 96, 1));
        assert_eq!(quantize_weights(&mut stored, &recipe).unwrap(), 1);
        let codes = stored.weight().fp8().unwrap();
        let parts = [codes.stored_codes(), codes.scale_inv(), codes.tensor_scale().unwrap()];
        let bytes: usize = parts.iter().map(|part| part.shape().numel() * part.dtype().size()).sum();
        assert!((bytes as f64) < most * (4 * 128 * 96) as f64, "{recipe}: {bytes}");
        let x = noise([2, 16, 128], 2);
        let y = |fc: &mut Linear| {
            let mut scaling = Scaling::new(fc, &device()).unwrap();
            bits(&fc.forward(&mut scaling.eval(&recipe).unwrap(), &x).unwrap().0)
        };
        assert_eq!(y(&mut plain), y(&mut stored), "{recipe}");
        // In high precision the codes are dequantized.
        let values = stored.weight().values(DType::F32).unwrap();
        parameters_mut(&mut plain).swap_remove(0).set(values).unwrap();
        let high = |fc: &mut Linear| {
            let mut scaling = Scaling::new(fc, &device()).unwrap();
            bits(&fc.forward(&mut scaling.scope(&recipe, &off()).unwrap(), &x).unwrap().0)
        };
        assert_eq!(high(&mut plain), high(&mut stored), "{recipe}");
    }
}

#[test]
fn every_part_of_a_stored_weight_is_sent_to_other_ranks() {
    use fp8_nn::fp8_dist::{ProcessGroup, local};
    for recipe in [Nvfp4::default(), PLAIN] {
        let recipe = Recipe::from(recipe);
        let run = |group: &dyn ProcessGroup| {
            let mut fc = linear("fc", 48, 32, group.rank() as u64);
            let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
            optimizer.quantize_weights(&mut fc, &recipe).unwrap();
            broadcast_parameters(&mut fc, group).unwrap();
            // dgrad reads the columnwise codes.
            let mut scaling = Scaling::new(&fc, &device()).unwrap();
            let (x, dy) = (noise([16, 48], 2), noise([16, 32], 3));
            let default = AutocastOptions::default();
            let (y, dx) = step(&mut scaling, &recipe, &default, &mut fc, &x, &dy).unwrap();
            [bits(&y), bits(&dx)]
        };
        let results = std::thread::scope(|scope| {
            let groups = local("dp", 2, std::time::Duration::from_secs(60)).unwrap().into_iter();
            let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(&*group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(results[0] == results[1], "{recipe}");
    }
}

#[test]
fn a_file_without_the_factors_of_a_whole_weight_is_refused() {
    let recipe = Recipe::from(Nvfp4::default());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("fc");
    let mut fc = linear("fc", 32, 32, 1);
    quantize_weights(&mut fc, &recipe).unwrap();
    checkpoint::save_parameters(&file, &fc).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let from = b"fc.weight_tensor_scale".as_slice();
    let at = bytes.windows(from.len()).position(|part| part == from).unwrap();
    let mut renamed = bytes.clone();
    renamed[at..at + from.len()].copy_from_slice(b"fc.weight_tensor_score");
    std::fs::write(&file, &renamed).unwrap();
    let text = error(checkpoint::load_parameters(&file, &mut fc));
    assert!(text.contains("it has no tensor `fc.weight_tensor_scale`"), "{text}");
    // A weight of FP8 is not read into one of 4 bits.
    std::fs::write(&file, &bytes).unwrap();
    let mut other = linear("fc", 32, 32, 1);
    quantize_weights(&mut other, &CurrentScaling::default().into()).unwrap();
    let text = error(checkpoint::load_parameters(&file, &mut other));
    assert!(text.contains("is stored in E2M1 with a factor for each 16x16: expected E4M3"), "{text}");
}

#[test]
fn the_report_says_which_tensors_ran_in_it_and_counts_their_blocks() {
    let mut model = super::support::gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_counting(true);
    scaling.set_measuring_sqnr(true);
    let ids = super::support::ids([2, 8], 8, 1);
    let mut cx = scaling.autocast(&Nvfp4::default().into()).unwrap();
    let (loss, saved) = model.loss(&mut cx, &ids, &ids).unwrap();
    cx.commit().unwrap();
    assert!(loss.item().unwrap().is_finite());
    scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
    let reports = scaling.slot_reports().unwrap();
    let ran = || reports.iter().filter(|report| report.elements > 0);
    assert!(ran().all(|report| report.encoding == Encoding::E2M1 && report.sqnr.is_some()), "{reports:?}");
    // 16 tokens of 32 values, and of the MLP's.
    let ffn = super::support::gpt_options().layer.ffn_hidden_size as u64;
    let linears =
        [("attention.qkv", 32, 96), ("attention.proj", 32, 32), ("mlp.fc1", 32, ffn), ("mlp.fc2", ffn, 32)];
    for (layer, inputs, outputs) in
        (0..2).flat_map(|layer| linears.map(|(name, i, o)| (format!("{layer}.{name}"), i, o)))
    {
        let blocks = |kind: &str| {
            let name = format!("gpt.blocks.{layer}.{kind}");
            let report =
                ran().find(|report| *report.name == *name).unwrap_or_else(|| panic!("{name} did not run"));
            report.nvfp4.unwrap_or_else(|| panic!("{report} was not measured"))
        };
        assert_eq!(blocks("input").blocks, inputs, "{layer}");
        assert_eq!(blocks("grad_output").blocks, outputs, "{layer}");
        assert_eq!(blocks("weight").blocks, inputs * outputs / 256, "{layer}");
        let lost = ["input", "weight", "grad_output"].map(|kind| blocks(kind).lost);
        // The first token of a sequence sees only itself: the gradient of its query, of two blocks, is 0 but for rounding.
        let residues = if layer.ends_with("qkv") { 2 * 2 } else { 0 };
        assert!(lost[0] == 0 && lost[1] == 0 && lost[2] <= residues, "{layer}: {lost:?}");
    }
    assert_eq!(ran().count(), 24, "three tensors of four Linears of two blocks");
}
