//! The arguments of a collective, and its results from the bytes of all ranks.

use half::{bf16, f16};

/// The kind of a collective. Messages between processes use these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Send,
    Receive,
}

/// The number of a call on its communicator, which all ranks give it alike: a collective, by its order, or a message from one
/// rank to another, by its order among those, and the end of it that a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Number(pub(crate) u64);

/// A call as all ranks must make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    /// The `count` argument as given.
    pub(crate) count: u64,
    /// `ncclDataType_t`.
    pub(crate) dtype: u32,
    /// `ncclRedOp_t` of a reduction, the root of a broadcast, the peer of a message, else 0.
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

/// Marks the numbers of messages. In them follow the sender and the receiver (12 bits each), the order, and the end.
const MESSAGE: u64 = 1 << 63;
const FROM: u32 = 51;
const TO: u32 = 39;
const MOST_RANKS: u64 = 1 << 12;

impl Number {
    /// The number of the first message as a rank calls for it; `None` for a collective.
    pub(crate) fn of_message(rank: usize, shape: Shape) -> Option<Self> {
        let (rank, peer) = (rank as u64 % MOST_RANKS, u64::from(shape.argument) % MOST_RANKS);
        let of = |from: u64, to: u64, end: u64| Some(Self(MESSAGE | from << FROM | to << TO | end));
        match shape.kind {
            Kind::Send => of(rank, peer, 0),
            Kind::Receive => of(peer, rank, 1),
            _ => None,
        }
    }

    /// The number of a message `count` behind this one.
    pub(crate) const fn after(self, count: u64) -> Self {
        Self(self.0 + (count << 1))
    }

    /// Returns the ranks that come to a call, of so many on the communicator: sender and receiver of a message.
    pub(crate) fn ranks(self, ranks: usize) -> Vec<usize> {
        match self.0 & MESSAGE {
            0 => (0..ranks).collect(),
            _ => [FROM, TO].map(|bit| (self.0 >> bit) as usize % MOST_RANKS as usize).to_vec(),
        }
    }

    /// Returns the number by which the ranks of a call meet, and the place of this one among them. `rank` comes to it.
    pub(crate) const fn meeting(self, rank: usize) -> (Self, usize) {
        match self.0 & MESSAGE {
            0 => (self, rank),
            _ => (Self(self.0 & !1), (self.0 & 1) as usize),
        }
    }

    /// Returns the number that the rank at a place gives the call by whose number it meets others.
    pub(crate) const fn at(self, place: usize) -> Self {
        match self.0 & MESSAGE {
            0 => self,
            _ => Self(self.0 | place as u64),
        }
    }
}

impl Shape {
    pub(crate) const WORDS: usize = 5;

    pub(crate) fn words(self) -> [u32; Self::WORDS] {
        [self.kind as u32, self.count as u32, (self.count >> 32) as u32, self.dtype, self.argument]
    }

    pub(crate) fn from_words([kind, low, high, dtype, argument]: [u32; Self::WORDS]) -> Option<Self> {
        let kind = [
            Kind::AllReduce,
            Kind::AllGather,
            Kind::ReduceScatter,
            Kind::Broadcast,
            Kind::Send,
            Kind::Receive,
        ]
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
            Kind::Broadcast | Kind::Receive => (0, one),
            Kind::Send => (one, 0),
        })
    }

    /// Whether two ranks have made one call.
    pub(crate) fn is_same_call(self, other: Self) -> bool {
        let is_message = |shape: Self| matches!(shape.kind, Kind::Send | Kind::Receive);
        match [self, other].map(is_message) {
            // The ends of a message differ in kind and peer.
            [true, true] => (self.count, self.dtype) == (other.count, other.dtype),
            _ => self == other,
        }
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
            Kind::Send | Kind::Receive => {
                vec![Vec::new(), parts.first().cloned().unwrap_or_default()]
            }
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
    fn both_ends_of_a_message_meet() {
        let shape = |kind, argument| Shape { kind, count: 3, dtype: FLOAT32, argument };
        let (send, receive) = (shape(Kind::Send, 9), shape(Kind::Receive, 2));
        assert!(send.is_same_call(receive) && !send.is_same_call(shape(Kind::Broadcast, 9)));
        let third = |rank, shape| Number::of_message(rank, shape).unwrap().after(2);
        let (sent, received) = (third(2, send), third(9, receive));
        let (meeting, place) = sent.meeting(2);
        assert_eq!((place, received.meeting(9)), (0, (meeting, 1)));
        assert_eq!((meeting.ranks(12), meeting.at(0), meeting.at(1)), (vec![2, 9], sent, received));
        assert_ne!(meeting, third(9, shape(Kind::Send, 2)).meeting(9).0);
        // A rank's message to itself.
        assert_eq!(third(2, shape(Kind::Send, 2)).meeting(2).0, third(2, receive).meeting(2).0);
        assert_eq!(send.results(&[vec![1, 2], vec![]]), [vec![], vec![1, 2]]);
        assert_eq!(Number(7).ranks(3), [0, 1, 2]);
    }

    #[test]
    fn shapes_survive_their_words() {
        let shape = Shape { kind: Kind::Broadcast, count: 5 << 33 | 7, dtype: 9, argument: 3 };
        assert_eq!(Shape::from_words(shape.words()), Some(shape));
        assert_eq!(Shape::from_words([6, 0, 0, 0, 0]), None);
        assert_eq!(shape.bytes(3, 4), shape.count.checked_mul(2).map(|n| (n as usize, n as usize)));
        assert_eq!(shape.bytes(2, 4).map(|(read, _)| read), Some(0));
    }
}
