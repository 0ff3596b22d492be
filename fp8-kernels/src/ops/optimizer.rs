//! AdamW, Lion and SGD, with moments in f32, bf16 or FP8, and with parameters that are rounded stochastically.

use super::adamw::{AdamWFactors, NormCheck};
use super::loss_scale::ScaledStep;
use crate::backend::dispatch;
use crate::{DType, Device, Error, Fp8Tensor, Result, Shape, Slot, Tensor};
use std::sync::Arc;

/// The number of elements of a moment in FP8 that share a scale: consecutive ones of a row.
///
/// ```
/// assert_eq!(fp8_kernels::ops::MOMENT_BLOCK, 128);
/// ```
pub const MOMENT_BLOCK: usize = 128;

/// Returns the shape of the scales of a moment in FP8: `[rows, ⌈cols / 128⌉]` for a parameter that is `[rows, cols]`, where all
/// dimensions but the last count as rows.
///
/// ```
/// use fp8_kernels::ops::moment_scales;
/// assert_eq!(*moment_scales(&[4, 300].into()), [4, 3]);
/// assert_eq!(*moment_scales(&[300].into()), [1, 3]);
/// ```
pub fn moment_scales(shape: &Shape) -> Shape {
    let [rows, cols] = shape.matrix();
    Shape::from([rows, cols.div_ceil(MOMENT_BLOCK)])
}

/// A moment of [`OptimizerTensor`], in the format that it is stored in.
///
/// ```
/// use fp8_kernels::ops::{Moment, moment_scales};
/// use fp8_kernels::{DType, Device, Tensor};
/// let (shape, cpu) = ([8, 256].into(), Device::cpu());
/// let mut codes = Tensor::zeros(shape, DType::U8, &cpu)?;
/// let mut scale_inv = Tensor::zeros(moment_scales(&shape), DType::F32, &cpu)?;
/// assert_eq!(scale_inv.numel(), 16);
/// let in_fp8 = Moment { values: &mut codes, scale_inv: Some(&mut scale_inv) };
/// let mut values = Tensor::zeros(shape, DType::BF16, &cpu)?;
/// let in_bf16 = Moment { values: &mut values, scale_inv: None };
/// assert_eq!((in_fp8.values.dtype(), in_bf16.values.dtype()), (DType::U8, DType::BF16));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct Moment<'a> {
    /// The moment in f32 or bf16, or its codes, u8. It has the parameter's shape.
    pub values: &'a mut Tensor,
    /// The dequantization factors of codes, f32, with the shape that [`moment_scales`] returns. `None` for f32 and bf16.
    pub scale_inv: Option<&'a mut Tensor>,
}

impl Moment<'_> {
    /// Checks dtypes, shapes and devices, and that nothing shares the storage.
    fn check(&self, op: &'static str, moment: &'static str, tensor: &OptimizerTensor<'_>) -> Result<()> {
        let (param, values) = (&*tensor.param, &*self.values);
        param.device().expect_same(op, values.device())?;
        let pair = if moment == "exp_avg" { "param and exp_avg" } else { "param and exp_avg_sq" };
        param.expect_same_shape(op, pair, values)?;
        expect_unique(tensor.name, moment, values)?;
        match (&self.scale_inv, values.dtype()) {
            (Some(scale_inv), _) => {
                values.expect_dtype(op, moment, DType::U8)?;
                scale_inv.expect_dtype(op, "scale_inv", DType::F32)?;
                param.device().expect_same(op, scale_inv.device())?;
                let (lhs, rhs) = (moment_scales(param.shape()), *scale_inv.shape());
                if lhs != rhs {
                    let remedy = "a moment in FP8 has a scale for each 128 elements of a row";
                    return Err(Error::Shapes { op, what: "blocks and scale_inv", lhs, rhs, remedy });
                }
                expect_unique(tensor.name, &format!("{moment}_scale_inv"), scale_inv)
            }
            (None, DType::F32 | DType::BF16) => Ok(()),
            (None, found) => {
                Err(Error::DType { op, what: moment, found, expected: "f32, bf16, or u8 with scales" })
            }
        }
    }
}

fn expect_unique(name: &str, part: &str, tensor: &Tensor) -> Result<()> {
    match tensor.holders() {
        0 => Ok(()),
        holders => Err(Error::Shared { name: format!("{name}.{part}"), holders }),
    }
}

/// One parameter of [`optimizer_step`], with its gradient and optimizer state.
#[derive(Debug)]
pub struct OptimizerTensor<'a> {
    /// Identifies the parameter in errors.
    pub name: &'a str,
    /// The parameter, f32, bf16 or f16.
    pub param: &'a mut Tensor,
    /// The accumulated gradient, f32.
    pub main_grad: &'a Tensor,
    /// The first moment, or the momentum.
    pub exp_avg: Moment<'a>,
    /// The rule of the update, with AdamW's second moment.
    pub rule: UpdateRule<'a>,
    /// An f32 copy of the parameter, if there is one: see [`AdamWTensor`](super::AdamWTensor::main_param).
    pub main_param: Option<&'a mut Tensor>,
    /// The slot that quantizes the updated parameter; `None` to leave that to a later [`quantize`](super::quantize()).
    pub slot: Option<Slot<'a>>,
    /// Whether the updated parameter, which is bf16, is rounded stochastically instead of to nearest.
    pub is_rounded_stochastically: bool,
    /// The key of the parameter's random numbers: the same on every rank and in every run, another for each parameter.
    pub seed: u64,
}

impl OptimizerTensor<'_> {
    fn check(&self, op: &'static str) -> Result<()> {
        let param = &*self.param;
        param.expect_float(op, "param")?;
        if self.is_rounded_stochastically && param.dtype() != DType::BF16 {
            let expected = "bf16: other dtypes are rounded to nearest";
            return Err(Error::DType { op, what: "param", found: param.dtype(), expected });
        }
        let others = [
            ("main_grad", "param and main_grad", Some(self.main_grad)),
            ("main_param", "param and main_param", self.main_param.as_deref()),
        ];
        for (what, pair, tensor) in others {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(op, what, DType::F32)?;
            param.device().expect_same(op, tensor.device())?;
            param.expect_same_shape(op, pair, tensor)?;
        }
        self.exp_avg.check(op, "exp_avg", self)?;
        if let UpdateRule::AdamW { exp_avg_sq } = &self.rule {
            exp_avg_sq.check(op, "exp_avg_sq", self)?;
        }
        self.slot.map_or(Ok(()), |slot| slot.expect_device(op, param.device()))?;
        if param.holders() > 0 {
            return Err(Error::Shared { name: self.name.to_owned(), holders: param.holders() });
        }
        self.main_param.as_deref().map_or(Ok(()), |main| expect_unique(self.name, "main_param", main))
    }
}

/// The rule by which [`optimizer_step`] updates a parameter p with the gradient g = `main_grad` · `grad_scale`, in f32.
///
/// The numbers are those of [`AdamWStep`](super::AdamWStep): `lr`, `beta1`, `beta2` and `weight_decay` (λ).
///
/// ```
/// use fp8_kernels::ops::{self, Moment, OptimizerTensor, StepCheck, UpdateRule};
/// use fp8_kernels::{Device, Tensor};
/// let cpu = Device::cpu();
/// let step = |rule: UpdateRule<'_>| -> fp8_kernels::Result<Vec<f32>> {
///     let mut w = Tensor::from_vec(vec![1.0f32, 1.0], [2], &cpu)?;
///     let (mut m, grad) = (Tensor::from_vec(vec![2.0f32, 2.0], [2], &cpu)?, Tensor::from_vec(vec![1.0f32, -20.0], [2], &cpu)?);
///     let numbers = ops::AdamWStep { lr: 0.25, beta1: 0.5, weight_decay: 0.0, ..Default::default() };
///     let factors = ops::AdamWFactors::new(&numbers, &cpu)?;
///     let tensor = OptimizerTensor {
///         name: "w",
///         param: &mut w,
///         main_grad: &grad,
///         exp_avg: Moment { values: &mut m, scale_inv: None },
///         rule,
///         main_param: None,
///         slot: None,
///         is_rounded_stochastically: false,
///         seed: 1,
///     };
///     ops::optimizer_step(&mut [(&mut [tensor], &factors)], StepCheck::Never)?;
///     w.to_vec()
/// };
/// assert_eq!(step(UpdateRule::Lion)?, [0.75, 1.25]); // by the signs of 1.5 and −9
/// assert_eq!(step(UpdateRule::Sgd { nesterov: false })?, [0.5, 5.75]); // by 2 and −19
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum UpdateRule<'a> {
    /// The update of [`AdamWStep`](super::AdamWStep).
    AdamW {
        /// The second moment.
        exp_avg_sq: Moment<'a>,
    },
    /// Lion (Chen et al., <https://arxiv.org/abs/2302.06675>): `p ← p · (1 − lr · λ) − lr · sign(m + (1 − beta1) · (g − m))`, then
    /// `m ← m + (1 − beta2) · (g − m)`. The sign of 0 is 0.
    Lion,
    /// SGD with momentum, as PyTorch's: `d = g + λ · p`, `m ← beta1 · m + d`, `p ← p − lr · m`.
    Sgd {
        /// Whether the last step is `p ← p − lr · (d + beta1 · m)` instead (Nesterov).
        nesterov: bool,
    },
}

/// Parameters of [`optimizer_step`] that are updated with the same numbers.
pub type OptimizerGroup<'a, 't> = (&'a mut [OptimizerTensor<'t>], &'a Arc<AdamWFactors>);

/// The values that decide whether a step of [`optimizer_step`] is skipped.
#[derive(Debug, Clone, Copy)]
pub enum StepCheck<'a> {
    /// No step is skipped.
    Never,
    /// The norm decides, as in [`adamw_groups`](super::adamw_groups).
    Norm(NormCheck<'a>),
    /// A loss scale decides, and the device numbers the steps of the bias corrections, as in
    /// [`adamw_groups_scaled`](super::adamw_groups_scaled).
    Scaled(ScaledStep<'a>),
}

/// Updates several groups of parameters as [`adamw_groups`](super::adamw_groups) and
/// [`adamw_groups_scaled`](super::adamw_groups_scaled) do, by AdamW or another rule, with moments in f32, bf16 or FP8.
///
/// The update is that of the tensor's [`UpdateRule`], in f32, with the moments m and v as they are stored. The new m and v
/// update the parameter as they are and are then rounded:
///
/// ```text
/// bf16   m and v are rounded stochastically.
/// FP8    For each block of 128 elements of a row, with e the smallest integer from −126 to 119 for which amax ≤ 448 · 2ᵉ:
///        m   amax = max |m|; code = E4M3 of m · 2⁻ᵉ, rounded stochastically; m is code · 2ᵉ in the next step
///        v   amax = max √v; code = E4M3 of √v · 2⁻ᵉ, rounded up with probability (v · 4⁻ᵉ − a²) / (b² − a²) from its
///            neighbours a below and b above; v is (code · 2ᵉ)² in the next step
/// ```
///
/// Scales are powers of two, so only the rounding to E4M3 loses anything, and the stored m and v equal the new ones in the mean.
/// A v greater than 0 is never stored as 0: the smallest code of its block is used instead, since a step divides by its root. A block of
/// zeros stays zero. NaN is stored as NaN, and what is beyond the range saturates.
///
/// Random numbers are words of Philox4x32-10 with the parameter's [`seed`](OptimizerTensor::seed) as its key. The upper half of the
/// counter is the step's number ([`AdamWStep::step`](super::AdamWStep::step), also under a loss scale). The lower half is 32 · block +
/// element / 4, where blocks of a parameter are numbered row by row and elements in their block, plus 2⁶² times 0 for m, 1 for v
/// and 2 for the parameter. Element i of a block takes word i mod 4. So results depend on neither threads, ranks nor what ran
/// before, and have equal bits on every backend.
///
/// Returns the quantized parameters of each group. All arguments are checked before anything changes. Parameters with a slot are
/// quantized after the update, one by one.
///
/// # Errors
/// Those of [`adamw_groups`](super::adamw_groups) and [`adamw_groups_scaled`](super::adamw_groups_scaled); a moment that is not
/// f32, bf16, or u8 with scales of the shape that [`moment_scales`] returns; stochastic rounding of a parameter that is not bf16.
///
/// ```
/// use fp8_kernels::ops::{self, Moment, OptimizerTensor, StepCheck, UpdateRule};
/// use fp8_kernels::{DType, Device, Tensor};
/// let cpu = Device::cpu();
/// let mut w = Tensor::from_vec(vec![1.0f32, 2.0], [2], &cpu)?;
/// let grad = Tensor::from_vec(vec![0.5f32, -4.0], [2], &cpu)?;
/// let codes = || Tensor::zeros([2], DType::U8, &cpu);
/// let scales = || Tensor::zeros([1, 1], DType::F32, &cpu);
/// let (mut m, mut v, mut m_scale, mut v_scale) = (codes()?, codes()?, scales()?, scales()?);
/// let step = ops::AdamWStep { lr: 0.5, beta1: 0.5, weight_decay: 0.0, ..Default::default() };
/// let factors = ops::AdamWFactors::new(&step, &cpu)?;
/// let tensor = OptimizerTensor {
///     name: "w",
///     param: &mut w,
///     main_grad: &grad,
///     exp_avg: Moment { values: &mut m, scale_inv: Some(&mut m_scale) },
///     rule: UpdateRule::AdamW { exp_avg_sq: Moment { values: &mut v, scale_inv: Some(&mut v_scale) } },
///     main_param: None,
///     slot: None,
///     is_rounded_stochastically: false,
///     seed: 1,
/// };
/// ops::optimizer_step(&mut [(&mut [tensor], &factors)], StepCheck::Never)?;
/// assert!(w.to_vec::<f32>()?.iter().zip([0.5, 2.5]).all(|(w, want)| (w - want).abs() < 1e-6));
/// // The first moment is 0.25 and −2: 64 and −512 times 2⁻⁸ would not fit, so the scale is 2⁻⁷.
/// assert_eq!((m.to_vec::<u8>()?, m_scale.item()?), (vec![0x60, 0xF8], 1.0 / 128.0)); // 32 and −256
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn optimizer_step(
    groups: &mut [OptimizerGroup<'_, '_>],
    check: StepCheck<'_>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let op = "optimizer_step";
    let Some(device) = check_all(op, groups)? else {
        return Ok(groups.iter().map(|_| Vec::new()).collect());
    };
    match check {
        StepCheck::Never => {}
        StepCheck::Norm(check) => check.check(op, &device)?,
        StepCheck::Scaled(step) => step.check(op, &device)?,
    }
    for (tensors, factors) in groups.iter() {
        if !tensors.is_empty() {
            device.on_replay((*factors).clone());
        }
    }
    dispatch!(device, optimizer::optimizer_step(groups, check))
}

/// Checks all groups and returns their device; `None` if there are no tensors.
fn check_all(op: &'static str, groups: &[OptimizerGroup<'_, '_>]) -> Result<Option<Device>> {
    let mut device: Option<Device> = None;
    for (tensors, factors) in groups {
        for tensor in tensors.iter() {
            let device = device.get_or_insert_with(|| tensor.param.device().clone());
            device.expect_same(op, tensor.param.device())?;
            device.expect_same(op, factors.device())?;
            tensor.check(op)?;
        }
    }
    Ok(device)
}
