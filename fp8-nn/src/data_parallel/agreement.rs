//! Whether replicas have equal parameters, optimizer state and scaling state.
//!
//! Gradients and amaxes are reduced over the ranks, so replicas remain equal if they start equal. If they do not start equal,
//! a step does not notice: when only one rank loads a checkpoint, its moments differ and its weights diverge. Digests of the
//! state are therefore compared by [`agree`], and by [`all_reduce_gradients`](crate::all_reduce_gradients) before its first
//! reduction over a group and again after parameters were set or loaded.
//!
//! `all_reduce_gradients` has no access to the optimizer, which owns the moments. For this reason
//! [`checkpoint::load`](crate::checkpoint::load) stores digests of the loaded optimizer state in the parameters.

use super::ranks::{expect_eager, own};
use super::replicas::{expect_replicas, tensor_parallel_ranks};
use crate::optimizer::Counts;
use crate::parameter::StoredPart;
use crate::{AdamW, Layer, Optimizer, Parameter, Placement, Result, parameters, parameters_mut};
use fp8_dist::{ProcessGroup, StateDigest};
use fp8_kernels::ops::LossScaleState;
use fp8_kernels::{DType, Element, Tensor, bf16, f16};
use fp8_recipe::Scaling;
use std::borrow::Cow;
use std::iter;

/// Elements that are converted to bytes at a time.
const CHUNK: usize = 1 << 16;

/// Compares the training state of this rank with that of all other ranks of `group`, bit for bit.
///
/// The state is every parameter, AdamW's moments, f32 copies, options and counts of steps, and the scales, amax histories and
/// update counts of every recipe that reduces its amaxes. A first scale that was not committed counts as not calibrated.
/// State that was loaded and not used yet is compared too.
///
/// `group` holds the replicas of this rank: the ranks that train the same parameters. The ranks that share layers with this one
/// ([tensor parallelism](crate::TensorParallel)) compare what they all have. After an error the group remains
/// usable; [`broadcast_state`](crate::broadcast_state) copies the state of one rank to all.
///
/// This reads the whole state back to the host once, and on a GPU waits for the work queued so far. Call it after a load,
/// or every few thousand steps, not in each. [`all_reduce_gradients`] and [`Scaling::load_state`] describe what
/// training itself compares.
///
/// [`all_reduce_gradients`]: crate::all_reduce_gradients
///
/// ```
/// use fp8_nn::fp8_dist::local;
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
/// use std::{thread, time::Duration};
///
/// let run = |group: std::sync::Arc<dyn ProcessGroup>| -> Result<()> {
///     let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
///     let mut rng = StdRng::seed_from_u64(group.rank() as u64); // different weights on each rank
///     let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
///     let mut optimizer = AdamW::new(AdamWOptions::default())?;
///     let mut scaling = Scaling::new(&fc, &Device::cpu())?;
///     let error = agree(&fc, &optimizer, &scaling, &*group).unwrap_err().to_string();
///     assert!(error.contains("the value of `fc.weight` differs between rank 1 and rank 0"), "{error}");
///     broadcast_state(&mut fc, &mut optimizer, &mut scaling, &*group, 0)?;
///     agree(&fc, &optimizer, &scaling, &*group)
/// };
/// thread::scope(|scope| {
///     let threads: Vec<_> =
///         local("dp", 2, Duration::from_secs(10))?.into_iter().map(|group| scope.spawn(move || run(group))).collect();
///     threads.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// A group with ranks that have other parts of the model; state that differs, on every rank, with the first difference; a rank that left, failed or makes another call; a step
/// that is being recorded; a device that failed.
pub fn agree(
    model: &(impl Layer + ?Sized),
    optimizer: &(impl Optimizer + ?Sized),
    scaling: &Scaling,
    group: &dyn ProcessGroup,
) -> Result<()> {
    expect_eager(model, "agree", "call it between steps, when none is being recorded")?;
    expect_replicas(model, group, "agree")?;
    if group.world_size() > 1 {
        let state = own(group, training_state(model, optimizer.state(), scaling, |_| true))?;
        group.agree_on_state("training state", &state)?;
    }
    for ranks in tensor_parallel_ranks(model) {
        let group = &**ranks.group();
        let state = own(group, training_state(model, optimizer.state(), scaling, is_replicated))?;
        group.agree_on_state("training state of ranks that share layers", &state)?;
    }
    Ok(())
}

/// Whether all ranks that share the parameter's layer have all of it.
fn is_replicated(parameter: &Parameter) -> bool {
    !matches!(parameter.placement(), Placement::Cut(_))
}

fn training_state(
    model: &(impl Layer + ?Sized),
    optimizer: &AdamW,
    scaling: &Scaling,
    is_compared: impl Fn(&Parameter) -> bool,
) -> Result<Vec<StateDigest>> {
    let mut all = Vec::new();
    for parameter in parameters(model).into_iter().filter(|parameter| is_compared(parameter)) {
        let name = parameter.name();
        all.extend(value(parameter)?);
        for (part, tensor) in optimizer.state_of(parameter).iter().flat_map(|state| state.parts()) {
            all.push(digest(format!("`{part}` of `{name}`"), tensor)?);
        }
    }
    all.extend(common_state(optimizer, scaling)?);
    Ok(all)
}

/// Digests of the state that is not in tensors of the parameters' shapes: all ranks have it in common, whatever parts of the model they
/// have.
pub(crate) fn common_state(optimizer: &AdamW, scaling: &Scaling) -> Result<Vec<StateDigest>> {
    let mut all = Vec::new();
    all.extend(counts(optimizer.counts()?));
    if let Some(LossScaleState { scale, growth_tracker, skipped_steps }) = optimizer.loss_scale()? {
        let bytes = [scale.to_bits().into(), growth_tracker, skipped_steps].map(u64::to_le_bytes);
        all.push(StateDigest::new("the state of the loss scaler", bytes));
    }
    all.push(StateDigest::new(
        format!("the options of {}", optimizer.rule().name()),
        [format!("{:?}", optimizer.options())],
    ));
    all.extend(scaling.state_digests()?);
    Ok(all)
}

fn counts(Counts { steps, skipped, updates }: Counts) -> impl Iterator<Item = StateDigest> {
    let count = |name: &str, count: u64| StateDigest::new(name, [count.to_le_bytes()]);
    let updates = updates.map(|updates| count("the optimizer's number of updates", updates));
    let steps = count("the optimizer's number of steps", steps);
    [steps, count("the optimizer's number of skipped steps", skipped)].into_iter().chain(updates)
}

/// Compares parameters, and optimizer state that was loaded with them, unless this group has done so since they were last
/// set.
pub(super) fn before_reduction(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    let number = group.handle_number();
    let is_compared = |parameter: &Parameter| is_compared(parameter, group);
    let mut compared = parameters(model).into_iter().filter(|parameter| is_compared(parameter));
    if compared.all(|parameter| parameter.agreement().has_compared(number)) {
        return Ok(());
    }
    let remedy =
        "ranks compare parameters that were made, set or loaded: run one step before a step is recorded";
    expect_eager(model, "all_reduce_gradients", remedy)?;
    let state = own(group, parameter_state(model, is_compared))?;
    group.agree_on_state("parameters", &state)?;
    for parameter in parameters_mut(model).into_iter().filter(|parameter| is_compared(parameter)) {
        parameter.agreement_mut().note_group(number);
    }
    Ok(())
}

/// Whether the ranks of `group` have equal values of a parameter: not if they are those that have other parts of it.
fn is_compared(parameter: &Parameter, group: &dyn ProcessGroup) -> bool {
    let number = group.handle_number();
    let shares = parameter.tensor_parallel().is_some_and(|ranks| ranks.group().handle_number() == number);
    is_replicated(parameter) || !shares
}

fn parameter_state(
    model: &(impl Layer + ?Sized),
    is_compared: impl Fn(&Parameter) -> bool,
) -> Result<Vec<StateDigest>> {
    let (mut all, mut loaded_counts) = (Vec::new(), Vec::new());
    for parameter in parameters(model).into_iter().filter(|parameter| is_compared(parameter)) {
        all.extend(value(parameter)?);
        if let Some(loaded) = parameter.agreement().loaded() {
            all.extend(loaded.parts.iter().cloned());
            if !loaded_counts.contains(&loaded.counts) {
                loaded_counts.push(loaded.counts);
            }
        }
    }
    all.extend(loaded_counts.into_iter().flat_map(counts));
    Ok(all)
}

/// Digests of a parameter's value, and of whether it is frozen.
fn value(parameter: &Parameter) -> Result<Vec<StateDigest>> {
    let name = parameter.name();
    let part = |(suffix, tensor): StoredPart<'_>| digest(format!("the value of `{name}{suffix}`"), tensor);
    let mut all = parameter.stored().into_iter().map(part).collect::<Result<Vec<_>>>()?;
    if !parameter.is_trainable() {
        all.push(StateDigest::new(format!("whether `{name}` is frozen"), ["frozen"]));
    }
    Ok(all)
}

/// A digest of dtype, shape and elements.
fn digest(name: String, tensor: &Tensor) -> Result<StateDigest> {
    match tensor.dtype() {
        DType::F32 => of_elements(name, tensor, f32::to_le_bytes),
        DType::BF16 => of_elements(name, tensor, bf16::to_le_bytes),
        DType::F16 => of_elements(name, tensor, f16::to_le_bytes),
        DType::I32 => of_elements(name, tensor, i32::to_le_bytes),
        DType::U8 => of_elements(name, tensor, u8::to_le_bytes),
    }
}

fn of_elements<T: Element, const N: usize>(
    name: String,
    tensor: &Tensor,
    bytes: impl Fn(T) -> [u8; N],
) -> Result<StateDigest> {
    let elements = match tensor.as_slice::<T>() {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(tensor.to_vec()?),
    };
    let head = format!("{} {}", tensor.dtype(), tensor.shape()).into_bytes();
    let chunks =
        elements.chunks(CHUNK).map(|chunk| chunk.iter().flat_map(|&x| bytes(x)).collect::<Vec<u8>>());
    Ok(StateDigest::new(name, iter::once(head).chain(chunks)))
}
