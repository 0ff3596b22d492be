use super::attention::row_sums;
use super::case::{Outcome, cases};
use super::compare::{close, close_norm, ensure, refused, refused_on, same};
use super::data::{FLOATS, f64s, normal};
use super::threads::same_bits;
use crate::oracle::attention::Attention;
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::ops::{self, Diagonal, Dropout, DropoutKey, Packing, ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Operand, Result, Scale, ScaleRule, Slot, Tensor};

cases![
    rounds_what_it_says: Formats,
    windows_and_diagonals: Formats,
    many_tiles_stay_near_exact_attention: Formats,
    head_sizes_beyond_the_tensor_cores: Formats,
    quantized_attention_is_near_that_of_the_values,
    packed_sequences_are_those_of_calls_of_their_own,
    rows_have_their_maxima_and_sums,
    rows_without_keys_are_zero,
    each_row_of_gradients_has_its_own_scale: Formats,
    factors_far_apart,
    lengths_out_of_range_are_told,
    columnwise_codes_will_do,
    same_for_any_threads,
    no_queries_or_keys,
    refuses,
];

/// q, k, v and dy, as they were before and as codes; and the sequences and options of a problem.
pub(super) struct Call {
    pub(super) values: [Tensor; 4],
    pub(super) codes: [Fp8Tensor; 4],
    pub(super) sequences: Sequences,
    pub(super) options: ScoreOptions<'static>,
    pub(super) dropout: Option<Dropout>,
}

pub(super) fn quantized(x: &Tensor, encoding: Encoding) -> Result<Fp8Tensor> {
    let rule = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(encoding) };
    match ops::quantize(x, &slot)? {
        Operand::Fp8(codes) => Ok(codes),
        Operand::High(_) => unreachable!("the slot is on"),
    }
}

pub(super) fn problem(extents: [usize; 6], lengths: Option<&[usize]>) -> Attention {
    Attention { lengths: lengths.map(<[usize]>::to_vec), ..Attention::new(extents) }
}

impl Call {
    pub(super) fn new(p: &Attention, encoding: Encoding, device: &Device) -> Result<Self> {
        let (q, k) = ([p.batch, p.queries, p.heads, p.dim], [p.batch, p.keys, p.groups, p.dim]);
        let make = |shape, seed| normal(shape, DType::F32, seed, device);
        let values = [make(q, 1)?, make(k, 2)?, make(k, 3)?, make(q, 4)?];
        let e4m3 = |x| quantized(x, Encoding::E4M3);
        let codes =
            [e4m3(&values[0])?, e4m3(&values[1])?, e4m3(&values[2])?, quantized(&values[3], encoding)?];
        let lengths = |lengths: &Option<Vec<usize>>| {
            let lengths = lengths.as_ref()?.iter().map(|&n| n as i32).collect();
            Some(Tensor::from_vec(lengths, [p.batch], device))
        };
        let (queries, keys) = (lengths(&p.query_lengths).transpose()?, lengths(&p.lengths).transpose()?);
        let sequences = Sequences::Padded { queries, keys };
        let diagonal = if p.bottom_right { Diagonal::BottomRight } else { Diagonal::TopLeft };
        let [left, right] = p.window;
        let options =
            ScoreOptions { causal: p.causal, window: (left, right), diagonal, ..Default::default() };
        let draw = |(p, seed, offset)| Dropout { p, draw: DropoutKey { seed, offset }.into() };
        Ok(Self { values, codes, sequences, options, dropout: p.dropout.map(draw) })
    }

    /// `[o, dq, dk, dv]`.
    pub(super) fn run(&self, dtype: DType) -> Result<[Tensor; 4]> {
        let [q, k, v, dy] = &self.codes;
        let options = ScoreOptions { dropout: self.dropout.as_ref(), ..self.options };
        let (o, saved) = ops::attention_fp8(q, k, v, &self.sequences, options, dtype)?;
        let (dq, dk, dv) = ops::attention_fp8_backward(dy, q, k, v, &o, &saved, &self.sequences, options)?;
        Ok([o, dq, dk, dv])
    }

    /// The values of the codes.
    pub(super) fn decoded(&self) -> Result<[Vec<f64>; 4]> {
        let decoded = |x: &Fp8Tensor| f64s(&x.dequantize(DType::F32)?);
        let [q, k, v, dy] = self.codes.each_ref().map(decoded);
        Ok([q?, k?, v?, dy?])
    }
}

/// Rounding flips where a weight is within an ulp of the middle of two codes: rare, and small in the norm.
fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-3,
        DType::F16 => 3e-3,
        _ => 6e-3,
    }
}

/// Against the oracle that rounds the same weights. One block of keys: the largest score of a row is known when its
/// probabilities are rounded.
pub(super) fn agrees(p: &Attention, encoding: Encoding, dtype: DType, device: &Device) -> Outcome {
    let call = Call::new(p, encoding, device)?;
    let got = call.run(dtype)?;
    let [q, k, v, dy] = call.decoded()?;
    let o = p.forward_fp8(&q, &k, &v);
    let [q_like, k_like, v_like, _] = &call.values;
    for (got, like) in got.iter().zip([q_like, q_like, k_like, v_like]) {
        ensure(got.dtype() == dtype && got.shape() == like.shape(), || format!("{got:?}"))?;
    }
    close_norm(&format!("o {dtype} {p:?}"), &got[0].to_f32_vec()?, &o, limit(dtype))?;
    // Backward reads o as it was stored.
    let o = f64s(&got[0])?;
    let want = p.backward_fp8(encoding, [&dy, &q, &k, &v, &o]);
    for ((name, got), want) in ["dq", "dk", "dv"].into_iter().zip(&got[1..]).zip(&want) {
        close_norm(&format!("{name} {dtype} {encoding} {p:?}"), &got.to_f32_vec()?, want, limit(dtype))?;
    }
    Ok(())
}

fn rounds_what_it_says(device: &Device, encoding: Encoding) -> Outcome {
    let causal = |p: Attention| Attention { causal: true, ..p };
    let problems = [
        causal(problem([1, 20, 20, 2, 1, 16], None)),
        causal(problem([1, 70, 27, 1, 1, 128], Some(&[26]))),
        causal(problem([1, 31, 29, 4, 2, 48], None)),
        problem([2, 33, 32, 2, 2, 64], Some(&[32, 17])),
        problem([2, 9, 31, 3, 1, 80], None),
        problem([1, 130, 5, 2, 1, 32], None),
    ];
    for (p, dtype) in problems.iter().zip(FLOATS.into_iter().cycle()) {
        agrees(p, encoding, dtype, device)?;
    }
    Ok(())
}

fn windows_and_diagonals(device: &Device, encoding: Encoding) -> Outcome {
    for (window, bottom_right, causal) in
        [([Some(3), Some(2)], false, false), ([Some(5), None], true, true), ([None, Some(1)], true, false)]
    {
        for dim in [32, 96] {
            let p = problem([2, 37, 30, 2, 1, dim], Some(&[30, 19]));
            let query_lengths = Some(vec![35, 37]);
            let p = Attention { window, bottom_right, causal, query_lengths, ..p };
            agrees(&p, encoding, DType::F32, device)?;
        }
    }
    Ok(())
}

/// Against exact attention of the codes' values: what is left is the rounding of weights, 0.026 for a value in E4M3 and 0.053 in
/// E5M2, and of o in what backward reads.
pub(super) fn near_exact(p: &Attention, encoding: Encoding, device: &Device) -> Outcome {
    let call = Call::new(p, encoding, device)?;
    let got = call.run(DType::F32)?;
    let [q, k, v, dy] = call.decoded()?;
    close_norm(&format!("o {p:?}"), &got[0].to_f32_vec()?, &p.forward(&q, &k, &v), 0.03)?;
    let of_grads = if encoding == Encoding::E4M3 { 0.05 } else { 0.07 };
    let limits = [of_grads, of_grads, 0.03];
    let want = p.backward(&dy, &q, &k, &v);
    for (((name, got), want), limit) in ["dq", "dk", "dv"].into_iter().zip(&got[1..]).zip(&want).zip(limits) {
        close_norm(&format!("{name} {encoding} {p:?}"), &got.to_f32_vec()?, want, limit)?;
    }
    Ok(())
}

fn many_tiles_stay_near_exact_attention(device: &Device, encoding: Encoding) -> Outcome {
    let wide = Attention { causal: true, ..problem([1, 150, 150, 2, 1, 64], None) };
    let long = Attention { window: [Some(100), None], ..problem([1, 66, 290, 1, 1, 96], Some(&[280])) };
    // The last tiles of a block of queries show its first ones nothing, and what those saw before must stay.
    let hidden = Attention { causal: true, ..problem([1, 70, 70, 1, 1, 112], None) };
    near_exact(&hidden, encoding, device)?;
    near_exact(&wide, encoding, device)?;
    near_exact(&long, encoding, device)
}

fn head_sizes_beyond_the_tensor_cores(device: &Device, encoding: Encoding) -> Outcome {
    for dim in [8, 24, 70, 144] {
        let p = Attention { causal: true, ..problem([2, 17, 33, 2, 1, dim], Some(&[33, 11])) };
        near_exact(&p, encoding, device)?;
    }
    Ok(())
}

/// Against exact attention of the values before they were quantized.
fn quantized_attention_is_near_that_of_the_values(device: &Device) -> Outcome {
    let p = Attention { causal: true, ..problem([1, 96, 96, 2, 2, 64], None) };
    let call = Call::new(&p, Encoding::E5M2, device)?;
    let got = call.run(DType::F32)?;
    let [q, k, v, dy] = call.values.each_ref().map(f64s);
    let (q, k, v, dy) = (q?, k?, v?, dy?);
    close_norm("o", &got[0].to_f32_vec()?, &p.forward(&q, &k, &v), 0.06)?;
    for ((name, got), want) in ["dq", "dk", "dv"].into_iter().zip(&got[1..]).zip(&p.backward(&dy, &q, &k, &v))
    {
        close_norm(name, &got.to_f32_vec()?, want, 0.12)?;
        // FP8 really ran.
        ensure(close_norm(name, &got.to_f32_vec()?, want, 1e-3).is_err(), || format!("{name} is exact"))?;
    }
    Ok(())
}

/// Rows of one sequence of packed codes.
fn rows(x: &Fp8Tensor, begin: usize, count: usize) -> Result<Fp8Tensor> {
    let (&[1, _, heads, dim], device) = (&**x.shape(), x.device()) else { unreachable!("one batch entry") };
    let codes = x.codes()?[begin * heads * dim..(begin + count) * heads * dim].to_vec();
    let shape = [1, count, heads, dim];
    Fp8Tensor::from_codes(Tensor::from_vec(codes, shape, device)?, shape, x.encoding(), x.scale_inv().clone())
}

fn packed_sequences_are_those_of_calls_of_their_own(device: &Device) -> Outcome {
    const PACKED: [[usize; 2]; 5] = [[3, 3], [0, 5], [64, 70], [65, 1], [7, 7]];
    let (queries, keys) = (PACKED.map(|[queries, _]| queries), PACKED.map(|[_, keys]| keys));
    let [all_queries, all_keys] = [queries, keys].map(|lengths| lengths.iter().sum());
    for dim in [32, 80] {
        let p = Attention { causal: true, ..problem([1, all_queries, all_keys, 2, 1, dim], None) };
        let packed = Sequences::Packed(Packing::cross(&queries, &keys, device)?);
        let call = Call { sequences: packed, ..Call::new(&p, Encoding::E5M2, device)? };
        let got = call.run(DType::BF16)?;
        let mut begin = [0, 0];
        for [queries, keys] in PACKED {
            let [q, k, v, dy] = &call.codes;
            let codes = [
                rows(q, begin[0], queries)?,
                rows(k, begin[1], keys)?,
                rows(v, begin[1], keys)?,
                rows(dy, begin[0], queries)?,
            ];
            let own = Call {
                codes,
                sequences: Sequences::Full,
                values: call.values.clone(),
                dropout: None,
                ..call
            }
            .run(DType::BF16)?;
            for (i, (got, own)) in got.iter().zip(&own).enumerate() {
                let (at, count, heads) = if i < 2 { (begin[0], queries, 2) } else { (begin[1], keys, 1) };
                let got = &got.to_f32_vec()?[at * heads * dim..(at + count) * heads * dim];
                // Tiles begin where sequences do: even the bits are equal.
                same(&format!("{i}: {queries} queries, {keys} keys"), got, &own.to_f32_vec()?, dim)?;
            }
            begin = [begin[0] + queries, begin[1] + keys];
        }
    }
    Ok(())
}

/// Maxima and sums are those of all scores that a row sees, in tiles that show it some, all or none.
fn rows_have_their_maxima_and_sums(device: &Device) -> Outcome {
    for dim in [64, 112] {
        let p = Attention { causal: true, ..problem([1, 70, 140, 2, 1, dim], None) };
        let call = Call::new(&p, Encoding::E5M2, device)?;
        let [q, k, v, _] = &call.codes;
        let (_, saved) = ops::attention_fp8(q, k, v, &call.sequences, call.options, DType::F32)?;
        let [q, k, _, _] = call.decoded()?;
        let (mut maxima, mut sums) = (Vec::new(), Vec::new());
        for (head, query) in (0..2).flat_map(|head| (0..70).map(move |query| (head, query))) {
            let score = |key: usize| -> f64 {
                let product = |c| q[(query * 2 + head) * dim + c] * k[key * dim + c];
                (0..dim).map(product).sum::<f64>() * p.scale
            };
            let scores: Vec<f64> = (0..=query).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            maxima.push(largest);
            sums.push(scores.iter().map(|score| (score - largest).exp()).sum());
        }
        close("row_max", &saved.row_max.to_vec::<f32>()?, &maxima, 70, [1e-4, 1e-4])?;
        close("row_sum", &row_sums(&saved)?, &sums, 70, [1e-3, 1e-4])?;
    }
    Ok(())
}

fn rows_without_keys_are_zero(device: &Device) -> Outcome {
    let p = problem([2, 5, 5, 2, 2, 16], Some(&[0, 5]));
    let got = Call::new(&p, Encoding::E5M2, device)?.run(DType::F32)?;
    for (name, x) in ["o", "dq", "dk", "dv"].into_iter().zip(got) {
        let values = x.to_vec::<f32>()?;
        same(name, &values[..160], &[0.0; 160], 16)?;
        ensure(values[160..].iter().any(|&v| v != 0.0), || format!("{name}: the other entry is 0 too"))?;
    }
    Ok(())
}

/// Rows of dy that are thousands of times smaller than others: one scale for all of ds would flush theirs.
fn each_row_of_gradients_has_its_own_scale(device: &Device, encoding: Encoding) -> Outcome {
    let p = problem([1, 40, 24, 1, 1, 16], None);
    let mut call = Call::new(&p, encoding, device)?;
    let mut dy = call.values[3].to_f32_vec()?;
    for (row, values) in dy.chunks_exact_mut(16).enumerate() {
        // The codes of what is small in E4M3 are subnormal, and ds is far smaller still.
        let size: f32 = if row % 2 == 0 { 1.0 } else { 2f32.powi(-9) };
        values.iter_mut().for_each(|v| *v *= size);
    }
    call.codes[3] = quantized(&Tensor::from_vec(dy, [1, 40, 1, 16], device)?, encoding)?;
    let got = call.run(DType::F32)?[1].to_f32_vec()?;
    let [q, k, v, dy] = call.decoded()?;
    let want = &p.backward(&dy, &q, &k, &v)[0];
    let odd = |values: Vec<f64>| -> Vec<f64> {
        values.chunks_exact(16).skip(1).step_by(2).flatten().copied().collect()
    };
    let got: Vec<f32> = odd(got.into_iter().map(f64::from).collect()).into_iter().map(|v| v as f32).collect();
    close_norm("small rows of dq", &got, &odd(want.clone()), 0.08)
}

/// A huge factor of q and a tiny one of k: products of factors alone would overflow or vanish with dy's and v's.
fn factors_far_apart(device: &Device) -> Outcome {
    let p = problem([1, 20, 20, 1, 1, 16], None);
    let plain = Call::new(&p, Encoding::E5M2, device)?;
    let with = |x: &Fp8Tensor, exponent: i32| {
        let factor = x.scale_inv().item()? * 2f32.powi(exponent);
        let codes = Tensor::from_vec(x.codes()?, *x.shape(), device)?;
        Fp8Tensor::from_codes(codes, *x.shape(), x.encoding(), Tensor::scalar(factor, device)?)
    };
    let [q, k, v, dy] = &plain.codes;
    let codes = [with(q, 70)?, with(k, -70)?, with(v, 60)?, with(dy, -60)?];
    let values = plain.values.clone();
    let got =
        Call { codes, values, sequences: plain.sequences.clone(), dropout: None, ..plain }.run(DType::F32)?;
    for ((name, exponent), (got, want)) in [("o", 60), ("dq", -70), ("dk", 70), ("dv", -60)]
        .into_iter()
        .zip(got.iter().zip(plain.run(DType::F32)?))
    {
        let size = 2f64.powi(exponent);
        let want: Vec<f64> = f64s(&want)?.into_iter().map(|v| v * size).collect();
        close_norm(name, &got.to_f32_vec()?, &want, 1e-6)?;
    }
    Ok(())
}

fn lengths_out_of_range_are_told(device: &Device) -> Outcome {
    for dim in [64, 128, 24] {
        let mut call = Call::new(&problem([2, 3, 3, 1, 1, dim], None), Encoding::E5M2, device)?;
        let [q, k, v, dy] = call.codes.clone();
        let (o, saved) = ops::attention_fp8(&q, &k, &v, &Sequences::Full, call.options, DType::F32)?;
        let lengths = |long: i32| Tensor::from_vec(vec![3, long], [2], device);
        for (queries, keys, wording) in [
            (3, 4, "key length 4 at position 1 is out of range 0..4"),
            (4, 3, "query length 4 at position 1 is out of range 0..4"),
        ] {
            call.sequences =
                Sequences::Padded { queries: Some(lengths(queries)?), keys: Some(lengths(keys)?) };
            refused_on(
                device,
                ops::attention_fp8(&q, &k, &v, &call.sequences, call.options, DType::F32),
                wording,
            )?;
            let result =
                ops::attention_fp8_backward(&dy, &q, &k, &v, &o, &saved, &call.sequences, call.options);
            refused_on(device, result, wording)?;
        }
    }
    Ok(())
}

fn columnwise_codes_will_do(device: &Device) -> Outcome {
    let p = problem([1, 6, 6, 2, 2, 16], None);
    let call = Call::new(&p, Encoding::E5M2, device)?;
    let turned = |x: &Fp8Tensor| -> Result<Fp8Tensor> { Ok(x.clone().with_columnwise()?.for_backward()) };
    let [q, k, v, dy] = call.codes.each_ref().map(turned);
    let codes = [q?, k?, v?, dy?];
    let got =
        Call { codes, values: call.values.clone(), sequences: call.sequences.clone(), dropout: None, ..call }
            .run(DType::F32)?;
    for (got, want) in got.iter().zip(call.run(DType::F32)?) {
        same("from the columnwise copy", &got.to_f32_vec()?, &want.to_f32_vec()?, 16)?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let p = Attention { causal: true, ..problem([2, 40, 70, 2, 1, 32], Some(&[70, 33])) };
    let call = Call::new(&p, Encoding::E5M2, device)?;
    same_bits("attention_fp8", || call.run(DType::F32).map(Vec::from))
}

fn no_queries_or_keys(device: &Device) -> Outcome {
    for sizes in [[2, 0, 3, 2, 1, 16], [2, 3, 0, 2, 1, 16], [0, 3, 3, 2, 1, 64], [1, 2, 2, 0, 1, 16]] {
        let got = Call::new(&problem(sizes, None), Encoding::E5M2, device)?.run(DType::BF16)?;
        for x in got {
            ensure(x.to_f32_vec()?.iter().all(|&v| v == 0.0), || format!("{sizes:?}: {x:?}"))?;
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let call = Call::new(&problem([2, 3, 3, 4, 2, 16], None), Encoding::E5M2, device)?;
    let [q, k, v, dy] = &call.codes;
    let attend = |q: &Fp8Tensor, k: &Fp8Tensor, dtype| {
        ops::attention_fp8(q, k, v, &Sequences::Full, call.options, dtype)
    };
    let wording = "attention_fp8: encoding = E5M2 of q: q, k and v are quantized to E4M3";
    refused(attend(dy, k, DType::F32), wording)?;
    refused(attend(q, k, DType::U8), "attention_fp8")?;
    refused(attend(q, q, DType::F32), "k and v: got [2, 3, 4, 16] and [2, 3, 2, 16]")?;
    let codes = Tensor::from_vec(vec![0u8; 384], [2, 3, 4, 16], device)?;
    let factors = Tensor::full(1.0, [24, 1], DType::F32, device)?;
    let by_rows = Fp8Tensor::from_blocks(codes, [2, 3, 4, 16], Encoding::E4M3, Blocks::Row, factors)?;
    refused(attend(&by_rows, k, DType::F32), "blocks = row: expected one factor for the tensor")?;
    let (o, saved) = attend(q, k, DType::F32)?;
    let back = |dy: &Fp8Tensor, o: &Tensor, saved: &ops::AttentionSaved| {
        ops::attention_fp8_backward(dy, q, k, v, o, saved, &Sequences::Full, call.options)
    };
    refused(back(k, &o, &saved), "q and dy: got [2, 3, 4, 16] and [2, 3, 2, 16]")?;
    refused(back(dy, &Tensor::zeros([2, 3, 4, 8], DType::F32, device)?, &saved), "q and o")?;
    let other = ops::AttentionSaved { row_max: Tensor::zeros([2, 4, 2], DType::F32, device)?, ..saved };
    refused(back(dy, &o, &other), "pass what attention returned")?;
    let infinite = ScoreOptions { softmax_scale: Some(f32::NAN), ..call.options };
    refused(ops::attention_fp8(q, k, v, &Sequences::Full, infinite, DType::F32), "softmax_scale = NaN")?;
    let dropout = Dropout { p: 1.0, draw: DropoutKey { seed: 1, offset: 0 }.into() };
    let drops = ScoreOptions { dropout: Some(&dropout), ..call.options };
    let wording = "attention_fp8: dropout.p = 1: a drop probability is at least 0 and less than 1";
    refused(ops::attention_fp8(q, k, v, &Sequences::Full, drops, DType::F32), wording)
}
