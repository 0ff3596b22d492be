use super::case::{Outcome, cases};
use super::compare::{ensure, equal, refused, same};
use super::data::{Random, normal, special_rows, specials, tensor};
use super::threads::same_bits;
use crate::oracle::philox::philox;
use fp8_kernels::math;
use fp8_kernels::ops::{self, DropoutKey, SampleOptions};
use fp8_kernels::{DType, Device, DropoutState, Result, Shape, Tensor};

cases![
    takes_the_largest: Dtypes,
    draws_by_the_definition: Dtypes,
    special_values: Dtypes,
    large_vocabularies,
    ends_of_every_thread,
    few_logits_of_many,
    neighbouring_values,
    weights_to_the_last_digits,
    follows_the_softmax,
    a_share_of_hardly_anything,
    draws_on_the_device,
    same_for_any_threads,
    refuses,
];

const KEY: DropoutKey = DropoutKey { seed: 7, offset: u64::MAX - 1 };

fn greedy() -> SampleOptions {
    SampleOptions { temperature: 0.0, top_k: Some(3), top_p: 0.1 }
}

/// Returns the token that `row` gives by the definition: every value is tried as the smallest that is kept.
fn expected(row: &[f32], options: &SampleOptions, random: u64) -> i32 {
    let row: Vec<f32> = row.iter().map(|&v| if v.is_nan() { f32::NEG_INFINITY } else { v }).collect();
    let mut values = row.clone();
    values.sort_by(|a, b| b.total_cmp(a));
    values.dedup();
    let largest = values[0];
    if largest == f32::NEG_INFINITY {
        return -1;
    }
    if options.temperature == 0.0 {
        return row.iter().position(|&v| v == largest).unwrap_or_default() as i32;
    }
    let weights: Vec<u128> = row
        .iter()
        .map(|&v| match v == largest {
            true => 1 << 31,
            false => (math::exp((v - largest) * (1.0 / options.temperature)) * 2f32.powi(31)).floor() as u128,
        })
        .collect();
    let mut least = f32::NEG_INFINITY;
    if let Some(k) = options.top_k {
        let reaches = |value: &&f32| row.iter().filter(|v| *v >= *value).count() >= k;
        least = values.iter().find(reaches).copied().unwrap_or(least);
    }
    let weight =
        |from: f32| -> u128 { row.iter().zip(&weights).filter(|(v, _)| **v >= from).map(|(_, w)| w).sum() };
    if options.top_p < 1.0 {
        let share = (f64::from(options.top_p) * 2f64.powi(64)) as u128;
        let needed = ((weight(least) * share) >> 64).max(1);
        least = values.iter().find(|value| weight(**value) >= needed).copied().unwrap_or(least);
    }
    let target = (u128::from(random) * weight(least)) >> 64;
    let mut sum = 0;
    let token = row.iter().zip(&weights).position(|(v, w)| {
        sum += if *v >= least { *w } else { 0 };
        sum > target
    });
    token.unwrap_or(usize::MAX) as i32
}

fn random(key: DropoutKey, row: usize) -> u64 {
    let lanes = philox(key.offset.wrapping_add(row as u64), key.seed);
    u64::from(lanes[0]) + (u64::from(lanes[1]) << 32)
}

/// All rows, against the definition.
fn check(what: &str, logits: &Tensor, options: &SampleOptions, key: DropoutKey) -> Outcome {
    let tokens = ops::sample(logits, options, key)?;
    let cols = logits.shape().last_dim();
    let values = logits.to_f32_vec()?;
    let want: Vec<i32> = values
        .chunks(cols)
        .enumerate()
        .map(|(row, values)| expected(values, options, random(key, row)))
        .collect();
    equal("dtype", tokens.dtype(), DType::I32)?;
    same(&format!("{what}, {options:?}"), &tokens.to_vec::<i32>()?, &want, 1)
}

/// Temperatures, numbers and shares, alone and together.
fn choices() -> Vec<SampleOptions> {
    let of = |temperature, top_k, top_p| SampleOptions { temperature, top_k, top_p };
    vec![
        of(1.0, None, 1.0),
        of(0.7, Some(1), 1.0),
        of(1.3, Some(5), 1.0),
        of(1.0, Some(1000), 1.0),
        of(1.0, None, 0.9),
        of(2.0, None, 0.3),
        of(0.5, Some(20), 0.8),
        of(1e-30, None, 0.5),
        of(1e30, Some(7), 0.5),
        of(f32::MAX, None, 0.25),
    ]
}

fn takes_the_largest(device: &Device, dtype: DType) -> Outcome {
    for [rows, cols] in [[3, 1], [2, 2], [5, 31], [4, 32], [3, 33], [2, 1000], [2, 2051]] {
        check(&format!("{rows} {cols}"), &normal([rows, cols], dtype, 1, device)?, &greedy(), KEY)?;
    }
    // Equal ones, of which the first is taken: far apart, and in every order of the two zeros.
    for (first, second) in [(3, 4), (0, 999), (31, 32), (5, 700), (640, 641)] {
        let mut values = vec![-1.0; 1000];
        (values[first], values[second]) = (2.5, 2.5);
        let logits = tensor(values, [1, 1000], dtype, device)?;
        same("tie", &ops::sample(&logits, &greedy(), KEY)?.to_vec::<i32>()?, &[first as i32], 1)?;
    }
    let zeros = tensor(vec![-1.0, -0.0, 0.0, -1.0, 0.0, -0.0, 0.0, -0.0, 1.0], [3, 3], dtype, device)?;
    same("zeros", &ops::sample(&zeros, &greedy(), KEY)?.to_vec::<i32>()?, &[1, 1, 2], 1)?;
    let (low, nan) = (f32::NEG_INFINITY, f32::NAN);
    let values = vec![low, low, low, nan, nan, nan, nan, low, -1e4, nan, f32::INFINITY, 1.0];
    let logits = tensor(values, [4, 3], dtype, device)?;
    same("nothing", &ops::sample(&logits, &greedy(), KEY)?.to_vec::<i32>()?, &[-1, -1, 2, 1], 1)?;
    let deep = normal([2, 3, 5], dtype, 1, device)?;
    equal("shape", *ops::sample(&deep, &greedy(), KEY)?.shape(), Shape::from([2, 3]))?;
    equal(
        "one row",
        *ops::sample(&normal([5], dtype, 1, device)?, &greedy(), KEY)?.shape(),
        Shape::from([]),
    )?;
    equal("none", ops::sample(&normal([0, 5], dtype, 1, device)?, &choices()[0], KEY)?.numel(), 0)
}

fn draws_by_the_definition(device: &Device, dtype: DType) -> Outcome {
    for (rows, cols) in [(3, 1), (16, 3), (16, 31), (8, 129), (3, 1000)] {
        let values = Random::new(cols as u64).normals(rows * cols).into_iter().map(|v| 3.0 * v).collect();
        let logits = tensor(values, [rows, cols], dtype, device)?;
        for options in choices() {
            check(&format!("{rows} {cols}"), &logits, &options, KEY)?;
        }
    }
    // Few values, each of many logits: thresholds keep equal ones together.
    let values = Random::new(5).normals(12 * 200).into_iter().map(|v| (2.0 * v).round()).collect();
    let logits = tensor(values, [12, 200], dtype, device)?;
    choices().iter().try_for_each(|options| check("ties", &logits, options, KEY))
}

/// Each special value among normal ones, rows of nothing else, and rows of infinities alone.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    let rows = specials.len();
    let one = tensor(special_rows(&specials, 37, 3), [rows, 37], dtype, device)?;
    let all = tensor(specials, [2, rows / 2], dtype, device)?;
    let (low, nan, high) = (f32::NEG_INFINITY, f32::NAN, f32::INFINITY);
    let infinite = vec![low, low, low, low, nan, nan, low, nan, high, low, high, high, high, nan, -1.0, 1.0];
    let infinite = tensor(infinite.repeat(6), [24, 4], dtype, device)?;
    for options in choices() {
        check("one", &one, &options, KEY)?;
        check("all", &all, &options, KEY)?;
        check("infinite", &infinite, &options, KEY)?;
    }
    Ok(())
}

fn large_vocabularies(device: &Device) -> Outcome {
    for (cols, dtype) in [(50_000, DType::BF16), ((1 << 16) + 1, DType::F32)] {
        let values = Random::new(2).normals(cols).into_iter().map(|v| (v * 8.0).round() / 4.0).collect();
        let logits = tensor(values, [1, cols], dtype, device)?;
        for options in
            [choices()[0], SampleOptions { temperature: 0.9, top_k: Some(300), top_p: 0.7 }, greedy()]
        {
            check(&cols.to_string(), &logits, &options, KEY)?;
        }
    }
    Ok(())
}

/// One logit that outweighs all others, at every place: each thread's piece, and its ends.
fn ends_of_every_thread(device: &Device) -> Outcome {
    for cols in [100, 515, 2050] {
        let mut values = vec![-50.0; 70 * cols];
        let place = |row: usize| (row * 31 + row / 35) % cols;
        (0..70).for_each(|row| values[row * cols + place(row)] = 3.0);
        let logits = Tensor::from_vec(values, [70, cols], device)?;
        let want: Vec<i32> = (0..70).map(|row| place(row) as i32).collect();
        for options in [choices()[0], choices()[4], greedy()] {
            same(&cols.to_string(), &ops::sample(&logits, &options, KEY)?.to_vec::<i32>()?, &want, 1)?;
        }
    }
    // Equal logits: a token is as far along the row as its random number is along the numbers.
    let rows = 64;
    for cols in [4, 33, 2050] {
        let logits = Tensor::zeros([rows, cols], DType::F32, device)?;
        let want: Vec<i32> =
            (0..rows).map(|row| ((u128::from(random(KEY, row)) * cols as u128) >> 64) as i32).collect();
        same("equal", &ops::sample(&logits, &choices()[0], KEY)?.to_vec::<i32>()?, &want, 1)?;
    }
    Ok(())
}

/// A number at which and one before which a threshold moves.
fn few_logits_of_many(device: &Device) -> Outcome {
    let logits = Tensor::from_vec((0..64).map(|i| -0.1 * (i * 37 % 64) as f32).collect(), [1, 64], device)?;
    for k in 1..=65 {
        for offset in 0..4 {
            let options = SampleOptions { top_k: Some(k), ..Default::default() };
            check("k", &logits, &options, DropoutKey { seed: 3, offset })?;
        }
    }
    // Weights of a half and a quarter: sums that are reached exactly, and just not.
    let halves = Tensor::from_vec([1.0f32, 1.0, 1.0, 1.0].repeat(32), [32, 4], device)?;
    for top_p in [0.25, 0.250_000_03, 0.5, 0.500_000_06, 0.75, 0.749_999_9] {
        check("p", &halves, &SampleOptions { top_p, ..Default::default() }, KEY)?;
    }
    let steps = Tensor::from_vec([2.0f32, 1.0, 0.0, -1.0].repeat(32), [32, 4], device)?;
    (1..40).try_for_each(|i| {
        check("p", &steps, &SampleOptions { top_p: i as f32 / 40.0, ..Default::default() }, KEY)
    })
}

/// Values next to each other, of which every number is kept.
fn neighbouring_values(device: &Device) -> Outcome {
    let base = 1.5f32.to_bits();
    for (sign, cols) in [(0, 40u32), (1 << 31, 200)] {
        let values: Vec<f32> = (0..cols).map(|i| f32::from_bits((base + i * 7 % cols) | sign)).collect();
        let logits = Tensor::from_vec(values, [1, cols as usize], device)?;
        for k in (1..cols as usize).step_by(1 + cols as usize / 60) {
            let key = DropoutKey { seed: 5, offset: k as u64 };
            check("count", &logits, &SampleOptions { top_k: Some(k), ..Default::default() }, key)?;
            let top_p = (k as f32 + 0.5) / cols as f32;
            check("share", &logits, &SampleOptions { top_p, ..Default::default() }, key)?;
        }
    }
    Ok(())
}

/// Random numbers and shares on both sides of where a token begins, as near as they come.
fn weights_to_the_last_digits(device: &Device) -> Outcome {
    // Of the reduced arguments of exp the largest and the smallest.
    for x in [-0.34f32, -0.36, -1.03, -1.05, -3.8] {
        let weight = f64::from((math::exp(x) * 2f32.powi(31)).floor());
        let all = weight + 2f64.powi(31);
        // The token is the first one, whose weight this is, if the random number is less than its share.
        let share = weight / all * 2f64.powi(64);
        let numbers = (0..200_000).map(|offset| (random(DropoutKey { seed: 1, offset }, 0) as f64, offset));
        let (mut below, mut above) = ((0.0, 0), (2f64.powi(64), 0));
        for (number, offset) in numbers {
            if number < share && number > below.0 {
                below = (number, offset);
            } else if number >= share && number < above.0 {
                above = (number, offset);
            }
        }
        let logits = Tensor::from_vec(vec![x, 0.0], [1, 2], device)?;
        for offset in [below.1, above.1] {
            check("number", &logits, &SampleOptions::default(), DropoutKey { seed: 1, offset })?;
        }
        // With a third, smaller one, which the share leaves out, or does not.
        let logits = Tensor::from_vec([x, 0.0, x - 0.1].repeat(24), [24, 3], device)?;
        let third = f64::from((math::exp(x - 0.1) * 2f32.powi(31)).floor());
        let share = (all / (all + third)) as f32;
        for step in -2..=2 {
            let top_p = f32::from_bits(share.to_bits().wrapping_add_signed(step));
            check("share", &logits, &SampleOptions { top_p, ..Default::default() }, KEY)?;
        }
    }
    Ok(())
}

/// The share of each token in many draws, against its probability.
fn follows_the_softmax(device: &Device) -> Outcome {
    let logits = [1.0f32, -2.0, 0.5, 3.0, 2.5, -40.0];
    let draws = 4096;
    let rows = Tensor::from_vec(logits.repeat(draws), [draws, 6], device)?;
    for (temperature, kept, top_k, top_p) in
        [(1.0, 6, None, 1.0), (2.0, 6, None, 1.0), (0.5, 2, Some(2), 1.0), (1.0, 3, None, 0.9)]
    {
        let options = SampleOptions { temperature, top_k, top_p };
        let tokens = ops::sample(&rows, &options, DropoutKey { seed: 11, offset: 0 })?.to_vec::<i32>()?;
        let mut order: Vec<usize> = (0..6).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let exp = |i: usize| (f64::from(logits[i]) / f64::from(temperature)).exp();
        let sum: f64 = order[..kept].iter().map(|&i| exp(i)).sum();
        for (rank, &i) in order.iter().enumerate() {
            let p = if rank < kept { exp(i) / sum } else { 0.0 };
            let count = tokens.iter().filter(|&&token| token == i as i32).count() as f64;
            let (mean, deviation) = (p * draws as f64, (p * (1.0 - p) * draws as f64).sqrt());
            ensure((count - mean).abs() <= 4.0 * deviation, || {
                format!("{options:?}: token {i}: {count} of {draws}, expected {mean} ± {deviation}")
            })?;
        }
    }
    Ok(())
}

/// A share that rounds to nothing leaves the largest logit, or all of them if several are equal.
fn a_share_of_hardly_anything(device: &Device) -> Outcome {
    let logits = Tensor::from_vec([0.0f32, 2.0, 1.0, 2.0].repeat(64), [64, 4], device)?;
    for top_p in [f32::from_bits(1), 1e-30, 1e-9] {
        let options = SampleOptions { top_p, ..Default::default() };
        check("hardly anything", &logits, &options, KEY)?;
        let tokens = ops::sample(&logits, &options, KEY)?.to_vec::<i32>()?;
        let count = tokens.iter().filter(|&&token| token == 1).count();
        ensure(tokens.iter().all(|&t| t == 1 || t == 3) && (16..48).contains(&count), || {
            format!("{tokens:?}")
        })?;
    }
    Ok(())
}

fn draws_on_the_device(device: &Device) -> Outcome {
    let (logits, state) = (Tensor::zeros([40, 50], DType::F32, device)?, DropoutState::new(3, device)?);
    let (draw, options) = (state.draw()?, SampleOptions::default());
    for mask in [0, 5] {
        let key = draw.mask(mask).read()?;
        let tokens = ops::sample(&logits, &options, draw.mask(mask))?.to_vec::<i32>()?;
        same("tokens", &tokens, &ops::sample(&logits, &options, key)?.to_vec::<i32>()?, 1)?;
        check("the key's", &logits, &options, key)?;
    }
    let next = ops::sample(&logits, &options, state.draw()?)?.to_vec::<i32>()?;
    ensure(next != ops::sample(&logits, &options, &draw)?.to_vec::<i32>()?, || {
        "two draws are equal".to_owned()
    })
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let logits = normal([17, 300], DType::F32, 1, device)?;
    same_bits("sample", || Ok(vec![ops::cast(&tokens(&logits)?, DType::F32)?]))
}

/// As floats, which can be compared.
fn tokens(logits: &Tensor) -> Result<Tensor> {
    let tokens = ops::sample(logits, &SampleOptions { top_p: 0.8, ..Default::default() }, KEY)?;
    let values = tokens.to_vec::<i32>()?.into_iter().map(|token| token as f32).collect();
    Tensor::from_vec(values, *tokens.shape(), logits.device())
}

fn refuses(device: &Device) -> Outcome {
    let logits = normal([2, 5], DType::F32, 1, device)?;
    let with = |options: SampleOptions| ops::sample(&logits, &options, KEY);
    let default = SampleOptions::default();
    for (temperature, text) in [(-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let wording =
            format!("sample: temperature = {text}: give a finite number: 0 for the most likely token");
        refused(with(SampleOptions { temperature, ..default }), &wording)?;
    }
    refused(
        with(SampleOptions { top_k: Some(0), ..default }),
        "sample: top_k = 0: give at least 1, or None",
    )?;
    for (top_p, text) in [(0.0, "0"), (1.5, "1.5"), (-0.5, "-0.5"), (f32::NAN, "NaN")] {
        let wording = format!("sample: top_p = {text}: give a probability greater than 0 and at most 1");
        refused(with(SampleOptions { top_p, ..default }), &wording)?;
    }
    // Options are checked where they are not used, too.
    refused(with(SampleOptions { top_p: 2.0, ..greedy() }), "top_p = 2")?;
    let sizes = |shape: Shape| ops::sample(&Tensor::zeros(shape, DType::F32, device)?, &default, KEY);
    refused(sizes(Shape::from([2, 0])), "sample: shape [2, 0]: a vocabulary has 1 to 2147483647 tokens")?;
    refused(sizes(Shape::from([])), "sample: shape []: logits are [.., vocabulary]; reshape a single row")?;
    refused(ops::sample(&Tensor::zeros([2, 5], DType::I32, device)?, &default, KEY), "logits has dtype i32")
}
