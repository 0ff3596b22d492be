use super::case::{Outcome, cases};
use super::compare::{close, ensure, equal, refused, refused_on, same};
use super::data::{
    FLOATS, Random, extremes, f64s, normal, rounded, special_rows, specials, tensor, tolerance,
};
use super::edge::to_the_edge;
use super::threads::same_bits;
use crate::oracle::{cross_entropy as oracle, differences};
use fp8_kernels::ops::CrossEntropyOptions;
use fp8_kernels::{DType, Device, Result, Tensor, ops};

cases![
    matches_the_oracle,
    gradients_of_halves_are_rounded_once,
    the_oracle_is_its_own_derivative,
    two_logits_are_exact_to_the_last_digits,
    small_losses_count_beside_large_ones,
    no_bit_of_the_loss_is_lost,
    small_probabilities_count,
    one_row_counts_wherever_it_stands,
    large_logits_stay_finite,
    a_large_logit_counts_wherever_it_stands,
    confident_rows_keep_their_digits,
    nothing_counts,
    special_logits: Dtypes,
    nan_reaches_the_loss,
    same_for_any_threads,
    refuses,
];

const IGNORE: i32 = -100;

/// About one target in five is ignored.
fn targets(rows: usize, vocabulary: usize) -> Vec<i32> {
    let mut random = Random::new(rows as u64 * 31 + vocabulary as u64);
    let mut target = || (random.bits() % vocabulary as u64) as i32;
    (0..rows).map(|i| if i % 5 == 3 { IGNORE } else { target() }).collect()
}

fn counted(targets: &[i32]) -> Vec<Option<usize>> {
    targets.iter().map(|&target| usize::try_from(target).ok()).collect()
}

fn matches_the_oracle(device: &Device) -> Outcome {
    let small = [[1, 1], [1, 15], [3, 16], [15, 17], [16, 101], [17, 1], [64, 7], [101, 257]];
    let sizes = small.into_iter().chain([[3, 1000], [3, 1500], [2, 20_011]]);
    for [rows, vocabulary] in sizes {
        let ids = targets(rows, vocabulary);
        let target = Tensor::from_vec(ids.clone(), [rows], device)?;
        let counted = counted(&ids);
        let count = counted.iter().flatten().count();
        for (dtype, normalizer) in FLOATS.into_iter().flat_map(|dtype| [(dtype, None), (dtype, Some(40.0))]) {
            let options = CrossEntropyOptions { ignore_index: Some(IGNORE), normalizer };
            let logits = ops::scale(&normal([rows, vocabulary], dtype, 1, device)?, 3.0)?;
            let (loss, saved) = ops::cross_entropy(&logits, &target, &options)?;
            let values = f64s(&logits)?;
            let divisor = normalizer.map_or(count as f64, f64::from);
            let what = format!("{dtype} [{rows}, {vocabulary}] {normalizer:?}");
            let want = oracle::loss(&values, vocabulary, &counted, divisor);
            close(&what, &[loss.item()?], &[want], 1, tolerance(DType::F32))?;
            equal("count", saved.count.to_vec::<i32>()?, vec![count as i32])?;
            let dx = ops::cross_entropy_backward(&logits, &target, &saved, &options, 8.0)?;
            let want = oracle::backward(&values, vocabulary, &counted, divisor / 8.0);
            equal("dtype", dx.dtype(), dtype)?;
            close(&what, &dx.to_f32_vec()?, &want, vocabulary, tolerance(dtype))?;
        }
    }
    Ok(())
}

/// A half's gradient is that of its values in f32, rounded: to the bit, in vectors and at the ends of rows.
fn gradients_of_halves_are_rounded_once(device: &Device) -> Outcome {
    let options = CrossEntropyOptions { ignore_index: Some(IGNORE), normalizer: None };
    let ends = (1..=8).map(|vocabulary| [1, vocabulary]);
    for ([rows, vocabulary], dtype) in
        [[3, 16], [9, 17], [5, 101]].into_iter().chain(ends).flat_map(|s| FLOATS.map(|d| (s, d)))
    {
        let target = Tensor::from_vec(targets(rows, vocabulary), [rows], device)?;
        let logits = ops::scale(&normal([rows, vocabulary], dtype, 1, device)?, 3.0)?;
        let gradient = |logits: &Tensor| {
            let (_, saved) = ops::cross_entropy(logits, &target, &options)?;
            ops::cross_entropy_backward(logits, &target, &saved, &options, 8.0)
        };
        let want = ops::cast(&gradient(&ops::cast(&logits, DType::F32)?)?, dtype)?.to_f32_vec()?;
        same(
            &format!("{dtype} [{rows}, {vocabulary}]"),
            &gradient(&logits)?.to_f32_vec()?,
            &want,
            vocabulary,
        )?;
    }
    Ok(())
}

fn the_oracle_is_its_own_derivative(_: &Device) -> Outcome {
    let logits: Vec<f64> = Random::new(8).normals(5 * 7).into_iter().map(f64::from).collect();
    let targets = [Some(0), None, Some(6), Some(3), Some(3)];
    let slope = differences::gradient(|x| oracle::loss(x, 7, &targets, 4.0), &logits);
    let distance = differences::distance(&slope, &oracle::backward(&logits, 7, &targets, 4.0));
    ensure(distance < 1e-8, || format!("distance {distance:e}"))
}

/// The loss and the gradient of one row.
fn row(logits: Vec<f32>, target: i32, device: &Device) -> Result<(f32, Vec<f32>)> {
    let vocabulary = logits.len();
    let logits = Tensor::from_vec(logits, [1, vocabulary], device)?;
    let target = Tensor::from_vec(vec![target], [1], device)?;
    let options = CrossEntropyOptions::default();
    let (loss, saved) = ops::cross_entropy(&logits, &target, &options)?;
    let dx = ops::cross_entropy_backward(&logits, &target, &saved, &options, 1.0)?;
    Ok((loss.item()?, dx.to_vec()?))
}

fn two_logits_are_exact_to_the_last_digits(device: &Device) -> Outcome {
    let distances: Vec<f32> = (0..400).map(|i| -0.0437 * i as f32).collect();
    for (i, &distance) in distances.iter().enumerate() {
        let target = (i % 2) as i32;
        let (loss, dx) = row(vec![0.0, distance], target, device)?;
        let (other, sum) = (f64::from(distance).exp(), 1.0 + f64::from(distance).exp());
        let want = sum.ln() - if target == 1 { f64::from(distance) } else { 0.0 };
        let what = format!("distance {distance}");
        close(&what, &[loss], &[want], 1, [1.3e-7, 1.3e-7])?;
        let step = if target == 1 { 1.0 / sum } else { -other / sum };
        close(&what, &dx, &[step, -step], 2, [3e-7, 1e-7])?;
    }
    Ok(())
}

fn small_losses_count_beside_large_ones(device: &Device) -> Outcome {
    let (rows, large) = (2100, 2f32.powi(24));
    for place in [0, 1, 34, 68, 136, 240, 511, 1008, 1024, 2099] {
        let logits: Vec<f32> = (0..rows).flat_map(|r| [if r == place { large } else { -0.7 }, 0.0]).collect();
        let logits = Tensor::from_vec(logits, [rows, 2], device)?;
        let target = Tensor::from_vec(vec![1; rows], [rows], device)?;
        let options = CrossEntropyOptions { ignore_index: None, normalizer: Some(1.0) };
        let (loss, _) = ops::cross_entropy(&logits, &target, &options)?;
        let want = f64::from(large) + (rows - 1) as f64 * f64::from(-0.7f32).exp().ln_1p();
        close(&format!("row {place}"), &[loss.item()?], &[want], 1, [1.3e-7, 0.0])?;
    }
    Ok(())
}

/// Losses that are differences of two logits, known exactly, whose sum is almost halfway between two numbers of f32.
fn no_bit_of_the_loss_is_lost(device: &Device) -> Outcome {
    const UNITS: i64 = 4096;
    for (seed, above) in (0..6).map(|seed| (seed, seed % 2 == 0)) {
        let mut random = Random::new(seed);
        let mut losses: Vec<i64> = (0..2100).map(|_| UNITS * UNITS + (random.bits() >> 40) as i64).collect();
        let place = 311 * seed as usize;
        losses[place] = UNITS * UNITS;
        let sum: i64 = losses.iter().sum();
        let added = to_the_edge(sum, above);
        losses[place] += added;
        let logits =
            losses.iter().flat_map(|loss| [(loss / UNITS) as f32, -((loss % UNITS) as f32) / UNITS as f32]);
        let logits = Tensor::from_vec(logits.collect(), [losses.len(), 2], device)?;
        let target = Tensor::from_vec(vec![1; losses.len()], [losses.len()], device)?;
        let options = CrossEntropyOptions { ignore_index: None, normalizer: Some(1.0) };
        let (loss, _) = ops::cross_entropy(&logits, &target, &options)?;
        equal(&format!("seed {seed}, above {above}"), loss.item()?, (sum + added) as f32 / UNITS as f32)?;
    }
    Ok(())
}

/// One logit among many whose exponentials an f32 sum would lose one by one.
fn small_probabilities_count(device: &Device) -> Outcome {
    let (vocabulary, low, nothing) = (4096, -17.5f32, -200.0);
    let near = if device.to_string() == "cpu" { 1e-5 } else { 0.2 * f64::from(f32::EPSILON) };
    let (tiny, ulp) = (f64::from(low).exp(), f64::from(f32::EPSILON));
    let places = [0, 9, 530, 1300, 2049, 4090].into_iter();
    for (place, (i, above)) in places.flat_map(|p| (0..8).map(move |i| (p, (i, i % 2 == 0)))) {
        // As many as bring the sum right above, or below, the middle of two numbers of f32.
        let beside = |count: &usize| {
            let part = (*count as f64 * tiny / ulp).fract();
            let beyond = if above { part - 0.5 } else { 0.5 - part };
            (0.02..0.2).contains(&beyond)
        };
        let mut counts = (1..=vocabulary - 32).rev().filter(beside);
        let count = counts.nth(17 * i).ok_or("no such count")?;
        // A GPU's thread meets every 128th group of eight; in this one's, nothing else counts.
        let is_alone = |at: &usize| at / 8 % 128 == place / 8 % 128;
        let mut logits = vec![nothing; vocabulary];
        (0..vocabulary).filter(|at| !is_alone(at)).take(count).for_each(|at| logits[at] = low);
        logits[place] = 0.0;
        let (loss, _) = row(logits, place as i32, device)?;
        let want = f64::from((1.0 + count as f64 * tiny) as f32).ln();
        close(&format!("{count} beside {place}"), &[loss], &[want], 1, [0.0, near])?;
    }
    Ok(())
}

fn one_row_counts_wherever_it_stands(device: &Device) -> Outcome {
    let rows = 1100;
    let logits = Tensor::from_vec([0.0f32, 1.0].repeat(rows), [rows, 2], device)?;
    let options = CrossEntropyOptions { ignore_index: Some(IGNORE), normalizer: None };
    for place in [0, 1, 2, 4, 8, 16, 31, 32, 77, 350, 684, 1023, 1024, 1099] {
        let mut target = vec![IGNORE; rows];
        target[place] = 0;
        let target = Tensor::from_vec(target, [rows], device)?;
        let (loss, saved) = ops::cross_entropy(&logits, &target, &options)?;
        equal(&format!("count, row {place}"), saved.count.to_vec::<i32>()?, vec![1])?;
        close(&format!("row {place}"), &[loss.item()?], &[1f64.exp().ln_1p()], 1, [1.3e-7, 0.0])?;
    }
    Ok(())
}

fn large_logits_stay_finite(device: &Device) -> Outcome {
    let (loss, dx) = row(vec![1e4, -1e4, 1e4], 1, device)?;
    equal("loss", loss, 20_000.0 + 2f32.ln())?;
    same("dx", &dx, &[0.5, -1.0, 0.5], 3)?;
    let (loss, dx) = row(vec![f32::NEG_INFINITY, 0.0], 0, device)?;
    equal("loss of a masked target", loss, f32::INFINITY)?;
    same("dx", &dx, &[-1.0, 1.0], 2)
}

/// With one, two and more warps to a row: exp of 200 alone would be infinite.
fn a_large_logit_counts_wherever_it_stands(device: &Device) -> Outcome {
    for vocabulary in [200, 1024, 1500, 2048, 2056] {
        for place in
            [1, 7, 255, 256, 511, 1023, 1024, 1499, 2047, 2055].map(|place: usize| place.min(vocabulary - 1))
        {
            let mut logits = vec![0.0; vocabulary];
            logits[place] = 200.0;
            let mut want = vec![0.0_f64; vocabulary];
            (want[0], want[place]) = (-1.0, 1.0);
            let (loss, dx) = row(logits, 0, device)?;
            let what = format!("{place} of {vocabulary}");
            equal(&what, loss, 200.0)?;
            close(&what, &dx, &want, vocabulary, [0.0, 0.0])?;
        }
    }
    Ok(())
}

fn confident_rows_keep_their_digits(device: &Device) -> Outcome {
    // Around 10⁴ an f32 logarithm of the sum would have an error of 10⁻³.
    let (loss, dx) = row(vec![10_000.0, 9_998.0], 0, device)?;
    let p = 1.0 / (1.0 + (-2f64).exp());
    close("loss", &[loss], &[-p.ln()], 1, tolerance(DType::F32))?;
    close("dx", &dx, &[p - 1.0, 1.0 - p], 2, tolerance(DType::F32))
}

fn nothing_counts(device: &Device) -> Outcome {
    let options = |normalizer| CrossEntropyOptions { ignore_index: Some(2), normalizer };
    for (rows, options) in [(3, options(None)), (3, options(Some(7.0))), (0, options(None))] {
        let logits = tensor(vec![f32::NAN; rows * 4], [rows, 4], DType::F32, device)?;
        let target = Tensor::from_vec(vec![2; rows], [rows], device)?;
        let (loss, saved) = ops::cross_entropy(&logits, &target, &options)?;
        equal("loss", (loss.item()?, saved.count.to_vec::<i32>()?), (0.0, vec![0]))?;
        let dx = ops::cross_entropy_backward(&logits, &target, &saved, &options, 1.0)?;
        same("dx", &dx.to_vec::<f32>()?, &vec![0.0; rows * 4], 4)?;
    }
    Ok(())
}

/// One in each row, which is the target or another: gradients together, losses row by row.
fn special_logits(device: &Device, dtype: DType) -> Outcome {
    let options = CrossEntropyOptions { ignore_index: None, normalizer: Some(1.0) };
    for (vocabulary, specials) in [(7, specials()), (33, specials()), (40, extremes()), (5003, extremes())] {
        let rows = specials.len();
        let logits = tensor(special_rows(&specials, vocabulary, 3), [rows, vocabulary], dtype, device)?;
        let (flat, values) = (logits.to_f32_vec()?, f64s(&logits)?);
        for is_target in [true, false] {
            let column = |row: usize| (row * 13 + usize::from(!is_target)) % vocabulary;
            let targets: Vec<i32> = (0..rows).map(|row| column(row) as i32).collect();
            let target = Tensor::from_vec(targets.clone(), [rows], device)?;
            let counted = counted(&targets);
            let (_, saved) = ops::cross_entropy(&logits, &target, &options)?;
            let dx = ops::cross_entropy_backward(&logits, &target, &saved, &options, 8.0)?;
            let want = rounded(oracle::backward(&values, vocabulary, &counted, 0.125), dtype)?;
            let what = format!("{dtype}, {vocabulary} columns, the target: {is_target}");
            close(&what, &dx.to_f32_vec()?, &want, vocabulary, tolerance(dtype))?;
            // A loss does not depend on the type that its logits were stored in.
            for at in (0..rows).filter(|_| dtype == DType::F32) {
                let range = at * vocabulary..(at + 1) * vocabulary;
                let (loss, _) = row(flat[range.clone()].to_vec(), targets[at], device)?;
                let want = oracle::loss(&values[range], vocabulary, &counted[at..=at], 1.0);
                let want = rounded(vec![want], DType::F32)?;
                close(&format!("{what}: {:e}", specials[at]), &[loss], &want, 1, tolerance(DType::F32))?;
            }
        }
    }
    Ok(())
}

fn nan_reaches_the_loss(device: &Device) -> Outcome {
    let (loss, _) = row(vec![0.0, f32::NAN, 1.0], 2, device)?;
    ensure(loss.is_nan(), || format!("loss {loss}"))
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let logits = normal([501, 257], DType::BF16, 1, device)?;
    let target = Tensor::from_vec(targets(501, 257), [501], device)?;
    let options = CrossEntropyOptions { ignore_index: Some(IGNORE), normalizer: None };
    same_bits("cross_entropy", || {
        let (loss, saved) = ops::cross_entropy(&logits, &target, &options)?;
        Ok(vec![loss, ops::cross_entropy_backward(&logits, &target, &saved, &options, 1.0)?])
    })
}

fn refuses(device: &Device) -> Outcome {
    let logits = normal([2, 3], DType::F32, 1, device)?;
    let options = CrossEntropyOptions::default();
    let with = |targets: Vec<i32>| {
        let len = targets.len();
        ops::cross_entropy(&logits, &Tensor::from_vec(targets, [len], device)?, &options)
    };
    refused_on(device, with(vec![0, 3]), "cross_entropy: target 3 at position 1 is out of range 0..3")?;
    refused_on(device, with(vec![-1, 0]), "target -1 at position 0")?;
    refused(with(vec![0]), "logits and targets: got [2, 3] and [1]: give one target per row")?;
    refused(ops::cross_entropy(&logits, &logits, &options), "targets has dtype f32: expected i32")?;
    let target = Tensor::from_vec(vec![0, 1], [2], device)?;
    refused(ops::cross_entropy(&target, &target, &options), "logits has dtype i32")?;
    for normalizer in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let options = CrossEntropyOptions { normalizer: Some(normalizer), ..options };
        refused(ops::cross_entropy(&logits, &target, &options), "a finite number greater than 0")?;
    }
    let (_, saved) = ops::cross_entropy(&logits, &target, &options)?;
    let (other, one) = (normal([1, 3], DType::F32, 1, device)?, Tensor::from_vec(vec![0], [1], device)?);
    refused(
        ops::cross_entropy_backward(&other, &one, &saved, &options, 1.0),
        "pass what cross_entropy returned",
    )
}
