//! Operations that memory limits and that do not quantize by one scale: additions, splits, quantization by blocks, the loss.

use crate::data::{RULE, SCALE};
use crate::result::Result;
use crate::timer::{Bench, Kept, Work};
use fp8_nn::fp8_kernels::fp8_format::Blocks;
use fp8_nn::fp8_kernels::fp8_format::Encoding::E4M3;
use fp8_nn::fp8_kernels::fp8_format::slice::{BlockScaling, MxRounding};
use fp8_nn::fp8_kernels::ops::{self, CrossEntropyOptions, RopeTable};
use fp8_nn::fp8_kernels::{BlockRule, Cell, DType, REST, Scale, Slot, Tensor};

/// Rows and columns of the activations of a layer of width 4096.
const SHAPE: [usize; 2] = [16384, 4096];
const DRY: [usize; 2] = [64, 96];

fn shape(bench: &Bench) -> [usize; 2] {
    if bench.dry { DRY } else { SHAPE }
}

fn name(what: &str, [rows, cols]: [usize; 2]) -> String {
    format!("{what} {rows}x{cols}")
}

fn inputs(bench: &Bench, sets: usize, shape: [usize; 2], seed: usize) -> Result<Vec<Tensor>> {
    (0..sets).map(|set| bench.pool.tensor(shape, DType::BF16, seed + set, &bench.device)).collect()
}

/// Quantization with a scale for each row or block, without and with the transpose.
pub(crate) fn blocks(bench: &mut Bench) -> Result {
    // Blocks of 128 need at least one of them.
    let shape = if bench.dry { [128, 256] } else { SHAPE };
    let n = (shape[0] * shape[1]) as f64;
    let f32_scales = |blocks| BlockRule::F32(BlockScaling::new(blocks));
    let rules = [
        ("rows", f32_scales(Blocks::Row)),
        ("1x128", f32_scales(Blocks::B1x128)),
        ("128x128", f32_scales(Blocks::B128x128)),
        ("MX", BlockRule::Mx(MxRounding::default())),
    ];
    let sets = bench.sets(3.0 * n);
    let x = inputs(bench, sets, shape, 1)?;
    for (what, rule) in rules {
        let one = Slot { scale: Scale::Blocks(rule), ..Slot::off(E4M3) };
        let both = Slot { columnwise: true, ..one };
        for (transposes, slot, bytes) in [("", one, 3.0), ("+T", both, 4.0)] {
            let case = name(&format!("cast {what}{transposes}"), shape);
            bench.time("blocks", &case, Work::Bytes(bytes * n), sets, &mut |set| {
                Ok(Box::new(ops::quantize(&x[set], &slot)?))
            })?;
        }
    }
    Ok(())
}

/// The passes of a model that no quantization is part of, and a cast of many tensors at once.
pub(crate) fn others(bench: &mut Bench) -> Result {
    additions(bench)?;
    splits(bench)?;
    many_casts(bench)?;
    scores(bench)?;
    rotations(bench)?;
    vocabulary(bench)
}

fn additions(bench: &mut Bench) -> Result {
    let shape = shape(bench);
    let n = (shape[0] * shape[1]) as f64;
    let sets = bench.sets(6.0 * n);
    let (a, b) = (inputs(bench, sets, shape, 1)?, inputs(bench, sets, shape, 50)?);
    bench.time("passes", &name("add", shape), Work::Bytes(6.0 * n), sets, &mut |set| {
        Ok(Box::new(ops::add(&a[set], &b[set])?))
    })
}

/// q, k and v of one tensor, and back.
fn splits(bench: &mut Bench) -> Result {
    let [rows, cols] = shape(bench);
    let bytes = 12.0 * (rows * cols) as f64;
    let sets = bench.sets(bytes);
    let qkv = inputs(bench, sets, [rows, 3 * cols], 1)?;
    bench.time("passes", &name("split 3 x", [rows, cols]), Work::Bytes(bytes), sets, &mut |set| {
        Ok(Box::new(ops::split(&qkv[set], &[cols; 3])?))
    })?;
    drop(qkv);
    let parts = (0..3).map(|i| inputs(bench, sets, [rows, cols], 1 + 50 * i)).collect::<Result<Vec<_>>>()?;
    bench.time("passes", &name("concat 3 x", [rows, cols]), Work::Bytes(bytes), sets, &mut |set| {
        Ok(Box::new(ops::concat(&[&parts[0][set], &parts[1][set], &parts[2][set]])?))
    })
}

/// The weights of a layer of width 4096 in one launch.
fn many_casts(bench: &mut Bench) -> Result {
    let sizes = if bench.dry { [[3, 128, 64], [3, 48, 40]] } else { [[12, 4096, 4096], [12, 4088, 4088]] };
    // Whole tiles, and what has none.
    sizes.into_iter().try_for_each(|size| many_casts_of(bench, size))
}

fn many_casts_of(bench: &mut Bench, [count, rows, cols]: [usize; 3]) -> Result {
    let weights = inputs(bench, count, [rows, cols], 1)?;
    let cells = (0..count)
        .map(|_| Ok([Cell::new(SCALE, &bench.device)?, Cell::new(REST, &bench.device)?]))
        .collect::<Result<Vec<_>>>()?;
    let bytes = 4.0 * (count * rows * cols) as f64;
    let case = format!("quantize_many {count} x {rows}x{cols}, FP8+T");
    bench.time("passes", &case, Work::Bytes(bytes), 2, &mut |_| {
        let tensors: Vec<_> = weights
            .iter()
            .zip(&cells)
            .map(|(weight, [scale, amax])| {
                (weight, Slot { amax: Some(amax), columnwise: true, ..Slot::fixed(E4M3, scale, &RULE) })
            })
            .collect();
        Ok(Box::new(ops::quantize_many(&tensors)?))
    })
}

/// Softmax of causal scores, as decoding and masks that no fused kernel takes need it.
fn scores(bench: &mut Bench) -> Result {
    let [rows, cols] = if bench.dry { [32, 32] } else { [16384, 2048] };
    let n = (rows * cols) as f64;
    let sets = bench.sets(4.0 * n);
    let x = inputs(bench, sets, [rows, cols], 1)?;
    bench.time("passes", &name("softmax", [rows, cols]), Work::Bytes(4.0 * n), sets, &mut |set| {
        Ok(Box::new(ops::softmax(&x[set], 0.125, false, None)?))
    })?;
    let y = x.iter().map(|x| Ok(ops::softmax(x, 0.125, false, None)?)).collect::<Result<Vec<_>>>()?;
    bench.time("passes", &name("softmax backward", [rows, cols]), Work::Bytes(6.0 * n), sets, &mut |set| {
        Ok(Box::new(ops::softmax_backward(&x[set], &y[set], 0.125)?))
    })
}

fn rotations(bench: &mut Bench) -> Result {
    let [batch, length, heads, dim] = if bench.dry { [1, 16, 2, 16] } else { [8, 2048, 32, 128] };
    let device = bench.device.clone();
    let table = RopeTable::new(length, dim, 10_000.0, &device)?;
    let bytes = 4.0 * (batch * length * heads * dim) as f64;
    let sets = bench.sets(bytes);
    let x = (0..sets)
        .map(|set| bench.pool.tensor([batch, length, heads, dim], DType::BF16, set, &device))
        .collect::<Result<Vec<_>>>()?;
    let case = |what| format!("{what} b{batch} s{length} h{heads} d{dim}");
    bench.time("passes", &case("rope"), Work::Bytes(bytes), sets, &mut |set| {
        Ok(Box::new(ops::rope(&x[set], &table, 0)?))
    })?;
    bench.time("passes", &case("rope backward"), Work::Bytes(bytes), sets, &mut |set| {
        Ok(Box::new(ops::rope_backward(&x[set], &table, 0)?))
    })
}

/// The first and the last pass of a language model: rows of a table by id, and the loss.
fn vocabulary(bench: &mut Bench) -> Result {
    let [tokens, words, width] = if bench.dry { [16, 40, 32] } else { [16384, 50_304, 4096] };
    let device = bench.device.clone();
    let numbers = |most: usize| (0..tokens).map(|i| ((i * 7919) % most) as i32).collect::<Vec<_>>();
    let ids = Tensor::from_vec(numbers(words), [tokens], &device)?;
    let table = bench.pool.tensor([words, width], DType::BF16, 1, &device)?;
    let rows = format!("{tokens} of {words}x{width}");
    let bytes = 4.0 * (tokens * width) as f64;
    bench.time("passes", &format!("embedding {rows}"), Work::Bytes(bytes), 2, &mut |_| {
        Ok(Box::new(ops::embedding(&ids, &table)?))
    })?;
    let dy = bench.pool.tensor([tokens, width], DType::BF16, 2, &device)?;
    let mut grad = Tensor::zeros([words, width], DType::F32, &device)?;
    let bytes = (2.0 + 8.0) * (tokens * width) as f64;
    bench.time("passes", &format!("embedding backward {rows}"), Work::Bytes(bytes), 1, &mut |_| {
        ops::embedding_backward(&dy, &ids, &mut grad, "table")?;
        Ok(Box::new(()))
    })?;
    drop((table, dy, grad));

    let tokens = if bench.dry { 16 } else { 4096 };
    let targets =
        Tensor::from_vec((0..tokens).map(|i| ((i * 31) % words) as i32).collect(), [tokens], &device)?;
    let n = (tokens * words) as f64;
    let sets = bench.sets(2.0 * n);
    let logits = inputs(bench, sets, [tokens, words], 3)?;
    let options = CrossEntropyOptions::default();
    let forward = |logits: &Tensor| ops::cross_entropy(logits, &targets, &options);
    let case = |what| name(what, [tokens, words]);
    bench.time("passes", &case("cross entropy"), Work::Bytes(2.0 * n), sets, &mut |set| -> Result<Kept> {
        Ok(Box::new(forward(&logits[set])?))
    })?;
    let saved = logits.iter().map(|logits| Ok(forward(logits)?.1)).collect::<Result<Vec<_>>>()?;
    bench.time("passes", &case("cross entropy backward"), Work::Bytes(4.0 * n), sets, &mut |set| {
        Ok(Box::new(ops::cross_entropy_backward(&logits[set], &targets, &saved[set], &options, 1.0)?))
    })
}
