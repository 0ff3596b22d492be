//! The results of a launch of an activation: where they are stored, and in which form.

use super::slot::{AmaxRequest, Output};
use super::{Address, In, Out, format_number, kernels};
use crate::{Encoding, Result, Slot};

/// The addresses and the format with which a launch stores its results. An address is 0 if there is none.
pub(super) struct Sink {
    /// The format of codes, of which the amax alone may be wanted; `None` for values in high precision.
    pub(super) encoding: Option<Encoding>,
    pub(super) codes: u64,
    pub(super) columnwise: u64,
    pub(super) scale: u64,
    pub(super) scale_inv: u64,
    pub(super) high: u64,
    pub(super) unset: u64,
    pub(super) amax: u64,
    pub(super) counters: u64,
    /// Counts, or the amax of values in high precision, which few ask for.
    pub(super) is_special: bool,
}

impl Sink {
    /// The amax alone.
    pub(super) fn amax(request: &AmaxRequest, slot: &Slot<'_>) -> Self {
        let AmaxRequest { unset, cell: amax } = *request;
        let (codes, columnwise, scale, scale_inv, high, counters) = (0, 0, 0, 0, 0, 0);
        let (encoding, is_special) = (Some(slot.encoding), false);
        Self { encoding, codes, columnwise, scale, scale_inv, high, unset, amax, counters, is_special }
    }

    pub(super) fn output(output: &Output<'_>, op: &'static str, slot: &Slot<'_>) -> Result<Self> {
        let (amax, counters) = (output.amax(op)?, output.counters(op)?);
        let is_high = output.high().is_some();
        Ok(Self {
            encoding: (!is_high).then_some(slot.encoding),
            codes: output.rowwise().address(),
            columnwise: output.columnwise().address(),
            scale: output.scale(),
            scale_inv: output.scale_inv().address(),
            high: output.high().address(),
            unset: 0,
            amax,
            counters,
            is_special: counters != 0 || is_high && amax != 0,
        })
    }

    pub(super) fn format(&self) -> i32 {
        self.encoding.map_or(0, format_number)
    }

    /// The parameters of kernels that make codes of whole tiles.
    pub(super) fn whole_codes(&self) -> kernels::WholeCodesParams {
        kernels::WholeCodesParams {
            codes: Out::u8(self.codes),
            columnwise: Out::u8(self.columnwise),
            scale: In::f32(self.scale),
            scale_inv: Out::f32(self.scale_inv),
            unset: In::f32(self.unset),
            amax: Out::i32(self.amax),
        }
    }
}
