//! Tensor and sequence parallelism: layers and models over ranks, which are threads here, against the same on one device.

mod checkpoint;
mod checkpoint_failures;
mod each_sum;
mod fp8;
mod golden;
mod linear;
mod refusals;
mod rig;
mod variants;
