//! Dropout in layers: what each option drops, and that backward, recomputation, checkpoints and evaluation know the masks.

use super::support::{
    ParameterBits, bits, block_options, delayed, device, error, everything, gpt, grads, ids, noise, off, rng,
    step, values, with_noise,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::fp8_recipe::{DropoutProgress, ScalingState};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

/// Probabilities of attention, of elements and of paths.
type Rates = [f32; 3];

const ALL: Rates = [0.3, 0.2, 0.4];
const NONE: Rates = [0.0; 3];
const EACH: [Rates; 4] = [[0.3, 0.0, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 0.5], ALL];

fn options([attention_dropout, hidden_dropout, drop_path_rate]: Rates) -> TransformerLayerOptions {
    let attention = AttentionOptions { attention_dropout, ..block_options().attention };
    TransformerLayerOptions { attention, hidden_dropout, drop_path_rate, ..block_options() }
}

fn block_with(options: TransformerLayerOptions) -> TransformerLayer {
    with_noise(TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap(), 1)
}

fn block(rates: Rates) -> TransformerLayer {
    block_with(options(rates))
}

#[test]
fn each_option_drops_in_training_and_nothing_in_evaluation() {
    let x = noise([4, 6, 32], 1);
    let run = |rates: Rates, seed: u64| {
        let model = block(rates);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_dropout_seed(seed).unwrap();
        let mut cx = scaling.autocast(&delayed()).unwrap();
        let trained = [(); 2].map(|()| bits(&model.forward(&mut cx, &x).unwrap().0));
        cx.commit().unwrap();
        // Without FP8, whose scales know the training before.
        let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
        (trained, bits(&model.forward(&mut cx, &x).unwrap().0))
    };
    let ([plain, again], evaluated) = run(NONE, 0);
    assert!(plain == again);
    let state = |rates| {
        let model = block(rates);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.in_autocast(&delayed(), |cx| model.forward(cx, &x)).unwrap();
        scaling.state().unwrap().dropout
    };
    assert_eq!(state(NONE), None, "nothing is counted where nothing is dropped");
    for rates in EACH {
        let ([first, second], evaluation) = run(rates, 0);
        assert!(first != plain, "{rates:?}");
        assert!(first != second, "{rates:?}: each forward of a scope has masks of its own");
        assert!(first != run(rates, 1).0[0], "{rates:?}: seeds");
        assert!(first == run(rates, 0).0[0], "{rates:?}: the same seed");
        assert!(evaluation == evaluated, "{rates:?}");
        assert_eq!(state(rates), Some(DropoutProgress { seed: 0, scopes: 1 }));
    }
}

#[test]
fn the_embedding_drops_as_in_gpt2() {
    let options = |embedding_dropout| GptOptions {
        vocab_size: 20,
        num_layers: 1,
        embedding_dropout,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 128,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 8, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    let run = |p| {
        let mut model = Gpt::new("gpt", &options(p), &device(), &mut rng(1)).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let (inputs, targets) = (ids([2, 8], 20, 0), ids([2, 8], 20, 1));
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let (loss, saved) = model.loss(&mut cx, &inputs, &targets).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        let rows = grads(&model).swap_remove(0).1;
        (loss.item().unwrap(), rows, inputs.to_vec::<i32>().unwrap())
    };
    let ((loss, whole, inputs), (dropped_loss, dropped, _)) = (run(0.0), run(0.5));
    assert_ne!(loss, dropped_loss);
    // A row that occurs once has zeros where its elements were dropped.
    let once = |id: &i32| inputs.iter().filter(|other| *other == id).count() == 1;
    let rows: Vec<usize> = inputs.iter().filter(|id| once(id)).map(|&id| id as usize).collect();
    let zeros = |grads: &[f32]| {
        rows.iter().flat_map(|row| &grads[row * 32..row * 32 + 32]).filter(|grad| **grad == 0.0).count()
    };
    assert!(rows.len() >= 3 && zeros(&whole) == 0, "{rows:?}");
    let (share, count) = (zeros(&dropped) as f64, rows.len() as f64 * 32.0);
    assert!((share - count / 2.0).abs() < 4.0 * (count / 4.0).sqrt(), "{share} of {count}");
}

/// Derivatives along random directions against differences, with the masks of one seed.
#[test]
fn gradients_are_those_of_the_masked_layer() {
    let parallel = TransformerLayerOptions { parallel_attention_mlp: true, ..options(ALL) };
    let at_the_end = TransformerLayerOptions { output_layernorm: true, ..options(ALL) };
    for options in [options(ALL), parallel, at_the_end] {
        let (x, dy) = (noise([3, 5, 32], 2), noise([3, 5, 32], 3));
        let mut model = block_with(options.clone());
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let (_, dx) = step(&mut scaling, &delayed(), &off(), &mut model, &x, &dy).unwrap();
        let analytic = grads(&model);
        let loss = |model: &TransformerLayer, x: &Tensor| -> f64 {
            let mut scaling = Scaling::new(model, &device()).unwrap();
            let mut cx = scaling.scope(&delayed(), &off()).unwrap();
            let y = values(&model.forward(&mut cx, x).unwrap().0);
            y.iter().zip(values(&dy)).map(|(y, dy)| f64::from(*y) * f64::from(dy)).sum()
        };
        let moved = |t: &Tensor, direction: &Tensor, by: f32| {
            ops::add(t, &ops::scale(direction, by).unwrap()).unwrap()
        };
        let slope = |plus: f64, minus: f64, h: f32| (plus - minus) / (2.0 * f64::from(h));
        let dot = |a: &[f32], b: &Tensor| -> f64 {
            a.iter().zip(values(b)).map(|(a, b)| f64::from(*a) * f64::from(b)).sum()
        };
        let close = |what: &str, got: f64, want: f64, norm: f64| {
            assert!((got - want).abs() <= 0.01 * norm, "{what}: {got}, differences {want}, norm {norm}");
        };
        let norm = |a: &[f32]| a.iter().map(|a| f64::from(*a) * f64::from(*a)).sum::<f64>().sqrt();
        let (h, direction) = (1e-2, noise([3, 5, 32], 4));
        let want =
            slope(loss(&model, &moved(&x, &direction, h)), loss(&model, &moved(&x, &direction, -h)), h);
        close("dx", dot(&values(&dx), &direction), want, norm(&values(&dx)));
        for (index, (name, grad)) in analytic.iter().enumerate() {
            let loss_at = |by: f32| {
                let mut model = block_with(options.clone());
                let parameter = &mut parameters_mut(&mut model)[index];
                let direction = noise(*parameter.tensor().shape(), 50 + index as u64);
                parameter.set(moved(parameter.tensor(), &direction, by)).unwrap();
                loss(&model, &x)
            };
            let h = 2e-3;
            let want = slope(loss_at(h), loss_at(-h), h);
            let direction = noise(*parameters(&model)[index].tensor().shape(), 50 + index as u64);
            close(name, dot(grad, &direction), want, norm(grad).max(0.1));
        }
    }
}

type Trained = (Vec<Vec<u32>>, ParameterBits, ScalingState);

/// Steps of several forwards, each its own scope, before their backwards in reverse order.
fn train<M: Module>(mut model: M) -> Trained {
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_dropout_seed(3).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut out = Vec::new();
    for step in 0..2 {
        let mut forwards = Vec::new();
        for i in 0..2 {
            let mut cx = scaling.autocast(&delayed()).unwrap();
            forwards.push(model.forward(&mut cx, &noise([2, 6, 32], 10 * step + i)).unwrap());
            cx.commit().unwrap();
        }
        for (y, saved) in forwards.into_iter().rev() {
            let dx = scaling.in_backward(|cx| model.backward(cx, saved, &y)).unwrap();
            out.extend([bits(&y), bits(&dx)]);
        }
        optimizer.step(&mut model, 0.01).unwrap();
        fp8_nn::zero_grad(&mut model).unwrap();
    }
    let (parameters, state) = everything(&model, &scaling);
    (out, parameters, state)
}

#[test]
fn recomputation_repeats_the_masks() {
    let named =
        |name| with_noise(TransformerLayer::new(name, options(ALL), &device(), &mut rng(1)).unwrap(), 1);
    let boxed = |name| Box::new(named(name)) as Box<dyn DynModule>;
    let again = |name| Box::new(Recompute::new(named(name))) as Box<dyn DynModule>;
    let stored = train(Stack(vec![boxed("a"), boxed("b"), boxed("c")]));
    // The second and third layer draw behind others of the scope; nested, from inside a replay.
    assert!(stored == train(Stack(vec![again("a"), boxed("b"), again("c")])), "recomputed");
    let nested = Recompute::new(Stack(vec![boxed("b"), again("c")]));
    assert!(stored == train(Stack(vec![boxed("a"), Box::new(nested)])), "nested");
}

/// Losses of some steps of a model with dropout.
fn losses(
    model: &mut Gpt,
    optimizer: &mut AdamW,
    scaling: &mut Scaling,
    steps: std::ops::Range<u64>,
) -> Vec<u32> {
    let mut out = Vec::new();
    for i in steps {
        let mut cx = scaling.autocast(&delayed()).unwrap();
        let (loss, saved) = model.loss(&mut cx, &ids([2, 8], 20, i), &ids([2, 8], 20, 100 + i)).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        optimizer.step(model, 0.01).unwrap();
        fp8_nn::zero_grad(model).unwrap();
        out.push(loss.item().unwrap().to_bits());
    }
    out
}

fn job(seed: u64) -> (Gpt, AdamW, Scaling) {
    let options = GptOptions {
        vocab_size: 20,
        num_layers: 1,
        embedding_dropout: 0.1,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 128,
            attention: AttentionOptions {
                num_attention_heads: 4,
                max_seq_length: 8,
                attention_dropout: 0.1,
                ..Default::default()
            },
            hidden_dropout: 0.1,
            drop_path_rate: 0.1,
            ..Default::default()
        },
        ..Default::default()
    };
    let model = Gpt::new("gpt", &options, &device(), &mut rng(seed)).unwrap();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_dropout_seed(u64::MAX - seed).unwrap();
    (model, AdamW::new(AdamWOptions::default()).unwrap(), scaling)
}

#[test]
fn resuming_draws_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut model, mut optimizer, mut scaling) = job(1);
    losses(&mut model, &mut optimizer, &mut scaling, 0..2);
    checkpoint::save(dir.path(), &model, &optimizer, &scaling, &BTreeMap::new()).unwrap();
    let uninterrupted = losses(&mut model, &mut optimizer, &mut scaling, 2..5);

    let (mut other, mut resumed, mut state) = job(2);
    losses(&mut other, &mut resumed, &mut state, 0..1); // a state on the device is replaced, too
    for fresh in [false, true] {
        if fresh {
            (other, resumed, state) = job(2);
        }
        checkpoint::load(dir.path(), &mut other, &mut resumed, &mut state).unwrap();
        assert_eq!(state.dropout_seed(), u64::MAX - 1);
        assert_eq!(losses(&mut other, &mut resumed, &mut state, 2..5), uninterrupted, "fresh {fresh}");
        assert!(everything(&model, &scaling) == everything(&other, &state));
        assert_eq!(state.state().unwrap().dropout, Some(DropoutProgress { seed: u64::MAX - 1, scopes: 5 }));
    }
}

/// Files without dropout, such as older ones, leave the seed alone.
#[test]
fn checkpoints_without_dropout_leave_the_seed() {
    let dir = tempfile::tempdir().unwrap();
    let save = |scaling: &Scaling, model: &Gpt, optimizer: &AdamW| {
        checkpoint::save(dir.path(), model, optimizer, scaling, &BTreeMap::new()).unwrap();
        String::from_utf8_lossy(&std::fs::read(checkpoint::path(dir.path())).unwrap()).contains("fp8.dropout")
    };
    let (mut model, mut optimizer) = (gpt(1), AdamW::new(AdamWOptions::default()).unwrap());
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    assert!(!save(&scaling, &model, &optimizer));
    scaling.set_dropout_seed(7).unwrap();
    checkpoint::load(dir.path(), &mut model, &mut optimizer, &mut scaling).unwrap();
    assert_eq!(scaling.state().unwrap().dropout, Some(DropoutProgress { seed: 7, scopes: 0 }));
    assert!(save(&scaling, &model, &optimizer));
}

#[test]
fn a_scope_left_without_commit_leaves_nothing_but_its_count() {
    let run = |left: usize, seed_again: bool| {
        let (mut model, mut optimizer, mut scaling) = job(1);
        for i in 0..left {
            let mut cx = scaling.autocast(&delayed()).unwrap();
            model.loss(&mut cx, &ids([2, 8], 20, 9), &ids([2, 8], 20, 8)).unwrap();
            if i > 0 {
                cx.discard().unwrap();
            }
        }
        if seed_again {
            let dropout = Some(DropoutProgress { seed: u64::MAX - 1, scopes: 0 });
            scaling.load_state(&ScalingState { dropout, ..scaling.state().unwrap() }).unwrap();
        }
        losses(&mut model, &mut optimizer, &mut scaling, 0..2)
    };
    assert_eq!(run(2, true), run(0, false));
    assert_ne!(run(2, false), run(0, false));
}

#[test]
fn the_cpu_draws_the_same() {
    let draws = |device: &Device| {
        let model = fp8_nn::fp8_recipe::GemmSlots::new("fc");
        let mut scaling = Scaling::new(&model, device).unwrap();
        scaling.set_dropout_seed(99).unwrap();
        let mut all = Vec::new();
        for _ in 0..3 {
            let mut cx = scaling.autocast(&delayed()).unwrap();
            let draws = [(); 2].map(|()| cx.dropout_draw().unwrap().unwrap());
            cx.commit().unwrap();
            all.extend(draws.map(|draw| draw.read().unwrap()));
        }
        all
    };
    let all = draws(&device());
    assert_eq!(all, draws(&Device::cpu()));
    assert!(all[0].seed != all[2].seed && all[0].offset != all[1].offset, "{all:?}");
    let y = |device: &Device| {
        let x = Tensor::full(1.0, [4, 6, 32], DType::F32, device).unwrap();
        let model = TransformerLayer::new("block", options([0.0, 0.5, 0.3]), device, &mut rng(1)).unwrap();
        let mut scaling = Scaling::new(&model, device).unwrap();
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        values(&model.forward(&mut cx, &x).unwrap().0)
    };
    // Where both branches were dropped, what came in goes out.
    let kept = |y: Vec<f32>| y.iter().map(|&y| y != 1.0).collect::<Vec<_>>();
    assert!(kept(y(&device())) == kept(y(&Device::cpu())));
}

/// Each rank keeps the seed that it was given, and takes the root's count.
#[test]
fn broadcasting_keeps_seeds_apart() {
    if device().to_string() != "cpu" {
        return; // groups of threads are the CPU's
    }
    let groups = local("dp", 2, Duration::from_secs(20)).unwrap();
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let (mut model, mut optimizer, mut scaling) = job(1);
                let rank = group.rank() as u64;
                scaling.set_dropout_seed(50 + rank).unwrap();
                if rank == 0 {
                    losses(&mut model, &mut optimizer, &mut scaling, 0..3);
                }
                broadcast_state(&mut model, &mut optimizer, &mut scaling, &*group, 0).unwrap();
                let dropout = scaling.state().unwrap().dropout;
                assert_eq!(dropout, Some(DropoutProgress { seed: 50 + rank, scopes: 3 }));
            });
        }
    });
}

#[test]
fn probabilities_out_of_range_are_refused() {
    for p in [1.0, -0.5, f32::NAN] {
        let refuse = |rates: Rates, sentence: &str| {
            let refused = error(TransformerLayer::new("block", options(rates), &device(), &mut rng(1)));
            assert_eq!(
                refused,
                format!("{sentence} = {p}: expected a probability of at least 0 and less than 1")
            );
        };
        refuse([p, 0.0, 0.0], "block.attention: attention_dropout");
        refuse([0.0, p, 0.0], "block: hidden_dropout");
        refuse([0.0, 0.0, p], "block: drop_path_rate");
        let options = GptOptions {
            vocab_size: 20,
            num_layers: 1,
            embedding_dropout: p,
            layer: TransformerLayerOptions {
                hidden_size: 32,
                ffn_hidden_size: 128,
                attention: AttentionOptions {
                    num_attention_heads: 4,
                    max_seq_length: 8,
                    ..Default::default()
                },
                ..Default::default()
            },
            ..Default::default()
        };
        let refused = error(Gpt::new("gpt", &options, &device(), &mut rng(1)));
        assert!(
            refused.starts_with(&format!("gpt: embedding_dropout = {p}: expected a probability")),
            "{refused}"
        );
    }
}
