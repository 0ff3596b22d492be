//! Images of modules: PTX text, and the CUBIN that this library's compiler makes.
//!
//! The CUBIN is an ELF64 file for machine 190 (EM_CUDA) with three sections: none, `.shstrtab` and `.nv.sim.ptx`, the
//! latter the SHA-256 of a PTX text and the text. The section headers end the file, so that
//! `e_shoff + e_shnum * e_shentsize` is its length, as it is for real ones.

use core::ops::Range;

use sha2::{Digest, Sha256};

use crate::code::{Code, Outcome};
use crate::device::{Arch, Target};
use crate::ffi::{Array, Host};
use crate::report;

const HEADER: usize = 64;
const SECTION: usize = 64;
const NAMES: &[u8] = b"\0.shstrtab\0.nv.sim.ptx\0";
const MACHINE: u16 = 190;
/// No module here comes near it; a length beyond it is a damaged header.
const LONGEST: u64 = 256 << 20;

/// PTX that a device can take, with the target it names.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) ptx: String,
    pub(crate) target: Target,
    pub(crate) version: u32,
}

/// Wraps PTX as the CUBIN of `target`.
pub(crate) fn cubin(ptx: &str, target: Target) -> Vec<u8> {
    let payload_at = HEADER + NAMES.len().next_multiple_of(16);
    let payload = 32 + ptx.len();
    let sections_at = (payload_at + payload).next_multiple_of(16);

    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0x33, 7];
    file.resize(16, 0);
    file.extend(2u16.to_le_bytes()); // executable
    file.extend(MACHINE.to_le_bytes());
    file.extend(1u32.to_le_bytes());
    file.extend([0; 16]); // entry, program headers
    file.extend((sections_at as u64).to_le_bytes());
    file.extend((target.number | (target.number << 16)).to_le_bytes());
    file.extend((HEADER as u16).to_le_bytes());
    file.extend([0; 4]); // program headers: size, count
    file.extend((SECTION as u16).to_le_bytes());
    file.extend(3u16.to_le_bytes());
    file.extend(1u16.to_le_bytes());

    file.extend(NAMES);
    file.resize(payload_at, 0);
    file.extend(Sha256::digest(ptx.as_bytes()));
    file.extend(ptx.as_bytes());
    file.resize(sections_at, 0);

    file.extend([0; SECTION]);
    for (name, kind, at, length) in [(1u32, 3u32, HEADER, NAMES.len()), (11, 1, payload_at, payload)] {
        file.extend(name.to_le_bytes());
        file.extend(kind.to_le_bytes());
        file.extend([0; 16]); // flags, address
        file.extend((at as u64).to_le_bytes());
        file.extend((length as u64).to_le_bytes());
        file.extend([0; 8]); // link, info
        file.extend(1u64.to_le_bytes());
        file.extend([0; 8]); // entry size
    }
    file
}

/// Reads the image at a bare pointer, as `cuModuleLoadData` gets it: the length is in the ELF header or is the text's.
///
/// CUDA Driver API, CUDA_ERROR_INVALID_IMAGE: "the device kernel image is invalid. This can also indicate an invalid
/// CUDA module."
pub(crate) fn read(image: Host, arch: Arch) -> Outcome<Image> {
    if Array::<u8>::at(image).take(1)? == [0x7f] {
        return elf(image, arch);
    }
    let text = String::from_utf8(image.c_text()?).map_err(|_| Code::INVALID_IMAGE)?;
    let image = inspect(text)?;
    if !image.target.ptx_runs_on(arch) {
        return Err(unsuited("PTX", image.target, arch));
    }
    Ok(image)
}

fn elf(image: Host, arch: Arch) -> Outcome<Image> {
    let header = image.read(HEADER)?;
    let number = |range: Range<usize>| -> u64 {
        header.get(range).unwrap_or_default().iter().rev().fold(0, |all, byte| (all << 8) | u64::from(*byte))
    };
    let ours = header.starts_with(b"\x7fELF\x02\x01")
        && number(18..20) == u64::from(MACHINE)
        && number(58..60) == SECTION as u64;
    let length = number(40..48).saturating_add(number(58..60) * number(60..62));
    if !ours || length > LONGEST {
        return Err(Code::INVALID_IMAGE);
    }
    if number(60..62) != 3 {
        // A CUBIN with machine code, which nothing here can run.
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    let file = image.read(length as usize)?;
    let payload = payload(&file).ok_or(Code::INVALID_IMAGE)?;
    let (hash, text) = payload.split_at_checked(32).ok_or(Code::INVALID_IMAGE)?;
    if Sha256::digest(text).as_slice() != hash {
        return Err(Code::INVALID_IMAGE);
    }
    let image = inspect(String::from_utf8(text.to_vec()).map_err(|_| Code::INVALID_IMAGE)?)?;
    if !image.target.cubin_runs_on(arch) {
        return Err(unsuited("a CUBIN", image.target, arch));
    }
    Ok(image)
}

fn payload(file: &[u8]) -> Option<&[u8]> {
    let last = file.len().checked_sub(SECTION)?;
    let field =
        |at: usize| Some(u64::from_le_bytes(file.get(last + at..last + at + 8)?.try_into().ok()?) as usize);
    let (at, length) = (field(24)?, field(32)?);
    file.get(at..at.checked_add(length)?)
}

/// CUDA Driver API, CUDA_ERROR_NO_BINARY_FOR_GPU: "there is no kernel image available that is suitable for the device".
fn unsuited(what: &str, target: Target, arch: Arch) -> Code {
    let suffix = target.suffix.map(String::from).unwrap_or_default();
    report::print(&format!(
        "cuModuleLoadData: {what} for sm_{}{suffix} does not run on a device of sm_{}",
        target.number,
        arch.number()
    ));
    Code::NO_BINARY_FOR_GPU
}

/// Reads `.version` and `.target`, which PTX starts with.
fn inspect(ptx: String) -> Outcome<Image> {
    let directive = |name: &str| {
        ptx.lines().map(str::trim_start).find_map(|line| {
            line.strip_prefix(name)?.split([',', ' ', '\t', '/']).find(|word| !word.is_empty())
        })
    };
    // CUDA Driver API, CUDA_ERROR_INVALID_IMAGE, as above: no PTX at all.
    let version = directive(".version").ok_or(Code::INVALID_IMAGE)?;
    let version = version
        .split_once('.')
        .and_then(|(major, minor)| Some(major.parse::<u32>().ok()? * 10 + minor.trim().parse::<u32>().ok()?))
        .ok_or(Code::INVALID_PTX)?;
    // CUDA Driver API, CUDA_ERROR_UNSUPPORTED_PTX_VERSION: "the provided PTX was compiled with an unsupported toolchain.
    // The most common reason for this, is the PTX was generated by a compiler newer than what is supported by the CUDA
    // driver". CUDA 13.0 knows PTX 9.0.
    if version > 90 {
        return Err(Code::UNSUPPORTED_PTX_VERSION);
    }
    // CUDA Driver API, CUDA_ERROR_INVALID_PTX: "a PTX JIT compilation failed".
    let target = directive(".target").and_then(Target::parse).ok_or(Code::INVALID_PTX)?;
    Ok(Image { target, version, ptx })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "// text\n.version 9.0\n.target sm_90a, debug\n.address_size 64\n";

    #[test]
    fn a_cubin_reads_back() {
        let target = Target::parse("sm_90a").unwrap();
        let file = cubin(PTX, target);
        assert_eq!(&file[..4], b"\x7fELF");
        let length = u64::from_le_bytes(file[40..48].try_into().unwrap()) as usize + 3 * 64;
        assert_eq!(length, file.len());
        let image = elf(Host::of(&file), Arch::parse("90").unwrap()).unwrap();
        assert_eq!((image.ptx.as_str(), image.target, image.version), (PTX, target, 90));
        assert_eq!(elf(Host::of(&file), Arch::parse("100").unwrap()).unwrap_err(), Code::NO_BINARY_FOR_GPU);
    }

    #[test]
    fn a_flipped_byte_is_an_invalid_image() {
        let good = cubin(PTX, Target::parse("sm_90a").unwrap());
        let text = good.windows(PTX.len()).position(|window| window == PTX.as_bytes()).unwrap();
        for at in text - 32..text + PTX.len() {
            let mut file = good.clone();
            file[at] ^= 1;
            let outcome = elf(Host::of(&file), Arch::parse("90").unwrap());
            assert_eq!(outcome.unwrap_err(), Code::INVALID_IMAGE, "byte {at}");
        }
    }

    #[test]
    fn ptx_is_refused_by_version_and_form() {
        let of = |text: &str| inspect(text.to_owned()).map(|image| image.version);
        assert_eq!(of(PTX), Ok(90));
        assert_eq!(of(".version 9.1\n.target sm_90\n"), Err(Code::UNSUPPORTED_PTX_VERSION));
        assert_eq!(of("hello"), Err(Code::INVALID_IMAGE));
        assert_eq!(of(".version 9.0\n.target wm_90\n"), Err(Code::INVALID_PTX));
    }
}
