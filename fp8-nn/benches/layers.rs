//! A training step of a Linear and of a TransformerLayer, in FP8 and, as the ceiling, in f32.
//!
//! `cargo bench -p fp8-nn --bench layers`. On a CPU FP8 is emulated: its GEMMs are f32's, and quantizing comes on top.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use std::hint::black_box;

fn noise(shape: impl Into<Shape>, seed: u64) -> Tensor {
    let (shape, mut rng) = (shape.into(), StdRng::seed_from_u64(seed));
    let values = (0..shape.numel()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_vec::<f32>(values, shape, &Device::cpu()).unwrap()
}

fn scopes() -> [(&'static str, Recipe, AutocastOptions); 3] {
    let off = AutocastOptions { enabled: false, ..Default::default() };
    [
        ("f32", DelayedScaling::default().into(), off),
        ("delayed", DelayedScaling::default().into(), AutocastOptions::default()),
        ("current", CurrentScaling::default().into(), AutocastOptions::default()),
    ]
}

/// Forward, backward and a new weight version, so that weights are quantized as in training.
fn step<M: Module>(
    model: &mut M,
    scaling: &mut Scaling,
    recipe: &Recipe,
    options: &AutocastOptions,
    x: &Tensor,
    dy: &Tensor,
) -> Tensor {
    for parameter in parameters_mut(model) {
        parameter.update(|_, _| Ok(())).unwrap();
    }
    let mut cx = scaling.scope(recipe, options).unwrap();
    let (y, saved) = model.forward(&mut cx, x).unwrap();
    cx.commit().unwrap();
    black_box(y);
    scaling.in_backward(|cx| model.backward(cx, saved, dy)).unwrap()
}

fn linear(c: &mut Criterion) {
    let mut group = c.benchmark_group("linear_step");
    let device = Device::cpu();
    for [m, n, k] in [[128, 512, 512], [512, 1024, 1024]] {
        let (x, dy) = (noise([m, k], 1), noise([m, n], 2));
        group.throughput(Throughput::Elements((3 * 2 * m * n * k) as u64)); // floating-point operations
        for (name, recipe, options) in scopes() {
            let sizes = LinearOptions { in_features: k, out_features: n, ..Default::default() };
            let mut model = Linear::new("fc", sizes, &device, &mut StdRng::seed_from_u64(1)).unwrap();
            let mut scaling = Scaling::new(&model, &device).unwrap();
            group.bench_function(BenchmarkId::new(name, format!("{m}x{n}x{k}")), |b| {
                b.iter(|| step(&mut model, &mut scaling, &recipe, &options, &x, &dy));
            });
        }
    }
    group.finish();
}

fn transformer_layer(c: &mut Criterion) {
    let mut group = c.benchmark_group("transformer_layer_step");
    let device = Device::cpu();
    let (x, dy) = (noise([2, 128, 256], 1), noise([2, 128, 256], 2));
    group.throughput(Throughput::Elements(2 * 128)); // tokens
    for (name, recipe, options) in scopes() {
        let sizes = TransformerLayerOptions {
            hidden_size: 256,
            ffn_hidden_size: 1024,
            attention: AttentionOptions { num_attention_heads: 4, rope: true, ..Default::default() },
            ..Default::default()
        };
        let mut model =
            TransformerLayer::new("block", sizes, &device, &mut StdRng::seed_from_u64(1)).unwrap();
        let mut scaling = Scaling::new(&model, &device).unwrap();
        group.bench_function(BenchmarkId::new(name, "2x128x256"), |b| {
            b.iter(|| step(&mut model, &mut scaling, &recipe, &options, &x, &dy));
        });
    }
    group.finish();
}

criterion_group! {
    name = layers;
    config = Criterion::default().sample_size(20);
    targets = linear, transformer_layer
}
criterion_main!(layers);
