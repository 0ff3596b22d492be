//! Reports of scales, amaxes, counts and errors, and advice on them.

pub(crate) mod advice;
pub(crate) mod error_squares;
pub(crate) mod explanation;
pub(crate) mod measurements;
pub(crate) mod nvfp4_advice;
pub(crate) mod nvfp4_report;
pub(crate) mod scale_source;
pub(crate) mod share;
pub(crate) mod slot_report;
pub(crate) mod slot_sums;
pub(crate) mod slot_trace;
pub(crate) mod sqnr;
