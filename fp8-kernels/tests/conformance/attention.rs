use super::case::{BY_CUDNN, Outcome, cases};
use super::compare::{close, close_norm, ensure, refused, refused_on, same};
use super::data::{self, f64s, normal, tolerance};
use super::threads::same_bits;
use crate::oracle::attention::Attention;
use crate::oracle::differences;
use fp8_kernels::ops::{AttentionSaved, Diagonal, Dropout, DropoutKey, Packing, ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, Result, Tensor, ops};
use std::sync::atomic::Ordering::Relaxed;

cases![
    matches_the_oracle: Dtypes,
    backward_matches_the_oracle: Dtypes,
    head_sizes_of_tensor_cores,
    every_length,
    sizes_that_end_in_each_load,
    head_sizes_beyond_one_part,
    long_sequences,
    saved_rows_are_maxima_and_sums,
    lengths_out_of_range_are_told,
    the_oracle_is_its_own_derivative,
    a_scale_given_or_default,
    same_for_any_threads,
    refuses,
];

/// Sizes around one block of scores, primes, odd head dimensions, groups, padding.
fn problems() -> Vec<Attention> {
    let problem = |extents, causal, lengths: Option<&[usize]>| {
        let lengths = lengths.map(<[usize]>::to_vec);
        Attention { causal, lengths, ..Attention::new(extents) }
    };
    vec![
        problem([1, 1, 1, 1, 1, 1], true, None),
        problem([2, 15, 15, 2, 2, 5], true, None),
        problem([1, 16, 16, 4, 2, 8], true, None),
        problem([2, 17, 17, 4, 1, 7], true, Some(&[17, 0])),
        problem([3, 31, 31, 4, 2, 3], false, Some(&[0, 31, 5])),
        problem([2, 64, 64, 2, 2, 32], true, None),
        problem([1, 65, 65, 2, 1, 33], true, Some(&[64])),
        problem([1, 13, 29, 4, 2, 9], false, None),
        problem([1, 29, 13, 2, 2, 16], false, Some(&[12])),
        problem([1, 63, 130, 1, 1, 4], true, None),
        problem([1, 131, 67, 2, 1, 5], true, None),
        problem([2, 129, 193, 4, 2, 17], false, Some(&[193, 65])),
        problem([1, 5, 7, 1, 1, 70], false, None),
        problem([1, 5, 7, 1, 1, 101], false, None),
        problem([1, 5, 7, 1, 1, 197], false, None),
    ]
}

/// Head sizes of each padding and around it, with groups, padding, tiles that end inside and one behind the other.
fn wide_problems() -> Vec<Attention> {
    let problem = |extents, causal, lengths: Option<&[usize]>| {
        let lengths = lengths.map(<[usize]>::to_vec);
        Attention { causal, lengths, ..Attention::new(extents) }
    };
    vec![
        problem([2, 1, 1, 2, 1, 64], true, None),
        problem([1, 65, 65, 2, 1, 40], true, None),
        problem([2, 33, 70, 2, 2, 80], true, Some(&[70, 31])),
        problem([1, 64, 129, 2, 1, 96], false, None),
        problem([1, 129, 66, 1, 1, 128], true, None),
        problem([2, 17, 97, 4, 2, 128], false, Some(&[97, 33])),
        problem([1, 70, 40, 3, 1, 72], false, Some(&[32])),
        problem([1, 128, 192, 1, 1, 56], true, Some(&[128])),
    ]
}

/// q, k, v, dy.
pub(super) fn inputs(problem: &Attention, dtype: DType, device: &Device) -> Result<[Tensor; 4]> {
    let p = problem;
    let q = [p.batch, p.queries, p.heads, p.dim];
    let k = [p.batch, p.keys, p.groups, p.dim];
    let make = |shape, seed| normal(shape, dtype, seed, device);
    Ok([make(q, 1)?, make(k, 2)?, make(k, 3)?, make(q, 4)?])
}

/// The sums of rows, which every attention here keeps.
pub(super) fn row_sums(saved: &AttentionSaved) -> Result<Vec<f32>> {
    saved.row_sum.iter().try_fold(Vec::new(), |_, sums| sums.to_vec())
}

pub(super) fn sequences(problem: &Attention, device: &Device) -> Result<Sequences> {
    let tensor = |lengths: &Option<Vec<usize>>| {
        let lengths = lengths.as_ref()?.iter().map(|&n| n as i32).collect();
        Some(Tensor::from_vec(lengths, [problem.batch], device))
    };
    let [queries, keys] = [&problem.query_lengths, &problem.lengths].map(tensor);
    if queries.is_none() && keys.is_none() {
        return Ok(Sequences::Full);
    }
    Ok(Sequences::Padded { queries: queries.transpose()?, keys: keys.transpose()? })
}

pub(super) fn options(problem: &Attention) -> ScoreOptions<'static> {
    let diagonal = if problem.bottom_right { Diagonal::BottomRight } else { Diagonal::TopLeft };
    let [left, right] = problem.window;
    let window = (left, right);
    ScoreOptions { causal: problem.causal, window, diagonal, ..Default::default() }
}

pub(super) fn dropout(problem: &Attention) -> Option<Dropout> {
    let (p, seed, offset) = problem.dropout?;
    Some(Dropout { p, draw: DropoutKey { seed, offset }.into() })
}

/// `[o, dq, dk, dv]`.
pub(super) fn run(problem: &Attention, inputs: &[Tensor; 4], device: &Device) -> Result<[Tensor; 4]> {
    let [q, k, v, dy] = inputs;
    let dropout = dropout(problem);
    let sequences = sequences(problem, device)?;
    let options = ScoreOptions { dropout: dropout.as_ref(), ..options(problem) };
    let (o, saved) = ops::attention(q, k, v, &sequences, options)?;
    let (dq, dk, dv) = ops::attention_backward(dy, q, k, v, &o, &saved, &sequences, options)?;
    Ok([o, dq, dk, dv])
}

fn matches_the_oracle(device: &Device, dtype: DType) -> Outcome {
    problems().iter().try_for_each(|problem| forward(problem, &[dtype], device))
}

fn backward_matches_the_oracle(device: &Device, dtype: DType) -> Outcome {
    problems().iter().try_for_each(|problem| backward(problem, &[dtype], device))
}

fn head_sizes_of_tensor_cores(device: &Device) -> Outcome {
    for problem in wide_problems() {
        forward(&problem, &[DType::BF16, DType::F16], device)?;
        backward(&problem, &[DType::BF16, DType::F16], device)?;
    }
    Ok(())
}

/// Keys that end at each column of the tiles, so that each comparison of a column decides.
fn every_length(device: &Device) -> Outcome {
    for (dim, dtype) in [40, 72].into_iter().flat_map(|dim| [DType::BF16, DType::F16].map(|d| (dim, d))) {
        let lengths = Some((1..=64).collect());
        let problem = Attention { lengths, ..Attention::new([64, 9, 64, 1, 1, dim]) };
        forward(&problem, &[dtype], device)?;
        backward(&problem, &[dtype], device)?;
    }
    Ok(())
}

/// As many queries and keys as end inside each of a tile's loads: a row too many would be read behind the tensor's end.
fn sizes_that_end_in_each_load(device: &Device) -> Outcome {
    end_in_each_load(None, device)
}

pub(super) fn end_in_each_load(dropout: Option<(f32, u64, u64)>, device: &Device) -> Outcome {
    // cuDNN takes about a second for each size.
    let sparse = BY_CUDNN.load(Relaxed) && !device.is_simulated();
    for (dim, step, sizes) in if sparse { [(64, 48, 3), (128, 40, 4)] } else { [(64, 16, 8), (128, 8, 16)] } {
        for size in (0..sizes).map(|i| i * step + step / 2) {
            let problem = Attention { dropout, ..Attention::new([1, size, size, 1, 1, dim]) };
            for dtype in [DType::BF16, DType::F16] {
                forward(&problem, &[dtype], device)?;
                backward(&problem, &[dtype], device)?;
            }
        }
    }
    Ok(())
}

fn head_sizes_beyond_one_part(device: &Device) -> Outcome {
    let lengths = Some(vec![33]);
    let problem = Attention { causal: true, lengths, ..Attention::new([1, 34, 67, 2, 1, 130]) };
    forward(&problem, &[DType::F32, DType::BF16], device)?;
    backward(&problem, &[DType::F32, DType::F16], device)?;
    // In eights of elements, of which all lanes of a warp have one, or some another.
    for dim in [200, 256, 264] {
        let problem = Attention { causal: true, ..Attention::new([1, 18, 35, 2, 1, dim]) };
        forward(&problem, &[DType::BF16, DType::F16], device)?;
        backward(&problem, &[DType::BF16, DType::F16], device)?;
    }
    Ok(())
}

fn long_sequences(device: &Device) -> Outcome {
    let problem = |queries, keys, dim, lengths| {
        let extents = [1, queries, keys, 2, 1, dim];
        Attention { causal: true, lengths, ..Attention::new(extents) }
    };
    let (long, ragged) = (problem(512, 512, 16, None), problem(200, 327, 8, Some(vec![190])));
    forward(&long, &[DType::BF16], device)?;
    backward(&long, &[DType::BF16], device)?;
    forward(&ragged, &[DType::F32], device)?;
    backward(&ragged, &[DType::F32], device)
}

/// The two numbers of each row, for every type and padding of head sizes.
fn saved_rows_are_maxima_and_sums(device: &Device) -> Outcome {
    let (small, wide) = (problems(), wide_problems());
    for (dtype, p) in [
        (DType::F32, &small[4]),
        (DType::BF16, &wide[1]),
        (DType::BF16, &wide[2]),
        (DType::F16, &wide[1]),
        (DType::F16, &wide[2]),
    ] {
        let [q, k, v, _] = inputs(p, dtype, device)?;
        let (_, saved) = ops::attention(&q, &k, &v, &sequences(p, device)?, options(p))?;
        let (q, k) = (f64s(&q)?, f64s(&k)?);
        let (mut maxima, mut sums) = (Vec::new(), Vec::new());
        for row in 0..p.batch * p.heads * p.queries {
            let (batch, head, query) =
                (row / p.queries / p.heads, row / p.queries % p.heads, row % p.queries);
            let q_row = &q[((batch * p.queries + query) * p.heads + head) * p.dim..][..p.dim];
            let score = |key: usize| -> f64 {
                let start = ((batch * p.keys + key) * p.groups + head * p.groups / p.heads) * p.dim;
                q_row.iter().zip(&k[start..start + p.dim]).map(|(x, y)| x * y).sum::<f64>() * p.scale
            };
            let scores: Vec<f64> = (0..p.keys).filter(|&key| p.sees(batch, query, key)).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            maxima.push(largest);
            sums.push(scores.iter().map(|score| (score - largest).exp()).sum());
        }
        let tolerance = [5e-6, 1e-5];
        // cuDNN keeps both numbers in one, which is compared below.
        if saved.row_sum.is_some() {
            close("row_max", &saved.row_max.to_vec::<f32>()?, &maxima, p.queries, tolerance)?;
            close("row_sum", &row_sums(&saved)?, &sums, p.queries, tolerance)?;
        }
        let logarithms: Vec<f64> =
            maxima.iter().zip(&sums).map(|(max, sum): (&f64, &f64)| max + sum.ln()).collect();
        close("log_sum_exp", &saved.log_sum_exp()?.to_vec::<f32>()?, &logarithms, p.queries, tolerance)?;
    }
    Ok(())
}

/// Lengths out of range are told, and on a GPU count as the nearest that are in range.
fn lengths_out_of_range_are_told(device: &Device) -> Outcome {
    let options = ScoreOptions { causal: false, ..Default::default() };
    let lengths = |length, other| Tensor::from_vec(vec![other, length, other], [3], device);
    for (dtype, dim) in
        [(DType::F32, 70), (DType::BF16, 64), (DType::BF16, 128), (DType::F16, 64), (DType::F16, 128)]
    {
        // cuDNN takes at least 16 queries.
        let (queries, keys) = (17, 19);
        let q = normal([3, queries, 2, dim], dtype, 1, device)?;
        let k = normal([3, keys, 1, dim], dtype, 2, device)?;
        let (o, saved) = ops::attention(&q, &k, &k, &Sequences::Full, options)?;
        let call = |op: &str, sequences: &Sequences| -> Result<Vec<Tensor>> {
            if op == "attention" {
                return Ok(vec![ops::attention(&q, &k, &k, sequences, options)?.0]);
            }
            let (dq, dk, dv) = ops::attention_backward(&q, &q, &k, &k, &o, &saved, sequences, options)?;
            Ok(vec![dq, dk, dv])
        };
        let ops = ["attention", "attention_backward"];
        for (op, is_query) in ops.into_iter().flat_map(|op| [(op, false), (op, true)]) {
            let (whose, most) = if is_query { ("query", queries) } else { ("key", keys) };
            for (length, other) in [(most as i32 + 1, most as i32), (i32::MIN, 0), (-1, 2)] {
                let sequences = |length| {
                    let lengths = Some(lengths(length, other)?);
                    let (queries, keys) = if is_query { (lengths, None) } else { (None, lengths) };
                    Ok::<_, fp8_kernels::Error>(Sequences::Padded { queries, keys })
                };
                let result = call(op, &sequences(length)?);
                let got = result.as_ref().map(Clone::clone).unwrap_or_default();
                let limit = most + 1;
                let wording =
                    format!("{op}: {whose} length {length} at position 1 is out of range 0..{limit}");
                refused_on(device, result, &wording)?;
                let want = call(op, &sequences(length.clamp(0, most as i32))?)?;
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format!("{op}, result {i} of {dtype}, {whose} length {length}");
                    same(&what, &got.to_f32_vec()?, &want.to_f32_vec()?, dim)?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn forward(problem: &Attention, dtypes: &[DType], device: &Device) -> Outcome {
    for &dtype in dtypes {
        let [q, k, v, _] = inputs(problem, dtype, device)?;
        let dropout = dropout(problem);
        let options = ScoreOptions { dropout: dropout.as_ref(), ..options(problem) };
        let (o, _) = ops::attention(&q, &k, &v, &sequences(problem, device)?, options)?;
        let want = problem.forward(&f64s(&q)?, &f64s(&k)?, &f64s(&v)?);
        ensure(o.dtype() == dtype && o.shape() == q.shape(), || format!("{} {}", o.dtype(), o.shape()))?;
        let (what, o) = (format!("{dtype} {problem:?}"), o.to_f32_vec()?);
        if dtype != DType::F32 && BY_CUDNN.load(Relaxed) {
            close_norm(&what, &o, &want, tolerance(dtype)[0])?;
        } else {
            close(&what, &o, &want, problem.dim, tolerance(dtype))?;
        }
    }
    Ok(())
}

pub(super) fn backward(problem: &Attention, dtypes: &[DType], device: &Device) -> Outcome {
    for &dtype in dtypes {
        let inputs = inputs(problem, dtype, device)?;
        let got = run(problem, &inputs, device)?;
        let [q, k, v, dy] = inputs;
        let want = problem.backward(&f64s(&dy)?, &f64s(&q)?, &f64s(&k)?, &f64s(&v)?);
        for ((name, got), want) in ["dq", "dk", "dv"].into_iter().zip(&got[1..]).zip(&want) {
            let what = format!("{name} {dtype} {problem:?}");
            let values = got.to_f32_vec()?;
            // Backward reads o, already rounded: its error has the size of the tensor, not of each element.
            let [rtol, _] = tolerance(dtype);
            match dtype {
                DType::F32 => close(&what, &values, want, problem.dim, tolerance(dtype))?,
                // With one key the gradient is 0, and what is left is the rounding of o.
                _ if problem.keys == 1 => {}
                _ => close_norm(&what, &values, want, rtol)?,
            }
        }
    }
    Ok(())
}

fn the_oracle_is_its_own_derivative(_: &Device) -> Outcome {
    [None, Some((0.3, 5, 2))].into_iter().try_for_each(is_its_own_derivative)
}

fn is_its_own_derivative(dropout: Option<(f32, u64, u64)>) -> Outcome {
    let lengths = Some(vec![4, 2]);
    let problem =
        Attention { causal: true, scale: 0.6, lengths, dropout, ..Attention::new([2, 3, 4, 4, 2, 3]) };
    let mut random = data::Random::new(5);
    let mut values = |n| random.normals(n).into_iter().map(f64::from).collect::<Vec<_>>();
    let [q, k, v, dy] = [72, 48, 48, 72].map(&mut values);
    let loss = |q: &[f64], k: &[f64], v: &[f64]| differences::inner(&dy, &problem.forward(q, k, v));
    let slopes = [
        differences::gradient(|q| loss(q, &k, &v), &q),
        differences::gradient(|k| loss(&q, k, &v), &k),
        differences::gradient(|v| loss(&q, &k, v), &v),
    ];
    for (slope, own) in slopes.iter().zip(problem.backward(&dy, &q, &k, &v)) {
        let distance = differences::distance(slope, &own);
        ensure(distance < 1e-8, || format!("distance {distance:e}"))?;
    }
    Ok(())
}

fn a_scale_given_or_default(device: &Device) -> Outcome {
    let x = normal([1, 4, 1, 16], DType::F32, 1, device)?;
    let run = |softmax_scale| {
        ops::attention(&x, &x, &x, &Sequences::Full, ScoreOptions { softmax_scale, ..Default::default() })?
            .0
            .to_vec::<f32>()
    };
    same("1/sqrt(16)", &run(None)?, &run(Some(0.25))?, 16)?;
    ensure(run(None)? != run(Some(0.5))?, || "the scale has no effect".to_owned())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    // Threads are the CPU's; elsewhere a small one shows that a second run gives the bits of the first.
    let mut some: Vec<_> = problems().into_iter().skip(2).step_by(3).collect();
    if device.to_string() != "cpu" {
        some.sort_by_key(|problem| {
            problem.batch * problem.heads * problem.queries * problem.keys * problem.dim
        });
        some.truncate(1);
    }
    for problem in some {
        let inputs = inputs(&problem, DType::F32, device)?;
        same_bits(&format!("{problem:?}"), || run(&problem, &inputs, device).map(Vec::from))?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let make = |shape: [usize; 4]| Tensor::zeros(shape, DType::F32, device);
    let (q, options) = (make([2, 3, 4, 8])?, ScoreOptions::default());
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| ops::attention(q, k, v, &Sequences::Full, options);
    let with = |k: [usize; 4]| attend(&q, &make(k)?, &make(k)?);
    refused(with([2, 3, 3, 8]), "q and k: got [2, 3, 4, 8] and [2, 3, 3, 8]: the number of groups")?;
    refused(with([2, 3, 0, 8]), "must divide the number of heads")?;
    refused(with([1, 3, 4, 8]), "the same batch and head_dim")?;
    refused(with([2, 3, 4, 7]), "the same batch and head_dim")?;
    refused(attend(&q, &make([2, 3, 2, 8])?, &make([2, 4, 2, 8])?), "k and v: got")?;
    refused(
        attend(&make([2, 3, 4, 0])?, &make([2, 3, 4, 0])?, &make([2, 3, 4, 0])?),
        "head_dim must be at least 1",
    )?;
    let flat = Tensor::zeros([6, 4], DType::F32, device)?;
    refused(attend(&flat, &q, &q), "shape [6, 4]: expected [batch, sequence, heads, head_dim]")?;
    let half = Tensor::zeros([2, 3, 4, 8], DType::BF16, device)?;
    refused(attend(&q, &half, &half), "k has dtype bf16: expected f32")?;
    let infinite = ScoreOptions { softmax_scale: Some(f32::INFINITY), ..options };
    refused(
        ops::attention(&q, &q, &q, &Sequences::Full, infinite),
        "softmax_scale = inf: give a finite number",
    )?;
    let lengths = |values: Vec<i32>| {
        let count = values.len();
        let lengths = Tensor::from_vec(values, [count], device)?;
        ops::attention(&q, &q, &q, &Sequences::padded(&lengths), options)
    };
    refused(lengths(vec![3]), "got [1] and [2]: give one length per batch entry")?;
    let packed = |lengths: &[usize]| {
        ops::attention(&q, &q, &q, &Sequences::Packed(Packing::new(lengths, device)?), options)
    };
    refused(packed(&[1, 2]), "got [2, 3, 3] and [1, 3, 3]: packed sequences are one batch entry")?;
    refused_on(device, lengths(vec![3, 4]), "key length 4 at position 1 is out of range 0..4")?;
    refused_on(device, lengths(vec![-1, 3]), "key length -1 at position 0")?;
    let (o, saved) = ops::attention(&q, &q, &q, &Sequences::Full, options)?;
    let long = Tensor::from_vec(vec![4, 3], [2], device)?;
    let result = ops::attention_backward(&q, &q, &q, &q, &o, &saved, &Sequences::padded(&long), options);
    refused_on(device, result, "attention_backward: key length 4 at position 0 is out of range 0..4")?;
    let short = make([2, 2, 4, 8])?;
    refused(ops::attention_backward(&short, &q, &q, &q, &o, &saved, &Sequences::Full, options), "q and dy")?;
    refused(
        ops::attention_backward(&short, &short, &q, &q, &short, &saved, &Sequences::Full, options),
        "pass what attention returned",
    )
}
