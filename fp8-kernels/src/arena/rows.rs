//! The number of values for all slots.

use super::Arena;
use crate::{Error, Result};

impl Arena {
    /// Returns an error with the number of `values` if they do not fit.
    pub(super) fn expect_rows(&self, op: &'static str, values: &[f32], fits: bool) -> Result<()> {
        if fits {
            return Ok(());
        }
        Err(Error::Elements { op, len: values.len(), shape: [self.slots].into() })
    }
}
