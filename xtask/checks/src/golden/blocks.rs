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
mod gemm;
mod quantize;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use fp8_format::slice::{BlockScaling, MxRounding};
use fp8_format::{Blocks, Encoding};
use fp8_kernels::{BlockRule, Device, Tensor};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde::de::DeserializeOwned;

use super::{Tally, each_tensor_file};
use crate::Result as TaskResult;

type Check<T = ()> = Result<T, String>;

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    each_tensor_file("blocks", folder, |name, bytes| {
        let before = (tally.passed, tally.failed);
        if let Err(error) = File::parse(bytes).and_then(|file| file.check(name, device, tally)) {
            tally.record(&format!("blocks/{name}"), Err(error));
        }
        println!("blocks/{name}: {} passed, {} failed", tally.passed - before.0, tally.failed - before.1);
    })
}

/// A file of tensors, each of which a case has to name.
struct File<'a> {
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
    named: RefCell<BTreeSet<String>>,
}

impl<'a> File<'a> {
    fn parse(bytes: &'a [u8]) -> Check<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        Ok(Self { tensors, metadata, named: RefCell::default() })
    }

    fn check(&self, name: &str, device: &Device, tally: &mut Tally) -> Check {
        match self.meta("kind")? {
            "quantize" => quantize::check(self, name, device, tally)?,
            "gemm" => gemm::check(self, name, device, tally)?,
            "e8m0" => e8m0::check(self, name, tally)?,
            kind @ ("layouts" | "nvfp4") => {
                tally.leave_out(kind, self.cases::<serde_json::Value>()?.len());
                return Ok(());
            }
            other => {
                return Err(format!("kind {other}: expected quantize, gemm, e8m0, layouts or nvfp4"));
            }
        }
        let named = self.named.borrow();
        match self.tensors.names().into_iter().find(|tensor| !named.contains(*tensor)) {
            None => Ok(()),
            Some(tensor) => Err(format!("no case names tensor {tensor}: it was not compared")),
        }
    }

    fn meta(&self, key: &str) -> Check<&str> {
        self.metadata.get(key).map(String::as_str).ok_or_else(|| format!("no metadata key {key}"))
    }

    /// The entries of the metadata key `cases`, of which there is at least one.
    fn cases<T: DeserializeOwned>(&self) -> Check<Vec<T>> {
        let cases: Vec<T> =
            serde_json::from_str(self.meta("cases")?).map_err(|error| format!("cases: {error}"))?;
        if cases.is_empty() { Err("cases: the list is empty".to_owned()) } else { Ok(cases) }
    }

    /// Says that a case names this tensor.
    fn name(&self, tensor: &str) {
        self.named.borrow_mut().insert(tensor.to_owned());
    }

    /// The elements of a tensor of this type.
    fn elements<const N: usize, T>(&self, name: &str, dtype: Dtype, from: fn([u8; N]) -> T) -> Check<Vec<T>> {
        let tensor = self.tensors.tensor(name).map_err(|error| format!("{name}: {error}"))?;
        if tensor.dtype() != dtype {
            return Err(format!("{name}: the dtype is {}, expected {dtype}", tensor.dtype()));
        }
        self.name(name);
        Ok(tensor.data().as_chunks::<N>().0.iter().map(|element| from(*element)).collect())
    }

    fn bytes(&self, name: &str) -> Check<Vec<u8>> {
        self.elements(name, Dtype::U8, |[byte]: [u8; 1]| byte)
    }

    fn f32_bits(&self, name: &str) -> Check<Vec<u32>> {
        self.elements(name, Dtype::F32, u32::from_le_bytes)
    }

    /// A matrix in a type that can be quantized.
    fn matrix(&self, name: &str) -> Check<Matrix> {
        let tensor = self.tensors.tensor(name).map_err(|error| format!("{name}: {error}"))?;
        let &[rows, cols] = tensor.shape() else {
            return Err(format!("{name}: the shape is {:?}, expected rows and columns", tensor.shape()));
        };
        let elements = match tensor.dtype() {
            Dtype::F32 => Elements::F32(self.elements(name, Dtype::F32, f32::from_le_bytes)?),
            Dtype::F16 => Elements::F16(self.elements(name, Dtype::F16, f16::from_le_bytes)?),
            Dtype::BF16 => Elements::BF16(self.elements(name, Dtype::BF16, bf16::from_le_bytes)?),
            other => return Err(format!("{name}: the dtype is {other}, expected F32, F16 or BF16")),
        };
        Ok(Matrix { shape: [rows, cols], elements })
    }
}

struct Matrix {
    shape: [usize; 2],
    elements: Elements,
}

enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Matrix {
    fn tensor(&self, device: &Device) -> Check<Tensor> {
        match &self.elements {
            Elements::F32(x) => Tensor::from_vec(x.clone(), self.shape, device),
            Elements::F16(x) => Tensor::from_vec(x.clone(), self.shape, device),
            Elements::BF16(x) => Tensor::from_vec(x.clone(), self.shape, device),
        }
        .map_err(|error| error.to_string())
    }
}

/// The rule of a recorded mode, such as `b1x128_p2` or `mx32_rceil`.
fn rule(mode: &str, epsilon: f32) -> Check<BlockRule> {
    let (name, power_2_scales) = mode.strip_suffix("_p2").map_or((mode, false), |name| (name, true));
    let blocks = match (name, power_2_scales) {
        ("row", _) => Blocks::Row,
        ("b1x128", _) => Blocks::B1x128,
        ("b128x128", _) => Blocks::B128x128,
        ("mx32_floor", false) => return Ok(BlockRule::Mx(MxRounding::Floor)),
        ("mx32_rceil", false) => return Ok(BlockRule::Mx(MxRounding::Ceil)),
        _ => {
            let known = "row, b1x128 or b128x128, with or without _p2, mx32_floor or mx32_rceil";
            return Err(format!("mode {mode}: expected {known}"));
        }
    };
    Ok(BlockRule::F32(BlockScaling { power_2_scales, epsilon, ..BlockScaling::new(blocks) }))
}

fn encoding(format: &str) -> Check<Encoding> {
    match format {
        "e4m3" => Ok(Encoding::E4M3),
        "e5m2" => Ok(Encoding::E5M2),
        other => Err(format!("format {other}: expected e4m3 or e5m2")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::root;

    /// The recorded cases of a file, after a change of the file's bytes.
    fn results(owner: &str, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> (usize, usize, String) {
        let path: PathBuf = root().join(owner).join("tests/golden/blocks").join(name);
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        let mut tally = Tally::default();
        let result = File::parse(&bytes).and_then(|file| file.check(name, &Device::cpu(), &mut tally));
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
