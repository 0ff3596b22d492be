//! Models with options of all kinds over ranks, against one device: dropout, orders of norms, recomputation, lengths that change, padding
//! and packing, accumulation, adapters, f16, evaluation.

use super::rig::*;
use crate::every_device::support::{delayed, device, ids, noise, off, relative_rms, rng};
use fp8_nn::fp8_dist::{Environment, Mesh, MeshOptions, tcp};
use fp8_nn::prelude::*;
use fp8_nn::{LoraOptions, TensorParallel, TensorParallelOptions};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

fn options(rank: &Rank) -> GptOptions {
    let attention = AttentionOptions {
        num_attention_heads: 8,
        num_gqa_groups: Some(4),
        max_seq_length: 16,
        ..Default::default()
    };
    let layer = TransformerLayerOptions {
        hidden_size: 32,
        ffn_hidden_size: 48,
        attention,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    GptOptions { vocab_size: 50, num_layers: 2, layer, ..Default::default() }
}

fn model(options: &GptOptions) -> Gpt {
    let mut model = Gpt::new("gpt", options, &device(), &mut rng(1)).unwrap();
    set_values(&mut model);
    model
}

fn set_values(model: &mut Gpt) {
    set_all(model, |number, _, shape| {
        let (center, factor) = if shape.len() == 1 { (1.0, 0.1) } else { (0.0, 0.2) };
        let values = noise(*shape, number as u64).to_f32_vec().unwrap();
        values.into_iter().map(|value| center + factor * value).collect()
    });
}

/// A microbatch: its shape, and what is known of its sequences.
type Batch = ([usize; 2], SequenceInfo);

/// The way in which a model is trained.
#[derive(Clone)]
struct Way {
    recipe: Recipe,
    scope: AutocastOptions,
    /// Those of each step.
    steps: Vec<Vec<Batch>>,
    delays_wgrad: bool,
}

impl Default for Way {
    fn default() -> Self {
        Self {
            recipe: delayed(),
            scope: off(),
            steps: vec![vec![([4, 8], SequenceInfo::default())]; 3],
            delays_wgrad: false,
        }
    }
}

/// The losses of all microbatches, the gradients of the last step, and the parameters after it.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f32>,
    gradients: Vec<(String, Vec<f32>)>,
    parameters: Vec<Vec<f32>>,
}

fn train(rank: &Rank, mut model: Gpt, way: &Way) -> Trained {
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_group(rank.mesh.amax_group());
    scaling.set_dropout_seed(5).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut losses = Vec::new();
    let mut gradients = Vec::new();
    for (step, batches) in way.steps.iter().enumerate() {
        zero_grad(&mut model).unwrap();
        for (number, (shape, info)) in batches.iter().enumerate() {
            let seed = (step * 10 + number) as u64;
            let [x, targets] = [0, 100].map(|part| rank.of_batch(&ids(*shape, 50, seed + part)));
            let tokens: usize = batches.iter().map(|([batch, seq], _)| batch * seq).sum();
            let options = ops::CrossEntropyOptions { ignore_index: Some(7), normalizer: Some(tokens as f32) };
            let mut cx = scaling.scope(&way.recipe, &way.scope).unwrap();
            let (loss, saved) = model.loss_with_info(&mut cx, &x, &targets, options, info).unwrap();
            cx.commit().unwrap();
            let mut cx = scaling.backward().unwrap();
            if way.delays_wgrad {
                cx.delay_wgrad();
            }
            model.loss_backward(&mut cx, saved).unwrap();
            let wgrads = cx.take_wgrads();
            cx.commit().unwrap();
            backward_dw(&mut model, wgrads).unwrap();
            losses.push(rank.mesh.dp().all_reduce("loss", &loss, ReduceOp::Sum).unwrap().item().unwrap());
        }
        all_reduce_gradients(&mut model, &**rank.mesh.dp()).unwrap();
        gradients = fp8_nn::parameters(&model)
            .iter()
            .filter(|p| p.is_trainable())
            .map(|p| (p.name().to_string(), p.gather_main_grad().unwrap().to_f32_vec().unwrap()))
            .collect();
        optimizer.step(&mut model, 1e-3).unwrap();
    }
    let whole = |p: &&Parameter| p.gather_values(DType::F32).unwrap().to_f32_vec().unwrap();
    Trained { losses, gradients, parameters: fp8_nn::parameters(&model).iter().map(whole).collect() }
}

fn close(what: &str, alone: &Trained, found: &Trained, tolerance: f64) {
    for (step, (a, b)) in alone.losses.iter().zip(&found.losses).enumerate() {
        let error = f64::from(((a - b) / a).abs());
        assert!(error <= tolerance, "{what}, step {step}: loss {b}, alone {a}");
    }
    for ((name, a), (_, b)) in alone.gradients.iter().zip(&found.gradients) {
        let error = relative_rms(a, b);
        // K's bias has no gradient but for rounding.
        assert!(error <= tolerance || name.ends_with("k.bias"), "{what}, {name}: {error:.1e}");
    }
}

const LAYOUTS: [Layout; 3] = [TP2, TP2_SP, TP4_SP];

/// Trains as one device does, within the tolerance, over each layout.
fn as_one_device(make: impl Fn(&Rank) -> Gpt + Sync, way: &Way, layouts: &[Layout], tolerance: f64) {
    let alone = ranks(ONE, |rank| train(rank, make(rank), way)).remove(0);
    for &layout in layouts {
        let all = ranks(layout, |rank| train(rank, make(rank), way));
        assert!(all.iter().all(|rank| *rank == all[0]), "{layout:?}: ranks differ");
        close(&format!("{layout:?}"), &alone, &all[0], tolerance);
    }
}

/// A plain linear sees the tokens of its rank. Learned positions are cut where a rank's number of tokens is odd, too.
#[test]
fn blocks_of_ones_own_and_learned_positions() {
    let make = |rank: &Rank| {
        let options = GptOptions { learned_positions: true, ..options(rank) };
        let mut model = Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap();
        let behind = |index, inner| -> Result<Box<dyn DynBlock>> {
            let options = LinearOptions { in_features: 32, out_features: 32, ..Default::default() };
            let mut fc = Linear::new(&format!("own.{index}"), options, &device(), &mut rng(2))?;
            if let Some(ranks) = &rank.tensor_parallel {
                ranks.place_by_tokens(&mut fc);
            }
            Ok(Box::new(Behind { inner, fc }))
        };
        model = model.with_blocks(behind).unwrap();
        set_values(&mut model);
        model
    };
    let way = Way { steps: vec![vec![([2, 6], SequenceInfo::default())]; 3], ..Way::default() };
    as_one_device(make, &way, &LAYOUTS, 1e-5);
}

/// Gradients that were summed over the ranks are not summed again for another group of replicas.
#[test]
fn two_groups_of_replicas() {
    let sums = |layout: Layout| {
        ranks(layout, |rank| {
            let mut model = model(&options(rank));
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            scaling.set_group(rank.mesh.amax_group());
            let [x, targets] = [1, 2].map(|seed| ids([2, 8], 50, seed));
            let (_, saved) = scaling.in_autocast(&Recipe::off(), |cx| model.loss(cx, &x, &targets)).unwrap();
            scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
            let dp = rank.mesh.dp();
            let all: Vec<usize> = (0..dp.world_size()).collect();
            let again = dp.subgroup(&format!("{} again", dp.id()), &all).unwrap().unwrap();
            all_reduce_gradients(&mut model, &**dp).unwrap();
            if dp.world_size() > 1 {
                all_reduce_gradients(&mut model, &*again).unwrap();
            }
            let gather = |p: &&Parameter| p.gather_main_grad().unwrap().to_f32_vec().unwrap();
            fp8_nn::parameters(&model).iter().map(gather).collect::<Vec<_>>()
        })
        .remove(0)
    };
    // Two replicas with the same batch, each sum doubled: four times the gradient.
    for (alone, found) in sums(ONE).into_iter().zip(sums(DP2_TP2_SP)) {
        let expected: Vec<f32> = alone.iter().map(|value| 4.0 * value).collect();
        assert!(relative_rms(&expected, &found) < 1e-5);
    }
}

/// Masks are those of one device.
#[test]
fn dropout_drops_what_one_device_drops() {
    let make = |rank: &Rank| {
        let mut options = options(rank);
        options.layer.hidden_dropout = 0.1;
        options.layer.attention.attention_dropout = 0.1;
        options.embedding_dropout = 0.1;
        model(&options)
    };
    as_one_device(make, &Way::default(), &LAYOUTS, 1e-5);
}

#[test]
fn orders_of_norms_and_additions() {
    let kinds: [fn(&mut TransformerLayerOptions); 4] = [
        |layer| layer.parallel_attention_mlp = true,
        |layer| layer.output_layernorm = true,
        |layer| layer.apply_residual_connection_post_layernorm = true,
        |layer| layer.fp32_residual_connection = true,
    ];
    for kind in kinds {
        let make = |rank: &Rank| {
            let mut options = options(rank);
            kind(&mut options.layer);
            model(&options)
        };
        as_one_device(make, &Way::default(), &[TP2, TP2_SP, DP2_TP2_SP], 1e-5);
    }
}

#[test]
fn lengths_that_change_padding_and_packed_sequences() {
    let lengths = Tensor::from_vec(vec![8i32, 3, 5, 8], [4], &device()).unwrap();
    let packing = Packing::new(&[3, 9, 4], &device()).unwrap();
    let steps = vec![
        vec![([4, 8], SequenceInfo::default())],
        vec![([2, 16], SequenceInfo::default())],
        vec![([4, 8], SequenceInfo::padded(&lengths))],
        vec![([4, 12], SequenceInfo::default())],
        vec![([1, 16], SequenceInfo::packed(packing))],
        vec![([4, 8], SequenceInfo::default())],
    ];
    as_one_device(|rank| model(&options(rank)), &Way { steps, ..Way::default() }, &LAYOUTS, 1e-5);
}

#[test]
fn microbatches_add_up_and_weight_gradients_may_come_later() {
    let steps = vec![vec![([4, 8], SequenceInfo::default()), ([4, 4], SequenceInfo::default())]; 3];
    for delays_wgrad in [false, true] {
        let way = Way { steps: steps.clone(), delays_wgrad, ..Way::default() };
        as_one_device(|rank| model(&options(rank)), &way, &[TP2_SP, DP2_TP2_SP], 1e-5);
    }
}

#[test]
fn adapters_of_all_linears() {
    let make = |rank: &Rank| {
        let mut model = model(&options(rank));
        let lora = LoraOptions { rank: 3, ..Default::default() };
        let mut rng = rng(9);
        let mut added = Vec::new();
        model.visit_loras_mut(&mut |loras| {
            let [features, _] = loras.weight_shape();
            if loras.path().ends_with("qkv") {
                // q has 32 rows, k and v 16 each.
                added.push(loras.add("q", 0..32, &lora, &mut rng));
                added.push(loras.add("v", 48..64, &lora, &mut rng));
            } else if !loras.path().ends_with("head") {
                added.push(loras.add("all", 0..features, &lora, &mut rng));
            }
        });
        added.into_iter().collect::<Result<Vec<_>>>().unwrap();
        set_values(&mut model);
        for parameter in parameters_mut(&mut model) {
            let trains = parameter.is_adapter();
            parameter.set_trainable(trains).unwrap();
        }
        model
    };
    as_one_device(make, &Way::default(), &[TP2, TP2_SP, DP2_TP2_SP], 1e-5);
    let way = Way { scope: AutocastOptions::default(), ..Way::default() };
    as_one_device(make, &way, &[TP2_SP], 0.2);
}

/// Each level has the bits of the first.
#[test]
fn recomputation_has_the_bits_of_keeping() {
    let recipes: [Recipe; 5] = [
        delayed(),
        CurrentScaling::default().into(),
        Mxfp8::default().into(),
        CurrentScaling::rowwise().into(),
        Nvfp4::default().into(),
    ];
    for recipe in recipes {
        for layout in [TP2, TP2_SP] {
            let trained = |recompute| {
                let way = Way { recipe: recipe.clone(), scope: AutocastOptions::default(), ..Way::default() };
                ranks(layout, |rank| {
                    let mut options = options(rank);
                    options.layer.ffn_hidden_size = 64;
                    // MX: blocks of 32 features of each of two ranks' heads.
                    options.layer.hidden_size = 128;
                    options.layer.attention.num_attention_heads = 4;
                    options.layer.attention.num_gqa_groups = Some(2);
                    options.layer.recompute = recompute;
                    options.layer.hidden_dropout = 0.1;
                    options.layer.attention.attention_dropout = 0.1;
                    train(rank, model(&options), &way)
                })
                .remove(0)
            };
            let kept = trained(RecomputeLevel::None);
            for level in RecomputeLevel::ALL {
                assert!(trained(level) == kept, "{recipe}, {layout:?}, {level}");
            }
        }
    }
}

/// Sequence parallelism adds in the same order, and TCP in that of threads.
#[test]
fn with_sequence_parallelism_and_over_tcp_forward_has_the_same_bits() {
    let losses = |rank: &Rank| {
        let mut way = Way { scope: AutocastOptions::default(), ..Way::default() };
        way.steps.truncate(1);
        train(rank, model(&options(rank)), &way)
    };
    let tp = ranks(TP2, losses).remove(0);
    let tp_sp = ranks(TP2_SP, losses).remove(0);
    assert_eq!(tp.losses, tp_sp.losses);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let over_tcp = thread::scope(|scope| {
        let run = |rank| {
            let here = Environment {
                rank,
                local_rank: rank,
                world_size: 2,
                exact_port: true,
                run_id: "test".to_owned(),
                ..Environment::on_this_machine(port)
            };
            scope.spawn(move || {
                let world = tcp("world", &here, Duration::from_secs(60)).unwrap();
                let mesh = Mesh::new(world, &MeshOptions { dp: 1, tp: 2 }).unwrap();
                let options = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
                let tensor_parallel = TensorParallel::new(mesh.tp().clone(), &options).unwrap();
                losses(&Rank { mesh, tensor_parallel })
            })
        };
        let threads: Vec<_> = (0..2).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>().remove(0)
    });
    assert!(over_tcp == tp_sp);
}

#[test]
fn in_f16_ranks_skip_together_and_train_as_one_device() {
    let run = |rank: &Rank| {
        let mut model = model(&options(rank));
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let scaler =
            LossScaler::new(LossScalerOptions { init_scale: 2f32.powi(24), ..Default::default() }, &device())
                .unwrap();
        let scope = AutocastOptions { compute_dtype: Some(DType::F16), ..Default::default() };
        let mut losses = Vec::new();
        for step in 0..6 {
            let [x, targets] = [0, 100].map(|part| rank.of_batch(&ids([4, 8], 50, step + part)));
            let options = ops::CrossEntropyOptions { ignore_index: None, normalizer: Some(32.0) };
            let mut cx = scaling.scope(&delayed(), &scope).unwrap();
            let info = SequenceInfo::default();
            let (loss, saved) = model.loss_with_info(&mut cx, &x, &targets, options, &info).unwrap();
            cx.commit().unwrap();
            scaling.in_backward(|cx| model.loss_backward_scaled(cx, saved, &scaler)).unwrap();
            all_reduce_gradients(&mut model, &**rank.mesh.dp()).unwrap();
            let norm = scaler.clip_grad_norm(&mut model, 1.0).unwrap();
            scaler.step_with_norm(&mut optimizer, &mut model, 1e-3, &norm).unwrap();
            scaler.update().unwrap();
            zero_grad(&mut model).unwrap();
            losses.push(rank.mesh.dp().all_reduce("loss", &loss, ReduceOp::Sum).unwrap().item().unwrap());
        }
        agree(&model, &optimizer, &scaling, &**rank.mesh.dp()).unwrap();
        (losses, scaler.skipped_steps().unwrap(), scaler.loss_scale().unwrap())
    };
    let alone = ranks(ONE, run).remove(0);
    assert!(alone.1 > 0 && alone.1 < 6, "{} skipped steps", alone.1);
    for layout in [TP2, TP2_SP, DP2_TP2_SP] {
        let all = ranks(layout, run);
        assert!(all.iter().all(|rank| *rank == all[0]), "{layout:?}: ranks differ");
        assert_eq!((all[0].1, all[0].2), (alone.1, alone.2), "{layout:?}: skipped steps and scale");
        for (a, b) in alone.0.iter().zip(&all[0].0) {
            assert!(((a - b) / a).abs() < 2e-2, "{layout:?}: {b}, alone {a}");
        }
    }
}

#[test]
fn evaluation_is_that_of_one_device() {
    let run = |rank: &Rank| {
        let model = model(&options(rank));
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let [x, targets] = [0, 100].map(|part| ids([4, 8], 50, part));
        let info = SequenceInfo::default();
        let mut losses = Vec::new();
        for recipe in [Recipe::off(), delayed(), CurrentScaling::default().into()] {
            // Of a model that was not trained: the first scales are found in the evaluation, and forgotten.
            let evaluate = |cx: &mut Forward<'_>| model.evaluate(cx, &x, &targets, Default::default(), &info);
            let first = scaling.in_eval(&recipe, evaluate).unwrap().item().unwrap();
            let again = scaling.in_eval(&recipe, evaluate).unwrap().item().unwrap();
            assert_eq!(first, again, "{recipe}");
            losses.push(first);
        }
        let mut cx = scaling.eval(&Recipe::off()).unwrap();
        let logits = model.logits(&mut cx, &x, &info).unwrap();
        let of_rank = 50 * (rank.mesh.tp().rank() + 1) / rank.mesh.tp().world_size()
            - 50 * rank.mesh.tp().rank() / rank.mesh.tp().world_size();
        assert_eq!(**logits.shape(), [4, 8, of_rank]);
        losses
    };
    let alone = ranks(ONE, run).remove(0);
    for layout in LAYOUTS {
        for found in ranks(layout, run) {
            for ((a, b), tolerance) in alone.iter().zip(&found).zip([1e-5, 1e-2, 1e-2]) {
                assert!(((a - b) / a).abs() < tolerance, "{layout:?}: {b}, alone {a}");
            }
        }
    }
}
