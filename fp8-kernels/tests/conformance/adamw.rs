use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{FLOATS, f64s, normal, tolerance};
use super::threads::same_bits;
use crate::oracle::adamw::{State, adamw as oracle};
use fp8_kernels::ops::AdamWStep;
use fp8_kernels::{DType, Device, Result, Tensor, ops};

cases![
    matches_the_oracle_over_steps,
    main_parameters_are_rounded_into_the_parameter,
    without_main_parameters_rounds_once,
    zero_gradients_only_decay,
    same_for_any_threads,
    an_error_changes_nothing,
    refuses,
];

const STEP: AdamWStep =
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
        ["w: in-place update", "w.exp_avg: ", "w.exp_avg_sq: ", "w.main_param: "].iter().enumerate()
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
