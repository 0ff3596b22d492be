//! Gradients of which the ranks that share layers have parts.

use super::agreement;
use super::ranks::{expect_summable, own};
use super::replicas::tensor_parallel_ranks;
use crate::module::{trainable, trainable_mut};
use crate::parameter::Parameter;
use crate::{Layer, Placement, Result, TensorParallel};
use fp8_dist::{ProcessGroup, ReduceOp};
use fp8_kernels::Tensor;
use std::sync::Arc;

/// Compares the parameters that are equal on all ranks that share them, if these were made, set or loaded since, and returns an error if
/// [`sum_partial`] cannot sum the gradients. Nothing has changed then.
pub(super) fn before_sum(model: &mut (impl Layer + ?Sized), replicas: &dyn ProcessGroup) -> Result<()> {
    let all = tensor_parallel_ranks(model);
    for parameter in trainable(model) {
        let Some(ranks) = all.iter().find(|ranks| is_partial(parameter, ranks)) else { continue };
        if is_left(parameter, &**ranks.group(), replicas) {
            expect_summable(parameter, ranks.group().id())?;
        }
    }
    all.iter().try_for_each(|ranks| agreement::before_reduction(model, &**ranks.group()))
}

fn is_partial(parameter: &Parameter, ranks: &TensorParallel) -> bool {
    parameter.placement() == &Placement::Partial
        && parameter.tensor_parallel().is_some_and(|of| Arc::ptr_eq(of.group(), ranks.group()))
}

/// Whether the sum over `group` is still to be made. Of several groups of replicas, the first call has made it; without replicas a second
/// call is an error, as it is over any group.
fn is_left(parameter: &Parameter, group: &dyn ProcessGroup, replicas: &dyn ProcessGroup) -> bool {
    replicas.world_size() == 1 || parameter.gradient().expect_summed(parameter.name(), group.id()).is_err()
}

/// Replaces gradients of which ranks have parts by their sums.
pub(super) fn sum_partial(model: &mut (impl Layer + ?Sized), replicas: &dyn ProcessGroup) -> Result<()> {
    for ranks in tensor_parallel_ranks(model) {
        let group = &**ranks.group();
        let is_partial =
            |parameter: &Parameter| is_partial(parameter, &ranks) && is_left(parameter, group, replicas);
        let mut partial: Vec<_> =
            trainable_mut(model).into_iter().filter(|parameter| is_partial(parameter)).collect();
        for parameter in &partial {
            // Backward has added to it since `before_sum`, where sums go on beside it.
            own(group, expect_summable(parameter, group.id()))?;
        }
        let mut taken: Vec<Tensor> = Vec::with_capacity(partial.len());
        for parameter in &mut partial {
            let gradient = match parameter.main_grad().holders() {
                0 => parameter.gradient_mut().take(),
                // One that shares its storage gets new storage.
                _ => copied(parameter.main_grad()).and_then(|copy| {
                    parameter.gradient_mut().take()?;
                    Ok(copy)
                }),
            };
            taken.push(own(group, gradient)?);
        }
        group.all_reduce_coalesced("gradients that ranks have parts of", &mut taken, ReduceOp::Sum)?;
        let id: Arc<str> = group.id().into();
        let put = |(parameter, sum): (&mut &mut Parameter, Tensor)| {
            parameter.gradient_mut().put_back(sum, id.clone())
        };
        partial.iter_mut().zip(taken).try_for_each(put)?;
    }
    Ok(())
}

fn copied(gradient: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::zeros(*gradient.shape(), gradient.dtype(), gradient.device())?;
    copy.copy_from(gradient, "gradient")?;
    Ok(copy)
}
