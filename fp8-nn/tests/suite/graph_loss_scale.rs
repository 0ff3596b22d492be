//! Recorded steps with a loss scaler: a replay whose gradients overflow skips the step and lowers the scale.

use crate::every_device::support::*;
use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_dist::{Environment, nccl};
use fp8_nn::prelude::*;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Options of an optimizer with a group of its own for norms.
pub(crate) fn with_group() -> AdamWOptions {
    let norms = ParameterGroup { pattern: "norm".to_owned(), lr_factor: 0.5, weight_decay: Some(0.1) };
    AdamWOptions { groups: vec![norms], ..Default::default() }
}

/// A model that trains in f16, with inputs that stay where they are.
struct Training {
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    scaler: LossScaler,
    group: Option<Arc<dyn ProcessGroup>>,
    ids: Tensor,
    targets: Tensor,
    /// Whether the optimizer gets the norm of clipping.
    gives_norm: bool,
}

impl Training {
    fn new(group: Option<Arc<dyn ProcessGroup>>, gives_norm: bool) -> Self {
        let options = GptOptions {
            vocab_size: 20,
            num_layers: 1,
            layer: TransformerLayerOptions {
                hidden_size: 32,
                ffn_hidden_size: 128,
                attention: AttentionOptions {
                    num_attention_heads: 4,
                    max_seq_length: 8,
                    ..Default::default()
                },
                params_dtype: DType::F16,
                ..Default::default()
            },
            ..Default::default()
        };
        let model = Gpt::new("gpt", &options, &device(), &mut rng(3)).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        if let Some(group) = &group {
            scaling.set_group(group.clone());
        }
        let options = LossScalerOptions { init_scale: 1024.0, growth_interval: 4, ..Default::default() };
        let scaler = LossScaler::new(options, &device()).unwrap();
        let optimizer = AdamW::new(with_group()).unwrap();
        let (ids, targets) = (ids([2, 8], 20, 0), ids([2, 8], 20, 100));
        Self { model, optimizer, scaling, scaler, group, ids, targets, gives_norm }
    }

    fn queue(&mut self, lr: f32) -> Result<[Tensor; 2]> {
        let Self { model, optimizer, scaling, scaler, .. } = self;
        let (loss, saved) = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &self.ids, &self.targets))?;
        scaling.in_backward(|cx| model.loss_backward_scaled(cx, saved, scaler))?;
        if let Some(group) = &self.group {
            all_reduce_gradients(model, &**group)?;
        }
        let norm = scaler.clip_grad_norm(model, 1.0)?;
        if self.gives_norm {
            scaler.step_with_norm(optimizer, model, lr, &norm)?;
        } else {
            scaler.step(optimizer, model, lr)?;
        }
        scaler.update()?;
        zero_grad(model)?;
        Ok([loss, norm])
    }

    /// The batch of a step, each rank's own.
    fn load(&mut self, step: u64) {
        let step = step + 1000 * self.group.as_ref().map_or(0, |group| group.rank() as u64);
        let values = |seed| ids([2, 8], 20, seed).to_vec::<i32>().unwrap();
        self.ids.write(&values(step), "ids").unwrap();
        self.targets.write(&values(100 + step), "targets").unwrap();
    }

    fn eager(&mut self, step: u64) -> [u32; 2] {
        self.load(step);
        read(&self.queue(rate(step)).unwrap())
    }

    fn replay(&mut self, graph: &Graph, step: u64) {
        self.load(step);
        self.optimizer.set_lr(rate(step)).unwrap();
        graph.replay().unwrap();
    }

    /// Makes one element of a gradient infinite. Backward adds to it.
    fn spoil(&mut self) {
        for (i, parameter) in parameters_mut(&mut self.model).into_iter().enumerate() {
            let grad = parameter.main_grad_mut();
            let mut values = vec![0.0f32; grad.numel()];
            if i == 0 {
                values[grad.numel() / 2] = f32::INFINITY;
            }
            grad.write(&values, "grad").unwrap();
        }
    }

    /// The scale, the steps that it skipped, and the updates.
    fn counts(&self) -> (f32, u64, u64) {
        let state = self.scaler.state().unwrap();
        (state.scale, state.skipped_steps, self.optimizer.updates().unwrap())
    }
}

fn read(results: &[Tensor; 2]) -> [u32; 2] {
    [0, 1].map(|i| results[i].item().unwrap().to_bits())
}

fn rate(step: u64) -> f32 {
    1e-2 / (1.0 + step as f32)
}

#[test]
fn replays_skip_and_adapt_as_eager_steps_do() {
    for gives_norm in [true, false] {
        let [mut eager, mut recorded] = [(); 2].map(|()| Training::new(None, gives_norm));
        for step in 0..2 {
            assert_eq!(eager.eager(step), recorded.eager(step));
        }
        recorded.load(2);
        let (graph, results) = device().capture(|| recorded.queue(rate(2))).unwrap();
        assert_eq!(eager.eager(2), read(&results), "the recorded step itself");
        // It grows after four good steps.
        for (step, is_bad, counts) in [
            (3, false, (2048.0, 0, 4)),
            (4, true, (1024.0, 1, 4)),
            (5, false, (1024.0, 1, 5)),
            (6, true, (512.0, 2, 5)),
            (7, true, (256.0, 3, 5)),
            (8, false, (256.0, 3, 6)),
        ] {
            if is_bad {
                eager.spoil();
                recorded.spoil();
            }
            let before = parameter_bits(&recorded.model);
            recorded.replay(&graph, step);
            assert_eq!(eager.eager(step), read(&results), "step {step}");
            assert_eq!((eager.counts(), recorded.counts()), (counts, counts), "step {step}");
            let values = |all: ParameterBits| all.into_iter().map(|(_, value, _)| value).collect::<Vec<_>>();
            assert_eq!(values(before) == values(parameter_bits(&recorded.model)), is_bad, "step {step}");
        }
        let all = |training: &Training| everything(&training.model, &training.scaling);
        assert!(all(&eager) == all(&recorded), "parameters, histories, scales and counts of updates");
    }
}

#[test]
fn ranks_skip_together_in_replays() {
    let world_size = unless_simulated(1, 2); // a real GPU holds one rank
    if world_size > 1 {
        Control::open(&library_path().unwrap()).unwrap().set("nccl_shared", "1").unwrap();
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let run = |rank: usize| {
        let run_id = "loss scale".to_owned();
        let alone = Environment { run_id, ..Environment::on_this_machine(port) };
        let here = Environment { rank, local_rank: rank, world_size, exact_port: true, ..alone };
        let group = nccl("dp", &here, &device(), Duration::from_secs(60)).unwrap();
        let mut training = Training::new(Some(group), false);
        for step in 0..2 {
            training.eager(step);
        }
        training.load(2);
        let (graph, _) = device().capture(|| training.queue(rate(2))).unwrap();
        for step in 3..6 {
            // The gradients of the last rank alone.
            if step == 4 && rank + 1 == world_size {
                training.spoil();
            }
            training.replay(&graph, step);
        }
        assert_eq!(training.counts(), (1024.0, 1, 5), "rank {rank}");
        everything(&training.model, &training.scaling)
    };
    let ends: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ends.iter().all(|end| *end == ends[0]), "ranks differ");
}
