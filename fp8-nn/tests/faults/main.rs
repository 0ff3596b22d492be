//! Calls into the driver, NVRTC, cuBLASLt and NCCL that a training step makes on a GPU, failing once each.
//!
//! Something is done undisturbed: a step ([`step`]), a first step ([`first_step`]), a step that is recorded and replayed
//! ([`recording`]), a step of two ranks over NCCL ([`nccl`]). Which functions that calls, how often, and what comes of it is
//! noted. Then each of these calls fails in turn. The error is typed and names what failed; what lasts (parameters, moments,
//! f32 copies, scales, histories, counts) is, bit for bit, what it was before the stage that failed; a checkpoint is whole
//! or the old one is; the training goes on from it with the bits of one that was never disturbed; and nothing is left when
//! all is dropped. Where a failure leaves a device useless, it says so to every call ([`dead`]).
//!
//! With `FP8_TEST_FAULTS=all` that is every call of each function; without, functions that are called very often, such as the
//! question for the current context that stands before every launch, fail at even distances ([`fault::chosen`]).
#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test fails by panicking")]

mod dead;
mod fault;
mod first_step;
mod nccl;
mod ranks;
mod recording;
mod rig;
mod step;
mod training;
