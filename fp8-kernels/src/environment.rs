//! The environment variables of this crate. No other module reads any.
//!
//! | variable | type | default | meaning |
//! |---|---|---|---|
//! | `FP8_CUDA_LIB_DIR` | folders | none | where NVIDIA's libraries are searched for first |
//! | `FP8_CACHE_DIR` | folder, empty for none | `$XDG_CACHE_HOME/fp8`, `~/.cache/fp8` | cache of compiled kernels |
//! | `FP8_CUDA_ALLOCATOR` | `caching` or `exact` | `caching` | keep freed device memory for later tensors, or return each block to the driver at once |
//! | `FP8_CPU_ALLOCATOR` | `caching` or `exact` | `caching` | keep freed host memory of tensors for later ones, or return each block to the system at once |
//! | `FP8_GEMM_TUNING` | count, up to 1024 | 0 | how many of cuBLASLt's kernels the first use of a product times |
//! | `FP8_GEMM_TUNING_FILE` | file | none | where the fastest kernels are stored |
//!
//! `CUDA_HOME`, `VIRTUAL_ENV`, `CONDA_PREFIX`, `XDG_CACHE_HOME` and `HOME` have their usual meanings.

#[cfg(feature = "cuda")]
use crate::GemmTuning;
use crate::{Error, Result};
use std::env;
use std::ffi::OsString;
#[cfg(feature = "cuda")]
use std::path::PathBuf;
use std::sync::OnceLock;

/// Returns whether the memory of freed tensors on the CPU is kept for later ones. The variable is read once.
pub(crate) fn keeps_host_memory() -> Result<bool> {
    const NAME: &str = "FP8_CPU_ALLOCATOR";
    static VALUE: OnceLock<Option<OsString>> = OnceLock::new();
    is_caching(NAME, VALUE.get_or_init(|| env::var_os(NAME)).as_ref())
}

/// Returns whether `value`, that of the variable `name`, is `caching`, the default, and not `exact`.
fn is_caching(name: &'static str, value: Option<&OsString>) -> Result<bool> {
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

/// What happens to freed device memory: [`CudaOptions::allocator`](crate::CudaOptions::allocator).
///
/// See [`CudaOptions`](crate::CudaOptions) for an example.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CudaAllocator {
    /// It is kept for later tensors of about the same size, so a training loop soon makes no driver calls for memory.
    #[default]
    Caching,
    /// It is returned to the driver at once. Each tensor is a separate allocation, so memory checkers see every access
    /// beyond its end.
    Exact,
}

/// The values of the variables when a GPU was opened.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Default)]
pub(crate) struct Environment {
    pub(crate) library_dirs: Vec<PathBuf>,
    pub(crate) cache_dir: Option<PathBuf>,
    pub(crate) allocator: CudaAllocator,
    pub(crate) gemm_tuning: GemmTuning,
    pub(crate) cuda_home: Option<PathBuf>,
    /// Python environments whose packages may contain NVIDIA's libraries; the user's own packages come last.
    pub(crate) python_prefixes: Vec<PathBuf>,
}

#[cfg(feature = "cuda")]
impl Environment {
    pub(crate) fn read() -> Result<Self> {
        Self::from_variables(|name| env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let library_dirs = variable("FP8_CUDA_LIB_DIR").map(|value| {
            env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect::<Vec<_>>()
        });
        let cache_dir = match variable("FP8_CACHE_DIR") {
            Some(dir) if dir.is_empty() => None,
            Some(dir) => Some(PathBuf::from(dir)),
            None => path("XDG_CACHE_HOME")
                .or_else(|| path("HOME").map(|home| home.join(".cache")))
                .map(|cache| cache.join("fp8")),
        };
        const ALLOCATOR: &str = "FP8_CUDA_ALLOCATOR";
        let allocator = match is_caching(ALLOCATOR, variable(ALLOCATOR).as_ref())? {
            true => CudaAllocator::Caching,
            false => CudaAllocator::Exact,
        };
        let candidates = match variable("FP8_GEMM_TUNING") {
            None => 0,
            Some(value) => value
                .to_str()
                .and_then(|value| value.trim().parse().ok())
                .filter(|candidates| *candidates <= GemmTuning::MOST_CANDIDATES)
                .ok_or_else(|| {
                    let value = value.to_string_lossy().into_owned();
                    let most = GemmTuning::MOST_CANDIDATES;
                    let remedy = format!("expected a count up to {most}, 0 for no tuning");
                    Error::Environment { name: "FP8_GEMM_TUNING", value, remedy }
                })?,
        };
        Ok(Self {
            gemm_tuning: GemmTuning { candidates, file: path("FP8_GEMM_TUNING_FILE") },
            library_dirs: library_dirs.unwrap_or_default(),
            cache_dir,
            allocator,
            cuda_home: path("CUDA_HOME"),
            python_prefixes: ["VIRTUAL_ENV", "CONDA_PREFIX"]
                .into_iter()
                .filter_map(path)
                .chain(path("HOME").map(|home| home.join(".local")))
                .collect(),
        })
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment> {
        Environment::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_cache_follows_the_home_unless_told_otherwise() {
        let cache = |variables: &[(&str, &str)]| read(variables).unwrap().cache_dir;
        assert_eq!(cache(&[]), None);
        assert_eq!(cache(&[("HOME", "/h")]), Some("/h/.cache/fp8".into()));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Some("/x/fp8".into()));
        assert_eq!(cache(&[("HOME", "/h"), ("FP8_CACHE_DIR", "/c")]), Some("/c".into()));
        assert_eq!(cache(&[("HOME", "/h"), ("FP8_CACHE_DIR", "")]), None);
    }

    #[test]
    fn an_unknown_allocator_is_an_error() {
        let error = read(&[("FP8_CUDA_ALLOCATOR", "jemalloc")]).unwrap_err().to_string();
        assert_eq!(error, "FP8_CUDA_ALLOCATOR=jemalloc: expected caching or exact");
        let is_caching = |value: &str| super::is_caching("FP8_CPU_ALLOCATOR", Some(&value.into()));
        assert!(is_caching("caching").unwrap() && !is_caching("exact").unwrap());
        let error = is_caching("jemalloc").unwrap_err().to_string();
        assert_eq!(error, "FP8_CPU_ALLOCATOR=jemalloc: expected caching or exact");
    }

    #[test]
    fn tuning_is_a_count() {
        assert_eq!(read(&[("FP8_GEMM_TUNING", "8")]).unwrap().gemm_tuning.candidates, 8);
        for wrong in ["many", "-1", "1025", "1000000000000"] {
            let error = read(&[("FP8_GEMM_TUNING", wrong)]).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("FP8_GEMM_TUNING={wrong}: expected a count up to 1024, 0 for no tuning")
            );
        }
    }

    #[test]
    fn folders_are_split() {
        assert_eq!(
            read(&[("FP8_CUDA_LIB_DIR", "/a:/b")]).unwrap().library_dirs,
            ["/a", "/b"].map(PathBuf::from)
        );
    }
}
