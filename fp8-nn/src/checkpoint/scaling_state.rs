//! Scaling state in a checkpoint: numbers as tensors, names as JSON in the metadata.

use super::file::{Reader, Writer};
use crate::Result;
use fp8_recipe::{ArenaState, Direction, ScalingState};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

const KEY: &str = "fp8.scaling";

/// What of an arena is not numbers per slot.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    recipe: String,
    group: Option<String>,
    direction: String,
    updates: u64,
    slots: Vec<String>,
    /// Missing in files of older versions.
    #[serde(default)]
    last_updates: Vec<u64>,
}

pub(super) fn write(state: &ScalingState, writer: &mut Writer) -> Result<()> {
    let mut headers = Vec::new();
    for (n, arena) in state.arenas.iter().enumerate() {
        let slots = arena.slots.len();
        writer.floats(&format!("scaling.{n}.scale"), &[slots], &arena.scale);
        let history: Vec<f32> = arena.amax_history.concat();
        writer.floats(&format!("scaling.{n}.amax_history"), &[arena.amax_history.len(), slots], &history);
        headers.push(Header {
            recipe: arena.recipe.clone(),
            group: arena.group.clone(),
            direction: arena.direction.name().to_owned(),
            updates: arena.updates,
            slots: arena.slots.iter().map(|name| name.to_string()).collect(),
            last_updates: arena.last_updates.clone(),
        });
    }
    let json = serde_json::to_string(&headers).map_err(|error| fp8_recipe::Error::State {
        recipe: "all".to_owned(),
        direction: "both",
        problem: error.to_string(),
    })?;
    writer.metadata(KEY, &json);
    Ok(())
}

pub(super) fn read(reader: &Reader<'_>) -> Result<ScalingState> {
    let json = reader.all_metadata().get(KEY);
    let json = json.ok_or_else(|| reader.problem(format!("metadata `{KEY}` is missing")))?;
    let headers: Vec<Header> =
        serde_json::from_str(json).map_err(|e| reader.problem(format!("metadata `{KEY}`: {e}")))?;
    let mut state = ScalingState::default();
    for (n, header) in headers.into_iter().enumerate() {
        let direction = Direction::ALL.into_iter().find(|direction| direction.name() == header.direction);
        let direction =
            direction.ok_or_else(|| reader.problem(format!("unknown direction `{}`", header.direction)))?;
        let slots: Vec<Arc<str>> = header.slots.into_iter().map(Into::into).collect();
        let (_, scale) = reader.floats(&format!("scaling.{n}.scale"))?;
        let (shape, history) = reader.floats(&format!("scaling.{n}.amax_history"))?;
        if shape.len() != 2 || shape[1] != slots.len() || scale.len() != slots.len() {
            let problem =
                format!("scaling.{n}: shapes {shape:?} and [{}] for {} slots", scale.len(), slots.len());
            return Err(reader.problem(problem));
        }
        let amax_history = history.chunks(slots.len().max(1)).map(<[f32]>::to_vec).collect();
        state.arenas.push(ArenaState {
            recipe: header.recipe,
            group: header.group,
            direction,
            updates: header.updates,
            slots,
            scale,
            amax_history,
            last_updates: header.last_updates,
        });
    }
    Ok(state)
}
