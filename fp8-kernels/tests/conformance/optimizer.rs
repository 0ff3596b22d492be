//! Moments in bf16 and FP8: what a step stores.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::compare::{close, ensure, equal, refused, same};
use super::data::{AROUND_2_16, Random, normal, specials, tensor};
use super::reference::{Got, same_as_cpu};
use super::threads::same_bits;
use crate::oracle::adamw::{State, adamw as oracle};
use crate::oracle::optimizer::{self as compact, decoded};
use fp8_kernels::ops::{
    AdamWFactors, AdamWStep, MOMENT_BLOCK, Moment, OptimizerTensor, StepCheck, UpdateRule, moment_scales,
};
use fp8_kernels::{DType, Device, Result, Shape, Tensor, ops};

cases![
    codes_and_scales_are_the_oracles,
    bf16_is_the_oracles,
    representable_moments_are_stored_exactly,
    rounding_is_right_in_the_mean,
    moments_stay_right_over_many_steps,
    zeros_stay_zero_and_nothing_else_becomes_zero,
    bits_are_the_cpus: Dtypes,
    around_2_16: Dtypes,
    special_values_are_the_cpus: Dtypes,
    same_for_any_threads,
    refuses,
];

/// The formats of a moment.
pub(super) const KINDS: [DType; 3] = [DType::F32, DType::BF16, DType::U8];

pub(super) fn shapes() -> [Shape; 13] {
    [
        Shape::from([]),
        [1].into(),
        [0, 4].into(),
        [3, 0].into(),
        [1, 15].into(),
        [3, 127].into(),
        [2, 128].into(),
        [3, 129].into(),
        [300].into(),
        [5, 64].into(),
        [2, 3, 260].into(),
        [2, 1000].into(),
        [1, 16_384 + 6].into(),
    ]
}

/// The rule of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    AdamW,
    Lion,
    Sgd { nesterov: bool },
}

/// One parameter with its state.
pub(super) struct Parameter {
    pub(super) param: Tensor,
    pub(super) grad: Tensor,
    pub(super) moments: [Tensor; 2],
    pub(super) scales: [Option<Tensor>; 2],
    pub(super) main: Option<Tensor>,
    pub(super) is_rounded_stochastically: bool,
    pub(super) seed: u64,
    pub(super) rule: Rule,
}

impl Parameter {
    /// With moments of 0 in these formats.
    pub(super) fn new(param: Tensor, kinds: [DType; 2], seed: u64) -> Result<Self> {
        let (shape, device) = (*param.shape(), param.device().clone());
        let zeros = |kind| Tensor::zeros(shape, kind, &device);
        let scales = |kind| {
            let is_fp8 = kind == DType::U8;
            is_fp8.then(|| Tensor::zeros(moment_scales(&shape), DType::F32, &device)).transpose()
        };
        Ok(Self {
            grad: Tensor::zeros(shape, DType::F32, &device)?,
            moments: [zeros(kinds[0])?, zeros(kinds[1])?],
            scales: [scales(kinds[0])?, scales(kinds[1])?],
            param,
            main: None,
            is_rounded_stochastically: false,
            seed,
            rule: Rule::AdamW,
        })
    }

    pub(super) fn tensor(&mut self) -> OptimizerTensor<'_> {
        let [m, v] = &mut self.moments;
        let [m_scale, v_scale] = &mut self.scales;
        OptimizerTensor {
            name: "w",
            param: &mut self.param,
            main_grad: &self.grad,
            exp_avg: Moment { values: m, scale_inv: m_scale.as_mut() },
            rule: match self.rule {
                Rule::AdamW => {
                    UpdateRule::AdamW { exp_avg_sq: Moment { values: v, scale_inv: v_scale.as_mut() } }
                }
                Rule::Lion => UpdateRule::Lion,
                Rule::Sgd { nesterov } => UpdateRule::Sgd { nesterov },
            },
            main_param: self.main.as_mut(),
            slot: None,
            is_rounded_stochastically: self.is_rounded_stochastically,
            seed: self.seed,
        }
    }

    pub(super) fn step(&mut self, step: &AdamWStep) -> Result<()> {
        let factors = AdamWFactors::new(step, &self.param.device().clone())?;
        ops::optimizer_step(&mut [(&mut [self.tensor()], &factors)], StepCheck::Never).map(drop)
    }

    /// The numbers of a moment as the next step reads them.
    pub(super) fn moment(&self, i: usize) -> Result<Vec<f64>> {
        let Some(scales) = &self.scales[i] else {
            return Ok(self.moments[i].to_f32_vec()?.into_iter().map(f64::from).collect());
        };
        let (codes, scales) = (self.moments[i].to_vec::<u8>()?, scales.to_vec::<f32>()?);
        let [_, cols] = self.param.shape().matrix();
        let across = cols.div_ceil(MOMENT_BLOCK);
        let scale = |at: usize| f64::from(scales[at / cols * across + at % cols / MOMENT_BLOCK]);
        let stored = codes.iter().enumerate().map(|(at, &code)| decoded(code) * scale(at));
        Ok(stored.map(|stored| if i == 1 { stored * stored } else { stored }).collect())
    }

    /// Everything that a step changes.
    pub(super) fn results(self) -> Result<Vec<Got>> {
        let Self { param, moments, scales, main, .. } = self;
        let mut results = Vec::new();
        for tensor in [param].into_iter().chain(moments).chain(scales.into_iter().flatten()).chain(main) {
            let numbers = match tensor.dtype() {
                DType::U8 => tensor.to_vec::<u8>()?.into_iter().map(f32::from).collect(),
                _ => super::compare::quiet(&tensor.to_f32_vec()?),
            };
            results.push(Got::Numbers(numbers));
        }
        Ok(results)
    }
}

/// Calls `f` with the row, the column and the length of each block, and its number.
fn each_block(param: &Tensor, mut f: impl FnMut(std::ops::Range<usize>, u64) -> Outcome) -> Outcome {
    let [rows, cols] = param.shape().matrix();
    let mut number = 0;
    for row in 0..rows {
        for start in (0..cols).step_by(MOMENT_BLOCK) {
            let end = cols.min(start + MOMENT_BLOCK);
            f(row * cols + start..row * cols + end, number)?;
            number += 1;
        }
    }
    Ok(())
}

/// Multiples of 1/16 with few bits, so that f32 holds moments of them exactly; some are 0.
fn dyadic(len: usize, seed: u64) -> Vec<f32> {
    let mut draw = Random::new(seed);
    (0..len).map(|_| ((draw.bits() % 1023) as f32 - 511.0) / 16.0).collect()
}

/// Takes several steps with decays of 1/2, each from what the step before stored.
fn codes_and_scales_are_the_oracles(device: &Device) -> Outcome {
    for shape in shapes() {
        let param = normal(shape, DType::F32, 1, device)?;
        let mut parameter = Parameter::new(param, [DType::U8; 2], 0x0123_4567_89AB_CDEF)?;
        let len = parameter.param.numel();
        for number in [1, 2, 3, 1 << 40] {
            let step = AdamWStep { beta1: 0.5, beta2: 0.5, step: number, lr: 0.01, grad_scale: 1.0, ..STEP };
            let counted = AdamWStep { step: number.min(1000), ..step }; // no power of 1/2 is left
            parameter.grad = Tensor::from_vec(dyadic(len, number), shape, device)?;
            let grad: Vec<f64> = parameter.grad.to_vec::<f32>()?.into_iter().map(f64::from).collect();
            let old: Vec<State> = parameter
                .moment(0)?
                .into_iter()
                .zip(parameter.moment(1)?)
                .zip(parameter.param.to_f32_vec()?)
                .map(|((m, v), p)| State { p: p.into(), m, v })
                .collect();
            let new: Vec<State> =
                old.into_iter().zip(&grad).map(|(state, &grad)| oracle(state, grad, &counted)).collect();
            parameter.step(&step)?;
            let codes = [0, 1].map(|i| parameter.moments[i].to_vec::<u8>());
            let [first, second] = codes;
            let (first, second) = (first?, second?);
            let [Some(first_scales), Some(second_scales)] = &parameter.scales else {
                return Err("no scales".into());
            };
            let (first_scales, second_scales) =
                (first_scales.to_vec::<f32>()?, second_scales.to_vec::<f32>()?);
            each_block(&parameter.param, |range, block| {
                let what = format!("{shape:?}, step {number}, block {block}");
                let random =
                    |stream| move |i| compact::random(0x0123_4567_89AB_CDEF, number, block, i, stream);
                let of = |f: fn(&State) -> f64| new[range.clone()].iter().map(f).collect::<Vec<_>>();
                let (scale, want) = compact::first(&of(|s| s.m), random(0));
                same(&format!("{what}: m"), &first[range.clone()], &want, range.len())?;
                equal(&what, f64::from(first_scales[block as usize]), scale)?;
                let (scale, want) = compact::second(&of(|s| s.v), random(1));
                same(&format!("{what}: v"), &second[range.clone()], &want, range.len())?;
                equal(&what, f64::from(second_scales[block as usize]), scale)
            })?;
            let want: Vec<f64> = new.iter().map(|s| s.p).collect();
            close("p", &parameter.param.to_f32_vec()?, &want, len.max(1), [1e-6, 1e-6])?;
        }
    }
    Ok(())
}

/// Moments and the parameter.
fn bf16_is_the_oracles(device: &Device) -> Outcome {
    for shape in shapes() {
        let mut parameter = Parameter::new(normal(shape, DType::BF16, 1, device)?, [DType::BF16; 2], 77)?;
        parameter.is_rounded_stochastically = true;
        // The new parameter, not rounded.
        let mut exact = Parameter::new(normal(shape, DType::BF16, 1, device)?, [DType::F32; 2], 77)?;
        exact.main = Some(tensor(exact.param.to_f32_vec()?, shape, DType::F32, device)?);
        let grad = Tensor::from_vec(dyadic(exact.param.numel(), 3), shape, device)?;
        let step = AdamWStep { step: 9, ..STEP };
        for parameter in [&mut parameter, &mut exact] {
            parameter.grad = grad.clone();
            parameter.step(&step)?;
        }
        let Some(main) = &exact.main else { return Err("no f32 copy".into()) };
        let pairs = [(&parameter.moments[0], &exact.moments[0]), (&parameter.moments[1], &exact.moments[1])];
        for (stream, (got, exact)) in (0..).zip(pairs.into_iter().chain([(&parameter.param, main)])) {
            let (got, exact) = (got.to_f32_vec()?, exact.to_f32_vec()?);
            each_block(main, |range, block| {
                let random = |i| compact::random(77, 9, block, i, stream);
                let values = (0..).zip(&exact[range.clone()]);
                let want: Vec<f32> =
                    values.map(|(i, &v)| compact::bf16(v.into(), random(i)) as f32).collect();
                same(&format!("{shape:?}, stream {stream}"), &got[range.clone()], &want, range.len())
            })?;
        }
    }
    Ok(())
}

/// Whatever the random numbers are, and so also in steps without a gradient and without a decay.
fn representable_moments_are_stored_exactly(device: &Device) -> Outcome {
    for scale in [1.0, 2f32.powi(-70), 2f32.powi(30)] {
        // Every code but those of NaN and −0, in both signs; 448 is in each block.
        let codes: Vec<u8> = (0..0x7F).chain([0x7E]).chain(0x81..0xFF).chain([0x7E, 0xFE]).collect();
        let values: Vec<f32> = codes.iter().map(|&code| decoded(code) as f32 * scale).collect();
        let len = values.len();
        for number in 1..=5 {
            let param = Tensor::zeros([len], DType::F32, device)?;
            let mut parameter = Parameter::new(param, [DType::U8; 2], number)?;
            parameter.grad = Tensor::from_vec(values.clone(), [len], device)?;
            let step = AdamWStep { beta1: 0.0, beta2: 0.0, step: number, grad_scale: 1.0, ..STEP };
            parameter.step(&step)?;
            same("m", &parameter.moments[0].to_vec::<u8>()?, &codes, len)?;
            // −2⁻⁷⁹ squared is less than f32 holds.
            if scale >= 1.0 {
                let magnitudes: Vec<u8> = codes.iter().map(|code| code & 0x7F).collect();
                same("v", &parameter.moments[1].to_vec::<u8>()?, &magnitudes, len)?;
            }
        }
    }
    Ok(())
}

/// Compares the mean of many elements that are equal: it is within five standard deviations.
fn rounding_is_right_in_the_mean(device: &Device) -> Outcome {
    const LEN: usize = 1 << 15;
    for value in [3.3f32, 0.07, 441.3, 17.1, 1.0 + 1.0 / 512.0] {
        for kind in [DType::U8, DType::BF16] {
            let param = Tensor::full(value, [LEN], DType::F32, device)?;
            let mut parameter = Parameter::new(param, [kind; 2], 5)?;
            let mut grad = vec![value; LEN];
            grad.iter_mut().step_by(MOMENT_BLOCK).for_each(|first| *first = 448.0);
            parameter.grad = Tensor::from_vec(grad.clone(), [LEN], device)?;
            let step = AdamWStep { beta1: 0.0, beta2: 0.0, grad_scale: 1.0, ..STEP };
            parameter.step(&step)?;
            for (i, want) in [f64::from(value), f64::from(value * value)].into_iter().enumerate() {
                let stored = parameter.moment(i)?;
                let stored: Vec<f64> = stored
                    .into_iter()
                    .zip(&grad)
                    .filter(|(_, grad)| **grad != 448.0)
                    .map(|(m, _)| m)
                    .collect();
                let count = stored.len() as f64;
                let mean = stored.iter().sum::<f64>() / count;
                let [least, largest] =
                    [f64::min, f64::max].map(|f| stored.iter().copied().reduce(f).unwrap_or_default());
                ensure(least < want && want < largest, || format!("{value}: {least} to {largest}"))?;
                let deviation = ((want - least) * (largest - want) / count).sqrt();
                ensure((mean - want).abs() < 5.0 * deviation, || {
                    format!("{kind}, moment {i}: the mean is {mean}, of {want} ± {deviation}")
                })?;
            }
        }
    }
    Ok(())
}

/// Rounding errors of many steps do not add up: neither of v, whose root is stored, nor of m.
fn moments_stay_right_over_many_steps(device: &Device) -> Outcome {
    const LEN: usize = 4096;
    for (beta2, steps) in [(0.95, 120), (0.99, 200)] {
        let step = AdamWStep { beta2, grad_scale: 1.0, ..STEP };
        let mut parameter = Parameter::new(Tensor::zeros([LEN], DType::F32, device)?, [DType::U8; 2], 5)?;
        let mut exact = vec![State::default(); LEN];
        for number in 1..=steps {
            let step = AdamWStep { step: number, ..step };
            parameter.grad = normal([LEN], DType::F32, number, device)?;
            for (state, grad) in exact.iter_mut().zip(parameter.grad.to_vec::<f32>()?) {
                *state = oracle(*state, grad.into(), &step);
            }
            parameter.step(&step)?;
        }
        let ratios: Vec<f64> =
            parameter.moment(1)?.iter().zip(&exact).map(|(v, exact)| v / exact.v).collect();
        let mean = ratios.iter().sum::<f64>() / LEN as f64;
        let deviation = (ratios.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / LEN as f64).sqrt();
        ensure((mean - 1.0).abs() < 0.03 && deviation < 0.35, || {
            format!("beta2 {beta2}: v is {mean} ± {deviation} of what it should be")
        })?;
        // m is 0 in the mean, so its errors are compared with its size.
        let errors =
            parameter.moment(0)?.iter().zip(&exact).map(|(m, exact)| m - exact.m).collect::<Vec<_>>();
        let size = (exact.iter().map(|exact| exact.m * exact.m).sum::<f64>() / LEN as f64).sqrt();
        let (bias, rms) = (
            errors.iter().sum::<f64>() / LEN as f64 / size,
            (errors.iter().map(|error| error * error).sum::<f64>() / LEN as f64).sqrt() / size,
        );
        ensure(bias.abs() < 0.01 && rms < 0.15, || format!("m is off by {bias} ± {rms} of its size"))?;
    }
    Ok(())
}

fn zeros_stay_zero_and_nothing_else_becomes_zero(device: &Device) -> Outcome {
    let mut grad = vec![0.0; 384];
    (grad[0], grad[1], grad[2]) = (1.0, 1e-9, -1e-12);
    grad[300] = 1e-30; // its square is 0
    let param = Tensor::full(1.0, [384], DType::F32, device)?;
    let mut parameter = Parameter::new(param, [DType::U8; 2], 1)?;
    parameter.grad = Tensor::from_vec(grad, [384], device)?;
    for number in 1..=3 {
        parameter.step(&AdamWStep { step: number, weight_decay: 0.0, ..STEP })?;
    }
    let (m, v) = (parameter.moments[0].to_vec::<u8>()?, parameter.moments[1].to_vec::<u8>()?);
    equal("v", &v[..4], &[v[0], 1, 1, 0][..])?;
    ensure(m[3..128].iter().chain(&m[128..256]).all(|&code| code == 0), || format!("{m:?}"))?;
    ensure(v[3..].iter().all(|&code| code == 0), || format!("{v:?}"))?;
    let param = parameter.param.to_f32_vec()?;
    ensure(param[3..300].iter().all(|&p| p == 1.0), || {
        "a parameter without a gradient has changed".to_owned()
    })?;
    // Small moments beside a large one do not make long steps.
    ensure(param[..3].iter().all(|p| (p - 1.0).abs() < 0.1), || format!("{:?}", &param[..3]))
}

fn bits_are_the_cpus(device: &Device, dtype: DType) -> Outcome {
    for (seed, shape) in (0..).zip(shapes()) {
        for (first, second) in KINDS.iter().flat_map(|&first| KINDS.map(|second| (first, second))) {
            for has_main in [false, true] {
                same_as_cpu(&format!("{shape:?} {first} {second} {has_main}"), device, |device| {
                    let param = normal(shape, dtype, seed, device)?;
                    let mut parameter = Parameter::new(param, [first, second], seed)?;
                    parameter.is_rounded_stochastically = dtype == DType::BF16 && seed % 2 == 0;
                    if has_main {
                        parameter.main = Some(normal(shape, DType::F32, 60 + seed, device)?);
                    }
                    for number in 1..=3 {
                        parameter.grad = normal(shape, DType::F32, 20 + seed + number, device)?;
                        parameter.step(&AdamWStep { step: number, ..STEP })?;
                    }
                    parameter.results()
                })?;
            }
        }
    }
    Ok(())
}

fn around_2_16(device: &Device, dtype: DType) -> Outcome {
    for len in AROUND_2_16 {
        same_as_cpu(&format!("{len} elements"), device, |device| {
            let mut parameter = Parameter::new(normal([len], dtype, 1, device)?, [DType::U8; 2], 3)?;
            parameter.grad = normal([len], DType::F32, 2, device)?;
            parameter.step(&STEP)?;
            parameter.results()
        })?;
    }
    Ok(())
}

/// In the gradient, in the parameter, and in stored moments and scales.
fn special_values_are_the_cpus(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    let len = specials.len();
    let cols = 37; // several specials share a block
    let rows = len.div_ceil(cols);
    let values =
        |seed: usize| -> Vec<f32> { (0..rows * cols).map(|i| specials[(i * 7 + seed) % len]).collect() };
    for kind in KINDS {
        same_as_cpu(&format!("{kind}"), device, |device| {
            let mut results = Vec::new();
            for seed in 0..3 {
                let param = tensor(values(seed), [rows, cols], dtype, device)?;
                let mut parameter = Parameter::new(param, [kind; 2], 11)?;
                parameter.is_rounded_stochastically = dtype == DType::BF16;
                let shape = [rows, cols];
                for i in 0..2 {
                    let stored = values(3 + seed + i);
                    parameter.moments[i] = match kind {
                        DType::U8 => {
                            let codes = (0..rows * cols).map(|at| (at * 31 + seed) as u8).collect();
                            Tensor::from_vec::<u8>(codes, shape, device)?
                        }
                        kind => tensor(stored.clone(), shape, kind, device)?,
                    };
                    if let Some(scales) = &mut parameter.scales[i] {
                        let stored = stored.into_iter().take(scales.numel()).collect();
                        *scales = Tensor::from_vec::<f32>(stored, *scales.shape(), device)?;
                    }
                }
                for number in 1..=2 {
                    parameter.grad = tensor(values(5 * number), shape, DType::F32, device)?;
                    parameter.step(&AdamWStep { step: number as u64, grad_scale: 1.0, ..STEP })?;
                }
                results.extend(parameter.results()?);
            }
            Ok(results)
        })?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    for shape in [[1, 100_003], [300, 301]] {
        same_bits("optimizer", || {
            let mut parameter = Parameter::new(normal(shape, DType::BF16, 1, device)?, [DType::U8; 2], 4)?;
            parameter.is_rounded_stochastically = true;
            parameter.grad = normal(shape, DType::F32, 2, device)?;
            parameter.step(&STEP)?;
            let Parameter { param, moments, scales, .. } = parameter;
            let mut tensors = vec![param];
            for codes in moments {
                let values = codes.to_vec::<u8>()?.into_iter().map(f32::from).collect::<Vec<_>>();
                tensors.push(Tensor::from_vec(values, shape, device)?);
            }
            tensors.extend(scales.into_iter().flatten());
            Ok(tensors)
        })?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let fresh = |dtype| Parameter::new(normal([2, 130], dtype, 1, device)?, [DType::U8; 2], 1);
    let mut parameter = fresh(DType::F32)?;
    parameter.is_rounded_stochastically = true;
    refused(
        parameter.step(&STEP),
        "optimizer_step: param has dtype f32: expected bf16: other dtypes are rounded to nearest",
    )?;
    let mut parameter = fresh(DType::F32)?;
    parameter.scales[1] = None;
    refused(parameter.step(&STEP), "exp_avg_sq has dtype u8: expected f32, bf16, or u8 with scales")?;
    let mut parameter = fresh(DType::F32)?;
    parameter.moments[0] = Tensor::zeros([2, 130], DType::F32, device)?;
    refused(parameter.step(&STEP), "exp_avg has dtype f32: expected u8")?;
    let mut parameter = fresh(DType::F32)?;
    parameter.scales[0] = Some(Tensor::zeros([2, 1], DType::F32, device)?);
    refused(
        parameter.step(&STEP),
        "blocks and scale_inv: got [2, 2] and [2, 1]: a moment in FP8 has a scale for each 128 elements of a row",
    )?;
    let mut parameter = fresh(DType::F32)?;
    parameter.scales[0] = Some(Tensor::zeros([2, 2], DType::BF16, device)?);
    refused(parameter.step(&STEP), "scale_inv has dtype bf16: expected f32")?;
    let mut parameter = fresh(DType::F32)?;
    parameter.moments[1] = Tensor::zeros([2, 129], DType::U8, device)?;
    refused(parameter.step(&STEP), "param and exp_avg_sq: got [2, 130] and [2, 129]")?;
    let mut parameter = fresh(DType::F32)?;
    let held = parameter.scales[1].clone();
    refused(parameter.step(&STEP), "w.exp_avg_sq_scale_inv: cannot be changed in place")?;
    drop(held);
    let held = parameter.param.clone();
    refused(parameter.step(&STEP), "w: cannot be changed in place")?;
    drop(held);
    parameter.main = Some(Tensor::zeros([2, 130], DType::F32, device)?);
    let held = parameter.main.clone();
    refused(parameter.step(&STEP), "w.main_param: cannot be changed in place")?;
    drop(held);
    ensure(parameter.moments[0].to_vec::<u8>()?.iter().all(|&code| code == 0), || "changed".to_owned())
}
