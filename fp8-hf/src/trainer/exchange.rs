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

    pub(super) fn ranks(&self) -> Option<&TrainRanks> {
        self.ranks.as_ref()
    }

    fn control(&self) -> Option<&dyn ProcessGroup> {
        self.ranks.as_ref().map(|ranks| &*ranks.control)
    }

    pub(super) fn rank(&self) -> usize {
        self.control().map_or(0, |group| group.rank())
    }

    /// Returns this process's replica, and how many there are.
    pub(super) fn replica(&self) -> [usize; 2] {
        self.ranks().map_or([0, 1], |ranks| [ranks.mesh.dp().rank(), ranks.mesh.dp().world_size()])
    }

    /// Returns the ranks of a replica, which have the same data.
    pub(super) fn sharing(&self) -> usize {
        self.ranks().map_or(1, |ranks| ranks.mesh.tp().world_size())
    }

    /// Returns the number of equal parts in which the ranks of a replica have the tokens of a forward pass.
    pub(super) fn parts(&self) -> usize {
        let shares_tokens = self.ranks().is_some_and(|ranks| ranks.tensor_parallel.sequence_parallel);
        if shares_tokens { self.sharing() } else { 1 }
    }

    /// Returns the learned targets and the tokens of all replicas.
    pub(super) fn counts(&self, all: &[Tokens]) -> Result<[u64; 2]> {
        let learned = all.iter().map(Tokens::learned).sum::<usize>() as u64;
        let tokens = all.iter().map(Tokens::len).sum::<usize>() as u64;
        let all = self.gather("tokens of a step", [learned, tokens])?;
        let first = || all.iter().step_by(self.sharing());
        Ok([0, 1].map(|index| first().map(|counts| counts[index]).sum()))
    }

    /// Returns the sum over all replicas, which is the same on each rank.
    pub(super) fn sum(&self, own: f64) -> Result<f64> {
        let all = self.gather("loss of a step", [own.to_bits(), 0])?;
        Ok(all.iter().step_by(self.sharing()).map(|[bits, _]| f64::from_bits(*bits)).sum())
    }

    /// Returns the least number that a rank has, if one has any.
    pub(super) fn least(&self, what: &str, own: Option<usize>) -> Result<Option<usize>> {
        let all = self.gather(what, [own.map_or(u64::MAX, |number| number as u64), 0])?;
        let least = all.iter().map(|[number, _]| *number).min();
        Ok(least.and_then(|number| usize::try_from(number).ok()).filter(|&number| number != usize::MAX))
    }

    /// Returns the error of this rank, or one that says that another has failed at `work`.
    pub(super) fn all_of<T>(&self, work: &str, done: Result<T>) -> Result<T> {
        let any = self.any(done.is_err());
        let done = done?;
        match any? {
            false => Ok(done),
            true => Err(Error::Rank { work: work.to_owned() }),
        }
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
