//! Attention whose probabilities and slopes can be read off its results, one an element, each close to the middle of two
//! neighbours of its type: a wrong exponential, or one key masked too many, rounds to the other neighbour.
//!
//! Where the queries are the unit vectors, scores are what the keys hold, and dk and dv are the slopes and probabilities;
//! where keys and values are, it is the queries that hold scores, and dq that holds slopes.

use super::attention::row_sums;
use super::case::{Outcome, cases};
use super::compare::{close, same};
use super::data::{Random, normal, tensor};
use fp8_kernels::ops::{AttentionSaved, ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, Result, Tensor, ops};

cases![
    bf16_64,
    bf16_128,
    f16_64,
    f16_128,
    bf16_without_tensor_cores,
    f16_without_tensor_cores,
    tiles_that_no_query_sees_are_not_read,
];

fn bf16_64(device: &Device) -> Outcome {
    every_bit(DType::BF16, 64, device)
}

fn bf16_128(device: &Device) -> Outcome {
    every_bit(DType::BF16, 128, device)
}

fn f16_64(device: &Device) -> Outcome {
    every_bit(DType::F16, 64, device)
}

fn f16_128(device: &Device) -> Outcome {
    every_bit(DType::F16, 128, device)
}

fn bf16_without_tensor_cores(device: &Device) -> Outcome {
    every_bit(DType::BF16, 67, device)
}

fn f16_without_tensor_cores(device: &Device) -> Outcome {
    every_bit(DType::F16, 67, device)
}

fn every_bit(dtype: DType, dim: usize, device: &Device) -> Outcome {
    for ([rows, keys], causal, length) in
        [([dim, 70], true, None), ([dim - 3, 67], false, Some(59)), ([dim - 8, 43], true, Some(40))]
    {
        key_gradients(&Problem { dtype, dim, rows, keys, causal, length }, device)?;
    }
    for ([rows, keys], causal, length) in
        [([dim + 5, dim - 1], true, None), ([67, dim - 2], false, Some(dim - 11)), ([41, 44], true, Some(40))]
    {
        query_gradients(&Problem { dtype, dim, rows, keys, causal, length }, device)?;
    }
    // Lengths that end at each place of a lane's part of a tile.
    for length in [1, 4, 11, 14, 21, 24, 26, 31] {
        let problem = Problem { dtype, dim, rows: 17, keys: 33, causal: false, length: Some(length) };
        key_gradients(&problem, device)?;
        query_gradients(&problem, device)?;
    }
    // Queries and keys that end in each part of a tile that is copied at once.
    for extent in [6, 15, 18, 27, 36, 45, 54, 63] {
        let problem = Problem { dtype, dim, rows: extent, keys: extent, causal: false, length: None };
        key_gradients(&problem, device)?;
        query_gradients(&problem, device)?;
    }
    (0..6).try_for_each(|seed| outputs(dtype, dim, seed, device))
}

/// One head of one batch entry; its rows are the queries.
struct Problem {
    dtype: DType,
    dim: usize,
    rows: usize,
    keys: usize,
    causal: bool,
    length: Option<usize>,
}

impl Problem {
    fn sees(&self, row: usize, key: usize) -> bool {
        key < self.length.unwrap_or(self.keys) && (!self.causal || key <= row)
    }

    fn sequences(&self, device: &Device) -> Result<Sequences> {
        let Some(length) = self.length else { return Ok(Sequences::Full) };
        Ok(Sequences::padded(&Tensor::from_vec(vec![length as i32], [1], device)?))
    }

    fn options(&self) -> ScoreOptions<'static> {
        ScoreOptions { causal: self.causal, softmax_scale: Some(SCALE as f32), ..Default::default() }
    }

    /// Creates a tensor from `value` of each row and column, with zeros in the columns behind `columns`.
    fn tensor(
        &self,
        [rows, columns]: [usize; 2],
        value: impl Fn(usize, usize) -> f32,
        device: &Device,
    ) -> Result<Tensor> {
        let at = |i: usize| {
            let (row, column) = (i / self.dim, i % self.dim);
            if column < columns { value(row, column) } else { 0.0 }
        };
        tensor((0..rows * self.dim).map(at).collect(), [1, rows, 1, self.dim], self.dtype, device)
    }

    /// Returns what forward would have saved for rows whose maxima are 0 and whose sums are powers of two.
    fn saved(&self, device: &Device) -> Result<AttentionSaved> {
        let sums = (0..self.rows).map(|row| sum_of(row) as f32).collect();
        Ok(AttentionSaved {
            row_max: Tensor::zeros([1, 1, self.rows], DType::F32, device)?,
            row_sum: Some(Tensor::from_vec(sums, [1, 1, self.rows], device)?),
        })
    }

    /// Fails where results, a row of `columns` of them, differ from what `want` says, rounded once.
    fn expect(
        &self,
        what: &str,
        got: &Tensor,
        [rows, columns]: [usize; 2],
        want: impl Fn(usize, usize) -> f64,
    ) -> Outcome {
        let Self { dtype, dim, .. } = *self;
        let value = |i: usize| {
            let (row, column) = (i / dim, i % dim);
            if column < columns { round(dtype, want(row, column)) } else { 0.0 }
        };
        let want: Vec<f32> = (0..rows * dim).map(value).collect();
        let what = format!("{what}, {dtype}, {} by {}", self.rows, self.keys);
        same(&what, &got.to_f32_vec()?, &want, dim)
    }
}

/// Returns the sum of a row's exponentials.
fn sum_of(row: usize) -> f64 {
    [0.5, 1.0, 2.0][row % 3]
}

/// A row's sum of output times its gradient.
fn mean_of(row: usize) -> f32 {
    [0.0, 0.5, -0.25, 1.0][row % 4]
}

/// A power of two: scores are exact.
const SCALE: f64 = 0.5;

/// The smallest distance of a result from the middle of two neighbours, relative to the result. It is larger than the error
/// of an exponential on tensor cores, which is computed from scores times log2(e) and is within 2 ulp.
const NEAREST: f64 = 2e-6;

/// The score of keys that do not count in a row, since their probability is 0.
const FAR: f32 = -100.0;

/// Returns the number of bits of an f64 that the type drops.
fn dropped(dtype: DType) -> u32 {
    if dtype == DType::BF16 { 52 - 7 } else { 52 - 10 }
}

/// To the nearest value of the type, in one step, as far as that is a normal number.
fn round(dtype: DType, value: f64) -> f32 {
    let (bits, dropped) = (value.to_bits(), dropped(dtype));
    let is_odd = bits >> dropped & 1;
    f64::from_bits((bits + (1 << (dropped - 1)) - 1 + is_odd) >> dropped << dropped) as f32
}

/// Returns the distance of a normal value from the middle of two neighbours of the type, relative to the power of two below it.
fn from_the_middle(dtype: DType, value: f64) -> f64 {
    let dropped = dropped(dtype);
    let rest = value.to_bits() & ((1 << dropped) - 1);
    rest.abs_diff(1 << (dropped - 1)) as f64 / 2f64.powi(52)
}

/// Scores whose exponential needs all its terms: almost half of ln 2 away from a multiple. None is as near to the middle
/// of two neighbours as f32 errs.
fn scores(dtype: DType) -> Vec<f32> {
    let ln2 = std::f64::consts::LN_2;
    let all = (-700..700).map(|i| round(dtype, f64::from(i) / 256.0)).filter(|&score| {
        let rest = f64::from(score) - (f64::from(score) / ln2).round() * ln2;
        rest.abs() > 0.29 && from_the_middle(dtype, f64::from(score).exp()) > NEAREST
    });
    let mut all: Vec<f32> = all.collect();
    all.dedup();
    all
}

/// The factor whose product with `value` is as near to the middle of two neighbours as may be.
fn factor(dtype: DType, value: f64, less: f64, nearest: f64, random: &mut Random) -> f32 {
    let distance = |factor: f32| {
        let product = value * (f64::from(factor) - less);
        let distance = from_the_middle(dtype, product);
        if distance < nearest { 1.0 } else { distance }
    };
    let candidates = (0..100).map(|_| round(dtype, 2.0 + 2.0 * random.uniform()));
    let (_, nearest) = candidates
        .map(|factor| (distance(factor), factor))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .unwrap_or((1.0, 2.0));
    nearest
}

/// For each row and key a score, and a product of gradient and value that brings the slope beside a middle.
struct Numbers {
    keys: usize,
    scores: Vec<f32>,
    products: Vec<f32>,
}

impl Numbers {
    fn new(problem: &Problem) -> Self {
        let (mut random, choice) = (Random::new(problem.rows as u64), scores(problem.dtype));
        let (mut all, mut products) = (Vec::new(), Vec::new());
        for row in (0..problem.rows).flat_map(|row| std::iter::repeat_n(row, problem.keys)) {
            let score = choice[random.bits() as usize % choice.len()];
            let probability = f64::from(score).exp() / sum_of(row);
            let mean = f64::from(mean_of(row));
            products.push(factor(problem.dtype, probability * SCALE, mean, NEAREST, &mut random));
            all.push(score);
        }
        Self { keys: problem.keys, scores: all, products }
    }

    fn score(&self, row: usize, key: usize) -> f32 {
        self.scores[row * self.keys + key]
    }

    fn product(&self, row: usize, key: usize) -> f32 {
        self.products[row * self.keys + key]
    }

    fn probability(&self, row: usize, key: usize) -> f64 {
        f64::from(self.score(row, key)).exp() / sum_of(row)
    }

    fn slope(&self, row: usize, key: usize) -> f64 {
        let product = f64::from(self.product(row, key)) - f64::from(mean_of(row));
        self.probability(row, key) * product * SCALE
    }
}

fn unit(row: usize, column: usize) -> f32 {
    f32::from(u8::from(row == column))
}

/// Queries and gradients are unit vectors: what a key holds for each of them are its score and product.
fn key_gradients(problem: &Problem, device: &Device) -> Outcome {
    let numbers = Numbers::new(problem);
    let (rows, keys) = (problem.rows, problem.keys);
    let q = problem.tensor([rows, rows], unit, device)?;
    let o = problem.tensor([rows, rows], |row, column| unit(row, column) * mean_of(row), device)?;
    let k = problem.tensor([keys, rows], |key, row| numbers.score(row, key) / SCALE as f32, device)?;
    let v = problem.tensor([keys, rows], |key, row| numbers.product(row, key), device)?;
    let (saved, sequences) = (problem.saved(device)?, problem.sequences(device)?);
    let (_, dk, dv) = ops::attention_backward(&q, &q, &k, &v, &o, &saved, &sequences, problem.options())?;
    let where_seen = |row, key, value| if problem.sees(row, key) { value } else { 0.0 };
    problem.expect("dk", &dk, [keys, rows], |key, row| where_seen(row, key, numbers.slope(row, key)))?;
    problem.expect("dv", &dv, [keys, rows], |key, row| where_seen(row, key, numbers.probability(row, key)))
}

/// Keys and values are unit vectors: what a query and its gradient hold for each of them are scores and products. A
/// column behind makes the mean.
fn query_gradients(problem: &Problem, device: &Device) -> Outcome {
    let numbers = Numbers::new(problem);
    let (rows, keys) = (problem.rows, problem.keys);
    let k = problem.tensor([keys, keys], unit, device)?;
    let q = problem.tensor([rows, keys], |row, key| numbers.score(row, key) / SCALE as f32, device)?;
    let product = |row, key| if key == keys { 1.0 } else { numbers.product(row, key) };
    let dy = problem.tensor([rows, keys + 1], product, device)?;
    let mean = |row, key| if key == keys { mean_of(row) } else { 0.0 };
    let o = problem.tensor([rows, keys + 1], mean, device)?;
    let (saved, sequences) = (problem.saved(device)?, problem.sequences(device)?);
    let (dq, _, _) = ops::attention_backward(&dy, &q, &k, &k, &o, &saved, &sequences, problem.options())?;
    let slope = |row, key| if problem.sees(row, key) { numbers.slope(row, key) } else { 0.0 };
    problem.expect("dq", &dq, [rows, keys], slope)
}

/// Each query is a unit vector and sees two keys: one whose score and value are 0, the largest of all, and one of its own.
fn outputs(dtype: DType, dim: usize, seed: u64, device: &Device) -> Outcome {
    let (rows, keys) = (dim - 5, dim + 3);
    let problem = Problem { dtype, dim, rows, keys, causal: false, length: None };
    // The largest one stands before all others, or behind: then what was summed up shrinks.
    let largest = if seed.is_multiple_of(2) { 0 } else { keys - 1 };
    let own = |row: usize| (row + 11 * seed as usize) % (keys - 1) + usize::from(largest == 0);
    // The kernel's probabilities have twice the digits of their type.
    let nearest = if dtype == DType::BF16 { 1e-5 } else { NEAREST };
    let mut random = Random::new(seed);
    let choice: Vec<f32> = scores(dtype).into_iter().filter(|&score| score < 0.0).collect();
    let score: Vec<f32> = (0..rows).map(|_| choice[random.bits() as usize % choice.len()]).collect();
    let weight = |row: usize| f64::from(score[row]).exp();
    let share = |row: usize| weight(row) / (1.0 + weight(row));
    let mut values = vec![0.0; keys * dim];
    for row in 0..rows {
        for value in &mut values[own(row) * dim..][..dim] {
            *value = factor(dtype, share(row), 0.0, nearest, &mut random);
        }
    }
    let scores = |key: usize, row: usize| {
        let score = if key == largest {
            0.0
        } else if key == own(row) {
            score[row]
        } else {
            FAR
        };
        score / SCALE as f32
    };
    let q = problem.tensor([rows, rows], unit, device)?;
    let k = problem.tensor([keys, rows], scores, device)?;
    let v = problem.tensor([keys, dim], |key, column| values[key * dim + column], device)?;
    let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, problem.options())?;
    same("row_max", &saved.row_max.to_vec::<f32>()?, &vec![0.0; rows], rows)?;
    let sums: Vec<f64> = (0..rows).map(|row| 1.0 + weight(row)).collect();
    close("row_sum", &row_sums(&saved)?, &sums, rows, [1e-6, 0.0])?;
    let output = |row: usize, column: usize| share(row) * f64::from(values[own(row) * dim + column]);
    problem.expect("o", &o, [rows, dim], output)
}

/// NaN in all keys behind a tile of queries, and in all queries before a tile of keys.
fn tiles_that_no_query_sees_are_not_read(device: &Device) -> Outcome {
    const HALF: usize = 64;
    let options = ScoreOptions::default();
    let types = [(DType::F32, 8), (DType::BF16, 64), (DType::BF16, 128), (DType::F16, 64), (DType::F16, 128)];
    for ((dtype, dim), all) in types.into_iter().flat_map(|t| [(t, 2 * HALF), (t, HALF + 1)]) {
        let shape = [1, all, 1, dim];
        let make = |seed| normal(shape, dtype, seed, device);
        let (q, k, v, dy) = (make(1)?, make(2)?, make(3)?, make(4)?);
        let poisoned = |x: &Tensor, rows: std::ops::Range<usize>| {
            let mut values = x.to_f32_vec()?;
            values[rows.start * dim..rows.end * dim].fill(f32::NAN);
            tensor(values, shape, dtype, device)
        };
        let half = |x: &Tensor, second: bool| -> Result<Vec<f32>> {
            let values = x.to_f32_vec()?;
            Ok(if second { values[HALF * dim..].to_vec() } else { values[..HALF * dim].to_vec() })
        };
        let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, options)?;
        let (dq, dk, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &Sequences::Full, options)?;
        let behind = [poisoned(&k, HALF..all)?, poisoned(&v, HALF..all)?];
        let (got, _) = ops::attention(&q, &behind[0], &behind[1], &Sequences::Full, options)?;
        same("o", &half(&got, false)?, &half(&o, false)?, dim)?;
        let (got, ..) =
            ops::attention_backward(&dy, &q, &behind[0], &behind[1], &o, &saved, &Sequences::Full, options)?;
        same("dq", &half(&got, false)?, &half(&dq, false)?, dim)?;
        let before = [poisoned(&q, 0..HALF)?, poisoned(&dy, 0..HALF)?];
        let (_, got_k, got_v) =
            ops::attention_backward(&before[1], &before[0], &k, &v, &o, &saved, &Sequences::Full, options)?;
        same("dk", &half(&got_k, true)?, &half(&dk, true)?, dim)?;
        same("dv", &half(&got_v, true)?, &half(&dv, true)?, dim)?;
    }
    Ok(())
}
