//! Values of cells in which nothing has been recorded.

/// The value of an amax cell into which no amax has been recorded yet.
///
/// Amaxes are 0 or greater, so −1 means that the tensor was not quantized at all, and 0 that it contained only zeros. As a
/// signed integer, its bits are less than those of every amax, so devices combine amaxes with an integer maximum.
pub const REST: f32 = -1.0;

/// The value of a scale cell before its slot has seen a finite amax greater than 0.
///
/// The sign bit of a scale cell means *provisional*, and operations use the magnitude. A scale that was calibrated from its
/// first tensor is stored as `-scale` until [`ops::update_scales`](crate::ops::update_scales()) confirms it. `UNSET`, −1,
/// means a scale of 1 that no tensor has determined.
pub const UNSET: f32 = -1.0;
