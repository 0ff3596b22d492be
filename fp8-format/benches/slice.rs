//! Slices against a copy loop that reads and writes the same bytes.
//!
//! `cargo bench -p fp8-format --bench slice`

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use fp8_format::philox::Philox;
use fp8_format::{E4M3, E5M2, Fp8, slice};
use half::bf16;
use std::hint::black_box;

/// 5 MiB of f32 and codes together: beyond the second-level cache, inside the third.
const ELEMENTS: usize = 1 << 20;

fn values() -> Vec<f32> {
    (0..ELEMENTS).map(|i| ((i as f32) * 0.613).sin() * 300.0).collect()
}

/// The least work that moves the bytes: the second byte of each source element, or four bytes out of one.
fn ceilings(group: &mut BenchmarkGroup<'_, WallTime>, x: &[f32]) {
    let words: Vec<u32> = x.iter().map(|x| x.to_bits()).collect();
    let mut bytes = vec![0_u8; ELEMENTS];
    group.bench_function("ceiling f32 to u8", |b| {
        b.iter(|| {
            for (d, s) in bytes.iter_mut().zip(black_box(&words)) {
                *d = (s >> 24) as u8;
            }
            black_box(&mut bytes);
        });
    });
    let mut wide = vec![0_u32; ELEMENTS];
    group.bench_function("ceiling u8 to f32", |b| {
        b.iter(|| {
            for (d, s) in wide.iter_mut().zip(black_box(&bytes)) {
                *d = u32::from(*s) << 24;
            }
            black_box(&mut wide);
        });
    });
}

fn format<T: Fp8>(group: &mut BenchmarkGroup<'_, WallTime>, x: &[f32]) {
    let name = T::ENCODING;
    let halves: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    let mut codes = vec![T::default(); ELEMENTS];
    let mut columnwise = codes.clone();
    let mut back = vec![0.0_f32; ELEMENTS];
    group.bench_function(format!("{name} from_f32_saturating"), |b| {
        b.iter(|| slice::from_f32_saturating(black_box(x), black_box(&mut codes)));
    });
    group.bench_function(format!("{name} from_bf16_saturating"), |b| {
        b.iter(|| slice::from_bf16_saturating(black_box(&halves), black_box(&mut codes)));
    });
    group.bench_function(format!("{name} quantize f32"), |b| {
        b.iter(|| slice::quantize(black_box(x), 1.37, black_box(&mut codes)));
    });
    group.bench_function(format!("{name} quantize bf16"), |b| {
        b.iter(|| slice::quantize(black_box(&halves), 1.37, black_box(&mut codes)));
    });
    group.bench_function(format!("{name} quantize_transpose f32"), |b| {
        b.iter(|| slice::quantize_transpose(black_box(x), 1024, 1024, 1.37, &mut codes, &mut columnwise));
    });
    group.bench_function(format!("{name} transpose"), |b| {
        b.iter(|| slice::transpose(black_box(&codes), 1024, 1024, black_box(&mut columnwise)));
    });
    group.bench_function(format!("{name} to_f32"), |b| {
        b.iter(|| slice::to_f32(black_box(&codes), black_box(&mut back)));
    });
    group.bench_function(format!("{name} from_f32_stochastic"), |b| {
        b.iter(|| slice::from_f32_stochastic(black_box(x), Philox::new(42, 0), black_box(&mut codes)));
    });
}

fn codec(c: &mut Criterion) {
    let mut group = c.benchmark_group("slice");
    group.throughput(Throughput::Elements(ELEMENTS as u64)).sample_size(20);
    let x = values();
    ceilings(&mut group, &x);
    format::<E4M3>(&mut group, &x);
    format::<E5M2>(&mut group, &x);
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);
