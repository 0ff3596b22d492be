//! The result of everything here that can fail.

use std::error::Error;

/// A value, or an error that goes to the terminal as it is.
pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;
