//! Steps with moments in bf16 and FP8: groups, skipped steps, loss scales, and parameters that are quantized.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::compare::{ensure, equal, refused};
use super::data::{exact, normal};
use super::optimizer::{KINDS, Parameter};
use super::reference::{Got, same_as_cpu, same_results};
use fp8_kernels::ops::{
    AdamWFactors, AdamWStep, AdamWTensor, LossScale, LossScaleState, NormCheck, ScaledStep, SkippedSteps,
    StepCheck, UpdateCount,
};
use fp8_kernels::{Cell, DType, Device, Encoding, Result, Slot, Tensor, TransposePolicy, ops};

cases![
    f32_moments_are_those_of_adamw_groups: Dtypes,
    f32_moments_are_those_of_adamw_groups_scaled: Dtypes,
    a_norm_that_is_not_finite_changes_nothing,
    groups_have_their_own_numbers,
    nothing_to_update_is_a_step,
    a_scaled_step_is_the_cpus: Dtypes,
    quantized_parameters_are_the_updated_ones: Formats,
    the_step_draws_the_random_numbers,
    refuses,
];

const SHAPES: [[usize; 2]; 5] = [[3, 5], [0, 4], [2, 300], [130, 64], [1, 9]];

fn parameters(dtype: DType, kind: DType, device: &Device) -> Result<Vec<Parameter>> {
    let make = |(seed, shape): (u64, &[usize; 2])| {
        let mut parameter = Parameter::new(normal(*shape, dtype, seed, device)?, [kind; 2], seed)?;
        parameter.grad = normal(*shape, DType::F32, 20 + seed, device)?;
        if seed % 2 == 0 {
            parameter.main = Some(normal(*shape, DType::F32, 40 + seed, device)?);
        }
        Ok(parameter)
    };
    (0..).zip(&SHAPES).map(make).collect()
}

fn results(parameters: Vec<Parameter>) -> Result<Vec<Got>> {
    Ok(parameters
        .into_iter()
        .map(Parameter::results)
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect())
}

/// One step of all in two groups, of which the second has no decay.
fn step(parameters: &mut [Parameter], number: u64, check: StepCheck<'_>, device: &Device) -> Result<()> {
    let step = AdamWStep { step: number, ..STEP };
    let factors =
        [step, AdamWStep { weight_decay: 0.0, ..step }].map(|step| AdamWFactors::new(&step, device));
    let [decayed, undecayed] = factors;
    let (first, second) = parameters.split_at_mut(2);
    let [mut first, mut second] =
        [first, second].map(|group| group.iter_mut().map(Parameter::tensor).collect::<Vec<_>>());
    ops::optimizer_step(&mut [(&mut first, &decayed?), (&mut second, &undecayed?)], check).map(drop)
}

fn tensors(group: &mut [Parameter]) -> Vec<AdamWTensor<'_>> {
    let mut all = Vec::new();
    for Parameter { param, grad: main_grad, moments: [exp_avg, exp_avg_sq], main, .. } in group {
        let (name, main_param, slot) = ("w", main.as_mut(), None);
        all.push(AdamWTensor { name, param, main_grad, exp_avg, exp_avg_sq, main_param, slot });
    }
    all
}

/// The same step with the operations for moments in f32.
fn step_f32(
    parameters: &mut [Parameter],
    number: u64,
    scaled: Option<&ScaledStep<'_>>,
    device: &Device,
) -> Result<()> {
    let step = AdamWStep { step: number, ..STEP };
    let factors =
        [step, AdamWStep { weight_decay: 0.0, ..step }].map(|step| AdamWFactors::new(&step, device));
    let [decayed, undecayed] = factors;
    let (first, second) = parameters.split_at_mut(2);
    let (mut first, mut second) = (tensors(first), tensors(second));
    let groups = &mut [(&mut *first, &decayed?), (&mut *second, &undecayed?)];
    match scaled {
        Some(step) => ops::adamw_groups_scaled(groups, step).map(drop),
        None => ops::adamw_groups(groups, None).map(drop),
    }
}

fn f32_moments_are_those_of_adamw_groups(device: &Device, dtype: DType) -> Outcome {
    let [mut compact, mut plain] =
        [parameters(dtype, DType::F32, device)?, parameters(dtype, DType::F32, device)?];
    for number in 1..=3 {
        step(&mut compact, number, StepCheck::Never, device)?;
        step_f32(&mut plain, number, None, device)?;
    }
    same_results("f32", results(compact)?, results(plain)?)
}

/// The counts of a loss scale of this state.
struct Scaled {
    updates: UpdateCount,
    scale: LossScale,
    skipped: SkippedSteps,
}

impl Scaled {
    fn new(device: &Device) -> Result<Self> {
        let state = LossScaleState { scale: 4.0, ..Default::default() };
        Ok(Self {
            updates: UpdateCount::new(5, device)?,
            scale: LossScale::new(&state, device)?,
            skipped: SkippedSteps::new(device)?,
        })
    }

    fn step<'a>(&'a self, norm: &'a Tensor) -> ScaledStep<'a> {
        ScaledStep {
            updates: &self.updates,
            loss_scale: Some(&self.scale),
            gradients_are_scaled: true,
            norm: Some(norm),
            skipped: &self.skipped,
        }
    }

    fn numbers(&self) -> Result<[f32; 3]> {
        Ok([self.updates.read()? as f32, self.scale.overflow().read()?, self.skipped.read()? as f32])
    }
}

fn f32_moments_are_those_of_adamw_groups_scaled(device: &Device, dtype: DType) -> Outcome {
    let [mut compact, mut plain] =
        [parameters(dtype, DType::F32, device)?, parameters(dtype, DType::F32, device)?];
    let [first, second] = [Scaled::new(device)?, Scaled::new(device)?];
    for (number, norm) in (1..).zip([1.0, 2.0, f32::INFINITY]) {
        let norm = Tensor::scalar(norm, device)?;
        step(&mut compact, number, StepCheck::Scaled(first.step(&norm)), device)?;
        step_f32(&mut plain, number, Some(&second.step(&norm)), device)?;
        equal("counts", first.numbers()?, second.numbers()?)?;
    }
    equal("counts", first.numbers()?, [7.0, 1.0, 1.0])?;
    same_results("f32", results(compact)?, results(plain)?)
}

fn a_scaled_step_is_the_cpus(device: &Device, dtype: DType) -> Outcome {
    for kind in KINDS {
        same_as_cpu(&format!("{kind}"), device, |device| {
            let (mut all, scaled) = (parameters(dtype, kind, device)?, Scaled::new(device)?);
            let norm = Tensor::scalar(3.0, device)?;
            for number in 1..=2 {
                step(&mut all, number, StepCheck::Scaled(scaled.step(&norm)), device)?;
            }
            let mut all = results(all)?;
            all.push(Got::Numbers(scaled.numbers()?.to_vec()));
            Ok(all)
        })?;
    }
    Ok(())
}

fn a_norm_that_is_not_finite_changes_nothing(device: &Device) -> Outcome {
    for kind in KINDS {
        for norm in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let [mut got, mut want] =
                [parameters(DType::BF16, kind, device)?, parameters(DType::BF16, kind, device)?];
            let (norm, finite) = (Tensor::scalar(norm, device)?, Tensor::scalar(f32::MAX, device)?);
            let skipped = SkippedSteps::new(device)?;
            let check = |norm| StepCheck::Norm(NormCheck { norm, skipped: &skipped });
            step(&mut got, 1, check(&finite), device)?;
            step(&mut want, 1, StepCheck::Never, device)?;
            equal("skipped", skipped.read()?, 0)?;
            step(&mut got, 2, check(&norm), device)?;
            equal("skipped", skipped.read()?, 1)?;
            same_results(&format!("{kind}"), results(got)?, results(want)?)?;
        }
    }
    Ok(())
}

/// A group gives the same together with another and alone.
fn groups_have_their_own_numbers(device: &Device) -> Outcome {
    let mut together = parameters(DType::F32, DType::U8, device)?;
    step(&mut together, 1, StepCheck::Never, device)?;
    let mut alone = parameters(DType::F32, DType::U8, device)?;
    for (i, parameter) in alone.iter_mut().enumerate() {
        parameter.step(&AdamWStep { weight_decay: if i < 2 { STEP.weight_decay } else { 0.0 }, ..STEP })?;
    }
    same_results("alone", results(alone)?, results(together)?)
}

/// Groups without tensors or without elements, whose skipped steps are counted once.
fn nothing_to_update_is_a_step(device: &Device) -> Outcome {
    let (norm, skipped) = (Tensor::scalar(f32::NAN, device)?, SkippedSteps::new(device)?);
    let check = StepCheck::Norm(NormCheck { norm: &norm, skipped: &skipped });
    let factors = AdamWFactors::new(&STEP, device)?;
    ops::optimizer_step(&mut [], StepCheck::Never)?;
    let empty = Tensor::zeros([0, 4], DType::F32, device)?;
    let mut parameter = Parameter::new(empty, [DType::U8; 2], 1)?;
    ops::optimizer_step(&mut [(&mut [], &factors), (&mut [parameter.tensor()], &factors)], check)?;
    equal("skipped", skipped.read()?, 1)?;
    ops::optimizer_step(&mut [(&mut [parameter.tensor()], &factors)], StepCheck::Never)?;
    equal("skipped", skipped.read()?, 1)
}

/// Also in a step that is skipped.
fn quantized_parameters_are_the_updated_ones(device: &Device, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let rule = exact(encoding);
    for norm in [1.0, f32::NAN] {
        let param = normal([34, 130], DType::F32, 1, device)?;
        let mut parameter = Parameter::new(param, [DType::U8; 2], 1)?;
        parameter.grad = normal([34, 130], DType::F32, 2, device)?;
        let cell = Cell::new(16.0, device)?;
        let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
        let (norm, skipped) = (Tensor::scalar(norm, device)?, SkippedSteps::new(device)?);
        let factors = AdamWFactors::new(&STEP, device)?;
        let tensor = ops::OptimizerTensor { slot: Some(slot), ..parameter.tensor() };
        let check = StepCheck::Norm(NormCheck { norm: &norm, skipped: &skipped });
        let codes = ops::optimizer_step(&mut [(&mut [tensor], &factors)], check)?;
        let got = codes.into_iter().flatten().flatten().next().ok_or("no codes")?;
        let want = ops::quantize(&parameter.param, &slot)?.as_fp8().cloned().ok_or("no codes")?;
        same_results("codes", vec![got.into()], vec![want.into()])?;
    }
    Ok(())
}

/// Another step or another seed, other codes; the same ones, the same codes.
fn the_step_draws_the_random_numbers(device: &Device) -> Outcome {
    let codes = |number, seed| -> Result<[Vec<u8>; 2]> {
        let param = normal([40, 64], DType::F32, 1, device)?;
        let mut parameter = Parameter::new(param, [DType::U8; 2], seed)?;
        parameter.grad = normal([40, 64], DType::F32, 2, device)?;
        parameter.step(&AdamWStep { step: number, ..STEP })?;
        let [m, v] = &parameter.moments;
        Ok([m.to_vec()?, v.to_vec()?])
    };
    let first = codes(7, 1)?;
    equal("again", codes(7, 1)? == first, true)?;
    for (number, seed) in [(8, 1), (7, 2), (7 + (1 << 32), 1), (7, 1 + (1 << 32))] {
        for (other, first) in codes(number, seed)?.iter().zip(&first) {
            let same = other.iter().zip(first).filter(|(a, b)| a == b).count();
            // Two draws differ for a third of the elements.
            ensure(same < first.len() * 9 / 10, || {
                format!("step {number}, seed {seed}: {same} codes are the same")
            })?;
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let mut parameter = Parameter::new(normal([4], DType::F32, 1, device)?, [DType::U8; 2], 1)?;
    let (factors, skipped) = (AdamWFactors::new(&STEP, device)?, SkippedSteps::new(device)?);
    let mut step = |check: StepCheck<'_>| {
        ops::optimizer_step(&mut [(&mut [parameter.tensor()], &factors)], check).map(drop)
    };
    let norm = Tensor::zeros([2], DType::F32, device)?;
    let text = "optimizer_step: shape [2]: expected one number";
    refused(step(StepCheck::Norm(NormCheck { norm: &norm, skipped: &skipped })), text)?;
    let scaled = Scaled::new(device)?;
    refused(step(StepCheck::Scaled(scaled.step(&norm))), text)
}
