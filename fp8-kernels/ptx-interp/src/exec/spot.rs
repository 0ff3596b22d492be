//! The place that an address of a lane names.

use super::warp::Warp;
use crate::ir::{LOCAL_WINDOW, Mem, PARAM_WINDOW, SHARED_WINDOW, Space, WINDOW_BYTES};
use crate::lanes::Reg;

/// A space after windows are resolved, and the address in it.
#[derive(Clone, Copy)]
pub(crate) struct Spot {
    pub(crate) space: Space,
    pub(crate) address: u64,
}

impl Warp {
    /// The lane's address and the space it falls into.
    #[inline]
    pub(crate) fn spot(&self, mem: &Mem, lane: usize) -> Spot {
        let address = match mem.base {
            Reg::D(r) => self.regs.d[r][lane].wrapping_add(mem.offset as u64),
            Reg::W(r) => u64::from(self.regs.w[r][lane].wrapping_add(mem.offset as u32)),
            Reg::P(_) => 0,
        };
        if mem.space != Space::Generic {
            return Spot { space: mem.space, address };
        }
        let within = |window: u64| address.checked_sub(window).filter(|&offset| offset < WINDOW_BYTES);
        if let Some(address) = within(SHARED_WINDOW) {
            Spot { space: Space::Shared, address }
        } else if let Some(address) = within(LOCAL_WINDOW) {
            Spot { space: Space::Local, address }
        } else if let Some(address) = within(PARAM_WINDOW) {
            Spot { space: Space::Param, address }
        } else {
            Spot { space: Space::Global, address }
        }
    }
}
