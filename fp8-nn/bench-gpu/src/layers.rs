//! Layers: what a call costs the host, and a transformer layer forward and backward.

use crate::result::Result;
use crate::timer::{Bench, Mode, Work};
use crate::{attention, libraries};
use fp8_nn::prelude::*;
use fp8_nn::rand::{SeedableRng, rngs::StdRng};
use std::time::Instant;

/// Calls of one measurement of the host.
const CALLS: usize = 1000;

fn high_precision() -> AutocastOptions {
    AutocastOptions { enabled: false, ..AutocastOptions::default() }
}

/// The forward call of a `Linear`, by the clock on the wall: nothing is waited for in between.
pub(crate) fn host(bench: &mut Bench) -> Result {
    let (sides, calls) = if bench.dry { (vec![16], 3) } else { (vec![16, 256, 1024], CALLS) };
    let device = bench.device.clone();
    let recipe = Recipe::from(DelayedScaling::default());
    for side in sides {
        let sizes = LinearOptions {
            in_features: side,
            out_features: side,
            params_dtype: DType::BF16,
            ..LinearOptions::default()
        };
        let model = Linear::new("fc", sizes, &device, &mut StdRng::seed_from_u64(1))?;
        let x = bench.pool.tensor([side, side], DType::BF16, 1, &device)?;
        for (name, options) in [("bf16", high_precision()), ("fp8", AutocastOptions::default())] {
            let mut scaling = Scaling::new(&model, &device)?;
            let mut times = Vec::new();
            for _ in 0..5 {
                let mut cx = scaling.scope(&recipe, &options)?;
                drop(model.forward(&mut cx, &x)?);
                device.synchronize()?;
                let start = Instant::now();
                for _ in 0..calls {
                    drop(model.forward(&mut cx, &x)?);
                }
                times.push(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
                device.synchronize()?;
                cx.commit()?;
            }
            times.sort_by(f64::total_cmp);
            bench.record(
                "host",
                &format!("linear {side} {name}"),
                [times[2], times[0]],
                Work::Calls,
                "wall clock",
            )?;
        }
    }
    Ok(())
}

/// Name, width, heads, sequence, batch.
type LayerSize = (&'static str, usize, usize, usize, usize);
const LAYERS: [LayerSize; 3] =
    [("h1024", 1024, 16, 2048, 1), ("h2048", 2048, 16, 2048, 4), ("h4096", 4096, 32, 2048, 8)];

pub(crate) fn layer(bench: &mut Bench) -> Result {
    let layers = if bench.dry { vec![("h32", 32, 2, 16, 1)] } else { LAYERS.to_vec() };
    for &size in &layers {
        let ways = [
            Way { how: "bf16 eager", mode: Mode::Queued, ..Way::default() },
            Way { how: "bf16 graph", ..Way::default() },
            // In high precision, nobody publishes times with ones.
            Way { how: "fp8 eager", mode: Mode::Queued, ..Way::default() },
            Way { how: "fp8 graph", ..Way::default() },
            Way { how: "fp8 eager, dy of ones", mode: Mode::Queued, ones: true, ..Way::default() },
            Way { how: "fp8 graph, dy of ones", ones: true, ..Way::default() },
            Way { how: "fp8 graph, gradients from zero", from_zero: true, ..Way::default() },
        ];
        ways_of(bench, size, true, &ways)?;
    }
    // What attention's kernels cost the largest: with gradients added up in any order, and without cuDNN.
    let Some(&size) = layers.last() else { return Ok(()) };
    if let Err(reason) = libraries::cudnn() {
        println!("without cuDNN: {reason}");
        return Ok(());
    }
    let way = |how| Way { how, ..Way::default() };
    ways_of(bench, size, false, &[way("fp8 graph, attention in any order")])?;
    bench.on(&attention::device(false)?, "", &mut |bench| {
        ways_of(bench, size, true, &[way("fp8 graph, attention without cuDNN")])
    })
}

/// A way in which a layer runs.
struct Way {
    /// The end of the case's name, which begins with the precision of products.
    how: &'static str,
    mode: Mode,
    /// Whether the gradient of the layer's result is ones, as that of `loss = y.sum()`: they cost less power than random
    /// numbers, and so higher clocks.
    ones: bool,
    /// Whether a step's gradients take the place of those before, instead of being added to them.
    from_zero: bool,
}

impl Default for Way {
    fn default() -> Self {
        Self { how: "", mode: Mode::Graph, ones: false, from_zero: false }
    }
}

fn ways_of(
    bench: &mut Bench,
    (name, hidden, heads, length, batch): LayerSize,
    deterministic: bool,
    ways: &[Way],
) -> Result {
    let device = bench.device.clone();
    let sizes = TransformerLayerOptions {
        hidden_size: hidden,
        ffn_hidden_size: 4 * hidden,
        attention: AttentionOptions {
            num_attention_heads: heads,
            max_seq_length: length,
            deterministic,
            ..TransformerLayerOptions::default().attention
        },
        params_dtype: DType::BF16,
        ..TransformerLayerOptions::default()
    };
    let mut model = TransformerLayer::new("layer", sizes, &device, &mut StdRng::seed_from_u64(1))?;
    let shape = [batch, length, hidden];
    let x = bench.pool.tensor(shape, DType::BF16, 1, &device)?;
    // Three products of each of the 12h² weights a token; attention's causal scores, 3.5 times.
    let tokens = (batch * length) as f64;
    let products = 3.0 * 2.0 * tokens * 12.0 * (hidden * hidden) as f64;
    let scores = 3.5 * 2.0 * tokens * (length * hidden) as f64;
    let work = Work::Flops(products + scores);
    let recipe = Recipe::from(DelayedScaling::default());
    for way in ways {
        let options = if way.how.starts_with("fp8") { AutocastOptions::default() } else { high_precision() };
        let mut scaling = Scaling::new(&model, &device)?;
        let dy = match way.ones {
            true => Tensor::full(1.0, shape, DType::BF16, &device)?,
            false => bench.pool.tensor(shape, DType::BF16, 2, &device)?,
        };
        let case = format!("{name} s{length} b{batch} {}", way.how);
        let mut step = |_| {
            if way.from_zero {
                zero_grad(&mut model)?;
            }
            step(&mut model, &mut scaling, &recipe, &options, &x, &dy)
        };
        bench.time_as(way.mode, "layer", &case, work, 1, &mut step, &mut || Ok(()))?;
    }
    Ok(())
}

/// Forward, backward and a new version of the weights, so that they are quantized as in training.
fn step(
    model: &mut TransformerLayer,
    scaling: &mut Scaling,
    recipe: &Recipe,
    options: &AutocastOptions,
    x: &Tensor,
    dy: &Tensor,
) -> Result<crate::timer::Kept> {
    for parameter in parameters_mut(model) {
        parameter.update(|_, _| Ok(()))?;
    }
    let mut cx = scaling.scope(recipe, options)?;
    let (y, saved) = model.forward(&mut cx, x)?;
    cx.commit()?;
    let dx = scaling.in_backward(|cx| model.backward(cx, saved, dy))?;
    Ok(Box::new((y, dx)))
}
