//! The scale cells of slots without an arena.

use crate::Result;
use crate::recipes::policy::State;
use fp8_kernels::{Cell, Device, UNSET};

/// The scales of slots that no arena has: unset, so that a tensor uses its own scale, or 1 under Transformer Engine's first-step
/// rule.
#[derive(Debug)]
pub(crate) struct UntouchedScales {
    unset: Cell,
    one: Cell,
}

impl UntouchedScales {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self { unset: Cell::new(UNSET, device)?, one: Cell::new(1.0, device)? })
    }

    pub(crate) fn of(&self, state: &dyn State) -> &Cell {
        if state.arena_options().first_scale == UNSET { &self.unset } else { &self.one }
    }
}
