//! Adapters as peft stores them: `adapter_config.json` and `adapter_model.safetensors`.

mod config;
mod merge;
mod model;
mod new;
mod save;
mod survival;

use crate::config::Config;
use crate::family::TensorSpec;
use crate::files::{exists, read_text};
use crate::values::widen;
use crate::weights::Weights;
use crate::{Error, Result};
use config::{LoraConfig, Targets, is_named};
pub use new::LoraTargets;
use safetensors::Dtype;
pub use save::save_adapter;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
pub use survival::Survival;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const PICKLE: &str = "adapter_model.bin";
/// In front of the names of modules.
const PREFIX: &str = "base_model.model.";
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";

/// A LoRA adapter of a model, read from a folder that peft, or a program that uses it, has written.
///
/// It has matrices A `[r, in]` and B `[out, r]` for some Linears of the model, by Hugging Face's names of modules, and adds
/// s · B · A to their weights. s is α / r, or α / √r for rank-stabilized adapters. Ranks and α may differ by module
/// (`rank_pattern`, `alpha_pattern`), and `layers_to_transform` and `exclude_modules` are heeded. Whatever else changes what a model
/// computes (DoRA, trained biases, `modules_to_save`, …) is refused by its name.
///
/// The example of [`save_adapter`] reads one. With a model that people have:
///
/// ```no_run
/// use fp8_hf::{Adapter, Folder, LoadOptions};
/// use fp8_nn::prelude::*;
///
/// let folder = Folder::open("SmolLM2-135M".as_ref())?;
/// let adapter = Adapter::open("adapter".as_ref(), &folder.config)?;
/// let mut model = folder.load(&LoadOptions::default(), &Device::cpu())?;
/// adapter.add_to(&mut model, &folder.config, DType::F32)?; // the model with the adapter beside its weights
/// adapter.merge(&folder, "merged".as_ref(), None)?; // or a folder with the sums
/// # Ok::<(), fp8_hf::Error>(())
/// ```
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    config: LoraConfig,
    /// By the name of the module, in the model's order.
    modules: Vec<Module>,
}

/// The adapter of one Linear.
#[derive(Debug)]
struct Module {
    name: String,
    rank: usize,
    scale: f64,
    /// `[out, in]` of the Linear.
    shape: [usize; 2],
    /// `[rank, in]`.
    a: Vec<f32>,
    /// `[out, rank]`.
    b: Vec<f32>,
}

impl Adapter {
    /// Reads the adapter in the folder at `path`, and checks it against the model that it is for: each tensor belongs to a Linear
    /// that the configuration chooses, has that one's size and rank, and is finite; and none is missing.
    ///
    /// # Errors
    /// [`Error::File`], which names the field or tensor; [`Error::Io`] for a file that cannot be read.
    pub fn open(path: &Path, model: &Config) -> Result<Self> {
        let file = path.join(CONFIG);
        let text = read_text(&file).map_err(|error| error.expecting("expected a folder with an adapter"))?;
        let config = LoraConfig::from_json(&text);
        let config = config.map_err(|problem| Error::File { path: file.clone(), problem })?;
        let tensors = path.join(TENSORS);
        if !exists(&tensors) && exists(&path.join(PICKLE)) {
            let problem = format!(
                "it has {PICKLE} alone, a pickle: load and save the adapter with a newer peft, which writes {TENSORS}"
            );
            return Err(Error::File { path: path.to_owned(), problem });
        }
        let weights =
            Weights::open(&tensors).map_err(|error| error.expecting("expected the adapter's tensors"))?;
        let linears = linears(model);
        let modules =
            Reader { config: &config, path: &tensors, weights: &weights, linears: &linears }.read()?;
        config.expect_targets(&linears, &modules).map_err(|problem| Error::File { path: file, problem })?;
        Ok(Self { path: path.to_owned(), config, modules })
    }

    /// Returns the names of the modules that have an adapter, in the model's order.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().map(|module| module.name.as_str())
    }

    /// Returns the number of values in the adapter.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.modules.iter().map(|module| module.a.len() + module.b.len()).sum()
    }

    /// Returns the name of the model that the adapter was trained for, if it says one.
    #[must_use]
    pub fn base(&self) -> Option<&str> {
        self.config.base.as_deref()
    }
}

/// A Linear that may have an adapter.
struct Linear {
    module: String,
    layer: Option<usize>,
    shape: [usize; 2],
}

/// Returns the Linears of a model, without the head.
fn linears(model: &Config) -> Vec<Linear> {
    let is_transposed = model.family.is_transposed;
    let linear = |spec: &TensorSpec| {
        let [rows, cols] = spec.shape.matrix();
        let shape = if is_transposed { [cols, rows] } else { [rows, cols] };
        let module = spec.name.strip_suffix(".weight")?.to_owned();
        Some(Linear { module, layer: spec.layer, shape })
    };
    model.tensors().iter().filter(|spec| spec.kind.is_linear()).filter_map(linear).collect()
}

/// Reads the tensors of an adapter.
struct Reader<'a> {
    config: &'a LoraConfig,
    path: &'a Path,
    weights: &'a Weights,
    linears: &'a [Linear],
}

impl Reader<'_> {
    fn problem(&self, problem: String) -> Error {
        Error::File { path: self.path.to_owned(), problem }
    }

    fn read(&self) -> Result<Vec<Module>> {
        let mut halves: BTreeMap<&str, [Option<&str>; 2]> = BTreeMap::new();
        for name in self.weights.names() {
            let module = name.strip_prefix(PREFIX).unwrap_or(name);
            let (module, half) = match (module.strip_suffix(A), module.strip_suffix(B)) {
                (Some(module), _) => (module, 0),
                (_, Some(module)) => (module, 1),
                _ => {
                    let expected = "expected `….lora_A.weight` and `….lora_B.weight` of Linears alone";
                    return Err(self.problem(format!("tensor `{name}` is not supported: {expected}")));
                }
            };
            if let Some(other) = halves.entry(module).or_default()[half].replace(name) {
                return Err(
                    self.problem(format!("tensors `{other}` and `{name}` are one matrix: expected one"))
                );
            }
        }
        for (module, names) in &halves {
            let name = names.iter().flatten().next().unwrap_or(module);
            let Some(linear) = self.linears.iter().find(|linear| linear.module == *module) else {
                return Err(self
                    .problem(format!("tensor `{name}`: the model has no Linear `{module}` in its layers")));
            };
            if !self.config.fits(module, linear.layer) {
                let problem = format!("tensor `{name}`: {CONFIG} does not choose `{module}`");
                return Err(self.problem(problem));
            }
        }
        let mut modules = Vec::with_capacity(halves.len());
        for linear in self.linears {
            if let Some(names) = halves.get(&*linear.module) {
                modules.push(self.module(linear, *names)?);
            }
        }
        Ok(modules)
    }

    fn module(&self, linear: &Linear, names: [Option<&str>; 2]) -> Result<Module> {
        let module = &linear.module;
        let [a_name, b_name] = match names {
            [Some(a), Some(b)] => [a, b],
            [a, _] => {
                let absent = format!("{PREFIX}{module}{}", if a.is_none() { A } else { B });
                return Err(self.problem(format!("tensor `{absent}` is missing: an adapter has A and B")));
            }
        };
        if let Some(field) = self.config.ambiguous(module) {
            let problem =
                format!("tensor `{a_name}`: several entries of `{field}` in {CONFIG} fit `{module}`");
            return Err(self.problem(problem));
        }
        let (rank, [rows, cols]) = (self.config.rank_of(module), linear.shape);
        if let Some(found) = self.weights.info(a_name).map(|a| a.shape.first().copied().unwrap_or(0))
            && found != rank
        {
            let problem = format!("tensor `{a_name}` has rank {found}, but {CONFIG} says r = {rank}");
            return Err(self.problem(problem));
        }
        let a = self.values(a_name, [rank, cols])?;
        let b = self.values(b_name, [rows, rank])?;
        let scale = self.config.scale_of(module);
        if !(scale as f32).is_finite() {
            let problem = format!(
                "tensor `{a_name}`: the scale by `lora_alpha` in {CONFIG} is {scale}: expected a finite f32"
            );
            return Err(self.problem(problem));
        }
        Ok(Module { name: module.clone(), rank, scale, shape: linear.shape, a, b })
    }

    fn values(&self, name: &str, shape: [usize; 2]) -> Result<Vec<f32>> {
        let info =
            self.weights.info(name).ok_or_else(|| self.problem(format!("there is no tensor `{name}`")))?;
        if info.shape != shape {
            return Err(self.problem(format!("tensor `{name}` is {:?}: expected {shape:?}", info.shape)));
        }
        if !matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            let expected = "expected F32, BF16 or F16";
            return Err(self.problem(format!("tensor `{name}` is {:?}: {expected}", info.dtype)));
        }
        let bytes =
            usize::try_from(info.bytes).map_err(|_| self.problem(format!("tensor `{name}` is too large")))?;
        let too_large = || self.problem(format!("tensor `{name}` does not fit in memory"));
        let (mut buffer, mut values) = (Vec::new(), Vec::new());
        buffer.try_reserve_exact(bytes).map_err(|_| too_large())?;
        buffer.resize(bytes, 0);
        values.try_reserve_exact(shape[0] * shape[1]).map_err(|_| too_large())?;
        values.resize(shape[0] * shape[1], 0.0);
        self.weights.read(name, 0, &mut buffer)?;
        widen(&buffer, info.dtype, &mut values);
        match values.iter().find(|value| !value.is_finite()) {
            None => Ok(values),
            Some(value) => Err(self.problem(format!("tensor `{name}` has a value that is {value}"))),
        }
    }
}

impl LoraConfig {
    /// Checks that all modules that the configuration chooses have an adapter, and that each name chooses one.
    fn expect_targets(&self, linears: &[Linear], modules: &[Module]) -> std::result::Result<(), String> {
        if let Targets::Names(names) = &self.targets
            && let Some(name) =
                names.iter().find(|name| !linears.iter().any(|linear| is_named(&linear.module, name)))
        {
            let remedy = "expected names of Linears in the model's layers";
            return Err(format!("`target_modules` has \"{name}\", which no such module is called: {remedy}"));
        }
        let has = |linear: &&Linear| modules.iter().any(|module| module.name == linear.module);
        let chosen = linears.iter().filter(|linear| self.fits(&linear.module, linear.layer));
        match chosen.clone().find(|linear| !has(linear)) {
            Some(linear) => Err(format!(
                "`target_modules` chooses `{}`, but {TENSORS} has no adapter of it",
                linear.module
            )),
            None if modules.is_empty() => Err("`target_modules` chooses no module of the model".into()),
            None => Ok(()),
        }
    }
}
