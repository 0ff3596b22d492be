use super::cancel::{self, Cancelling, cancelling};
use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same, same_numbers};
use super::data::{
    PIECE, Random, SHAPES, exact, extremes, f64s, needle_places, normal, rounded, specials, tensor,
};
use super::edge::{beside_the_middle, same_sums, to_the_edge};
use super::gradient::{self, check};
use super::threads::same_bits;
use fp8_kernels::{Cell, DType, Device, Encoding, Slot, Tensor, ops};

cases![
    sums: Dtypes,
    infinities_come_through,
    special_values: Dtypes,
    special_values_in_columns: Dtypes,
    no_bit_of_a_sum_is_lost,
    no_bit_of_a_column_sum_is_lost,
    no_bit_of_growing_parts_is_lost,
    what_cancels_leaves_no_trace: Dtypes,
    what_cancels_in_many_blocks_leaves_no_trace,
    what_cancels_in_columns_leaves_no_trace,
    needles: Dtypes,
    maxima: Dtypes,
    every_rest: Dtypes,
    every_width: Dtypes,
    column_sums: Dtypes,
    column_sums_are_quantize_dbias,
    column_sums_written_and_added,
    same_for_any_threads,
    refuses,
];

fn column_sums_written_and_added(device: &Device) -> Outcome {
    for shape in gradient::SHAPES {
        let x = normal(shape, DType::BF16, 1, device)?;
        check(&format!("{shape:?}"), &ops::column_sums(&x)?, |sums| Ok(ops::column_sums_into(&x, sums)?))?;
    }
    Ok(())
}

fn sums(device: &Device, dtype: DType) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let x = normal(shape, dtype, seed as u64, device)?;
        let values = f64s(&x)?;
        let (sum, size) = (values.iter().sum::<f64>(), values.iter().map(|v| v.abs()).sum::<f64>());
        let what = format!("{dtype} {shape:?}");
        // Additions of n values lose at most a few ulps of the sum of magnitudes.
        close(&what, &[ops::sum(&x)?.item()?], &[sum], 1, [1.3e-6, 1e-6 * size])?;
        if !values.is_empty() {
            let count = values.len() as f64;
            close(&what, &[ops::mean(&x)?.item()?], &[sum / count], 1, [1.3e-6, 1e-6 * size / count])?;
        }
    }
    equal("sum of nothing", ops::sum(&Tensor::zeros([0, 3], DType::F32, device)?)?.item()?, 0.0)
}

fn infinities_come_through(device: &Device) -> Outcome {
    for (len, infinity) in
        [9, 70_003].into_iter().flat_map(|n| [f32::INFINITY, f32::NEG_INFINITY].map(|v| (n, v)))
    {
        let mut values = vec![1.0; len];
        values[len / 2] = infinity;
        let x = Tensor::from_vec(values, [len], device)?;
        equal(&format!("{len} values"), ops::sum(&x)?.item()?, infinity)?;
        let sums = ops::column_sums(&x.reshape([len, 1])?)?.to_f32_vec()?;
        same(&format!("{len} rows"), &sums, &[infinity], 1)?;
    }
    Ok(())
}

/// One among ordinary values, in sums, means and maxima.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let few = specials().into_iter().zip([1, 9, 17].into_iter().cycle());
    let many = extremes().into_iter().map(|special| (special, PIECE + 7));
    for (i, (special, len)) in few.chain(many).enumerate() {
        let mut values = Random::new(2).normals(len);
        values[i * 7 % len] = special;
        let x = tensor(values, [len], dtype, device)?;
        let (values, what) = (f64s(&x)?, format!("{special:e} among {len}"));
        let (sum, size) = (values.iter().sum::<f64>(), values.iter().map(|v| v.abs()).sum::<f64>());
        let near = |size: f64| [1.3e-6, if size.is_finite() { 1e-6 * size } else { 0.0 }];
        close(&what, &[ops::sum(&x)?.item()?], &rounded(vec![sum], DType::F32)?, 1, near(size))?;
        let (mean, size) = (sum / len as f64, size / len as f64);
        close(&what, &[ops::mean(&x)?.item()?], &[mean], 1, near(size))?;
        let larger = |a: f64, b: &f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(*b) };
        let max = values.iter().fold(f64::NEG_INFINITY, larger);
        close(&what, &[ops::max(&x)?.item()?], &[max], 1, [0.0, 0.0])?;
    }
    Ok(())
}

/// One in each column: all others have their own sums. With the codes of a quantization, too.
fn special_values_in_columns(device: &Device, dtype: DType) -> Outcome {
    let (cell, rule, specials) = (Cell::new(1.0, device)?, exact(Encoding::E5M2), specials());
    // Columns of whole vectors, and of others; a few tall ones.
    for (rows, cols, first) in
        [(70, 72, 0), (131, 67, 0), (300, 8, 60), (300, 7, 61), (2000, 1, 64), (2000, 1, 66)]
    {
        let mut values = Random::new(rows as u64).normals(rows * cols);
        (0..cols)
            .for_each(|col| values[col * 29 % rows * cols + col] = specials[(first + col) % specials.len()]);
        let x = tensor(values, [rows, cols], dtype, device)?;
        let (values, what) = (f64s(&x)?, format!("{dtype} [{rows}, {cols}]"));
        let column = |col: usize| values.iter().skip(col).step_by(cols);
        let want = rounded((0..cols).map(|col| column(col).sum()).collect(), DType::F32)?;
        let sums = ops::column_sums(&x)?.to_f32_vec()?;
        close(&what, &sums, &want, cols, [1.3e-6, 1e-3])?;
        let (_, db) = ops::quantize_dbias(&x, &Slot::fixed(Encoding::E5M2, &cell, &rule))?;
        same_numbers(&what, &db.to_f32_vec()?, &sums, cols)?;
    }
    Ok(())
}

/// Integers whose sum is known exactly and almost halfway between two numbers of f32.
fn no_bit_of_a_sum_is_lost(device: &Device) -> Outcome {
    for (seed, len) in (0..).zip([16_391, 16_389, 16_391, 70_007, 70_005, 70_007, 300_007, 300_005]) {
        let mut random = Random::new(seed);
        let mut values: Vec<i64> = (0..len).map(|_| (random.bits() % (1 << 21)) as i64).collect();
        let sum: i64 = values.iter().sum();
        let added = to_the_edge(sum, seed % 2 == 0);
        values[0] += added;
        let x = Tensor::from_vec(values.iter().map(|&v| v as f32).collect(), [len], device)?;
        let what = format!("{len} integers, seed {seed}");
        same_sums(&what, device, &[ops::sum(&x)?.item()?], &[(sum + added) as f32])?;
    }
    Ok(())
}

fn no_bit_of_a_column_sum_is_lost(device: &Device) -> Outcome {
    for (seed, [rows, cols]) in (0..).zip([[5000, 33], [3000, 8], [40_000, 1], [40_000, 1]]) {
        let mut random = Random::new(seed);
        let mut values: Vec<i64> = (0..rows * cols).map(|_| (random.bits() % (1 << 16)) as i64).collect();
        let mut want = Vec::new();
        for col in 0..cols {
            let sum: i64 = values.iter().skip(col).step_by(cols).sum();
            let added = to_the_edge(sum, (col + seed as usize).is_multiple_of(2));
            values[col] += added;
            want.push((sum + added) as f32);
        }
        let x = Tensor::from_vec(values.iter().map(|&v| v as f32).collect(), [rows, cols], device)?;
        same_sums(&format!("[{rows}, {cols}]"), device, &ops::column_sums(&x)?.to_f32_vec()?, &want)?;
    }
    Ok(())
}

/// Each of a GPU's warps outweighs those before it, of a block and of many; then each row of tiles.
fn no_bit_of_growing_parts_is_lost(device: &Device) -> Outcome {
    for seed in 0..16 {
        let (values, want) = beside_the_middle(PIECE, 16, seed, |i| (i / 256 % 8) as u32);
        let sum = ops::sum(&Tensor::from_vec(values, [PIECE], device)?)?.item()?;
        same_sums(&format!("seed {seed}"), device, &[sum], &[want])?;
    }
    // A block's first element is all that counts.
    let blocks = 256;
    for seed in 0..6 {
        let (firsts, want) = beside_the_middle(blocks, 21, seed, |block| block as u32 / 32);
        let mut values = vec![0.0; blocks * PIECE];
        (0..blocks).for_each(|block| values[2048 * block] = firsts[block]);
        let sum = ops::sum(&Tensor::from_vec(values, [blocks * PIECE], device)?)?.item()?;
        same_sums(&format!("{blocks} blocks, seed {seed}"), device, &[sum], &[want])?;
    }
    for (seed, lanes) in (0..8).flat_map(|seed| [1, 2, 8, 32].map(|lanes| (seed, lanes))) {
        // A row of 128 for each thread of a column; the others are zeros.
        let rows = 256 / lanes;
        let columns = (0..lanes).map(|col| {
            let raised = |row: usize| (row % 2 * 2 + row / 2 % 2 + row / 64) as u32;
            beside_the_middle(rows, 21, seed + 2 * col as u64, raised)
        });
        let (columns, want): (Vec<_>, Vec<f32>) = columns.unzip();
        let value = |i: usize| if i / lanes % 128 == 5 { columns[i % lanes][i / lanes / 128] } else { 0.0 };
        let x = Tensor::from_vec((0..128 * rows * lanes).map(value).collect(), [128 * rows, lanes], device)?;
        same_sums(
            &format!("{lanes} columns, seed {seed}"),
            device,
            &ops::column_sums(&x)?.to_f32_vec()?,
            &want,
        )?;
    }
    Ok(())
}

/// Large numbers in all of a GPU's threads, rounds and blocks, and in a rest.
fn what_cancels_leaves_no_trace(device: &Device, dtype: DType) -> Outcome {
    let lens = [(15, 20), (PIECE, 40), (7 * 2048 + 7, 20), (5 * 2048 + 3, 10), (2 * PIECE + 7, 20)];
    for (len, seed) in lens.into_iter().flat_map(|(len, seeds)| (0..seeds).map(move |seed| (len, seed))) {
        // Eight neighbours are added plainly.
        let group = |i: usize| if i < len / 8 * 8 { i / 8 } else { len + i };
        let Cancelling { values, sum, size } = cancelling(len, dtype, seed, group);
        let x = tensor(values, [len], dtype, device)?;
        let what = format!("{len} values, seed {seed}");
        cancel::same_sums(&what, device, &[ops::sum(&x)?.item()?], &[sum], size)?;
    }
    Ok(())
}

/// So many that a thread of the last launch adds the results of two blocks.
fn what_cancels_in_many_blocks_leaves_no_trace(device: &Device) -> Outcome {
    const BLOCKS: usize = 265;
    let (large, len) = (f32::powi(2.0, 50), (BLOCKS - 1) * PIECE + 1);
    // Large in the last lane of each warp; in the first; in far ones; in second rounds.
    let last = (0..8).map(|warp| 32 * warp + 31).collect::<Vec<_>>();
    let first = (1..7).map(|warp| 32 * warp).collect();
    for places in [last, first, vec![0, 230], vec![260, 128]] {
        let mut values = vec![0.0; len];
        // A block's first element is here.
        (0..BLOCKS).for_each(|block| values[2048 * block] = (block * 5 % 13) as f32 - 4.0);
        places.iter().for_each(|block| values[2048 * block] = 0.0);
        let sum = values.iter().sum::<f32>();
        for (i, block) in places.iter().enumerate() {
            values[2048 * block] = if i % 2 == 0 { large } else { -large };
        }
        let x = Tensor::from_vec(values, [len], device)?;
        let size = places.len() as f64 * f64::from(large);
        let what = format!("large in blocks {places:?}");
        cancel::same_sums(&what, device, &[ops::sum(&x)?.item()?], &[sum], size)?;
    }
    Ok(())
}

fn what_cancels_in_columns_leaves_no_trace(device: &Device) -> Outcome {
    for (shift, [rows, cols]) in
        (0..).zip([[5000, 33], [5000, 33], [3000, 5], [40_000, 2], [40_000, 1], [40_000, 1]])
    {
        // 128 rows are added plainly.
        let of = |col| cancelling(rows, DType::F32, 50 * shift + col, |row| row / 128);
        let columns: Vec<Cancelling> = (0..cols).map(of).collect();
        let values = (0..rows * cols).map(|i| columns[i % cols].values[i / cols]).collect();
        let sums = ops::column_sums(&Tensor::from_vec(values, [rows, cols], device)?)?.to_f32_vec()?;
        let want: Vec<f32> = columns.iter().map(|column| column.sum).collect();
        let size = columns.iter().map(|column| column.size).fold(0.0, f64::max);
        cancel::same_sums(&format!("[{rows}, {cols}], {shift}"), device, &sums, &want, size)?;
    }
    Ok(())
}

/// A single one among zeros, whose sum is known exactly.
fn needles(device: &Device, dtype: DType) -> Outcome {
    for len in [1, 9, 257, 8193, 2 * PIECE + 3] {
        for place in needle_places(len) {
            let mut values = vec![0.0; len];
            values[place] = 3.0;
            let x = tensor(values.clone(), [len], dtype, device)?;
            let what = format!("a needle at {place} of {len}");
            equal(&what, ops::sum(&x)?.item()?, 3.0)?;
            equal(&what, ops::max(&x)?.item()?, 3.0)?;
        }
    }
    for [rows, cols] in [[130, 66], [300, 64], [1000, 3]] {
        for place in (0..rows * cols).step_by(541).chain([cols - 1, rows * cols - 1]) {
            let mut values = vec![0.0; rows * cols];
            values[place] = 3.0;
            let sums = ops::column_sums(&tensor(values, [rows, cols], dtype, device)?)?.to_f32_vec()?;
            let mut want = vec![0.0; cols];
            want[place % cols] = 3.0;
            same(&format!("a needle at {place} of [{rows}, {cols}]"), &sums, &want, cols)?;
        }
    }
    Ok(())
}

fn maxima(device: &Device, dtype: DType) -> Outcome {
    for len in [1, 15, 16, 17, PIECE, PIECE + 1, 2 * PIECE + 3] {
        for place in
            [0, 8, 9, 11, 13, 15, 16, len / 2, PIECE, len - 1].into_iter().filter(|&place| place < len)
        {
            for value in [-0.5, f32::NAN] {
                let mut values: Vec<f32> =
                    Random::new(1).normals(len).iter().map(|v| -1.0 - v.abs()).collect();
                values[place] = value;
                let max = ops::max(&tensor(values, [len], dtype, device)?)?.item()?;
                let fits = max == value || max.is_nan() && value.is_nan();
                equal(&format!("{value} at {place} of {len}: got {max}"), fits, true)?;
            }
        }
    }
    // In every lane and warp of a block.
    for place in (0..64).map(|i| 33 * i % 256 * 8 + i % 8) {
        let mut values = vec![-1.0; 2048];
        values[place] = f32::NAN;
        let max = ops::max(&tensor(values, [2048], dtype, device)?)?.item()?;
        equal(&format!("NaN at {place}: got {max}"), max.is_nan(), true)?;
    }
    let low = Tensor::full(f32::NEG_INFINITY, [3], DType::F32, device)?;
    equal("max", ops::max(&low)?.item()?, f32::NEG_INFINITY)
}

/// Each number of elements that are no whole vector, and each place in them.
fn every_rest(device: &Device, dtype: DType) -> Outcome {
    for len in (1..=17).chain(PIECE..PIECE + 8) {
        let value = |i: usize| (i * 7 % 13) as f32 - 5.0;
        let values: Vec<f32> = (0..len).map(value).collect();
        let x = tensor(values.clone(), [len], dtype, device)?;
        equal(&format!("sum of {len}"), ops::sum(&x)?.item()?, values.iter().sum())?;
        for place in len / 8 * 8 - if len % 8 == 0 { 8 } else { 0 }..len {
            let mut values = values.clone();
            values[place] = 30.0;
            let what = format!("the largest of {len} at {place}");
            equal(&what, ops::max(&tensor(values, [len], dtype, device)?)?.item()?, 30.0)?;
        }
    }
    Ok(())
}

/// Each number of a thread's rows and columns, of whole vectors and of others.
fn every_width(device: &Device, dtype: DType) -> Outcome {
    for (rows, cols) in (5..=8).chain([129, 256]).flat_map(|rows| (1..=17).map(move |cols| (rows, cols))) {
        let value = |i: usize| (i * 7 % 13) as f32 - 5.0;
        let values: Vec<f32> = (0..rows * cols).map(value).collect();
        let want: Vec<f32> = (0..cols).map(|col| values.iter().skip(col).step_by(cols).sum()).collect();
        let sums = ops::column_sums(&tensor(values, [rows, cols], dtype, device)?)?.to_f32_vec()?;
        same(&format!("[{rows}, {cols}]"), &sums, &want, cols)?;
    }
    Ok(())
}

fn column_sums(device: &Device, dtype: DType) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let x = normal(shape, dtype, seed as u64, device)?;
        let values = f64s(&x)?;
        let column = |col: usize| values.iter().skip(col).step_by(shape[1]);
        let want: Vec<f64> = (0..shape[1]).map(|col| column(col).sum()).collect();
        let got = ops::column_sums(&x)?;
        equal("shape and dtype", (got.shape().to_vec(), got.dtype()), (vec![shape[1]], DType::F32))?;
        close(&format!("{dtype} {shape:?}"), &got.to_f32_vec()?, &want, shape[1], [1.3e-6, 1e-3])?;
    }
    Ok(())
}

fn column_sums_are_quantize_dbias(device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(1.0, device)?, exact(Encoding::E5M2));
    for shape in [[700, 65], [40_000, 3], [2, 30_000]] {
        let x = normal(shape, DType::BF16, 8, device)?;
        let sums = ops::column_sums(&x)?.to_f32_vec()?;
        let (_, db) = ops::quantize_dbias(&x, &Slot::fixed(Encoding::E5M2, &cell, &rule))?;
        same(&format!("quantize_dbias {shape:?}"), &db.to_f32_vec()?, &sums, shape[1])?;
        // relu is the identity here, so the fused sum has the same terms, in the same order.
        let ones = Tensor::full(1.0, shape, DType::F32, device)?;
        let relu = ops::Activation::Relu;
        let slot = Slot::fixed(Encoding::E5M2, &cell, &rule);
        let (_, db) = ops::activation_backward_quantize_dbias(&x, &ones, relu, &slot)?;
        same(&format!("activation_backward_quantize_dbias {shape:?}"), &db.to_f32_vec()?, &sums, shape[1])?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    for shape in [[1200, 65], [70_001, 1], [3, 40_000]] {
        let x = normal(shape, DType::F32, 3, device)?;
        same_bits(&format!("{shape:?}"), || {
            Ok(vec![ops::sum(&x)?, ops::mean(&x)?, ops::max(&x)?, ops::column_sums(&x)?])
        })?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let nothing = Tensor::zeros([3, 0], DType::F32, device)?;
    refused(ops::mean(&nothing), "mean: shape [3, 0]: has no elements: expected at least one")?;
    refused(ops::max(&nothing), "max: shape [3, 0]: has no elements")?;
    let ids = Tensor::zeros([2], DType::I32, device)?;
    refused(ops::sum(&ids), "sum: x has dtype i32")?;
    refused(ops::column_sums(&ids), "column_sums: x has dtype i32")
}
