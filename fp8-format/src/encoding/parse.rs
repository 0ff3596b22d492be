//! Parsing the name of a format.

use super::Encoding;
use crate::Error;
use core::str::FromStr;

impl FromStr for Encoding {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        [Self::E4M3, Self::E5M2, Self::E2M1]
            .into_iter()
            .find(|encoding| encoding.name().eq_ignore_ascii_case(s))
            .ok_or(Error::ParseEncoding { len: s.len() })
    }
}
