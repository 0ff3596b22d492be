#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![deny(unsafe_code)]

mod agreement;
mod all_to_all;
mod calls;
mod counter;
mod direct;
mod division;
mod environment;
mod error;
mod events;
mod exchange;
#[cfg(fuzzing)]
pub mod fuzzing;
mod gather;
mod group;
mod host;
mod local;
mod meeting;
mod member;
mod mesh;
mod message;
#[cfg(feature = "cuda")]
mod nccl;
mod output;
mod pending;
mod reduce_op;
mod reduction;
mod rendezvous;
mod shared_scales;
mod tcp;
mod timed;
mod traffic;
mod tuned_products;
mod wire;

pub use environment::Environment;
pub use error::{Error, Failure, Result};
pub use fp8_recipe::{self, AmaxGroup, StateDigest};
pub use gather::{gather_codes, quantized_all_gather};
pub use group::ProcessGroup;
pub use local::local;
pub use mesh::{Mesh, MeshOptions};
#[cfg(feature = "cuda")]
pub use nccl::nccl;
pub use pending::Pending;
pub use reduce_op::ReduceOp;
pub use shared_scales::SharedScales;
pub use tcp::tcp;
pub use traffic::{Sent, Traffic};
pub use tuned_products::share_tuned_products;
