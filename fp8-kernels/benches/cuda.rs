//! The memory-bound operations on a GPU against the driver's copy on the same stream: `cargo bench -p fp8-kernels --bench
//! cuda`.
//!
//! Throughput counts the bytes that an operation has to read and write, the copy's likewise: their ratio is how near the
//! operation comes to the speed of memory. Each measurement queues launches over tensors that do not fit the L2 cache and
//! waits once. Without a GPU nothing is measured; a simulated one has no speed.

#![expect(clippy::print_stderr, reason = "says why nothing is measured")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cudarc::driver::{CudaContext, CudaStream};
use fp8_kernels::{
    Cell, DType, Device, Encoding, REST, Result, ScalePolicy, ScaleRule, Slot, Tensor, TransposePolicy, ops,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// 128 MiB in bf16: more than the L2 of any GPU that is supported.
const ROWS: usize = 8192;
const COLS: usize = 8192;

fn device() -> Option<Device> {
    match Device::cuda(0) {
        Ok(device) if device.is_simulated() => {
            eprintln!("not measured: {} is simulated and has no speed", device.description());
            None
        }
        Ok(device) => {
            eprintln!("measured on {}", device.description());
            Some(device)
        }
        Err(error) => {
            eprintln!("not measured: {error}");
            None
        }
    }
}

/// `launches` of `run`, and the wait for all of them.
fn time(device: &Device, launches: u64, mut run: impl FnMut() -> Result<()>) -> Result<Duration> {
    // Compiles kernels and fills the allocator.
    run()?;
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..launches {
        run()?;
    }
    device.synchronize()?;
    Ok(start.elapsed())
}

fn measure(
    c: &mut Criterion,
    stream: &Arc<CudaStream>,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let device = &Device::from_stream(stream.clone())?.with_transpose_policy(TransposePolicy::WithCast);
    let values = (0..COLS).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let row = Tensor::from_vec(values, [1, COLS], device)?;
    let zeros = Tensor::zeros([ROWS, COLS], DType::BF16, device)?;
    let x = ops::bias(&zeros, &row.reshape([COLS])?)?;
    let gamma = Tensor::full(1.0, [COLS], DType::F32, device)?;
    let (scale, amax) = (Cell::new(100.0, device)?, Cell::new(REST, device)?);
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &scale, &rule) };
    let both = Slot { columnwise: true, ..slot };
    let elements = (ROWS * COLS) as u64;
    let source = stream.alloc_zeros::<u8>(2 * ROWS * COLS)?;
    let mut target = stream.alloc_zeros::<u8>(2 * ROWS * COLS)?;

    let mut group = c.benchmark_group("cuda");
    let mut bench = |name: &str, bytes: u64, run: &mut dyn FnMut() -> Result<()>| {
        group.throughput(Throughput::Bytes(bytes * elements));
        group.bench_function(name, |b| {
            b.iter_custom(|launches| match time(device, launches, &mut *run) {
                Ok(elapsed) => elapsed,
                Err(error) => {
                    eprintln!("{name}: {error}");
                    Duration::MAX
                }
            });
        });
    };
    bench("copy", 4, &mut || {
        // A copy that fails shows in the next wait.
        let _ = stream.memcpy_dtod(&source, &mut target);
        Ok(())
    });
    bench("quantize", 3, &mut || ops::quantize(&x, &slot).map(drop));
    bench("quantize_transpose", 4, &mut || ops::quantize(&x, &both).map(drop));
    bench("quantize_transpose_dbias", 4, &mut || ops::quantize_dbias(&x, &both).map(drop));
    bench("gelu_quantize_transpose", 4, &mut || ops::activation(&x, ops::Activation::Gelu, &both).map(drop));
    let options = ops::NormOptions::default();
    bench("norm_quantize", 3, &mut || ops::norm(&x, &gamma, Some(&gamma), &options, &slot).map(drop));
    bench("norm_quantize_transpose", 4, &mut || ops::norm(&x, &gamma, None, &options, &both).map(drop));
    group.finish();
    Ok(())
}

fn cuda(c: &mut Criterion) {
    // Opening a device finds the driver, or says why there is none; the context is then the same.
    let Some(_device) = device() else { return };
    let measured = CudaContext::new(0)
        .and_then(|context| context.new_stream())
        .map_err(Into::into)
        .and_then(|stream| measure(c, &stream));
    if let Err(error) = measured {
        eprintln!("not measured: {error}");
    }
}

criterion_group!(benches, cuda);
criterion_main!(benches);
