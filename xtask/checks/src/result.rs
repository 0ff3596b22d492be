//! The result of everything here that can fail.

use std::error::Error;

/// The result of a check.
pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;
