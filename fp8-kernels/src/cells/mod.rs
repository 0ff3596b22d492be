//! Amaxes, scales and counts, which several operations read and write.
//!
//! They are stored in contiguous blocks on a device, so that reading all of them is one copy. A [`Cell`] or [`Counters`] is a
//! handle on one entry. If the host cannot access the device's memory, reading an entry waits for the work queued before.

mod cell;
mod counters;
mod span;

pub use cell::Cell;
pub(crate) use cell::{Cells, store, value};
pub(crate) use counters::Counts;
pub use counters::{CounterValues, Counters};
