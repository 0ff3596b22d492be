//! The head of a frame: what it announces, in bytes.

use crate::ReduceOp;
use crate::message::{Call, Operation, Part};
use fp8_kernels::{DType, Shape};
use std::io;

/// Larger tensors are refused: 1 TiB.
pub(super) const MAX_TENSOR: usize = 1 << 40;

pub(super) fn put_number(head: &mut Vec<u8>, number: u64) {
    head.extend_from_slice(&number.to_le_bytes());
}

pub(super) fn put_text(head: &mut Vec<u8>, text: &str) {
    // `start` refuses texts that exceed the limit of a head.
    head.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
    head.extend_from_slice(text.as_bytes());
}

pub(super) fn put_part(head: &mut Vec<u8>, part: Option<&Part>) {
    let Some(part) = part else { return head.push(0) };
    head.push(if part.data.is_some() { 2 } else { 1 });
    head.push(DTYPES.iter().position(|&dtype| dtype == part.dtype).unwrap_or_default() as u8);
    head.push(part.shape.len() as u8);
    part.shape.iter().for_each(|&extent| put_number(head, extent as u64));
}

pub(super) const DTYPES: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U8];

pub(super) fn put_ranks(head: &mut Vec<u8>, ranks: &[usize]) {
    put_number(head, ranks.len() as u64);
    ranks.iter().for_each(|&rank| put_number(head, rank as u64));
}

pub(super) fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} is not part of the protocol"))
}

/// The part of a head that has not been read.
pub(super) struct Head<'a>(pub(super) &'a [u8]);

impl<'a> Head<'a> {
    pub(super) fn take(&mut self, len: usize) -> io::Result<&'a [u8]> {
        let (taken, rest) =
            self.0.split_at_checked(len).ok_or_else(|| invalid("a head that is too short".to_owned()))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> io::Result<u8> {
        Ok(self.take(1)?.first().copied().unwrap_or_default())
    }

    pub(super) fn number(&mut self) -> io::Result<u64> {
        Ok(self.take(8)?.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    pub(super) fn count(&mut self) -> io::Result<usize> {
        usize::try_from(self.number()?).map_err(|_| invalid("a number beyond memory".to_owned()))
    }

    pub(super) fn text(&mut self) -> io::Result<String> {
        let len = self.take(4)?.iter().rev().fold(0, |len, &byte| len << 8 | usize::from(byte));
        let bytes = self.take(len)?.to_vec();
        String::from_utf8(bytes).map_err(|_| invalid("a text that is not UTF-8".to_owned()))
    }

    pub(super) fn call(&mut self) -> io::Result<Call> {
        let (tag, argument) = (self.byte()?, self.count()?);
        let op = || match argument {
            0 => Ok(ReduceOp::Sum),
            1 => Ok(ReduceOp::Avg),
            2 => Ok(ReduceOp::Max),
            _ => Err(invalid(format!("reduction {argument}"))),
        };
        let operation = match tag {
            0 => Operation::AgreeOnNames,
            1 => Operation::AllReduceArena,
            2 => Operation::AllReduce(op()?),
            3 => Operation::AllGather,
            4 => Operation::ReduceScatter(op()?),
            5 => Operation::Broadcast { root: argument },
            6 => Operation::Barrier,
            7 => Operation::AgreeOnState,
            8 => Operation::Split,
            9 => Operation::Connect,
            10 => Operation::AllToAll,
            11 => Operation::Send { to: argument },
            12 => Operation::Receive { from: argument },
            _ => return Err(invalid(format!("collective {tag}"))),
        };
        Ok(Call { operation, what: self.text()? })
    }

    /// Returns a part without its elements, and whether they follow.
    pub(super) fn part(&mut self) -> io::Result<Option<(Part, bool)>> {
        let has_data = match self.byte()? {
            0 => return Ok(None),
            1 => false,
            2 => true,
            tag => return Err(invalid(format!("part {tag}"))),
        };
        let tag = self.byte()?;
        let dtype = DTYPES.get(usize::from(tag)).ok_or_else(|| invalid(format!("dtype {tag}")))?;
        let dims = (0..self.byte()?).map(|_| self.count()).collect::<io::Result<Vec<_>>>()?;
        let bytes = dims.iter().try_fold(dtype.size(), |bytes, &dim| bytes.checked_mul(dim));
        let shape = Shape::from_slice(&dims).filter(|_| bytes.is_some_and(|bytes| bytes <= MAX_TENSOR));
        let shape = shape.ok_or_else(|| invalid(format!("a tensor of shape {dims:?}")))?;
        Ok(Some((Part { dtype: *dtype, shape, data: None }, has_data)))
    }

    pub(super) fn ranks(&mut self) -> io::Result<Vec<usize>> {
        (0..self.number()?).map(|_| self.count()).collect()
    }
}
