use super::case::{Outcome, cases};
use super::compare::{close, ensure, equal, refused, same};
use super::data::{FLOATS, SHAPES, normal, specials, tensor, tolerance};
use super::reference::{Got, same_as_cpu};
use crate::oracle::adamw::{State, adamw as oracle};
use fp8_kernels::ops::{
    AdamWFactors, AdamWStep, LossScale, LossScaleRule, LossScaleState, ScaledStep, SkippedSteps, UpdateCount,
};
use fp8_kernels::{Arena, ArenaOptions, Cell, DType, Device, Result, Tensor, ops};

cases![
    multiplies_and_divides: Dtypes,
    special_values_are_the_cpus: Dtypes,
    only_norms_that_are_not_finite_set_the_flag,
    grows_and_backs_off_as_pytorch_does,
    extreme_scales,
    full_counts_begin_anew,
    steps_are_numbered_by_the_device,
    each_of_many_groups_has_its_own_factors,
    a_full_count_of_updates_stays,
    a_norm_that_is_not_finite_backs_off,
    without_a_scale_skipped_steps_count,
    the_gradient_of_a_loss_is_multiplied_before_it_is_rounded: Dtypes,
    flags_are_reduced_with_row_0,
    amaxes_that_are_not_finite_set_the_flag,
    refuses,
];

fn new(scale: f32, device: &Device) -> Result<LossScale> {
    LossScale::new(&LossScaleState { scale, ..Default::default() }, device)
}

fn multiplies_and_divides(device: &Device, dtype: DType) -> Outcome {
    for shape in SHAPES {
        for scale in [1024.0, 0.3] {
            let (cell, x) = (new(scale, device)?, normal(shape, dtype, 4, device)?);
            let y = ops::apply_loss_scale(&x, &cell)?;
            let times = |factor: f32| {
                let values = x.to_f32_vec()?.iter().map(|v| v * factor).collect();
                tensor(values, *x.shape(), dtype, device)?.to_f32_vec()
            };
            same(&format!("{dtype} · {scale}"), &y.to_f32_vec()?, &times(scale)?, shape[1])?;
            let mut z = ops::cast(&ops::cast(&x, DType::F32)?, dtype)?;
            if dtype == DType::F32 {
                z = normal(shape, dtype, 4, device)?;
            }
            ops::undo_loss_scale(&mut z, &cell, "z")?;
            same(&format!("{dtype} / {scale}"), &z.to_f32_vec()?, &times(1.0 / scale)?, shape[1])?;
        }
    }
    Ok(())
}

fn special_values_are_the_cpus(device: &Device, dtype: DType) -> Outcome {
    same_as_cpu("special values", device, |device| {
        let values: Vec<f32> = specials().into_iter().filter(|v| !v.is_nan()).collect();
        let mut results = Vec::new();
        for scale in [65536.0, 3.0, f32::MIN_POSITIVE, 1e38] {
            let scale = new(scale, device)?;
            let mut x = tensor(values.clone(), [values.len()], dtype, device)?;
            results.push(Got::Tensor(ops::apply_loss_scale(&x, &scale)?));
            ops::undo_loss_scale(&mut x, &scale, "x")?;
            results.push(Got::Tensor(x));
        }
        Ok(results)
    })
}

fn only_norms_that_are_not_finite_set_the_flag(device: &Device) -> Outcome {
    for (norm, flag) in [
        (0.0, 0.0),
        (-1.0, 0.0),
        (f32::MAX, 0.0),
        (f32::INFINITY, 1.0),
        (f32::NEG_INFINITY, 1.0),
        (f32::NAN, 1.0),
        (-f32::NAN, 1.0),
    ] {
        let overflow = Cell::new(0.0, device)?;
        ops::check_finite(&Tensor::scalar(norm, device)?, &overflow)?;
        equal(&format!("{norm}"), overflow.read()?, flag)?;
        // A later norm clears nothing.
        ops::check_finite(&Tensor::scalar(1.0, device)?, &overflow)?;
        equal(&format!("{norm}, then 1"), overflow.read()?, flag)?;
    }
    Ok(())
}

/// `GradScaler.update`, as its documentation has it.
fn grows_and_backs_off_as_pytorch_does(device: &Device) -> Outcome {
    let rule = LossScaleRule { growth_factor: 3.0, backoff_factor: 0.25, growth_interval: 3 };
    let overflows = [false, false, false, false, true, true, false, false, true, false, false, false, false];
    for rule in [Some(rule), None] {
        let scale = new(1000.0, device)?;
        let (mut want, mut streak, mut skipped) = (1000.0f32, 0, 0);
        for (step, overflow) in overflows.into_iter().enumerate() {
            scale.overflow().write(if overflow { 1.0 } else { 0.0 })?;
            ops::update_loss_scale(&scale, rule.as_ref())?;
            if overflow {
                skipped += 1;
                streak = 0;
                want *= if rule.is_some() { 0.25 } else { 1.0 };
            } else if rule.is_some() {
                streak += 1;
                if streak == 3 {
                    streak = 0;
                    want *= 3.0;
                }
            }
            let state = LossScaleState { scale: want, growth_tracker: streak, skipped_steps: skipped };
            equal(&format!("step {step} by {rule:?}"), scale.state()?, state)?;
            equal("the flag", scale.overflow().read()?, 0.0)?;
        }
    }
    Ok(())
}

fn extreme_scales(device: &Device) -> Outcome {
    let rule = LossScaleRule { growth_interval: 1, ..Default::default() };
    let scale = new(f32::MAX / 1.5, device)?;
    ops::update_loss_scale(&scale, Some(&rule))?;
    equal("an infinite scale is not taken", scale.state()?.scale, f32::MAX / 1.5)?;
    scale.set_state(&LossScaleState { scale: f32::MIN_POSITIVE, ..Default::default() })?;
    scale.overflow().write(1.0)?;
    ops::update_loss_scale(&scale, Some(&rule))?;
    equal("nor one whose inverse is infinite", scale.state()?.scale, f32::MIN_POSITIVE)?;
    // A tracker beyond the interval, of a state that was saved with a longer one.
    scale.set_state(&LossScaleState { scale: 2.0, growth_tracker: 70, skipped_steps: 9 })?;
    ops::update_loss_scale(&scale, Some(&LossScaleRule { growth_interval: 50, ..rule }))?;
    equal("grown", scale.state()?, LossScaleState { scale: 4.0, growth_tracker: 0, skipped_steps: 9 })
}

fn full_counts_begin_anew(device: &Device) -> Outcome {
    let rule = LossScaleRule::default();
    let scale = new(2.0, device)?;
    for (overflow, growth_tracker, skipped_steps) in [(0.0, 0, u64::MAX), (1.0, 0, 0)] {
        let full = LossScaleState { scale: 2.0, growth_tracker: u64::MAX, skipped_steps: u64::MAX };
        scale.set_state(&full)?;
        scale.overflow().write(overflow)?;
        ops::update_loss_scale(&scale, Some(&rule))?;
        let state = scale.state()?;
        equal("counts", [state.growth_tracker, state.skipped_steps], [growth_tracker, skipped_steps])?;
    }
    Ok(())
}

const STEP: AdamWStep =
    AdamWStep { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 77, grad_scale: 1.0 };
const SIZES: [usize; 3] = [17, 300, 1];

/// Three parameters in two groups, with all that a step needs.
struct Rig {
    params: Vec<[Tensor; 3]>,
    factors: [std::sync::Arc<AdamWFactors>; 2],
    updates: UpdateCount,
    skipped: SkippedSteps,
}

impl Rig {
    fn new(updates: u64, device: &Device) -> Result<Self> {
        let zeros = |len: usize| Tensor::zeros([len], DType::F32, device);
        let param =
            |len: usize| Ok([normal([len], DType::F32, len as u64, device)?, zeros(len)?, zeros(len)?]);
        Ok(Self {
            params: SIZES.into_iter().map(param).collect::<Result<_>>()?,
            factors: [
                AdamWFactors::new(&STEP, device)?,
                AdamWFactors::new(&AdamWStep { weight_decay: 0.0, ..STEP }, device)?,
            ],
            updates: UpdateCount::new(updates, device)?,
            skipped: SkippedSteps::new(device)?,
        })
    }

    /// A step with gradients of noise that contain `scale`.
    fn step(
        &mut self,
        seed: u64,
        scale: Option<&LossScale>,
        are_scaled: bool,
        norm: Option<f32>,
        device: &Device,
    ) -> Result<()> {
        let grads = SIZES.map(|len| normal([len], DType::F32, 100 * seed + len as u64, device));
        let grads = grads.into_iter().collect::<Result<Vec<_>>>()?;
        let mut tensors: Vec<_> = self
            .params
            .iter_mut()
            .zip(&grads)
            .map(|([param, exp_avg, exp_avg_sq], main_grad)| ops::AdamWTensor {
                name: "w",
                param,
                main_grad,
                exp_avg,
                exp_avg_sq,
                main_param: None,
                slot: None,
            })
            .collect();
        let (first, second) = tensors.split_at_mut(2);
        let norm = norm.map(|norm| Tensor::scalar(norm, device)).transpose()?;
        let step = ScaledStep {
            updates: &self.updates,
            loss_scale: scale,
            gradients_are_scaled: are_scaled,
            norm: norm.as_ref(),
            skipped: &self.skipped,
        };
        let [decayed, undecayed] = &self.factors;
        ops::adamw_groups_scaled(&mut [(first, decayed), (second, undecayed)], &step).map(drop)
    }

    fn values(&self) -> Result<Vec<f32>> {
        let all = self.params.iter().flatten().map(Tensor::to_vec::<f32>);
        Ok(all.collect::<Result<Vec<_>>>()?.concat())
    }
}

fn steps_are_numbered_by_the_device(device: &Device) -> Outcome {
    let scale = new(8.0, device)?;
    let mut rig = Rig::new(0, device)?;
    let mut want: Vec<Vec<State>> = Vec::new();
    for [param, ..] in &rig.params {
        let state = |p: f32| State { p: p.into(), ..Default::default() };
        want.push(param.to_vec::<f32>()?.into_iter().map(state).collect());
    }
    let mut number = 0;
    for seed in 0..6 {
        let overflow = seed % 3 == 1;
        scale.overflow().write(if overflow { 1.0 } else { 0.0 })?;
        let before = rig.values()?;
        let are_scaled = seed != 3;
        rig.step(seed, Some(&scale), are_scaled, None, device)?;
        if overflow {
            same("a skipped step", &rig.values()?, &before, 1)?;
        } else {
            number += 1;
            for (i, states) in want.iter_mut().enumerate() {
                let weight_decay = if i < 2 { STEP.weight_decay } else { 0.0 };
                let grad_scale = if are_scaled { 0.125 } else { 1.0 };
                let step = AdamWStep { weight_decay, step: number, grad_scale, ..STEP };
                let grads = normal([SIZES[i]], DType::F32, 100 * seed + SIZES[i] as u64, device)?;
                for (state, grad) in states.iter_mut().zip(grads.to_vec::<f32>()?) {
                    *state = oracle(*state, grad.into(), &step);
                }
            }
        }
        equal("updates", rig.updates.read()?, number)?;
    }
    equal("skipped", rig.skipped.read()?, 2)?;
    for ([param, m, v], want) in rig.params.iter().zip(&want) {
        let of = |f: fn(&State) -> f64| want.iter().map(f).collect::<Vec<_>>();
        close("p", &param.to_vec::<f32>()?, &of(|s| s.p), 1, tolerance(DType::F32))?;
        close("m", &m.to_vec::<f32>()?, &of(|s| s.m), 1, tolerance(DType::F32))?;
        close("v", &v.to_vec::<f32>()?, &of(|s| s.v), 1, tolerance(DType::F32))?;
    }
    // Late steps, whose powers vanish: the CPU's bits.
    for updates in [0, 1, 2, 9, 100, 1023, 65_536, 1 << 40, u64::MAX - 5] {
        same_as_cpu(&format!("after {updates} updates"), device, |device| {
            let (mut rig, scale) = (Rig::new(updates, device)?, new(3.0, device)?);
            for seed in 0..3 {
                rig.step(seed, Some(&scale), true, Some(1.0), device)?;
            }
            Ok(vec![Got::Numbers(rig.values()?)])
        })?;
    }
    Ok(())
}

/// More groups than a warp has threads, with β from far below 1 to near it. Of parameters that are 0, a step shows every bit of
/// its factors.
fn each_of_many_groups_has_its_own_factors(device: &Device) -> Outcome {
    let beta = |i: i32| 1.0 - 0.7 * 0.6f32.powi(i);
    let steps = (0..33).map(|i| AdamWStep {
        lr: 0.01 + 0.001 * i as f32,
        beta1: beta(i % 17),
        beta2: beta(i * 5 % 19),
        weight_decay: 0.0,
        ..STEP
    });
    for updates in [0, 1, 6, 62, 999, 12_345] {
        same_as_cpu(&format!("after {updates} updates"), device, |device| {
            let factors =
                steps.clone().map(|step| AdamWFactors::new(&step, device)).collect::<Result<Vec<_>>>()?;
            let zeros = || (0..factors.len()).map(|_| Tensor::zeros([9], DType::F32, device));
            let (mut params, mut first) =
                (zeros().collect::<Result<Vec<_>>>()?, zeros().collect::<Result<Vec<_>>>()?);
            let (mut second, grad) =
                (zeros().collect::<Result<Vec<_>>>()?, normal([9], DType::F32, 1, device)?);
            let states = params.iter_mut().zip(&mut first).zip(&mut second);
            let mut tensors: Vec<_> = states
                .map(|((param, exp_avg), exp_avg_sq)| ops::AdamWTensor {
                    name: "w",
                    param,
                    main_grad: &grad,
                    exp_avg,
                    exp_avg_sq,
                    main_param: None,
                    slot: None,
                })
                .collect();
            let mut groups: Vec<_> = tensors.chunks_mut(1).zip(&factors).collect();
            let (updates, skipped) = (UpdateCount::new(updates, device)?, SkippedSteps::new(device)?);
            let step = ScaledStep {
                updates: &updates,
                loss_scale: None,
                gradients_are_scaled: false,
                norm: None,
                skipped: &skipped,
            };
            ops::adamw_groups_scaled(&mut groups, &step)?;
            drop(groups);
            let values = params.iter().map(Tensor::to_vec::<f32>).collect::<Result<Vec<_>>>()?;
            Ok(vec![Got::Numbers(values.concat())])
        })?;
    }
    Ok(())
}

/// The number of the last step that can be counted stays.
fn a_full_count_of_updates_stays(device: &Device) -> Outcome {
    let after = |updates| -> Result<(u64, Vec<f32>)> {
        let (mut rig, scale) = (Rig::new(updates, device)?, new(3.0, device)?);
        rig.step(1, Some(&scale), true, Some(1.0), device)?;
        Ok((rig.updates.read()?, rig.values()?))
    };
    let [(last, values), (full, same_values)] = [after(u64::MAX - 1)?, after(u64::MAX)?];
    equal("updates", [last, full], [u64::MAX; 2])?;
    ensure(values.iter().all(|v| v.is_finite()), || "a step is not finite".to_owned())?;
    same("values", &same_values, &values, 1)
}

fn a_norm_that_is_not_finite_backs_off(device: &Device) -> Outcome {
    let (scale, mut rig) = (new(8.0, device)?, Rig::new(5, device)?);
    let before = rig.values()?;
    rig.step(1, Some(&scale), true, Some(f32::NAN), device)?;
    same("a skipped step", &rig.values()?, &before, 1)?;
    ops::update_loss_scale(&scale, Some(&LossScaleRule::default()))?;
    equal("the scale", (scale.state()?.scale, rig.updates.read()?, rig.skipped.read()?), (4.0, 5, 1))?;
    rig.step(1, Some(&scale), true, Some(1e30), device)?;
    ensure(rig.values()? != before, || "the next step changes nothing".to_owned())?;
    equal("updates", (rig.updates.read()?, rig.skipped.read()?), (6, 1))
}

fn without_a_scale_skipped_steps_count(device: &Device) -> Outcome {
    let mut rig = Rig::new(5, device)?;
    let before = rig.values()?;
    rig.step(1, None, true, Some(f32::INFINITY), device)?;
    same("a skipped step", &rig.values()?, &before, 1)?;
    equal("updates", (rig.updates.read()?, rig.skipped.read()?), (6, 1))?;
    rig.step(1, None, true, None, device)?;
    equal("updates", (rig.updates.read()?, rig.skipped.read()?), (7, 1))
}

fn the_gradient_of_a_loss_is_multiplied_before_it_is_rounded(device: &Device, dtype: DType) -> Outcome {
    let (logits, scale) = (normal([3, 40], dtype, 1, device)?, new(4096.0, device)?);
    let targets = Tensor::from_vec(vec![3i32, 39, 0], [3], device)?;
    // So large a batch that f16 could not hold the gradients.
    let options = ops::CrossEntropyOptions { normalizer: Some(1e7), ..Default::default() };
    let (_, saved) = ops::cross_entropy(&logits, &targets, &options)?;
    let got = ops::cross_entropy_backward_scaled(&logits, &targets, &saved, &options, &scale)?;
    let want = ops::cross_entropy_backward(&logits, &targets, &saved, &options, 4096.0)?;
    equal("dtype", got.dtype(), dtype)?;
    same("a factor of the host and of the device", &got.to_f32_vec()?, &want.to_f32_vec()?, 40)?;
    ensure(got.to_f32_vec()?.iter().all(|&v| v != 0.0), || "gradients underflowed".to_owned())
}

fn flags_are_reduced_with_row_0(device: &Device) -> Outcome {
    for slots in [0, 1, 5] {
        let arena = Arena::new(slots, ArenaOptions { history_len: 3, ..Default::default() }, device)?;
        let flag = Cell::new(1.0, device)?;
        let rest = arena.staged()?;
        arena.carry_flag(&flag)?;
        equal("length", (arena.staged_len(), arena.staged()?.len()), (slots + 1, slots + 1))?;
        equal("the flag", arena.staged()?[0], 1.0)?;
        refused(arena.merge_staged(&rest), "merge_staged")?;
        arena.roll_back()?;
        equal("after roll_back", (arena.staged()?, arena.staged_len()), (rest.clone(), slots))?;
        flag.write(0.0)?;
        arena.carry_flag(&flag)?;
        let mut other = vec![2.5; slots + 1];
        other[0] = 1.0;
        arena.merge_staged(&other)?;
        arena.take_flag(&flag)?;
        equal("taken", (flag.read()?, arena.staged()?), (1.0, vec![2.5; slots]))?;
        // Histories have not moved.
        equal("history", arena.history()?, vec![0.0; 2 * slots])?;
    }
    Ok(())
}

fn amaxes_that_are_not_finite_set_the_flag(device: &Device) -> Outcome {
    for slots in [0usize, 1, 255, 256, 300] {
        let places = [None, Some(0), Some(slots / 2), slots.checked_sub(1)];
        for place in places.into_iter().filter(|place| place.is_none_or(|place| place < slots)) {
            for value in [f32::MAX, f32::INFINITY, f32::NAN] {
                let mut arena =
                    Arena::new(slots, ArenaOptions { history_len: 2, ..Default::default() }, device)?;
                let mut row = vec![3.0; slots];
                if let Some(place) = place {
                    row[place] = value;
                }
                arena.merge_staged(&row)?;
                arena.set_history(&vec![f32::INFINITY; slots])?;
                let overflow = Cell::new(0.0, device)?;
                ops::check_amaxes(&arena, &overflow)?;
                let expected = if place.is_some() && !value.is_finite() { 1.0 } else { 0.0 };
                equal(&format!("{value} at {place:?} of {slots}"), overflow.read()?, expected)?;
            }
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    for scale in [0.0, -1.0, f32::INFINITY, f32::NAN, 1e-40] {
        refused(new(scale, device), "give a finite number of at least 2⁻¹²⁶")?;
        let set = new(1.0, device)?.set_state(&LossScaleState { scale, ..Default::default() });
        refused(set, "loss_scale: scale = ")?;
    }
    let scale = new(8.0, device)?;
    let rules = [
        (LossScaleRule { growth_factor: 1.0, ..Default::default() }, "growth_factor = 1"),
        (LossScaleRule { growth_factor: f32::INFINITY, ..Default::default() }, "growth_factor = inf"),
        (LossScaleRule { backoff_factor: 1.0, ..Default::default() }, "backoff_factor = 1"),
        (LossScaleRule { backoff_factor: 0.0, ..Default::default() }, "backoff_factor = 0"),
        (LossScaleRule { backoff_factor: f32::NAN, ..Default::default() }, "backoff_factor = NaN"),
        (LossScaleRule { growth_interval: 0, ..Default::default() }, "growth_interval = 0: give at least 1"),
    ];
    for (rule, text) in rules {
        refused(ops::update_loss_scale(&scale, Some(&rule)), text)?;
    }
    let integers = Tensor::from_vec(vec![1i32], [1], device)?;
    refused(ops::apply_loss_scale(&integers, &scale), "i32")?;
    let two = Tensor::zeros([2], DType::F32, device)?;
    refused(ops::check_finite(&two, scale.overflow()), "expected one number, the norm")?;
    let mut x = Tensor::zeros([2], DType::F32, device)?;
    let shared = x.clone();
    refused(ops::undo_loss_scale(&mut x, &scale, "x"), "x")?;
    drop(shared);
    for dtype in FLOATS {
        ops::apply_loss_scale(&Tensor::zeros([0], dtype, device)?, &scale)?;
    }
    Ok(())
}
