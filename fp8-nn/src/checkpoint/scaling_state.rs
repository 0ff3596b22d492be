//! Scaling state in a checkpoint: numbers as tensors, names as JSON in the metadata.

use super::file::{Reader, Writer};
use crate::Result;
use fp8_recipe::{ArenaState, Direction, DropoutProgress, ScalingState};
use serde::{Deserialize, Serialize};

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
}

impl Header {
    pub(crate) fn of(arena: &ArenaState) -> Self {
        Self {
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
        })
    }
}

pub(super) fn write(state: &ScalingState, writer: &mut Writer) -> Result<()> {
    let mut headers = Vec::new();
    for (n, arena) in state.arenas.iter().enumerate() {
        let slots = arena.slots.len();
        writer.floats(&format!("scaling.{n}.scale"), &[slots], &arena.scale);
        let history: Vec<f32> = arena.amax_history.concat();
        writer.floats(&format!("scaling.{n}.amax_history"), &[arena.amax_history.len(), slots], &history);
        headers.push(Header::of(arena));
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

pub(super) fn read(reader: &Reader<'_>) -> Result<ScalingState> {
    let json = reader.all_metadata().get(KEY);
    let json = json.ok_or_else(|| reader.problem(format!("metadata `{KEY}` is missing")))?;
    let headers: Vec<Header> =
        serde_json::from_str(json).map_err(|e| reader.problem(format!("metadata `{KEY}`: {e}")))?;
    let mut state = ScalingState::default();
    for (n, header) in headers.into_iter().enumerate() {
        let slots = header.slots();
        let (_, scale) = reader.floats(&format!("scaling.{n}.scale"))?;
        let (shape, history) = reader.floats(&format!("scaling.{n}.amax_history"))?;
        if shape.len() != 2 || shape[1] != slots || scale.len() != slots {
            let problem = format!("scaling.{n}: shapes {shape:?} and [{}] for {slots} slots", scale.len());
            return Err(reader.problem(problem));
        }
        state.arenas.push(header.arena(scale, &history).map_err(|problem| reader.problem(problem))?);
    }
    state.dropout = reader.all_metadata().get(DROPOUT_KEY).map(|text| dropout(text, reader)).transpose()?;
    Ok(state)
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
