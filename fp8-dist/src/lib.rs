#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod error;
mod gather;
mod group;
mod host;
mod local;
mod member;
mod message;

pub use error::{Error, Failure, Result};
pub use fp8_recipe::{self, AmaxGroup};
pub use gather::quantized_all_gather;
pub use group::{ProcessGroup, ReduceOp};
pub use local::local;
