//! AdamW in all its forms.

use fp8_kernels::ops::{self, AdamWFactors, AdamWStep, AdamWTensor, NormCheck, SkippedSteps};
use fp8_kernels::{DType, Tensor};

use super::super::case::Case;
use super::super::draw::{Draw, Kind};
use super::slots::Parts;

/// A parameter and all that its update changes.
struct State {
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    main_param: Option<Tensor>,
    parts: Option<Parts>,
}

impl State {
    /// `takes_slot` says whether the operation quantizes: cells that it does not take are of no device that it could refuse.
    fn draw(case: &mut Case<'_>, kind: Kind, takes_slot: bool) -> Option<Self> {
        let (rank, dtype) = (case.draw.below(4), case.draw.dtype());
        let shape = case.draw.extents(rank, 1024);
        let f32s = |case: &mut Case<'_>| {
            let of = case.draw.dtype_like(DType::F32);
            case.tensor(&shape, of, kind).map(|x| x.tensor)
        };
        let param = case.tensor(&shape, dtype, kind)?.tensor;
        let [grad, exp_avg, exp_avg_sq] = [f32s(case)?, f32s(case)?, f32s(case)?];
        let main_param = if case.draw.flip() { Some(f32s(case)?) } else { None };
        let parts = if takes_slot && case.draw.once_in(3) { Some(Parts::draw(case)?) } else { None };
        Some(Self { param, grad, exp_avg, exp_avg_sq, main_param, parts })
    }

    fn tensor<'a>(&'a mut self) -> AdamWTensor<'a> {
        AdamWTensor {
            name: "w",
            param: &mut self.param,
            main_grad: &self.grad,
            exp_avg: &mut self.exp_avg,
            exp_avg_sq: &mut self.exp_avg_sq,
            main_param: self.main_param.as_mut(),
            slot: self.parts.as_ref().map(Parts::slot),
        }
    }

    fn record(&self, case: &mut Case<'_>) {
        let changed = [&self.param, &self.exp_avg, &self.exp_avg_sq];
        for tensor in changed.into_iter().chain(&self.main_param) {
            case.exact("after", tensor);
        }
        if let Some(parts) = &self.parts {
            parts.record(case);
        }
    }
}

fn step(draw: &mut Draw) -> AdamWStep {
    let usual = AdamWStep::default();
    AdamWStep {
        lr: draw.option(usual.lr),
        beta1: draw.option(usual.beta1),
        beta2: draw.option(usual.beta2),
        eps: draw.option(usual.eps),
        weight_decay: draw.option(usual.weight_decay),
        step: draw.pick(&[1, 1, 2, 10, 1000, 0, u64::MAX]),
        grad_scale: draw.option(usual.grad_scale),
    }
}

pub(super) fn adamw(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (kind, numbers) = (case.draw.kind(), step(&mut case.draw));
    case.say(|| format!("{numbers:?}"));
    let mut states = Vec::new();
    let way = case.draw.below(3);
    let count = if way == 0 { 1 } else { case.draw.below(4) };
    for _ in 0..count {
        states.push(State::draw(case, kind, way != 0)?);
    }
    let shared = states.first().filter(|_| case.draw.once_in(10)).map(|state| state.exp_avg.clone());
    match (way, states.first_mut()) {
        (0, Some(state)) => {
            let main_param = state.main_param.as_mut();
            let State { param, grad, exp_avg, exp_avg_sq, .. } = state;
            let _ = case
                .call("adamw", || ops::adamw(param, grad, exp_avg, exp_avg_sq, main_param, &numbers, "w"));
        }
        (1, _) => {
            let mut tensors: Vec<_> = states.iter_mut().map(State::tensor).collect();
            let codes = case.call("adamw_many", || ops::adamw_many(&mut tensors, &numbers));
            for codes in codes.into_iter().flatten().flatten() {
                case.codes("codes", &codes);
            }
        }
        _ => {
            let device = case.device;
            let factors = case.aside("AdamWFactors::new", || AdamWFactors::new(&numbers, device))?;
            let other = step(&mut case.draw);
            let _ = case.aside("set", || factors.set(&other));
            let skipped = case.aside("SkippedSteps::new", || SkippedSteps::new(device))?;
            let norm = if case.draw.once_in(3) {
                None
            } else {
                let (shape, of) = (vec![case.draw.pick(&[1, 1, 1, 0, 2])], case.draw.dtype_like(DType::F32));
                Some(case.tensor(&shape, of, kind)?.tensor)
            };
            let mut tensors: Vec<_> = states.iter_mut().map(State::tensor).collect();
            let at = case.draw.below(tensors.len() + 1);
            let (first, second) = tensors.split_at_mut(at);
            let groups = &mut [(first, &factors), (second, &factors)];
            let check = norm.as_ref().map(|norm| NormCheck { norm, skipped: &skipped });
            let codes = case.call("adamw_groups", || ops::adamw_groups(groups, check));
            for codes in codes.into_iter().flatten().flatten().flatten() {
                case.codes("codes", &codes);
            }
        }
    }
    // Whether it was refused or not: what is refused has changed nothing.
    if !case.is_mixed() {
        case.run("after", || ());
        for state in &states {
            state.record(case);
        }
    }
    drop(shared);
    Some(())
}
