//! From a kernel file to a loaded function: compiled at first use, kept on disk, kept in the process.

use super::cache::{self, Cache};
use super::context::Context;
use super::entry::KernelFile;
use super::launch::Kernel;
use super::nvrtc::{Compiled, Nvrtc};
use crate::{Error, Result};
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::ffi::CString;
use std::time::Instant;

/// The compiler's options: without fused multiply-adds of its own, so that the same expressions give the same bits
/// everywhere.
const OPTIONS: [&str; 3] = ["-std=c++17", "-fmad=false", "-lineinfo"];

/// The macro by which a program finds instructions that only targets of one architecture or one family have. No other program contains
/// it.
const SPECIFIC: &str = "__CUDA_ARCH_FAMILY_SPECIFIC__";

/// Returns the architecture that the compiler is asked for. The result is only for this GPU in any case, so a program that asks for
/// instructions of one architecture alone gets them; `a` targets are known to every compiler that knows their GPU.
fn target(program: &str, (major, minor): (i32, i32)) -> String {
    let is_specific = major >= 10 && program.contains(SPECIFIC);
    format!("sm_{major}{minor}{}", if is_specific { "a" } else { "" })
}

/// Returns the file name that the compiler and its messages use for the program.
fn file_name(source: &dyn KernelFile) -> String {
    format!("{}.cu", source.stem())
}

/// The modules of one device, each loaded when one of its kernels is first requested.
#[derive(Debug)]
pub(super) struct Modules {
    cache: Cache,
    /// The compiler, or why there is none.
    nvrtc: Result<Nvrtc, String>,
    /// By the stem of the file.
    modules: HashMap<&'static str, Module>,
    /// By name, which no kernel of another file has.
    kernels: HashMap<&'static str, Kernel>,
}

#[derive(Debug, Clone, Copy)]
struct Module(sys::CUmodule);

// SAFETY: a CUmodule is a handle that the driver lets every thread use.
unsafe impl Send for Module {}

/// The bytes that the driver loads, and the name under which they were kept on disk.
struct Image {
    bytes: Vec<u8>,
    key: Option<String>,
    /// The source of the bytes: `compiler`, `cache` or `crate`.
    origin: &'static str,
    /// Why nothing was compiled, if it is PTX from inside the crate.
    instead: Option<String>,
}

impl Modules {
    pub(super) fn new(cache: Cache, nvrtc: Result<Nvrtc, String>) -> Self {
        Self { cache, nvrtc, modules: HashMap::new(), kernels: HashMap::new() }
    }

    /// The function `name` of `source`. The device's context is current.
    pub(super) fn kernel(
        &mut self,
        context: &Context,
        source: &dyn KernelFile,
        name: &'static str,
    ) -> Result<Kernel> {
        if let Some(kernel) = self.kernels.get(name) {
            return Ok(kernel.clone());
        }
        context.expect_eager(name, "its kernel is not loaded yet: run the step a few times before")?;
        let module = match self.modules.get(source.stem()) {
            Some(module) => *module,
            None => {
                let start = Instant::now();
                let (module, origin) = self.load(context, source)?;
                let milliseconds = start.elapsed().as_secs_f64() * 1e3;
                tracing::debug!(kernel_file = source.stem(), origin, milliseconds, "kernel file loaded");
                self.modules.insert(source.stem(), module);
                module
            }
        };
        let missing =
            |_| Error::Compile { kernel: file_name(source), log: format!("defines no kernel {name}") };
        let text = CString::new(name).map_err(missing)?;
        // SAFETY: the module was loaded in this context and is unloaded only with the device.
        let function = unsafe { result::module::get_function(module.0, text) }
            .map_err(|error| context.driver_error("cuModuleGetFunction", name, error))?;
        let parameters =
            parameters(function).map_err(|error| context.driver_error("cuFuncGetParamInfo", name, error))?;
        let kernel = Kernel::new(function, name, parameters);
        self.kernels.insert(name, kernel.clone());
        Ok(kernel)
    }

    /// Loads a kernel file. Returns its module and the [`origin`](Image::origin) of what was loaded.
    fn load(&self, context: &Context, source: &dyn KernelFile) -> Result<(Module, &'static str)> {
        let image = self.image(context, source)?;
        let error = match load_image(&image.bytes) {
            Ok(module) => return Ok((module, image.origin)),
            Err(error) => error,
        };
        // A kept kernel that this driver does not take: compiled anew, once.
        let (image, error) = match &image.key {
            Some(key) => {
                self.cache.remove(key);
                let image = self.image(context, source)?;
                match load_image(&image.bytes) {
                    Ok(module) => return Ok((module, image.origin)),
                    Err(error) => (image, error),
                }
            }
            None => (image, error),
        };
        let error = context.driver_error("cuModuleLoadData", source.stem(), error);
        match image.instead {
            // The driver may be too old for the PTX inside the crate: a compiler would help.
            Some(why) if is_refusal(&error) => Err(Error::Compile {
                kernel: file_name(source),
                log: format!("{error}; that was the PTX inside the crate, because of this: {why}"),
            }),
            _ => Err(error),
        }
    }

    fn image(&self, context: &Context, source: &dyn KernelFile) -> Result<Image> {
        let nvrtc = match &self.nvrtc {
            Ok(nvrtc) => nvrtc,
            Err(missing) => return Ok(snapshot(source, missing.clone())),
        };
        let program = source.program();
        let arch = target(&program, context.capability());
        let options: Vec<String> =
            std::iter::once(format!("-arch={arch}")).chain(OPTIONS.map(str::to_owned)).collect();
        // Without a version nothing says which compiler a kept kernel came from: none is used or kept.
        let key = nvrtc.version().map(|version| {
            cache::key(&[&program, &options.join(" "), &format!("{version:?}"), context.name()])
        });
        if let Some(bytes) = key.as_ref().and_then(|key| self.cache.read(key)) {
            return Ok(Image { bytes, key, origin: "cache", instead: None });
        }
        match nvrtc.compile(&file_name(source), &program, &options)? {
            Compiled::Cubin(bytes) => {
                if let Some(key) = &key {
                    self.cache.write(key, &bytes);
                }
                Ok(Image { bytes, key: None, origin: "compiler", instead: None })
            }
            Compiled::Unable(why) => Ok(snapshot(source, why)),
        }
    }

    /// Unloads everything. The device's context is current, and none of its kernels runs any more.
    pub(super) fn unload(&mut self) {
        self.kernels.clear();
        for (_, module) in self.modules.drain() {
            // SAFETY: loaded by this value in this context, and forgotten here; a failure leaves nothing to do.
            let _ = unsafe { result::module::unload(module.0) };
        }
    }
}

/// Whether the driver takes no such program: of a newer PTX than it knows, for another GPU, without a compiler of its own.
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Driver { code: 200 | 209 | 218 | 221 | 222 | 223, .. })
}

fn snapshot(source: &dyn KernelFile, why: String) -> Image {
    let mut bytes = source.snapshot().as_bytes().to_vec();
    bytes.push(0);
    Image { bytes, key: None, origin: "crate", instead: Some(why) }
}

fn load_image(bytes: &[u8]) -> Result<Module, result::DriverError> {
    // SAFETY: `bytes` is a whole CUBIN, just compiled or checked by the cache, or zero-terminated PTX.
    unsafe { result::module::load_data(bytes.as_ptr().cast()) }.map(Module)
}

/// The sizes of a function's parameters.
fn parameters(function: sys::CUfunction) -> Result<Vec<usize>, result::DriverError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; both numbers live through the call. An index past the last is refused.
        let status = unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) };
        match status {
            sys::CUresult::CUDA_SUCCESS => sizes.push(size),
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(sizes),
            status => return Err(result::DriverError(status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_with_instructions_of_one_architecture_are_compiled_for_it() {
        let program = format!("#if {SPECIFIC} >= 1000\n#endif");
        let targets = [(8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)];
        let specific = targets.map(|capability| target(&program, capability));
        assert_eq!(specific, ["sm_89", "sm_90", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"]);
        let plain = targets.map(|capability| target("", capability));
        assert_eq!(plain, ["sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"]);
    }
}
