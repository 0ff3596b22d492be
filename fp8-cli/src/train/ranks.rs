//! The processes that train one model together: replicas, each on its rows of a batch, whose ranks share layers.

use std::sync::Arc;
use std::time::Duration;

use fp8_hf::TrainRanks;
use fp8_nn::fp8_dist::{Environment, Mesh};
use fp8_nn::prelude::*;
use fp8_nn::{TensorParallel, TensorParallelOptions};

use crate::failure::Failure;
use crate::train::batches::Batch;
use crate::train::layout::Layout;
use crate::train::options::DeviceName;

/// The time that a rank waits for the others: also for the first one while it saves.
const DEADLINE: Duration = Duration::from_secs(600);

/// This process's place among those that train together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ranks {
    /// `None` for a process that trains alone.
    job: Option<Job>,
}

/// The processes of a training, from one of them.
#[derive(Debug, Clone)]
struct Job {
    /// The groups that reduce what is on the devices.
    mesh: Mesh,
    tensor_parallel: TensorParallelOptions,
    /// The group in which the processes themselves exchange a few numbers; on CPUs the same.
    control: Arc<dyn ProcessGroup>,
    device: Device,
}

impl Ranks {
    /// Joins the other processes.
    pub(crate) fn join(layout: &Layout, device: DeviceName) -> Result<Self, Failure> {
        if layout.dp == Some(1) && layout.tp() == 1 && !layout.sequence_parallel {
            return Ok(Self::default());
        }
        let environment = Environment::detect()
            .map_err(|error| Failure::input(format!("{error}; --dp 1 trains in this process alone")))?;
        let Some(sizes) = layout.sizes(environment.world_size)? else { return Ok(Self::default()) };
        let failed = |error: &dyn std::fmt::Display| Failure::input(error.to_string());
        let control = tcp("world", &environment, DEADLINE).map_err(|error| failed(&error))?;
        let kind = if device == DeviceName::Cpu { "--device cpu" } else { "--device cuda" };
        // One that has no GPU says so to the others, which would wait for it.
        let device = opened(device, environment.local_rank).map_err(|error| {
            control.poison(&error.to_string());
            failed(&error)
        })?;
        control.agree_on_names("device", &[kind.into()]).map_err(|error| failed(&error))?;
        let world = of_devices(&control, &environment, &device).map_err(|error| failed(&error))?;
        let mesh = Mesh::new(world, &sizes).map_err(|error| failed(&error))?;
        let tensor_parallel =
            TensorParallelOptions { sequence_parallel: layout.sequence_parallel, ..Default::default() };
        Ok(Self { job: Some(Job { mesh, tensor_parallel, control, device }) })
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

    /// The ranks of a mesh.
    #[cfg(test)]
    pub(crate) fn of(mesh: Mesh, tensor_parallel: TensorParallelOptions) -> Self {
        let control = mesh.world().clone();
        Self { job: Some(Job { mesh, tensor_parallel, control, device: Device::cpu() }) }
    }

    /// The replicas of a group.
    #[cfg(test)]
    pub(crate) fn replicas(group: Arc<dyn ProcessGroup>) -> Self {
        let sizes = fp8_nn::fp8_dist::MeshOptions { dp: group.world_size(), tp: 1 };
        Self::of(Mesh::new(group, &sizes).unwrap(), TensorParallelOptions::default())
    }

    /// Returns the groups that reduce what is on the devices.
    pub(crate) fn mesh(&self) -> Option<&Mesh> {
        self.job.as_ref().map(|job| &job.mesh)
    }

    /// Returns this process's place, as a trainer takes it.
    pub(crate) fn train_ranks(&self) -> Option<TrainRanks> {
        let Job { mesh, tensor_parallel, control, .. } = self.job.clone()?;
        Some(TrainRanks { mesh, tensor_parallel, control })
    }

    /// Returns the layout in words, if there are several processes.
    pub(crate) fn layout(&self) -> Option<String> {
        self.train_ranks().map(|ranks| ranks.layout())
    }

    /// Returns the ranks that share the layers of this replica, as an option of layers. They all call it.
    pub(crate) fn tensor_parallel(&self) -> fp8_nn::Result<Option<TensorParallel>> {
        match &self.job {
            Some(job) => TensorParallel::new(job.mesh.tp().clone(), &job.tensor_parallel),
            None => Ok(None),
        }
    }

    /// Returns the number of ranks that share layers, and whether they share tokens, too.
    pub(crate) fn sharing(&self) -> (usize, bool) {
        let of = |job: &Job| (job.mesh.tp().world_size(), job.tensor_parallel.sequence_parallel);
        self.job.as_ref().map_or((1, false), of)
    }

    /// Returns the group in which the processes themselves exchange a few numbers.
    pub(crate) fn control(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.job.as_ref().map(|job| &job.control)
    }

    /// Returns the device of this name. That of a group is opened once.
    pub(crate) fn device(&self, name: DeviceName) -> fp8_nn::Result<Device> {
        match &self.job {
            Some(job) => Ok(job.device.clone()),
            None => opened(name, Environment::detect().map_or(0, |environment| environment.local_rank)),
        }
    }

    /// Returns the number of this process.
    pub(crate) fn rank(&self) -> usize {
        self.mesh().map_or(0, |mesh| mesh.world().rank())
    }

    /// Returns the number of processes.
    pub(crate) fn count(&self) -> usize {
        self.mesh().map_or(1, |mesh| mesh.world().world_size())
    }

    /// Returns the number of this process's replica, and how many there are.
    pub(crate) fn replica(&self) -> [usize; 2] {
        self.mesh().map_or([0, 1], |mesh| [mesh.dp().rank(), mesh.dp().world_size()])
    }

    /// All groups of devices, each once.
    fn groups(&self) -> Vec<&Arc<dyn ProcessGroup>> {
        let mut groups: Vec<&Arc<dyn ProcessGroup>> = Vec::new();
        for group in self.mesh().iter().flat_map(|mesh| [mesh.world(), mesh.dp(), mesh.tp()]) {
            if !groups.iter().any(|known| Arc::ptr_eq(known, group)) {
                groups.push(group);
            }
        }
        groups
    }

    /// Returns the bytes that this process has sent to the others so far.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.groups().iter().map(|group| group.traffic().bytes()).sum()
    }

    /// Whether this process writes, prints and saves.
    pub(crate) fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Compares what all processes must have been given alike.
    pub(crate) fn agree(&self, given: Vec<String>) -> Result<(), Failure> {
        let Some(group) = self.control() else { return Ok(()) };
        let given: Vec<Arc<str>> = given.into_iter().map(Into::into).collect();
        let agreed = group.agree_on_names("options of fp8 train", &given);
        agreed.map_err(|error| Failure::input(different(&error).unwrap_or_else(|| error.to_string())))
    }

    /// The rows of a batch that this replica computes. Those of different replicas may differ in number by one.
    pub(crate) fn part(&self, batch: &Batch) -> Batch {
        let [replica, replicas] = self.replica();
        let at = |replica: usize| batch.rows * replica / replicas;
        batch.rows_of(at(replica)..at(replica + 1))
    }

    /// Returns whether any process says so.
    pub(crate) fn any(&self, says: bool) -> Result<bool, String> {
        let Some(group) = self.control() else { return Ok(says) };
        let any = Tensor::from_vec(vec![i32::from(says)], [1], &Device::cpu())
            .map_err(|error| error.to_string())
            .and_then(|says| {
                group.all_reduce("stop", &says, ReduceOp::Max).map_err(|error| error.to_string())
            })?;
        Ok(any.to_vec::<i32>().map_err(|error| error.to_string())? != [0])
    }

    /// Ends a job that was complete, or that all ranks have stopped. The first one tells why; the others wait for it and keep its exit
    /// code.
    pub(crate) fn finish(&self, stopped: Option<Failure>) -> Result<(), Failure> {
        if let Some(group) = self.control() {
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
        for group in self.control().into_iter().chain(self.groups()) {
            group.poison(&failure.to_string());
        }
        failure
    }
}

/// Says which option differs between processes, if that is the error.
fn different(error: &fp8_nn::fp8_recipe::Error) -> Option<String> {
    let fp8_nn::fp8_recipe::Error::Group(error) = error else { return None };
    match error.downcast_ref::<fp8_nn::fp8_dist::Error>()?.failure()? {
        fp8_nn::fp8_dist::Failure::Names { rank, value, other, other_value, .. } => {
            let [value, other_value] = [value, other_value].map(|value| {
                // Of a recipe the first line.
                value.as_deref().unwrap_or("nothing").lines().next().unwrap_or_default().to_owned()
            });
            Some(format!(
                "process {rank} was given {value}, and process {other} {other_value}: give all processes the same options"
            ))
        }
        _ => None,
    }
}

/// Opens the device of this name, for the process with this number on its machine.
fn opened(name: DeviceName, local_rank: usize) -> fp8_nn::Result<Device> {
    match name {
        DeviceName::Cpu => Ok(Device::cpu()),
        DeviceName::Cuda(index) => Ok(Device::cuda(index)?),
        DeviceName::CudaOfRank => Ok(Device::cuda(local_rank)?),
    }
}

/// Returns the group of all processes that reduces what is on their devices.
fn of_devices(
    control: &Arc<dyn ProcessGroup>,
    environment: &Environment,
    device: &Device,
) -> fp8_nn::Result<Arc<dyn ProcessGroup>> {
    if *device == Device::cpu() {
        return Ok(control.clone());
    }
    #[cfg(feature = "cuda")]
    return Ok(fp8_nn::fp8_dist::nccl("gpus", environment, device, DEADLINE)?);
    // Without the feature no GPU could be opened.
    #[cfg(not(feature = "cuda"))]
    {
        let _ = environment;
        Ok(control.clone())
    }
}
