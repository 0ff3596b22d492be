//! Scales for rows and blocks: every `*.safetensors` file, by the metadata key `kind`.
//!
//! | `kind` | one case is | compared |
//! |---|---|---|
//! | `quantize` | one format and granularity in one direction, by fp8-format's slices and by fp8-kernels | bit for bit |
//! | `gemm` | one of the three products of a Linear under one recipe | within a multiple of the recorded bound |
//! | `e8m0` | one conversion to or from E8M0 | bit for bit |
//! | `layouts`, `nvfp4` | one entry of the file's `cases` | not compared; counted |
//!
//! Any other kind is an error, and so is a tensor that no case names.

mod e8m0;
pub(super) mod file;
pub(super) mod gemm;
pub(super) mod quantize;

use std::path::Path;

use fp8_kernels::Device;

use file::{Check, File};

use super::tally::{Tally, each_tensor_file};
use crate::result::Result as TaskResult;

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    each_tensor_file("blocks", folder, |name, bytes| {
        let before = (tally.passed, tally.failed);
        if let Err(error) = File::parse(bytes).and_then(|file| check(&file, name, device, tally)) {
            tally.record(&format!("blocks/{name}"), Err(error));
        }
        println!("blocks/{name}: {} passed, {} failed", tally.passed - before.0, tally.failed - before.1);
    })
}

/// Compares the cases of a file.
fn check(file: &File<'_>, name: &str, device: &Device, tally: &mut Tally) -> Check {
    match file.meta("kind")? {
        "quantize" => quantize::check(file, name, device, tally)?,
        "gemm" => gemm::check(file, name, device, tally)?,
        "e8m0" => e8m0::check(file, name, tally)?,
        kind @ ("layouts" | "nvfp4") => {
            tally.leave_out(kind, file.cases::<serde_json::Value>()?.len());
            return Ok(());
        }
        other => {
            return Err(format!("kind {other}: expected quantize, gemm, e8m0, layouts or nvfp4"));
        }
    }
    let named = file.named.borrow();
    match file.tensors.names().into_iter().find(|tensor| !named.contains(*tensor)) {
        None => Ok(()),
        Some(tensor) => Err(format!("no case names tensor {tensor}: it was not compared")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::root::root;

    /// The recorded cases of a file, after a change of the file's bytes.
    fn results(owner: &str, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> (usize, usize, String) {
        let path: PathBuf = root().join(owner).join("tests/golden/blocks").join(name);
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        let mut tally = Tally::default();
        let result = File::parse(&bytes).and_then(|file| check(&file, name, &Device::cpu(), &mut tally));
        (tally.passed, tally.failed, result.err().unwrap_or_default())
    }

    /// Replaces a text by another of the same length.
    fn replace(from: &'static str, to: &'static str) -> impl FnOnce(&mut Vec<u8>) {
        assert_eq!(from.len(), to.len());
        move |bytes| {
            let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
    }

    const NAME: &str = "heavy_f16_5x31.safetensors";

    #[test]
    fn a_wrong_code_fails_its_case_in_both_crates() {
        let (passed, failed, error) = results("fp8-format", NAME, |_| {});
        assert!(passed > 20 && failed == 0 && error.is_empty(), "{passed} {failed} {error}");
        // The last bytes are those of the last tensor of codes.
        let (fewer, failed, _) = results("fp8-format", NAME, |bytes| *bytes.last_mut().unwrap() ^= 1);
        assert_eq!((fewer, failed), (passed - 2, 2));
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        let error = |change| results("fp8-format", NAME, change).2;
        let of_kind = error(replace("\"kind\":\"quantize\"", "\"kind\":\"quantise\""));
        assert_eq!(of_kind, "kind quantise: expected quantize, gemm, e8m0, layouts or nvfp4");
        let key = results("fp8-format", NAME, replace("\\\"columnwise\\\"", "\\\"columnwide\\\"")).2;
        assert!(key.contains("unknown field `columnwide`"), "{key}");
        let mode = results("fp8-format", NAME, replace("\"b1x128\\\"", "\"b1x127\\\""));
        assert!(mode.1 > 0, "{mode:?}");
    }

    #[test]
    fn a_product_beyond_its_bound_fails() {
        let name = "gemm_large.safetensors";
        let (passed, failed, error) = results("fp8-kernels", name, |_| {});
        assert_eq!((passed, failed, error.as_str()), (27, 0, ""));
        // The first tensor is a product in f64; this is its first element.
        let (passed, failed, error) = results("fp8-kernels", name, |bytes| {
            let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
            bytes[8 + header..][..8].copy_from_slice(&1e3_f64.to_le_bytes());
        });
        assert_eq!((passed, failed, error.as_str()), (26, 1, ""));
    }
}
