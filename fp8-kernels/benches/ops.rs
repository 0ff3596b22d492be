//! Operations against the speed of a copy of the same bytes: `cargo bench -p fp8-kernels --bench ops`.
//!
//! All threads; `RAYON_NUM_THREADS=1` for the speed of one core.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fp8_kernels::{
    Cell, DType, Device, Encoding, Operand, Result, ScalePolicy, ScaleRule, Slot, Tensor, ops,
};
use std::hint::black_box;

const ROWS: usize = 2048;
const COLS: usize = 1024;
const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

fn input(dtype: DType) -> Result<Tensor> {
    let values = (0..ROWS * COLS).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    ops::cast(&Tensor::from_vec(values, [ROWS, COLS], &Device::cpu())?, dtype)
}

/// Reads as many bytes as the operation does, and writes a code per element.
fn copy(read: &[u8], written: &mut [u8]) {
    let (kept, rest) = read.split_at(written.len());
    written.copy_from_slice(kept);
    black_box(rest.iter().fold(0u8, |sum, byte| sum ^ byte));
}

fn fused(c: &mut Criterion, name: &str, run: impl Fn(&Tensor, &Slot<'_>) -> Result<Operand>) {
    let mut group = c.benchmark_group(name);
    group.throughput(Throughput::Elements((ROWS * COLS) as u64));
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let Ok(scale) = Cell::new(100.0, &Device::cpu()) else { return };
    let slot = Slot::fixed(Encoding::E4M3, &scale, &rule);
    for dtype in DTYPES {
        let Ok(x) = input(dtype) else { continue };
        group.bench_function(dtype.name(), |b| b.iter(|| run(&x, &slot)));
        let read = vec![1u8; x.numel() * dtype.size()];
        let mut written = vec![0u8; x.numel()];
        group.bench_function(format!("{dtype} copy"), |b| b.iter(|| copy(black_box(&read), &mut written)));
    }
    group.finish();
}

fn quantize(c: &mut Criterion) {
    fused(c, "quantize", ops::quantize);
}

fn quantize_dbias(c: &mut Criterion) {
    fused(c, "quantize_dbias", |x, slot| ops::quantize_dbias(x, slot).map(|(q, _)| q));
}

fn gelu(c: &mut Criterion) {
    fused(c, "gelu", |x, slot| ops::activation(x, ops::Activation::Gelu, slot));
}

fn norm(c: &mut Criterion) {
    let Ok(gamma) = Tensor::full(1.0, [COLS], DType::F32, &Device::cpu()) else { return };
    let options = ops::NormOptions::default();
    fused(c, "norm", |x, slot| ops::norm(x, &gamma, Some(&gamma), &options, slot).map(|(y, _)| y));
}

/// The f32 product is the ceiling of the FP8 one: on a CPU codes are decoded first.
fn gemm(c: &mut Criterion) {
    const N: usize = 512;
    let mut group = c.benchmark_group("gemm");
    group.throughput(Throughput::Elements((ROWS * COLS * N) as u64));
    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: fp8_kernels::Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
    let prepare = || {
        let x = input(DType::F32)?;
        let w = Tensor::from_vec(x.to_vec::<f32>()?[..N * COLS].to_vec(), [N, COLS], x.device())?;
        Ok::<_, fp8_kernels::Error>([
            ops::quantize(&x, &slot)?,
            ops::quantize(&w, &slot)?,
            Operand::High(x),
            Operand::High(w),
        ])
    };
    let Ok([x8, w8, x, w]) = prepare() else { return };
    group.bench_function("fp8", |b| {
        b.iter(|| ops::fprop(&x8, &w8, None, DType::BF16, ops::Accumulation::Fast))
    });
    group
        .bench_function("f32", |b| b.iter(|| ops::fprop(&x, &w, None, DType::BF16, ops::Accumulation::Fast)));
    group.finish();
}

criterion_group!(benches, quantize, quantize_dbias, gelu, norm, gemm);
criterion_main!(benches);
