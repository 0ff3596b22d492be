//! Bytes that four ranks with sequence parallelism keep for a step, counted: a part of what one device keeps.
//!
//! One test, because all tensors on the CPU share one count.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and shows what it measured"
)]

use fp8_nn::fp8_dist::{Mesh, MeshOptions, local};
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use fp8_nn::{TensorParallel, TensorParallelOptions};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const SEQ: usize = 256;

/// The bytes of all ranks that backward needs, and the most that is in use in a step besides parameters, gradients and moments.
fn measure(ranks: usize, recipe: &Recipe) -> [usize; 2] {
    let run = |world: Arc<dyn ProcessGroup>| {
        let device = Device::cpu();
        let mesh = Mesh::new(world.clone(), &MeshOptions { dp: 1, tp: ranks }).unwrap();
        let sharing = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
        let attention =
            AttentionOptions { num_attention_heads: 4, max_seq_length: SEQ, ..Default::default() };
        let layer = TransformerLayerOptions {
            hidden_size: 256,
            ffn_hidden_size: 1024,
            attention,
            params_dtype: DType::BF16,
            tensor_parallel: TensorParallel::new(mesh.tp().clone(), &sharing).unwrap(),
            ..Default::default()
        };
        let options = GptOptions { vocab_size: 4096, num_layers: 8, layer, ..Default::default() };
        let mut model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
        let mut scaling = Scaling::new(&model, &device).unwrap();
        scaling.set_group(mesh.amax_group());
        let ids: Vec<i32> = (0..2 * SEQ as i32).map(|i| i * 7 % 4096).collect();
        let ids = Tensor::from_vec(ids, [2, SEQ], &device).unwrap();
        let mut bytes = [0; 2];
        // In the second step the weights of FP8 have their memory.
        for _ in 0..2 {
            world.barrier().unwrap();
            let before = device.memory_report().now;
            if world.rank() == 0 {
                device.reset_peak_memory();
            }
            world.barrier().unwrap();
            let (loss, saved) = scaling.in_autocast(recipe, |cx| model.loss(cx, &ids, &ids)).unwrap();
            drop(loss);
            world.barrier().unwrap();
            let kept = device.memory_report().now.saved - before.saved;
            world.barrier().unwrap();
            scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
            all_reduce_gradients(&mut model, &**mesh.dp()).unwrap();
            world.barrier().unwrap();
            let peak = device.memory_report().peak;
            bytes = [kept, peak.saved + peak.temporary - before.saved - before.temporary];
            zero_grad(&mut model).unwrap();
        }
        bytes
    };
    thread::scope(|scope| {
        let worlds = local("world", ranks, Duration::from_secs(60)).unwrap().into_iter();
        let run = &run;
        let threads: Vec<_> = worlds.map(|world| scope.spawn(move || run(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>().remove(0)
    })
}

#[test]
fn four_ranks_keep_at_most_three_tenths_of_one_device_each() {
    for recipe in [Recipe::from(DelayedScaling::default()), Recipe::off()] {
        let [one, four] = [1, 4].map(|ranks| measure(ranks, &recipe));
        let of_rank = four.map(|bytes| bytes / 4);
        println!("{recipe}: {of_rank:?} bytes on each of 4 ranks (kept, peak), {one:?} on one device");
        for (of_rank, one) in of_rank.into_iter().zip(one) {
            assert!(of_rank as f64 <= 0.30 * one as f64, "{recipe}: {of_rank} of {one} bytes");
        }
    }
}
