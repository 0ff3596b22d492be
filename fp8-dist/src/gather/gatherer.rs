//! The questions that a gather asks the other ranks.

use crate::{Error, Result};
use fp8_kernels::{Device, Tensor};

/// A group that gathers the parts of a tensor. By default everything is gathered as a tensor, and the hosts compare it in each call.
pub(crate) trait Gatherer {
    /// Gathers the parts of all ranks along dimension 0.
    fn all_gather(&self, name: &str, part: &Tensor) -> Result<Tensor>;

    /// Gathers codes with one factor, which must be equal on all ranks.
    fn gather_codes(&self, name: &str, codes: &Tensor, factor: &Factor<'_>) -> Result<Tensor> {
        let codes = self.all_gather(name, codes)?;
        let all = self.all_gather(factor.name, &factor.value.reshape([1])?)?.to_vec::<f32>()?;
        factor.expect_equal(&all)?;
        Ok(codes)
    }

    /// Returns whether each shard except the last has a multiple of `unit` rows, and the number of ranks. All ranks get the same
    /// answer.
    fn are_multiples(&self, name: &str, rows: usize, unit: usize, on: &Device) -> Result<(bool, usize)> {
        let mine = Tensor::from_vec(vec![i32::from(rows.is_multiple_of(unit))], [1], on)?;
        let all = self.all_gather(name, &mine)?.to_vec::<i32>()?;
        let fits =
            all.split_last().is_none_or(|(_, others)| others.iter().all(|&is_multiple| is_multiple == 1));
        Ok((fits, all.len()))
    }

    /// Returns the rows of each rank's shard.
    fn rows(&self, name: &str, rows: usize, on: &Device) -> Result<Vec<usize>> {
        let mine = Tensor::from_vec(rows.to_le_bytes().to_vec(), [1, 8], on)?;
        let all = self.all_gather(name, &mine)?.to_vec::<u8>()?;
        Ok(all.as_chunks::<8>().0.iter().map(|rows| usize::from_le_bytes(*rows)).collect())
    }

    /// Returns the largest of the ranks' values, element by element. None is NaN.
    fn largest(&self, name: &str, values: Tensor) -> Result<Tensor> {
        let len = values.numel();
        let all = self.all_gather(name, &values.reshape([1, len])?)?.to_vec::<f32>()?;
        let mut largest = vec![0.0f32; len];
        for of_rank in all.chunks(len.max(1)) {
            for (largest, value) in largest.iter_mut().zip(of_rank) {
                *largest = largest.max(*value);
            }
        }
        Ok(Tensor::from_vec(largest, [len], values.device())?)
    }
}

impl<F: Fn(&str, &Tensor) -> Result<Tensor>> Gatherer for F {
    fn all_gather(&self, name: &str, part: &Tensor) -> Result<Tensor> {
        self(name, part)
    }
}

/// The dequantization factor of a shard with one.
pub(crate) struct Factor<'a> {
    pub(crate) name: &'a str,
    /// As errors name the call.
    pub(crate) call: &'a str,
    pub(crate) value: &'a Tensor,
}

impl Factor<'_> {
    fn expect_equal(&self, all: &[f32]) -> Result<()> {
        let Some((first, others)) = all.split_first() else { return Ok(()) };
        let mut others = (1..).zip(others);
        match others.find(|(_, factor)| factor.to_bits() != first.to_bits()) {
            None => Ok(()),
            Some((rank, factor)) => Err(Error::Scales {
                call: self.call.to_owned(),
                rank,
                value: Some(factor.recip()),
                other: 0,
                other_value: Some(first.recip()),
            }),
        }
    }
}
