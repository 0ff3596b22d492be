//! Dropout of attention's probabilities: masks by themselves, and results against the oracle's own random numbers.

use super::attention::{backward, end_in_each_load, forward, inputs, row_sums, run};
use super::case::{Outcome, cases};
use super::compare::{ensure, equal, refused, refused_on, same};
use super::data::{normal, tensor};
use super::threads::same_bits;
use crate::oracle::attention::Attention;
use fp8_kernels::ops::{Dropout, DropoutKey, Packing, Part, ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, DropoutState, Tensor, ops};

cases![
    matches_the_oracle: Dtypes,
    tensor_cores_match_the_oracle,
    masks_are_those_of_the_oracle: Dtypes,
    packed_sequences_have_the_masks_of_their_places: Dtypes,
    heads_of_a_part_drop_what_they_drop_in_the_whole: Dtypes,
    rows_keep_maxima_and_sums_without_dropout,
    sizes_that_end_in_each_load,
    zero_probability_changes_nothing,
    draws_on_the_device_are_those_of_their_key,
    same_for_any_threads,
    lengths_out_of_range_are_told,
    refuses,
];

/// Numbers of keys that are no multiple of four, probabilities, masks and padding.
fn problems(small: bool) -> Vec<Attention> {
    let problem = |extents, causal: bool, window, lengths: Option<&[usize]>, dropout| {
        let lengths = lengths.map(<[usize]>::to_vec);
        let (dropout, bottom_right) = (Some(dropout), !causal);
        Attention { causal, lengths, window, dropout, bottom_right, ..Attention::new(extents) }
    };
    let (none, some) = ([None, None], [Some(9), Some(3)]);
    if small {
        return vec![
            problem([2, 5, 7, 2, 1, 3], true, none, None, (0.1, 1, 0)),
            problem([1, 33, 37, 2, 2, 9], false, some, Some(&[35]), (0.9, u64::MAX, u64::MAX - 3)),
            problem([1, 66, 70, 1, 1, 5], false, none, None, (0.5, 7, 1 << 33)),
        ];
    }
    vec![
        problem([2, 65, 67, 2, 1, 40], true, none, None, (0.1, 3, 5)),
        // Rows begin and end in every column of a tile, here and in the last one.
        problem([1, 134, 161, 2, 2, 64], false, some, Some(&[150]), (0.9, 4, 0)),
        problem([1, 70, 97, 2, 1, 80], false, none, Some(&[83]), (0.5, 5, 9)),
        problem([1, 40, 130, 1, 1, 128], true, [Some(70), None], None, (0.1, 6, 1)),
        // The third tile of keys and the second of queries end in their last load.
        problem([2, 125, 190, 1, 1, 128], false, none, Some(&[187, 190]), (0.1, 7, 2)),
        problem([1, 150, 190, 1, 1, 128], false, some, None, (0.1, 8, 3)),
    ]
}

fn matches_the_oracle(device: &Device, dtype: DType) -> Outcome {
    problems(true).iter().try_for_each(|problem| {
        forward(problem, &[dtype], device)?;
        backward(problem, &[dtype], device)
    })
}

fn tensor_cores_match_the_oracle(device: &Device) -> Outcome {
    problems(false).iter().try_for_each(|problem| {
        forward(problem, &[DType::BF16, DType::F16], device)?;
        backward(problem, &[DType::BF16, DType::F16], device)
    })
}

/// With equal scores and v a row of the identity for each key of a part, o is the mask of that part: each element.
fn check_mask(
    problem: &Attention,
    sequences: &Sequences,
    sees: impl Fn(usize, usize) -> bool,
    dtype: DType,
    device: &Device,
) -> Outcome {
    let p = problem;
    let Some((probability, seed, offset)) = p.dropout else { return Ok(()) };
    let q = Tensor::zeros([p.batch, p.queries, p.heads, p.dim], dtype, device)?;
    let k = Tensor::zeros([p.batch, p.keys, p.groups, p.dim], dtype, device)?;
    let dropout = Dropout { p: probability, draw: DropoutKey { seed, offset }.into() };
    let options = ScoreOptions { causal: p.causal, dropout: Some(&dropout), ..Default::default() };
    for part in (0..p.keys).step_by(p.dim) {
        let row = |i: usize| (i / p.groups / p.dim % p.keys, i % p.dim, i / p.dim % p.groups);
        let one = |i: usize| {
            let (key, c, _) = row(i);
            f32::from(key == part + c)
        };
        let values = (0..p.batch * p.keys * p.groups * p.dim).map(one).collect();
        let v = tensor(values, [p.batch, p.keys, p.groups, p.dim], dtype, device)?;
        let (o, saved) = ops::attention(&q, &k, &v, sequences, options)?;
        let dy = Tensor::full(1.0, *q.shape(), dtype, device)?;
        let (_, _, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, sequences, options)?;
        let (o, dv) = (o.to_f32_vec()?, dv.to_f32_vec()?);
        for (i, &value) in o.iter().enumerate() {
            let (c, head, query) = (i % p.dim, i / p.dim % p.heads, i / p.dim / p.heads % p.queries);
            let (batch, key) = (i / p.dim / p.heads / p.queries, part + c);
            let kept = key < p.keys && sees(query, key) && p.factor([batch, head, query], key) != 0.0;
            ensure(kept == (value != 0.0), || {
                format!("batch {batch}, head {head}, query {query}, key {key}: kept {kept}, o {value}")
            })?;
        }
        // A key has a gradient if any of its probabilities was kept.
        for (i, &value) in dv.iter().enumerate() {
            let (key, group, batch) =
                (i / p.dim / p.groups % p.keys, i / p.dim % p.groups, i / p.dim / p.groups / p.keys);
            let heads = (0..p.heads).filter(|head| head * p.groups / p.heads == group);
            let kept = heads
                .flat_map(|head| (0..p.queries).map(move |query| (head, query)))
                .any(|(head, query)| sees(query, key) && p.factor([batch, head, query], key) != 0.0);
            ensure(kept == (value != 0.0), || {
                format!("dv of batch {batch}, group {group}, key {key}: {value}")
            })?;
        }
    }
    Ok(())
}

fn masks_are_those_of_the_oracle(device: &Device, dtype: DType) -> Outcome {
    // On the tensor cores, with whole tiles behind a first one, and on the plain kernels, which f32 has alone.
    let shapes = [[67, 70, 64], [9, 133, 128], [35, 70, 33]];
    for [queries, keys, dim] in shapes.into_iter().skip(if dtype == DType::F32 { 2 } else { 0 }) {
        for (p, seed) in [(0.5, 11), (0.9, 12)] {
            let dropout = Some((p, seed, 3));
            let problem = Attention { dropout, ..Attention::new([1, queries, keys, 2, 1, dim]) };
            check_mask(&problem, &Sequences::Full, |_, _| true, dtype, device)?;
        }
    }
    Ok(())
}

/// Element i is that of the whole packed row, whichever sequence a position belongs to.
fn packed_sequences_have_the_masks_of_their_places(device: &Device, dtype: DType) -> Outcome {
    let lengths = [3, 30, 1, 38];
    let packing = Sequences::Packed(Packing::new(&lengths, device)?);
    let of = |position: usize| {
        let mut end = 0;
        lengths.iter().position(|length| {
            end += length;
            position < end
        })
    };
    for dim in [64, 33] {
        let dropout = Some((0.5, 21, 0));
        let problem = Attention { causal: true, dropout, ..Attention::new([1, 72, 72, 2, 1, dim]) };
        let sees = |query, key| key <= query && of(query) == of(key);
        check_mask(&problem, &packing, sees, dtype, device)?;
    }
    Ok(())
}

/// Some heads of `[batch, sequence, heads, head_dim]`.
pub(super) fn heads(x: &Tensor, range: std::ops::Range<usize>) -> fp8_kernels::Result<Tensor> {
    let [batch, sequence, heads, dim] = [0, 1, 2, 3].map(|i| x.shape()[i]);
    let sizes = [range.start, range.len(), heads - range.end].map(|heads| heads * dim);
    let parts = ops::split(&x.reshape([batch, sequence, heads * dim])?, &sizes)?;
    parts[1].reshape([batch, sequence, range.len(), dim])
}

/// Outputs and gradients of each part of the heads, with their groups, have the bits of the whole's.
fn heads_of_a_part_drop_what_they_drop_in_the_whole(device: &Device, dtype: DType) -> Outcome {
    let packing = Sequences::Packed(Packing::new(&[3, 13, 1, 20], device)?);
    for (batch, sequences) in [(2, Sequences::Full), (1, packing)] {
        // Groups are cut with their heads: heads, groups, the groups of the first part, and head_dim.
        for ([all, groups, cut], dim) in [([4, 4, 1], 40), ([6, 3, 2], 5), ([4, 2, 1], 128)] {
            // f32 has one kernel for all sizes.
            let dim = if dtype == DType::F32 { dim.min(12) } else { dim };
            // Rows of a number of keys that is no multiple of four.
            let tokens = 37;
            let make = |heads, seed| normal([batch, tokens, heads, dim], dtype, seed, device);
            let (q, k, v, dy) = (make(all, 1)?, make(groups, 2)?, make(groups, 3)?, make(all, 4)?);
            let dropout = Dropout { p: 0.3, draw: DropoutKey { seed: 5, offset: 1 }.into() };
            let run = |[q, k, v, dy]: [&Tensor; 4], dropout_heads| {
                let options = ScoreOptions { dropout: Some(&dropout), dropout_heads, ..Default::default() };
                let (o, saved) = ops::attention(q, k, v, &sequences, options)?;
                let (dq, dk, dv) = ops::attention_backward(dy, q, k, v, &o, &saved, &sequences, options)?;
                Ok::<_, fp8_kernels::Error>([o, dq, dk, dv])
            };
            let whole = run([&q, &k, &v, &dy], None)?;
            for range in [0..cut, cut..groups] {
                let own = range.start * all / groups..range.end * all / groups;
                let [q, dy] = [&q, &dy].map(|x| heads(x, own.clone()));
                let [k, v] = [&k, &v].map(|x| heads(x, range.clone()));
                let part = Part { first: own.start, total: all };
                let got = run([&q?, &k?, &v?, &dy?], Some(part))?;
                for (i, (got, whole)) in got.iter().zip(&whole).enumerate() {
                    let range = if i < 2 { own.clone() } else { range.clone() };
                    let what = format!("result {i}, dim {dim}, {all} heads, {groups} groups, {range:?}");
                    same(&what, &got.to_f32_vec()?, &heads(whole, range)?.to_f32_vec()?, dim)?;
                }
            }
        }
    }
    Ok(())
}

fn rows_keep_maxima_and_sums_without_dropout(device: &Device) -> Outcome {
    // The largest score of row i is that of key i, as a rule.
    let dims = [(DType::F32, 5), (DType::BF16, 40), (DType::BF16, 128), (DType::F16, 64), (DType::F16, 72)];
    for (dtype, dim) in dims {
        let k = normal([1, 190, 2, dim], dtype, 2, device)?;
        let q = ops::scale(&k, 2.0)?;
        let dropout = Dropout { p: 0.5, draw: DropoutKey { seed: 1, offset: 0 }.into() };
        let options = ScoreOptions { dropout: Some(&dropout), ..Default::default() };
        let (_, saved) = ops::attention(&q, &k, &k, &Sequences::Full, options)?;
        let (_, whole) = ops::attention(&q, &k, &k, &Sequences::Full, ScoreOptions::default())?;
        same("row_max", &saved.row_max.to_vec::<f32>()?, &whole.row_max.to_vec::<f32>()?, 190)?;
        same("row_sum", &row_sums(&saved)?, &row_sums(&whole)?, 190)?;
    }
    Ok(())
}

fn sizes_that_end_in_each_load(device: &Device) -> Outcome {
    end_in_each_load(Some((0.3, 9, 4)), device)
}

fn zero_probability_changes_nothing(device: &Device) -> Outcome {
    let x = normal([1, 9, 2, 8], DType::BF16, 1, device)?;
    let dropout = Dropout { p: 0.0, draw: DropoutKey { seed: 1, offset: 0 }.into() };
    let run = |dropout| {
        let options = ScoreOptions { dropout, ..Default::default() };
        ops::attention(&x, &x, &x, &Sequences::Full, options)?.0.to_f32_vec()
    };
    same("p = 0", &run(Some(&dropout))?, &run(None)?, 8)
}

fn draws_on_the_device_are_those_of_their_key(device: &Device) -> Outcome {
    let state = DropoutState::new(5, device)?;
    let draw = state.draw()?.mask(3);
    let key = draw.read()?;
    equal("state", state.read()?, (5, 1))?;
    let x = normal([1, 9, 2, 8], DType::BF16, 1, device)?;
    let run = |dropout: &Dropout| {
        let options = ScoreOptions { dropout: Some(dropout), ..Default::default() };
        ops::attention(&x, &x, &x, &Sequences::Full, options)?.0.to_f32_vec()
    };
    let (on_device, on_host) = (Dropout { p: 0.5, draw }, Dropout { p: 0.5, draw: key.into() });
    same("o", &run(&on_device)?, &run(&on_host)?, 8)
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let problem = &problems(true)[1];
    let inputs = inputs(problem, DType::F32, device)?;
    same_bits("with dropout", || run(problem, &inputs, device).map(Vec::from))
}

/// By the kernels for tensor cores, of which dropout has its own.
fn lengths_out_of_range_are_told(device: &Device) -> Outcome {
    let dropout = Dropout { p: 0.1, draw: DropoutKey { seed: 1, offset: 0 }.into() };
    let options = ScoreOptions { dropout: Some(&dropout), ..Default::default() };
    for (dim, dtype) in [(64, DType::BF16), (128, DType::BF16), (64, DType::F16), (128, DType::F16)] {
        let x = normal([2, 3, 1, dim], dtype, 1, device)?;
        let (o, saved) = ops::attention(&x, &x, &x, &Sequences::Full, options)?;
        let lengths = |long: i32| Tensor::from_vec(vec![3, long], [2], device);
        for (queries, keys, wording) in [
            (3, 4, "key length 4 at position 1 is out of range 0..4"),
            (4, 3, "query length 4 at position 1 is out of range 0..4"),
        ] {
            let padded = Sequences::Padded { queries: Some(lengths(queries)?), keys: Some(lengths(keys)?) };
            refused_on(device, ops::attention(&x, &x, &x, &padded, options), wording)?;
            let result = ops::attention_backward(&x, &x, &x, &x, &o, &saved, &padded, options);
            refused_on(device, result, wording)?;
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = normal([1, 2, 1, 8], DType::F32, 1, device)?;
    let (o, saved) = ops::attention(&x, &x, &x, &Sequences::Full, ScoreOptions::default())?;
    for (part, wording) in [
        (
            Part { first: 3, total: 3 },
            "dropout_heads = 1 from 3 on, of 3: a part ends within the whole".to_owned(),
        ),
        (
            Part { first: 3, total: 1 << 31 },
            format!(
                "dropout_heads.total = {}: a mask has fewer than 2^31 heads and 2^64 elements",
                1u64 << 31
            ),
        ),
    ] {
        let options = ScoreOptions { dropout_heads: Some(part), ..Default::default() };
        refused(ops::attention(&x, &x, &x, &Sequences::Full, options), &format!("attention: {wording}"))?;
        let result = ops::attention_backward(&x, &x, &x, &x, &o, &saved, &Sequences::Full, options);
        refused(result, &format!("attention_backward: {wording}"))?;
    }
    for p in [1.0, -0.1, f32::NAN] {
        let dropout = Dropout { p, draw: DropoutKey { seed: 1, offset: 0 }.into() };
        let options = ScoreOptions { dropout: Some(&dropout), ..Default::default() };
        let (o, saved) = ops::attention(&x, &x, &x, &Sequences::Full, ScoreOptions::default())?;
        let wording = format!("dropout.p = {p}: a drop probability is at least 0 and less than 1");
        refused(ops::attention(&x, &x, &x, &Sequences::Full, options), &format!("attention: {wording}"))?;
        let result = ops::attention_backward(&x, &x, &x, &x, &o, &saved, &Sequences::Full, options);
        refused(result, &format!("attention_backward: {wording}"))?;
    }
    Ok(())
}
