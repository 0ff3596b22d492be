//! Groups of replicas, and the ranks that share layers.

use crate::{Error, Layer, Result, TensorParallel, parameters};
use fp8_dist::ProcessGroup;
use std::sync::Arc;

/// Returns an error if `group` has other ranks of a parameter's tensor parallelism, which have other parts of its layer.
pub(super) fn expect_replicas(
    model: &(impl Layer + ?Sized),
    group: &dyn ProcessGroup,
    call: &'static str,
) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let mut checked: Option<&TensorParallel> = None;
    for parameter in parameters(model) {
        let Some(ranks) = parameter.tensor_parallel() else { continue };
        if checked.is_some_and(|checked| Arc::ptr_eq(checked.group(), ranks.group())) {
            continue;
        }
        let members = group.members();
        let others = ranks.group().members().into_iter().filter(|member| members.contains(member)).count();
        if others > 1 {
            let (parameter, group) = (parameter.name().clone(), group.id().to_owned());
            return Err(Error::NotReplicas { call, parameter, group });
        }
        checked = Some(ranks);
    }
    Ok(())
}

/// Returns the ranks of tensor parallelism of all parameters, each group once, in the order of the parameters.
pub(crate) fn tensor_parallel_ranks(model: &(impl Layer + ?Sized)) -> Vec<TensorParallel> {
    let mut all: Vec<TensorParallel> = Vec::new();
    for ranks in parameters(model).into_iter().filter_map(|parameter| parameter.tensor_parallel()) {
        if !all.iter().any(|known| Arc::ptr_eq(known.group(), ranks.group())) {
            all.push(ranks.clone());
        }
    }
    all
}
