//! Entry points of the CUDA driver, by the chapters of its API documentation.

pub(crate) mod context;
pub(crate) mod copies;
pub(crate) mod devices;
pub(crate) mod events;
pub(crate) mod functions;
pub(crate) mod graphs;
pub(crate) mod init;
pub(crate) mod launch;
pub(crate) mod memory;
pub(crate) mod modules;
pub(crate) mod pools;
pub(crate) mod streams;
