//! Sums of gradients over ranks, while backward goes on.

use super::agreement::before_reduction;
use super::buckets::{Buckets, Way};
use super::partial::{before_sum as before_partial_sums, sum_partial};
use super::ranks::{expect_summable, own};
use super::replicas::expect_replicas;
use crate::module::{trainable, trainable_mut};
use crate::parameter::{Event, Parameter};
use crate::{Error, Layer, Result};
use fp8_dist::{ProcessGroup, ReduceOp};
use fp8_kernels::Tensor;
use fp8_recipe::{Backward, GradientSink};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The options of [`Gradients`], whose example sets them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientsOptions {
    /// The bytes of gradients that are summed by one call. Buckets are filled in the order in which backward finishes with
    /// parameters; a larger gradient has one of its own. Default: `None`, a sixteenth of the bytes of all gradients, from 1 MiB to 25
    /// MiB.
    pub bucket_bytes: Option<usize>,
    /// Whether gradients are summed while backward goes on. If false, [`Gradients::finish`] sums them, on no thread or queue of its
    /// own. Default: true.
    pub overlap: bool,
}

impl Default for GradientsOptions {
    fn default() -> Self {
        Self { bucket_bytes: None, overlap: true }
    }
}

/// Sums gradients over the ranks of a group while backward goes on: a faster [`all_reduce_gradients`](crate::all_reduce_gradients), with
/// the same bits on CPUs.
///
/// [`watch`](Self::watch) connects it to the backward scope of a step; with several microbatches, to that of the last one.
/// [`Gpt`](crate::Gpt) and [`Stack`](crate::Stack) then hand over the gradients of each block as soon as it is done, and models of your own
/// do so with [`hand_over_gradients`](crate::hand_over_gradients). Gradients are moved, not copied: until [`finish`](Self::finish) puts them
/// back, `main_grad` is a tensor without elements. Gradients that nobody has handed over are summed by `finish`.
///
/// On CPUs sums are computed by another thread, on GPUs on another queue than the device's other work.
///
/// ```
/// use fp8_nn::fp8_dist::local;
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
/// use std::{sync::Arc, thread, time::Duration};
///
/// let run = |group: Arc<dyn ProcessGroup>| -> Result<()> {
///     let fc = |path: &str, seed| {
///         let options = LinearOptions { in_features: 16, out_features: 16, ..Default::default() };
///         Linear::new(path, options, &Device::cpu(), &mut StdRng::seed_from_u64(seed)) // the same on both ranks
///     };
///     let mut model = Stack(vec![Box::new(fc("first", 1)?), Box::new(fc("second", 2)?)]);
///     let mut scaling = Scaling::new(&model, &Device::cpu())?;
///     scaling.set_group(group.clone());
///     let options = GradientsOptions { bucket_bytes: Some(1024), ..Default::default() };
///     let mut gradients = Gradients::new(&model, group.clone(), options)?;
///
///     let x = Tensor::full(group.rank() as f32, [4, 16], DType::F32, &Device::cpu())?;
///     let (y, saved) = scaling.in_autocast(&DelayedScaling::default().into(), |cx| model.forward(cx, &x))?;
///     let mut cx = scaling.backward()?;
///     gradients.watch(&mut cx, &mut model)?;
///     model.backward(&mut cx, saved, &y)?;
///     cx.commit()?;
///     gradients.finish(&mut model)?; // all gradients are sums over the ranks
///     assert_eq!(parameters(&model)[0].main_grad().numel(), 16 * 16);
///     Ok(())
/// };
/// thread::scope(|scope| {
///     let groups = local("dp", 2, Duration::from_secs(10))?.into_iter();
///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Gradients {
    group: Arc<dyn ProcessGroup>,
    options: GradientsOptions,
    /// The gradients of this step that were handed over, shared with the scope's sink.
    step: Option<Arc<Mutex<Buckets>>>,
}

impl Gradients {
    /// Compares the names, shapes and dtypes of the parameters with the other ranks'. Every rank calls it. With tensor parallelism, `group`
    /// is that of the replicas: see [`all_reduce_gradients`](crate::all_reduce_gradients).
    ///
    /// # Errors
    /// Two parameters of one name; a group with ranks that have other parts of the model; ranks whose models differ; a rank that left or failed.
    pub fn new(
        model: &(impl Layer + ?Sized),
        group: Arc<dyn ProcessGroup>,
        options: GradientsOptions,
    ) -> Result<Self> {
        expect_unique(model)?;
        expect_replicas(model, &*group, "Gradients::new")?;
        if group.world_size() > 1 {
            let of = |parameter: &Parameter| {
                Arc::from(format!("{}: {} of {}", parameter.name(), parameter.shape(), parameter.dtype()))
            };
            let names: Vec<Arc<str>> = trainable(model).into_iter().map(of).collect();
            group.agree_on_names("gradients", &names)?;
        }
        Ok(Self { group, options, step: None })
    }

    /// Sums what the model hands over in the backward scope `cx`. Call it before the backward pass of a step's last microbatch.
    ///
    /// Gradients that the scope rounds stochastically are rounded with random numbers of this rank. For those of earlier microbatches,
    /// give each rank a seed of its own or call [`Scaling::set_replica`](fp8_recipe::Scaling::set_replica).
    ///
    /// # Errors
    /// As [`all_reduce_gradients`](crate::all_reduce_gradients): before the first reduction, and again after parameters were set or loaded,
    /// ranks compare them.
    pub fn watch(&mut self, cx: &mut Backward<'_>, model: &mut (impl Layer + ?Sized)) -> Result<()> {
        if self.group.world_size() == 1 {
            return Ok(());
        }
        cx.set_replica(self.group.rank());
        if !self.options.overlap {
            return Ok(());
        }
        // What an earlier step has left behind when it failed.
        let left = self.step.take();
        let restored = left.map_or(Ok(()), |left| put_back(model, &*self.group, lock(&left).wait().0));
        own(&*self.group, restored)?;
        before_reduction(model, &*self.group)?;
        before_partial_sums(model, &*self.group)?;
        let step = Arc::new(Mutex::new(Buckets::new(model, self.options.bucket_bytes)));
        cx.set_gradient_sink(Box::new(Sink { group: self.group.clone(), step: step.clone() }));
        self.step = Some(step);
        Ok(())
    }

    /// Waits until all gradients are summed, and puts them back. Call it after the backward scope, and before anything that reads
    /// gradients. On GPUs the host does not wait.
    ///
    /// # Errors
    /// As [`all_reduce_gradients`](crate::all_reduce_gradients). After an error of the group, gradients that were handed over may be gone: call
    /// [`zero_grad`](crate::zero_grad) before the next backward pass.
    pub fn finish(&mut self, model: &mut (impl Layer + ?Sized)) -> Result<()> {
        let group = &*self.group;
        match self.step.take() {
            Some(step) => sum_rest(model, group, &mut lock(&step), Way::Beside)?,
            None => {
                before_sums(model, group)?;
                if group.world_size() > 1 {
                    sum(model, group, Buckets::new(model, self.options.bucket_bytes))?;
                }
            }
        }
        sum_partial(model, group)
    }
}

/// Takes gradients on behalf of a scope.
#[derive(Debug)]
struct Sink {
    group: Arc<dyn ProcessGroup>,
    step: Arc<Mutex<Buckets>>,
}

impl GradientSink for Sink {
    fn group(&self) -> &str {
        self.group.id()
    }

    fn take(&mut self, name: &Arc<str>, gradient: Tensor) -> fp8_recipe::Result<()> {
        lock(&self.step).add(name, gradient, &*self.group, Way::Beside);
        Ok(()) // the errors of sums come when they are waited for
    }

    fn fail(&mut self, reason: &str) {
        self.group.poison(reason);
    }
}

/// Returns an error if two parameters have one name, by which gradients find back to them.
fn expect_unique(model: &(impl Layer + ?Sized)) -> Result<()> {
    let mut names = BTreeSet::new();
    match trainable(model).into_iter().find(|parameter| !names.insert(parameter.name())) {
        Some(second) => Err(Error::DuplicateParameter(second.name().clone())),
        None => Ok(()),
    }
}

/// Returns an error if the gradients cannot be summed over the replicas, and over the ranks that share layers. Nothing has changed then.
pub(super) fn before_sums(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    expect_unique(model)?;
    if group.world_size() > 1 {
        let mut all = trainable(model).into_iter();
        all.try_for_each(|parameter| expect_summable(parameter, group.id()))?;
        before_reduction(model, group)?;
    }
    before_partial_sums(model, group)
}

/// Sums all gradients while the caller waits.
pub(super) fn sum(
    model: &mut (impl Layer + ?Sized),
    group: &dyn ProcessGroup,
    mut buckets: Buckets,
) -> Result<()> {
    sum_rest(model, group, &mut buckets, Way::Blocking)
}

/// Sums the gradients that the model still has, and puts all back.
fn sum_rest(
    model: &mut (impl Layer + ?Sized),
    group: &dyn ProcessGroup,
    buckets: &mut Buckets,
    way: Way,
) -> Result<()> {
    let mut result = Ok(());
    for parameter in trainable_mut(model) {
        if parameter.gradient().is_away() {
            continue;
        }
        let name = parameter.name().clone();
        let taken = parameter.gradient().expect_summable(&name, group.id()).and_then(|()| {
            // A gradient that shares its storage gets new storage.
            match parameter.main_grad().holders() {
                0 => parameter.gradient_mut().take().map(Some),
                _ => Ok(None),
            }
        });
        match taken {
            Ok(Some(gradient)) => buckets.add(&name, gradient, group, way),
            Ok(None) => {
                buckets.close(group, way); // so that calls have the order of the parameters
                let event = Event::Summed { group: group.id().into() };
                let summed = parameter.gradient_mut().change(event, |gradient| {
                    *gradient = group.all_reduce(&format!("gradient of {name}"), gradient, ReduceOp::Sum)?;
                    Ok(())
                });
                result = result.and(summed);
            }
            Err(error) => result = result.and(own(group, Err(error))),
        }
    }
    buckets.close(group, way);
    let (sums, waited) = buckets.wait();
    put_back(model, group, sums)?;
    waited.and(result)
}

/// Puts sums back in their parameters.
fn put_back(
    model: &mut (impl Layer + ?Sized),
    group: &dyn ProcessGroup,
    sums: Vec<(Arc<str>, Tensor)>,
) -> Result<()> {
    let id: Arc<str> = group.id().into();
    let mut sums: BTreeMap<Arc<str>, Tensor> = sums.into_iter().collect();
    trainable_mut(model).into_iter().try_for_each(|parameter| match sums.remove(parameter.name()) {
        Some(sum) => parameter.gradient_mut().put_back(sum, id.clone()),
        None => Ok(()),
    })
}

fn lock(step: &Mutex<Buckets>) -> MutexGuard<'_, Buckets> {
    step.lock().unwrap_or_else(PoisonError::into_inner)
}
