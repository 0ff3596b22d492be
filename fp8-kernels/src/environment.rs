//! The environment variables of this crate. No other module reads any.
//!
//! | variable | type | default | meaning |
//! |---|---|---|---|
//! | `FP8_CPU_PATH` | name of a [`CpuPath`](crate::CpuPath) | the fastest one | instructions of the CPU's matrix products |
//! | `FP8_CUDA_LIB_DIR` | folders | none | where NVIDIA's libraries are searched for first |
//! | `FP8_CACHE_DIR` | folder, empty for none | `$XDG_CACHE_HOME/fp8`, `~/.cache/fp8` | cache of compiled kernels |
//! | `FP8_CUDA_ALLOCATOR` | `caching` or `exact` | `caching` | keep freed device memory for later tensors, or return each block to the driver at once |
//! | `FP8_GEMM_TUNING` | count, up to 1024 | 0 | how many of cuBLASLt's kernels the first use of a product times |
//! | `FP8_GEMM_TUNING_FILE` | file | none | where the fastest kernels are stored |
//!
//! `CUDA_HOME`, `VIRTUAL_ENV`, `CONDA_PREFIX`, `XDG_CACHE_HOME` and `HOME` have their usual meanings.

use std::env;
use std::ffi::OsString;

/// Returns the value of a variable.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    env::var_os(name)
}

/// Returns the value of `FP8_CPU_PATH`. An empty one counts as none.
pub(crate) fn cpu_path() -> Option<String> {
    variable("FP8_CPU_PATH")
        .map(|value| value.to_string_lossy().into_owned())
        .filter(|value| !value.is_empty())
}
