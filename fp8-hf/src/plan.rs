//! Plans a quantization: which matrices it converts, which of them share a scale, and which it leaves as they are.

use super::config::Config;
use super::encode;
use super::family::{TensorKind, TensorSpec};
use super::folder::Folder;
use super::quantize_options::QuantizeOptions;
use super::scheme::Scheme;
use crate::{Error, Result};
use fp8_nn::matches_name;
use safetensors::Dtype;
use std::collections::BTreeMap;

/// The module that is never quantized.
const HEAD: &str = "lm_head";

/// The plan of a quantization.
#[derive(Debug)]
pub(super) struct Plan {
    /// Matrices with one scale together. Without such a scale, each matrix is on its own.
    pub(super) units: Vec<Vec<Matrix>>,
    /// Modules that stay as they are, for the ignore list.
    pub(super) ignored: Vec<String>,
    /// Matrices whose sides are no multiples of a block.
    pub(super) ragged: Vec<String>,
    /// The modules of each group that vLLM computes as one and of which only a part is quantized.
    pub(super) split_groups: Vec<Vec<String>>,
}

/// A matrix that is quantized.
#[derive(Debug, Clone)]
pub(super) struct Matrix {
    /// The tensor's name.
    pub(super) name: String,
    pub(super) shape: [usize; 2],
    pub(super) dtype: Dtype,
}

impl Matrix {
    /// The bytes of a row.
    pub(super) fn row(&self) -> usize {
        self.shape[1] * self.dtype.bitsize() / 8
    }

    pub(super) fn bytes(&self) -> usize {
        self.shape[0].saturating_mul(self.row())
    }
}

/// Returns the name of a tensor without its last part.
pub(super) fn module(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// Refuses a model that is quantized, or that no FP8 format can store.
pub(super) fn expect_quantizable(config: &Config) -> Result<(), String> {
    if config.quantization.is_some() {
        return Err("it is quantized already: quantize the original model".into());
    }
    if config.family.is_transposed {
        let family = config.family.model_type;
        return Err(format!(
            "{family} stores its weights as in × out, which no FP8 format has: it cannot be quantized"
        ));
    }
    Ok(())
}

impl Plan {
    pub(super) fn new(folder: &Folder, options: &QuantizeOptions) -> Result<Self> {
        expect_quantizable(&folder.config).map_err(|problem| folder.problem(problem))?;
        Self::of(&folder.config, options, |spec| {
            let name = folder.stored(&spec.name);
            let info = folder.info(name)?;
            if !encode::is_source(info.dtype) {
                let problem = format!("`{name}` is {:?}: expected F32, BF16 or F16", info.dtype);
                return Err(folder.problem(problem));
            }
            Ok(Matrix { name: name.to_owned(), shape: info.matrix(), dtype: info.dtype })
        })
    }

    /// Plans for the matrices that `matrix` returns for the tensors of a model.
    pub(super) fn of(
        config: &Config,
        options: &QuantizeOptions,
        matrix: impl Fn(&TensorSpec) -> Result<Matrix>,
    ) -> Result<Self> {
        let specs = config.tensors();
        let linears: Vec<&TensorSpec> = specs.iter().filter(|spec| spec.kind.is_linear()).collect();
        let is_ignored = |spec: &TensorSpec| {
            options.ignore.iter().any(|pattern| matches_name(pattern, module(&spec.name)))
        };
        for pattern in &options.ignore {
            let is_used = |spec: &&TensorSpec| matches_name(pattern, module(&spec.name));
            if !matches_name(pattern, HEAD) && !linears.iter().any(is_used) {
                return Err(Error::Option {
                    part: "quantize".into(),
                    option: "ignore",
                    value: format!("\"{pattern}\""),
                    remedy: "it matches no layer: expected a pattern such as \"model.layers.0.*\" or \"down_proj\"".into(),
                });
            }
        }
        let split_groups = split_groups(&linears, is_ignored);
        if options.scheme.shares_in_groups() {
            expect_whole_groups(&linears, is_ignored)?;
        }
        let (mut plan, mut groups) = (
            Self { units: Vec::new(), ignored: Vec::new(), ragged: Vec::new(), split_groups },
            BTreeMap::new(),
        );
        let mut first_ragged = [0, 0];
        for spec in linears.iter().copied() {
            if is_ignored(spec) {
                plan.ignored.push(module(&spec.name).to_owned());
                continue;
            }
            let matrix = matrix(spec)?;
            let sides = matrix.shape.iter().zip(options.scheme.multiples());
            if !sides.into_iter().all(|(side, of)| side.is_multiple_of(of)) {
                if plan.ragged.is_empty() {
                    first_ragged = matrix.shape;
                }
                plan.ragged.push(matrix.name.clone());
            }
            match options.scheme.shares_in_groups() && spec.kind != TensorKind::Linear {
                true => {
                    let at =
                        *groups.entry((spec.layer, spec.kind == TensorKind::Qkv)).or_insert(plan.units.len());
                    match plan.units.get_mut(at) {
                        Some(unit) => unit.push(matrix),
                        None => plan.units.push(vec![matrix]),
                    }
                }
                false => plan.units.push(vec![matrix]),
            }
        }
        plan.expect_input_scales(options)?;
        if let (Some(name), false) = (plan.ragged.first(), options.allow_ragged) {
            let [rows, cols] = first_ragged;
            return Err(Error::Ragged {
                scheme: options.scheme.to_string(),
                multiple: options.scheme.multiples()[1],
                layer: name.clone(),
                rows,
                cols,
                matrices: plan.ragged.len(),
            });
        }
        if plan.units.is_empty() {
            return Err(Error::Option {
                part: "quantize".into(),
                option: "ignore",
                value: options.ignore.join(", "),
                remedy: "all layers are ignored: leave some to quantize".into(),
            });
        }
        plan.ignored.push(HEAD.into());
        Ok(plan)
    }
}

impl Plan {
    /// Checks that there is a scale for the input of each matrix, if there are any, and none of an unknown layer.
    fn expect_input_scales(&self, options: &QuantizeOptions) -> Result<()> {
        let scales = &options.input_scales;
        let refused = |value: String, remedy: String| {
            Err(Error::Option { part: "quantize".into(), option: "input_scales", value, remedy })
        };
        if !scales.is_empty() && !options.scheme.takes_input_scales() {
            let of_inputs = if options.scheme.is_nvfp4() { "in high precision" } else { "dynamic" };
            let remedy =
                format!("inputs are {of_inputs} with scheme {}: use tensor, vllm or nvfp4", options.scheme);
            return refused(format!("{} scales", scales.len()), remedy);
        }
        if scales.is_empty() && options.scheme == Scheme::Nvfp4 {
            let remedy = "nvfp4 needs the scale of each layer's input, as calibrate returns them: or use nvfp4a16, which leaves \
                          inputs in high precision";
            return refused("none".to_owned(), remedy.to_owned());
        }
        let modules: Vec<&str> = self.units.iter().flatten().map(|matrix| module(&matrix.name)).collect();
        for name in modules.iter().filter(|_| !scales.is_empty()) {
            match scales.get(*name) {
                Some(scale) if scale.is_finite() && *scale > 0.0 => {}
                Some(scale) => {
                    return refused(
                        format!("{scale} for {name}"),
                        "expected a finite, positive scale".into(),
                    );
                }
                None => {
                    let remedy = format!("{name} has none: give one for each layer that is quantized");
                    return refused(format!("{} scales", scales.len()), remedy);
                }
            }
        }
        let is_known = |name: &&String| modules.contains(&name.as_str()) || self.ignored.contains(name);
        match scales.keys().find(|name| !is_known(name)) {
            None => Ok(()),
            Some(name) => refused(name.clone(), "the model has no such layer: leave it out".into()),
        }
    }
}

/// Returns the weights that vLLM computes as one, group by group, if some of them are quantized and some are not.
fn split<'a>(
    linears: &'a [&'a TensorSpec],
    is_ignored: impl Fn(&TensorSpec) -> bool,
) -> impl Iterator<Item = &'a [&'a TensorSpec]> {
    let is_group = |one: &&TensorSpec, other: &&TensorSpec| {
        one.kind == other.kind && one.kind != TensorKind::Linear && one.layer == other.layer
    };
    let is_split = move |group: &&[&TensorSpec]| {
        let ignored = group.iter().filter(|spec| is_ignored(spec)).count();
        ignored > 0 && ignored < group.len()
    };
    linears.chunk_by(is_group).filter(is_split)
}

fn split_groups(linears: &[&TensorSpec], is_ignored: impl Fn(&TensorSpec) -> bool) -> Vec<Vec<String>> {
    let names = |group: &[&TensorSpec]| group.iter().map(|spec| module(&spec.name).to_owned()).collect();
    split(linears, is_ignored).map(names).collect()
}

/// Refuses a group of which only a part is quantized: the format of [`Scheme::Vllm`] has one scale for the group.
fn expect_whole_groups(linears: &[&TensorSpec], is_ignored: impl Fn(&TensorSpec) -> bool) -> Result<()> {
    let Some(group) = split(linears, &is_ignored).next() else { return Ok(()) };
    let of = |ignored: bool| group.iter().find(|spec| is_ignored(spec) == ignored);
    let name = |spec: Option<&&TensorSpec>| spec.map_or("", |spec| module(&spec.name)).to_owned();
    Err(Error::Option {
        part: "quantize".into(),
        option: "ignore",
        value: name(of(true)),
        remedy: format!("vLLM computes it together with {}: ignore both or none", name(of(false))),
    })
}
