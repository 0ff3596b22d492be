//! NVRTC's entry points. Meanings of the statuses: NVRTC, enum nvrtcResult and the section of
//! each function.

use core::ffi::{c_char, c_int};

use crate::code::{self, Code, Outcome};
use crate::compiler::{ARCHS, Program};
use crate::entry::entries;
use crate::ffi::{Array, Host, In, Out};
use crate::state::Driver;

/// Tag of program handles.
const KIND: u64 = 5;
const VERSION: (c_int, c_int) = (13, 0);
/// The program of a handle, for the getters.
fn program(driver: &mut Driver, handle: u64) -> Outcome<&mut Program> {
    driver.compiler.program(handle)
}

/// Null out-parameters are NVRTC_ERROR_INVALID_INPUT.
fn invalid<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|_| Code::NVRTC_INVALID_INPUT)
}

fn with_nul(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

entries! {
    Nothing fn nvrtcVersion(major: Out<c_int>, minor: Out<c_int>) |_| {
        invalid(minor.checked())?;
        invalid(major.set(VERSION.0))?;
        invalid(minor.set(VERSION.1))
    }

    Nothing fn nvrtcGetNumSupportedArchs(count: Out<c_int>) |_| {
        invalid(count.set(ARCHS.len() as c_int))
    }

    Nothing fn nvrtcGetSupportedArchs(all: Out<c_int>) |_| {
        invalid(all.set_all(&ARCHS))
    }

    Nothing fn nvrtcCreateProgram(
        handle: Out<u64>, source: In, name: In, headers: c_int, _texts: Array<usize>, _names: Array<usize>,
    ) |driver| {
        let handle = invalid(handle.checked())?;
        let source = invalid(source.text())?;
        let headers = usize::try_from(headers).map_err(|_| Code::NVRTC_INVALID_INPUT)?;
        // NVRTC, nvrtcCreateProgram: "name can be NULL; "default_program" is used when name is NULL or """.
        let name = name.optional().and_then(|name| String::from_utf8(name).ok()).filter(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| "default_program".to_owned());
        let fresh = driver.handle(KIND);
        driver.compiler.create(fresh, name, source, headers);
        invalid(handle.set(fresh))
    }

    // NVRTC, nvrtcDestroyProgram: the handle is set to null.
    Nothing fn nvrtcDestroyProgram(handle: Out<u64>) |driver| {
        let known = invalid(handle.value())?;
        driver.compiler.destroy(known)?;
        invalid(handle.set(0))
    }

    Nothing fn nvrtcCompileProgram(handle: u64, count: c_int, options: Array<usize>) |driver| {
        program(driver, handle)?;
        let count = usize::try_from(count).map_err(|_| Code::NVRTC_INVALID_INPUT)?;
        let mut texts = Vec::new();
        for option in invalid(options.take(count))? {
            let text = invalid(Host::at(option).c_text())?;
            texts.push(String::from_utf8(text).map_err(|_| Code::NVRTC_INVALID_OPTION)?);
        }
        let Driver { compiler, settings, .. } = driver;
        compiler.compile(&settings.snapshots, handle, &texts)
    }

    // NVRTC, nvrtcGetProgramLogSize: the size "includes the trailing NULL".
    Nothing fn nvrtcGetProgramLogSize(handle: u64, size: Out<usize>) |driver| {
        invalid(size.set(program(driver, handle)?.log.len() + 1))
    }

    Nothing fn nvrtcGetProgramLog(handle: u64, text: Out<c_char>) |driver| {
        invalid(text.set_bytes(&with_nul(&program(driver, handle)?.log)))
    }

    // NVRTC, nvrtcGetPTX: NVRTC_ERROR_INVALID_PROGRAM, here for a program that was not compiled.
    Nothing fn nvrtcGetPTXSize(handle: u64, size: Out<usize>) |driver| {
        let ptx = program(driver, handle)?.ptx.as_ref().ok_or(Code::NVRTC_INVALID_PROGRAM)?;
        invalid(size.set(ptx.len() + 1))
    }

    Nothing fn nvrtcGetPTX(handle: u64, text: Out<c_char>) |driver| {
        let ptx = program(driver, handle)?.ptx.as_ref().ok_or(Code::NVRTC_INVALID_PROGRAM)?;
        invalid(text.set_bytes(&with_nul(ptx)))
    }

    // NVRTC, nvrtcGetCUBINSize: "The value of cubinSizeRet is set to 0 if the value specified to -arch is a virtual
    // architecture".
    Nothing fn nvrtcGetCUBINSize(handle: u64, size: Out<usize>) |driver| {
        let program = program(driver, handle)?;
        if program.ptx.is_none() {
            return Err(Code::NVRTC_INVALID_PROGRAM);
        }
        invalid(size.set(program.cubin.as_ref().map_or(0, Vec::len)))
    }

    Nothing fn nvrtcGetCUBIN(handle: u64, bytes: Out<c_char>) |driver| {
        let cubin = program(driver, handle)?.cubin.as_ref().ok_or(Code::NVRTC_INVALID_PROGRAM)?;
        invalid(bytes.set_bytes(cubin))
    }
}

/// The text of a status. Not framed as the others are: it answers with a pointer and touches no state.
#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(status: c_int) -> *const c_char {
    code::nvrtc_text(status).as_ptr()
}
