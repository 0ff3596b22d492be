//! Parsing the name of an element type.

use super::DType;
use crate::Error;
use std::str::FromStr;

impl FromStr for DType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        [Self::F32, Self::BF16, Self::F16, Self::I32, Self::U8]
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| Error::Option {
                op: "dtype",
                option: "name",
                value: name.to_owned(),
                remedy: "expected f32, bf16, f16, i32 or u8".to_owned(),
            })
    }
}
