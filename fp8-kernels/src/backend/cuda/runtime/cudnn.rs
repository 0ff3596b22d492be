//! Attention by cuDNN's graph API, opened at run time like the other libraries.
//!
//! [`Graph`] describes a computation without the library: tensors by extents and strides, and operations on them. `attention`
//! writes the graphs of attention. [`Plan`] has the library compile one, and runs it; `Dnn` keeps the plans of a device.

mod attention;
#[cfg(test)]
mod check;
mod describe;
mod descriptor;
mod device;
mod graph;
mod library;
#[cfg(test)]
mod mistakes;
mod numbers;
mod plan;

pub(crate) use attention::{Attention, Direction, Element, Layout, Lengths, Mask, Sums};
pub(super) use device::not_open;
pub(crate) use device::{Bound, Dnn};
pub(crate) use graph::Place;
pub(super) use library::Cudnn;
