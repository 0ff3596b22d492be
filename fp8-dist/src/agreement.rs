//! Comparison of training state: each rank sends names and digests, and all ranks get the first difference.
//!
//! A difference does not fail the group. All ranks get the same result and can use the group to synchronize their state.

use crate::message::{Message, Operation, Part};
use crate::{Error, Result};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::StateDigest;
use std::sync::Arc;

/// The length of a digest in bytes.
const DIGEST: usize = 16;

/// The first piece of state in which a rank differs from rank 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference {
    name: Arc<str>,
    rank: usize,
    /// Whether that rank has the piece, and whether rank 0 has it.
    has: [bool; 2],
}

/// Builds the message of a rank.
pub(crate) fn message(what: &str, state: &[StateDigest]) -> Result<Message> {
    let digests: Vec<u8> = state.iter().flat_map(|piece| piece.digest).collect();
    let shape = [state.len(), DIGEST];
    let data = Tensor::from_vec(digests, shape, &Device::cpu())?;
    let part = Part { dtype: DType::U8, shape: shape.into(), data: Some(data) };
    let names = state.iter().map(|piece| piece.name.clone()).collect();
    Ok(Message { names, ..Message::new(Operation::AgreeOnState, what).with(part) })
}

/// Returns the part that replaces rank 0's when all ranks have arrived: the first difference, or nothing.
pub(crate) fn verdict(all: &[Message]) -> Part {
    let bytes = first_difference(all).map(|difference| difference.to_bytes()).unwrap_or_default();
    let shape = [bytes.len()];
    Part { dtype: DType::U8, shape: shape.into(), data: Tensor::from_vec(bytes, shape, &Device::cpu()).ok() }
}

/// Returns an error if the ranks differ.
pub(crate) fn expect_agreement(all: &[Message]) -> Result<()> {
    let Some(first) = all.first() else { return Ok(()) };
    let verdict = first.part.as_ref().and_then(|part| part.data.as_ref());
    let bytes = verdict.map(|bytes| bytes.to_vec::<u8>()).transpose()?;
    let Some(Difference { name, rank, has }) = bytes.and_then(|bytes| Difference::from_bytes(&bytes)) else {
        return Ok(());
    };
    let [is_there, is_on_other] = has;
    Err(Error::State { call: first.call.to_string(), name, rank, is_there, other: 0, is_on_other })
}

/// Returns the first difference in the order of the names; of several ranks that differ there, the lowest.
fn first_difference(all: &[Message]) -> Option<Difference> {
    let (first, others) = all.split_first()?;
    let differences = others.iter().zip(1..).filter_map(|(message, rank)| difference(message, rank, first));
    differences.min_by_key(|(position, _)| *position).map(|(_, difference)| difference)
}

/// The first piece in which `message` differs from rank 0's, and its position.
fn difference(message: &Message, rank: usize, first: &Message) -> Option<(usize, Difference)> {
    let [theirs, ours] = [message, first].map(digests);
    let len = message.names.len().max(first.names.len());
    let differs = |&i: &usize| message.names.get(i) != first.names.get(i) || theirs.get(i) != ours.get(i);
    let position = (0..len).find(differs)?;
    let of = |name: &Arc<str>, has| Some((position, Difference { name: name.clone(), rank, has }));
    match (message.names.get(position), first.names.get(position)) {
        (Some(their), Some(our)) if their == our => of(our, [true, true]),
        // Only one of two different names is missing on the other rank, unless the models have little in common.
        (Some(their), Some(our)) if message.names.contains(our) => of(their, [true, false]),
        (_, Some(our)) => of(our, [false, true]),
        (Some(their), None) => of(their, [true, false]),
        (None, None) => None,
    }
}

fn digests(message: &Message) -> Vec<[u8; DIGEST]> {
    let data = message.part.as_ref().and_then(|part| part.data.as_ref());
    let bytes = data.and_then(|data| data.to_vec::<u8>().ok()).unwrap_or_default();
    bytes.as_chunks::<DIGEST>().0.to_vec()
}

impl Difference {
    /// The rank (u64, little-endian), a bit for each of the two that has the piece, its name.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.rank as u64).to_le_bytes().to_vec();
        let [is_there, is_on_other] = self.has.map(u8::from);
        bytes.push(is_there | is_on_other << 1);
        bytes.extend_from_slice(self.name.as_bytes());
        bytes
    }

    /// `None` for no bytes: no difference.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (rank, rest) = bytes.split_first_chunk()?;
        let (flags, name) = rest.split_first()?;
        let name = String::from_utf8_lossy(name).as_ref().into();
        let rank = usize::try_from(u64::from_le_bytes(*rank)).unwrap_or(usize::MAX);
        Some(Self { name, rank, has: [flags & 1 != 0, flags & 2 != 0] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(pieces: &[(&str, u8)]) -> Message {
        let piece = |&(name, value): &(&str, u8)| StateDigest::new(name, [[value]]);
        message("state", &pieces.iter().map(piece).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_first_difference_is_the_first_in_the_order_of_the_names() {
        let ours: &[(&str, u8)] = &[("a", 1), ("b", 2), ("c", 3)];
        type Pieces = &'static [(&'static str, u8)];
        type Expected = Option<(&'static str, [bool; 2])>;
        let cases: [(Pieces, Expected); 8] = [
            (ours, None),
            (&[("a", 1), ("b", 9), ("c", 9)], Some(("b", [true, true]))),
            (&[("a", 1), ("c", 3)], Some(("b", [false, true]))),
            (&[("a", 1), ("x", 2), ("b", 2), ("c", 3)], Some(("x", [true, false]))),
            (&[("a", 1), ("b", 2)], Some(("c", [false, true]))),
            (&[("a", 1), ("b", 2), ("c", 3), ("d", 4)], Some(("d", [true, false]))),
            (&[("x", 1), ("y", 2), ("z", 3)], Some(("a", [false, true]))),
            (&[], Some(("a", [false, true]))),
        ];
        for (theirs, expected) in cases {
            let found = first_difference(&[state(ours), state(ours), state(theirs)]);
            let expected = expected.map(|(name, has)| Difference { name: name.into(), rank: 2, has });
            assert_eq!(found, expected, "{theirs:?}");
            let sent = found.as_ref().map(Difference::to_bytes).unwrap_or_default();
            assert_eq!(Difference::from_bytes(&sent), found);
        }
        // Rank 2 differs in an earlier piece than rank 1.
        let found = first_difference(&[
            state(ours),
            state(&[("a", 1), ("b", 2), ("c", 9)]),
            state(&[("a", 9), ("b", 2), ("c", 3)]),
        ]);
        assert_eq!(found.map(|found| found.rank), Some(2));
    }

    #[test]
    fn a_part_without_digests_is_a_difference() {
        let mut bad = state(&[("a", 1)]);
        bad.part = None;
        assert!(first_difference(&[state(&[("a", 1)]), bad]).is_some());
    }
}
