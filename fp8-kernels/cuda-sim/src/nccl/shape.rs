//! The arguments of a collective, and its results from the bytes of all ranks.

use half::{bf16, f16};

/// The kind of a collective. Messages between processes use these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
}

/// A call as all ranks must make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    /// The `count` argument as given.
    pub(crate) count: u64,
    /// `ncclDataType_t`.
    pub(crate) dtype: u32,
    /// `ncclRedOp_t` of a reduction, the root of a broadcast, else 0.
    pub(crate) argument: u32,
}

/// The types that reductions are simulated for: `ncclFloat16`, `ncclFloat32` and `ncclBfloat16`.
const FLOAT16: u32 = 6;
const FLOAT32: u32 = 7;
const BFLOAT16: u32 = 9;
const SUM: u32 = 0;
const PROD: u32 = 1;
const MAX: u32 = 2;
const MIN: u32 = 3;
const AVG: u32 = 4;
pub(crate) const OPS: u32 = 5;

/// Bytes of an `ncclDataType_t`: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16,
/// float8e4m3, float8e5m2.
pub(crate) fn size(dtype: u32) -> Option<u64> {
    [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1].get(dtype as usize).copied()
}

/// Whether reductions of a type are simulated.
pub(crate) const fn is_reducible(dtype: u32) -> bool {
    matches!(dtype, FLOAT16 | FLOAT32 | BFLOAT16)
}

/// The value of an element of a type that is reduced.
fn widened(dtype: u32, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (FLOAT16, &[low, high]) => f16::from_le_bytes([low, high]).to_f32(),
        (BFLOAT16, &[low, high]) => bf16::from_le_bytes([low, high]).to_f32(),
        (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        _ => f32::NAN,
    }
}

/// A value, rounded to the type.
fn rounded(dtype: u32, value: f32) -> f32 {
    match dtype {
        FLOAT16 => f16::from_f32(value).to_f32(),
        BFLOAT16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn put(out: &mut Vec<u8>, dtype: u32, value: f32) {
    match dtype {
        FLOAT16 => out.extend(f16::from_f32(value).to_le_bytes()),
        BFLOAT16 => out.extend(bf16::from_f32(value).to_le_bytes()),
        _ => out.extend(value.to_le_bytes()),
    }
}

impl Shape {
    pub(crate) const WORDS: usize = 5;

    pub(crate) fn words(self) -> [u32; Self::WORDS] {
        [self.kind as u32, self.count as u32, (self.count >> 32) as u32, self.dtype, self.argument]
    }

    pub(crate) fn from_words([kind, low, high, dtype, argument]: [u32; Self::WORDS]) -> Option<Self> {
        let kind = [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter, Kind::Broadcast]
            .into_iter()
            .find(|&known| known as u32 == kind)?;
        size(dtype)?;
        Some(Self { kind, count: u64::from(low) | u64::from(high) << 32, dtype, argument })
    }

    /// Bytes that one rank reads and writes of `ranks`; `None` beyond memory.
    pub(crate) fn bytes(self, rank: usize, ranks: usize) -> Option<(usize, usize)> {
        let one = usize::try_from(self.count.checked_mul(size(self.dtype)?)?).ok()?;
        let all = one.checked_mul(ranks)?;
        Some(match self.kind {
            Kind::AllReduce => (one, one),
            Kind::AllGather => (one, all),
            Kind::ReduceScatter => (all, one),
            Kind::Broadcast if self.argument as usize == rank => (one, one),
            Kind::Broadcast => (0, one),
        })
    }

    /// Returns the result of each rank, from the bytes of all ranks.
    pub(crate) fn results(self, parts: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let ranks = parts.len();
        match self.kind {
            Kind::AllGather => vec![parts.concat(); ranks],
            Kind::Broadcast => {
                vec![parts.get(self.argument as usize).cloned().unwrap_or_default(); ranks]
            }
            Kind::AllReduce => vec![self.reduced(parts); ranks],
            Kind::ReduceScatter => {
                let all = self.reduced(parts);
                let one = all.len() / ranks.max(1);
                (0..ranks).map(|rank| all[rank * one..(rank + 1) * one].to_vec()).collect()
            }
        }
    }

    /// In an order of the ranks that is the same for all of them and depends on the place, as in a ring: NCCL promises
    /// none. Each step of a ring stores a rounded sum.
    fn reduced(self, parts: &[Vec<u8>]) -> Vec<u8> {
        let (ranks, dtype) = (parts.len(), self.dtype);
        let size = size(dtype).map_or(1, |size| size as usize);
        // NCCL averages by a factor for each value (`ncclDevPreMulSum` in its source).
        let factor = rounded(dtype, 1.0 / ranks as f32);
        let value = |rank: usize, index: usize| {
            let value = widened(dtype, &parts[rank][size * index..size * (index + 1)]);
            if self.argument == AVG { rounded(dtype, value * factor) } else { value }
        };
        let len = parts.first().map_or(0, |part| part.len() / size);
        let mut out = Vec::with_capacity(size * len);
        for index in 0..len {
            let first = (index / 32 + 1) % ranks;
            let others = (1..ranks).map(|step| value((first + step) % ranks, index));
            let all = others.fold(value(first, index), |sum, value| match self.argument {
                SUM | AVG => rounded(dtype, sum + value),
                PROD => rounded(dtype, sum * value),
                MAX => sum.max(value),
                MIN => sum.min(value),
                _ => sum,
            });
            put(&mut out, dtype, all);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn results_are_those_of_the_user_guides_pictures() {
        let shape = |kind, count, dtype, argument| Shape { kind, count, dtype, argument };
        let parts = [f32s(&[1.0, -1.0]), f32s(&[2.0, 5.0])];
        let sums = shape(Kind::AllReduce, 2, FLOAT32, SUM).results(&parts);
        assert_eq!(sums, vec![f32s(&[3.0, 4.0]); 2]);
        let largest = shape(Kind::ReduceScatter, 1, FLOAT32, MAX).results(&parts);
        assert_eq!(largest, [f32s(&[2.0]), f32s(&[5.0])]);
        let halves = [1.0f32, 3.0].map(|value| bf16::from_f32(value).to_le_bytes().to_vec());
        let means = shape(Kind::AllReduce, 1, BFLOAT16, AVG).results(&halves);
        assert_eq!(means, vec![bf16::from_f32(2.0).to_le_bytes().to_vec(); 2]);
        let whole = shape(Kind::AllGather, 2, 1, 0).results(&[vec![1, 2], vec![3, 4]]);
        assert_eq!(whole, vec![vec![1, 2, 3, 4]; 2]);
        let roots = shape(Kind::Broadcast, 2, 1, 1).results(&[vec![], vec![3, 4]]);
        assert_eq!(roots, vec![vec![3, 4]; 2]);
    }

    #[test]
    fn shapes_survive_their_words() {
        let shape = Shape { kind: Kind::Broadcast, count: 5 << 33 | 7, dtype: 9, argument: 3 };
        assert_eq!(Shape::from_words(shape.words()), Some(shape));
        assert_eq!(Shape::from_words([4, 0, 0, 0, 0]), None);
        assert_eq!(shape.bytes(3, 4), shape.count.checked_mul(2).map(|n| (n as usize, n as usize)));
        assert_eq!(shape.bytes(2, 4).map(|(read, _)| read), Some(0));
    }
}
