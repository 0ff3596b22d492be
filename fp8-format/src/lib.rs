#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "std"), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![warn(clippy::std_instead_of_core, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

#[macro_use]
mod number;
#[macro_use]
mod operators;

mod arch;
mod blocks;
mod codec;
mod e2m1;
mod e4m3;
mod e5m2;
mod e8m0;
mod encoding;
mod error;
#[cfg(feature = "num-traits")]
mod num_traits;
pub mod philox;
#[cfg(feature = "rand")]
mod rand;
pub mod slice;
mod tensor_scale;
mod traits;

pub use blocks::Blocks;
pub use e2m1::E2M1;
pub use e4m3::E4M3;
pub use e5m2::E5M2;
pub use e8m0::E8M0;
pub use encoding::Encoding;
pub use error::{Error, Result};
pub use tensor_scale::TensorScale;
pub use traits::{Fp8, Source};
