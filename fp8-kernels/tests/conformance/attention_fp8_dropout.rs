//! Dropout of probabilities that products read as FP8 codes: masks by themselves, and results against the oracle with its own
//! random numbers.

use super::attention::row_sums;
use super::attention_dropout::heads;
use super::attention_fp8::{Call, agrees, near_exact, problem, quantized};
use super::case::{Outcome, cases};
use super::compare::{close_norm, ensure, same};
use super::threads::same_bits;
use crate::oracle::attention::Attention;
use fp8_kernels::ops::{self, Dropout, Packing, Part, ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, DropoutState, Encoding, Fp8Tensor, Result, Tensor};
use std::ops::Range;

cases![
    rounds_what_is_kept: Formats,
    many_tiles_stay_near_exact_attention: Formats,
    masks_are_those_of_attention_in_high_precision,
    packed_sequences_have_the_masks_of_their_places,
    gradients_of_values_have_the_mask: Formats,
    heads_of_a_part_drop_what_they_drop_in_the_whole: Formats,
    codes_do_not_saturate,
    as_many_are_kept_as_the_probability_says,
    rows_keep_maxima_and_sums_without_dropout,
    draws_on_the_device_are_those_of_their_key,
    same_for_any_threads,
];

fn with(p: Attention, dropout: (f32, u64, u64)) -> Attention {
    Attention { dropout: Some(dropout), ..p }
}

fn rounds_what_is_kept(device: &Device, encoding: Encoding) -> Outcome {
    let causal = |p: Attention| Attention { causal: true, ..p };
    let windowed =
        Attention { window: [Some(9), Some(4)], ..problem([2, 37, 30, 2, 1, 32], Some(&[30, 19])) };
    for (p, dtype) in [
        (with(causal(problem([1, 21, 21, 2, 1, 16], None)), (0.1, 1, 0)), DType::F32),
        (with(problem([2, 33, 31, 2, 2, 64], Some(&[31, 17])), (0.5, u64::MAX, u64::MAX - 3)), DType::BF16),
        (with(problem([1, 70, 27, 2, 1, 128], Some(&[26])), (0.5, 7, 1 << 33)), DType::F16),
        (with(windowed, (0.3, 9, 5)), DType::F32),
        (with(problem([1, 130, 7, 2, 1, 80], None), (0.9, 4, 2)), DType::F32),
    ] {
        agrees(&p, encoding, dtype, device)?;
    }
    Ok(())
}

fn many_tiles_stay_near_exact_attention(device: &Device, encoding: Encoding) -> Outcome {
    let wide = Attention { causal: true, ..problem([1, 150, 150, 2, 1, 64], None) };
    let long = Attention { window: [Some(100), None], ..problem([1, 66, 290, 1, 1, 96], Some(&[280])) };
    near_exact(&with(wide, (0.1, 3, 5)), encoding, device)?;
    near_exact(&with(long, (0.5, 4, 0)), encoding, device)?;
    // A head size that no kernel for codes takes.
    near_exact(&with(problem([2, 17, 33, 2, 1, 24], Some(&[33, 11])), (0.3, 5, 1)), encoding, device)
}

/// Zeros and ones, which are codes without an error.
fn ones(shape: [usize; 4], one: impl Fn(usize) -> bool, device: &Device) -> Result<Tensor> {
    let values = (0..shape.iter().product()).map(|i| f32::from(one(i))).collect();
    Tensor::from_vec(values, shape, device)
}

/// With equal scores and v a row of the identity for each key of a part, o is the mask of that part. Calls `check` with what
/// attention in high precision and in FP8 gave.
fn masks(
    p: &Attention,
    sequences: &Sequences,
    device: &Device,
    check: impl Fn(&[f32], &[f32]) -> Outcome,
) -> Outcome {
    let e4m3 = |x: &Tensor| quantized(x, Encoding::E4M3);
    let q = Tensor::zeros([p.batch, p.queries, p.heads, p.dim], DType::F32, device)?;
    let k = Tensor::zeros([p.batch, p.keys, p.groups, p.dim], DType::F32, device)?;
    let dropout = Call::new(p, Encoding::E5M2, device)?.dropout;
    let options = ScoreOptions { causal: p.causal, dropout: dropout.as_ref(), ..Default::default() };
    for part in (0..p.keys).step_by(p.dim) {
        let one = |i: usize| i / p.groups / p.dim % p.keys == part + i % p.dim;
        let v = ones([p.batch, p.keys, p.groups, p.dim], one, device)?;
        let (high, _) = ops::attention(&q, &k, &v, sequences, options)?;
        let (low, _) =
            ops::attention_fp8(&e4m3(&q)?, &e4m3(&k)?, &e4m3(&v)?, sequences, options, DType::F32)?;
        check(&high.to_vec::<f32>()?, &low.to_vec::<f32>()?)?;
    }
    Ok(())
}

fn same_mask(high: &[f32], low: &[f32]) -> Outcome {
    for (i, (high, low)) in high.iter().zip(low).enumerate() {
        ensure((*high == 0.0) == (*low == 0.0), || format!("{i}: {high} in high precision, {low} in FP8"))?;
    }
    ensure(low.contains(&0.0) && low.iter().any(|&v| v != 0.0), || "nothing is dropped or kept".to_owned())
}

fn masks_are_those_of_attention_in_high_precision(device: &Device) -> Outcome {
    for ([queries, keys, dim], p) in
        [([67, 70, 64], 0.5), ([9, 133, 128], 0.9), ([35, 70, 16], 0.5), ([5, 33, 24], 0.5)]
    {
        let p = with(problem([2, queries, keys, 2, 1, dim], None), (p, 11, 3));
        masks(&p, &Sequences::Full, device, same_mask)?;
    }
    Ok(())
}

fn packed_sequences_have_the_masks_of_their_places(device: &Device) -> Outcome {
    let packing = Sequences::Packed(Packing::new(&[3, 30, 1, 38], device)?);
    let p = with(Attention { causal: true, ..problem([1, 72, 72, 2, 1, 80], None) }, (0.5, 21, 0));
    masks(&p, &packing, device, same_mask)
}

/// With equal scores and dy a row of the identity for each query of a part, dv is the mask of that part, summed over the heads.
fn gradients_of_values_have_the_mask(device: &Device, encoding: Encoding) -> Outcome {
    for ([queries, keys, dim], p) in [([70, 67, 64], 0.5), ([133, 9, 128], 0.9)] {
        let p = with(problem([1, queries, keys, 2, 2, dim], None), (p, 12, 1));
        let zeros = problem([1, queries, keys, 2, 2, dim], None);
        let mut call = Call::new(&p, encoding, device)?;
        for part in (0..queries).step_by(dim) {
            let shape = [1, queries, 2, dim];
            call.codes[0] = quantized(&Tensor::zeros(shape, DType::F32, device)?, Encoding::E4M3)?;
            call.codes[3] = quantized(&ones(shape, |i| i / 2 / dim == part + i % dim, device)?, encoding)?;
            let dv = call.run(DType::F32)?[3].to_vec::<f32>()?;
            for (i, value) in dv.into_iter().enumerate() {
                let (key, head, query) = (i / dim / 2, i / dim % 2, part + i % dim);
                let factor = if query < queries { p.factor([0, head, query], key) } else { 0.0 };
                let want = factor / zeros.keys as f64;
                ensure((f64::from(value) - want).abs() <= 0.04 * want, || {
                    format!("head {head}, query {query}, key {key}: {value}, expected {want}")
                })?;
            }
        }
    }
    Ok(())
}

/// Outputs and gradients of each part of the heads, with their groups, have the bits of the whole's.
fn heads_of_a_part_drop_what_they_drop_in_the_whole(device: &Device, encoding: Encoding) -> Outcome {
    // Heads, groups, and the groups of the first part; the last head size has no kernel for codes.
    for ([all, groups, cut], dim) in [([4, 4, 1], 64), ([6, 3, 2], 80), ([4, 2, 1], 128), ([4, 2, 1], 24)] {
        let p = with(problem([2, 37, 37, all, groups, dim], None), (0.3, 5, 1));
        let call = Call::new(&Attention { causal: true, ..p }, encoding, device)?;
        let whole = call.run(DType::F32)?;
        for range in [0..cut, cut..groups] {
            let of_queries = range.start * all / groups..range.end * all / groups;
            let ranges = [&of_queries, &range, &range, &of_queries];
            let part = |(x, range): (&Fp8Tensor, &&Range<usize>)| {
                let codes = heads(x.stored_codes(), (*range).clone())?;
                let shape = *codes.shape();
                Fp8Tensor::from_codes(codes, shape, x.encoding(), x.scale_inv().clone())
            };
            let codes = call.codes.iter().zip(&ranges).map(part).collect::<Result<Vec<_>>>()?;
            let dropout_heads = Some(Part { first: of_queries.start, total: all });
            let own = Call {
                codes: codes.try_into().map_err(|_| "four tensors")?,
                values: call.values.clone(),
                sequences: call.sequences.clone(),
                options: ScoreOptions { dropout_heads, ..call.options },
                dropout: call.dropout.clone(),
            };
            let got = own.run(DType::F32)?;
            for (i, range) in [&of_queries, &of_queries, ranges[1], ranges[2]].into_iter().enumerate() {
                let what = format!("result {i}, dim {dim}, {all} heads, {groups} groups, {range:?}");
                let want = heads(&whole[i], range.clone())?.to_vec::<f32>()?;
                same(&what, &got[i].to_vec::<f32>()?, &want, dim)?;
            }
        }
    }
    Ok(())
}

/// One key has all of the weight: with the factor 10 before the cast, its code would be far beyond 448.
fn codes_do_not_saturate(device: &Device) -> Outcome {
    let p = with(problem([1, 64, 1, 1, 1, 64], None), (0.9, 6, 0));
    let call = Call::new(&p, Encoding::E5M2, device)?;
    let got = call.run(DType::F32)?;
    let [q, k, v, dy] = call.decoded()?;
    close_norm("o", &got[0].to_f32_vec()?, &p.forward(&q, &k, &v), 1e-6)?;
    close_norm("dv", &got[3].to_f32_vec()?, &p.backward(&dy, &q, &k, &v)[2], 0.03)
}

fn as_many_are_kept_as_the_probability_says(device: &Device) -> Outcome {
    let p = with(problem([1, 64, 64, 2, 1, 64], None), (0.25, 8, 0));
    masks(&p, &Sequences::Full, device, |_, low| {
        let kept = low.iter().filter(|&&v| v != 0.0).count() as f64 / low.len() as f64;
        // Four standard deviations of 8192 draws are 0.019.
        ensure((kept - 0.75).abs() < 0.02, || format!("{kept} of the probabilities are kept"))?;
        let expected = 1.0 / 64.0 / 0.75;
        let most = low.iter().fold(0.0f32, |most, v| most.max(*v));
        ensure((f64::from(most) / expected - 1.0).abs() < 1e-5, || format!("{most}, expected {expected}"))
    })
}

fn rows_keep_maxima_and_sums_without_dropout(device: &Device) -> Outcome {
    for dim in [32, 112] {
        let rows = |dropout: Option<(f32, u64, u64)>| {
            let p = Attention { causal: true, dropout, ..problem([1, 40, 70, 2, 1, dim], None) };
            let call = Call::new(&p, Encoding::E5M2, device)?;
            let [q, k, v, _] = &call.codes;
            let options = ScoreOptions { dropout: call.dropout.as_ref(), ..call.options };
            let (_, saved) = ops::attention_fp8(q, k, v, &call.sequences, options, DType::F32)?;
            Ok::<_, fp8_kernels::Error>([saved.row_max.to_vec::<f32>()?, row_sums(&saved)?])
        };
        let (dropped, whole) = (rows(Some((0.5, 1, 0)))?, rows(None)?);
        same("row_max", &dropped[0], &whole[0], 40)?;
        same("row_sum", &dropped[1], &whole[1], 40)?;
    }
    Ok(())
}

fn draws_on_the_device_are_those_of_their_key(device: &Device) -> Outcome {
    let draw = DropoutState::new(5, device)?.draw()?.mask(3);
    let key = draw.read()?;
    let call = Call::new(&problem([1, 9, 9, 2, 1, 32], None), Encoding::E5M2, device)?;
    let run = |dropout| {
        Call {
            dropout,
            values: call.values.clone(),
            codes: call.codes.clone(),
            sequences: call.sequences.clone(),
            ..call
        }
        .run(DType::F32)
    };
    let on_device = run(Some(Dropout { p: 0.5, draw }))?;
    let on_host = run(Some(Dropout { p: 0.5, draw: key.into() }))?;
    let none = run(None)?;
    let zero = run(Some(Dropout { p: 0.0, draw: key.into() }))?;
    for i in 0..4 {
        same("of a key", &on_device[i].to_vec::<f32>()?, &on_host[i].to_vec::<f32>()?, 32)?;
        same("p = 0", &zero[i].to_vec::<f32>()?, &none[i].to_vec::<f32>()?, 32)?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let p = Attention { causal: true, ..problem([2, 40, 70, 2, 1, 32], Some(&[70, 33])) };
    let call = Call::new(&with(p, (0.3, 2, 0)), Encoding::E5M2, device)?;
    same_bits("attention_fp8 with dropout", || call.run(DType::F32).map(Vec::from))
}
