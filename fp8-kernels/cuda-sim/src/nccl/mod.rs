//! NCCL's entry points: communicators whose ranks are threads of this process or other processes of this machine.
//!
//! [`hub`] is where the ranks of a communicator meet, in the process that made its id; [`link`] is one rank's way there;
//! [`collective`] is one rank's part of a collective as work of a stream; [`communicators`] are this process's handles;
//! [`progress`] puts collectives into streams and moves them; [`group`] and [`calls`] are the C functions.
//!
//! Facts are from the NCCL User Guide and `nccl.h` of NCCL 2.28.

mod calls;
mod collective;
mod communicators;
mod group;
mod hub;
mod link;
mod progress;
mod shape;

#[cfg(test)]
pub(crate) use calls::NAMES;
pub(crate) use collective::{Collective, Ran};
pub(crate) use communicators::Communicators;
pub(crate) use group::heed;
