//! Attention in FP8 as an option of layers: its slots, its distance from high precision, and every mode of a training.

use super::support::{
    bits, block_options, current, custom, delayed, device, error, everything, first_step, grads, ids,
    in_dtype, noise, off, relative_rms, rng, short, step, train_block, unless_simulated, values, with_noise,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::fp8_recipe::Direction;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

fn attention(fp8_dpa: bool) -> MultiheadAttention {
    attention_with(fp8_dpa, 0.0)
}

fn attention_with(fp8_dpa: bool, attention_dropout: f32) -> MultiheadAttention {
    let options = MultiheadAttentionOptions {
        hidden_size: 64,
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: Some(2),
            kv_channels: Some(32),
            rope: true,
            max_seq_length: 64,
            attention_dropout,
            fp8_dpa: Some(fp8_dpa),
            ..Default::default()
        },
        init: InitOptions { init_std: 0.15, output_layer_init_std: 0.1 },
        ..Default::default()
    };
    with_noise(MultiheadAttention::new("attention", options, &device(), &mut rng(1)).unwrap(), 1)
}

fn block(attention_dropout: f32) -> TransformerLayer {
    let options = block_options();
    // Heads of 16 values, which a GPU's FP8 products take.
    let attention = AttentionOptions {
        num_attention_heads: 2,
        num_gqa_groups: Some(1),
        attention_dropout,
        fp8_dpa: Some(true),
        ..options.attention
    };
    let options = TransformerLayerOptions { attention, ..options };
    with_noise(TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap(), 1)
}

fn gpt(fp8_dpa: bool) -> Gpt {
    let options = GptOptions {
        vocab_size: 20,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 128,
            attention: AttentionOptions {
                num_attention_heads: 2,
                max_seq_length: 8,
                fp8_dpa: Some(fp8_dpa),
                ..Default::default()
            },
            init: InitOptions { init_std: 0.1, output_layer_init_std: 0.1 },
            ..Default::default()
        },
        ..Default::default()
    };
    Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap()
}

/// y, dx and the gradients of one step.
fn run(mut model: MultiheadAttention, recipe: &Recipe, options: &AutocastOptions) -> Vec<(String, Vec<f32>)> {
    let (x, dy) = (noise([2, 24, 64], 2), noise([2, 24, 64], 3));
    let (y, dx) = first_step(recipe, options, &mut model, &x, &dy).unwrap();
    let mut all = grads(&model);
    all.extend([("dx".to_owned(), values(&dx)), ("y".to_owned(), values(&y))]);
    all
}

/// The projections of `recipe` in high precision: only the attention is in FP8.
fn attention_alone(recipe: Recipe) -> Recipe {
    Recipe::by_name([("*.qkv.*", Recipe::off()), ("*.proj.*", Recipe::off())], recipe)
}

#[test]
fn attention_alone_stays_near_high_precision() {
    let high = run(attention(true), &delayed(), &off());
    for recipe in [delayed(), current(), short().with_te_rules().into()] {
        let is_te = recipe.to_string().contains("first_step");
        let fp8 = run(attention(true), &attention_alone(recipe.clone()), &AutocastOptions::default());
        for ((name, high), (_, fp8)) in high.iter().zip(&fp8) {
            // Attention ignores a bias that all keys share, and what proj.bias gets passed no attention.
            if name.ends_with("bias") {
                continue;
            }
            let (error, most) = (relative_rms(high, fp8), if name == "y" { 0.06 } else { 0.13 });
            assert!((1e-4..most).contains(&error) || is_te, "{recipe}: {name} is off by {error}");
        }
    }
}

/// With other masks, the outputs would have little in common.
#[test]
fn dropout_takes_the_probabilities_that_it_takes_in_high_precision() {
    let high = run(attention_with(false, 0.4), &delayed(), &off());
    let fp8 = run(attention_with(true, 0.4), &attention_alone(delayed()), &AutocastOptions::default());
    assert!(high != run(attention(false), &delayed(), &off()));
    for ((name, high), (_, fp8)) in high.iter().zip(&fp8) {
        if name.ends_with("bias") {
            continue;
        }
        let (error, most) = (relative_rms(high, fp8), if name == "y" { 0.06 } else { 0.13 });
        assert!((1e-4..most).contains(&error), "{name} is off by {error}");
    }
}

#[test]
fn fp8_layers_with_fp8_attention_stay_near_high_precision() {
    let high = run(attention(true), &delayed(), &off());
    for recipe in [delayed(), current()] {
        for options in [AutocastOptions::default(), in_dtype(DType::BF16)] {
            let fp8 = run(attention(true), &recipe, &options);
            for ((name, high), (_, fp8)) in high.iter().zip(&fp8) {
                let (error, most) = (relative_rms(high, fp8), if name == "y" { 0.09 } else { 0.20 });
                assert!(error < most, "{recipe}: {name} is off by {error}");
            }
        }
    }
}

#[test]
fn scales_for_rows_or_blocks_leave_attention_in_high_precision() {
    let options = AutocastOptions::default();
    for name in unless_simulated(&["rowwise", "rowwise-gw-hp", "block", "deepseek", "mxfp8"][..], &["block"])
    {
        let recipe = Recipe::from_name(name).unwrap();
        assert!(
            run(attention(true), &recipe, &options) == run(attention(false), &recipe, &options),
            "{name}"
        );
    }
    for recipe in [delayed(), current(), custom()] {
        assert!(
            run(attention(true), &recipe, &options) != run(attention(false), &recipe, &options),
            "{recipe}"
        );
    }
}

#[test]
fn a_slot_that_is_off_takes_its_pass_to_high_precision() {
    let options = AutocastOptions::default();
    let plain = run(attention(false), &delayed(), &options);
    for pattern in ["*.q.input", "attention.k", "attention.v.input"] {
        let recipe = Recipe::by_name([(pattern, Recipe::off()), ("*.o.*", Recipe::off())], short());
        assert!(run(attention(true), &recipe, &options) == plain, "{pattern}");
    }
    // The codes of forward, and high precision backward: other gradients, as near to those of high precision.
    let fp8 = run(attention(true), &attention_alone(delayed()), &options);
    let off_backward =
        [("*.qkv.*", Recipe::off()), ("*.proj.*", Recipe::off()), ("*.o.grad_output", Recipe::off())];
    let half = run(attention(true), &Recipe::by_name(off_backward, short()), &options);
    let high = run(attention(true), &delayed(), &off());
    for ((name, high), ((_, half), (_, fp8))) in high.iter().zip(half.iter().zip(&fp8)) {
        match &**name {
            "y" => assert_eq!(half, fp8),
            name if name.ends_with("bias") || name.contains("proj") => {}
            name => {
                let error = relative_rms(high, half);
                assert!(half != fp8 && (1e-4..0.10).contains(&error), "{name} is off by {error}");
            }
        }
    }
}

#[test]
fn slots_have_names_and_record_amaxes() {
    let mut model = attention(true);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let names = |scaling: &Scaling, direction| {
        scaling.slot_names(direction).iter().map(|name| name.to_string()).collect::<Vec<_>>()
    };
    let forward = names(&scaling, Direction::Forward);
    for name in ["attention.q.input", "attention.k.input", "attention.v.input"] {
        assert!(forward.iter().any(|slot| slot == name), "{forward:?}");
    }
    assert!(names(&scaling, Direction::Backward).contains(&"attention.o.grad_output".to_owned()));
    assert_eq!(Scaling::new(&attention(false), &device()).unwrap().slot_names(Direction::Forward).len(), 4);

    let (x, dy) = (noise([1, 8, 64], 2), noise([1, 8, 64], 3));
    step(&mut scaling, &delayed(), &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
    let trained = scaling.state().unwrap();
    // An evaluation writes nothing, and uses the scales of training.
    let evaluate =
        |scaling: &mut Scaling| bits(&model.forward(&mut scaling.eval(&delayed()).unwrap(), &x).unwrap().0);
    assert_eq!(evaluate(&mut scaling), evaluate(&mut scaling));
    assert!(scaling.state().unwrap() == trained);
    let explained = scaling.explain(&delayed()).unwrap();
    let gemms =
        explained.layers.iter().map(|layer| (&*layer.path, layer.gemms.count())).collect::<BTreeMap<_, _>>();
    assert_eq!((gemms["attention.qkv"], gemms["attention.q"], gemms["attention.o"]), (3, 0, 0));
}

#[test]
fn recomputed_equals_stored() {
    for recipe in [delayed(), current()] {
        for dropout in [0.0, 0.3] {
            let again = Recompute { inner: block(dropout) };
            assert!(
                train_block(6, block(dropout), &recipe) == train_block(6, again, &recipe),
                "{recipe}, {dropout}"
            );
        }
    }
}

#[test]
fn padding_changes_nothing_that_is_real() {
    let model = attention(true);
    let options = AutocastOptions::default();
    let (x, lengths) = (noise([2, 10, 64], 2), Tensor::from_vec(vec![7i32, 10], [2], &device()).unwrap());
    // Scales come from whole tensors, padding included: what is compared has the same values everywhere else.
    let outputs = |info: &SequenceInfo| {
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.scope(&current(), &options).unwrap();
        let (y, _) = model.forward_with_info(&mut cx, &x, info).unwrap();
        cx.commit().unwrap();
        values(&y)
    };
    let (full, padded) = (outputs(&SequenceInfo::default()), outputs(&SequenceInfo::padded(&lengths)));
    // Causal: real positions see no padding either way.
    assert_eq!(bits_of(&full[..7 * 64]), bits_of(&padded[..7 * 64]));
    assert_eq!(bits_of(&full[10 * 64..]), bits_of(&padded[10 * 64..]));
}

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Losses of a GPT, from `steps`.
fn losses(
    model: &mut Gpt,
    optimizer: &mut AdamW,
    scaling: &mut Scaling,
    steps: std::ops::Range<u64>,
) -> Vec<u32> {
    let mut losses = Vec::new();
    for i in steps {
        let (x, targets) = (ids([2, 8], 20, i), ids([2, 8], 20, 50 + i));
        let (loss, saved) = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &x, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        optimizer.step(model, 0.01).unwrap();
        fp8_nn::zero_grad(model).unwrap();
        losses.push(loss.item().unwrap().to_bits());
    }
    losses
}

#[test]
fn resuming_is_exact() {
    let new = |fp8_dpa| {
        let model = gpt(fp8_dpa);
        let scaling = Scaling::new(&model, &device()).unwrap();
        (model, AdamW::new(AdamWOptions::default()).unwrap(), scaling)
    };
    let (mut model, mut optimizer, mut scaling) = new(true);
    losses(&mut model, &mut optimizer, &mut scaling, 0..2);
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("saved");
    checkpoint::save(&dir, &model, &optimizer, &scaling, &BTreeMap::new()).unwrap();
    let on = losses(&mut model, &mut optimizer, &mut scaling, 2..4);

    let load = |fp8_dpa| {
        let (mut model, mut optimizer, mut scaling) = new(fp8_dpa);
        scaling.prepare(&delayed(), &AutocastOptions::default()).unwrap();
        let loaded = checkpoint::load(&dir, &mut model, &mut optimizer, &mut scaling);
        loaded.map(|_| (model, optimizer, scaling))
    };
    let (mut again, mut its_optimizer, mut its_scaling) = load(true).unwrap();
    assert_eq!(losses(&mut again, &mut its_optimizer, &mut its_scaling, 2..4), on);
    assert!(everything(&again, &its_scaling) == everything(&model, &scaling));
    // Without the option a model has other slots.
    let text =
        "it has `gpt.blocks.0.attention.k.input` where this model has `gpt.blocks.0.attention.proj.input`";
    let refused = error(load(false));
    assert!(refused.contains(text), "{refused}");
}

#[test]
fn ranks_share_the_amaxes_of_attention() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let states: Vec<_> = thread::scope(|scope| {
        let run = |group: Arc<dyn ProcessGroup>| {
            let mut model = attention(true);
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            scaling.set_group(group.clone());
            // Rank 1 has larger inputs.
            let x = ops::scale(&noise([1, 8, 64], 2), 1.0 + group.rank() as f32).unwrap();
            step(&mut scaling, &delayed(), &AutocastOptions::default(), &mut model, &x, &x).unwrap();
            scaling.state().unwrap()
        };
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(states[0] == states[1]);
}

#[test]
fn a_calibration_records_and_codes_are_measured() {
    let mut model = attention(true);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (x, dy) = (noise([1, 8, 64], 2), noise([1, 8, 64], 3));
    let calibrating = AutocastOptions { enabled: false, calibrating: true, ..Default::default() };
    step(&mut scaling, &delayed(), &calibrating, &mut model, &x, &dy).unwrap();
    let amaxes = |scaling: &Scaling| -> BTreeMap<String, (f32, Option<f64>)> {
        let all = scaling.slot_reports().unwrap().into_iter();
        all.map(|slot| (slot.name.to_string(), (slot.amax, slot.sqnr))).collect()
    };
    let of = ["attention.q.input", "attention.k.input", "attention.v.input", "attention.o.grad_output"];
    let calibrated = amaxes(&scaling);
    assert!(of.iter().all(|name| calibrated[*name].0 > 0.0), "{calibrated:?}");

    scaling.set_measuring_sqnr(true);
    step(&mut scaling, &delayed(), &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
    // Three bits of mantissa give about 31 dB, two about 25.
    let measured = amaxes(&scaling);
    assert!(of.iter().all(|name| measured[*name].1.is_some_and(|sqnr| sqnr > 20.0)), "{measured:?}");
}

/// As in `fp8 train`, whose default model stays within 0.1 % of high precision.
#[test]
fn a_model_with_fp8_attention_learns_as_fast() {
    let last = |fp8_dpa| {
        let mut model = gpt(fp8_dpa);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let steps = unless_simulated(30, 2);
        let losses = losses(&mut model, &mut optimizer, &mut scaling, 0..steps);
        let last = &losses[losses.len().saturating_sub(10)..];
        last.iter().map(|&bits| f32::from_bits(bits)).sum::<f32>() / last.len() as f32
    };
    let (plain, fp8) = (last(false), last(true));
    assert!((fp8 / plain - 1.0).abs() < 0.01 && fp8 != plain, "{fp8} and {plain}");
}
