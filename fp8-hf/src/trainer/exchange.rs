//! The few numbers that the processes of a training exchange.

use super::TrainRanks;
use super::micro_batch::Tokens;
use crate::{Error, Result};
use fp8_dist::ProcessGroup;
use fp8_kernels::{Device, Tensor};

/// This process among those that train together, or alone.
#[derive(Debug)]
pub(super) struct Exchange {
    ranks: Option<TrainRanks>,
}

impl Exchange {
    pub(super) fn new(ranks: Option<TrainRanks>) -> Self {
        Self { ranks }
    }

    fn control(&self) -> Option<&dyn ProcessGroup> {
        self.ranks.as_ref().map(|ranks| &*ranks.control)
    }

    pub(super) fn rank(&self) -> usize {
        self.control().map_or(0, |group| group.rank())
    }

    pub(super) fn count(&self) -> usize {
        self.control().map_or(1, |group| group.world_size())
    }

    /// Returns the learned targets and the tokens of all ranks.
    pub(super) fn counts(&self, all: &[Tokens]) -> Result<[u64; 2]> {
        let learned = all.iter().map(Tokens::learned).sum::<usize>() as u64;
        let tokens = all.iter().map(Tokens::len).sum::<usize>() as u64;
        let all = self.gather("tokens of a step", [learned, tokens])?;
        Ok([0, 1].map(|index| all.iter().map(|counts| counts[index]).sum()))
    }

    /// Returns the sum over all ranks, which is the same on each.
    pub(super) fn sum(&self, own: f64) -> Result<f64> {
        let all = self.gather("loss of a step", [own.to_bits(), 0])?;
        Ok(all.iter().map(|[bits, _]| f64::from_bits(*bits)).sum())
    }

    /// Returns whether any rank says so.
    pub(super) fn any(&self, says: bool) -> Result<bool> {
        Ok(self.gather("whether any rank says so", [says.into(), 0])?.iter().any(|[says, _]| *says != 0))
    }

    /// Returns the numbers of all ranks, in rank order.
    fn gather(&self, what: &str, own: [u64; 2]) -> Result<Vec<[u64; 2]>> {
        let Some(group) = self.control() else { return Ok(vec![own]) };
        let words: Vec<i32> =
            own.iter().flat_map(|&number| [number as u32 as i32, (number >> 32) as u32 as i32]).collect();
        let own = Tensor::from_vec(words, [1, 4], &Device::cpu())?;
        let all = group.all_gather(what, &own).map_err(fp8_nn::Error::from)?.to_vec::<i32>()?;
        let number = |low: i32, high: i32| u64::from(low as u32) | u64::from(high as u32) << 32;
        let of_rank = |words: &[i32]| match *words {
            [a, b, c, d] => Ok([number(a, b), number(c, d)]),
            _ => Err(Error::Option {
                part: "Trainer".to_owned(),
                option: "ranks",
                value: what.to_owned(),
                remedy: "expected four numbers from each rank".to_owned(),
            }),
        };
        all.chunks(4).map(of_rank).collect()
    }
}
