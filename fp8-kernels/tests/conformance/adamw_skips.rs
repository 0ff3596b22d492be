//! Steps that depend on the norm of their gradients.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::compare::{ensure, equal, quiet, refused};
use super::data::{exact, normal};
use super::reference::{Got, same_as_cpu, same_results};
use fp8_kernels::ops::{AdamWFactors, NormCheck, SkippedSteps};
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, Fp8Tensor, REST, Result, Scale, ScaleRule, Slot, Tensor,
    TransposePolicy, UNSET, ops,
};

cases![
    a_norm_that_is_not_finite_changes_nothing: DtypesAndFormats,
    a_finite_norm_changes_no_bit: DtypesAndFormats,
    codes_of_a_skipped_step_are_the_cpus: DtypesAndFormats,
    the_norm_of_bad_gradients_skips: Dtypes,
    a_step_of_groups_is_counted_once,
    refuses,
];

const NOT_FINITE: [f32; 5] =
    [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0xffc0_0001), f32::from_bits(0x7f80_0001)];
/// The shapes of the parameters: matrices and vectors.
const SHAPES: [[usize; 2]; 8] = [[3, 5], [0, 4], [130, 66], [1, 257], [128, 64], [1, 8], [40, 300], [1, 9]];

/// All of one parameter.
struct Parameter {
    param: Tensor,
    grad: Tensor,
    moments: [Tensor; 2],
    main: Option<Tensor>,
    cells: (Cell, Cell, Counters),
}

impl Parameter {
    fn new(seed: usize, dtype: DType, device: &Device) -> Result<Self> {
        let (shape, number) = (SHAPES[seed], seed as u64);
        let main = normal(shape, DType::F32, number, device)?;
        let squares = Tensor::zeros(shape, DType::F32, device)?;
        Ok(Self {
            param: normal(shape, dtype, number, device)?,
            grad: normal(shape, DType::F32, 20 + number, device)?,
            moments: [normal(shape, DType::F32, 60 + number, device)?, squares],
            main: seed.is_multiple_of(2).then_some(main),
            cells: (
                Cell::new(if seed % 3 == 2 { UNSET } else { 3.0 }, device)?,
                Cell::new(REST, device)?,
                Counters::new(device)?,
            ),
        })
    }

    /// Every third is quantized with a scale of its own, every seventh not at all.
    fn tensor<'a>(
        &'a mut self,
        seed: usize,
        encoding: Encoding,
        rule: &'a ScaleRule,
    ) -> ops::AdamWTensor<'a> {
        let (cell, amax, counters) = &self.cells;
        let scale = match seed % 4 {
            0 => Scale::FromTensor(rule),
            place => Scale::Cell { cell, first: rule, keep: place == 2 },
        };
        let slot = Slot {
            scale,
            amax: Some(amax),
            counters: Some(counters),
            columnwise: !seed.is_multiple_of(3),
            ..Slot::off(encoding)
        };
        let [exp_avg, exp_avg_sq] = &mut self.moments;
        ops::AdamWTensor {
            name: "w",
            param: &mut self.param,
            main_grad: &self.grad,
            exp_avg,
            exp_avg_sq,
            main_param: self.main.as_mut(),
            slot: (seed % 7 != 5).then_some(slot),
        }
    }
}

/// Returns the bits that a skipped step must not change.
fn kept(parameters: &[Parameter]) -> Result<Vec<u32>> {
    let mut bits = Vec::new();
    for Parameter { param, moments: [m, v], main, .. } in parameters {
        for tensor in [Some(param), Some(m), Some(v), main.as_ref()].into_iter().flatten() {
            bits.extend(tensor.to_f32_vec()?.iter().map(|value| value.to_bits()));
        }
    }
    Ok(bits)
}

/// One step of all parameters in two groups, as `norm` decides; the count of skipped steps and the codes.
fn step(
    parameters: &mut [Parameter],
    encoding: Encoding,
    norm: Option<f32>,
    device: &Device,
) -> Result<(u64, Vec<Fp8Tensor>)> {
    let rule = exact(encoding);
    let factors = [STEP, ops::AdamWStep { weight_decay: 0.0, ..STEP }];
    let factors = factors.map(|step| AdamWFactors::new(&step, device));
    let [decayed, undecayed] = factors;
    let mut groups: [Vec<ops::AdamWTensor<'_>>; 2] = Default::default();
    for (seed, parameter) in parameters.iter_mut().enumerate() {
        groups[usize::from(seed % 3 == 1)].push(parameter.tensor(seed, encoding, &rule));
    }
    let norm = norm.map(|norm| Tensor::scalar(norm, device)).transpose()?;
    let skipped = SkippedSteps::new(device)?;
    let check = norm.as_ref().map(|norm| NormCheck { norm, skipped: &skipped });
    let [first, second] = &mut groups;
    let codes = ops::adamw_groups(&mut [(first, &decayed?), (second, &undecayed?)], check)?;
    Ok((skipped.read()?, codes.into_iter().flatten().flatten().collect()))
}

fn all(dtype: DType, device: &Device) -> Result<Vec<Parameter>> {
    (0..SHAPES.len()).map(|seed| Parameter::new(seed, dtype, device)).collect()
}

/// Nor does it touch more than quantizing does: the codes are those of the parameters that stay.
fn a_norm_that_is_not_finite_changes_nothing(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    for norm in NOT_FINITE {
        let mut parameters = all(dtype, device)?;
        let before = kept(&parameters)?;
        let (skipped, codes) = step(&mut parameters, encoding, Some(norm), device)?;
        equal("skipped", skipped, 1)?;
        ensure(before == kept(&parameters)?, || format!("a step of norm {norm} has changed something"))?;
        // What quantizing alone gives.
        let mut want = Vec::new();
        let rule = exact(encoding);
        for group in [false, true] {
            for (seed, parameter) in all(dtype, device)?.iter_mut().enumerate() {
                let Some(slot) = parameter.tensor(seed, encoding, &rule).slot else { continue };
                if (seed % 3 == 1) == group {
                    let quantized = ops::quantize(&normal(SHAPES[seed], dtype, seed as u64, device)?, &slot)?;
                    want.extend(quantized.as_fp8().cloned());
                }
            }
        }
        let got = codes.into_iter().map(Got::from).collect();
        same_results("codes", got, want.into_iter().map(Got::from).collect())?;
    }
    Ok(())
}

fn everything(parameters: &[Parameter], codes: Vec<Fp8Tensor>) -> Result<Vec<Got>> {
    let mut results: Vec<Got> = codes.into_iter().map(Got::from).collect();
    let kept: Vec<f32> = kept(parameters)?.into_iter().map(f32::from_bits).collect();
    results.push(Got::Numbers(quiet(&kept)));
    for Parameter { cells: (cell, amax, counters), .. } in parameters {
        let counts = counters.read()?;
        let counts = [counts.saturated, counts.underflowed, counts.elements].map(|count| count as f32);
        results.push(Got::Numbers([vec![cell.read()?, amax.read()?], counts.to_vec()].concat()));
    }
    Ok(results)
}

/// The largest norm and the smallest let a step pass, with the bits of a step without a norm.
fn a_finite_norm_changes_no_bit(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let run = |norm| -> Result<Vec<Got>> {
        let mut parameters = all(dtype, device)?;
        let (skipped, codes) = step(&mut parameters, encoding, norm, device)?;
        let mut results = everything(&parameters, codes)?;
        results.push(Got::Numbers(vec![skipped as f32]));
        Ok(results)
    };
    for norm in [0.0, 1.0, f32::MAX, f32::from_bits(1)] {
        same_results(&format!("norm {norm}"), run(Some(norm))?, run(None)?)?;
    }
    Ok(())
}

/// With their amaxes, first scales and counts.
fn codes_of_a_skipped_step_are_the_cpus(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    same_as_cpu("a skipped step", device, |device| {
        let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let mut parameters = all(dtype, device)?;
        let (skipped, codes) = step(&mut parameters, encoding, Some(f32::NAN), device)?;
        let mut results = everything(&parameters, codes)?;
        results.push(Got::Numbers(vec![skipped as f32]));
        Ok(results)
    })
}

/// One element of one gradient, or finite ones whose squares overflow, or whose norm does.
fn the_norm_of_bad_gradients_skips(device: &Device, dtype: DType) -> Outcome {
    let bad: [(&[f32], bool); 6] = [
        (&[f32::INFINITY], true),
        (&[f32::NEG_INFINITY], true),
        (&[f32::NAN], true),
        (&[f32::MAX; 4], true), // a norm of 2 · f32::MAX
        (&[3e38], false),       // a square beyond f32, a norm within
        (&[1e20; 30_000], false),
    ];
    for ((values, skips), place) in bad.into_iter().flat_map(|bad| [(bad, 2), (bad, 6)]) {
        let mut parameters = all(dtype, device)?;
        let mut grad = parameters[place].grad.to_vec::<f32>()?;
        let middle = grad.len() / 2;
        grad[middle..].iter_mut().zip(values).for_each(|(to, from)| *to = *from);
        parameters[place].grad = Tensor::from_vec(grad, SHAPES[place], device)?;
        let norm = ops::grad_norm(&parameters.iter().map(|p| &p.grad).collect::<Vec<_>>())?.item()?;
        let before = kept(&parameters)?;
        let (skipped, _) = step(&mut parameters, Encoding::E4M3, Some(norm), device)?;
        let what = format!("{:e} in gradient {place}, norm {norm:e}", values[0]);
        equal(&what, skipped, u64::from(skips))?;
        ensure((before == kept(&parameters)?) == skips, || what)?;
    }
    Ok(())
}

/// Whichever group is empty or has no elements, over several steps.
fn a_step_of_groups_is_counted_once(device: &Device) -> Outcome {
    let norms = [f32::NAN, 1.0, f32::INFINITY, f32::INFINITY].map(|norm| Tensor::scalar(norm, device));
    for lens in
        [[vec![5], vec![7]], [vec![], vec![7]], [vec![5], vec![]], [vec![0], vec![7]], [vec![0], vec![]]]
    {
        let skipped = SkippedSteps::new(device)?;
        let factors = [AdamWFactors::new(&STEP, device)?, AdamWFactors::new(&STEP, device)?];
        for (norm, want) in norms.iter().zip([1, 1, 2, 3]) {
            let norm = norm.as_ref().map_err(ToString::to_string)?;
            let mut tensors = lens.iter().map(|lens| {
                let zeros = |len: &usize| -> Result<[Tensor; 4]> {
                    let zeros = || Tensor::zeros([*len], DType::F32, device);
                    Ok([zeros()?, zeros()?, zeros()?, zeros()?])
                };
                lens.iter().map(zeros).collect::<Result<Vec<_>>>()
            });
            let (mut first, mut second) = (tensors.next().ok_or("none")??, tensors.next().ok_or("none")??);
            let (mut first, mut second) = (lent(&mut first), lent(&mut second));
            let groups = &mut [(&mut *first, &factors[0]), (&mut *second, &factors[1])];
            ops::adamw_groups(groups, Some(NormCheck { norm, skipped: &skipped }))?;
            equal(&format!("{lens:?}"), skipped.read()?, want)?;
        }
        skipped.reset()?;
        equal("after a reset", skipped.read()?, 0)?;
    }
    Ok(())
}

/// Each with its gradient and moments.
fn lent(tensors: &mut [[Tensor; 4]]) -> Vec<ops::AdamWTensor<'_>> {
    let mut all = Vec::new();
    for [param, main_grad, exp_avg, exp_avg_sq] in tensors {
        let (name, main_param, slot) = ("w", None, None);
        all.push(ops::AdamWTensor { name, param, main_grad, exp_avg, exp_avg_sq, main_param, slot });
    }
    all
}

fn refuses(device: &Device) -> Outcome {
    let step = |norm: &Tensor| -> Result<()> {
        let mut parameter = Parameter::new(0, DType::F32, device)?;
        let (rule, skipped) = (exact(Encoding::E4M3), SkippedSteps::new(device)?);
        let factors = AdamWFactors::new(&STEP, device)?;
        let mut tensors = [parameter.tensor(0, Encoding::E4M3, &rule)];
        let check = NormCheck { norm, skipped: &skipped };
        ops::adamw_groups(&mut [(&mut tensors, &factors)], Some(check)).map(drop)
    };
    refused(step(&Tensor::zeros([2], DType::F32, device)?), "adamw_groups: shape [2]: expected one number")?;
    refused(step(&Tensor::zeros([1], DType::BF16, device)?), "norm has dtype bf16: expected f32")
}
