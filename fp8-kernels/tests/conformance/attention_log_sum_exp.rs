//! Backward with what other libraries keep of a row: the logarithm of the sum of its exponentials, as they return it.

use super::attention::{inputs, options, sequences};
use super::attention_fp8::{Call, problem};
use super::case::{Outcome, cases};
use super::compare::{close, close_norm, ensure, same};
use super::data::{f64s, normal, tensor, tolerance};
use crate::oracle::attention::Attention;
use fp8_kernels::ops::{AttentionSaved, Dropout, DropoutKey, ScoreOptions};
use fp8_kernels::{DType, Device, Encoding, Tensor, ops};

cases![
    gradients: Dtypes,
    large_scores: Dtypes,
    gradients_of_codes,
    rows_that_see_nothing,
    a_nan_is_told_from_a_row_that_sees_nothing: Dtypes,
];

/// `log Σ exp(score)` in f64, rounded once; −∞ where no key is seen.
fn log_sum_exp(p: &Attention, q: &[f64], k: &[f64]) -> Vec<f32> {
    let row = |row: usize| {
        let (batch, head, query) = (row / p.queries / p.heads, row / p.queries % p.heads, row % p.queries);
        let q_row = &q[((batch * p.queries + query) * p.heads + head) * p.dim..][..p.dim];
        let score = |key: usize| -> f64 {
            let start = ((batch * p.keys + key) * p.groups + head * p.groups / p.heads) * p.dim;
            q_row.iter().zip(&k[start..start + p.dim]).map(|(x, y)| x * y).sum::<f64>() * p.scale
        };
        let scores: Vec<f64> = (0..p.keys).filter(|&key| p.sees(batch, query, key)).map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (largest + scores.iter().map(|score| (score - largest).exp()).sum::<f64>().ln()) as f32
    };
    (0..p.batch * p.heads * p.queries).map(row).collect()
}

fn problems() -> [Attention; 3] {
    [
        Attention { causal: true, ..problem([2, 17, 17, 4, 2, 7], Some(&[17, 5])) },
        Attention { causal: true, ..problem([2, 70, 70, 2, 1, 64], None) },
        Attention { window: [Some(20), Some(3)], ..problem([1, 66, 90, 2, 2, 104], Some(&[80])) },
    ]
}

/// With and without dropout, which the logarithm does not see.
fn gradients(device: &Device, dtype: DType) -> Outcome {
    for p in problems() {
        for drops in [false, true] {
            let [q, k, v, dy] = inputs(&p, dtype, device)?;
            let sequences = sequences(&p, device)?;
            let dropout = Dropout { p: 0.25, draw: DropoutKey { seed: 1, offset: 0 }.into() };
            let options = ScoreOptions { dropout: drops.then_some(&dropout), ..options(&p) };
            let p = Attention { dropout: drops.then_some((0.25, 1, 0)), ..p.clone() };
            let (o, _) = ops::attention(&q, &k, &v, &sequences, options)?;
            let (of_q, of_k) = (f64s(&q)?, f64s(&k)?);
            let rows = [p.batch, p.heads, p.queries];
            let saved = AttentionSaved::from_log_sum_exp(Tensor::from_vec(
                log_sum_exp(&p, &of_q, &of_k),
                rows,
                device,
            )?);
            let (dq, dk, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &sequences, options)?;
            let want = p.backward(&f64s(&dy)?, &of_q, &of_k, &f64s(&v)?);
            let limit = if dtype == DType::F32 { 1e-5 } else { 5e-3 };
            for ((name, got), want) in [("dq", dq), ("dk", dk), ("dv", dv)].into_iter().zip(&want) {
                close_norm(&format!("{name} of {p:?}"), &got.to_f32_vec()?, want, limit)?;
            }
        }
    }
    Ok(())
}

/// Scores of several hundred: the logarithm keeps about five digits of a probability.
fn large_scores(device: &Device, dtype: DType) -> Outcome {
    for dim in [12, 64] {
        let p = Attention { scale: 8.0, causal: true, ..problem([1, 70, 70, 2, 1, dim], None) };
        let [q, k, v, dy] = inputs(&p, dtype, device)?;
        let options = ScoreOptions { softmax_scale: Some(8.0), ..options(&p) };
        let all = sequences(&p, device)?;
        let (o, saved) = ops::attention(&q, &k, &v, &all, options)?;
        let (of_q, of_k) = (f64s(&q)?, f64s(&k)?);
        let logarithms = log_sum_exp(&p, &of_q, &of_k);
        let expected: Vec<f64> = logarithms.iter().map(|&v| f64::from(v)).collect();
        close(
            "log_sum_exp",
            &saved.log_sum_exp()?.to_vec::<f32>()?,
            &expected,
            p.queries,
            tolerance(DType::F32),
        )?;
        let saved = AttentionSaved::from_log_sum_exp(Tensor::from_vec(
            logarithms,
            [p.batch, p.heads, p.queries],
            device,
        )?);
        let (_, _, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &all, options)?;
        let want = p.backward(&f64s(&dy)?, &of_q, &of_k, &f64s(&v)?);
        let limit = if dtype == DType::F32 { 5e-4 } else { 5e-3 };
        close_norm(&format!("dv of {dim}"), &dv.to_f32_vec()?, &want[2], limit)?;
    }
    Ok(())
}

fn gradients_of_codes(device: &Device) -> Outcome {
    for p in [problem([2, 70, 70, 2, 1, 64], None), problem([1, 33, 70, 2, 2, 20], Some(&[60]))] {
        let call = Call::new(&p, Encoding::E5M2, device)?;
        let [q, k, v, dy] = &call.codes;
        let (o, saved) = ops::attention_fp8(q, k, v, &call.sequences, call.options, DType::F32)?;
        let (dq, dk, dv) =
            ops::attention_fp8_backward(dy, q, k, v, &o, &saved, &call.sequences, call.options)?;
        let logarithms = AttentionSaved::from_log_sum_exp(saved.log_sum_exp()?);
        let got = ops::attention_fp8_backward(dy, q, k, v, &o, &logarithms, &call.sequences, call.options)?;
        // Probabilities that differ in their last bits round to other codes now and then.
        for (name, got, want) in [("dq", got.0, dq), ("dk", got.1, dk), ("dv", got.2, dv)] {
            close_norm(name, &got.to_f32_vec()?, &f64s(&want)?, 5e-3)?;
        }
    }
    Ok(())
}

/// −∞ for a row without keys: it has no gradient and sends none.
fn rows_that_see_nothing(device: &Device) -> Outcome {
    for (dtype, dim) in [(DType::F32, 5), (DType::BF16, 16), (DType::F16, 80)] {
        // cuDNN takes at least 16 queries.
        let shape = [2, 17, 2, dim];
        let make = |seed| normal(shape, dtype, seed, device);
        let (q, k, v, dy) = (make(1)?, make(2)?, make(3)?, make(4)?);
        let lengths = Tensor::from_vec(vec![0, 17], [2], device)?;
        let queries = Tensor::from_vec(vec![17, 9], [2], device)?;
        let some = ops::Sequences::Padded { queries: Some(queries), keys: Some(lengths.clone()) };
        let (_, saved) = ops::attention(&q, &k, &v, &some, ScoreOptions::default())?;
        for (row, value) in saved.log_sum_exp()?.to_vec::<f32>()?.into_iter().enumerate() {
            let sees = row >= 34 && row % 17 < 9;
            ensure(if sees { value.is_finite() } else { value == f32::NEG_INFINITY }, || {
                format!("{dtype}, query {} of entry {}: {value}", row % 17, row / 34)
            })?;
        }
        let (all, options) = (ops::Sequences::padded(&lengths), ScoreOptions::default());
        let (o, saved) = ops::attention(&q, &k, &v, &all, options)?;
        let logarithms = saved.log_sum_exp()?;
        same("log_sum_exp", &logarithms.to_vec::<f32>()?[..34], &[f32::NEG_INFINITY; 34], 17)?;
        let (want_q, want_k, want_v) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &all, options)?;
        let saved = AttentionSaved::from_log_sum_exp(logarithms);
        let (dq, dk, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &all, options)?;
        let first = 17 * 2 * dim;
        for (name, got, want) in [("dq", dq, want_q), ("dk", dk, want_k), ("dv", dv, want_v)] {
            same(name, &got.to_f32_vec()?[..first], &vec![0.0; first], dim)?;
            close_norm(name, &got.to_f32_vec()?, &f64s(&want)?, 2e-3)?;
        }
    }
    Ok(())
}

fn a_nan_is_told_from_a_row_that_sees_nothing(device: &Device, dtype: DType) -> Outcome {
    for dim in [5, 16, 80] {
        let shape = [1, 17, 1, dim];
        let mut values = normal(shape, dtype, 1, device)?.to_f32_vec()?;
        values[..dim].fill(f32::NAN);
        let (q, k) = (tensor(values, shape, dtype, device)?, normal(shape, dtype, 2, device)?);
        let (_, saved) = ops::attention(&q, &k, &k, &ops::Sequences::Full, ScoreOptions::default())?;
        let logarithms = saved.log_sum_exp()?.to_vec::<f32>()?;
        let (first, others) = (logarithms[0], &logarithms[1..]);
        ensure(first.is_nan() && others.iter().all(|v| v.is_finite()), || format!("{dim}: {logarithms:?}"))?;
    }
    Ok(())
}
