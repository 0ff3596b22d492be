//! Ranks that are GPUs: collectives on the device's stream, through NCCL.
//!
//! [`api`] is NCCL's functions, [`communicator`] one rank's communicator with a deadline on all that NCCL does by itself,
//! [`watch`] the thread that ends what does not end, [`group`] a rank, [`collectives`] what it computes with the others. Beside NCCL the ranks keep the connections
//! by which they met: there they compare calls, and there they hear of each other's end.

#![expect(unsafe_code, reason = "NCCL's API is C")]

mod agreed;
mod api;
mod collectives;
mod communicator;
mod gather;
mod group;
mod known;
mod messages;
mod reductions;
mod watch;

pub use group::nccl;
