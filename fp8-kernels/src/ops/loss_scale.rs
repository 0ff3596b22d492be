//! Loss scaling on the device: gradients are multiplied by a scale, overflow is noticed, and the scale adapts.

use super::adamw::{check_all, upload_on_replay};
use super::{AdamWGroup, SkippedSteps};
use crate::backend::dispatch;
use crate::cells::Counts;
use crate::{Arena, Cell, DType, Device, Error, Fp8Tensor, Result, Tensor};

/// The numbers of a [`LossScale`], as a checkpoint stores them.
///
/// ```
/// use fp8_kernels::ops::LossScaleState;
/// let state = LossScaleState { scale: 1024.0, ..Default::default() };
/// assert_eq!((state.growth_tracker, state.skipped_steps), (0, 0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleState {
    /// The factor of the gradients, finite and greater than 0. Default: 65536.
    pub scale: f32,
    /// The number of updates without overflow since the scale last changed. Default: 0.
    pub growth_tracker: u64,
    /// The number of updates with overflow. Default: 0.
    pub skipped_steps: u64,
}

impl Default for LossScaleState {
    fn default() -> Self {
        Self { scale: 65536.0, growth_tracker: 0, skipped_steps: 0 }
    }
}

impl LossScaleState {
    fn check(&self, op: &'static str) -> Result<()> {
        if self.scale.is_finite() && self.scale >= f32::MIN_POSITIVE {
            return Ok(());
        }
        let remedy = "give a finite number of at least 2⁻¹²⁶".to_owned();
        Err(Error::Option { op, option: "scale", value: self.scale.to_string(), remedy })
    }
}

/// A factor of gradients in device memory, with what is needed to adapt it.
///
/// Gradients in f16 underflow below 6e-8 and overflow above 65504. Multiplying the gradient of the loss by a large factor
/// keeps small gradients representable; the optimizer divides by it. If a gradient overflows, the step is skipped and the
/// factor made smaller. All of this happens on the device, so the host does not wait and recorded steps adapt too.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let scale = ops::LossScale::new(&ops::LossScaleState { scale: 1024.0, ..Default::default() }, &cpu)?;
/// let dy = ops::apply_loss_scale(&Tensor::scalar(0.5, &cpu)?, &scale)?;
/// assert_eq!(dy.item()?, 512.0);
///
/// let norm = Tensor::scalar(f32::INFINITY, &cpu)?; // of gradients, one of which overflowed
/// ops::check_finite(&norm, scale.overflow())?;
/// let rule = ops::LossScaleRule::default();
/// ops::update_loss_scale(&scale, Some(&rule))?;
/// let state = scale.state()?;
/// assert_eq!((state.scale, state.skipped_steps), (512.0, 1));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LossScale {
    device: Device,
    scale: Cell,
    overflow: Cell,
    /// The growth tracker and the number of skipped steps.
    counts: Counts,
}

impl LossScale {
    /// Allocates a scale on `device`.
    ///
    /// # Errors
    /// A scale that is not finite or less than 2⁻¹²⁶; a step is being recorded; the device is out of memory or failed.
    pub fn new(state: &LossScaleState, device: &Device) -> Result<Self> {
        let op = "loss_scale";
        state.check(op)?;
        device.expect_eager(op, "make the loss scale before the step is recorded")?;
        let counts = Counts::new(2, device)?;
        counts.write(&[state.growth_tracker, state.skipped_steps])?;
        let (scale, overflow) = (Cell::new(state.scale, device)?, Cell::new(0.0, device)?);
        Ok(Self { device: device.clone(), scale, overflow, counts })
    }

    /// Returns the numbers. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// A step is being recorded; the device failed; none on the CPU.
    pub fn state(&self) -> Result<LossScaleState> {
        let counts = self.counts.read(0..2)?;
        let [growth_tracker, skipped_steps] = [0, 1].map(|i| counts.get(i).copied().unwrap_or_default());
        Ok(LossScaleState { scale: self.scale.read()?, growth_tracker, skipped_steps })
    }

    /// Replaces the numbers, in place, and clears [`overflow`](Self::overflow).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn set_state(&self, state: &LossScaleState) -> Result<()> {
        let op = "loss_scale";
        state.check(op)?;
        self.device.expect_eager(op, "set the loss scale before the step is recorded")?;
        self.counts.write(&[state.growth_tracker, state.skipped_steps])?;
        self.overflow.write(0.0)?;
        self.scale.write(state.scale)
    }

    /// Returns the cell that is 1 if a gradient overflowed since the last [`update_loss_scale`], and else 0.
    pub fn overflow(&self) -> &Cell {
        &self.overflow
    }

    /// Returns the device that the scale is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the cell of the scale.
    pub(crate) fn cell(&self) -> &Cell {
        &self.scale
    }

    /// Returns the growth tracker and the number of skipped steps.
    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// The rule by which [`update_loss_scale`] adapts a scale. The defaults are those of PyTorch's `GradScaler`.
///
/// See [`update_loss_scale`] for an example.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleRule {
    /// Factor of the scale after `growth_interval` updates without overflow, greater than 1. Default: 2.
    pub growth_factor: f32,
    /// Factor of the scale after an overflow, greater than 0 and less than 1. Default: 0.5.
    pub backoff_factor: f32,
    /// The number of consecutive updates without overflow after which the scale grows, at least 1. Default: 2000.
    pub growth_interval: u64,
}

impl Default for LossScaleRule {
    fn default() -> Self {
        Self { growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000 }
    }
}

impl LossScaleRule {
    /// Checks the options.
    ///
    /// # Errors
    /// A `growth_factor` that is not finite and greater than 1; a `backoff_factor` that is not between 0 and 1; a
    /// `growth_interval` of 0.
    ///
    /// ```
    /// use fp8_kernels::ops::LossScaleRule;
    /// let error = LossScaleRule { growth_factor: 1.0, ..Default::default() }.check("scaler").unwrap_err();
    /// assert!(error.to_string().contains("growth_factor"));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn check(&self, op: &'static str) -> Result<()> {
        let error = |option, value: String, remedy: &str| {
            Err(Error::Option { op, option, value, remedy: remedy.to_owned() })
        };
        let Self { growth_factor, backoff_factor, growth_interval } = *self;
        if !(growth_factor.is_finite() && growth_factor > 1.0) {
            return error(
                "growth_factor",
                growth_factor.to_string(),
                "give a finite number greater than 1, such as 2",
            );
        }
        if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
            return error(
                "backoff_factor",
                backoff_factor.to_string(),
                "give a number between 0 and 1, such as 0.5",
            );
        }
        if growth_interval == 0 {
            return error("growth_interval", "0".to_owned(), "give at least 1");
        }
        Ok(())
    }
}

/// Returns `x · scale`, computed in f32 and rounded once to the dtype of `x`. It multiplies the gradient of a loss before
/// backward.
///
/// The scale is read on the device when the work runs, so a recorded call uses the scale of each replay. [`LossScale`] has an
/// example.
///
/// # Errors
/// A dtype that is not a float; a scale on another device.
pub fn apply_loss_scale(x: &Tensor, scale: &LossScale) -> Result<Tensor> {
    let op = "apply_loss_scale";
    x.expect_float(op, "x")?;
    x.device().expect_same(op, &scale.device)?;
    dispatch!(x.device(), loss_scale::apply_loss_scale(x, scale))
}

/// Multiplies `x` by `1 / scale` in place, for gradients that contain the scale and for their norm. `name` identifies `x` in
/// errors.
///
/// The product is computed in f32 and rounded once; the quotient `1 / scale` is rounded to f32 before.
///
/// # Errors
/// Shared storage; a dtype that is not a float; a scale on another device.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let scale = ops::LossScale::new(&ops::LossScaleState { scale: 8.0, ..Default::default() }, &cpu)?;
/// let mut main_grad = Tensor::from_vec(vec![4.0f32, -16.0], [2], &cpu)?;
/// ops::undo_loss_scale(&mut main_grad, &scale, "fc1.weight.main_grad")?;
/// assert_eq!(main_grad.to_vec::<f32>()?, [0.5, -2.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn undo_loss_scale(x: &mut Tensor, scale: &LossScale, name: &str) -> Result<()> {
    let op = "undo_loss_scale";
    x.expect_float(op, "x")?;
    x.device().expect_same(op, &scale.device)?;
    dispatch!(x.device(), loss_scale::undo_loss_scale(x, scale, name))
}

/// Sets `overflow` to 1 if `norm`, one f32, is infinite or NaN; else leaves it as it is.
///
/// `norm` is usually the [`grad_norm`](super::grad_norm()) of all gradients, and `overflow` a cell of 0 or 1, such as
/// [`LossScale::overflow`]. Neither is read to the host. [`LossScale`] has an example.
///
/// # Errors
/// A norm that is not one f32; a cell on another device.
pub fn check_finite(norm: &Tensor, overflow: &Cell) -> Result<()> {
    let op = "check_finite";
    expect_norm(op, norm, overflow.device())?;
    dispatch!(norm.device(), loss_scale::check_finite(norm, overflow))
}

/// Sets `overflow` to 1 if a value in row 0 of `arena` is infinite or NaN; else leaves it as it is.
///
/// Quantizing saturates an infinite gradient, so that the products of its codes are finite. Its amax is infinite.
///
/// # Errors
/// A cell on another device; the device failed.
///
/// ```
/// use fp8_kernels::{Arena, ArenaOptions, Cell, Device, ops};
/// let arena = Arena::new(2, ArenaOptions::default(), &Device::cpu())?;
/// let overflow = Cell::new(0.0, &Device::cpu())?;
/// arena.merge_staged(&[3.5, f32::INFINITY])?;
/// ops::check_amaxes(&arena, &overflow)?;
/// assert_eq!(overflow.read()?, 1.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn check_amaxes(arena: &Arena, overflow: &Cell) -> Result<()> {
    arena.device().expect_same("check_amaxes", overflow.device())?;
    dispatch!(arena.device(), loss_scale::check_amaxes(arena, overflow))
}

fn expect_norm(op: &'static str, norm: &Tensor, device: &Device) -> Result<()> {
    norm.expect_dtype(op, "norm", DType::F32)?;
    device.expect_same(op, norm.device())?;
    if norm.numel() == 1 {
        return Ok(());
    }
    let remedy = "expected one number, the norm".to_owned();
    Err(Error::Shape { op, shape: *norm.shape(), remedy })
}

/// Adapts the scale after a step, as PyTorch's `GradScaler.update` does, and clears [`LossScale::overflow`].
///
/// If a gradient overflowed, the step counts as skipped, the scale is multiplied by `backoff_factor`, but not made less than
/// 2⁻¹²⁶, and the growth tracker becomes 0. Otherwise the tracker is incremented. When it reaches `growth_interval`, it becomes
/// 0 and the scale is multiplied by `growth_factor`, unless the product is infinite. Without a `rule` the scale is constant,
/// and only skipped steps are counted.
///
/// # Errors
/// A rule that [`LossScaleRule::check`] refuses; the device failed.
///
/// ```
/// use fp8_kernels::{Device, ops};
/// let scale = ops::LossScale::new(&ops::LossScaleState::default(), &Device::cpu())?;
/// let rule = ops::LossScaleRule { growth_interval: 2, ..Default::default() };
/// for expected in [65536.0, 131072.0, 131072.0, 262144.0] {
///     ops::update_loss_scale(&scale, Some(&rule))?;
///     assert_eq!(scale.state()?.scale, expected);
/// }
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn update_loss_scale(scale: &LossScale, rule: Option<&LossScaleRule>) -> Result<()> {
    rule.map_or(Ok(()), |rule| rule.check("update_loss_scale"))?;
    dispatch!(scale.device, loss_scale::update_loss_scale(scale, rule))
}

/// The number of updates that an optimizer has made, counted on the device. AdamW's bias corrections use it where skipped
/// steps do not count. Clones share the count. [`adamw_groups_scaled`] has an example.
#[derive(Debug, Clone)]
pub struct UpdateCount {
    device: Device,
    counts: Counts,
}

impl UpdateCount {
    /// Allocates a count of `updates`.
    ///
    /// # Errors
    /// A step is being recorded; the device is out of memory or failed.
    pub fn new(updates: u64, device: &Device) -> Result<Self> {
        device.expect_eager("adamw", "the optimizer's first step makes its state: run it before")?;
        let counts = Counts::new(1, device)?;
        counts.write(&[updates])?;
        Ok(Self { device: device.clone(), counts })
    }

    /// Returns the count. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// A step is being recorded; the device failed; none on the CPU.
    pub fn read(&self) -> Result<u64> {
        Ok(self.counts.read(0..1)?.first().copied().unwrap_or(0))
    }

    /// Replaces the count, after the work queued so far.
    ///
    /// # Errors
    /// A step is being recorded; the device failed; none on the CPU.
    pub fn set(&self, updates: u64) -> Result<()> {
        self.device.expect_eager("adamw", "load the optimizer's state before the step is recorded")?;
        self.counts.write(&[updates])
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// The values that decide whether a step of [`adamw_groups_scaled`] is skipped, and the counts that it updates.
#[derive(Debug, Clone, Copy)]
pub struct ScaledStep<'a> {
    /// The updates so far. The step's number in the bias corrections is one more.
    pub updates: &'a UpdateCount,
    /// The loss scale. The step is skipped if its [`overflow`](LossScale::overflow) is set. `None`: nothing but the norm
    /// decides, and a skipped step counts in `updates`.
    pub loss_scale: Option<&'a LossScale>,
    /// Whether the gradients still contain the scale. The update then multiplies them by `1 / scale`.
    pub gradients_are_scaled: bool,
    /// The norm of the gradients, one f32. The step is skipped if it is infinite or NaN, and that sets the overflow of the
    /// loss scale. `None`: the loss scale alone decides.
    pub norm: Option<&'a Tensor>,
    /// Counts the skipped steps.
    pub skipped: &'a SkippedSteps,
}

impl ScaledStep<'_> {
    /// Checks that everything is on `device`.
    pub(super) fn check(&self, op: &'static str, device: &Device) -> Result<()> {
        device.expect_same(op, &self.updates.device)?;
        device.expect_same(op, self.skipped.device())?;
        self.loss_scale.map_or(Ok(()), |scale| device.expect_same(op, &scale.device))?;
        self.norm.map_or(Ok(()), |norm| expect_norm(op, norm, device))
    }
}

/// Updates groups of parameters as [`adamw_groups`](super::adamw_groups) does, for a step that the device numbers.
///
/// A step that is skipped because of a loss scale changes no parameter, no moment, and not the number of the step in the bias
/// corrections. The number is therefore counted in device memory, and the factors that depend on it are computed there, in
/// pairs of f32. They equal those of [`AdamWStep`](super::AdamWStep) within one ulp, and have equal bits on every backend. The
/// `step` of each group's [`AdamWFactors`](super::AdamWFactors) is ignored.
///
/// # Errors
/// Those of [`adamw_groups`](super::adamw_groups); a scale or count on another device.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let scale = ops::LossScale::new(&ops::LossScaleState { scale: 8.0, ..Default::default() }, &cpu)?;
/// let updates = ops::UpdateCount::new(0, &cpu)?;
/// let factors = ops::AdamWFactors::new(&ops::AdamWStep { lr: 0.5, weight_decay: 0.0, ..Default::default() }, &cpu)?;
/// let (skipped, scalar) = (ops::SkippedSteps::new(&cpu)?, |value: f32| Tensor::scalar(value, &cpu));
/// let (mut w, mut m, mut v) = (scalar(1.0)?, scalar(0.0)?, scalar(0.0)?);
/// for main_grad in [f32::INFINITY, 24.0] {
///     let grad = scalar(main_grad)?;
///     ops::check_finite(&grad, scale.overflow())?;
///     let tensor = ops::AdamWTensor {
///         name: "w",
///         param: &mut w,
///         main_grad: &grad,
///         exp_avg: &mut m,
///         exp_avg_sq: &mut v,
///         main_param: None,
///         slot: None,
///     };
///     let step = ops::ScaledStep {
///         updates: &updates,
///         loss_scale: Some(&scale),
///         gradients_are_scaled: true,
///         norm: None,
///         skipped: &skipped,
///     };
///     ops::adamw_groups_scaled(&mut [(&mut [tensor], &factors)], &step)?;
///     ops::update_loss_scale(&scale, Some(&ops::LossScaleRule::default()))?;
/// }
/// assert_eq!((scale.state()?.scale, skipped.read()?, updates.read()?), (4.0, 1, 1));
/// assert!((w.item()? - 0.5).abs() < 1e-6); // the first step is as long as `lr`
/// assert!((m.item()? - 0.6).abs() < 1e-6); // of a gradient of 24 / 4
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn adamw_groups_scaled(
    groups: &mut [AdamWGroup<'_, '_>],
    step: &ScaledStep<'_>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let op = "adamw_groups_scaled";
    let Some(device) = check_all(op, groups)? else {
        return Ok(groups.iter().map(|_| Vec::new()).collect());
    };
    step.check(op, &device)?;
    upload_on_replay(groups, &device);
    dispatch!(device, loss_scale::adamw_groups_scaled(groups, step))
}
