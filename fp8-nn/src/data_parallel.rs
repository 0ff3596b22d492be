//! Training on several ranks with one batch each.
//!
//! Each rank divides its loss by the *global* batch. The summed gradients are then those of one process that has the whole
//! batch, except for the order of the sums and, in FP8, for first scales, which each rank takes from its part of the batch.
//!
//! Ranks that start a step with equal state end it with equal state. [`agreement`] checks that they start with equal state.

mod agreement;
mod broadcast_state;
mod buckets;
mod gradients;
mod hand_over;
mod partial;
mod ranks;
mod replicas;

use crate::{Layer, Parameter, Result, parameters_mut};
pub use agreement::agree;
pub(crate) use agreement::common_state;
pub use broadcast_state::broadcast_state;
use buckets::Buckets;
use fp8_dist::ProcessGroup;
use fp8_kernels::Tensor;
pub use gradients::{Gradients, GradientsOptions};
pub(crate) use hand_over::Parts;
pub use hand_over::hand_over_gradients;

pub(crate) use ranks::own;
pub(crate) use replicas::tensor_parallel_ranks;

/// Replaces every parameter's gradient by its sum over the ranks. Call it after backward and before the optimizer's step.
///
/// The sum is not divided by the number of ranks: each rank divides its loss by the *global* batch
/// ([`CrossEntropyOptions::normalizer`](fp8_kernels::ops::CrossEntropyOptions)). PyTorch's `DistributedDataParallel` averages
/// instead. The sum is written in place, so that a recorded step continues with it; a gradient that shares its storage with
/// another tensor gets new storage. [`Gradients`] does the same while backward goes on.
///
/// With several microbatches, call it once, after the backward pass of the last one: gradients add up until
/// [`zero_grad`](crate::zero_grad), so a second sum over the same group would contain the first. It is refused until the gradients
/// are cleared or replaced. Groups are told apart by their ids; a mesh of ranks sums over several.
///
/// Ranks must compute with equal scales. A gradient that was computed under a recipe that reduces amaxes, in a scope without a
/// group of more than one rank, is refused: see [`Backward::lone_recipe`](fp8_recipe::Backward::lone_recipe).
///
/// In a step that is being recorded, both are decided while recording.
///
/// With [tensor parallelism](crate::TensorParallel), `group` is that of the replicas ([`Mesh::dp`](fp8_dist::Mesh::dp)), also if it has
/// one rank: gradients of which the ranks that share a layer have parts ([`Placement::Partial`](crate::Placement::Partial)) are summed over
/// those ranks, too.
///
/// Before its first reduction over a group, and again after parameters were created, set or loaded, it compares the
/// parameters of all ranks and the optimizer state that [`checkpoint::load`](crate::checkpoint::load) has loaded with them.
/// This takes one more collective and reads all parameters back once. [`agree`] compares more.
///
/// ```
/// use fp8_nn::fp8_dist::local;
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
/// use std::{sync::Arc, thread, time::Duration};
///
/// let run = |group: Arc<dyn ProcessGroup>| -> Result<()> {
///     let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
///     let mut rng = StdRng::seed_from_u64(1); // the same weights on both ranks
///     let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
///     for parameter in parameters_mut(&mut fc) {
///         let (value, shape) = (1.0 + group.rank() as f32, *parameter.shape());
///         *parameter.main_grad_mut() = Tensor::full(value, shape, DType::F32, &Device::cpu())?;
///     }
///     all_reduce_gradients(&mut fc, &*group)?;
///     assert_eq!(fc.weight().main_grad().to_f32_vec()?, [3.0; 16]); // 1 of rank 0, 2 of rank 1
///     Ok(())
/// };
/// thread::scope(|scope| {
///     let groups = local("dp", 2, Duration::from_secs(10))?.into_iter();
///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// Two parameters of one name. A group with ranks that have other parts of the model. A gradient that was already summed over this group, or computed with scales of this rank alone. Parameters or loaded
/// optimizer state that differ between the ranks, on every rank, with the first difference; parameters
/// that only one rank has set or loaded. In a step that is being recorded, a gradient that shares its storage, or
/// parameters that have not been compared. Nothing has changed then. A rank that left, failed or has another model. Some
/// gradients may already be summed then, so clear them ([`zero_grad`](crate::zero_grad)) before the next backward.
pub fn all_reduce_gradients(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    replicas::expect_replicas(model, group, "all_reduce_gradients")?;
    gradients::before_sums(model, group)?;
    if group.world_size() > 1 {
        gradients::sum(model, group, Buckets::new(model, None))?;
    }
    partial::sum_partial(model, group)
}

/// Replaces the parameters of every rank by those of rank 0. Call it once, before the first step.
///
/// Parameters are written in place. All are received before the first one is replaced, which needs memory for a second copy.
/// This is enough for a new training run. If only rank 0 has loaded a checkpoint, use [`broadcast_state`], which also copies
/// moments and scales.
///
/// ```
/// use fp8_nn::fp8_dist::local;
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
/// use std::{sync::Arc, thread, time::Duration};
///
/// let run = |group: Arc<dyn ProcessGroup>| -> Result<()> {
///     let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
///     let mut rng = StdRng::seed_from_u64(group.rank() as u64); // different weights on each rank
///     let mut fc = Linear::new("fc", options.clone(), &Device::cpu(), &mut rng)?;
///     broadcast_parameters(&mut fc, &*group)?;
///     let first = Linear::new("fc", options, &Device::cpu(), &mut StdRng::seed_from_u64(0))?;
///     assert_eq!(fc.weight().tensor().to_f32_vec()?, first.weight().tensor().to_f32_vec()?);
///     Ok(())
/// };
/// thread::scope(|scope| {
///     let groups = local("dp", 2, Duration::from_secs(10))?.into_iter();
///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// A group with ranks that have other parts of the model; a rank that left, failed or has another model. No parameter has changed then.
pub fn broadcast_parameters(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    replicas::expect_replicas(model, group, "broadcast_parameters")?;
    let mut parameters = parameters_mut(model);
    let values = parameters
        .iter()
        .map(|parameter| broadcast_value(parameter, group, 0))
        .collect::<Result<Vec<_>>>()?;
    parameters.iter_mut().zip(values).try_for_each(|(parameter, value)| parameter.set_stored(value))
}

/// Replaces the value of one parameter by that of rank `root`, bit for bit: its tensor, or its codes and factors if it is stored
/// in FP8. On all ranks it has the same shape, dtype and form.
///
/// ```
/// use fp8_nn::broadcast_parameter;
/// use fp8_nn::fp8_dist::local;
/// use fp8_nn::prelude::*;
/// use std::{sync::Arc, thread, time::Duration};
///
/// let run = |group: Arc<dyn ProcessGroup>| -> Result<()> {
///     let value = Tensor::full(group.rank() as f32, [4], DType::F32, &Device::cpu())?;
///     let mut w = Parameter::new("w", value)?;
///     broadcast_parameter(&mut w, &*group, 1)?;
///     assert_eq!(w.tensor().to_f32_vec()?, [1.0; 4]);
///     Ok(())
/// };
/// thread::scope(|scope| {
///     let groups = local("dp", 2, Duration::from_secs(10))?.into_iter();
///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// A rank that left, failed or has another parameter; a step that is being recorded. The parameter keeps its value then.
pub fn broadcast_parameter(parameter: &mut Parameter, group: &dyn ProcessGroup, root: usize) -> Result<()> {
    let values = broadcast_value(parameter, group, root)?;
    if group.rank() == root { Ok(()) } else { own(group, parameter.set_stored(values)) }
}

/// Broadcasts the tensors of a parameter's value.
fn broadcast_value(parameter: &Parameter, group: &dyn ProcessGroup, root: usize) -> Result<Vec<Tensor>> {
    let name = parameter.name();
    let receive = |(suffix, part)| Ok(group.broadcast(&format!("value of {name}{suffix}"), part, root)?);
    parameter.stored().into_iter().map(receive).collect()
}
