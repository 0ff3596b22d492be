use super::case::{Outcome, cases};
use super::compare::{equal, refused, refused_on, same};
use super::data::{FLOATS, Random, f64s, normal};
use fp8_kernels::ops::Heads;
use fp8_kernels::{DType, Device, Result, Tensor, ops};

cases![
    appends: Dtypes,
    appends_heads_of_a_larger_tensor: Dtypes,
    in_chunks,
    around_2_16,
    an_entry_that_does_not_fit,
    empty,
    refuses,
];

/// Positions of 16, 8, 4 and 2 bytes, or multiples of them.
const WIDTHS: [(usize, DType); 4] = [(8, DType::F32), (2, DType::F32), (1, DType::F32), (1, DType::BF16)];

fn integers(values: &[i32], device: &Device) -> Result<Tensor> {
    Tensor::from_vec(values.to_vec(), [values.len()], device)
}

/// The cache, element by element.
fn expected(cache: &Tensor, new: &Tensor, starts: &[i32], lengths: &[i32]) -> Result<Vec<f32>> {
    let (&[_, capacity, heads, dim], seq) = (&**cache.shape(), new.shape()[1]) else { return Ok(Vec::new()) };
    let (mut all, values) = (f64s(cache)?, f64s(new)?);
    for (b, (&start, &length)) in starts.iter().zip(lengths).enumerate() {
        for i in 0..length as usize {
            for element in 0..heads * dim {
                let to = ((b * capacity + start as usize + i) * heads) * dim + element;
                all[to] = values[((b * seq + i) * heads) * dim + element];
            }
        }
    }
    Ok(all.into_iter().map(|v| v as f32).collect())
}

/// `[capacity, seq, heads, head_dim]`: rows of 16, 8, 4 and 2 bytes and multiples of them.
fn appends(device: &Device, dtype: DType) -> Outcome {
    let sizes = [
        [66, 64, 1, 1],
        [66, 64, 1, 2],
        [66, 64, 1, 4],
        [66, 64, 1, 8],
        [9, 3, 2, 8],
        [7, 1, 1, 4],
        [5, 5, 3, 2],
        [6, 2, 1, 1],
        [8, 4, 1, 3],
        [70, 33, 2, 20],
        [4, 4, 1, 2],
    ];
    for [capacity, seq, heads, dim] in sizes {
        let batch = 4;
        let new = normal([batch, seq, heads, dim], dtype, 1, device)?;
        let room = capacity - seq;
        let starts = [0, room as i32, (room / 2) as i32, room as i32];
        let lengths = [seq as i32, seq as i32, 1, 0];
        for lengths in [None, Some(lengths)] {
            let mut cache = normal([batch, capacity, heads, dim], dtype, 2, device)?;
            let want = expected(&cache, &new, &starts, &lengths.unwrap_or([seq as i32; 4]))?;
            let (starts, lengths) =
                (integers(&starts, device)?, lengths.map(|lengths| integers(&lengths, device)).transpose()?);
            ops::kv_cache_append(&mut cache, &new, &starts, lengths.as_ref(), "cache")?;
            same(&format!("{capacity} {seq} {heads} {dim}"), &cache.to_f32_vec()?, &want, heads * dim)?;
        }
    }
    Ok(())
}

/// A sequence in pieces is the sequence at once.
/// Keys and values between other features, at multiples of 16, 8, 4 and 2 bytes: those alone are copied.
fn appends_heads_of_a_larger_tensor(device: &Device, dtype: DType) -> Outcome {
    for [heads, dim, before, behind] in
        [[2, 16, 16, 32], [2, 8, 4, 4], [1, 8, 2, 6], [3, 4, 1, 3], [1, 5, 3, 0], [2, 4, 0, 9], [1, 3, 0, 0]]
    {
        let [batch, capacity, seq] = [2, 70, 65];
        let part = |features: usize, seed| normal([batch, seq, features], dtype, seed, device);
        let new = normal([batch, seq, heads, dim], dtype, 1, device)?;
        let (front, back) = (part(before, 2)?, part(behind, 3)?);
        let all = ops::concat(&[&front, &new.reshape([batch, seq, heads * dim])?, &back])?;
        let in_all = Heads::new(&all, before, heads, dim)?;
        let (starts, lengths) = (integers(&[3, 5], device)?, integers(&[65, 20], device)?);
        let mut caches = [0, 1].map(|_| normal([batch, capacity, heads, dim], dtype, 4, device));
        let [Ok(cache), Ok(want)] = &mut caches else { return Err("no memory".into()) };
        ops::kv_cache_append(cache, in_all, &starts, Some(&lengths), "cache")?;
        ops::kv_cache_append(want, &new, &starts, Some(&lengths), "cache")?;
        let what = format!("{heads} {dim} {before} {behind}");
        same(&what, &cache.to_f32_vec()?, &want.to_f32_vec()?, heads * dim)?;
    }
    Ok(())
}

fn in_chunks(device: &Device) -> Outcome {
    let (mut random, mut cache) = (Random::new(3), Tensor::zeros([2, 30, 2, 4], DType::F32, device)?);
    let all = random.normals(2 * 30 * 8);
    let mut start = 0;
    for len in [1, 7, 1, 1, 13, 2, 5] {
        let piece = [0, 1].map(|b| all[(b * 30 + start) * 8..(b * 30 + start + len) * 8].to_vec()).concat();
        let piece = Tensor::from_vec(piece, [2, len, 2, 4], device)?;
        ops::kv_cache_append(&mut cache, &piece, &integers(&[start as i32; 2], device)?, None, "cache")?;
        start += len;
    }
    same("cache", &cache.to_vec::<f32>()?, &all, 8)
}

fn around_2_16(device: &Device) -> Outcome {
    let (seq, capacity) = ((1 << 16) + 1, (1 << 16) + 9);
    let new = normal([1, seq, 1, 1], DType::BF16, 1, device)?;
    let mut cache = Tensor::zeros([1, capacity, 1, 1], DType::BF16, device)?;
    let want = expected(&cache, &new, &[8], &[seq as i32])?;
    ops::kv_cache_append(&mut cache, &new, &integers(&[8], device)?, None, "cache")?;
    same("cache", &cache.to_f32_vec()?, &want, 1)
}

/// It is reported, and not written, whatever a row's width.
fn an_entry_that_does_not_fit(device: &Device) -> Outcome {
    for (dim, dtype) in WIDTHS {
        let wrong: [([i32; 3], [i32; 3], String); 6] = [
            ([0, 3, 1], [2, 2, 2], "cache position 4 at position 1 is out of range 0..4".to_owned()),
            ([0, 1, -1], [2, 2, 1], "cache position -1 at position 2 is out of range 0..4".to_owned()),
            (
                [i32::MAX, 1, 0],
                [2, 2, 2],
                format!("cache position {} at position 0", i64::from(i32::MAX) + 1),
            ),
            ([4, 1, 0], [1, 2, 2], "cache position 4 at position 0 is out of range 0..4".to_owned()),
            ([0, 0, 0], [2, 3, 2], "length 3 at position 1 is out of range 0..3".to_owned()),
            ([0, 0, 0], [-1, 2, 2], "length -1 at position 0 is out of range 0..3".to_owned()),
        ];
        for (starts, lengths, wording) in wrong {
            let mut cache = Tensor::zeros([3, 4, 1, dim], dtype, device)?;
            let new = normal([3, 2, 1, dim], dtype, 1, device)?;
            let (from, count) = (integers(&starts, device)?, integers(&lengths, device)?);
            let result = ops::kv_cache_append(&mut cache, &new, &from, Some(&count), "cache");
            refused_on(device, result, &format!("kv_cache_append: {wording}"))?;
            let fits = |b: usize| {
                (0..=2).contains(&lengths[b])
                    && starts[b] >= 0
                    && i64::from(starts[b]) + i64::from(lengths[b]) <= 4
            };
            for (b, row) in cache.to_f32_vec()?.chunks(4 * dim).enumerate() {
                equal("untouched", fits(b) || row.iter().all(|&v| v == 0.0), true)?;
            }
        }
    }
    Ok(())
}

fn empty(device: &Device) -> Outcome {
    for [batch, seq, heads, dim] in [[0, 2, 1, 4], [2, 0, 1, 4], [2, 2, 0, 4], [2, 2, 1, 0]] {
        let mut cache = Tensor::full(1.0, [batch, 3, heads, dim], DType::F32, device)?;
        let new = Tensor::zeros([batch, seq, heads, dim], DType::F32, device)?;
        let starts = integers(&vec![1; batch], device)?;
        ops::kv_cache_append(&mut cache, &new, &starts, None, "cache")?;
        equal("unchanged", cache.to_vec::<f32>()?.iter().all(|&v| v == 1.0), true)?;
    }
    // An entry without new tokens may be full, or anywhere.
    for (dim, dtype) in WIDTHS {
        let mut cache = Tensor::zeros([2, 2, 1, dim], dtype, device)?;
        let new = Tensor::full(1.0, [2, 1, 1, dim], dtype, device)?;
        let (starts, lengths) = (integers(&[9, 1], device)?, integers(&[0, 1], device)?);
        ops::kv_cache_append(&mut cache, &new, &starts, Some(&lengths), "cache")?;
        let want = [vec![0.0; 3 * dim], vec![1.0; dim]].concat();
        same("cache", &cache.to_f32_vec()?, &want, dim)?;
    }
    device.synchronize()?;
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let make = |shape: [usize; 4]| Tensor::zeros(shape, DType::F32, device);
    let (mut cache, new) = (make([2, 4, 1, 2])?, make([2, 1, 1, 2])?);
    let (starts, three) = (integers(&[0, 0], device)?, integers(&[0, 0, 0], device)?);
    for other in [[1, 1, 1, 2], [2, 1, 2, 2], [2, 1, 1, 3]] {
        let wording = "differ in the second dimension alone";
        refused(ops::kv_cache_append(&mut cache, &make(other)?, &starts, None, "k"), wording)?;
    }
    let flat = Tensor::zeros([4], DType::F32, device)?;
    let wording = "kv_cache_append: shape [4]: a cache is [batch, capacity, heads, head_dim]";
    refused(ops::kv_cache_append(&mut cache, &flat, &starts, None, "k"), wording)?;
    refused(ops::kv_cache_append(&mut flat.clone(), &new, &starts, None, "k"), wording)?;
    for dtype in FLOATS.into_iter().filter(|&dtype| dtype != DType::F32) {
        let new = Tensor::zeros([2, 1, 1, 2], dtype, device)?;
        let wording = format!("new has dtype {dtype}: expected f32");
        refused(ops::kv_cache_append(&mut cache, &new, &starts, None, "k"), &wording)?;
    }
    let mut bytes = Tensor::zeros([2, 4, 1, 2], DType::U8, device)?;
    refused(ops::kv_cache_append(&mut bytes, &new, &starts, None, "k"), "cache has dtype u8")?;
    refused(
        ops::kv_cache_append(&mut cache, &new, &three, None, "k"),
        "starts and the batch: got [3] and [2]",
    )?;
    refused(ops::kv_cache_append(&mut cache, &new, &new, None, "k"), "starts has dtype f32: expected i32")?;
    refused(
        ops::kv_cache_append(&mut cache, &new, &starts, Some(&three), "k"),
        "lengths and the batch: got [3] and [2]: give one number per batch entry",
    )?;
    let held = cache.clone();
    refused(
        ops::kv_cache_append(&mut cache, &new, &starts, None, "layer.keys"),
        "layer.keys: cannot be changed in place, because 1 other tensor shares its storage",
    )?;
    equal("holders", held.holders(), 1)
}
