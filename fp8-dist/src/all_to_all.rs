//! The counts of an `all_to_all`: how many rows each rank has for each other one, which all ranks learn first.

use crate::message::{Message, Operation, Part, call_of};
use crate::{Error, Result};
use fp8_kernels::{DType, Device, Shape, Tensor};
use std::ops::Range;

/// A rank's share of an `all_to_all`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The rows of its tensor that go to each rank.
    pub(crate) sent: Vec<Range<usize>>,
    /// The rows of its result that come from each rank.
    pub(crate) received: Vec<Range<usize>>,
    /// The same rows, in the tensor of the rank that they come from.
    pub(crate) taken: Vec<Range<usize>>,
    /// The elements of a row.
    pub(crate) row: usize,
    /// The shape of its result.
    pub(crate) shape: Shape,
    /// The rows that move on all ranks together.
    pub(crate) rows_of_all: usize,
}

/// Builds the message of a rank: the rows of `x`, and how many of them each rank gets.
pub(crate) fn message(what: &str, x: &Tensor, counts: &[usize]) -> Result<Message> {
    let rows = x.shape().first().copied().unwrap_or(usize::MAX);
    let numbers: Vec<u8> =
        [&[rows], counts].concat().iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
    let shape = [numbers.len()];
    let data = Tensor::from_vec(numbers, shape, &Device::cpu())?;
    let part = Part { dtype: DType::U8, shape: shape.into(), data: Some(data) };
    // Dtypes and row shapes are compared by name: the part is about something else.
    let names = match x.shape().get(1..) {
        Some(row) => vec![format!("{row:?} of {} in each row", x.dtype()).into()],
        None => vec![format!("a scalar of {}", x.dtype()).into()],
    };
    Ok(Message { names, ..Message::new(Operation::AllToAll, what).with(part) })
}

impl Plan {
    /// Returns the share of `rank` in what all ranks have told, or why there is none, which all ranks find alike.
    pub(crate) fn new(all: &[Message], x: &Tensor, rank: usize) -> Result<Self> {
        let (call, ranks) = (call_of(all), all.len());
        let shape_error =
            |remedy| Error::Shape { call: call_of(all), shape: *x.shape(), world_size: ranks, remedy };
        let mut counts = Vec::with_capacity(ranks);
        for (rank, numbers) in all.iter().map(numbers).enumerate() {
            let (rows, told) =
                numbers.split_first().map_or((usize::MAX, Vec::new()), |(rows, told)| (*rows, told.to_vec()));
            if rows == usize::MAX {
                return Err(shape_error("a scalar has no dimension 0; reshape it to [1]"));
            }
            if told.len() != ranks || sum(&told) != Some(rows) {
                return Err(Error::Counts { call, rank, counts: told, rows, world_size: ranks });
            }
            counts.push(told);
        }
        let too_many = || shape_error("the rows of all ranks together exceed memory");
        // First, since all ranks find this alike.
        let row = x.shape().iter().skip(1).fold(1, |row: usize, &extent| row.saturating_mul(extent));
        let bytes = |rows: usize| rows.checked_mul(row)?.checked_mul(x.dtype().size());
        let rows_of_all = sum(&counts.concat()).filter(|&rows| bytes(rows).is_some()).ok_or_else(too_many)?;
        let sent = places(counts.get(rank).map_or(&[][..], Vec::as_slice)).ok_or_else(too_many)?;
        let taken =
            counts.iter().map(|counts| places(counts)?.get(rank).cloned()).collect::<Option<Vec<_>>>();
        let taken = taken.ok_or_else(too_many)?;
        let received = places(&taken.iter().map(Range::len).collect::<Vec<_>>()).ok_or_else(too_many)?;
        let mut dims = x.shape().to_vec();
        if let Some(rows) = dims.first_mut() {
            *rows = received.last().map_or(0, |last| last.end);
        }
        let shape = Shape::from_slice(&dims).ok_or_else(too_many)?;
        Ok(Self { sent, received, taken, row, shape, rows_of_all })
    }

    /// Returns the bytes of a row.
    pub(crate) const fn row_bytes(&self, dtype: DType) -> usize {
        self.row.saturating_mul(dtype.size()) // rows of which there are none may have any length
    }

    /// Returns the number of rows that leave `rank`, which has this share.
    pub(crate) fn rows_to_others(&self, rank: usize) -> usize {
        let others = self.sent.iter().enumerate().filter(|(other, _)| *other != rank);
        others.map(|(_, rows)| rows.len()).sum()
    }

    /// Returns the number of rows that come from each rank.
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.received.iter().map(Range::len).collect()
    }
}

fn sum(counts: &[usize]) -> Option<usize> {
    counts.iter().try_fold(0, |sum: usize, &count| sum.checked_add(count))
}

/// Returns where each of so many rows are, one after the other.
fn places(counts: &[usize]) -> Option<Vec<Range<usize>>> {
    let mut start = 0;
    let place = |&count: &usize| {
        let end = usize::checked_add(start, count)?;
        Some(std::mem::replace(&mut start, end)..end)
    };
    counts.iter().map(place).collect()
}

fn numbers(message: &Message) -> Vec<usize> {
    let data = message.part.as_ref().and_then(|part| part.data.as_ref());
    let bytes = data.and_then(|data| data.to_vec::<u8>().ok()).unwrap_or_default();
    let number = |bytes: &[u8; 8]| usize::try_from(u64::from_le_bytes(*bytes)).unwrap_or(usize::MAX);
    bytes.as_chunks::<8>().0.iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(x: &Tensor, counts: &[usize]) -> Message {
        message("tokens", x, counts).unwrap()
    }

    fn rows(rows: usize) -> Tensor {
        Tensor::zeros([rows, 3], DType::F32, &Device::cpu()).unwrap()
    }

    #[test]
    fn each_rank_gets_the_rows_that_the_others_have_for_it() {
        let all = [told(&rows(5), &[2, 3]), told(&rows(1), &[0, 1])];
        let [first, second] = [0, 1].map(|rank| Plan::new(&all, &rows([5, 1][rank]), rank).unwrap());
        assert_eq!((first.sent, first.received.clone()), (vec![0..2, 2..5], vec![0..2, 2..2]));
        assert_eq!((second.sent, second.received.clone()), (vec![0..0, 0..1], vec![0..3, 3..4]));
        assert_eq!((first.shape, second.shape), ([2, 3].into(), [4, 3].into()));
        assert_eq!((first.taken, second.taken), (vec![0..2, 0..0], vec![2..5, 0..1]));
        assert_eq!((first.row, first.rows_of_all), (3, 6));
    }

    #[test]
    fn counts_of_any_rank_that_do_not_fit_are_named_alike_on_all() {
        let cases: [(&[usize], &str); 4] = [
            (&[2, 2], "rank 1 has 3 rows and counts [2, 2]"),
            (&[3], "rank 1 has 3 rows and counts [3]"),
            (&[1, 1, 1], "rank 1 has 3 rows and counts [1, 1, 1]"),
            (&[usize::MAX, 4], "rank 1 has 3 rows and counts [18446744073709551615, 4]"),
        ];
        for (counts, expected) in cases {
            let all = [told(&rows(2), &[1, 1]), told(&rows(3), counts)];
            let errors = [0, 1].map(|rank| Plan::new(&all, &rows(2 + rank), rank).unwrap_err().to_string());
            assert!(errors[0].contains(expected) && errors[0] == errors[1], "{errors:?}");
        }
        let scalar = Tensor::scalar(1.0, &Device::cpu()).unwrap();
        let error = Plan::new(&[told(&scalar, &[1])], &scalar, 0).unwrap_err().to_string();
        assert!(error.contains("a scalar has no dimension 0"), "{error}");
    }

    #[test]
    fn a_message_of_another_kind_is_an_error() {
        let bad = Message::new(Operation::AllToAll, "tokens");
        assert!(Plan::new(&[told(&rows(2), &[1, 1]), bad], &rows(2), 0).is_err());
    }
}
