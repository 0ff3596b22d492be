//! Operations against the speed of a copy of the same bytes: `cargo bench -p fp8-kernels --bench ops`.
//!
//! All threads; `RAYON_NUM_THREADS=1` for the speed of one core.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fp8_format::Blocks;
use fp8_kernels::{
    Cell, DType, Device, Encoding, Nvfp4Rule, Operand, Result, Scale, ScalePolicy, ScaleRule, Slot, Tensor,
    ops,
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

/// Products of codes beside that of the f32 values that they stand for: on a CPU codes are decoded first. Many rows, and one.
fn gemm(c: &mut Criterion) {
    const N: usize = 512;
    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let fp8 = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
    let blocks = |blocks| Slot {
        scale: Scale::Nvfp4(Nvfp4Rule { blocks, ..Nvfp4Rule::default() }),
        ..Slot::off(Encoding::E2M1)
    };
    let [x4, w4] = [blocks(Blocks::B1x16), blocks(Blocks::B16x16)];
    for rows in [ROWS, 1] {
        let mut group = c.benchmark_group(if rows == 1 { "gemm of one row" } else { "gemm" });
        group.throughput(Throughput::Elements((rows * COLS * N) as u64));
        let operands = |[x_slot, w_slot]: [&Slot<'_>; 2]| {
            let values = input(DType::F32)?.to_vec::<f32>()?;
            let part =
                |rows: usize| Tensor::from_vec(values[..rows * COLS].to_vec(), [rows, COLS], &Device::cpu());
            Ok::<_, fp8_kernels::Error>([
                ops::quantize(&part(rows)?, x_slot)?,
                ops::quantize(&part(N)?, w_slot)?,
            ])
        };
        let off = Slot::off(Encoding::E4M3);
        for (name, slots) in [("fp8", [&fp8, &fp8]), ("nvfp4", [&x4, &w4]), ("f32", [&off, &off])] {
            let Ok([x, w]) = operands(slots) else { continue };
            group.bench_function(name, |b| {
                b.iter(|| ops::fprop(&x, &w, None, DType::BF16, ops::Accumulation::Fast))
            });
        }
        group.finish();
    }
}

criterion_group!(benches, quantize, quantize_dbias, gelu, norm, gemm);
criterion_main!(benches);
