//! Environment of the simulated device. Every variable is read here, once, when the library is first called.
//!
//! | variable | type | default | meaning |
//! |---|---|---|---|
//! | `FP8_SIM_ARCH` | `80`, `89`, `90`, `100`, `120`, also `sm_90` | `90` | compute capability of the device |
//! | `FP8_SIM_DRIVER` | 1000 · major + 10 · minor | 13000 | CUDA version the driver says it has; what it can do stays the same |
//! | `FP8_SIM_CUBLAS` | 10000 · major + 100 · minor + patch | 130100 | version of cuBLAS: which scale modes it has |
//! | `FP8_SIM_CUDNN` | 10000 · major + 100 · minor + patch | 0, none | version of cuDNN: which graphs it has kernels for |
//! | `FP8_SIM_MEMORY` | bytes | 2 GiB | device memory |
//! | `FP8_SIM_SM_COUNT` | count | 4 | multiprocessors reported |
//! | `FP8_SIM_SEED` | integer | 0 | order of runnable streams, and of blocks and warps inside a launch |
//! | `FP8_SIM_EAGER` | `0`, `1` | `0` | run every operation at its call |
//! | `FP8_SIM_FAIL` | `name:count:code,…` | none | the count-th call of `name` from now on returns `code` |
//! | `FP8_SIM_LEAKS` | `0`, `1` | `0` | print what is still live when the process exits |
//! | `FP8_SIM_NCCL_SHARED` | `0`, `1` | `0` | several ranks of a communicator may share the device |
//! | `FP8_SIM_STUB` | `0`, `1` | `0` | run no kernels, products, fills and copies: to time the host |
//! | `FP8_SIM_RACES` | `0`, `1` | `1` | look for data races inside kernels, which takes up to a third of their time |
//! | `FP8_SIM_FP8_SUM_BITS` | 1 to 23 | none: f32 | how many bits below the largest of 32 products, and of what was there, are kept when FP8 products are added up: 13 is about what tensor cores of Ada and Hopper do |
//! | `FP8_SIM_FP4_BIAS` | `0`, `1` | `1` | cuBLASLt adds a bias to products of FP4 operands |
//! | `FP8_SIM_SNAPSHOTS` | folder | none | its `*.ptx` files stand for the built-in snapshots of the same names |

use std::fs;
use std::path::Path;

use crate::cublaslt::set_version;
use crate::cudnn;
use crate::device::Arch;
use crate::snapshot::{self, Snapshot};

/// The properties of the device that the environment or a control call sets.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) arch: Arch,
    /// The version that `cuDriverGetVersion` returns: 1000 · major + 10 · minor.
    pub(crate) driver: i32,
    pub(crate) memory: u64,
    pub(crate) sm_count: u32,
    pub(crate) seed: u64,
    pub(crate) eager: bool,
    pub(crate) leaks: bool,
    /// Data races inside kernels are looked for.
    pub(crate) races: bool,
    /// Kernels, products, fills and copies on the device are dropped at their call.
    pub(crate) stub: bool,
    /// Several ranks of a communicator may share the device.
    pub(crate) nccl_shared: bool,
    /// The number of bits that sums of FP8 products keep below the largest value added at a time. `None` sums in f32.
    pub(crate) fp8_sum_bits: Option<u32>,
    /// cuBLASLt adds a bias to products of FP4 operands.
    pub(crate) fp4_bias: bool,
    /// In place of built-in ones.
    pub(crate) snapshots: Vec<Snapshot>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            arch: Arch::DEFAULT,
            driver: 13_000,
            memory: 2 << 30,
            sm_count: 4,
            seed: 0,
            eager: false,
            leaks: false,
            races: true,
            stub: false,
            nccl_shared: false,
            fp8_sum_bits: None,
            fp4_bias: true,
            snapshots: Vec::new(),
        }
    }
}

impl Settings {
    /// Settings from the environment, and the fault list it asks for. An unparsable value is an error that names it.
    pub(crate) fn from_environment() -> Result<(Self, String), String> {
        let mut settings = Self::default();
        for key in [
            "arch",
            "driver",
            "cublas",
            "cudnn",
            "memory_limit",
            "sm_count",
            "seed",
            "eager",
            "leaks",
            "nccl_shared",
            "races",
            "stub",
            "fp8_sum_bits",
            "fp4_bias",
            "snapshots",
        ] {
            let name = variable(key);
            if let Some(value) = text(name)? {
                settings.set(key, &value).map_err(|why| format!("{name}={value}: {why}"))?;
            }
        }
        Ok((settings, text("FP8_SIM_FAIL")?.unwrap_or_default()))
    }

    /// Changes one setting by its control key.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "arch" => self.arch = Arch::parse(value)?,
            "driver" => self.driver = version(value)?,
            "cublas" => match usize::try_from(integer(value)?) {
                Ok(version @ 12_01_00..=99_99_99) => set_version(version),
                _ => return Err("expected 10000 * major + 100 * minor + patch, from 120100 on".into()),
            },
            "cudnn" => match usize::try_from(integer(value)?) {
                Ok(version @ (0 | 9_00_00..=99_99_99)) => cudnn::set_version(version),
                _ => return Err("expected 10000 * major + 100 * minor + patch, or 0 for none".into()),
            },
            "memory_limit" => self.memory = integer(value)?,
            "sm_count" => {
                self.sm_count = match u32::try_from(integer(value)?) {
                    Ok(count @ 1..=1024) => count,
                    _ => return Err("the device has 1 to 1024 multiprocessors".into()),
                }
            }
            "seed" => self.seed = integer(value)?,
            "eager" => self.eager = switch(value)?,
            "leaks" => self.leaks = switch(value)?,
            "races" => self.races = switch(value)?,
            "stub" => self.stub = switch(value)?,
            "nccl_shared" => self.nccl_shared = switch(value)?,
            "fp8_sum_bits" => {
                self.fp8_sum_bits = match u32::try_from(integer(value)?) {
                    Ok(bits @ 1..=23) => Some(bits),
                    _ => return Err("f32 keeps 23 bits: 1 to 23".into()),
                }
            }
            "fp4_bias" => self.fp4_bias = switch(value)?,
            "snapshots" => self.snapshots = snapshots(Path::new(value))?,
            _ => return Err(format!("no setting of the name {key}")),
        }
        Ok(())
    }
}

fn variable(key: &str) -> &'static str {
    match key {
        "arch" => "FP8_SIM_ARCH",
        "driver" => "FP8_SIM_DRIVER",
        "cublas" => "FP8_SIM_CUBLAS",
        "cudnn" => "FP8_SIM_CUDNN",
        "memory_limit" => "FP8_SIM_MEMORY",
        "sm_count" => "FP8_SIM_SM_COUNT",
        "seed" => "FP8_SIM_SEED",
        "eager" => "FP8_SIM_EAGER",
        "nccl_shared" => "FP8_SIM_NCCL_SHARED",
        "races" => "FP8_SIM_RACES",
        "snapshots" => "FP8_SIM_SNAPSHOTS",
        "stub" => "FP8_SIM_STUB",
        "fp8_sum_bits" => "FP8_SIM_FP8_SUM_BITS",
        "fp4_bias" => "FP8_SIM_FP4_BIAS",
        _ => "FP8_SIM_LEAKS",
    }
}

fn text(name: &str) -> Result<Option<String>, String> {
    match std::env::var(name) {
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) => Ok(Some(value)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(format!("{name}: not UTF-8")),
    }
}

/// The snapshots of a folder, each with the name of a built-in one.
fn snapshots(folder: &Path) -> Result<Vec<Snapshot>, String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| error.to_string())? {
        let path = entry.map_err(|error| error.to_string())?.path();
        if path.extension().is_none_or(|end| end != "ptx") {
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !snapshot::is_built_in(&name) {
            return Err(format!("{name}: no snapshot of this name is built in"));
        }
        let text = fs::read_to_string(&path).map_err(|error| format!("{name}: {error}"))?;
        found.push(Snapshot::parse(&name, &text).map_err(|why| why.trim_end().to_owned())?);
    }
    Ok(found)
}

fn integer(value: &str) -> Result<u64, String> {
    value.trim().parse().map_err(|_| "expected a decimal integer from 0 to 2^64 - 1".into())
}

/// A version as CUDA writes it. Drivers before CUDA 11 know no stream-ordered memory, which this one has.
fn version(value: &str) -> Result<i32, String> {
    let expected =
        "expected 1000 * major + 10 * minor of a CUDA version from 11.0 to 99.9, such as 12040 for 12.4";
    match i32::try_from(integer(value).map_err(|_| expected)?) {
        Ok(version @ 11_000..=99_990) if version % 10 == 0 && version % 1000 < 100 => Ok(version),
        _ => Err(expected.into()),
    }
}

fn switch(value: &str) -> Result<bool, String> {
    match value.trim() {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("expected 0 or 1".into()),
    }
}
