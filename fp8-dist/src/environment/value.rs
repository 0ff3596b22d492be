//! Numbers in variables.

use crate::{Error, Result};

/// torchrun's default.
pub(super) const DEFAULT_PORT: u16 = 29_500;
pub(super) const INTEGER: &str = "expected an integer from 0 on";
pub(super) const PORT: &str = "expected a port from 1 to 65535";

pub(super) fn number<T: std::str::FromStr>(name: &'static str, text: String, remedy: &str) -> Result<T> {
    let wrong = |_| Error::Environment { name, value: Some(text.clone()), remedy: remedy.to_owned() };
    text.parse().map_err(wrong)
}
