//! The values of the environment variables that concern GPUs.

use super::allocator::CudaAllocator;
use crate::{Error, GemmTuning, Result, environment};
use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

/// The values of the variables when a device was opened.
#[derive(Debug, Clone, Default)]
pub(crate) struct Environment {
    pub(crate) library_dirs: Vec<PathBuf>,
    pub(crate) cache_dir: Option<PathBuf>,
    pub(crate) allocator: CudaAllocator,
    pub(crate) gemm_tuning: GemmTuning,
    pub(crate) cudnn: bool,
    pub(crate) cuda_home: Option<PathBuf>,
    /// Python environments whose packages may contain NVIDIA's libraries; the user's own packages come last.
    pub(crate) python_prefixes: Vec<PathBuf>,
}

impl Environment {
    pub(crate) fn read() -> Result<Self> {
        Self::from_variables(environment::variable)
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
        let allocator = match environment::is_caching(ALLOCATOR, variable(ALLOCATOR).as_ref())? {
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
        let cudnn = match variable("FP8_CUDNN") {
            None => true,
            Some(value) if value == "1" => true,
            Some(value) if value == "0" => false,
            Some(value) => {
                let value = value.to_string_lossy().into_owned();
                let remedy = "expected 1, the default, or 0 for attention without cuDNN".to_owned();
                return Err(Error::Environment { name: "FP8_CUDNN", value, remedy });
            }
        };
        Ok(Self {
            cudnn,
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

#[cfg(test)]
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
    fn cudnn_is_on_or_off() {
        let cudnn = |variables: &[(&str, &str)]| read(variables).map(|environment| environment.cudnn);
        assert!(cudnn(&[]).unwrap() && cudnn(&[("FP8_CUDNN", "1")]).unwrap());
        assert!(!cudnn(&[("FP8_CUDNN", "0")]).unwrap());
        let error = cudnn(&[("FP8_CUDNN", "off")]).unwrap_err().to_string();
        assert_eq!(error, "FP8_CUDNN=off: expected 1, the default, or 0 for attention without cuDNN");
    }

    #[test]
    fn folders_are_split() {
        assert_eq!(
            read(&[("FP8_CUDA_LIB_DIR", "/a:/b")]).unwrap().library_dirs,
            ["/a", "/b"].map(PathBuf::from)
        );
    }
}
