//! Delayed scaling for one tensor that belongs to no model.

use crate::arenas::group::Agreed;
use crate::recipes::policy::{Policy, State};
use crate::{AmaxGroup, ArenaState, DelayedScaling, Direction, Error, RecipeLabel, Result, StateDigest};
use fp8_kernels::{
    Arena, Cell, Counters, Device, Encoding, Operand, Scale, ScaleRule, Slot, Tensor, UNSET, ops,
};
use std::sync::Arc;

/// Delayed scaling for one tensor outside a model: quantizes with the scale that the history gives, then updates both.
///
/// It needs no [`Scaling`](crate::Scaling) and no scope, as the quantizers of Transformer Engine for JAX, whose rules
/// [`with_jax_rules`](DelayedScaling::with_jax_rules) selects. Each call of [`quantize`](Self::quantize) is one iteration of the
/// history. The first tensor is quantized with its own scale, or with 1 under these rules and
/// [`with_te_rules`](DelayedScaling::with_te_rules). Ranks that quantize parts of one tensor share their amaxes through
/// [`set_group`](Self::set_group).
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor};
/// use fp8_recipe::{DelayedScaling, Direction, Quantizer};
///
/// let device = Device::cpu();
/// let mut quantizer = Quantizer::new(DelayedScaling::default(), Direction::Forward, &device)?;
/// let x8 = quantizer.quantize(&Tensor::from_vec(vec![3.5f32, -1.0], [2], &device)?)?;
/// assert!(x8.is_fp8());
/// assert_eq!(quantizer.scale()?, 128.0); // 448 / 3.5
/// let history = quantizer.amax_history()?;
/// assert_eq!((history.len(), history.last()), (1024, Some(&3.5)));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Quantizer {
    recipe: DelayedScaling,
    rule: ScaleRule,
    direction: Direction,
    encoding: Encoding,
    group: Option<Shared>,
    /// An arena of one slot. The next three are handles to its cells.
    arena: Arena,
    scale: Cell,
    amax: Cell,
    counters: Counters,
    /// The device failed while a call was undone; the next call tries again.
    is_unrestored: bool,
}

/// The group that shares a quantizer's amaxes.
#[derive(Debug)]
struct Shared {
    name: Arc<str>,
    group: Arc<dyn AmaxGroup>,
    agreed: Agreed,
}

/// The only slot of the arena.
const SLOT: usize = 0;

impl Quantizer {
    /// Creates a quantizer with an empty history. `direction` chooses the encoding under `Format::Hybrid`: E4M3 for forward,
    /// E5M2 for backward.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a device that is out of memory or failed.
    pub fn new(recipe: DelayedScaling, direction: Direction, device: &Device) -> Result<Self> {
        recipe.validate()?;
        let arena = Arena::new(1, recipe.arena_options(), device)?;
        let (Some(scale), Some(amax), Some(counters)) =
            (arena.scale(SLOT), arena.staging(SLOT), arena.counters(SLOT))
        else {
            return Err(Error::UnknownSlot("quantizer".into()));
        };
        Ok(Self {
            scale: scale.clone(),
            amax: amax.clone(),
            counters: counters.clone(),
            rule: recipe.rule(direction.any_role()),
            direction,
            encoding: recipe.fp8_format.encoding(direction),
            group: None,
            arena,
            recipe,
            is_unrestored: false,
        })
    }

    /// Sets the ranks that share this quantizer's amaxes, as [`Scaling::set_group`](crate::Scaling::set_group) does for a model.
    ///
    /// If the recipe has `reduce_amax`, each call of [`quantize`](Self::quantize) replaces the new amax by its maximum over the
    /// ranks before the history rolls, so that all ranks have the same scale for the next tensor. Every rank calls `quantize`
    /// equally often; a rank without elements passes a tensor of zero elements. `name` identifies the quantizer in the group:
    /// ranks that call quantizers of other names, recipes or states get an error and do not wait forever.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Arena, Device, Tensor};
    /// use fp8_recipe::{AmaxGroup, DelayedScaling, Direction, Quantizer, Result};
    /// use std::sync::Arc;
    ///
    /// /// A group whose other rank has always seen an amax of 7.
    /// #[derive(Debug)]
    /// struct Seven;
    ///
    /// impl AmaxGroup for Seven {
    ///     fn id(&self) -> &str {
    ///         "tp"
    ///     }
    ///     fn world_size(&self) -> usize {
    ///         2
    ///     }
    ///     fn agree_on_names(&self, _key: &str, _names: &[Arc<str>]) -> Result<()> {
    ///         Ok(())
    ///     }
    ///     fn all_reduce_max(&self, _key: &str, arena: &Arena) -> Result<()> {
    ///         Ok(arena.merge_staged(&[7.0])?)
    ///     }
    ///     fn poison(&self, _reason: &str) {}
    /// }
    ///
    /// let device = Device::cpu();
    /// let mut quantizer = Quantizer::new(DelayedScaling::default(), Direction::Forward, &device)?;
    /// quantizer.set_group("mlp.input", Arc::new(Seven));
    /// quantizer.quantize(&Tensor::from_vec(vec![3.5f32], [1], &device)?)?;
    /// assert_eq!(quantizer.scale()?, 64.0); // 448 / 7
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn set_group(&mut self, name: &str, group: Arc<dyn AmaxGroup>) {
        self.group = Some(Shared { name: name.into(), group, agreed: Agreed::default() });
    }

    /// Quantizes `x` with the present scale, with a transposed copy, then updates history and scale. The operand is always
    /// [`Operand::Fp8`].
    ///
    /// # Errors
    /// A dtype that is not a float; another device than the quantizer's; a user's function that returned no usable scale; a
    /// group whose ranks disagree, or one of whose ranks has left or failed. History and scale are as before then. In a group,
    /// the other ranks get an error, too.
    pub fn quantize(&mut self, x: &Tensor) -> Result<Operand> {
        let quantized = self.restore().and_then(|()| self.quantize_and_update(x));
        if let Err(error) = &quantized {
            // The caller gets the first error; if undoing fails as well, the next call tries again.
            let _ = self.roll_back();
            if let Some(Shared { name, group, .. }) = self.reducing() {
                group.poison(&format!("the quantizer `{name}` failed: {error}"));
            }
        }
        quantized
    }

    fn quantize_and_update(&mut self, x: &Tensor) -> Result<Operand> {
        let slot = Slot {
            encoding: self.encoding,
            scale: Scale::Cell { cell: &self.scale, first: &self.rule, keep: true },
            amax: Some(&self.amax),
            counters: Some(&self.counters),
            columnwise: true,
        };
        let operand = ops::quantize(x, &slot)?;
        self.reduce()?;
        ops::update_scales(&mut self.arena, &self.recipe.scale_update(&self.rule))?;
        Ok(operand)
    }

    /// Returns the group to reduce over, if the recipe asks for it and the group has other ranks.
    fn reducing(&self) -> Option<&Shared> {
        self.group.as_ref().filter(|shared| self.recipe.reduce_amax && shared.group.world_size() > 1)
    }

    /// Replaces the new amax by its maximum over the ranks.
    fn reduce(&mut self) -> Result<()> {
        let Some(Shared { name, group, agreed }) = self.reducing() else { return Ok(()) };
        let label = RecipeLabel::new(&self.recipe.key(), Some(group.id()));
        let key = format!("quantizer {name}, {} {label}", self.direction);
        let mut agreed = *agreed;
        let names = [name.clone()];
        agreed.reduce(&**group, &key, &self.arena, &names, || self.digests(&names, group.id()))?;
        if let Some(shared) = &mut self.group {
            shared.agreed = agreed;
        }
        Ok(())
    }

    /// Returns what ranks compare before the first reduction.
    fn digests(&self, names: &[Arc<str>], group: &str) -> Result<Vec<StateDigest>> {
        let scale = self.scale.read()?;
        let state = ArenaState {
            recipe: self.recipe.state_key(),
            group: Some(group.to_owned()),
            direction: self.direction,
            updates: self.arena.updates(),
            slots: names.to_vec(),
            scale: vec![if scale < 0.0 { UNSET } else { scale }],
            amax_history: self.arena.window(SLOT)?.into_iter().map(|amax| vec![amax]).collect(),
            last_updates: self.arena.last_updates()?,
            undetermined: Vec::new(),
            weights: Vec::new(),
            awaits_backward: false,
        };
        Ok(state.digests(""))
    }

    /// Repeats a [`roll_back`](Self::roll_back) that failed.
    fn restore(&mut self) -> Result<()> {
        if self.is_unrestored { self.roll_back() } else { Ok(()) }
    }

    fn roll_back(&mut self) -> Result<()> {
        self.is_unrestored = true;
        self.arena.roll_back()?;
        self.is_unrestored = false;
        Ok(())
    }

    /// Returns the scale that the next tensor will be quantized with; 1 before the first tensor.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn scale(&self) -> Result<f32> {
        Ok(self.scale.read()?.abs())
    }

    /// Returns the history, with `amax_history_len` rows: a 0 for the staging row, which is at rest between two tensors, then the
    /// amaxes of the last `amax_history_len` − 1 tensors, oldest first, with zeros before those of the first tensors.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn amax_history(&self) -> Result<Vec<f32>> {
        let mut history = vec![0.0];
        history.extend(self.arena.window(SLOT)?);
        Ok(history)
    }
}
