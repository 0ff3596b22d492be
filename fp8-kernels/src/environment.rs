//! The environment variables of this crate. No other module reads any.
//!
//! | variable | type | default | meaning |
//! |---|---|---|---|
//! | `FP8_CPU_PATH` | name of a [`CpuPath`](crate::CpuPath) | the fastest one | instructions of the CPU backend |
//! | `FP8_CUDA_LIB_DIR` | folders | none | where NVIDIA's libraries are searched for first |
//! | `FP8_CACHE_DIR` | folder, empty for none | `$XDG_CACHE_HOME/fp8`, `~/.cache/fp8` | cache of compiled kernels |
//! | `FP8_CUDA_ALLOCATOR` | `caching` or `exact` | `caching` | keep freed device memory for later tensors, or return each block to the driver at once |
//! | `FP8_CPU_ALLOCATOR` | `caching` or `exact` | `caching` | keep freed host memory of tensors for later ones, or return each block to the system at once |
//! | `FP8_GEMM_TUNING` | count, up to 1024 | 0 | how many of cuBLASLt's kernels the first use of a product times |
//! | `FP8_CUDNN` | `0` or `1` | `1` | whether cuDNN, if it is installed, computes the attention that it has kernels for |
//! | `FP8_GEMM_TUNING_FILE` | file | none | where the fastest kernels are stored |
//!
//! `CUDA_HOME`, `VIRTUAL_ENV`, `CONDA_PREFIX`, `XDG_CACHE_HOME` and `HOME` have their usual meanings.

use crate::{Error, Result};
use std::env;
use std::ffi::OsString;
use std::sync::OnceLock;

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

/// Returns whether the memory of freed tensors on the CPU is kept for later ones. The variable is read once.
pub(crate) fn keeps_host_memory() -> Result<bool> {
    const NAME: &str = "FP8_CPU_ALLOCATOR";
    static VALUE: OnceLock<Option<OsString>> = OnceLock::new();
    is_caching(NAME, VALUE.get_or_init(|| variable(NAME)).as_ref())
}

/// Returns whether `value`, that of the variable `name`, is `caching`, the default, and not `exact`.
pub(crate) fn is_caching(name: &'static str, value: Option<&OsString>) -> Result<bool> {
    match value {
        None => Ok(true),
        Some(value) if value == "caching" => Ok(true),
        Some(value) if value == "exact" => Ok(false),
        Some(value) => {
            let remedy = "expected caching or exact".to_owned();
            Err(Error::Environment { name, value: value.to_string_lossy().into_owned(), remedy })
        }
    }
}
