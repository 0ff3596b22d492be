//! Copies the training state of one rank to all ranks.

use super::broadcast_value;
use super::ranks::{expect_eager, first_device, own};
use super::replicas::expect_replicas;
use crate::checkpoint::scaling_state::{Header, Weights, bind};
use crate::module::trainable;
use crate::optimizer::{AdamWState, Counts};
use crate::parameter::StoredPart;
use crate::{AdamW, Error, Layer, Optimizer, Result, parameters, parameters_mut};
use fp8_dist::ProcessGroup;
use fp8_kernels::ops::LossScaleState;
use fp8_kernels::{Device, Element, Tensor, TunedProducts};
use fp8_recipe::{Direction, DropoutProgress, Scaling, ScalingState};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Replaces the training state of every rank by that of rank `root`: parameters, AdamW's moments, f32 copies and counts of
/// steps, the scaling state of all recipes, and the kernels that [tuning](fp8_kernels::TunedProducts) chose for matrix products.
///
/// Afterwards the state is equal on all ranks, bit for bit, and training continues from it as on `root`. Use it for a
/// checkpoint that only one rank can read, for ranks that join a running job, and for replicas that
/// [`agree`](crate::agree) found to differ. Gradients are not part of it.
///
/// Tensors are written in place, so recorded steps continue from the new state. Parameters that have no moments on `root`
/// yet get moments of 0. [Frozen](crate::Parameter::set_trainable) parameters have none afterwards, and none are sent.
///
/// Everything is received before the first tensor is replaced, which needs memory for a second copy of parameters, moments
/// and f32 copies, also on `root`.
///
/// ```
/// use fp8_nn::fp8_dist::local;
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
/// use std::{sync::Arc, thread, time::Duration};
///
/// let run = |group: Arc<dyn ProcessGroup>| -> Result<()> {
///     let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
///     let mut rng = StdRng::seed_from_u64(group.rank() as u64);
///     let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
///     let (mut optimizer, mut scaling) = (AdamW::new(AdamWOptions::default())?, Scaling::new(&fc, &Device::cpu())?);
///     if group.rank() == 1 {
///         optimizer.step(&mut fc, 1e-3)?; // rank 1 is ahead
///     }
///     broadcast_state(&mut fc, &mut optimizer, &mut scaling, &*group, 1)?;
///     assert_eq!(optimizer.steps(), 1);
///     agree(&fc, &optimizer, &scaling, &*group)
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
/// Ranks whose models differ in names, shapes or dtypes, or whose optimizers differ in their options: the first difference; a
/// `root` that is not a rank of the group; a rank that left, failed or makes another call; a step that is being recorded.
/// Nothing has changed then. If the device fails while the state is written, a part of it has changed.
pub fn broadcast_state(
    model: &mut (impl Layer + ?Sized),
    optimizer: &mut (impl Optimizer + ?Sized),
    scaling: &mut Scaling,
    group: &dyn ProcessGroup,
    root: usize,
) -> Result<()> {
    let (op, world_size) = ("broadcast_state", group.world_size());
    let optimizer = optimizer.state_mut();
    expect_eager(model, op, "call it between steps, when none is being recorded")?;
    expect_replicas(model, group, op)?;
    if world_size > 1 {
        let form = own(group, form(model, optimizer, scaling, root))?;
        group.agree_on_names(op, &form)?;
    }
    if root >= world_size {
        return Err(fp8_dist::Error::Root { call: op.to_owned(), root, world_size }.into());
    }
    if world_size == 1 {
        return Ok(());
    }
    let device = first_device(model).unwrap_or_else(Device::cpu);
    let new = own(group, optimizer.new_state(model, &names(model)))?;
    let (head, state) = numbers(model, optimizer, scaling, group, root, &device)?;
    let (values, mut moments) = tensors(model, optimizer, &new, group, root)?;
    own(group, device.synchronize().map_err(Error::from))?;
    group.barrier()?;

    // All ranks have received everything, so it is written from here on.
    own(group, scaling.load_state(&state).map_err(Error::from))?;
    let set = parameters_mut(model).into_iter().zip(values).try_for_each(|(parameter, value)| {
        parameter.agreement_mut().set_loaded(None);
        parameter.set_stored(value)
    });
    own(group, set)?;
    own(group, bind(scaling, model, &head.weights))?;
    let scale = head.loss_scale.map(|(scale, growth_tracker, skipped_steps)| LossScaleState {
        scale: f32::from_bits(scale),
        growth_tracker,
        skipped_steps,
    });
    own(group, optimizer.set_loss_scale(scale))?;
    let counts = Counts { steps: head.steps, skipped: head.skipped, updates: head.updates };
    let resumed = optimizer.resume(model, counts, new, &mut |parameter, part, _| {
        Ok(moments.remove(&(parameter.name().clone(), part.to_owned())))
    });
    own(group, resumed)?;
    let tuned = head.tuned_products.parse().unwrap_or_else(|error| {
        tracing::warn!(%error, root, "the tuned products of a rank are not used");
        TunedProducts::default()
    });
    own(group, device.use_tuned_products(&tuned).map_err(Error::from)).map(drop)
}

/// Describes everything that must be equal on all ranks.
fn form(
    model: &(impl Layer + ?Sized),
    optimizer: &AdamW,
    scaling: &Scaling,
    root: usize,
) -> Result<Vec<Arc<str>>> {
    let (mut form, mut seen) = (vec![format!("root {root}").into()], BTreeSet::new());
    for parameter in parameters(model) {
        let name = parameter.name();
        let form_of =
            |(suffix, part): StoredPart<'_>| format!("{name}{suffix}: {} {}", part.dtype(), part.shape());
        form.extend(parameter.stored().into_iter().map(form_of).map(Arc::from));
        form.extend(parameter.fp8().map(|codes| format!("{name}: {}", codes.encoding()).into()));
        form.extend((!parameter.is_trainable()).then(|| format!("{name}: frozen").into()));
        if !seen.insert(name) {
            return Err(Error::DuplicateParameter(name.clone()));
        }
    }
    form.push(format!("{:?}", optimizer.options()).into());
    form.push(format!("{:?}", optimizer.rule()).into());
    form.extend(optimizer.loss_scaler().map(|scaler| format!("{:?}", scaler.options()).into()));
    form.extend(Direction::ALL.iter().flat_map(|&direction| scaling.slot_names(direction)).cloned());
    Ok(form)
}

/// Returns the names of the parameters that have moments.
fn names(model: &(impl Layer + ?Sized)) -> BTreeSet<Arc<str>> {
    trainable(model).into_iter().map(|parameter| parameter.name().clone()).collect()
}

/// The part of the state that is not in tensors of the model's shapes.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Head {
    steps: u64,
    skipped: u64,
    updates: Option<u64>,
    /// The bits of the scale, the growth tracker and the skipped steps of the loss scaler.
    loss_scale: Option<(u32, u64, u64)>,
    arenas: Vec<Header>,
    /// The parameters of the weights in `arenas`, filled in where they are received.
    #[serde(skip)]
    weights: Weights,
    /// The number of scopes that have drawn dropout masks. Seeds are not broadcast: each rank has its own.
    dropout: Option<u64>,
    /// The number of history rows of each arena.
    rows: Vec<usize>,
    /// The kernels that tuning chose for matrix products.
    tuned_products: String,
}

/// Broadcasts the root's counts and scaling state: text for names and integers, then f32 for scales and histories, arena by
/// arena.
fn numbers(
    model: &(impl Layer + ?Sized),
    optimizer: &AdamW,
    scaling: &Scaling,
    group: &dyn ProcessGroup,
    root: usize,
    device: &Device,
) -> Result<(Head, ScalingState)> {
    let pack = || -> Result<(Vec<u8>, Vec<f32>)> {
        let ScalingState { arenas, dropout } = scaling.state()?;
        let Counts { steps, skipped, updates } = optimizer.counts()?;
        let loss_scale = optimizer.loss_scale()?;
        let head = Head {
            steps,
            skipped,
            updates,
            loss_scale: loss_scale
                .map(|state| (state.scale.to_bits(), state.growth_tracker, state.skipped_steps)),
            arenas: arenas.iter().map(|arena| Header::of(arena, model)).collect(),
            weights: Weights::new(),
            dropout: dropout.map(|dropout| dropout.scopes),
            rows: arenas.iter().map(|arena| arena.amax_history.len()).collect(),
            tuned_products: device.tuned_products().to_string(),
        };
        let floats = arenas.iter().flat_map(|arena| [arena.scale.clone(), arena.amax_history.concat()]);
        let text = serde_json::to_vec(&head).map_err(|error| unreadable(&error.to_string()))?;
        Ok((text, floats.flatten().collect()))
    };
    let is_root = group.rank() == root;
    let (text, floats) = if is_root { own(group, pack())? } else { Default::default() };
    let lengths = [text.len(), floats.len()].map(|len| (len as u64).to_le_bytes()).concat();
    let lengths = broadcast(group, "lengths of the scaling state", lengths, 16, root, device)?;
    let mut lengths = lengths.as_chunks::<8>().0.iter().map(|&len| u64::from_le_bytes(len) as usize);
    let mut next = || lengths.next().unwrap_or_default();
    let (text_len, floats_len) = (next(), next());
    let text = broadcast(group, "names of the scaling state", text, text_len, root, device)?;
    let floats = broadcast(group, "numbers of the scaling state", floats, floats_len, root, device)?;
    let (head, mut state) = own(group, unpack(&text, &floats))?;
    let seed = scaling.dropout_seed();
    state.dropout = head.dropout.map(|scopes| DropoutProgress { seed, scopes });
    Ok((head, state))
}

fn unpack(text: &[u8], mut floats: &[f32]) -> Result<(Head, ScalingState)> {
    let mut head: Head = serde_json::from_slice(text).map_err(|error| unreadable(&error.to_string()))?;
    let mut state = ScalingState::default();
    for (header, &rows) in std::mem::take(&mut head.arenas).into_iter().zip(&head.rows) {
        let slots = header.slots();
        head.weights.extend(header.weights());
        let mut take = |len: Option<usize>| {
            let (taken, rest) = len.and_then(|len| floats.split_at_checked(len))?;
            floats = rest;
            Some(taken)
        };
        let arena = take(Some(slots)).zip(take(slots.checked_mul(rows)));
        let (scale, history) = arena.ok_or_else(|| unreadable("it has too few numbers"))?;
        state.arenas.push(header.arena(scale.to_vec(), history).map_err(|problem| unreadable(&problem))?);
    }
    if floats.is_empty() { Ok((head, state)) } else { Err(unreadable("it has too many numbers")) }
}

fn unreadable(problem: &str) -> Error {
    let problem = format!("cannot be sent or read: {problem}: run the same program on all ranks");
    fp8_recipe::Error::State { recipe: "all recipes".to_owned(), direction: "both directions", problem }
        .into()
}

/// Broadcasts the `len` values of the root and returns them on every rank.
fn broadcast<T: Element>(
    group: &dyn ProcessGroup,
    what: &str,
    values: Vec<T>,
    len: usize,
    root: usize,
    device: &Device,
) -> Result<Vec<T>> {
    // The received length may be any number; creating the tensor checks it.
    let tensor = match group.rank() == root {
        true => Tensor::from_vec(values, [len], device),
        false => Tensor::zeros([len], T::DTYPE, device),
    };
    let tensor = own(group, tensor.map_err(Error::from))?;
    let received = group.broadcast(what, &tensor, root)?;
    own(group, received.to_vec().map_err(Error::from))
}

/// Moments and f32 copies by parameter and part.
type Moments = BTreeMap<(Arc<str>, String), Tensor>;

/// Broadcasts the root's parameters, in the order of the visit, and its other tensors.
fn tensors(
    model: &(impl Layer + ?Sized),
    optimizer: &AdamW,
    new: &BTreeMap<Arc<str>, AdamWState>,
    group: &dyn ProcessGroup,
    root: usize,
) -> Result<(Vec<Vec<Tensor>>, Moments)> {
    let (mut values, mut moments) = (Vec::new(), BTreeMap::new());
    for parameter in parameters(model) {
        let name = parameter.name();
        values.push(broadcast_value(parameter, group, root)?);
        let state = new.get(name).or_else(|| optimizer.state_of(parameter));
        for (part, tensor) in state.iter().flat_map(|state| state.parts()) {
            let received = group.broadcast(&format!("{part} of {name}"), tensor, root)?;
            moments.insert((name.clone(), part.to_owned()), received);
        }
    }
    Ok((values, moments))
}
