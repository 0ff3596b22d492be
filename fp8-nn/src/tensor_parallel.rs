//! Tensor and sequence parallelism: layers whose weights, and activations, are cut over ranks.

mod gathers;
mod reduce;
mod tokens;

use crate::{Error, Placement, Result};
use fp8_dist::{ProcessGroup, SharedScales};
use fp8_kernels::DType;
use fp8_recipe::{AmaxGroup, Forward, SlotName};
pub use gathers::Gather;
use gathers::Gathers;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Options of [`TensorParallel`].
///
/// ```
/// use fp8_nn::{ReduceDtype, TensorParallelOptions};
/// let options = TensorParallelOptions::default();
/// assert!(!options.sequence_parallel && options.reduce == ReduceDtype::Output);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorParallelOptions {
    /// Whether norms, residual additions and dropout between the cut layers run on a part of the tokens on each rank (sequence
    /// parallelism), so that their activations take 1 / n of the memory. Inputs and gradients that the cut layers read whole are
    /// gathered in FP8 where the recipe's scales allow it, as [`TensorParallel::gathers`] tells. Default: false, each rank has all tokens.
    pub sequence_parallel: bool,
    /// The dtype in which the results of ranks are added. Default: [`ReduceDtype::Output`].
    pub reduce: ReduceDtype,
}

/// The dtype in which ranks add their parts of a product. See [`TensorParallelOptions`].
///
/// ```
/// use fp8_nn::{ReduceDtype, TensorParallelOptions};
/// let options = TensorParallelOptions { reduce: ReduceDtype::F32, ..Default::default() };
/// assert_ne!(options, TensorParallelOptions::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReduceDtype {
    /// That of the result: parts are rounded to it before they are added.
    #[default]
    Output,
    /// f32, rounded once after the sum, as one device does it. For 16-bit results this sends twice the bytes.
    F32,
}

/// The part of the output or of the input of a [`Linear`](crate::Linear) that a rank computes.
///
/// | mode | weight of this rank | input | output |
/// |---|---|---|---|
/// | `Column` | some rows: `[out_features / n, in_features]` | all features | this rank's features |
/// | `Row` | some columns: `[out_features, in_features / n]` | this rank's features | all features, summed over the ranks |
///
/// A column layer is followed by a row layer, with elementwise operations or attention between: then only the input and the output of
/// the pair involve other ranks. With sequence parallelism, the input of the first and the output of the second are this rank's tokens.
///
/// ```
/// use fp8_nn::{ParallelMode, prelude::*};
/// assert_eq!(LinearOptions::default().parallel_mode, ParallelMode::Column);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ParallelMode {
    /// Features of the output are cut.
    #[default]
    Column,
    /// Features of the input are cut.
    Row,
}

/// The ranks that share the layers of a model (tensor parallelism), as an option of [`Linear`](crate::Linear) and of the layers and
/// models that contain it. Clones are the same ranks.
///
/// Each rank has the same number of heads and of features of the MLPs. Of the vocabulary, which the embedding and the head share, some
/// ranks have one row more than others if it does not divide. The weights are those that one device would draw, cut; names of parameters and slots are the same.
///
/// - All ranks of the group run the same scopes with the same data. Amaxes are reduced over a group that has all of them
///   ([`Mesh::amax_group`](fp8_dist::Mesh::amax_group)).
/// - After backward, [`all_reduce_gradients`](crate::all_reduce_gradients) or [`Gradients`](crate::Gradients) over the data-parallel group
///   ([`Mesh::dp`](fp8_dist::Mesh::dp), also if it has one rank) completes gradients of which ranks have parts.
/// - The dropout seed, from which the random numbers of stochastic rounding come, too, is the same on all ranks of the group.
///
/// ```
/// use fp8_nn::fp8_dist::{Mesh, MeshOptions};
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
/// use fp8_nn::{TensorParallel, TensorParallelOptions};
/// use std::{sync::Arc, thread, time::Duration};
///
/// let run = |world: Arc<dyn ProcessGroup>| -> Result<f32> {
///     let (device, mut rng) = (Device::cpu(), StdRng::seed_from_u64(1));
///     let mesh = Mesh::new(world, &MeshOptions { dp: 1, tp: 2 })?;
///     let options = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
///     let tensor_parallel = TensorParallel::new(mesh.tp().clone(), &options)?;
///     let attention = AttentionOptions { num_attention_heads: 4, max_seq_length: 8, ..Default::default() };
///     let layer = TransformerLayerOptions {
///         hidden_size: 32,
///         ffn_hidden_size: 64,
///         attention,
///         tensor_parallel,
///         ..Default::default()
///     };
///     let options = GptOptions { vocab_size: 50, num_layers: 2, layer, ..Default::default() };
///     let mut model = Gpt::new("gpt", &options, &device, &mut rng)?;
///     let mut scaling = Scaling::new(&model, &device)?;
///     scaling.set_group(mesh.amax_group());
///     let mut optimizer = AdamW::new(AdamWOptions::default())?;
///     let ids = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 6, 7, 8], [1, 8], &device)?;
///     let targets = Tensor::from_vec(vec![2i32, 3, 4, 5, 6, 7, 8, 9], [1, 8], &device)?;
///     let (loss, saved) =
///         scaling.in_autocast(&DelayedScaling::default().into(), |cx| model.loss(cx, &ids, &targets))?;
///     scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
///     all_reduce_gradients(&mut model, &**mesh.dp())?;
///     let norm = clip_grad_norm(&mut model, 1.0)?; // of the whole model
///     optimizer.step_with_norm(&mut model, 1e-3, &norm)?;
///     Ok(loss.item()?)
/// };
/// thread::scope(|scope| {
///     let worlds = local("world", 2, Duration::from_secs(10)).unwrap().into_iter();
///     let ranks: Vec<_> = worlds.map(|world| scope.spawn(move || run(world).unwrap())).collect();
///     let losses: Vec<f32> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
///     assert_eq!(losses[0], losses[1]);
/// });
/// ```
#[derive(Clone)]
pub struct TensorParallel(Arc<Inner>);

struct Inner {
    group: Arc<dyn ProcessGroup>,
    options: TensorParallelOptions,
    scales: SharedScales,
    gathers: Gathers,
    /// The dropout seed that the ranks have compared.
    seed: Mutex<Option<u64>>,
}

/// Short, since it is part of every layer's.
impl fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sequence = if self.is_sequence_parallel() { ", sequence parallel" } else { "" };
        write!(f, "TensorParallel({}, rank {} of {}{sequence})", self.group().id(), self.rank(), self.size())
    }
}

impl TensorParallel {
    /// Creates the option for the ranks of `group`, which all call this with the same options. Returns `None` for a group of one rank,
    /// whose layers are whole.
    ///
    /// # Errors
    /// Options that differ between the ranks; a failure of the group.
    pub fn new(group: Arc<dyn ProcessGroup>, options: &TensorParallelOptions) -> Result<Option<Self>> {
        if group.world_size() == 1 {
            return Ok(None);
        }
        group.agree_on_names("tensor parallelism", &[format!("{options:?}").into()])?;
        let (scales, gathers, seed) = (SharedScales::default(), Gathers::default(), Mutex::new(None));
        let inner = Inner { group, options: *options, scales, gathers, seed };
        Ok(Some(Self(Arc::new(inner))))
    }

    /// Returns the ranks.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.0.group
    }

    /// Returns the options.
    pub fn options(&self) -> &TensorParallelOptions {
        &self.0.options
    }

    /// Returns the tensors that recipes in FP8 have had gathered so far (sequence parallelism), sorted by name. It says where values were
    /// gathered in place of codes, which takes twice the bytes in 16 bits and four times in f32.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::{TensorParallel, TensorParallelOptions};
    /// use std::{sync::Arc, thread, time::Duration};
    ///
    /// let run = |group: Arc<dyn ProcessGroup>| -> Result<()> {
    ///     let options = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
    ///     let tensor_parallel = TensorParallel::new(group.clone(), &options)?;
    ///     let options = LinearOptions {
    ///         in_features: 64,
    ///         out_features: 64,
    ///         tensor_parallel: tensor_parallel.clone(),
    ///         ..Default::default()
    ///     };
    ///     let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
    ///     let mut scaling = Scaling::new(&fc, &Device::cpu())?;
    ///     let x = Tensor::full(1.0, [2, 64], DType::F32, &Device::cpu())?; // two of four tokens
    ///     let (y, saved) = scaling.in_autocast(&Mxfp8::default().into(), |cx| fc.forward(cx, &x))?;
    ///     scaling.in_backward(|cx| fc.backward(cx, saved, &y))?;
    ///     let gathers = tensor_parallel.map(|ranks| ranks.gathers()).unwrap_or_default();
    ///     let lines: Vec<String> = gathers.iter().map(|gather| gather.to_string()).collect();
    ///     assert_eq!(
    ///         lines,
    ///         [
    ///             "fc.input: gathered in FP8",
    ///             "fc.input, again for its weight gradient: gathered in high precision", // its blocks have 32 tokens
    ///         ]
    ///     );
    ///     Ok(())
    /// };
    /// thread::scope(|scope| {
    ///     let groups = local("tp", 2, Duration::from_secs(10))?.into_iter();
    ///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    /// })?;
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn gathers(&self) -> Vec<Gather> {
        self.0.gathers.all()
    }

    /// Notes a gather of a tensor that is quantized.
    pub(crate) fn note_gather(&self, slot: &SlotName, again: bool, in_fp8: bool) {
        self.0.gathers.note(slot, again, in_fp8);
    }

    /// The group as scopes know it.
    pub(crate) fn amax_group(&self) -> Arc<dyn AmaxGroup> {
        self.0.group.clone()
    }

    pub(crate) fn rank(&self) -> usize {
        self.group().rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.group().world_size()
    }

    pub(crate) fn is_sequence_parallel(&self) -> bool {
        self.0.options.sequence_parallel
    }

    /// The placement of a parameter that each rank applies to the tokens that it has.
    pub(crate) fn placement_by_tokens(&self) -> Placement {
        if self.is_sequence_parallel() { Placement::Partial } else { Placement::Whole }
    }

    pub(crate) fn scales(&self) -> &SharedScales {
        &self.0.scales
    }

    /// The dtype of a rank's part of a sum whose result has this dtype.
    pub(crate) fn partial_dtype(&self, dtype: DType) -> DType {
        match self.0.options.reduce {
            ReduceDtype::Output => dtype,
            ReduceDtype::F32 => DType::F32,
        }
    }

    /// Refuses a size that the ranks cannot share evenly.
    pub(crate) fn expect_even(&self, layer: &str, option: &'static str, size: usize) -> Result<()> {
        let ranks = self.size();
        if size.is_multiple_of(ranks) {
            return Ok(());
        }
        let divisors = (1..=size.min(1 << 16)).filter(|ranks| size.is_multiple_of(*ranks));
        let fits: Vec<String> = divisors.take(8).map(|ranks| ranks.to_string()).collect();
        Err(Error::Option {
            part: layer.to_owned(),
            option,
            value: size.to_string(),
            remedy: format!(
                "{ranks} ranks of tensor parallelism cannot share it evenly: expected a multiple of {ranks}, or {} ranks",
                fits.join(", ")
            ),
        })
    }

    /// Checks the scopes of a layer: see [`Forward::expect_shared_scales`].
    pub(crate) fn expect_shared_scales(
        &self,
        cx: &Forward<'_>,
        slot: &SlotName,
        is_gathered: bool,
    ) -> Result<()> {
        Ok(cx.expect_shared_scales(slot, &self.group().members(), is_gathered)?)
    }

    /// Compares the dropout seeds of the ranks, once for each seed: masks, and random numbers of gradients, are parts of one.
    pub(crate) fn expect_one_seed(&self, seed: u64) -> Result<()> {
        let mut compared = self.0.seed.lock().unwrap_or_else(PoisonError::into_inner);
        if *compared != Some(seed) {
            self.group().agree_on_names("the dropout seed", &[format!("dropout seed {seed}").into()])?;
            *compared = Some(seed);
        }
        Ok(())
    }
}
