//! The values of parameters for a folder that is written, wherever they are.

use super::wholes::Wholes;
use crate::{Error, Result};
use fp8_kernels::{DType, Device};
use fp8_nn::checkpoint::stream::Elements;
use fp8_nn::{Gpt, Parameter, parameters};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Parameters whose values can be read, by their names behind the model's path.
pub(super) trait Source {
    /// Returns the names of all parameters.
    fn names(&self) -> Vec<String>;

    /// Returns the file of a checkpoint that the values come from, which errors name, and whose values are to be finite. `None`
    /// for a model.
    fn file(&self) -> Option<&Path> {
        None
    }

    /// Returns what is known of a parameter, or `None` if there is none of this name.
    fn info(&self, parameter: &str) -> Option<Info>;

    /// Reads rows as f32. A vector has rows of one element.
    fn rows(&self, parameter: &str, rows: Range<usize>) -> Result<Vec<f32>>;
}

/// The properties of a parameter in a [`Source`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Info {
    pub(super) shape: Vec<usize>,
    /// The dtype in which it is written if none is asked for.
    pub(super) dtype: DType,
    /// The dtype that holds its values exactly: f32 for FP8 codes.
    pub(super) exact: DType,
    /// Whether some rows can be read without reading all.
    pub(super) is_by_row: bool,
}

/// The parameters of a model, whole, also those of which this rank has a part.
pub(super) struct ModelSource<'a> {
    parameters: BTreeMap<&'a str, &'a Parameter>,
    wholes: &'a Wholes<'a>,
}

impl<'a> ModelSource<'a> {
    pub(super) fn new(model: &'a Gpt, wholes: &'a Wholes<'a>) -> Self {
        let behind = |parameter: &'a Parameter| {
            let name = parameter.name().strip_prefix(model.path()).and_then(|name| name.strip_prefix('.'));
            (name.unwrap_or(parameter.name()), parameter)
        };
        Self { parameters: parameters(model).into_iter().map(behind).collect(), wholes }
    }

    fn get(&self, name: &str) -> Result<&'a Parameter> {
        let missing =
            || Error::File { path: name.into(), problem: "the model has no parameter of this name".into() };
        self.parameters.get(name).copied().ok_or_else(missing)
    }
}

impl Source for ModelSource<'_> {
    fn names(&self) -> Vec<String> {
        self.parameters.keys().map(|&name| name.to_owned()).collect()
    }

    fn info(&self, parameter: &str) -> Option<Info> {
        let parameter = self.parameters.get(parameter)?;
        let is_fp8 = parameter.fp8().is_some();
        Some(Info {
            shape: parameter.global_shape().to_vec(),
            dtype: parameter.dtype(),
            exact: if is_fp8 { DType::F32 } else { parameter.dtype() },
            is_by_row: !is_fp8 && parameter.device().is_same(&Device::cpu()),
        })
    }

    fn rows(&self, parameter: &str, rows: Range<usize>) -> Result<Vec<f32>> {
        let tensor = self.wholes.value(self.get(parameter)?)?;
        let cols = tensor.numel() / tensor.shape().first().copied().unwrap_or(1).max(1);
        let range = rows.start * cols..rows.end * cols;
        Ok(match Elements::of(&tensor)? {
            Elements::F32(values) => values[range].to_vec(),
            Elements::BF16(values) => values[range].iter().map(|value| value.to_f32()).collect(),
            Elements::F16(values) => values[range].iter().map(|value| value.to_f32()).collect(),
            // No parameter has these.
            Elements::I32(_) | Elements::U8(_) => Vec::new(),
        })
    }
}
