//! Numbers that operations write while others read the table that holds them: amaxes, scales, counts.
//!
//! They are in contiguous blocks on a device, so that all of a table is one copy; a [`Cell`] or [`Counters`] is a handle on
//! one entry. Where the host cannot reach the device's memory, reading one waits for the work that was queued before.

mod cell;
mod counters;
mod span;

pub use cell::Cell;
pub(crate) use cell::{Cells, store, value};
pub(crate) use counters::Counts;
pub use counters::{CounterValues, Counters};
