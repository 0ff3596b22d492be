//! Adapters of a model in memory.

use super::{Adapter, Module};
use crate::config::Config;
use crate::{Error, Result};
use fp8_kernels::{DType, Tensor, ops};
use fp8_nn::{Gpt, Layer, Lora, LoraOptions, parameters_mut};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// The place of a module in a model: its layer behind the model's path, and its rows of the weight.
pub(crate) struct Place {
    pub(crate) layer: String,
    pub(crate) rows: Range<usize>,
}

impl Config {
    /// Returns where a module is in a model of this configuration.
    pub(crate) fn place(&self, module: &str) -> Option<Place> {
        let (tensor, specs) = (format!("{module}.weight"), self.tensors());
        let source = self.parameters().into_iter().find(|source| source.tensors.contains(&tensor))?;
        let mut start = 0;
        for name in &source.tensors {
            let [rows, cols] = specs.iter().find(|spec| spec.name == *name)?.shape.matrix();
            let features = if source.is_transposed { cols } else { rows };
            if *name == tensor {
                let layer = source.parameter.strip_suffix(".weight")?.to_owned();
                return Some(Place { layer, rows: start..start + features });
            }
            start += features;
        }
        None
    }
}

/// Returns the last part of a module's name.
pub(super) fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

impl Adapter {
    /// Adds the adapter to a model that was loaded from a folder with the configuration `config`, with parameters in `params_dtype`.
    /// The parameters of `model.layers.0.self_attn.q_proj` are `….attention.qkv.lora.q_proj.a` and `.b`. Whether they are
    /// trainable is as for other parameters: [`frozen`](fp8_nn::frozen) makes frozen ones.
    ///
    /// Make a [`Scaling`](fp8_nn::fp8_recipe::Scaling) of the model behind it.
    ///
    /// # Errors
    /// A model of another configuration; one whose layers have an adapter of these modules; a device that is out of memory.
    pub fn add_to(&self, model: &mut Gpt, config: &Config, params_dtype: DType) -> Result<()> {
        let path = model.path().to_owned();
        let absent = |module: &Module| Error::File {
            path: self.path.clone(),
            problem: format!(
                "the model has no Linear `{}` of this size that takes adapters: expected the model that the adapter is for",
                module.name
            ),
        };
        // All places first, so that a model that does not fit gets none.
        let mut places = Vec::with_capacity(self.modules.len());
        for module in &self.modules {
            let Place { layer, rows } = config.place(&module.name).ok_or_else(|| absent(module))?;
            let (layer, [features, columns]) = (format!("{path}.{layer}"), module.shape);
            let (mut fits, mut is_taken) = (false, false);
            model.visit_loras(&mut |loras| {
                if loras.path() == layer {
                    fits = loras.weight_shape()[1] == columns && rows.len() == features;
                    let overlaps =
                        |other: &Lora| other.rows().start < rows.end && rows.start < other.rows().end;
                    is_taken = loras.all().iter().any(overlaps);
                }
            });
            if !fits {
                return Err(absent(module));
            }
            if is_taken {
                let problem = format!("the model has an adapter of `{}`: expected one without", module.name);
                return Err(Error::File { path: self.path.clone(), problem });
            }
            places.push((layer, rows));
        }
        for (module, (layer, rows)) in self.modules.iter().zip(places) {
            let options = LoraOptions { rank: module.rank, scale: module.scale as f32, params_dtype };
            let mut added = None;
            model.visit_loras_mut(&mut |loras| {
                if loras.path() == layer {
                    let mut rng = ChaCha8Rng::seed_from_u64(0); // replaced below
                    added = Some(loras.add(last(&module.name), rows.clone(), &options, &mut rng));
                }
            });
            added.ok_or_else(|| absent(module))??;
            let name = format!("{layer}.lora.{}", last(&module.name));
            for parameter in parameters_mut(model) {
                let values = match parameter.name().strip_prefix(&*name) {
                    Some(".a") => &module.a,
                    Some(".b") => &module.b,
                    _ => continue,
                };
                let whole = Tensor::from_vec(values.clone(), *parameter.global_shape(), parameter.device())?;
                parameter.set_part_of(&ops::cast(&whole, params_dtype)?)?;
            }
        }
        Ok(())
    }
}
