//! Static scales of inputs from the amax histories of training.

use super::config::Config;
use super::plan::module;
use crate::{Error, Result};
use fp8_format::{E4M3, E5M2};
use fp8_nn::matches_name;
use fp8_recipe::{ArenaState, Direction, ScalingState};
use std::collections::BTreeMap;

/// The divisor of the amaxes of inputs.
const MAX: f32 = E4M3::MAX.to_f32();

/// Returns the static scales of the inputs of all layers that will be quantized.
pub(super) fn input_scales(
    state: &ScalingState,
    config: &Config,
    path: &str,
    ignored: &[String],
) -> Result<BTreeMap<String, f32>> {
    let mut layers = BTreeMap::new();
    for source in config.parameters() {
        if let Some(layer) = source.parameter.strip_suffix(".weight") {
            layers.extend(source.tensors.iter().map(|tensor| (tensor.clone(), layer.to_owned())));
        }
    }
    let mut scales = BTreeMap::new();
    for spec in config.tensors().iter().filter(|spec| spec.kind.is_linear()) {
        let module = module(&spec.name);
        if ignored.iter().any(|pattern| matches_name(pattern, module)) {
            continue;
        }
        let slot = format!("{path}.{}.input", layers.get(&spec.name).map_or("", String::as_str));
        let found = input_scale(state, &slot).map_err(|remedy| refused("true", remedy))?;
        let Some(scale) = found else {
            return Err(refused(
                "true",
                format!(
                    "the checkpoint has no amaxes of `{slot}`, which training under delayed scaling records: leave \
                     inputs dynamic, or quantize with scales from a calibration"
                ),
            ));
        };
        scales.insert(module.to_owned(), scale);
    }
    Ok(scales)
}

/// Returns amax / 448 of a slot, from the arena of delayed scaling that was updated last.
fn input_scale(state: &ScalingState, slot: &str) -> Result<Option<f32>, String> {
    let mut newest: Option<((u64, usize), &ArenaState, usize)> = None;
    for (position, arena) in state.arenas.iter().enumerate() {
        if arena.direction != Direction::Forward || !arena.recipe.starts_with("delayed(") {
            continue;
        }
        let Some(index) = arena.slots.iter().position(|own| &**own == slot) else { continue };
        let updated = match arena.last_updates.get(index) {
            Some(&updated) => updated,
            // Old files do not say it: the last arena in the list counts as the newest.
            None if arena.last_updates.is_empty() => position as u64 + 1,
            None => 0,
        };
        if updated == 0 || !has_past(arena, index) {
            continue;
        }
        // If two are equally new, one was started from the other. The longer one has more amaxes.
        let age = (updated, arena.amax_history.len());
        if newest.as_ref().is_none_or(|&(before, ..)| age >= before) {
            newest = Some((age, arena, index));
        }
    }
    newest.map(|(_, arena, index)| scale_of(arena, index, slot)).transpose()
}

/// Returns whether a slot ever ran.
fn has_past(arena: &ArenaState, index: usize) -> bool {
    let is_amax = |row: &Vec<f32>| row.get(index).is_some_and(|&amax| amax != 0.0);
    arena.scale.get(index).is_some_and(|&scale| scale > 0.0) || arena.amax_history.iter().any(is_amax)
}

/// Returns the largest amax of the window / 448. A history of one row is not in the file; its amax follows from the scale.
fn scale_of(arena: &ArenaState, index: usize, slot: &str) -> Result<f32, String> {
    let amax = arena.amax_history.iter().filter_map(|row| row.get(index)).copied();
    let amax = amax.filter(|amax| amax.is_finite()).fold(0f32, f32::max);
    let other = "leave inputs dynamic, or quantize with scales from a calibration";
    let found = if amax > 0.0 {
        amax / MAX
    } else {
        let exact = exact_rule(&arena.recipe).ok_or_else(|| {
            format!(
                "the checkpoint has no amax above 0 of `{slot}`, and it cannot be recovered from its scale, because the recipe rounds \
                 scales to powers of two or uses a custom function: {other}, or train with an amax_history_len of at least 2"
            )
        })?;
        let scale = arena.scale.get(index).copied().unwrap_or_default();
        // scale = fp8_max / amax / 2^margin.
        exact.fp8_max / MAX / (f64::from(scale) * exact.margin.exp2()) as f32
    };
    match found.is_finite() && found >= f32::MIN_POSITIVE {
        true => Ok(found),
        false => Err(format!("the history of `{slot}` gives the scale {found:e}: {other}")),
    }
}

/// The rule with which a recipe computes scales from amaxes without rounding: `scale = fp8_max / amax / 2^margin`.
struct ExactRule {
    margin: f64,
    fp8_max: f32,
}

/// Reads the key of a recipe of delayed scaling, or returns `None` if an amax cannot be computed from its scale.
fn exact_rule(key: &str) -> Option<ExactRule> {
    let (margin, rest) = key.strip_prefix("delayed(margin=")?.split_once(',')?;
    let (_, rest) = rest.split_once("fp8_format=")?;
    let (format, rest) = rest.split_once(',')?;
    // Names of a user's functions, which may contain anything, come behind "custom(".
    let is_exact =
        ["amax=max,scale=exact,", "amax=most_recent,scale=exact,"].iter().any(|&of| rest.starts_with(of));
    let fp8_max = if format == "E5M2" { E5M2::MAX.to_f32() } else { MAX };
    is_exact.then_some(ExactRule { margin: margin.parse().ok()?, fp8_max })
}

pub(super) fn refused(value: &str, remedy: String) -> Error {
    Error::Option { part: "export".into(), option: "static_inputs", value: value.into(), remedy }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: &str = "model.blocks.0.attention.qkv.input";

    fn key(margin: i32, format: &str, rule: &str) -> String {
        format!(
            "delayed(margin={margin},interval=1,fp8_format={format},{rule},override=(false, false, false),reduce_amax=true)"
        )
    }

    fn arena(recipe: &str, scale: f32, history: &[f32], last_updates: &[u64]) -> ArenaState {
        ArenaState {
            recipe: recipe.to_owned(),
            group: None,
            direction: Direction::Forward,
            updates: 9,
            slots: vec![SLOT.into()],
            scale: vec![scale],
            amax_history: history.iter().map(|&amax| vec![amax]).collect(),
            last_updates: last_updates.to_vec(),
            undetermined: Vec::new(),
            weights: Vec::new(),
            awaits_backward: false,
        }
    }

    fn scale(arenas: Vec<ArenaState>) -> Result<Option<f32>, String> {
        input_scale(&ScalingState { arenas, ..Default::default() }, SLOT)
    }

    #[test]
    fn the_amax_of_a_history_of_one_row_follows_from_an_exact_scale() {
        let exact = "amax=max,scale=exact";
        for (margin, format, fp8_max) in
            [(0, "HYBRID", 448.0), (2, "E4M3", 448.0), (-1, "HYBRID", 448.0), (1, "E5M2", 57344.0)]
        {
            let stored = fp8_max / 3.5 / 2f32.powi(margin);
            assert_eq!(
                scale(vec![arena(&key(margin, format, exact), stored, &[], &[4])]),
                Ok(Some(3.5 / 448.0))
            );
        }
        for rule in [
            "amax=max,scale=power_of_two",
            "amax=custom(\"x,scale=exact,\"),scale=exact",
            "amax=max,scale=custom(\"x\")",
        ] {
            let recipe = key(0, "HYBRID", rule);
            let error = scale(vec![arena(&recipe, 128.0, &[], &[4])]).unwrap_err();
            assert!(
                error.starts_with(&format!(
                    "the checkpoint has no amax above 0 of `{SLOT}`, and it cannot be recovered"
                )),
                "{error}"
            );
            // With a longer history the scale is not needed.
            assert_eq!(scale(vec![arena(&recipe, 128.0, &[7.0], &[4])]), Ok(Some(7.0 / 448.0)));
        }
    }

    #[test]
    fn the_newest_history_wins() {
        let recipe = key(0, "HYBRID", "amax=max,scale=exact");
        let of = |amax: f32, rows: usize, last: &[u64]| arena(&recipe, 1.0, &vec![amax; rows], last);
        // Files that say when: the larger number, then the longer history.
        assert_eq!(scale(vec![of(448.0, 1, &[5]), of(896.0, 1, &[4])]), Ok(Some(1.0)));
        assert_eq!(scale(vec![of(448.0, 2, &[5]), of(896.0, 1, &[5])]), Ok(Some(1.0)));
        // Files that do not: the last one in the list, whatever its number of updates.
        let mut first = of(448.0, 1, &[]);
        first.updates = 1000;
        assert_eq!(scale(vec![first.clone(), of(896.0, 1, &[])]), Ok(Some(2.0)));
        // A slot that never ran has no history.
        assert_eq!(scale(vec![first, arena(&recipe, -1.0, &[0.0], &[])]), Ok(Some(1.0)));
        assert_eq!(scale(vec![arena(&recipe, -1.0, &[0.0], &[])]), Ok(None));
    }
}
