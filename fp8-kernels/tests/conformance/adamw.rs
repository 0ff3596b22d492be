use super::case::{Outcome, cases};
use super::compare::{close, equal, quiet, refused, same};
use super::data::{self, AROUND_2_16, FLOATS, exact, f64s, normal, specials, tolerance};
use super::reference::{Got, same_as_cpu, same_results};
use super::threads::same_bits;
use crate::oracle::adamw::{State, adamw as oracle};
use fp8_kernels::ops::AdamWStep;
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, REST, Result, Scale, ScaleRule, Slot, Tensor, TransposePolicy,
    UNSET, ops,
};

cases![
    matches_the_oracle_over_steps,
    bits_are_the_cpus: Dtypes,
    many_are_each: DtypesAndFormats,
    many_quantize_as_quantize_does: DtypesAndFormats,
    first_scales_are_the_cpus: DtypesAndFormats,
    first_scales_by_every_rule,
    around_2_16: Dtypes,
    special_gradients,
    special_parameters_and_moments: Dtypes,
    main_parameters_are_rounded_into_the_parameter,
    without_main_parameters_rounds_once,
    zero_gradients_only_decay,
    same_for_any_threads,
    an_error_changes_nothing,
    refuses,
];

pub(super) const STEP: AdamWStep =
    AdamWStep { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 0.5 };

fn moments(len: usize, device: &Device) -> Result<[Tensor; 2]> {
    let zeros = || Tensor::zeros([len], DType::F32, device);
    Ok([zeros()?, zeros()?])
}

fn matches_the_oracle_over_steps(device: &Device) -> Outcome {
    for len in [0, 1, 15, 16, 17, 101, 16_384 + 7] {
        let mut param = normal([len], DType::F32, 1, device)?;
        let [mut m, mut v] = moments(len, device)?;
        let mut want: Vec<State> =
            f64s(&param)?.into_iter().map(|p| State { p, ..State::default() }).collect();
        for number in 1..=20 {
            let step = AdamWStep { step: number, lr: STEP.lr / number as f32, ..STEP };
            let grad = normal([len], DType::F32, 100 + number, device)?;
            ops::adamw(&mut param, &grad, &mut m, &mut v, None, &step, "w")?;
            for (state, grad) in want.iter_mut().zip(f64s(&grad)?) {
                *state = oracle(*state, grad, &step);
            }
        }
        let of = |f: fn(&State) -> f64| want.iter().map(f).collect::<Vec<_>>();
        for (name, got, want) in [("p", &param, of(|s| s.p)), ("m", &m, of(|s| s.m)), ("v", &v, of(|s| s.v))]
        {
            close(
                &format!("{name}, {len} elements"),
                &got.to_vec::<f32>()?,
                &want,
                len,
                tolerance(DType::F32),
            )?;
        }
    }
    Ok(())
}

fn main_parameters_are_rounded_into_the_parameter(device: &Device) -> Outcome {
    for dtype in FLOATS {
        let len = 16_384 + 17;
        let mut main = normal([len], DType::F32, 1, device)?;
        let mut alone = Tensor::from_vec(main.to_vec::<f32>()?, [len], device)?;
        let mut param = ops::cast(&normal([len], DType::F32, 1, device)?, dtype)?;
        if dtype == DType::F32 {
            param = normal([len], DType::F32, 1, device)?;
        }
        let ([mut m, mut v], [mut m_alone, mut v_alone]) = (moments(len, device)?, moments(len, device)?);
        for number in 1..=3 {
            let step = AdamWStep { step: number, ..STEP };
            let grad = normal([len], DType::F32, 50 + number, device)?;
            ops::adamw(&mut param, &grad, &mut m, &mut v, Some(&mut main), &step, "w")?;
            ops::adamw(&mut alone, &grad, &mut m_alone, &mut v_alone, None, &step, "w")?;
        }
        same("main", &main.to_vec::<f32>()?, &alone.to_vec::<f32>()?, len)?;
        same(dtype.name(), &param.to_f32_vec()?, &ops::cast(&main, dtype)?.to_f32_vec()?, len)?;
    }
    Ok(())
}

fn without_main_parameters_rounds_once(device: &Device) -> Outcome {
    for dtype in [DType::BF16, DType::F16] {
        let param = normal([1009], dtype, 1, device)?;
        let mut wide = ops::cast(&param, DType::F32)?;
        let mut param =
            Tensor::from_vec(wide.to_vec::<f32>()?, [1009], device).and_then(|p| ops::cast(&p, dtype))?;
        let grad = normal([1009], DType::F32, 2, device)?;
        let ([mut m, mut v], [mut m_wide, mut v_wide]) = (moments(1009, device)?, moments(1009, device)?);
        ops::adamw(&mut param, &grad, &mut m, &mut v, None, &STEP, "w")?;
        ops::adamw(&mut wide, &grad, &mut m_wide, &mut v_wide, None, &STEP, "w")?;
        same(dtype.name(), &param.to_f32_vec()?, &ops::cast(&wide, dtype)?.to_f32_vec()?, 1009)?;
    }
    Ok(())
}

fn bits_are_the_cpus(device: &Device, dtype: DType) -> Outcome {
    for len in [0, 1, 7, 8, 9, 257, 8193] {
        same_as_cpu(&format!("{len} elements"), device, |device| {
            let mut param = normal([len], dtype, 1, device)?;
            let [mut m, mut v] = moments(len, device)?;
            let mut main = normal([len], DType::F32, 2, device)?;
            for number in 1..=3 {
                let (step, grad) =
                    (AdamWStep { step: number, ..STEP }, normal([len], DType::F32, 50 + number, device)?);
                ops::adamw(
                    &mut param,
                    &grad,
                    &mut m,
                    &mut v,
                    (number == 2).then_some(&mut main),
                    &step,
                    "w",
                )?;
            }
            Ok([param, m, v, main].map(Got::Tensor).into())
        })?;
    }
    Ok(())
}

fn special_gradients(device: &Device) -> Outcome {
    let values = specials();
    let len = values.len();
    same_as_cpu("special gradients", device, |device| {
        let mut param = Tensor::full(1.5, [len], DType::F32, device)?;
        let [mut m, mut v] = moments(len, device)?;
        let grad = Tensor::from_vec(values.clone(), [len], device)?;
        ops::adamw(&mut param, &grad, &mut m, &mut v, None, &AdamWStep { grad_scale: 1.0, ..STEP }, "w")?;
        numbers([param, m, v])
    })
}

/// The elements; a NaN's sign and payload are the machine's.
fn numbers<const N: usize>(tensors: [Tensor; N]) -> Result<Vec<Got>> {
    tensors.iter().map(|x| Ok(Got::Numbers(quiet(&x.to_f32_vec()?)))).collect()
}

/// One in each of four elements: the parameter, what it is rounded from, and both moments.
fn special_parameters_and_moments(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    let len = 4 * specials.len() + 3;
    let rule = exact(Encoding::E4M3);
    for has_main in [false, true] {
        same_as_cpu(&format!("{dtype}, main parameters: {has_main}"), device, |device| {
            let with = |place: usize, others: f32, dtype| {
                let value = |i: usize| if i % 4 == place { specials[i / 4 % specials.len()] } else { others };
                data::tensor((0..len).map(value).collect(), [1, len], dtype, device)
            };
            let (mut param, mut main) = (with(0, 1.5, dtype)?, with(1, -0.75, DType::F32)?);
            let (mut exp_avg, mut exp_avg_sq) = (with(2, 0.5, DType::F32)?, with(3, 0.25, DType::F32)?);
            let grad = normal([1, len], DType::F32, 4, device)?;
            let (cell, amax) = (Cell::new(16.0, device)?, Cell::new(REST, device)?);
            let tensor = ops::AdamWTensor {
                name: "w",
                param: &mut param,
                main_grad: &grad,
                exp_avg: &mut exp_avg,
                exp_avg_sq: &mut exp_avg_sq,
                main_param: has_main.then_some(&mut main),
                slot: Some(Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &cell, &rule) }),
            };
            let codes = ops::adamw_many(&mut [tensor], &STEP)?;
            let mut results: Vec<Got> = codes.into_iter().flatten().map(Got::from).collect();
            results.extend(numbers([param, main, exp_avg, exp_avg_sq])?);
            results.push(Got::Numbers(vec![amax.read()?]));
            Ok(results)
        })?;
    }
    Ok(())
}

fn around_2_16(device: &Device, dtype: DType) -> Outcome {
    for len in AROUND_2_16 {
        same_as_cpu(&format!("{len} elements"), device, |device| {
            let (mut param, grad) = (normal([len], dtype, 1, device)?, normal([len], DType::F32, 2, device)?);
            let [mut m, mut v] = moments(len, device)?;
            ops::adamw(&mut param, &grad, &mut m, &mut v, None, &STEP, "w")?;
            Ok([param, m, v].map(Got::Tensor).into())
        })?;
    }
    Ok(())
}

/// Those behind the first seven count nothing.
const MANY: [[usize; 2]; 13] = [
    [3, 5],
    [0, 4],
    [130, 66],
    [1, 257],
    [128, 64],
    [2, 2],
    [129, 72],
    [5, 9],
    [2, 16],
    [3, 5],
    [3, 8],
    [4, 3],
    [3, 5],
];

/// The state of one parameter.
struct Parameter {
    param: Tensor,
    grad: Tensor,
    moments: [Tensor; 2],
    main: Option<Tensor>,
    cells: (Cell, Cell, Counters),
}

impl Parameter {
    fn new(seed: usize, dtype: DType, device: &Device) -> Result<Self> {
        let shape = MANY[seed];
        let zeros = || Tensor::zeros(shape, DType::F32, device);
        let main = normal(shape, DType::F32, seed as u64, device)?;
        Ok(Self {
            param: normal(shape, dtype, seed as u64, device)?,
            grad: normal(shape, DType::F32, 20 + seed as u64, device)?,
            moments: [zeros()?, zeros()?],
            main: seed.is_multiple_of(2).then_some(main),
            cells: (Cell::new(3.0 + seed as f32, device)?, Cell::new(REST, device)?, Counters::new(device)?),
        })
    }
}

/// All parameters after two steps, and their codes, amaxes and counts, with one call a step or with one for each parameter.
fn steps(
    device: &Device,
    dtype: DType,
    encoding: Encoding,
    together: bool,
    own_scales: bool,
) -> Result<Vec<Got>> {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let rule = exact(encoding);
    let parameters = (0..MANY.len()).map(|seed| Parameter::new(seed, dtype, device));
    let mut parameters = parameters.collect::<Result<Vec<_>>>()?;
    let current = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: true };
    if own_scales {
        parameters.iter().try_for_each(|p| p.cells.0.write(UNSET))?;
    }
    let mut results = Vec::new();
    for number in 1..=2 {
        let step = AdamWStep { step: number, ..STEP };
        let mut tensors: Vec<_> = parameters
            .iter_mut()
            .enumerate()
            .map(|(i, p)| {
                let (cell, amax, counters) = &p.cells;
                let scale = match i % 4 {
                    _ if !own_scales => Scale::Cell { cell, first: &rule, keep: false },
                    0 => Scale::FromTensor(&current),
                    1 => Scale::FromAmax { amax: 3.0, rule: &rule },
                    place => Scale::Cell { cell, first: &rule, keep: place == 2 },
                };
                let slot = Slot {
                    scale,
                    amax: Some(amax),
                    counters: (i < 7).then_some(counters),
                    columnwise: i % 3 != 0,
                    ..Slot::off(encoding)
                };
                let [exp_avg, exp_avg_sq] = &mut p.moments;
                ops::AdamWTensor {
                    name: "w",
                    param: &mut p.param,
                    main_grad: &p.grad,
                    exp_avg,
                    exp_avg_sq,
                    main_param: p.main.as_mut(),
                    slot: (i != 3).then_some(slot),
                }
            })
            .collect();
        let codes = if together {
            ops::adamw_many(&mut tensors, &step)?
        } else {
            let one = |tensor| ops::adamw_many(std::slice::from_mut(tensor), &step);
            tensors.iter_mut().map(one).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect()
        };
        results.extend(codes.into_iter().flatten().map(Got::from));
    }
    for Parameter { param, moments, main, cells: (cell, amax, counters), .. } in parameters {
        results.extend(std::iter::once(param).chain(moments).chain(main).map(Got::Tensor));
        let counts = counters.read()?;
        let counts =
            [counts.saturated, counts.underflowed, counts.elements, counts.nan].map(|count| count as f32);
        results.push(Got::Numbers([vec![cell.read()?, amax.read()?], counts.to_vec()].concat()));
    }
    Ok(results)
}

fn many_are_each(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    same_as_cpu("together", device, |device| steps(device, dtype, encoding, true, false))?;
    let together = steps(device, dtype, encoding, true, false)?;
    let each = steps(device, dtype, encoding, false, false)?;
    same_results("together and each alone", together, each)
}

/// Scales that come from what the step left: of cells that are not set, of current scaling.
fn first_scales_are_the_cpus(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    same_as_cpu("own scales", device, |device| steps(device, dtype, encoding, true, true))
}

/// To the ends of their ranges; without a gradient and without decay a step leaves a parameter as it is.
fn first_scales_by_every_rule(device: &Device) -> Outcome {
    let values = [
        f32::from_bits(1),
        1e-41,
        f32::MIN_POSITIVE,
        1e-30,
        1.0,
        3.3,
        448.0,
        1e30,
        2e38,
        f32::MAX,
        0.0,
        f32::INFINITY,
        f32::NAN,
    ];
    let step = AdamWStep { weight_decay: 0.0, ..STEP };
    for (rule, is_cell) in data::rules().into_iter().flat_map(|rule| [(rule.clone(), false), (rule, true)]) {
        same_as_cpu(&format!("{rule:?}, of a cell: {is_cell}"), device, |device| {
            let mut parameters = Vec::new();
            for value in values {
                // Decay makes NaN of an infinite parameter: one in f16 overflows behind it.
                let is_main = value.is_infinite();
                let main = is_main.then(|| Tensor::full(1e30, [3], DType::F32, device)).transpose()?;
                let param = Tensor::full(value, [3], if is_main { DType::F16 } else { DType::F32 }, device)?;
                let cells = [Cell::new(UNSET, device)?, Cell::new(REST, device)?];
                parameters.push((param, main, moments(3, device)?, cells));
            }
            let grad = Tensor::zeros([3], DType::F32, device)?;
            let mut tensors = Vec::new();
            for (param, main, [exp_avg, exp_avg_sq], [cell, amax]) in &mut parameters {
                let unset = Scale::Cell { cell, first: &rule, keep: true };
                let scale = if is_cell { unset } else { Scale::FromTensor(&rule) };
                let slot = Some(Slot { scale, amax: Some(amax), ..Slot::off(Encoding::E4M3) });
                let (main_grad, main_param) = (&grad, main.as_mut());
                tensors.push(ops::AdamWTensor {
                    name: "w",
                    param,
                    main_grad,
                    exp_avg,
                    exp_avg_sq,
                    main_param,
                    slot,
                });
            }
            let codes = ops::adamw_many(&mut tensors, &step)?;
            let mut results: Vec<Got> = codes.into_iter().flatten().map(Got::from).collect();
            for (.., [cell, amax]) in &parameters {
                results.push(Got::Numbers(vec![cell.read()?, amax.read()?]));
            }
            Ok(results)
        })?;
    }
    Ok(())
}

/// The codes of a step are those of quantizing what it left.
fn many_quantize_as_quantize_does(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let rule = exact(encoding);
    for (seed, shape) in MANY.into_iter().enumerate() {
        let mut p = Parameter::new(seed, dtype, device)?;
        let (cell, amax, _) = &p.cells;
        let slot = Slot { amax: Some(amax), ..Slot::fixed(encoding, cell, &rule) };
        let [exp_avg, exp_avg_sq] = &mut p.moments;
        let mut tensors = [ops::AdamWTensor {
            name: "w",
            param: &mut p.param,
            main_grad: &p.grad,
            exp_avg,
            exp_avg_sq,
            main_param: p.main.as_mut(),
            slot: Some(slot),
        }];
        let got = ops::adamw_many(&mut tensors, &STEP)?;
        let got = got.into_iter().next().flatten().ok_or("nothing was quantized")?;
        let again = Cell::new(REST, device)?;
        let slot = Slot { amax: Some(&again), ..Slot::fixed(encoding, cell, &rule) };
        let want = ops::quantize(&p.param, &slot)?;
        let want = want.as_fp8().ok_or("got high precision, want FP8")?;
        same(&format!("{shape:?}"), &got.codes()?, &want.codes()?, shape[1])?;
        same("scale_inv", &[got.scale_inv().item()?], &[want.scale_inv().item()?], 1)?;
        same("amax", &[p.cells.1.read()?], &[again.read()?], 1)?;
    }
    Ok(())
}

fn zero_gradients_only_decay(device: &Device) -> Outcome {
    let mut param = Tensor::full(2.0, [3], DType::F32, device)?;
    let [mut m, mut v] = moments(3, device)?;
    let step = AdamWStep { lr: 0.5, weight_decay: 0.5, ..STEP };
    ops::adamw(&mut param, &Tensor::zeros([3], DType::F32, device)?, &mut m, &mut v, None, &step, "w")?;
    same("p", &param.to_vec::<f32>()?, &[1.5; 3], 3)
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let len = 100_003;
    let grad = normal([len], DType::F32, 2, device)?;
    same_bits("adamw", || {
        let mut param = normal([len], DType::F32, 1, device)?;
        let [mut m, mut v] = moments(len, device)?;
        ops::adamw(&mut param, &grad, &mut m, &mut v, None, &STEP, "w")?;
        Ok(vec![param, m, v])
    })
}

fn an_error_changes_nothing(device: &Device) -> Outcome {
    let grad = normal([4], DType::F32, 2, device)?;
    let fresh = || -> Result<[Tensor; 4]> {
        let [m, v] = moments(4, device)?;
        Ok([normal([4], DType::F32, 1, device)?, m, v, normal([4], DType::F32, 3, device)?])
    };
    for (held, wording) in
        ["w: cannot be changed in place", "w.exp_avg: ", "w.exp_avg_sq: ", "w.main_param: "]
            .iter()
            .enumerate()
    {
        let mut tensors = fresh()?;
        let holder = tensors[held].clone();
        let [p, m, v, main] = &mut tensors;
        refused(ops::adamw(p, &grad, m, v, Some(main), &STEP, "w"), wording)?;
        equal("holders", holder.holders(), 1)?;
        for (got, want) in tensors.iter().zip(fresh()?) {
            same(wording, &got.to_vec::<f32>()?, &want.to_vec::<f32>()?, 4)?;
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (mut p, [mut m, mut v]) = (normal([4], DType::F32, 1, device)?, moments(4, device)?);
    let grad = normal([4], DType::F32, 2, device)?;
    let mut step = |step: AdamWStep| ops::adamw(&mut p, &grad, &mut m, &mut v, None, &step, "w");
    refused(step(AdamWStep { step: 0, ..STEP }), "adamw: step = 0: steps are numbered from 1")?;
    refused(step(AdamWStep { beta1: 1.0, ..STEP }), "beta1 = 1: a decay is at least 0 and less than 1")?;
    refused(step(AdamWStep { beta2: -0.5, ..STEP }), "beta2 = -0.5")?;
    refused(step(AdamWStep { lr: f32::NAN, ..STEP }), "lr = NaN: give a finite number of at least 0")?;
    refused(step(AdamWStep { eps: -1.0, ..STEP }), "eps = -1")?;
    refused(step(AdamWStep { weight_decay: f32::INFINITY, ..STEP }), "weight_decay = inf")?;
    refused(step(AdamWStep { grad_scale: f32::NAN, ..STEP }), "grad_scale = NaN")?;
    let narrow = Tensor::zeros([4], DType::BF16, device)?;
    refused(
        ops::adamw(&mut p, &narrow, &mut m, &mut v, None, &STEP, "w"),
        "main_grad has dtype bf16: expected f32",
    )?;
    let short = Tensor::zeros([3], DType::F32, device)?;
    refused(
        ops::adamw(&mut p, &short, &mut m, &mut v, None, &STEP, "w"),
        "param and main_grad: got [4] and [3]",
    )
}
