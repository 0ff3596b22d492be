//! Gradients of ranks that share a batch, and their norm, against PyTorch in f64. The sums show a wrong constant factor, which
//! losses hide: AdamW does not depend on the size of gradients.
//!
//! `tests/golden/data_parallel/generate.py` made the data.

use super::sample::samples;
use super::support::{bits, delayed, device, off, relative_rms, rng};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use std::thread;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);

/// The bits of each parameter after a step of a rank.
fn step(group: &dyn ProcessGroup, microbatches: usize) -> Vec<(String, Vec<u32>)> {
    let (_, sample) = samples("data_parallel").remove(0);
    let size = |option| sample.size(option).unwrap();
    let options = GptOptions {
        vocab_size: size("vocab_size"),
        num_layers: size("num_layers"),
        layer: TransformerLayerOptions {
            hidden_size: size("hidden_size"),
            ffn_hidden_size: size("ffn_hidden_size"),
            attention: AttentionOptions {
                num_attention_heads: size("num_attention_heads"),
                ..Default::default()
            },
            ..Default::default()
        },
        ..Default::default()
    };
    let mut model = Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap();
    for parameter in parameters_mut(&mut model) {
        parameter.set(sample.tensors[&**parameter.name()].clone()).unwrap();
    }
    let shape = sample.tensors["ids"].shape();
    let (batch, seq) = (shape[0], shape[1]);
    let normalizer = Some((batch * seq) as f32);
    let rows = batch / group.world_size() / microbatches;
    let part = |name: &str, microbatch: usize| {
        let values = sample.tensors[name].to_f32_vec().unwrap();
        let first = (group.rank() * microbatches + microbatch) * rows * seq;
        let values = values[first..first + rows * seq].iter().map(|&id| id as i32).collect();
        Tensor::from_vec(values, [rows, seq], &device()).unwrap()
    };

    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut loss = 0.0;
    for microbatch in 0..microbatches {
        let (ids, targets) = (part("ids", microbatch), part("targets", microbatch));
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let options = ops::CrossEntropyOptions { normalizer, ..Default::default() };
        let (part, saved) =
            model.loss_with_info(&mut cx, &ids, &targets, options, &SequenceInfo::default()).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        loss += part.item().unwrap();
    }
    all_reduce_gradients(&mut model, group).unwrap();
    let loss = Tensor::scalar(loss, &device()).unwrap();
    let loss = group.all_reduce("loss", &loss, ReduceOp::Sum).unwrap().item().unwrap();

    let expected = |option: &str| sample.config[option].as_f64().unwrap();
    assert!((f64::from(loss) / expected("loss") - 1.0).abs() < 1e-6, "loss {loss}, not {}", expected("loss"));
    for parameter in parameters(&model) {
        let name = parameter.name();
        let expected = sample.tensors[&format!("grad.{name}")].to_f32_vec().unwrap();
        let error = relative_rms(&expected, &parameter.main_grad().to_f32_vec().unwrap());
        assert!(error <= 1e-5, "{name}: relative RMS error {error:.1e}");
    }
    let norm = clip_grad_norm(&mut model, 0.5).unwrap().item().unwrap();
    assert!((f64::from(norm) / expected("norm") - 1.0).abs() < 1e-6, "norm {norm}, not {}", expected("norm"));
    AdamW::new(AdamWOptions::default()).unwrap().step(&mut model, 0.01).unwrap();
    parameters(&model)
        .iter()
        .map(|parameter| (parameter.name().to_string(), bits(parameter.tensor())))
        .collect()
}

#[test]
fn ranks_arrive_at_the_gradients_of_pytorch_and_at_equal_parameters() {
    for (world_size, microbatches) in [(1, 1), (2, 1), (4, 1), (2, 4)] {
        let groups = local("dp", world_size, DEADLINE).unwrap();
        let parameters: Vec<_> = thread::scope(|scope| {
            let ranks = groups.into_iter().map(|group| scope.spawn(move || step(&*group, microbatches)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(parameters.iter().all(|rank| *rank == parameters[0]), "{world_size} ranks differ");
    }
}
