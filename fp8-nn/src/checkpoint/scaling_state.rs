//! Scaling state in a checkpoint: numbers as tensors, names as JSON in the metadata.

use super::reader::Reader;
use super::writer::Writer;
use crate::{Layer, Parameter, Result, parameters};
use fp8_recipe::{ArenaState, Direction, DropoutProgress, Scaling, ScalingState, WeightState};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

const KEY: &str = "fp8.scaling";
/// Absent without dropout, and in files of older versions.
const DROPOUT_KEY: &str = "fp8.dropout";

/// The fields of an arena that are not numbers per slot.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Header {
    recipe: String,
    group: Option<String>,
    direction: String,
    updates: u64,
    slots: Vec<String>,
    /// Files of older versions do not have it.
    #[serde(default)]
    last_updates: Vec<u64>,
    /// Files of older versions do not have it.
    #[serde(default)]
    undetermined: Vec<String>,
    /// Files of older versions do not have it.
    #[serde(default)]
    weights: Vec<Weight>,
    /// Files of older versions do not have it.
    #[serde(default)]
    awaits_backward: bool,
}

/// A weight that has not changed since it was quantized.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Weight {
    slot: String,
    parameter: String,
    /// The bits of the scale, since a decimal number may be rounded.
    scale: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    step_scale: Option<u32>,
}

/// The parameter of each slot whose weight has not changed.
pub(crate) type Weights = BTreeMap<String, String>;

/// Tells a `Scaling` whose state was loaded which parameters of the model are the weights that the state describes.
pub(crate) fn bind(scaling: &mut Scaling, model: &(impl Layer + ?Sized), weights: &Weights) -> Result<()> {
    let by_name: BTreeMap<&str, &Parameter> =
        parameters(model).into_iter().map(|parameter| (&**parameter.name(), parameter)).collect();
    Ok(scaling.bind_weights(&mut |slot| {
        let parameter = by_name.get(weights.get(slot)?.as_str())?;
        Some(parameter.shared_version().clone())
    })?)
}

impl Header {
    /// Describes an arena of a `Scaling` of this model.
    pub(crate) fn of(arena: &ArenaState, model: &(impl Layer + ?Sized)) -> Self {
        let all = parameters(model);
        let weight = |state: &WeightState| {
            let parameter = all.iter().find(|parameter| state.is_of(parameter.shared_version()))?;
            Some(Weight {
                slot: state.slot.to_string(),
                parameter: parameter.name().to_string(),
                scale: state.scale.to_bits(),
                step_scale: state.step_scale.map(f32::to_bits),
            })
        };
        Self {
            undetermined: arena.undetermined.iter().map(|name| name.to_string()).collect(),
            weights: arena.weights.iter().filter_map(weight).collect(),
            awaits_backward: arena.awaits_backward,
            recipe: arena.recipe.clone(),
            group: arena.group.clone(),
            direction: arena.direction.name().to_owned(),
            updates: arena.updates,
            slots: arena.slots.iter().map(|name| name.to_string()).collect(),
            last_updates: arena.last_updates.clone(),
        }
    }

    /// The number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the parameters of its weights, by slot.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (String, String)> {
        self.weights.iter().map(|weight| (weight.slot.clone(), weight.parameter.clone()))
    }

    /// Returns the arena with a scale for each slot and consecutive rows of amaxes. The error says what does not fit.
    pub(crate) fn arena(self, scale: Vec<f32>, history: &[f32]) -> Result<ArenaState, String> {
        let direction = Direction::ALL.into_iter().find(|direction| direction.name() == self.direction);
        Ok(ArenaState {
            direction: direction.ok_or_else(|| format!("unknown direction `{}`", self.direction))?,
            amax_history: history.chunks(self.slots.len().max(1)).map(<[f32]>::to_vec).collect(),
            recipe: self.recipe,
            group: self.group,
            updates: self.updates,
            slots: self.slots.into_iter().map(Into::into).collect(),
            scale,
            last_updates: self.last_updates,
            undetermined: self.undetermined.into_iter().map(Into::into).collect(),
            weights: self.weights.into_iter().map(Weight::state).collect(),
            awaits_backward: self.awaits_backward,
        })
    }
}

impl Weight {
    fn state(self) -> WeightState {
        WeightState::new(
            Arc::from(self.slot),
            f32::from_bits(self.scale),
            self.step_scale.map(f32::from_bits),
        )
    }
}

pub(super) fn write(state: &ScalingState, model: &(impl Layer + ?Sized), writer: &mut Writer) -> Result<()> {
    let mut headers = Vec::new();
    for (n, arena) in state.arenas.iter().enumerate() {
        let slots = arena.slots.len();
        writer.floats(&format!("scaling.{n}.scale"), &[slots], &arena.scale);
        let history: Vec<f32> = arena.amax_history.concat();
        writer.floats(&format!("scaling.{n}.amax_history"), &[arena.amax_history.len(), slots], &history);
        headers.push(Header::of(arena, model));
    }
    let json = serde_json::to_string(&headers).map_err(|error| fp8_recipe::Error::State {
        recipe: "all".to_owned(),
        direction: "both",
        problem: error.to_string(),
    })?;
    writer.metadata(KEY, &json);
    if let Some(DropoutProgress { seed, scopes }) = state.dropout {
        writer.metadata(DROPOUT_KEY, &format!("{seed} {scopes}"));
    }
    Ok(())
}

/// Reads the state, and the parameters of its weights.
pub(super) fn read(reader: &Reader<'_>) -> Result<(ScalingState, Weights)> {
    let json = reader.all_metadata().get(KEY);
    let json = json.ok_or_else(|| reader.problem(format!("metadata `{KEY}` is missing")))?;
    let headers: Vec<Header> =
        serde_json::from_str(json).map_err(|e| reader.problem(format!("metadata `{KEY}`: {e}")))?;
    let (mut state, mut weights) = (ScalingState::default(), Weights::new());
    for (n, header) in headers.into_iter().enumerate() {
        let slots = header.slots();
        let (_, scale) = reader.floats(&format!("scaling.{n}.scale"))?;
        let (shape, history) = reader.floats(&format!("scaling.{n}.amax_history"))?;
        if shape.len() != 2 || shape[1] != slots || scale.len() != slots {
            let problem = format!("scaling.{n}: shapes {shape:?} and [{}] for {slots} slots", scale.len());
            return Err(reader.problem(problem));
        }
        weights.extend(header.weights());
        state.arenas.push(header.arena(scale, &history).map_err(|problem| reader.problem(problem))?);
    }
    state.dropout = reader.all_metadata().get(DROPOUT_KEY).map(|text| dropout(text, reader)).transpose()?;
    Ok((state, weights))
}

/// The seed of dropout and the number of scopes that have drawn masks.
fn dropout(text: &str, reader: &Reader<'_>) -> Result<DropoutProgress> {
    let numbers = text.split_once(' ').map(|(seed, scopes)| (seed.parse(), scopes.parse()));
    match numbers {
        Some((Ok(seed), Ok(scopes))) => Ok(DropoutProgress { seed, scopes }),
        _ => {
            let expected = "expected the seed and the number of scopes, two integers";
            Err(reader.problem(format!("metadata `{DROPOUT_KEY}`: {text:?}: {expected}")))
        }
    }
}
