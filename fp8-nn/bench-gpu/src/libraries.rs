//! NVIDIA's libraries, opened beside this library's own search: for their calls by themselves, and to say what there is.

use crate::result::Result;
use std::ffi::c_char;

pub(crate) const CUBLASLT: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];
const DRIVER: [&str; 1] = ["libcuda.so.1"];
const CUDNN: [&str; 1] = ["libcudnn.so.9"];
/// The first version that attention uses, as the library writes it.
const OLDEST_CUDNN: usize = 9_19_00;

/// Looks where `run.sh` says, and then where the system does.
pub(crate) fn open(names: &[&str]) -> Result<libloading::Library> {
    let folders = std::env::var_os("FP8_CUDA_LIB_DIR").unwrap_or_default();
    let in_folders = std::env::split_paths(&folders)
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        .filter(|path| path.is_file());
    let mut broken = String::new();
    for path in in_folders.chain(names.iter().map(Into::into)) {
        // SAFETY: this is NVIDIA's library or the simulated one, which this library loads, too.
        match unsafe { libloading::Library::new(&path) } {
            Ok(library) => return Ok(library),
            Err(error) if path.is_file() => broken = format!("; {}: {error}", path.display()),
            Err(_) => {}
        }
    }
    Err(format!("no {} in FP8_CUDA_LIB_DIR or where the system looks{broken}", names.join(" and no ")).into())
}

/// The version of the cuDNN that attention uses, or the reason why it uses none.
pub(crate) fn cudnn() -> Result<String> {
    if std::env::var("FP8_CUDNN").is_ok_and(|value| value == "0") {
        return Err("FP8_CUDNN is 0".into());
    }
    let library = open(&CUDNN)?;
    // SAFETY: the type is the one that cuDNN's documentation gives this function.
    let version = *unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cudnnGetVersion\0") }?;
    // SAFETY: the function takes no arguments and returns a number.
    let version = unsafe { version() };
    // Its parts, which it has opened by itself, stay in use.
    std::mem::forget(library);
    let written = format!("cuDNN {}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    match version {
        0 => Err("the simulated GPU has no cuDNN; FP8_SIM_CUDNN gives it one".into()),
        1..OLDEST_CUDNN => Err(format!("{written} is older than 9.19, the first that attention uses").into()),
        _ => Ok(written),
    }
}

/// The kernels that the simulated GPU has launched in this process.
pub(crate) fn launched() -> Result<Vec<String>> {
    type Get = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize;
    let library = open(&DRIVER)?;
    // SAFETY: the type is the one that the simulated GPU's documentation gives this function.
    let get = *unsafe { library.get::<Get>(b"fp8_sim_get\0") }?;
    let key = c"kernels".as_ptr();
    // SAFETY: the key ends with a zero byte; without a buffer, the function returns the size.
    let size = unsafe { get(key, std::ptr::null_mut(), 0) };
    let mut text = vec![0u8; size];
    // SAFETY: the buffer has the room that is given with it.
    unsafe { get(key, text.as_mut_ptr().cast(), text.len()) };
    let text = String::from_utf8_lossy(&text);
    Ok(text.trim_end_matches('\0').lines().map(str::to_owned).collect())
}
