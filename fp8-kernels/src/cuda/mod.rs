//! NVIDIA GPUs. This version looks for the driver and says what it found; it runs nothing there yet.

pub(crate) mod loader;
