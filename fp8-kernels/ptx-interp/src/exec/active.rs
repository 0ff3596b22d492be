//! The active lanes of a warp.

use super::on_registers;
use super::warp::Warp;
use crate::ir::Cond;
use crate::lanes::lanes;

impl Warp {
    /// The lanes in which a condition holds.
    pub(crate) fn condition(&self, cond: Cond) -> u32 {
        on_registers::condition(&self.regs, cond)
    }

    /// Takes lanes out of the active group where they are: they wait or have left.
    pub(super) fn halt(&mut self, mask: u32) {
        lanes(mask).for_each(|lane| self.pc[lane] = self.at);
        self.active &= !mask;
        self.count = self.active.count_ones();
    }
}
