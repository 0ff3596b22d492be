//! A simulated CUDA device: the entry points of the driver, NVRTC, cuBLASLt, cuDNN and NCCL over the PTX interpreter.
//!
//! Built as a shared library with the soname `libcuda.so`: once it is loaded by path, code that looks for the driver
//! finds it. There is one device; kernels are PTX, checked while they run for races, bounds, uninitialised reads,
//! misuse of barriers and use after free. An error kills the context as it would on hardware, and prints a report.
//!
//! **Streams are deferred.** Nothing asynchronous runs before a synchronisation needs it, and the seed chooses the order
//! of streams that nothing else orders. A missing wait, a buffer freed too early or pinned memory reused too early thus
//! show as wrong results or reports, not as luck.
//!
//! **Ranks of a communicator** are threads of a process or processes of one machine. Their collectives move when all have
//! come; a thread of the library's own runs what stands before them, as a device would.
//!
//! It proves launch arguments, lifetimes, ordering and error paths. It says nothing about speed, about the accuracy of
//! approximate instructions, or about what the real driver makes of a call that its documentation leaves open. Every
//! refusal in the code names the documented sentence it rests on. Clusters, textures, managed memory and more than one
//! device are not simulated.
//!
//! # Settings
//!
//! Read from the environment when the library is first called; a value that cannot be read makes `cuInit` fail with 999
//! and a line on standard error.
//!
//! | variable | type | default | meaning |
//! |---|---|---|---|
//! | `FP8_SIM_ARCH` | `80`, `89`, `90`, `100`, `120`, also `sm_90` | `90` | compute capability |
//! | `FP8_SIM_DRIVER` | 1000 · major + 10 · minor | 13000 | CUDA version the driver says it has; what it can do stays the same |
//! | `FP8_SIM_CUDNN` | 10000 · major + 100 · minor + patch | 0, none | version of cuDNN, which decides which graphs it has kernels for |
//! | `FP8_SIM_MEMORY` | bytes | 2 GiB | device memory |
//! | `FP8_SIM_SM_COUNT` | 1 to 1024 | 4 | multiprocessors reported |
//! | `FP8_SIM_SEED` | integer | 0 | order of streams, blocks and warps; 0 leaves everything as late as possible |
//! | `FP8_SIM_EAGER` | `0`, `1` | `0` | run every operation at its call |
//! | `FP8_SIM_FAIL` | `name:count:code,…` | none | the count-th call of `name` returns `code` |
//! | `FP8_SIM_LEAKS` | `0`, `1` | `0` | print what is live when the process exits |
//! | `FP8_SIM_NCCL_SHARED` | `0`, `1` | `0` | several ranks of a communicator may share the device |
//! | `FP8_SIM_STUB` | `0`, `1` | `0` | run no kernels, products, fills and copies: to time the host |
//! | `FP8_SIM_RACES` | `0`, `1` | `1` | look for data races inside kernels, which takes up to a third of their time |
//! | `FP8_SIM_FP8_SUM_BITS` | 1 to 23 | none: f32 | how many bits below the largest of 32 products, and of what was there, are kept when FP8 products are added up: 13 is about what tensor cores of Ada and Hopper do |
//! | `FP8_SIM_FP4_BIAS` | `0`, `1` | `1` | cuBLASLt adds a bias to products of FP4 operands |
//! | `FP8_SIM_SNAPSHOTS` | folder | none | its `*.ptx` files stand for the built-in snapshots of the same names |
//!
//! # Control
//!
//! The same and more at run time, through [`Control`]: `seed`, `eager`, `stub`, `races`, `nccl_shared`, `memory_limit`, `sm_count`, `arch` (while no
//! context is retained), `fail`, `clear_fail`, `reset_calls`, `snapshot` (the text of a kernel snapshot that NVRTC shall
//! know) and `reset` are set; `calls`, `kernels` (launched), `live`, `reports` and `seed` are read.

mod calls;
mod capture;
mod client;
mod code;
mod compiler;
mod context;
mod control;
mod cublaslt;
mod cudnn;
mod device;
mod driver;
mod entry;
mod fault;
mod ffi;
mod image;
mod module;
mod nccl;
mod nvrtc;
mod queue;
mod report;
mod settings;
mod snapshot;
mod state;
mod thread;
mod work;

pub use client::{Control, ControlError, library_path};

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> impl Iterator<Item = &'static str> {
        [
            cublaslt::DESCRIPTOR_NAMES,
            cublaslt::MATMUL_NAMES,
            cudnn::NAMES,
            driver::context::NAMES,
            driver::copies::NAMES,
            driver::devices::NAMES,
            driver::events::NAMES,
            driver::functions::NAMES,
            driver::graphs::NAMES,
            driver::init::NAMES,
            driver::launch::NAMES,
            driver::memory::NAMES,
            driver::modules::NAMES,
            driver::pools::NAMES,
            driver::streams::NAMES,
            nccl::NAMES,
            nvrtc::NAMES,
        ]
        .into_iter()
        .flatten()
        .copied()
    }

    #[test]
    fn the_list_of_entry_points_is_complete() {
        let mut defined: Vec<&str> = names().collect();
        defined.sort_unstable();
        assert_eq!(defined, calls::ENTRY_POINTS);
    }
}
