//! The measurements that a `Scaling` makes on request: counts of values, and signal-to-quantization-noise ratios.

use crate::Nvfp4Report;
use crate::reports::error_squares::Measured;
use crate::reports::slot_sums::Sums;
use std::collections::BTreeMap;

/// Whether values are counted, and how often the counters were reset.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    is_on: bool,
    resets: u64,
}

impl Counting {
    pub(crate) const fn is_on(&self) -> bool {
        self.is_on
    }

    pub(crate) fn set(&mut self, is_on: bool) {
        self.is_on = is_on;
    }

    pub(crate) const fn resets(&self) -> u64 {
        self.resets
    }

    pub(crate) fn count_reset(&mut self) {
        self.resets += 1;
    }
}

/// The signal-to-quantization-noise ratios, in decibels, and the blocks in NVFP4, of the last committed scope that measured each slot.
#[derive(Debug, Default)]
pub(crate) struct SqnrRatios {
    is_on: bool,
    decibels: BTreeMap<Measured, f64>,
    nvfp4: BTreeMap<Measured, Nvfp4Report>,
}

impl SqnrRatios {
    pub(crate) const fn is_on(&self) -> bool {
        self.is_on
    }

    pub(crate) fn set(&mut self, is_on: bool) {
        self.is_on = is_on;
        self.decibels.clear();
        self.nvfp4.clear();
    }

    pub(crate) fn of(&self, slot: Measured) -> Option<f64> {
        self.decibels.get(&slot).copied()
    }

    pub(crate) fn nvfp4_of(&self, slot: Measured) -> Option<Nvfp4Report> {
        self.nvfp4.get(&slot).copied()
    }

    /// Replaces the measurements of the slots that a committed scope measured.
    pub(crate) fn replace(&mut self, sums: impl IntoIterator<Item = (Measured, Sums)>) {
        for (slot, Sums { squares, nvfp4 }) in sums {
            match squares.decibels() {
                Some(decibels) => self.decibels.insert(slot, decibels),
                None => self.decibels.remove(&slot),
            };
            if let Some(nvfp4) = nvfp4 {
                self.nvfp4.insert(slot, nvfp4.report());
            }
        }
    }
}
