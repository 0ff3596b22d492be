//! A training step of two ranks with and without sums of gradients: behind backward, beside it, and none. Each rank is a process of
//! its own with one thread.
//!
//!     cargo bench -p fp8-nn --bench data_parallel
//!
//! `cargo xtask network` runs it over a link that is as slow as it takes to show the difference.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program for the terminal, which ends if something fails"
)]

use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use std::env;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);
const RANKS: usize = 2;
/// Sequences of a rank, and their length.
const ROWS: usize = 16;
const SEQ: usize = 128;
const MODES: [&str; 3] = ["none", "blocking", "overlap"];

fn main() {
    if let Ok(mode) = env::var("FP8_BENCH_MODE") {
        return rank(&mode);
    }
    // Without `cargo bench`, as a test: once, with few tokens.
    let is_bench = env::args().any(|argument| argument == "--bench");
    let (rounds, steps, rows) = if is_bench { (5, 10, ROWS) } else { (1, 1, 1) };
    let mut times = MODES.map(|_| Vec::new());
    for _ in 0..rounds {
        for (mode, times) in MODES.iter().zip(&mut times) {
            times.push(run(mode, steps, rows));
        }
    }
    println!("{:<10} {:>9} {:>9}", "sums", "step, ms", "÷ none");
    let medians = times.map(median);
    for (mode, time) in MODES.iter().zip(medians) {
        println!("{mode:<10} {time:>9.1} {:>9.2}", time / medians[0]);
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs both ranks, and returns the median time of rank 0's steps.
fn run(mode: &str, steps: usize, rows: usize) -> f64 {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        Command::new(env::current_exe().unwrap())
            .env("FP8_BENCH_MODE", mode)
            .env("FP8_BENCH_STEPS", steps.to_string())
            .env("FP8_BENCH_ROWS", rows.to_string())
            .env("RAYON_NUM_THREADS", "1")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_RUN_ID", format!("bench {port}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<Child> = (0..RANKS).map(start).collect();
    let outputs = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap());
    let outputs: Vec<String> = outputs
        .map(|output| {
            assert!(output.status.success(), "a rank has failed");
            String::from_utf8(output.stdout).unwrap()
        })
        .collect();
    outputs[0].split_whitespace().next().unwrap().parse().unwrap()
}

/// A model of eight blocks, none of whose gradients is a sixteenth of all.
fn model() -> Result<Gpt> {
    let options = GptOptions {
        vocab_size: 256,
        num_layers: 8,
        layer: TransformerLayerOptions {
            hidden_size: 256,
            ffn_hidden_size: 1024,
            attention: AttentionOptions { num_attention_heads: 8, max_seq_length: SEQ, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    Gpt::new("gpt", &options, &Device::cpu(), &mut StdRng::seed_from_u64(1))
}

/// One rank: prints the median milliseconds of its steps, of their backward passes, and of what follows until gradients are
/// summed; the bytes that it sends in a step; and the bits of the last loss. `reduction` does nothing but sum gradients.
fn rank(mode: &str) {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<usize>().ok()).unwrap();
    let (steps, rank) = (number("FP8_BENCH_STEPS"), number("RANK"));
    let group = tcp("dp", &Environment::read().unwrap(), DEADLINE).unwrap();
    let mut model = model().unwrap();
    let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
    scaling.set_group(group.clone());
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let options = GradientsOptions { overlap: mode == "overlap", ..Default::default() };
    let mut gradients = Gradients::new(&model, group.clone(), options).unwrap();
    let rows = env::var("FP8_BENCH_ROWS").ok().and_then(|rows| rows.parse().ok()).unwrap_or(ROWS);
    let seq = SEQ;
    let mut rng = StdRng::seed_from_u64(rank as u64);
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let (mut sent, mut last) = (0, 0);
    for step in 0..steps + 2 {
        let mut draw = || (0..rows * seq).map(|_| rng.random_range(0..256)).collect::<Vec<i32>>();
        let ids = Tensor::from_vec(draw(), [rows, seq], &Device::cpu()).unwrap();
        let targets = Tensor::from_vec(draw(), [rows, seq], &Device::cpu()).unwrap();
        group.barrier().unwrap();
        let before = group.traffic().reductions.bytes;
        let start = Instant::now();
        let mut backward = Duration::ZERO;
        if mode != "reduction" {
            let recipe = DelayedScaling::default().into();
            let (loss, saved) = scaling.in_autocast(&recipe, |cx| model.loss(cx, &ids, &targets)).unwrap();
            let begun = Instant::now();
            let mut cx = scaling.backward().unwrap();
            if mode != "none" {
                gradients.watch(&mut cx, &mut model).unwrap();
            }
            model.loss_backward(&mut cx, saved).unwrap();
            cx.commit().unwrap();
            backward = begun.elapsed();
            last = loss.item().unwrap().to_bits();
        }
        let begun = Instant::now();
        if mode != "none" {
            gradients.finish(&mut model).unwrap();
        }
        let reduction = begun.elapsed();
        if mode != "reduction" {
            let norm = clip_grad_norm(&mut model, 1.0).unwrap();
            optimizer.step_with_norm(&mut model, 1e-3, &norm).unwrap();
        }
        zero_grad(&mut model).unwrap();
        if step >= 2 {
            sent = group.traffic().reductions.bytes - before;
            for (times, time) in times.iter_mut().zip([start.elapsed(), backward, reduction]) {
                times.push(time.as_secs_f64() * 1e3);
            }
        }
    }
    let [step, backward, reduction] = times.map(median);
    println!("{step:.2} {backward:.2} {reduction:.2} {sent} {last:08x}");
}
