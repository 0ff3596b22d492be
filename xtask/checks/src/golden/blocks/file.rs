//! A file with cases of scales for rows and blocks.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use fp8_format::slice::{BlockScaling, MxRounding};
use fp8_format::{Blocks, Encoding};
use fp8_kernels::{BlockRule, Device, Tensor};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde::de::DeserializeOwned;

pub(crate) type Check<T = ()> = Result<T, String>;

/// A file of tensors, each of which a case has to name.
pub(crate) struct File<'a> {
    pub(crate) tensors: SafeTensors<'a>,
    pub(crate) metadata: HashMap<String, String>,
    pub(crate) named: RefCell<BTreeSet<String>>,
}

impl<'a> File<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Check<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        Ok(Self { tensors, metadata, named: RefCell::default() })
    }

    pub(crate) fn meta(&self, key: &str) -> Check<&str> {
        self.metadata.get(key).map(String::as_str).ok_or_else(|| format!("no metadata key {key}"))
    }

    /// The entries of the metadata key `cases`, of which there is at least one.
    pub(crate) fn cases<T: DeserializeOwned>(&self) -> Check<Vec<T>> {
        let cases: Vec<T> =
            serde_json::from_str(self.meta("cases")?).map_err(|error| format!("cases: {error}"))?;
        if cases.is_empty() { Err("cases: the list is empty".to_owned()) } else { Ok(cases) }
    }

    /// Says that a case names this tensor.
    pub(crate) fn name(&self, tensor: &str) {
        self.named.borrow_mut().insert(tensor.to_owned());
    }

    /// The elements of a tensor of this type.
    pub(crate) fn elements<const N: usize, T>(
        &self,
        name: &str,
        dtype: Dtype,
        from: fn([u8; N]) -> T,
    ) -> Check<Vec<T>> {
        let tensor = self.tensors.tensor(name).map_err(|error| format!("{name}: {error}"))?;
        if tensor.dtype() != dtype {
            return Err(format!("{name}: the dtype is {}, expected {dtype}", tensor.dtype()));
        }
        self.name(name);
        Ok(tensor.data().as_chunks::<N>().0.iter().map(|element| from(*element)).collect())
    }

    pub(crate) fn bytes(&self, name: &str) -> Check<Vec<u8>> {
        self.elements(name, Dtype::U8, |[byte]: [u8; 1]| byte)
    }

    pub(crate) fn f32_bits(&self, name: &str) -> Check<Vec<u32>> {
        self.elements(name, Dtype::F32, u32::from_le_bytes)
    }

    /// A matrix in a type that can be quantized.
    pub(crate) fn matrix(&self, name: &str) -> Check<Matrix> {
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

pub(crate) struct Matrix {
    pub(crate) shape: [usize; 2],
    pub(crate) elements: Elements,
}

pub(crate) enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Matrix {
    pub(crate) fn tensor(&self, device: &Device) -> Check<Tensor> {
        match &self.elements {
            Elements::F32(x) => Tensor::from_vec(x.clone(), self.shape, device),
            Elements::F16(x) => Tensor::from_vec(x.clone(), self.shape, device),
            Elements::BF16(x) => Tensor::from_vec(x.clone(), self.shape, device),
        }
        .map_err(|error| error.to_string())
    }
}

/// The rule of a recorded mode, such as `b1x128_p2` or `mx32_rceil`.
pub(crate) fn rule(mode: &str, epsilon: f32) -> Check<BlockRule> {
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

pub(crate) fn encoding(format: &str) -> Check<Encoding> {
    match format {
        "e4m3" => Ok(Encoding::E4M3),
        "e5m2" => Ok(Encoding::E5M2),
        other => Err(format!("format {other}: expected e4m3 or e5m2")),
    }
}
