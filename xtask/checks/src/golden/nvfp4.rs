//! NVFP4: every `*.safetensors` file, by the metadata key `kind`.
//!
//! | `kind` | one case is | compared |
//! |---|---|---|
//! | `codec` | the codes of one source type; decoded codes; packed rows | bit for bit |
//! | `quantize` | one copy of one matrix, by fp8-format's slices on every path or by fp8-kernels on the device | bit for bit |
//! | `gemm` | one of the three products of a Linear under one recipe | within a multiple of the recorded bound |
//! | `hadamard` | the transform of the rows of one type; its matrix | bit for bit |
//! | `stochastic` | the codes of all values with their bytes; the bytes of one seed | bit for bit |
//! | `layouts` | one entry of the file's `cases` | counted: the test `recorded_factors_are_laid_out_as_recorded` of ptx-interp compares them |
//!
//! Any other kind is an error.

mod codec;
mod gemm;
mod quantize;
mod tensors;

use std::path::Path;

use fp8_kernels::Device;

use super::blocks::file::{Check, File};
use super::tally::{Tally, each_tensor_file};
use crate::result::Result as TaskResult;

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    each_tensor_file("nvfp4", folder, |name, bytes| {
        let before = (tally.passed, tally.failed);
        if let Err(error) = File::parse(bytes).and_then(|file| check(&file, name, device, tally)) {
            tally.record(&format!("nvfp4/{name}"), Err(error));
        }
        println!("nvfp4/{name}: {} passed, {} failed", tally.passed - before.0, tally.failed - before.1);
    })
}

/// Compares the cases of a file.
fn check(file: &File<'_>, name: &str, device: &Device, tally: &mut Tally) -> Check {
    match file.meta("kind")? {
        "codec" => codec::check(file, name, tally),
        "quantize" => quantize::check(file, name, device, tally),
        "gemm" => gemm::check(file, name, device, tally),
        "hadamard" => codec::check_hadamard(file, name, tally),
        "stochastic" => codec::check_stochastic(file, name, tally),
        "layouts" => {
            tally.leave_out("nvfp4 layouts", file.cases::<serde_json::Value>()?.len());
            Ok(())
        }
        other => {
            Err(format!("kind {other}: expected codec, quantize, hadamard, stochastic, gemm or layouts"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::root;

    /// The recorded cases of a file, after a change of the file's bytes.
    fn results(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> (usize, usize, String) {
        let owner = if name.starts_with("gemm") { "fp8-kernels" } else { "fp8-format" };
        let path = root().join(owner).join("tests/golden/nvfp4").join(name);
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        let mut tally = Tally::default();
        let result = File::parse(&bytes).and_then(|file| check(&file, name, &Device::cpu(), &mut tally));
        (tally.passed, tally.failed, result.err().unwrap_or_default())
    }

    #[test]
    fn recorded_cases_pass_and_changed_ones_fail() {
        for (name, least) in [
            ("codec.safetensors", 6),
            ("hadamard.safetensors", 4),
            ("stochastic.safetensors", 4),
            ("heavy_f16_33x50.safetensors", 12),
            ("gemm_ragged.safetensors", 9),
        ] {
            let (passed, failed, error) = results(name, |_| {});
            assert!(passed >= least && failed == 0 && error.is_empty(), "{name}: {passed} {failed} {error}");
            // The last bytes of a file are data.
            let (_, failed, error) = results(name, |bytes| {
                let from = bytes.len() - 64;
                bytes[from..].iter_mut().for_each(|byte| *byte ^= 0x11);
            });
            assert!(failed > 0 && error.is_empty(), "{name}: {failed} {error}");
        }
        let rename = |bytes: &mut Vec<u8>| {
            let at = bytes.windows(8).position(|part| part == b"quantize").unwrap();
            bytes[at..at + 8].copy_from_slice(b"quantity");
        };
        let (_, _, error) = results("heavy_f16_33x50.safetensors", rename);
        assert!(error.starts_with("kind quantity: expected codec, quantize"), "{error}");
    }
}
