//! What kernels report to the host: an id out of range, ranks that differ. The next call that waits for the device and
//! whose error reaches the caller returns it, once.

use super::Gpu;
use crate::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;

/// Bytes in which kernels report: four i64, which are state, value, position and limit.
pub(super) const FAULT: usize = 32;

/// Where kernels report, and the names that they refer to by number.
pub(super) struct Faults {
    /// [`FAULT`] bytes on the device.
    pub(super) address: u64,
    names: Mutex<Vec<Arc<str>>>,
}

impl Faults {
    pub(super) fn new(address: u64) -> Self {
        Self { address, names: Mutex::default() }
    }

    /// The number of a name, the same each time.
    fn number(&self, name: &str) -> u64 {
        let mut names = self.names.lock();
        let known = names.iter().position(|known| **known == *name);
        let number = known.unwrap_or_else(|| {
            names.push(name.into());
            names.len() - 1
        });
        number as u64
    }

    fn name(&self, number: i64) -> String {
        let names = self.names.lock();
        usize::try_from(number)
            .ok()
            .and_then(|number| names.get(number))
            .map(ToString::to_string)
            .unwrap_or_default()
    }
}

impl Gpu {
    /// Where kernels report what they met.
    pub(crate) fn fault(&self) -> u64 {
        self.faults().address
    }

    /// What kernels report `name` as.
    pub(crate) fn fault_name(&self, name: &str) -> u64 {
        self.faults().number(name)
    }

    /// The error of what a kernel met, once.
    pub(super) fn check_fault(&self, [state, value, position, limit]: [i64; 4]) -> Result<()> {
        if state == 0 {
            return Ok(());
        }
        self.clear_bytes(self.fault(), FAULT)?;
        let count = |number: i64| usize::try_from(number).unwrap_or_default();
        let (op, what) = match state {
            1 => ("embedding", "id"),
            2 => ("embedding_backward", "id"),
            3 => ("cross_entropy", "target"),
            5 => ("attention", "key length"),
            6 => ("attention_backward", "key length"),
            7 => {
                // The rank's bits, and above them those of rank 0.
                let [value, other_value] = [value, value >> 32].map(|bits| f32::from_bits(bits as u32));
                let (what, rank) = (self.faults().name(limit), count(position));
                return Err(Error::RankScales { what, rank, value, other_value });
            }
            8 => return Err(Error::RankCalls { what: self.faults().name(limit), rank: count(position) }),
            _ => ("cross_entropy_backward", "target"),
        };
        Err(Error::Index { op, what, value, position: count(position), limit: count(limit) })
    }
}
