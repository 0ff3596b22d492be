//! AdamW, in place, one parameter or all of a step a call. In f32, with g = main_grad · grad_scale and t = step:
//!
//! 1. `p = p · (1 − lr·weight_decay)`
//! 2. `m = m + (1 − beta1)·(g − m)`, `v = beta2·v + (1 − beta2)·g²`
//! 3. `p = p − lr / (1 − beta1ᵗ) · m / (√v / √(1 − beta2ᵗ) + eps)`
//!
//! The factors are computed in f64 on the host and rounded to f32 once. With f32 main parameters those are updated and
//! rounded into `param`; without, `param` itself is updated in f32 and rounded once. The same bits for any number of
//! threads.
//!
//! A step can depend on the norm of its gradients ([`NormCheck`]): one that is not finite changes nothing.

use super::adamw_step::{AdamWStep, check_step};
#[cfg(feature = "cuda")]
use crate::backend::Backend;
use crate::backend::dispatch;
use crate::cells::Counts;
use crate::{DType, Device, Error, Fp8Tensor, Replayed, Result, Slot, Tensor};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// A step's numbers where the device reads them, so that a recorded step has new ones at each replay.
///
/// What was [`set`](Self::set) last counts when the update runs, or, for a recorded one, when its graph is launched.
#[derive(Debug)]
pub struct AdamWFactors {
    device: Device,
    step: Mutex<AdamWStep>,
    /// The device has older ones.
    is_stale: AtomicBool,
    #[cfg(feature = "cuda")]
    buffer: Option<crate::cuda::Buffer>,
}

impl AdamWFactors {
    /// For updates on `device`.
    ///
    /// # Errors
    /// As [`set`](Self::set); the device is out of memory or failed.
    pub fn new(step: &AdamWStep, device: &Device) -> Result<Arc<Self>> {
        check_step("adamw", step)?;
        device.expect_eager("adamw", "the optimizer's first step makes its state: run it before")?;
        let factors = Self {
            #[cfg(feature = "cuda")]
            buffer: match device.backend() {
                Backend::Cpu => None,
                Backend::Cuda(gpu) => Some(gpu.alloc(DType::F32, size_of::<super::Factors>() / 4)?),
            },
            device: device.clone(),
            step: Mutex::new(*step),
            is_stale: AtomicBool::new(true),
        };
        factors.upload()?;
        Ok(Arc::new(factors))
    }

    /// The numbers of the next step. While a step is being recorded they reach the device when it is launched.
    ///
    /// # Errors
    /// A step of 0, an option outside its range; the device failed.
    pub fn set(&self, step: &AdamWStep) -> Result<()> {
        check_step("adamw", step)?;
        *self.lock() = *step;
        self.is_stale.store(true, Relaxed);
        if self.device.capture_number().is_some() { Ok(()) } else { self.upload() }
    }

    /// The numbers as they are set.
    pub fn step(&self) -> AdamWStep {
        *self.lock()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        let elsewhere = || Error::Devices { op, lhs: self.device.to_string(), rhs: "a GPU".to_owned() };
        self.buffer.as_ref().map(crate::cuda::Buffer::ptr).ok_or_else(elsewhere)
    }

    /// A copy of the numbers: a panic while they are copied leaves them whole.
    fn lock(&self) -> std::sync::MutexGuard<'_, AdamWStep> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Replayed for AdamWFactors {
    fn upload(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let (Backend::Cuda(gpu), Some(buffer)) = (self.device.backend(), &self.buffer)
            && self.is_stale.swap(false, Relaxed)
        {
            let factors = super::Factors::new(&self.step());
            let written = gpu.write(buffer.ptr(), bytemuck::bytes_of(&factors));
            return written.inspect_err(|_| self.is_stale.store(true, Relaxed));
        }
        Ok(())
    }
}

/// Skips a step whose gradients have no finite norm. The device decides, so that the host waits for nothing and a recorded
/// step decides anew at each replay.
///
/// A skipped step changes no parameter, moment or f32 copy. Tensors with a slot are quantized as they are: their codes
/// are those of the parameters that have stayed.
#[derive(Debug, Clone, Copy)]
pub struct NormCheck<'a> {
    /// One f32, such as [`grad_norm`](super::grad_norm) of all gradients of the step. That is computed without overflow: it
    /// is infinite where a gradient is, and where the norm itself is greater than `f32::MAX`.
    pub norm: &'a Tensor,
    /// Counts the steps that were skipped.
    pub skipped: &'a SkippedSteps,
}

impl NormCheck<'_> {
    fn check(&self, op: &'static str, device: &Device) -> Result<()> {
        self.norm.expect_dtype(op, "norm", DType::F32)?;
        device.expect_same(op, self.norm.device())?;
        device.expect_same(op, &self.skipped.device)?;
        if self.norm.numel() == 1 {
            return Ok(());
        }
        Err(Error::Shape {
            op,
            shape: *self.norm.shape(),
            remedy: "expected one number, the norm".to_owned(),
        })
    }
}

/// A count of skipped steps, on a device. Clones share it.
#[derive(Debug, Clone)]
pub struct SkippedSteps {
    device: Device,
    counts: Counts,
}

impl SkippedSteps {
    /// None so far.
    ///
    /// # Errors
    /// A step that is being recorded, whose replays would need the count to be there already; the device is out of memory
    /// or failed.
    pub fn new(device: &Device) -> Result<Self> {
        device.expect_eager("adamw", "the optimizer's first step makes its state: run it before")?;
        Ok(Self { device: device.clone(), counts: Counts::new(1, device)? })
    }

    /// The count. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<u64> {
        Ok(self.counts.read(0..1)?.first().copied().unwrap_or(0))
    }

    /// Sets the count back to 0, behind the work queued so far.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset(&self) -> Result<()> {
        self.counts.reset(0..1)
    }

    /// One more, in host memory.
    pub(crate) fn add_one(&self) -> Result<()> {
        self.counts.cpu("adamw")?.iter().for_each(|count| {
            count.fetch_add(1, Relaxed);
        });
        Ok(())
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        Ok(self.counts.cuda(op)?.ptr())
    }
}

/// One tensor of [`adamw_many`].
#[derive(Debug)]
pub struct AdamWTensor<'a> {
    /// What errors call the parameter.
    pub name: &'a str,
    /// The parameter: f32, bf16 or f16.
    pub param: &'a mut Tensor,
    /// Its accumulated gradient, f32.
    pub main_grad: &'a Tensor,
    /// The first moment, f32.
    pub exp_avg: &'a mut Tensor,
    /// The second moment, f32.
    pub exp_avg_sq: &'a mut Tensor,
    /// The parameter in f32, if it is kept.
    pub main_param: Option<&'a mut Tensor>,
    /// How the new parameter is quantized, if it is.
    pub slot: Option<Slot<'a>>,
}

impl AdamWTensor<'_> {
    /// Dtypes, shapes and devices.
    fn check(&self, op: &'static str) -> Result<()> {
        let param = &*self.param;
        param.expect_float(op, "param")?;
        let pairs = [
            ("main_grad", "param and main_grad", Some(self.main_grad)),
            ("exp_avg", "param and exp_avg", Some(&*self.exp_avg)),
            ("exp_avg_sq", "param and exp_avg_sq", Some(&*self.exp_avg_sq)),
            ("main_param", "param and main_param", self.main_param.as_deref()),
        ];
        for (what, pair, tensor) in pairs {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(op, what, DType::F32)?;
            param.device().expect_same(op, tensor.device())?;
            param.expect_same_shape(op, pair, tensor)?;
        }
        self.slot.map_or(Ok(()), |slot| slot.expect_device(op, param.device()))
    }

    /// Whether nobody else holds what changes.
    fn check_unique(&self) -> Result<()> {
        let changed = [
            ("", Some(&*self.param)),
            (".exp_avg", Some(&*self.exp_avg)),
            (".exp_avg_sq", Some(&*self.exp_avg_sq)),
            (".main_param", self.main_param.as_deref()),
        ];
        for (part, tensor) in changed {
            let holders = tensor.map_or(0, Tensor::holders);
            if holders > 0 {
                return Err(Error::Shared { name: format!("{}{part}", self.name), holders });
            }
        }
        Ok(())
    }
}

/// Updates all `tensors` of one step, as [`adamw`] does one after the other, and quantizes those new parameters that have
/// a slot, as [`quantize`](super::quantize) would: the same bits in fewer passes over memory, and on a GPU in one launch.
/// Returns for each what was quantized. Everything is checked before anything changes.
///
/// # Errors
/// As [`adamw`]; tensors on different devices. Where a user's scale policy returns no usable scale, or memory for codes is
/// lacking, parameters may have been updated already.
///
/// ```
/// use fp8_kernels::{Cell, Device, Encoding, ScalePolicy, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let mut w = Tensor::from_vec(vec![1.0f32, -2.0], [1, 2], &cpu)?;
/// let grad = Tensor::from_vec(vec![-1.0f32, 1.0], [1, 2], &cpu)?;
/// let zeros = || Tensor::from_vec(vec![0.0f32; 2], [1, 2], &cpu);
/// let (mut m, mut v, scale) = (zeros()?, zeros()?, Cell::new(64.0, &cpu)?);
/// let first = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let tensor = ops::AdamWTensor {
///     name: "w",
///     param: &mut w,
///     main_grad: &grad,
///     exp_avg: &mut m,
///     exp_avg_sq: &mut v,
///     main_param: None,
///     slot: Some(Slot::fixed(Encoding::E4M3, &scale, &first)),
/// };
/// let step = ops::AdamWStep { lr: 0.5, weight_decay: 0.0, ..Default::default() };
/// let quantized = ops::adamw_many(&mut [tensor], &step)?;
/// let codes = quantized[0].as_ref().map(|q| q.dequantize(w.dtype())?.to_vec::<f32>()).transpose()?;
/// assert_eq!(codes, Some(vec![1.5, -2.5])); // one step of 0.5, and on the grid of E4M3
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn adamw_many(tensors: &mut [AdamWTensor<'_>], step: &AdamWStep) -> Result<Vec<Option<Fp8Tensor>>> {
    let op = "adamw_many";
    check_step(op, step)?;
    let Some(device) = check_all(op, tensors)? else { return Ok(Vec::new()) };
    device.expect_eager(op, "its numbers would be the same at each replay: use adamw_many_from")?;
    dispatch!(device, adamw::adamw_many(tensors, Numbers::Given(step)))
}

/// [`adamw_many`] with numbers that lie where the device reads them: for steps that are recorded.
///
/// # Errors
/// As [`adamw_many`]; numbers on another device.
pub fn adamw_many_from(
    tensors: &mut [AdamWTensor<'_>],
    factors: &Arc<AdamWFactors>,
) -> Result<Vec<Option<Fp8Tensor>>> {
    Ok(adamw_groups(&mut [(tensors, factors)], None)?.pop().unwrap_or_default())
}

/// Tensors that are updated with one set of numbers.
pub type AdamWGroup<'a, 't> = (&'a mut [AdamWTensor<'t>], &'a Arc<AdamWFactors>);

/// [`adamw_many_from`] for groups with numbers of their own, as with weight decay and without: all are made ready before
/// the first is updated. With a `check`, only if it lets the step pass.
///
/// # Errors
/// As [`adamw_many_from`]; a norm that is not one f32, or that is on another device.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let mut w = Tensor::from_vec(vec![1.0f32, 2.0], [2], &cpu)?;
/// let grad = Tensor::from_vec(vec![0.5, f32::INFINITY], [2], &cpu)?;
/// let zeros = || Tensor::from_vec(vec![0.0f32; 2], [2], &cpu);
/// let (mut m, mut v) = (zeros()?, zeros()?);
/// let (norm, skipped) = (ops::grad_norm(&[&grad])?, ops::SkippedSteps::new(&cpu)?);
/// let factors = ops::AdamWFactors::new(&ops::AdamWStep::default(), &cpu)?;
/// let tensor = ops::AdamWTensor {
///     name: "w",
///     param: &mut w,
///     main_grad: &grad,
///     exp_avg: &mut m,
///     exp_avg_sq: &mut v,
///     main_param: None,
///     slot: None,
/// };
/// let check = ops::NormCheck { norm: &norm, skipped: &skipped };
/// ops::adamw_groups(&mut [(&mut [tensor], &factors)], Some(check))?;
/// assert_eq!((w.to_vec::<f32>()?, skipped.read()?), (vec![1.0, 2.0], 1));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn adamw_groups(
    groups: &mut [AdamWGroup<'_, '_>],
    check: Option<NormCheck<'_>>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let op = "adamw_groups";
    let mut device: Option<Device> = None;
    for (tensors, factors) in &*groups {
        let Some(found) = check_all(op, tensors)? else { continue };
        found.expect_same(op, &factors.device)?;
        device.get_or_insert(found).expect_same(op, &factors.device)?;
    }
    let Some(device) = device else { return Ok(groups.iter().map(|_| Vec::new()).collect()) };
    check.map_or(Ok(()), |check| check.check(op, &device))?;
    for (tensors, factors) in &*groups {
        if !tensors.is_empty() {
            device.on_replay((*factors).clone());
        }
    }
    dispatch!(device, adamw::adamw_groups(groups, check))
}

/// Where an update finds its numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Numbers<'a> {
    Given(&'a AdamWStep),
    OnDevice(&'a AdamWFactors),
}

impl Numbers<'_> {
    /// As the host knows them.
    pub(crate) fn step(self) -> AdamWStep {
        match self {
            Self::Given(step) => *step,
            Self::OnDevice(factors) => factors.step(),
        }
    }
}

/// The device that all lie on, if there are any.
fn check_all(op: &'static str, tensors: &[AdamWTensor<'_>]) -> Result<Option<Device>> {
    let Some(first) = tensors.first() else { return Ok(None) };
    let device = first.param.device().clone();
    for tensor in tensors {
        device.expect_same(op, tensor.param.device())?;
        tensor.check(op)?;
        tensor.check_unique()?;
    }
    Ok(Some(device))
}

/// Updates `param` (f32, bf16 or f16) and its moments (f32), and `main_param` (f32) if there is one. Where an error is
/// returned nothing has changed. `name` is what it calls the parameter.
///
/// # Errors
/// Shapes that differ, other dtypes, shared storage, a step of 0, an option outside its range.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let mut w = Tensor::scalar(1.0, &cpu)?;
/// let (mut m, mut v) = (Tensor::scalar(0.0, &cpu)?, Tensor::scalar(0.0, &cpu)?);
/// let step = ops::AdamWStep { lr: 0.5, weight_decay: 0.0, ..Default::default() };
/// ops::adamw(&mut w, &Tensor::scalar(-3.0, &cpu)?, &mut m, &mut v, None, &step, "w")?;
/// assert!((w.item()? - 1.5).abs() < 1e-6); // the first step is as long as the learning rate
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn adamw(
    param: &mut Tensor,
    main_grad: &Tensor,
    exp_avg: &mut Tensor,
    exp_avg_sq: &mut Tensor,
    main_param: Option<&mut Tensor>,
    step: &AdamWStep,
    name: &str,
) -> Result<()> {
    let op = "adamw";
    let tensor = AdamWTensor { name, param, main_grad, exp_avg, exp_avg_sq, main_param, slot: None };
    tensor.check(op)?;
    check_step(op, step)?;
    tensor.check_unique()?;
    let device = tensor.param.device().clone();
    device.expect_eager(op, "its numbers would be the same at each replay: use adamw_many_from")?;
    dispatch!(device, adamw::adamw(tensor, step))
}
