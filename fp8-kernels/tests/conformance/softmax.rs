use super::cancel::{self, Cancelling, cancelling};
use super::case::{Outcome, cases};
use super::compare::{close, ensure, refused, same};
use super::data::{
    self, FLOATS, extremes, f64s, needle_places, normal, rounded, special_rows, specials, tensor, tolerance,
};
use super::edge::{beside_the_middle, same_sums, to_the_edge};
use super::threads::same_bits;
use crate::oracle::{differences, softmax as oracle};
use fp8_kernels::{DType, Device, Tensor, ops};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

cases![
    matches_the_oracle: Dtypes,
    backward_matches_the_oracle: Dtypes,
    needles_of_warps: Dtypes,
    needles_of_blocks: Dtypes,
    the_oracle_is_its_own_derivative,
    masks_of_all_broadcasts,
    masked_rows_of_warps: Dtypes,
    masked_rows_of_blocks: Dtypes,
    gradients_of_warps: Dtypes,
    gradients_of_blocks: Dtypes,
    long_causal_rows: Dtypes,
    no_bit_of_a_long_sum_is_lost,
    no_bit_of_growing_parts_is_lost,
    what_cancels_leaves_no_trace,
    small_probabilities_count,
    a_row_without_keys_is_zero,
    large_scores_stay_finite,
    nan_stays_in_its_row,
    special_scores: Dtypes,
    special_gradients: Dtypes,
    rows_sum_to_one,
    same_for_any_threads,
    refuses,
];

const SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [0, 3, 4],
    [2, 3, 0],
    [1, 3, 15],
    [2, 16, 16],
    [3, 17, 17],
    [1, 5, 101],
    [2, 101, 31],
    [1, 2, 16_411],
];

fn matches_the_oracle(device: &Device, dtype: DType) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for causal in [false, true] {
            let x = normal(shape, dtype, seed as u64, device)?;
            let y = ops::softmax(&x, 1.7, causal, None)?;
            let values = f64s(&x)?;
            let rows = values.chunks(shape[2].max(1)).enumerate();
            let scale = f64::from(1.7f32);
            let want = rows.flat_map(|(r, row)| oracle::softmax(row, scale, |j| causal && j > r % shape[1]));
            let what = format!("{dtype} {shape:?} causal {causal}");
            close(&what, &y.to_f32_vec()?, &want.collect::<Vec<_>>(), shape[2], tolerance(dtype))?;
        }
    }
    Ok(())
}

fn backward_matches_the_oracle(device: &Device, dtype: DType) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let x = normal(shape, dtype, seed as u64, device)?;
        let (y, dy) = (ops::softmax(&x, 0.5, true, None)?, normal(shape, dtype, 100, device)?);
        let (y_values, dy_values) = (f64s(&y)?, f64s(&dy)?);
        let rows = dy_values.chunks(shape[2].max(1)).zip(y_values.chunks(shape[2].max(1)));
        let want: Vec<f64> = rows.flat_map(|(dy, y)| oracle::backward(dy, y, 0.5)).collect();
        let dx = ops::softmax_backward(&dy, &y, 0.5)?;
        close(&format!("{dtype} {shape:?}"), &dx.to_f32_vec()?, &want, shape[2], tolerance(dtype))?;
    }
    Ok(())
}

fn needles_of_warps(device: &Device, dtype: DType) -> Outcome {
    needles(device, dtype, &[8, 31, 253, 256, 1000, 1024])
}

fn needles_of_blocks(device: &Device, dtype: DType) -> Outcome {
    needles(device, dtype, &[1025, 4099, 4104])
}

/// One large score, so that everything in its row but itself is 0, and a gradient that falls on one key alone.
fn needles(device: &Device, dtype: DType, lengths: &[usize]) -> Outcome {
    for &keys in lengths {
        // Each of a thread's keys where a warp has the row; else each 512 apart, and each warp of a block.
        let own: Vec<usize> = if keys <= 1024 {
            (0..32).map(|i| 256 * (i / 8) + 33 * (i % 8)).collect()
        } else {
            let warp = |warp: usize| if keys % 8 == 0 { 265 * warp } else { 33 * warp };
            (0..8).map(|j| 579 * j).chain((0..16).map(warp)).collect()
        };
        let others = needle_places(keys).into_iter().step_by(if keys > 300 { 8 } else { 1 });
        for place in own.into_iter().filter(|&place| place < keys).chain(others) {
            let mut scores = vec![-50.0; 3 * keys];
            scores[keys + place] = 60.0;
            let x = tensor(scores, [3, keys], dtype, device)?;
            let y = ops::softmax(&x, 1.0, false, None)?;
            let values = y.to_f32_vec()?;
            let mut want = vec![0.0; keys];
            want[place] = 1.0;
            let what = format!("a needle at {place} of {keys}");
            same(&what, &values[keys..2 * keys], &want, keys)?;
            let even = 1.0 / keys as f64;
            close(&what, &values[..keys], &vec![even; keys], keys, tolerance(dtype))?;
            // dx = y · (dy − Σ dy · y): with even probabilities a needle in dy reaches every key of its row.
            let mut gradient = vec![0.0; 3 * keys];
            gradient[2 * keys + place] = 1000.0;
            let dx = ops::softmax_backward(&tensor(gradient, [3, keys], dtype, device)?, &y, 1.0)?;
            let probability = f64::from(values[2 * keys]);
            let shared = 1000.0 * probability;
            let wanted = (0..keys).map(|k| probability * (if k == place { 1000.0 } else { 0.0 } - shared));
            let [rtol, atol] = tolerance(dtype);
            let near = [2.0 * rtol, atol + 2.0 * rtol];
            close(&what, &dx.to_f32_vec()?[2 * keys..], &wanted.collect::<Vec<_>>(), keys, near)?;
        }
    }
    Ok(())
}

fn the_oracle_is_its_own_derivative(_: &Device) -> Outcome {
    let mut random = data::Random::new(3);
    let mut values = |n| random.normals(n).into_iter().map(f64::from).collect::<Vec<_>>();
    let (x, dy) = (values(17), values(17));
    let softmax = |x: &[f64]| oracle::softmax(x, 0.7, |j| j > 12);
    let slope = differences::gradient(|x| differences::inner(&dy, &softmax(x)), &x);
    let distance = differences::distance(&slope, &oracle::backward(&dy, &softmax(&x), 0.7));
    ensure(distance < 1e-8, || format!("distance {distance:e}"))
}

fn masks_of_all_broadcasts(device: &Device) -> Outcome {
    let shape = [2, 3, 5, 7];
    let x = normal(shape, DType::F32, 1, device)?;
    let values = f64s(&x)?;
    for bits in 0..16 {
        let dims: Vec<usize> = (0..4).map(|d| if bits >> d & 1 == 1 { shape[d] } else { 1 }).collect();
        let bytes: Vec<u8> = (0..dims.iter().product()).map(|i: usize| u8::from(i * 7 % 3 == 1)).collect();
        let mask_shape = [dims[0], dims[1], dims[2], dims[3]];
        let mask = Tensor::from_vec(bytes.clone(), mask_shape, device)?;
        let hidden = |row: usize, j: usize| {
            let index = [row / 15, row / 5 % 3, row % 5, j];
            let at = index.iter().zip(&dims).fold(0, |at, (i, dim)| at * dim + i % dim);
            bytes[at] != 0
        };
        let rows = values.chunks(7).enumerate();
        let want: Vec<f64> =
            rows.flat_map(|(r, row)| oracle::softmax(row, 1.0, |j| hidden(r, j) || j > r % 5)).collect();
        let y = ops::softmax(&x, 1.0, true, Some(&mask))?;
        close(&format!("mask {mask_shape:?}"), &y.to_f32_vec()?, &want, 7, tolerance(DType::F32))?;
    }
    Ok(())
}

/// Rows that end on each place of a thread's part, whole or ragged: held by a warp, or read by a block.
const OF_WARPS: [usize; 12] = [5, 37, 69, 101, 133, 165, 197, 229, 40, 264, 520, 776];
const OF_BLOCKS: [usize; 10] = [1025, 1541, 2051, 2561, 3085, 3591, 4101, 4611, 1544, 4616];

fn masked_rows_of_warps(device: &Device, dtype: DType) -> Outcome {
    masked_rows(device, dtype, &OF_WARPS)
}

fn masked_rows_of_blocks(device: &Device, dtype: DType) -> Outcome {
    masked_rows(device, dtype, &OF_BLOCKS)
}

fn masked_rows(device: &Device, dtype: DType, lengths: &[usize]) -> Outcome {
    for (i, &keys) in lengths.iter().enumerate() {
        let bytes: Vec<u8> = data::Random::new(i as u64)
            .normals(3 * keys)
            .iter()
            .map(|v| if *v > 0.5 { 200 } else { 0 })
            .collect();
        let mask = Tensor::from_vec(bytes.clone(), [1, 3, keys], device)?;
        let x = ops::scale(&normal([2, 3, keys], dtype, i as u64, device)?, 3.0)?;
        let y = ops::softmax(&x, 0.7, false, Some(&mask))?;
        let values = f64s(&x)?;
        let rows = values.chunks(keys).enumerate();
        let scale = f64::from(0.7f32);
        let want = rows.flat_map(|(r, row)| oracle::softmax(row, scale, |j| bytes[r % 3 * keys + j] != 0));
        let what = format!("{dtype}, {keys} keys");
        // Of small probabilities, too, an f16 apart from its subnormal ones.
        let near = [tolerance(dtype)[0].max(3e-6), 6e-8];
        close(&what, &y.to_f32_vec()?, &want.collect::<Vec<_>>(), keys, near)?;
        let dy = normal([2, 3, keys], FLOATS[i % 3], 100, device)?;
        let (y_values, dy_values) = (f64s(&y)?, f64s(&dy)?);
        let rows = dy_values.chunks(keys).zip(y_values.chunks(keys));
        let want: Vec<f64> = rows.flat_map(|(dy, y)| oracle::backward(dy, y, 0.5)).collect();
        let dx = ops::softmax_backward(&dy, &y, 0.5)?;
        close(&what, &dx.to_f32_vec()?, &want, keys, [near[0], 3e-7])?;
    }
    Ok(())
}

fn gradients_of_warps(device: &Device, dtype: DType) -> Outcome {
    gradients(device, dtype, &OF_WARPS)
}

fn gradients_of_blocks(device: &Device, dtype: DType) -> Outcome {
    gradients(device, dtype, &OF_BLOCKS)
}

/// In f32 by the oracle, in other types the same rounded once, whatever the gradient's type.
fn gradients(device: &Device, dtype: DType, lengths: &[usize]) -> Outcome {
    for (i, &keys) in lengths.iter().enumerate() {
        let x = normal([1, 3, keys], dtype, i as u64, device)?;
        let y = ops::softmax(&x, 1.0, false, None)?;
        let (what, wide) = (format!("{keys} keys of {dtype}"), |t: &Tensor| ops::cast(t, DType::F32));
        let rounded = |t: Tensor| ops::cast(&t, dtype)?.to_f32_vec();
        let want = rounded(ops::softmax(&wide(&x)?, 1.0, false, None)?)?;
        same(&what, &y.to_f32_vec()?, &want, keys)?;
        for dy_type in FLOATS {
            let dy = normal([1, 3, keys], dy_type, 50, device)?;
            let dx = ops::softmax_backward(&wide(&dy)?, &wide(&y)?, 0.5)?;
            let (y_values, dy_values) = (f64s(&y)?, f64s(&dy)?);
            let rows = dy_values.chunks(keys).zip(y_values.chunks(keys));
            let want: Vec<f64> = rows.flat_map(|(dy, y)| oracle::backward(dy, y, 0.5)).collect();
            close(&what, &dx.to_f32_vec()?, &want, keys, [1e-5, 2e-5 / keys as f64])?;
            let narrow = ops::softmax_backward(&dy, &y, 0.5)?;
            same(&format!("{what}, dy of {dy_type}"), &narrow.to_f32_vec()?, &rounded(dx)?, keys)?;
        }
    }
    Ok(())
}

/// Rows of which a block sees less than it writes.
fn long_causal_rows(device: &Device, dtype: DType) -> Outcome {
    for keys in [1032, 1033, 4104, 4611, 8200] {
        let x = normal([2, 3, keys], dtype, 1, device)?;
        // So that what is left out is not zero by chance.
        drop(ops::scale(&x, 2.0)?);
        let y = ops::softmax(&x, 1.0, true, None)?;
        let values = f64s(&x)?;
        let rows = values.chunks(keys).enumerate();
        let want: Vec<f64> = rows.flat_map(|(r, row)| oracle::softmax(row, 1.0, |j| j > r % 3)).collect();
        close(&format!("{keys} keys of {dtype}"), &y.to_f32_vec()?, &want, keys, tolerance(dtype))?;
    }
    Ok(())
}

/// If y is 1 everywhere, the gradient where dy is 0 is minus the sum of all dy: a sum of integers, almost halfway between
/// two numbers of f32.
fn no_bit_of_a_long_sum_is_lost(device: &Device) -> Outcome {
    for (seed, keys) in (0..16).map(|seed| (seed, [4096, 4099, 16_392, 16_391][seed as usize / 2 % 4])) {
        let mut random = data::Random::new(seed);
        let mut values: Vec<i64> = (0..keys).map(|_| (random.bits() % (1 << 21)) as i64).collect();
        values[0] = 0;
        let sum: i64 = values.iter().sum();
        let added = to_the_edge(sum, seed % 2 == 0);
        values[1] += added;
        let dy = Tensor::from_vec(values.iter().map(|&v| v as f32).collect(), [1, keys], device)?;
        let dx = ops::softmax_backward(&dy, &Tensor::full(1.0, [1, keys], DType::F32, device)?, 1.0)?;
        let what = format!("{keys} keys, seed {seed}");
        same_sums(&what, device, &dx.to_f32_vec()?[..1], &[-((sum + added) as f32)])?;
    }
    Ok(())
}

/// As above, where each of a GPU's warps outweighs those before it.
fn no_bit_of_growing_parts_is_lost(device: &Device) -> Outcome {
    for (seed, keys) in (0..24).map(|seed| (seed, [4096, 4099][seed as usize / 2 % 2])) {
        let warp = |i: usize| if keys % 8 == 0 { i / 256 % 16 } else { i % 512 / 32 } as u32;
        let (mut dy, want) = beside_the_middle(keys - 1, 16, seed, |i| warp(i + 1));
        dy.insert(0, 0.0);
        let dy = Tensor::from_vec(dy, [1, keys], device)?;
        let dx = ops::softmax_backward(&dy, &Tensor::full(1.0, [1, keys], DType::F32, device)?, 1.0)?;
        same_sums(&format!("{keys} keys, seed {seed}"), device, &dx.to_f32_vec()?[..1], &[-want])?;
    }
    Ok(())
}

/// As above, of gradients that cancel but for small integers.
fn what_cancels_leaves_no_trace(device: &Device) -> Outcome {
    for (seed, keys) in (0..40).map(|seed| (seed, [4096, 4099, 16_392, 16_391][seed % 4])) {
        // A GPU's thread adds its eight keys plainly: neighbours, or every 512th.
        let group = |i: usize| if keys % 8 == 0 { i / 8 } else { i / 4096 * 512 + i % 512 };
        let Cancelling { values, sum, size } = cancelling(keys, DType::F32, seed, group);
        let want: Vec<f32> = values.iter().map(|v| v - sum).collect();
        let dy = Tensor::from_vec(values, [1, keys], device)?;
        let dx = ops::softmax_backward(&dy, &Tensor::full(1.0, [1, keys], DType::F32, device)?, 1.0)?;
        cancel::same_sums(&format!("{keys} keys, seed {seed}"), device, &dx.to_f32_vec()?, &want, size)?;
    }
    Ok(())
}

/// One key among many whose exponentials an f32 sum would lose one by one: in the first and the last lane of each of a
/// GPU's warps, and in its second round.
fn small_probabilities_count(device: &Device) -> Outcome {
    let (low, nothing) = (-17.5f32, -200.0);
    let (tiny, ulp) = (f64::from(low).exp(), f64::from(f32::EPSILON));
    let threads = (0..16).flat_map(|warp| [32 * warp, 32 * warp + 31]);
    let sides = threads.flat_map(|thread| [(thread, true), (thread, false)]);
    for ((thread, above), keys) in sides.flat_map(|side| [4096, 4095, 8192, 8190].map(|keys| (side, keys))) {
        let (round, warp, is_whole) = (keys / 8000, thread / 32, keys % 8 == 0);
        if round > 0 && warp % 5 > 0 {
            continue;
        }
        let place = 4096 * round + if is_whole { 8 * thread + warp % 8 } else { thread + 512 * (warp % 7) };
        // As many as bring the sum right above, or below, the middle of two numbers of f32.
        let beside = |count: usize| {
            let part = (count as f64 * tiny / ulp).fract();
            let beyond = if above { part - 0.5 } else { 0.5 - part };
            (0.02..0.2).contains(&beyond)
        };
        let count = (1..=keys - 8).rev().find(|&count| beside(count)).ok_or("no such count")?;
        // Nothing else counts among the eight that are added plainly: neighbours, or every 512th key.
        let group = |at: usize| if is_whole { at / 8 } else { at / 4096 * 512 + at % 512 };
        let mut scores = vec![nothing; keys];
        (0..keys).filter(|&at| group(at) != group(place)).take(count).for_each(|at| scores[at] = low);
        scores[place] = 0.0;
        let y = ops::softmax(&Tensor::from_vec(scores, [1, keys], device)?, 1.0, false, None)?;
        let want = 1.0 / (1.0 + count as f64 * tiny) as f32;
        let what = format!("{count} of {keys} beside {place}");
        same_sums(&what, device, &y.to_f32_vec()?[place..=place], &[want])?;
    }
    Ok(())
}

fn a_row_without_keys_is_zero(device: &Device) -> Outcome {
    let infinite = f32::NEG_INFINITY;
    let x = tensor(vec![infinite, infinite, 1.0, infinite, 2.0, 3.0], [3, 2], DType::F32, device)?;
    let mask = Tensor::from_vec(vec![0u8, 0, 0, 0, 1, 1], [3, 2], device)?;
    let y = ops::softmax(&x, 1.0, false, Some(&mask))?;
    same("y", &y.to_vec::<f32>()?, &[0.0, 0.0, 1.0, 0.0, 0.0, 0.0], 2)?;
    let dx = ops::softmax_backward(&Tensor::full(1.0, [3, 2], DType::F32, device)?, &y, 1.0)?;
    same("dx", &dx.to_vec::<f32>()?, &[0.0; 6], 2)
}

fn large_scores_stay_finite(device: &Device) -> Outcome {
    let x = tensor(vec![1e4, -1e4, 1e4, 3e38, -3e38, 0.0], [2, 3], DType::F32, device)?;
    let y = ops::softmax(&x, 1.0, false, None)?;
    same("y", &y.to_vec::<f32>()?, &[0.5, 0.0, 0.5, 1.0, 0.0, 0.0], 3)
}

fn nan_stays_in_its_row(device: &Device) -> Outcome {
    let x = tensor(vec![f32::NAN, 1.0, f32::NAN, f32::NAN, 0.0, 0.0], [3, 2], DType::F32, device)?;
    let y = ops::softmax(&x, 1.0, false, None)?.to_vec::<f32>()?;
    ensure(y[..4].iter().all(|v| v.is_nan()) && y[4..] == [0.5, 0.5], || format!("{y:?}"))
}

/// Rows of warps and of blocks, whole and ragged, with a special value in each.
fn special_shapes() -> [(usize, Vec<f32>); 5] {
    [(7, specials()), (24, specials()), (1000, extremes()), (1032, extremes()), (1033, extremes())]
}

fn special_scores(device: &Device, dtype: DType) -> Outcome {
    for (keys, specials) in special_shapes() {
        let x = tensor(special_rows(&specials, keys, 1), [specials.len(), keys], dtype, device)?;
        let y = ops::softmax(&x, 0.5, false, None)?;
        let values = f64s(&x)?;
        let want =
            values.chunks(keys).flat_map(|row| oracle::softmax(row, 0.5, |_| false)).collect::<Vec<_>>();
        close(&format!("{keys} keys"), &y.to_f32_vec()?, &want, keys, tolerance(dtype))?;
    }
    Ok(())
}

/// In dy, and in the scores that y came of.
fn special_gradients(device: &Device, dtype: DType) -> Outcome {
    for (keys, specials) in special_shapes() {
        let shape = [specials.len(), keys];
        let special = tensor(special_rows(&specials, keys, 2), shape, dtype, device)?;
        let others = normal(shape, dtype, 3, device)?;
        for (what, dy, scores) in [("dy", &special, &others), ("scores", &others, &special)] {
            let y = ops::softmax(scores, 1.0, false, None)?;
            let (dy_values, y_values) = (f64s(dy)?, f64s(&y)?);
            let rows = dy_values.chunks(keys).zip(y_values.chunks(keys));
            let want = rows.flat_map(|(dy, y)| oracle::backward(dy, y, 0.5)).collect();
            let dx = ops::softmax_backward(dy, &y, 0.5)?;
            let [rtol, atol] = tolerance(dtype);
            let near = [rtol.max(1e-5), atol];
            close(&format!("{what}, {keys} keys"), &dx.to_f32_vec()?, &rounded(want, dtype)?, keys, near)?;
        }
    }
    Ok(())
}

fn rows_sum_to_one(device: &Device) -> Outcome {
    let rows = (1..200usize, 0.0..100f32, any::<u64>());
    let mut runner = TestRunner::new(Config { failure_persistence: None, cases: 64, ..Config::default() });
    runner.run(&rows, |(keys, size, seed)| {
        let values = data::Random::new(seed).normals(keys).into_iter().map(|v| v * size).collect();
        let x = tensor(values, [1, keys], DType::F32, device)?;
        let y = ops::softmax(&x, 1.0, false, None).and_then(|y| y.to_vec::<f32>())?;
        prop_assert!(y.iter().all(|p| (0.0..=1.0).contains(p)));
        prop_assert!((y.iter().map(|&p| f64::from(p)).sum::<f64>() - 1.0).abs() < 1e-5);
        Ok(())
    })?;
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let (x, dy) =
        (normal([5, 67, 301], DType::F32, 1, device)?, normal([5, 67, 301], DType::F32, 2, device)?);
    same_bits("softmax", || {
        let y = ops::softmax(&x, 0.3, true, None)?;
        Ok(vec![ops::softmax_backward(&dy, &y, 0.3)?, y])
    })
}

fn refuses(device: &Device) -> Outcome {
    let x = normal([2, 3, 4], DType::F32, 1, device)?;
    let bytes = |shape: [usize; 3]| Tensor::zeros(shape, DType::U8, device);
    refused(ops::softmax(&normal([4], DType::F32, 1, device)?, 1.0, false, None), "softmax: shape [4]")?;
    refused(ops::softmax(&bytes([1, 1, 1])?, 1.0, false, None), "x has dtype u8: expected f32, bf16 or f16")?;
    refused(ops::softmax(&x, 1.0, false, Some(&x)), "mask has dtype f32: expected u8")?;
    refused(ops::softmax(&x, 1.0, false, Some(&bytes([2, 3, 5])?)), "got [2, 3, 4] and [2, 3, 5]")?;
    refused(
        ops::softmax(&x, 1.0, false, Some(&Tensor::zeros([4], DType::U8, device)?)),
        "each equal to x's or 1",
    )?;
    refused(ops::softmax_backward(&normal([2, 3], DType::F32, 1, device)?, &x, 1.0), "y and dy")
}
