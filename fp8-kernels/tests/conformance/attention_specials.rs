//! Attention at its edges: rows and tensors without keys, padding, and scores that rise, are large or infinite.

use super::case::{Outcome, cases};
use super::compare::{close, close_norm, ensure, same};
use super::data::{f64s, normal, tensor, tolerance};
use crate::oracle::attention::Attention;
use fp8_kernels::ops::{ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, Result, Tensor, ops};

cases![
    rows_without_keys_are_zero,
    maxima_that_rise_from_block_to_block,
    large_scores_stay_finite,
    scores_of_minus_infinity_send_no_gradient,
    padding_is_not_read,
    no_queries_or_keys,
];

fn rows_without_keys_are_zero(device: &Device) -> Outcome {
    let shape = [2, 5, 2, 3];
    let [q, k, v, dy] = [1, 2, 3, 4].map(|seed| normal(shape, DType::F32, seed, device));
    let (q, k, v, dy) = (q?, k?, v?, dy?);
    let lengths = Tensor::from_vec(vec![0, 5], [2], device)?;
    let options = ScoreOptions::default();
    let (o, saved) = ops::attention(&q, &k, &v, &Sequences::padded(&lengths), options)?;
    let (dq, dk, dv) =
        ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &Sequences::padded(&lengths), options)?;
    for (name, x) in [("o", o), ("dq", dq), ("dk", dk), ("dv", dv)] {
        let values = x.to_vec::<f32>()?;
        same(name, &values[..30], &[0.0; 30], 3)?;
        ensure(values[30..].iter().any(|&v| v != 0.0), || format!("{name}: the other entry is 0 too"))?;
    }
    Ok(())
}

fn maxima_that_rise_from_block_to_block(device: &Device) -> Outcome {
    let (s, dim) = (200, 2);
    let problem = Attention { scale: 0.5, ..Attention::new([1, s, s, 1, 1, dim]) };
    let options = ScoreOptions { causal: false, softmax_scale: Some(0.5), ..Default::default() };
    for direction in [1.0, -1.0] {
        let q = Tensor::full(1.0, [1, s, 1, dim], DType::F32, device)?;
        // Steps of a power of two: scores are exact, and the tolerance is that of the sums.
        let keys = (0..s * dim).map(|i| direction * (i / dim) as f32 / 8.0).collect();
        let k = tensor(keys, [1, s, 1, dim], DType::F32, device)?;
        let v = normal([1, s, 1, dim], DType::F32, 9, device)?;
        let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, options)?;
        let want = problem.forward(&f64s(&q)?, &f64s(&k)?, &f64s(&v)?);
        close("o", &o.to_vec::<f32>()?, &want, dim, tolerance(DType::F32))?;
        let (dq, dk, dv) = ops::attention_backward(&v, &q, &k, &v, &o, &saved, &Sequences::Full, options)?;
        let want = problem.backward(&f64s(&v)?, &f64s(&q)?, &f64s(&k)?, &f64s(&v)?);
        for ((name, got), want) in [("dq", dq), ("dk", dk), ("dv", dv)].into_iter().zip(&want) {
            close_norm(name, &got.to_vec::<f32>()?, want, 1e-5)?;
        }
    }
    Ok(())
}

fn large_scores_stay_finite(device: &Device) -> Outcome {
    let make = |values: [f32; 4]| tensor(values.to_vec(), [1, 4, 1, 1], DType::F32, device);
    let (q, k, v) = (
        make([100.0, -100.0, 100.0, 0.0])?,
        make([100.0, -100.0, 99.0, 100.0])?,
        make([1.0, 2.0, 3.0, 5.0])?,
    );
    let options = ScoreOptions { causal: false, ..Default::default() };
    let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, options)?;
    same("o", &o.to_vec::<f32>()?, &[3.0, 2.0, 3.0, 2.75], 1)?;
    let (dq, dk, dv) = ops::attention_backward(&v, &q, &k, &v, &o, &saved, &Sequences::Full, options)?;
    for (name, x) in [("dq", dq), ("dk", dk), ("dv", dv)] {
        let values = x.to_vec::<f32>()?;
        ensure(values.iter().all(|v| v.is_finite()), || format!("{name}: {values:?}"))?;
    }
    Ok(())
}

/// A row of scores that are all -inf sees keys, but gives them no weight: 0, and no gradient.
fn scores_of_minus_infinity_send_no_gradient(device: &Device) -> Outcome {
    let shape = [1, 1, 1, 3];
    let tensor = |values: [f32; 3]| Tensor::from_vec(values.to_vec(), shape, device);
    let (q, k, v) =
        (tensor([f32::NEG_INFINITY, 1.0, 1.0])?, tensor([1.0, 2.0, 3.0])?, tensor([4.0, 5.0, 6.0])?);
    let options = ScoreOptions { causal: false, softmax_scale: Some(1.0), ..Default::default() };
    let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, options)?;
    same("o", &o.to_vec::<f32>()?, &[0.0; 3], 3)?;
    let (dq, _, dv) = ops::attention_backward(&v, &q, &k, &v, &o, &saved, &Sequences::Full, options)?;
    same("dq", &dq.to_vec::<f32>()?, &[0.0; 3], 3)?;
    same("dv", &dv.to_vec::<f32>()?, &[0.0; 3], 3)
}

fn padding_is_not_read(device: &Device) -> Outcome {
    let shape = [1, 3, 1, 2];
    let q = normal(shape, DType::F32, 1, device)?;
    let clean = normal(shape, DType::F32, 2, device)?.to_vec::<f32>()?;
    let mut poisoned = clean.clone();
    poisoned[4..].fill(f32::NAN);
    let lengths = Tensor::from_vec(vec![2], [1], device)?;
    let options = ScoreOptions { causal: false, ..Default::default() };
    let run = |k: Vec<f32>| {
        let k = Tensor::from_vec(k, shape, device)?;
        let (o, saved) = ops::attention(&q, &k, &k, &Sequences::padded(&lengths), options)?;
        let (dq, dk, dv) =
            ops::attention_backward(&q, &q, &k, &k, &o, &saved, &Sequences::padded(&lengths), options)?;
        [o, dq, dk, dv].iter().map(Tensor::to_vec::<f32>).collect::<Result<Vec<_>>>()
    };
    for (got, want) in run(poisoned)?.iter().zip(run(clean)?) {
        same("with NaN in the padding", got, &want, 2)?;
    }
    Ok(())
}

fn no_queries_or_keys(device: &Device) -> Outcome {
    for [batch, queries, keys] in [[0, 3, 3], [2, 0, 3], [2, 3, 0]] {
        let q = normal([batch, queries, 2, 4], DType::BF16, 1, device)?;
        let k = normal([batch, keys, 1, 4], DType::BF16, 1, device)?;
        let (o, saved) = ops::attention(&q, &k, &k, &Sequences::Full, ScoreOptions::default())?;
        let (dq, dk, dv) =
            ops::attention_backward(&q, &q, &k, &k, &o, &saved, &Sequences::Full, ScoreOptions::default())?;
        for (name, x, like) in [("o", o, &q), ("dq", dq, &q), ("dk", dk, &k), ("dv", dv, &k)] {
            ensure(x.shape() == like.shape(), || format!("{name}: {}", x.shape()))?;
            ensure(x.to_f32_vec()?.iter().all(|&v| v == 0.0), || format!("{name} is not 0"))?;
        }
    }
    Ok(())
}
