//! Memory of a training on a CPU in its steady state: page faults of a step, and what the process keeps over many steps.
//!
//! The kernel counts for the whole process, so this file has one test. With `-- --nocapture` it prints its numbers.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fp8_nn::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::io::Write;

/// Page faults that a step may cause.
const FAULTS: usize = 50;
/// The bytes by which a process may grow in 500 steps.
const GROWTH: usize = 1 << 19;
/// Steps before anything is counted.
const WARM_UP: usize = 10;

/// Page faults of this process, with and without a read from a disk.
fn faults() -> usize {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The second field, a name in parentheses, may contain spaces.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    [7, 9].iter().map(|&field| fields[field].parse::<usize>().unwrap()).sum()
}

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

struct Training {
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
    autocast: AutocastOptions,
    batch: [Tensor; 2],
}

impl Training {
    fn new(num_layers: usize, hidden_size: usize, rows: usize, autocast: AutocastOptions) -> Self {
        let length = hidden_size;
        let device = Device::cpu();
        let options = GptOptions {
            vocab_size: 256,
            num_layers,
            layer: TransformerLayerOptions {
                hidden_size,
                ffn_hidden_size: 4 * hidden_size,
                attention: AttentionOptions {
                    num_attention_heads: 2,
                    max_seq_length: length,
                    ..Default::default()
                },
                ..Default::default()
            },
            ..Default::default()
        };
        let model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let scaling = Scaling::new(&model, &device).unwrap();
        let recipe = Recipe::from(DelayedScaling::default());
        let batch = [7, 11].map(|factor| {
            let ids = (0..(rows * length) as i32).map(|i| i * factor % 256).collect();
            Tensor::from_vec(ids, [rows, length], &device).unwrap()
        });
        Self { model, optimizer, scaling, recipe, autocast, batch }
    }

    fn step(&mut self) -> fp8_nn::Result<f32> {
        let [ids, targets] = &self.batch;
        let mut cx = self.scaling.scope(&self.recipe, &self.autocast)?;
        let (loss, saved) = self.model.loss(&mut cx, ids, targets)?;
        cx.commit()?;
        let mut cx = self.scaling.backward()?;
        self.model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        let grad_norm = clip_grad_norm(&mut self.model, 1.0)?;
        self.optimizer.step_with_norm(&mut self.model, 1e-3, &grad_norm)?;
        zero_grad(&mut self.model)?;
        Ok(loss.item()?)
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| assert!(self.step().unwrap().is_finite()));
    }
}

#[test]
fn a_step_in_its_steady_state_faults_no_pages_and_keeps_no_memory() {
    let high = AutocastOptions { enabled: false, ..Default::default() };
    let bf16 = AutocastOptions { compute_dtype: Some(DType::BF16), ..Default::default() };
    for (name, autocast) in [("f32", high), ("FP8", AutocastOptions::default()), ("FP8, bf16", bf16)] {
        // Activations of a quarter of a megabyte, which the system allocator maps and unmaps one by one.
        let mut training = Training::new(2, 128, 4, autocast.clone());
        training.steps(WARM_UP);
        let before = faults();
        training.steps(20);
        let per_step = (faults() - before) / 20;
        drop(training);

        let mut training = Training::new(1, 32, 1, autocast);
        training.steps(WARM_UP);
        let before = resident();
        training.steps(500);
        let growth = resident().saturating_sub(before);
        let numbers =
            format!("{name}: {per_step} page faults a step; {} KiB more after 500 steps", growth / 1024);
        writeln!(std::io::stderr(), "{numbers}").unwrap();
        assert!(per_step <= FAULTS && growth <= GROWTH, "{numbers}");
    }
}
