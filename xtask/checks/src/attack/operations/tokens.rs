//! Operations of generation: caches of keys and values, and the choice of tokens.

use fp8_kernels::ops::{self, DropoutKey, SampleOptions};

use super::super::case::Case;
use super::super::draw::Kind;

pub(super) fn kv_cache(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (dtype, kind) = (case.draw.dtype(), case.draw.kind());
    let new_dtype = case.draw.dtype_like(dtype);
    let [batch, capacity, seq] = [5, 9, 5].map(|limit| case.draw.below(limit));
    let [heads, head_dim] = [[1, 1], [2, 4], [1, 3], [3, 8], [0, 4]][case.draw.below(5)];
    let mut cache = case.tensor(&[batch, capacity, heads, head_dim], dtype, Kind::Tame)?;
    let new = case.tensor(&[batch, seq, heads, head_dim], new_dtype, kind)?;
    let mut numbers = |limit: usize| -> Vec<i32> {
        let number = |_| match case.draw.below(100) {
            0 => case.draw.pick(&[-1, limit as i32 + 1, i32::MAX, i32::MIN]),
            _ => case.draw.below(limit + 1) as i32,
        };
        (0..batch).map(number).collect()
    };
    let (starts, lengths) = (numbers(capacity.saturating_sub(seq)), numbers(seq));
    let starts = case.integers(starts, &[batch])?;
    let lengths = if case.draw.flip() { Some(case.integers(lengths, &[batch])?) } else { None };
    case.call("kv_cache_append", || {
        ops::kv_cache_append(&mut cache.tensor, &*new, &starts, lengths.as_ref(), "cache")
    })?;
    case.exact("cache", &cache.tensor);
    Some(())
}

pub(super) fn sample(case: &mut Case<'_>) -> Option<()> {
    let (rank, dtype, kind) = (case.draw.below(4), case.draw.dtype(), case.draw.kind());
    let limit = if case.draw.once_in(30) { 70_000 } else { 4096 };
    let shape = case.draw.extents(rank, limit);
    let logits = case.tensor(&shape, dtype, kind)?;
    let temperature = case.draw.pick(&[0.0, 1.0, 0.7, 1e-30, 1e30, f32::MAX, f32::from_bits(1)]);
    let top_k = case.draw.pick(&[None, None, Some(1), Some(3), Some(50), Some(0), Some(usize::MAX)]);
    let top_p = case.draw.pick(&[1.0, 0.9, 0.5, 1e-30, 0.999_999_94]);
    let options =
        SampleOptions { temperature: case.draw.option(temperature), top_k, top_p: case.draw.option(top_p) };
    let offset = case.draw.pick(&[0, 1, 1 << 33, u64::MAX]);
    let key = DropoutKey { seed: case.draw.bits(), offset };
    case.say(|| format!("{options:?}, {key:?}"));
    let tokens = case.call("sample", || ops::sample(&logits, &options, key))?;
    case.exact("tokens", &tokens);
    Some(())
}
