//! The calls that fail, the codes that they return, and the outcomes that are allowed.

use fp8_nn::fp8_dist::Error as Groups;
use fp8_nn::fp8_kernels::Error as Kernels;
use fp8_nn::fp8_recipe::Error as Recipes;
use fp8_nn::prelude::Error;
use std::collections::BTreeMap;
use std::fmt;

/// The `count`-th call of `function` answers with `code`.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) function: String,
    pub(crate) count: u64,
    pub(crate) code: i32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "call {} of {}", self.count, self.function)
    }
}

impl Fault {
    pub(crate) fn new(function: &str, count: u64) -> Self {
        Self { function: function.to_owned(), count, code: code(function) }
    }
}

/// Returns the code with which the function fails.
fn code(function: &str) -> i32 {
    match function {
        "cuMemAllocAsync" | "cuMemHostAlloc" | "cuModuleLoadData" | "cuStreamCreate" => 2,
        "cuLaunchKernel" => 701,
        "cuStreamEndCapture" => 901,
        "nvrtcCreateProgram" => 1,
        "cublasLtCreate" => 3,
        function if function.starts_with("nvrtc") => 11,
        function if function.starts_with("cublas") => 14,
        _ => 999,
    }
}

/// Every call of each function; of one that is called more than `many` times, so many at even distances, unless
/// `FP8_TEST_FAULTS` is `all`. A quarter of that of the question for the current context, which stands before every other
/// call and fails as that does.
pub(crate) fn chosen(calls: &BTreeMap<String, u64>, many: u64) -> Vec<Fault> {
    let limit = match std::env::var("FP8_TEST_FAULTS").as_deref() {
        Ok("all") => u64::MAX,
        Err(_) | Ok("") => many,
        Ok(other) => panic!("FP8_TEST_FAULTS={other}: expected all, or nothing for a sample"),
    };
    let limit = |function: &str| if function == "cuCtxGetCurrent" { limit.div_ceil(4) } else { limit };
    calls.iter().flat_map(|(function, &count)| spread(function, count, limit(function))).collect()
}

/// At most `many` calls of a function at even distances: the first, the last and others, or the middle one alone.
pub(crate) fn spread(function: &str, count: u64, many: u64) -> Vec<Fault> {
    let drawn = count.min(many);
    let place = |i| if drawn == 1 { count.div_ceil(2) } else { 1 + i * (count - 1) / (drawn - 1) };
    (0..drawn).map(|i| Fault::new(function, place(i))).collect()
}

/// Returns the error of a kernel operation on one rank, whether it came directly, from a recipe or from a group.
pub(crate) fn of_kernels(error: &Error) -> Option<&Kernels> {
    match (error, of_group(error)) {
        (Error::Kernels(kernels) | Error::Recipe(Recipes::Kernels(kernels)), _) => Some(kernels),
        (_, Some(Groups::Kernels(kernels))) => Some(kernels),
        _ => None,
    }
}

/// Returns the error of the group, whether it came directly or from a recipe.
pub(crate) fn of_group(error: &Error) -> Option<&Groups> {
    match error {
        Error::Dist(group) => Some(group),
        Error::Recipe(Recipes::Group(group)) => group.downcast_ref(),
        _ => None,
    }
}

/// Whether the error says what failed.
pub(crate) fn is_typed(error: &Error, Fault { function, code, .. }: &Fault) -> bool {
    let is_right = of_kernels(error).is_some_and(|kernels| match kernels {
        Kernels::OutOfMemory { total, .. } => *code == 2 && *total > 0,
        Kernels::Driver { code: found, call, .. } => {
            // cudarc asks for the current context on the way to other calls.
            *found == *code as u32 && (function == "cuCtxGetCurrent" || function.starts_with(call))
        }
        Kernels::Compile { log, .. } => log.contains(function),
        Kernels::Gemm { code: found, call, .. } => found == code && call == function,
        _ => false,
    });
    is_right && error.to_string().len() > 20
}

pub(crate) fn expect_typed(error: &Error, fault: &Fault) {
    assert!(is_typed(error, fault), "{fault} with {}: {error}: {error:?}", fault.code);
}

/// Returns true if the function releases something. If it fails, the resource is leaked and no error is returned.
pub(crate) fn is_release(function: &str) -> bool {
    ["Destroy", "cuMemFree", "cuModuleUnload"].iter().any(|part| function.contains(part))
}

/// Returns true if the function may fail unnoticed. Memory is asked for twice, and uploads work without pinned memory. The
/// host learns of scales later. The compiler's version only names its cache, and contexts are set without asking for the
/// current one.
pub(crate) fn is_dispensable(function: &str) -> bool {
    let names = [
        "cuCtxGetCurrent",
        "cuEventCreate",
        "cuEventQuery",
        "cuEventRecord",
        "cuMemAllocAsync",
        "cuMemHostAlloc",
        "cuMemcpyDtoDAsync_v2", // without a copy of its scale, a weight is quantized again in the next scope
        "cuMemcpyDtoHAsync_v2",
        "nvrtcVersion",
    ];
    names.contains(&function)
}
