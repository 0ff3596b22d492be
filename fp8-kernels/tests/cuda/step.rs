//! A training step in small: a cast under delayed scaling, the update of its arena, the optimizer with codes.

#![expect(clippy::unwrap_used, reason = "slots that exist")]

use fp8_kernels::ops::{self, AdamWStep, AdamWTensor, AmaxRule, ScaleUpdate};
use fp8_kernels::{
    Arena, ArenaOptions, CounterValues, DType, Device, Encoding, Fp8Tensor, Operand, Result, Scale,
    ScalePolicy, ScaleRule, Slot, Tensor,
};

const RULE: ScaleRule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
const UPDATE: ScaleUpdate<'_> =
    ScaleUpdate { amax: AmaxRule::Max, rule: &RULE, interval: 1, record_non_finite: false };
const X: [usize; 2] = [48, 80];
const W: [usize; 2] = [33, 64];
const B: [usize; 1] = [70];
/// Slots of the arena: the activation's and the weight's.
const SLOTS: usize = 2;

/// All that a step works on.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) device: Device,
    pub(crate) arena: Arena,
    x: Tensor,
    weight: Parameter,
    bias: Parameter,
    number: u64,
}

#[derive(Debug)]
struct Parameter {
    value: Tensor,
    main: Option<Tensor>,
    grad: Tensor,
    moments: [Tensor; 2],
}

/// The state of delayed scaling, as bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scaling {
    scales: Vec<u32>,
    history: Vec<u32>,
    staged: Vec<u32>,
    skipped: Vec<u64>,
    counters: Vec<CounterValues>,
    updates: u64,
}

/// The codes and the dequantization factor of a quantized tensor, as bits; the transpose's codes if they were made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Codes {
    rowwise: Option<Vec<u8>>,
    columnwise: Option<Vec<u8>>,
    scale_inv: u32,
}

/// The results of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) x: Codes,
    pub(crate) weight: Codes,
    pub(crate) parameters: Vec<u32>,
    pub(crate) scaling: Scaling,
}

/// Numbers around 0 that never change.
pub(crate) fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (f64::from(state) / f64::from(u32::MAX) * 6.0 - 3.0) as f32
    };
    (0..len).map(|_| next()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

impl Codes {
    /// Waits for the device.
    pub(crate) fn read(tensor: &Fp8Tensor) -> Result<Self> {
        Ok(Self {
            rowwise: tensor.rowwise().map(Tensor::to_vec).transpose()?,
            columnwise: tensor.columnwise().map(Tensor::to_vec).transpose()?,
            scale_inv: tensor.scale_inv().item()?.to_bits(),
        })
    }
}

impl Parameter {
    fn new<const N: usize>(seed: u32, shape: [usize; N], main: bool, device: &Device) -> Result<Self> {
        let (cpu, len) = (Device::cpu(), shape.iter().product());
        let tensor = |seed, device| Tensor::from_vec(numbers(seed, len), shape, device);
        let zeros = || Tensor::zeros(shape, DType::F32, device);
        // Cast on the host: a device is not asked for more than the step itself needs.
        let value = match main {
            true => ops::cast(&tensor(seed, &cpu)?, DType::BF16)?.to_device(device)?,
            false => tensor(seed, device)?,
        };
        let main = main.then(|| tensor(seed, device)).transpose()?;
        Ok(Self { value, main, grad: tensor(seed + 1, device)?, moments: [zeros()?, zeros()?] })
    }

    fn update<'a>(&'a mut self, name: &'a str, slot: Option<Slot<'a>>) -> AdamWTensor<'a> {
        let [exp_avg, exp_avg_sq] = &mut self.moments;
        let main_param = self.main.as_mut();
        AdamWTensor {
            name,
            param: &mut self.value,
            main_grad: &self.grad,
            exp_avg,
            exp_avg_sq,
            main_param,
            slot,
        }
    }

    fn read(&self) -> Result<Vec<u32>> {
        let mut all = bits(&self.value.to_f32_vec()?);
        for tensor in self.main.iter().chain(&self.moments) {
            all.extend(bits(&tensor.to_f32_vec()?));
        }
        Ok(all)
    }
}

impl Step {
    /// With scale cells that start as `first_scale`.
    pub(crate) fn new(device: &Device, first_scale: f32) -> Result<Self> {
        let options = ArenaOptions { history_len: 4, first_scale, ..ArenaOptions::default() };
        Ok(Self {
            arena: Arena::new(SLOTS, options, device)?,
            x: Tensor::from_vec(numbers(1, X[0] * X[1]), X, device)?,
            weight: Parameter::new(2, W, true, device)?,
            bias: Parameter::new(4, B, false, device)?,
            number: 1,
            device: device.clone(),
        })
    }

    /// The activation's cast: scale, amax and counters in the arena's slot 0, the transpose for backward.
    pub(crate) fn quantize(&self) -> Result<Operand> {
        ops::quantize(&self.x, &slot(&self.arena, 0))
    }

    pub(crate) fn update(&mut self) -> Result<()> {
        ops::update_scales(&mut self.arena, &UPDATE)
    }

    /// One step of the optimizer; the weight's codes, with the arena's slot 1.
    pub(crate) fn optimize(&mut self) -> Result<Fp8Tensor> {
        let step = AdamWStep { step: self.number, ..AdamWStep::default() };
        let slot = slot(&self.arena, 1);
        let tensors = &mut [self.weight.update("weight", Some(slot)), self.bias.update("bias", None)];
        let codes = ops::adamw_many(tensors, &step)?.into_iter().next().flatten().unwrap();
        self.number += 1;
        Ok(codes)
    }

    /// All of it without a wait.
    pub(crate) fn queue(&mut self) -> Result<(Operand, Fp8Tensor)> {
        let x = self.quantize()?;
        self.update()?;
        Ok((x, self.optimize()?))
    }

    /// All of it, and the results.
    pub(crate) fn run(&mut self) -> Result<Outcome> {
        let (x, weight) = self.queue()?;
        self.read(&x, &weight)
    }

    pub(crate) fn read(&self, x: &Operand, weight: &Fp8Tensor) -> Result<Outcome> {
        Ok(Outcome {
            x: Codes::read(x.as_fp8().unwrap())?,
            weight: Codes::read(weight)?,
            parameters: self.parameters()?,
            scaling: self.scaling()?,
        })
    }

    pub(crate) fn parameters(&self) -> Result<Vec<u32>> {
        Ok([self.weight.read()?, self.bias.read()?].concat())
    }

    pub(crate) fn scaling(&self) -> Result<Scaling> {
        Ok(Scaling {
            scales: bits(&self.arena.scales()?),
            history: bits(&self.arena.history()?),
            staged: bits(&self.arena.staged()?),
            skipped: self.arena.skipped_non_finite_all()?,
            counters: self.arena.counters_all()?,
            updates: self.arena.updates(),
        })
    }
}

/// Delayed scaling; the first scale is the tensor's own.
fn slot(arena: &Arena, index: usize) -> Slot<'_> {
    Slot {
        encoding: Encoding::E4M3,
        scale: Scale::Cell { cell: arena.scale(index).unwrap(), first: &RULE, keep: true },
        amax: arena.staging(index),
        counters: arena.counters(index),
        columnwise: true,
    }
}
