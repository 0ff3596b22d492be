//! AdamW in place: one parameter, or all parameters of a step, per call. [`AdamWStep`] has the formula.

use super::adamw_step::{AdamWStep, StepFactors, check_step};
use crate::backend::{Backend, cuda, dispatch};
use crate::cells::Counts;
use crate::{DType, Device, Error, Fp8Tensor, Replayed, Result, Slot, Tensor};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// The numbers of a step in device memory, so that a recorded step can use new ones at each replay.
///
/// An update uses the numbers that were [`set`](Self::set) last before it runs. If it was recorded in a
/// [`Graph`](crate::Graph), it uses those that were set last before the replay. [`adamw_groups`] has an example.
#[derive(Debug)]
pub struct AdamWFactors {
    device: Device,
    step: Mutex<AdamWStep>,
    /// The device has older ones.
    is_stale: AtomicBool,
    buffer: Option<cuda::Buffer>,
}

impl AdamWFactors {
    /// Creates the numbers for updates on `device`.
    ///
    /// # Errors
    /// Those of [`set`](Self::set); a step is being recorded; the device is out of memory or failed.
    pub fn new(step: &AdamWStep, device: &Device) -> Result<Arc<Self>> {
        check_step("adamw", step)?;
        device.expect_eager("adamw", "the optimizer's first step makes its state: run it before")?;
        let factors = Self {
            buffer: match device.backend() {
                Backend::Cpu => None,
                Backend::Cuda(gpu) => Some(gpu.alloc(DType::F32, size_of::<StepFactors>() / 4)?),
            },
            device: device.clone(),
            step: Mutex::new(*step),
            is_stale: AtomicBool::new(true),
        };
        factors.upload()?;
        Ok(Arc::new(factors))
    }

    /// Sets the numbers of the next step. While a step is being recorded, they are copied to the device when it is
    /// launched.
    ///
    /// # Errors
    /// A step number of 0 or an option outside its range; the device failed.
    pub fn set(&self, step: &AdamWStep) -> Result<()> {
        check_step("adamw", step)?;
        *self.lock() = *step;
        self.is_stale.store(true, Relaxed);
        if self.device.capture_number().is_some() { Ok(()) } else { self.upload() }
    }

    /// Returns the numbers that were set last.
    pub fn step(&self) -> AdamWStep {
        *self.lock()
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        let elsewhere = || Error::Devices { op, lhs: self.device.to_string(), rhs: "a GPU".to_owned() };
        self.buffer.as_ref().map(cuda::Buffer::ptr).ok_or_else(elsewhere)
    }

    /// Locks the numbers. They are plain data, so a poisoned lock is still valid.
    fn lock(&self) -> std::sync::MutexGuard<'_, AdamWStep> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Replayed for AdamWFactors {
    fn upload(&self) -> Result<()> {
        if let (Backend::Cuda(gpu), Some(buffer)) = (self.device.backend(), &self.buffer)
            && self.is_stale.swap(false, Relaxed)
        {
            let factors = StepFactors::new(&self.step());
            let written = gpu.write(buffer.ptr(), bytemuck::bytes_of(&factors));
            return written.inspect_err(|_| self.is_stale.store(true, Relaxed));
        }
        Ok(())
    }
}

/// Skips a step if the norm of its gradients is infinite or NaN.
///
/// A skipped step changes no parameter, moment or main parameter. Tensors with a slot are still quantized: their codes are
/// those of the unchanged parameters. The device decides, so the host does not wait, and a recorded step decides at each
/// replay. Pass it to [`adamw_groups`], which has an example.
#[derive(Debug, Clone, Copy)]
pub struct NormCheck<'a> {
    /// The norm, one f32: usually [`grad_norm`](super::grad_norm()) of all gradients of the step.
    pub norm: &'a Tensor,
    /// Counts the skipped steps.
    pub skipped: &'a SkippedSteps,
}

impl NormCheck<'_> {
    pub(super) fn check(&self, op: &'static str, device: &Device) -> Result<()> {
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

/// The number of steps that a [`NormCheck`] has skipped, counted on the device. Clones share the count.
/// [`adamw_groups`] has an example.
#[derive(Debug, Clone)]
pub struct SkippedSteps {
    device: Device,
    counts: Counts,
}

impl SkippedSteps {
    /// Creates a count of 0.
    ///
    /// # Errors
    /// A step is being recorded; the device is out of memory or failed.
    pub fn new(device: &Device) -> Result<Self> {
        device.expect_eager("adamw", "the optimizer's first step makes its state: run it before")?;
        Ok(Self { device: device.clone(), counts: Counts::new(1, device)? })
    }

    /// Returns the count. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<u64> {
        Ok(self.counts.read(0..1)?.first().copied().unwrap_or(0))
    }

    /// Sets the count to 0, after the work queued so far.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset(&self) -> Result<()> {
        self.counts.reset(0..1)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// One more, in host memory.
    pub(crate) fn add_one(&self) -> Result<()> {
        self.counts.cpu("adamw")?.iter().for_each(|count| {
            count.fetch_add(1, Relaxed);
        });
        Ok(())
    }

    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        self.counts.cuda(op)
    }
}

/// One parameter of [`adamw_many`], with its gradient and optimizer state. All tensors have the parameter's shape.
#[derive(Debug)]
pub struct AdamWTensor<'a> {
    /// Identifies the parameter in errors.
    pub name: &'a str,
    /// The parameter, f32, bf16 or f16.
    pub param: &'a mut Tensor,
    /// The accumulated gradient, f32.
    pub main_grad: &'a Tensor,
    /// The first moment, f32.
    pub exp_avg: &'a mut Tensor,
    /// The second moment, f32.
    pub exp_avg_sq: &'a mut Tensor,
    /// An f32 copy of the parameter, if there is one. The update then reads and writes this copy and rounds it into `param`;
    /// without it, `param` itself is updated in f32 and rounded once.
    pub main_param: Option<&'a mut Tensor>,
    /// The slot that quantizes the updated parameter; `None` to leave that to a later [`quantize`](super::quantize()).
    pub slot: Option<Slot<'a>>,
}

impl AdamWTensor<'_> {
    /// Checks dtypes, shapes and devices.
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

    /// Checks that no tensor that changes shares its storage.
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

/// Updates all `tensors` of one step and quantizes the updated parameters that have a slot.
///
/// Each parameter gets the bits that [`adamw`](adamw()) followed by [`quantize`](super::quantize()) gives it, in fewer passes over
/// memory and, on a GPU, in one launch. Returns the quantized parameter for each tensor that has a slot, and `None` for the
/// others. All arguments are checked before anything changes.
///
/// The numbers of `step` are arguments of the launch, so the call cannot be recorded in a graph: use [`adamw_groups`].
///
/// # Errors
/// Those of [`adamw`](adamw()); tensors on different devices. If a custom scale policy returns an unusable scale, or there is no
/// memory for the codes, some parameters may already have been updated.
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
/// assert_eq!(codes, Some(vec![1.5, -2.5])); // one step of 0.5; E4M3 has both values
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn adamw_many(tensors: &mut [AdamWTensor<'_>], step: &AdamWStep) -> Result<Vec<Option<Fp8Tensor>>> {
    let op = "adamw_many";
    check_step(op, step)?;
    let Some(device) = check_tensors(op, tensors)? else { return Ok(Vec::new()) };
    device.expect_eager(op, "its numbers would be the same at each replay: use adamw_groups")?;
    dispatch!(device, adamw::adamw_many(tensors, step))
}

/// Parameters that are updated with the same numbers.
pub type AdamWGroup<'a, 't> = (&'a mut [AdamWTensor<'t>], &'a Arc<AdamWFactors>);

/// Updates several groups of parameters with numbers that are stored on the device, such as one group with and one without weight
/// decay.
///
/// Unlike [`adamw_many`] it can be recorded in a [`Graph`](crate::Graph): a replay uses the numbers that were set last.
/// All groups are checked, and their memory is allocated, before the first is updated. With a `check`, the device skips the
/// step if the norm of its gradients is not finite. Returns the quantized parameters of each group, as [`adamw_many`] does.
///
/// # Errors
/// Those of [`adamw_many`]; numbers on another device; a norm that is not one f32 or is on another device.
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
    let Some(device) = check_all(op, groups)? else {
        return Ok(groups.iter().map(|_| Vec::new()).collect());
    };
    check.map_or(Ok(()), |check| check.check(op, &device))?;
    upload_on_replay(groups, &device);
    dispatch!(device, adamw::adamw_groups(groups, check))
}

/// Checks all groups and returns their device; `None` if there are no tensors.
pub(super) fn check_all(op: &'static str, groups: &[AdamWGroup<'_, '_>]) -> Result<Option<Device>> {
    let mut device: Option<Device> = None;
    for (tensors, factors) in groups {
        let Some(found) = check_tensors(op, tensors)? else { continue };
        found.expect_same(op, &factors.device)?;
        device.get_or_insert(found).expect_same(op, &factors.device)?;
    }
    Ok(device)
}

/// Makes each replay of a step that is being recorded upload the numbers of its groups.
pub(super) fn upload_on_replay(groups: &[AdamWGroup<'_, '_>], device: &Device) {
    for (tensors, factors) in groups {
        if !tensors.is_empty() {
            device.on_replay((*factors).clone());
        }
    }
}

/// Checks all tensors and returns their device; `None` if there are no tensors.
fn check_tensors(op: &'static str, tensors: &[AdamWTensor<'_>]) -> Result<Option<Device>> {
    let Some(first) = tensors.first() else { return Ok(None) };
    let device = first.param.device().clone();
    for tensor in tensors {
        device.expect_same(op, tensor.param.device())?;
        tensor.check(op)?;
        tensor.check_unique()?;
    }
    Ok(Some(device))
}

/// Updates one parameter in place by AdamW; [`AdamWStep`] has the formula.
///
/// `param` is f32, bf16 or f16. Its gradient `main_grad`, its moments `exp_avg` and `exp_avg_sq`, and `main_param` are f32
/// and have its shape. With a `main_param`, the update reads and writes that and rounds it into `param`; without, `param`
/// itself is updated in f32 and rounded once. If an error is returned, nothing has changed. `name` identifies the parameter
/// in errors.
///
/// The numbers of `step` are arguments of the launch, so the call cannot be recorded in a graph: use [`adamw_groups`].
///
/// # Errors
/// Different shapes or devices; other dtypes; shared storage; a step number of 0 or an option outside its range.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let mut w = Tensor::scalar(1.0, &cpu)?;
/// let (mut m, mut v) = (Tensor::scalar(0.0, &cpu)?, Tensor::scalar(0.0, &cpu)?);
/// let step = ops::AdamWStep { lr: 0.5, weight_decay: 0.0, ..Default::default() };
/// ops::adamw(&mut w, &Tensor::scalar(-3.0, &cpu)?, &mut m, &mut v, None, &step, "w")?;
/// assert!((w.item()? - 1.5).abs() < 1e-6); // the first step is as long as `lr`, whatever the gradient
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
    device.expect_eager(op, "its numbers would be the same at each replay: use adamw_groups")?;
    dispatch!(device, adamw::adamw(tensor, step))
}
