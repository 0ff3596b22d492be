//! Groups of GPUs, on the simulated one: ranks are threads or processes that share it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../dist/child.rs"]
mod child;
mod collectives;
mod division;
mod failures;
mod forming;
mod graphs;
mod hardware;
mod moves;
mod order;
mod pending;
#[path = "../dist/ports.rs"]
mod ports;
mod processes;
mod rig;
mod scaling;
mod steady;
mod steady_blocks;
mod steady_codes;
mod steady_scopes;
