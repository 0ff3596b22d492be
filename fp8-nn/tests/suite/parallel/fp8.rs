//! Training in FP8 over ranks, against the same recipe on one device.

use super::rig::*;
use crate::every_device::support::{device, ids, is_nvfp4, noise, off, relative_rms, rng};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;

const BATCH: usize = 4;
const SEQ: usize = 64;
const STEPS: u64 = 12;
const RATE: f32 = 1e-3;

/// A model of whose weights and tokens no block is split by two ranks.
pub(super) fn options(rank: &Rank) -> GptOptions {
    let norm = NormOptions { normalization: Norm::RmsNorm, ..Default::default() };
    let attention = AttentionOptions {
        num_attention_heads: 8,
        num_gqa_groups: Some(4),
        kv_channels: Some(64),
        max_seq_length: SEQ,
        ..Default::default()
    };
    let layer = TransformerLayerOptions {
        hidden_size: 128,
        ffn_hidden_size: 256,
        attention,
        norm,
        activation: Activation::Swiglu,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    GptOptions { vocab_size: 50, num_layers: 2, layer, ..Default::default() }
}

/// As GPT-2 is built.
pub(super) fn gpt2(rank: &Rank) -> GptOptions {
    let attention = AttentionOptions { num_attention_heads: 4, max_seq_length: SEQ, ..Default::default() };
    let layer = TransformerLayerOptions {
        hidden_size: 64,
        ffn_hidden_size: 256,
        attention,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    GptOptions { vocab_size: 50, num_layers: 2, layer, learned_positions: true, ..Default::default() }
}

/// The numbers that are compared.
pub(super) struct Run {
    pub(super) losses: Vec<f32>,
    /// Those of the first step.
    pub(super) gradients: Vec<(String, Vec<f32>)>,
    pub(super) state: ScalingState,
}

pub(super) fn train(
    rank: &Rank,
    options: &GptOptions,
    recipe: &Recipe,
    scope: &AutocastOptions,
    loaded: Option<&ScalingState>,
    steps: u64,
    seed: u64,
) -> Run {
    let mut model = Gpt::new("gpt", options, &device(), &mut rng(seed)).unwrap();
    set_all(&mut model, |number, _, shape| {
        let factor = if shape.len() == 1 { 0.05 } else { 0.03 };
        let center = if shape.len() == 1 { 1.0 } else { 0.0 };
        let values = noise(*shape, seed * 100 + number as u64).to_f32_vec().unwrap();
        values.into_iter().map(|value| center + factor * value).collect()
    });
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_group(rank.mesh.amax_group());
    loaded.map(|state| scaling.load_state(state).unwrap());
    let mut gradients = Gradients::new(&model, rank.mesh.dp().clone(), GradientsOptions::default()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut run = Run { losses: Vec::new(), gradients: Vec::new(), state: ScalingState::default() };
    for step in 0..steps {
        let of = |part: u64| rank.of_batch(&ids([BATCH, SEQ], 50, 1000 * seed + part + step));
        let [x, targets] = [0, 500].map(of);
        let normalizer = Some((BATCH * SEQ) as f32);
        let cross_entropy = ops::CrossEntropyOptions { normalizer, ..Default::default() };
        let mut cx = scaling.scope(recipe, scope).unwrap();
        let (loss, saved) =
            model.loss_with_info(&mut cx, &x, &targets, cross_entropy, &SequenceInfo::default()).unwrap();
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        gradients.watch(&mut cx, &mut model).unwrap();
        model.loss_backward(&mut cx, saved).unwrap();
        cx.commit().unwrap();
        gradients.finish(&mut model).unwrap();
        let loss = rank.mesh.dp().all_reduce("loss", &loss, ReduceOp::Sum).unwrap();
        run.losses.push(loss.item().unwrap());
        if step == 0 {
            run.gradients = parameters(&model)
                .iter()
                .map(|p| (p.name().to_string(), p.gather_main_grad().unwrap().to_f32_vec().unwrap()))
                .collect();
        }
        let norm = clip_grad_norm(&mut model, 1.0).unwrap();
        optimizer.step_with_norm(&mut model, RATE, &norm).unwrap();
        zero_grad(&mut model).unwrap();
    }
    agree(&model, &optimizer, &scaling, &**rank.mesh.dp()).unwrap();
    run.state = scaling.state().unwrap();
    run
}

fn largest(alone: &[f32], found: &[f32]) -> f32 {
    alone.iter().zip(found).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f32::max)
}

/// Trains over ranks in each layout and returns by how much losses differ from one device's at most. Gradients of the first step must
/// be near one device's, and not those of high precision.
fn compare(
    options: fn(&Rank) -> GptOptions,
    layouts: &[Layout],
    recipe: &Recipe,
    loads: bool,
    seed: u64,
) -> Vec<(Layout, f32)> {
    let run = |layout: Layout, scope: &AutocastOptions, loaded: Option<&ScalingState>, steps| {
        ranks(layout, |rank| train(rank, &options(rank), recipe, scope, loaded, steps, seed))
    };
    let fp8 = AutocastOptions::default();
    let state = loads.then(|| run(ONE, &fp8, None, 1).remove(0).state);
    let alone = run(ONE, &fp8, state.as_ref(), STEPS).remove(0);
    let high = run(ONE, &off(), None, 1).remove(0);
    // The error of NVFP4 is about four times that of FP8.
    let of_codes = if is_nvfp4(recipe) { 4.0 } else { 1.0 };
    let differences = layouts.iter().map(|&layout| {
        let all = run(layout, &fp8, state.as_ref(), STEPS);
        for rank in &all {
            assert_eq!(rank.losses, all[0].losses, "{recipe}, {layout:?}: ranks differ");
        }
        for (((name, alone), (_, found)), (_, high)) in
            alone.gradients.iter().zip(&all[0].gradients).zip(&high.gradients)
        {
            let error = relative_rms(alone, found);
            // Where ranks have scales of their own, codes are rounded independently: √2 times the error of FP8 is between the two.
            let bound = if loads { 0.08 } else { 0.16 * of_codes };
            assert!(error <= bound, "{recipe}, {layout:?}, {name}: {error:.1e} from one device's gradient");
            let error = relative_rms(high, found);
            assert!(error > 1e-4, "{recipe}, {layout:?}, {name}: {error:.1e} from high precision's gradient");
        }
        let all_of =
            |run: &Run| run.gradients.iter().flat_map(|(_, gradient)| gradient.clone()).collect::<Vec<_>>();
        let error = relative_rms(&all_of(&alone), &all_of(&all[0]));
        assert!(error <= 0.08 * of_codes, "{recipe}, {layout:?}: {error:.1e} between all gradients");
        (layout, largest(&alone.losses, &all[0].losses))
    });
    differences.collect()
}

#[test]
fn with_given_scales_ranks_train_as_one_device() {
    let layouts = [TP2, TP2_SP, DP2_TP2_SP, TP4_SP];
    for (layout, difference) in compare(gpt2, &layouts, &DelayedScaling::default().into(), true, 1) {
        assert!(difference <= 2e-3, "{layout:?}: {difference:e}");
    }
}

#[test]
fn with_rows_and_blocks_ranks_train_as_one_device() {
    let recipes: [Recipe; 3] =
        [CurrentScaling::rowwise().into(), BlockScaling::default().into(), Mxfp8::default().into()];
    for recipe in &recipes {
        for (layout, difference) in compare(options, &[TP2, TP2_SP], recipe, false, 1) {
            assert!(difference <= 2e-3, "{recipe}, {layout:?}: {difference:e}");
        }
    }
}

#[test]
fn with_current_scaling_ranks_are_within_a_percent() {
    let layouts = [TP2, TP2_SP, DP2_TP2_SP];
    for (layout, difference) in compare(gpt2, &layouts, &CurrentScaling::default().into(), false, 1) {
        assert!(difference <= 1e-2, "{layout:?}: {difference:e}");
    }
}

#[test]
fn with_first_scales_of_their_own_ranks_are_within_a_percent_in_the_median_of_seeds() {
    let recipe = DelayedScaling::default().into();
    let of_seed = |seed| compare(gpt2, &[TP2_SP], &recipe, false, seed)[0].1;
    let mut all: Vec<f32> = (1..6).map(of_seed).collect();
    all.sort_by(f32::total_cmp);
    assert!(all[2] <= 1e-2, "{all:?}");
}

/// Each rank's part of a weight has an amax of its own, and so have the tokens of each replica.
#[test]
fn in_nvfp4_ranks_are_within_half_a_percent() {
    let layouts = [TP2, TP2_SP, DP2_TP2_SP, DP2];
    for (layout, difference) in compare(gpt2, &layouts, &Nvfp4::default().into(), false, 1) {
        assert!(difference <= 5e-3, "{layout:?}: {difference:e}");
    }
}
