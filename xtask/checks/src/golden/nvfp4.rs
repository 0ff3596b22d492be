//! NVFP4: every `*.safetensors` file, by the metadata key `kind`.
//!
//! | `kind` | one case is | compared |
//! |---|---|---|
//! | `codec` | the codes of one source type; decoded codes; packed rows | bit for bit |
//! | `quantize` | one copy of one matrix, by fp8-format's slices on every path | bit for bit |
//! | `hadamard` | the transform of the rows of one type; its matrix | bit for bit |
//! | `stochastic` | the codes of all values with their bytes; the bytes of one seed | bit for bit |
//! | `gemm`, `layouts` | one entry of the file's `cases` | not compared; counted |
//!
//! Any other kind is an error.

mod codec;
mod quantize;

use std::path::Path;

use super::blocks::file::{Check, File};
use super::tally::{Tally, each_tensor_file};
use crate::result::Result as TaskResult;

pub(super) fn run(folder: &Path, tally: &mut Tally) -> TaskResult {
    each_tensor_file("nvfp4", folder, |name, bytes| {
        let before = (tally.passed, tally.failed);
        if let Err(error) = File::parse(bytes).and_then(|file| check(&file, name, tally)) {
            tally.record(&format!("nvfp4/{name}"), Err(error));
        }
        println!("nvfp4/{name}: {} passed, {} failed", tally.passed - before.0, tally.failed - before.1);
    })
}

/// Compares the cases of a file.
fn check(file: &File<'_>, name: &str, tally: &mut Tally) -> Check {
    match file.meta("kind")? {
        "codec" => codec::check(file, name, tally),
        "quantize" => quantize::check(file, name, tally),
        "hadamard" => codec::check_hadamard(file, name, tally),
        "stochastic" => codec::check_stochastic(file, name, tally),
        kind @ ("gemm" | "layouts") => {
            tally.leave_out(&format!("nvfp4 {kind}"), file.cases::<serde_json::Value>()?.len());
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
        let path = root().join("fp8-format/tests/golden/nvfp4").join(name);
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        let mut tally = Tally::default();
        let result = File::parse(&bytes).and_then(|file| check(&file, name, &mut tally));
        (tally.passed, tally.failed, result.err().unwrap_or_default())
    }

    #[test]
    fn recorded_cases_pass_and_changed_ones_fail() {
        for (name, least) in [
            ("codec.safetensors", 6),
            ("hadamard.safetensors", 4),
            ("stochastic.safetensors", 4),
            ("heavy_f16_33x50.safetensors", 6),
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
