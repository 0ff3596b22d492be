//! Windows, diagonals, and sequences one behind the other.

use super::attention::{backward, forward};
use super::case::{Outcome, cases};
use super::compare::{ensure, refused, same};
use super::data::{normal, tensor};
use crate::oracle::attention::Attention;
use fp8_kernels::ops::{Diagonal, Packing, PackingCapacity, ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, Result, Tensor, ops};

cases![
    windows_and_diagonals,
    windows_that_end_at_each_column,
    packed_sequences_are_those_of_calls_of_their_own,
    packed_padding_is_zero_and_not_read,
    packings_are_refilled,
];

/// Windows, diagonals, padded queries, each around the edges of tiles.
fn windows_and_diagonals(device: &Device) -> Outcome {
    let problem = |[batch, queries, keys, dim]: [usize; 4], window, bottom_right| Attention {
        window,
        bottom_right,
        ..Attention::new([batch, queries, keys, 2, 1, dim])
    };
    let problems = [
        problem([1, 70, 70, 8], [Some(5), None], false),
        Attention { causal: true, ..problem([1, 130, 130, 8], [Some(63), None], false) },
        Attention { causal: true, ..problem([1, 5, 70, 8], [None, None], true) },
        Attention { causal: true, ..problem([1, 70, 5, 8], [Some(3), None], true) },
        problem([1, 66, 90, 72], [Some(7), Some(2)], true),
        problem([1, 90, 66, 40], [Some(1), Some(0)], false),
        problem([1, 67, 131, 8], [None, Some(64)], true),
        Attention {
            lengths: Some(vec![70, 0, 33]),
            query_lengths: Some(vec![66, 40, 1]),
            ..problem([3, 67, 70, 16], [Some(40), Some(1)], true)
        },
        Attention { query_lengths: Some(vec![65]), ..problem([1, 80, 30, 24], [None, None], false) },
        Attention { lengths: Some(vec![65]), causal: true, ..problem([1, 80, 90, 80], [None, None], true) },
        problem([1, 9, 9, 8], [Some(usize::MAX), Some(1 << 40)], true),
    ];
    for problem in problems {
        forward(&problem, &[DType::F32, DType::BF16], device)?;
        backward(&problem, &[DType::F32, DType::F16], device)?;
    }
    Ok(())
}

/// Windows whose ends move over the columns of a tile, in each kernel of the tensor cores.
fn windows_that_end_at_each_column(device: &Device) -> Outcome {
    for (dim, dtype) in [40, 72].into_iter().flat_map(|dim| [DType::BF16, DType::F16].map(|d| (dim, d))) {
        for window in [[Some(1), Some(0)], [Some(8), Some(3)], [Some(13), Some(6)]] {
            let problem = Attention { window, ..Attention::new([1, 64, 72, 1, 1, dim]) };
            forward(&problem, &[dtype], device)?;
            backward(&problem, &[dtype], device)?;
        }
    }
    Ok(())
}

/// Queries and keys of each sequence, on both sides of a tile's edge; some have none.
const PACKED: [[usize; 2]; 6] = [[3, 3], [0, 5], [64, 70], [65, 1], [2, 0], [7, 7]];

fn packing(capacity: Option<[usize; 2]>, device: &Device) -> Result<Packing> {
    let (queries, keys) = (PACKED.map(|[queries, _]| queries), PACKED.map(|[_, keys]| keys));
    match capacity {
        None => Packing::cross(&queries, &keys, device),
        Some([all_queries, all_keys]) => {
            let room = PackingCapacity { sequences: PACKED.len(), queries: all_queries, keys: all_keys };
            Packing::with_capacity(&queries, &keys, room, device)
        }
    }
}

/// The packed tensors' rows of one sequence.
fn rows(x: &Tensor, begin: usize, count: usize) -> Result<Tensor> {
    let (&[1, _, heads, dim], dtype) = (&**x.shape(), x.dtype()) else { unreachable!("one batch entry") };
    let values = x.to_f32_vec()?[begin * heads * dim..(begin + count) * heads * dim].to_vec();
    tensor(values, [1, count, heads, dim], dtype, x.device())
}

fn packed_sequences_are_those_of_calls_of_their_own(device: &Device) -> Outcome {
    let sums = PACKED.iter().fold([0, 0], |sums, [queries, keys]| [sums[0] + queries, sums[1] + keys]);
    for (dtype, dim, options) in [
        (DType::F32, 5, ScoreOptions::default()),
        (DType::BF16, 16, ScoreOptions { causal: false, ..Default::default() }),
        (DType::F16, 40, ScoreOptions::default()),
        (DType::BF16, 104, ScoreOptions { window: (None, Some(1)), causal: false, ..Default::default() }),
        (DType::F16, 72, ScoreOptions { diagonal: Diagonal::BottomRight, ..Default::default() }),
        (DType::BF16, 8, ScoreOptions { window: (Some(2), Some(1)), causal: false, ..Default::default() }),
    ] {
        let make = |count, heads, seed| normal([1, count, heads, dim], dtype, seed, device);
        let (q, dy) = (make(sums[0], 4, 1)?, make(sums[0], 4, 4)?);
        let (k, v) = (make(sums[1], 2, 2)?, make(sums[1], 2, 3)?);
        let packed = Sequences::Packed(packing(None, device)?);
        let (o, saved) = ops::attention(&q, &k, &v, &packed, options)?;
        let (dq, dk, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &packed, options)?;
        let mut begin = [0, 0];
        for [queries, keys] in PACKED {
            let of = |x: &Tensor| rows(x, begin[0], queries);
            let of_keys = |x: &Tensor| rows(x, begin[1], keys);
            let (q, dy, k, v) = (of(&q)?, of(&dy)?, of_keys(&k)?, of_keys(&v)?);
            let (own, saved) = ops::attention(&q, &k, &v, &Sequences::Full, options)?;
            let own_grads =
                ops::attention_backward(&dy, &q, &k, &v, &own, &saved, &Sequences::Full, options)?;
            let what = |name| format!("{name} of {queries} queries and {keys} keys, {dtype}, {options:?}");
            // Tiles begin where sequences do: even the bits are equal.
            for (name, got, want) in [
                ("o", of(&o)?, own),
                ("dq", of(&dq)?, own_grads.0),
                ("dk", of_keys(&dk)?, own_grads.1),
                ("dv", of_keys(&dv)?, own_grads.2),
            ] {
                same(&what(name), &got.to_f32_vec()?, &want.to_f32_vec()?, dim)?;
            }
            begin = [begin[0] + queries, begin[1] + keys];
        }
    }
    Ok(())
}

fn packed_padding_is_zero_and_not_read(device: &Device) -> Outcome {
    let sums = PACKED.iter().fold([0, 0], |sums, [queries, keys]| [sums[0] + queries, sums[1] + keys]);
    let room = [sums[0] + 70, sums[1] + 3];
    for (dtype, dim) in [(DType::F32, 4), (DType::BF16, 8)] {
        // What is behind the sequences is NaN.
        let make = |count: usize, real: usize, heads: usize, seed| {
            let mut values = normal([count, heads, dim], dtype, seed, device)?.to_f32_vec()?;
            values[real * heads * dim..].fill(f32::NAN);
            tensor(values, [1, count, heads, dim], dtype, device)
        };
        let (q, dy) = (make(room[0], sums[0], 2, 1)?, make(room[0], sums[0], 2, 4)?);
        let (k, v) = (make(room[1], sums[1], 1, 2)?, make(room[1], sums[1], 1, 3)?);
        let packed = Sequences::Packed(packing(Some(room), device)?);
        let options = ScoreOptions::default();
        let (o, saved) = ops::attention(&q, &k, &v, &packed, options)?;
        let (dq, dk, dv) = ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &packed, options)?;
        let exact = Sequences::Packed(packing(None, device)?);
        let [q, dy] = [&q, &dy].map(|x| rows(x, 0, sums[0]));
        let [k, v] = [&k, &v].map(|x| rows(x, 0, sums[1]));
        let (q, dy, k, v) = (q?, dy?, k?, v?);
        let (want, saved) = ops::attention(&q, &k, &v, &exact, options)?;
        let grads = ops::attention_backward(&dy, &q, &k, &v, &want, &saved, &exact, options)?;
        for (name, got, want) in
            [("o", o, want), ("dq", dq, grads.0), ("dk", dk, grads.1), ("dv", dv, grads.2)]
        {
            let mut want = want.to_f32_vec()?;
            want.resize(got.numel(), 0.0);
            same(name, &got.to_f32_vec()?, &want, dim)?;
        }
    }
    Ok(())
}

fn packings_are_refilled(device: &Device) -> Outcome {
    let room = PackingCapacity { sequences: 3, queries: 140, keys: 140 };
    let mut packing = Packing::with_capacity(&[100, 20], &[100, 20], room, device)?;
    let x = normal([1, 140, 1, 8], DType::BF16, 1, device)?;
    for lengths in [&[1, 69, 70][..], &[140], &[], &[3, 0, 64]] {
        packing.set(lengths, lengths)?;
        let (queries, keys) = (packing.queries(), packing.keys());
        ensure((queries, keys) == (140, 140), || format!("{queries} queries and {keys} keys"))?;
        let positions: Vec<i32> = lengths.iter().flat_map(|&length| 0..length as i32).collect();
        ensure(packing.positions().to_vec::<i32>()?[..positions.len()] == positions, || {
            format!("{lengths:?}")
        })?;
        let run = |packing: &Packing| {
            let packed = Sequences::Packed(packing.clone());
            ops::attention(&x, &x, &x, &packed, ScoreOptions::default())?.0.to_f32_vec()
        };
        let new = Packing::with_capacity(lengths, lengths, room, device)?;
        same(&format!("{lengths:?}"), &run(&packing)?, &run(&new)?, 8)?;
    }
    let shared = packing.clone();
    refused(packing.set(&[1], &[1]), "the packing's positions: cannot be changed in place")?;
    drop(shared);
    let positions = packing.positions().clone();
    let before = Packing::with_capacity(&[3, 0, 64], &[3, 0, 64], room, device)?;
    refused(packing.set(&[1], &[1]), "the packing's positions: cannot be changed in place")?;
    drop(positions);
    let run = |packing: &Packing| {
        let packed = Sequences::Packed(packing.clone());
        ops::attention(&x, &x, &x, &packed, ScoreOptions::default())?.0.to_f32_vec()
    };
    same("after a refusal", &run(&packing)?, &run(&before)?, 8)?;
    refused(packing.set(&[1; 3], &[1; 2]), "3 of queries and 2 of keys")?;
    refused(packing.set(&[141], &[0]), "queries = 140: the sequences need 141")?;
    refused(packing.set(&[0], &[141]), "keys = 140: the sequences need 141")?;
    refused(packing.set(&[1; 4], &[1; 4]), "sequences = 3: the sequences need 4")?;
    refused(Packing::new(&[usize::MAX, 2], device), "give at most 2147483647 positions")
}
