//! The twelve entry points of cuDNN's graph API that attention calls.
//!
//! A graph is evaluated as it is described: operation by operation, over the tensors' extents and strides, in f32. Nothing here
//! knows what attention is, so a wrong stride, mask, scale or transpose gives a wrong result, as it would on hardware. Virtual
//! tensors are rounded to the types that they have. Products add up in order; hardware orders them otherwise, and rounds the
//! operands of products to 16 bits where this library keeps f32.
//!
//! Which graphs have a kernel was recorded from the real library by `cargo xtask cudnn-check`: `answers.txt`. A graph whose
//! structure, type or head size is not in the record is refused.
//!
//! The version is 0, as if there were no cuDNN, unless a test sets one.
//!
//! Source of numbers and rules: cuDNN documentation, "Graph API", and the header `cudnn_graph.h` of cuDNN 9.28.

mod answers;
mod attributes;
mod calls;
mod evaluate;
mod finalize;
mod graph;
mod memory;
mod objects;
mod version;

#[cfg(test)]
pub(crate) use calls::NAMES;
pub(crate) use evaluate::Evaluation;
pub(crate) use objects::Dnn;
pub(crate) use version::set_version;
