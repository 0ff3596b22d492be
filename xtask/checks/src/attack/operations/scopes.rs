//! Recipes, and scopes in any order, with slots, weights, backward passes, snapshots and saved state.

use fp8_kernels::{DType, Operand, ops};
use fp8_recipe::{
    AutocastOptions, CurrentScaling, CustomRecipe, Format, GemmSlots, Nvfp4, Origin, QParams, QParamsByRole,
    Recipe, Scaling, ScalingState, SlotUpdate, Snapshot,
};

use super::super::case::Case;
use super::super::draw::{Draw, Kind};

pub(super) fn recipe(draw: &mut Draw) -> Recipe {
    if draw.once_in(6) {
        let patterns = ["*.input", "*.weight", "a", "b.*", "*.grad_output", "*", "c.*"];
        let count = draw.below(3);
        let mut rules = Vec::new();
        for _ in 0..count {
            let pattern = draw.pick(&patterns);
            rules.push((pattern, if draw.once_in(4) { Recipe::off() } else { plain(draw) }));
        }
        return Recipe::by_name(rules, plain(draw));
    }
    plain(draw)
}

/// One recipe for all slots.
fn plain(draw: &mut Draw) -> Recipe {
    if draw.once_in(8) {
        return Recipe::custom(Average { beta: draw.pick(&[0.0, 0.9, 1.5, -1.0]) });
    }
    if draw.once_in(10) {
        let [disable_rht, disable_stochastic_rounding, disable_2d_quantization] =
            [draw.flip(), draw.flip(), draw.flip()];
        return Nvfp4 {
            disable_rht,
            disable_stochastic_rounding,
            disable_2d_quantization,
            ..Default::default()
        }
        .into();
    }
    if !draw.once_in(3) {
        return super::drawn::delayed(draw).into();
    }
    let epsilon = draw.pick(&[0.0, 1e-3]);
    let fp8_format = if draw.once_in(20) { Format::E5M2 } else { Format::Hybrid };
    let mut params = || QParams { power_2_scale: draw.flip(), amax_epsilon: draw.option(epsilon) };
    let quant = QParamsByRole { input: params(), weight: params(), grad_output: params() };
    let mut recipe = CurrentScaling { fp8_format, quant, ..Default::default() };
    recipe.use_split_accumulator = (draw.flip(), draw.flip(), draw.flip());
    if draw.once_in(4) {
        recipe.override_linear_precision = (draw.flip(), draw.flip(), draw.flip());
    }
    recipe.into()
}

/// A moving average of amaxes. With a weight outside of 0 … 1, some scales cannot be used.
#[derive(Debug)]
struct Average {
    beta: f32,
}

impl CustomRecipe for Average {
    fn name(&self) -> &str {
        "average"
    }

    fn state(&self) -> &[&str] {
        &["mean"]
    }

    fn scale(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> f32 {
        state[0] = self.beta * state[0] + (1.0 - self.beta) * slot.amax;
        slot.fp8_max / state[0]
    }
}

pub(super) fn options(draw: &mut Draw) -> AutocastOptions {
    let dtype = draw.pick(&[None, None, Some(DType::BF16), Some(DType::F16), Some(DType::F32)]);
    AutocastOptions {
        enabled: !draw.once_in(6),
        calibrating: draw.once_in(6),
        compute_dtype: if draw.once_in(30) { Some(DType::U8) } else { dtype },
        ..Default::default()
    }
}

pub(super) fn recipes(case: &mut Case<'_>) -> Option<()> {
    let name = case.draw.pick(&["delayed", "current", "te-v0", "", "Delayed", "te-v1", "mxfp8"]);
    let _ = case.call("Recipe::from_name", || Recipe::from_name(name).map(drop));
    let _ = case.call("Format::from_str", || name.parse::<Format>());
    let recipe = recipe(&mut case.draw);
    case.say(|| format!("{recipe:?}"));
    case.call("Recipe::validate", || recipe.validate())?;
    let encoding = case.draw.encoding();
    let rule = super::drawn::rule(&mut case.draw, encoding);
    let (amax, old) = (case.draw.option(2.0), case.draw.option(1.0));
    case.say(|| format!("{rule:?} of {amax}, {old} before"));
    let scale = case.call("ScaleRule::scale", || rule.scale(amax, old))?;
    case.numbers("scale", vec![scale]);
    Some(())
}

/// Results of earlier calls that later calls use.
#[derive(Default)]
struct Left {
    origins: Vec<(Origin, usize)>,
    snapshots: Vec<Snapshot>,
    state: Option<ScalingState>,
    version: u64,
}

pub(super) fn scopes(case: &mut Case<'_>) -> Option<()> {
    let layers = vec![GemmSlots::new("a"), GemmSlots::new("b")];
    let device = super::tensors::policy(case);
    let mut scaling = case.call("Scaling::new", || Scaling::new(&layers, &device))?;
    scaling.set_counting(case.draw.flip());
    let recipes = [recipe(&mut case.draw), recipe(&mut case.draw)];
    let mut left = Left::default();
    for _ in 0..1 + case.draw.below(6) {
        let recipe = &recipes[case.draw.below(2)];
        case.say(|| format!("{recipe:?}"));
        match case.draw.below(8) {
            0..=2 => forward(case, &mut scaling, recipe, &layers, &mut left),
            3 | 4 => backward(case, &mut scaling, &layers, &mut left),
            5 => evaluation(case, &mut scaling, recipe, &layers),
            6 => {
                left.state = case.call("state", || scaling.state());
                Some(())
            }
            _ => match &left.state {
                Some(state) => {
                    let mut state = state.clone();
                    if case.draw.once_in(4) {
                        bend(&mut case.draw, &mut state);
                    }
                    case.call("load_state", || scaling.load_state(&state).map(drop))
                }
                None => Some(()),
            },
        };
        let state = case.call("state", || scaling.state())?;
        case.text("state", state);
        let reports = case.call("slot_reports", || scaling.slot_reports())?;
        case.text("reports", reports);
    }
    Some(())
}

/// State as no training leaves it.
fn bend(draw: &mut Draw, state: &mut ScalingState) {
    let at = draw.below(state.arenas.len());
    let Some(arena) = state.arenas.get_mut(at) else { return };
    match draw.below(6) {
        0 => arena.updates = draw.pick(&[u64::MAX, u64::MAX - 1, 1 << 63]),
        1 => drop(arena.scale.pop()),
        2 => {
            let value = draw.option(f32::NAN);
            arena.scale.iter_mut().for_each(|scale| *scale = value);
        }
        3 => {
            let value = draw.option(f32::INFINITY);
            arena.amax_history.iter_mut().flatten().for_each(|amax| *amax = value);
        }
        4 => drop(arena.amax_history.pop()),
        _ => arena.slots.reverse(),
    }
}

fn forward(
    case: &mut Case<'_>,
    scaling: &mut Scaling,
    recipe: &Recipe,
    layers: &[GemmSlots],
    left: &mut Left,
) -> Option<()> {
    let options = options(&mut case.draw);
    let (device, kind, dtype) = (
        case.device,
        case.draw.pick(&[Kind::Tame, Kind::Special]),
        case.draw.pick(&[DType::F32, DType::BF16]),
    );
    let mut inputs = Vec::new();
    for _ in 0..1 + case.draw.below(4) {
        inputs.push(case.tensor(&[3, 16], dtype, kind)?);
    }
    let mut cx = case.call("scope", || scaling.scope(recipe, &options))?;
    for x in &inputs {
        let at = case.draw.below(2);
        let layer = &layers[at];
        if case.draw.once_in(4) {
            left.version += 1;
        }
        let operand = match case.draw.below(5) {
            0 => case.call("quantize_weight", || {
                cx.quantize_weight(&layer.weight, left.version, &x.to_device(device)?)
            }),
            1 => {
                let mut inner = cx.disabled();
                case.call("disabled", || quantized(x, inner.slot(&layer.input)))
            }
            2 => {
                let other = self::recipe(&mut case.draw);
                let nested = case.call("nested", || cx.nested(&other));
                nested.and_then(|mut nested| case.call("slot", || quantized(x, nested.slot(&layer.weight))))
            }
            3 => case.call("slot", || quantized(x, cx.slot(&layer.grad_output))),
            _ => case.call("slot", || quantized(x, cx.slot(&layer.input))),
        };
        if let Some(operand) = operand {
            case.operand("operand", &operand);
        }
        left.origins.push((cx.origin(&layer.input), at));
        if case.draw.once_in(4) {
            left.snapshots.push(cx.snapshot());
        }
    }
    match case.draw.below(6) {
        0 => {
            case.run("drop", || drop(cx));
            Some(())
        }
        1 => case.call("discard", || cx.discard()),
        _ => case.call("commit", || cx.commit()),
    }
}

/// Under a slot that may have been refused.
fn quantized(
    x: &fp8_kernels::Tensor,
    slot: fp8_recipe::Result<fp8_kernels::Slot<'_>>,
) -> fp8_recipe::Result<Operand> {
    Ok(ops::quantize(x, &slot?)?)
}

fn backward(case: &mut Case<'_>, scaling: &mut Scaling, layers: &[GemmSlots], left: &mut Left) -> Option<()> {
    let kind = case.draw.pick(&[Kind::Tame, Kind::Special]);
    let dy = case.tensor(&[5, 16], DType::F32, kind)?;
    let mut cx = case.call("backward", || scaling.backward())?;
    for (origin, at) in left.origins.drain(..).rev() {
        // Now and then to another layer, or for another pass's slot.
        let layer = &layers[if case.draw.once_in(10) { 1 - at } else { at }];
        let name = if case.draw.once_in(10) { &layer.input } else { &layer.grad_output };
        let operand = case.call("slot", || quantized(&dy, cx.slot(&origin, name)));
        if let Some(operand) = operand {
            case.operand("operand", &operand);
        }
        let gemms = cx.fp8_gemms(&origin);
        case.run("fp8_gemms", || ());
        case.text("gemms", gemms);
    }
    for snapshot in left.snapshots.drain(..) {
        if let Some(mut replay) = case.call("replay", || cx.replay(&snapshot)) {
            let operand = case.call("slot", || quantized(&dy, replay.slot(&layers[0].input)));
            if let Some(operand) = operand {
                case.operand("operand", &operand);
            }
        }
    }
    match case.draw.below(6) {
        0 => {
            case.run("drop", || drop(cx));
            Some(())
        }
        1 => case.call("discard", || cx.discard()),
        _ => case.call("commit", || cx.commit()),
    }
}

fn evaluation(
    case: &mut Case<'_>,
    scaling: &mut Scaling,
    recipe: &Recipe,
    layers: &[GemmSlots],
) -> Option<()> {
    let x = case.tensor(&[3, 16], DType::F32, Kind::Special)?;
    let before = case.call("state", || scaling.state())?;
    let mut cx = case.call("eval", || scaling.eval(recipe))?;
    let operand = case.call("slot", || quantized(&x, cx.slot(&layers[0].input)));
    if let Some(operand) = operand {
        case.operand("operand", &operand);
    }
    case.call("commit", || cx.commit())?;
    let after = case.call("state", || scaling.state())?;
    // NaN in a history is unequal to itself.
    if format!("{before:?}") != format!("{after:?}") {
        case.fail("an evaluation changed the scaling state".to_owned());
    }
    Some(())
}
