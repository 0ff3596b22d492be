//! A tensor sharded over four ranks becomes whole on each, in FP8: a quarter of f32's traffic, and the bytes that one
//! device would make. Then what happens when ranks hold different scales.
//!
//! `cargo run -p fp8-dist --example 05_all_gather`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_dist::{ProcessGroup, Result, local, quantized_all_gather};
use fp8_kernels::{Cell, Device, Encoding, Scale, ScalePolicy, ScaleRule, Slot, Tensor, ops};
use std::time::Duration;
use std::{io, thread};

const RANKS: usize = 4;
const SHARD: [usize; 2] = [4, 256];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::cpu();
    let len = SHARD[0] * SHARD[1];
    let mut x: Vec<f32> = (0..RANKS * len).map(|i| (i as f32 * 0.37).sin()).collect();
    x[RANKS * len - 1] = 1e4; // on the last rank
    let whole = Tensor::from_vec(x.clone(), [RANKS * SHARD[0], SHARD[1]], &device)?;
    let mut shards = Vec::new();
    for x in x.chunks(len) {
        shards.push(Tensor::from_vec(x.to_vec(), SHARD, &device)?);
    }

    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
    let expected = ops::quantize(&whole, &slot)?;
    let expected = expected.as_fp8().ok_or("quantizing stayed in high precision")?;

    println!("{RANKS} ranks, {SHARD:?} each; the last value of the last rank is 1e4\n");
    let gathered = on_all_ranks(|group| {
        quantized_all_gather(group, "x", &shards[group.rank()], &slot).map_err(|error| error.to_string())
    })?;
    for (rank, (whole, shard)) in gathered.into_iter().zip(&shards).enumerate() {
        let whole = whole?;
        let whole = whole.as_fp8().ok_or("the gathered tensor stayed in high precision")?;
        let equal = whole.codes()? == expected.codes()?;
        let (scale, own) = (whole.scale_inv().item()?.recip(), rule.scale(ops::amax(shard)?.item()?, 1.0)?);
        println!("rank {rank}   own scale {own:<10} common scale {scale:<8} bytes of one device: {equal}");
        if !equal {
            return Err("the bytes differ from one device's".into());
        }
    }
    println!("each rank sent {} bytes; in f32 it would have been {}\n", len, 4 * len);

    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let errors = on_all_ranks(|group| {
        let scale = Cell::new([2.0, 2.0, 4.0, 2.0][group.rank()], &Device::cpu())?; // rank 2 went its own way
        let slot = Slot::fixed(Encoding::E4M3, &scale, &rule);
        quantized_all_gather(group, "x", &shards[group.rank()], &slot).map(drop)
    })?;
    println!("with a scale of its own on rank 2:");
    for (rank, error) in errors.into_iter().enumerate() {
        println!("rank {rank}   {}", error.err().ok_or("different scales were not noticed")?);
    }
    Ok(())
}

/// Runs `f` as every rank of a new group, each in a thread of its own.
fn on_all_ranks<T: Send>(
    f: impl Fn(&dyn ProcessGroup) -> T + Sync,
) -> Result<Vec<T>, Box<dyn std::error::Error>> {
    let groups = local("tp", RANKS, Duration::from_secs(10))?;
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(&*group))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, T>| {
            thread.join().map_err(|_| io::Error::other("a rank panicked").into())
        };
        threads.into_iter().map(join).collect()
    })
}
