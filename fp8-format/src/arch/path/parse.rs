//! Parsing the name of a path.

use super::Path;
use crate::{Error, Result};
use core::str::FromStr;

impl FromStr for Path {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::available()
            .find(|path| path.name().eq_ignore_ascii_case(s))
            .ok_or(Error::ParsePath { len: s.len() })
    }
}
