//! The processes that train one model together, each on its rows of a batch.

use std::sync::Arc;
use std::time::Duration;

use fp8_nn::fp8_dist::{Environment, Mesh, MeshOptions};
use fp8_nn::prelude::*;

use crate::failure::Failure;
use crate::train::batches::Batch;

/// The time that a rank waits for the others: also for the first one while it saves.
const DEADLINE: Duration = Duration::from_secs(600);

/// This process's place among those that train together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ranks {
    /// `None` for a process that trains alone.
    group: Option<Arc<dyn ProcessGroup>>,
}

impl Ranks {
    /// Joins the other processes. `dp` is the number that `--dp` says, if it was given.
    pub(crate) fn join(dp: Option<usize>) -> Result<Self, Failure> {
        if dp == Some(1) {
            return Ok(Self::default());
        }
        let environment = Environment::detect()
            .map_err(|error| Failure::input(format!("{error}; --dp 1 trains in this process alone")))?;
        let started = environment.world_size;
        let dp = match (dp, started) {
            (None, 1) => return Ok(Self::default()),
            (Some(dp), _) if dp == started => dp,
            (Some(dp), 1) => {
                return Err(Failure::input(format!(
                    "--dp {dp}: this is the only process: fp8 launch -n {dp} -- fp8 train --dp {dp} starts {dp} on this machine"
                )));
            }
            (Some(dp), _) => {
                let sentence =
                    format!("--dp {dp}: {started} processes were started: expected --dp {started}");
                return Err(Failure::input(sentence));
            }
            (None, _) => {
                return Err(Failure::input(format!(
                    "{started} processes were started: --dp {started} trains one model on them, --dp 1 one in each"
                )));
            }
        };
        let mesh = tcp("world", &environment, DEADLINE)
            .and_then(|world| Mesh::new(world, &MeshOptions { dp, ..Default::default() }))
            .map_err(|error| Failure::input(error.to_string()))?;
        Ok(Self { group: Some(mesh.dp().clone()) })
    }

    /// Expects that this process was started alone.
    pub(crate) fn expect_alone(option: &str) -> Result<(), Failure> {
        match Environment::detect().map(|environment| environment.world_size) {
            Ok(started @ 2..) => {
                let sentence = format!("{option} runs in one process: {started} were started");
                Err(Failure::input(sentence))
            }
            _ => Ok(()),
        }
    }

    /// The ranks of a group.
    #[cfg(test)]
    pub(crate) fn of(group: Arc<dyn ProcessGroup>) -> Self {
        Self { group: Some(group) }
    }

    pub(crate) fn group(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.group.as_ref()
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.rank())
    }

    pub(crate) fn count(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.world_size())
    }

    /// Returns the bytes that this process has sent to the others so far.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.group.as_ref().map_or(0, |group| group.traffic().bytes())
    }

    /// Whether this process writes, prints and saves.
    pub(crate) fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Compares what all processes must have been given alike.
    pub(crate) fn agree(&self, given: Vec<String>) -> Result<(), Failure> {
        let Some(group) = &self.group else { return Ok(()) };
        let given: Vec<Arc<str>> = given.into_iter().map(Into::into).collect();
        group
            .agree_on_names("options of fp8 train", &given)
            .map_err(|error| Failure::input(error.to_string()))
    }

    /// The rows of a batch that this process computes. Those of different processes may differ in number by one.
    pub(crate) fn part(&self, batch: &Batch) -> Batch {
        let at = |rank: usize| batch.rows * rank / self.count();
        batch.rows_of(at(self.rank())..at(self.rank() + 1))
    }

    /// Returns whether any process says so.
    pub(crate) fn any(&self, says: bool) -> Result<bool, String> {
        let Some(group) = &self.group else { return Ok(says) };
        let any = Tensor::from_vec(vec![i32::from(says)], [1], &Device::cpu())
            .map_err(|error| error.to_string())
            .and_then(|says| {
                group.all_reduce("stop", &says, ReduceOp::Max).map_err(|error| error.to_string())
            })?;
        Ok(any.to_vec::<i32>().map_err(|error| error.to_string())? != [0])
    }

    /// Does what only the first process does, while the others wait.
    pub(crate) fn first_does(&self, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        if self.is_first() {
            // If it fails, the others learn it when this process leaves the group.
            work()?;
        }
        match &self.group {
            Some(group) => group.barrier().map_err(|error| Failure::work(error.to_string())),
            None => Ok(()),
        }
    }

    /// Ends a job that was complete, or that all ranks have stopped. The first one tells why; the others wait for it and keep its exit
    /// code.
    pub(crate) fn finish(&self, stopped: Option<Failure>) -> Result<(), Failure> {
        if let Some(group) = &self.group {
            // If the first one has failed meanwhile, it has told so.
            let _ = group.barrier();
        }
        match stopped {
            None => Ok(()),
            Some(failure) if self.is_first() => Err(failure),
            Some(failure) => Err(Failure::Process { sentence: String::new(), code: failure.code() }),
        }
    }

    /// Tells the other ranks that this one cannot go on.
    pub(crate) fn give_up(&self, failure: Failure) -> Failure {
        if let Some(group) = &self.group {
            group.poison(&failure.to_string());
        }
        failure
    }
}
