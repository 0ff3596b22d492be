//! Patterns of Hugging Face's names, and the parameters that they mean.

use super::TrainerOptions;
use crate::config::Config;
use crate::parameter_source::ParameterSource;
use crate::{Error, Result};
use fp8_nn::{AnyOptimizerOptions, Gpt, ParameterGroup, matches_name, parameters_mut};
use std::collections::BTreeMap;

/// The names of a parameter in files.
pub(super) struct Names {
    path: String,
    sources: BTreeMap<String, ParameterSource>,
    /// Hugging Face's names of the modules that adapters belong to, by the parameters' names without `.a` and `.b`.
    adapters: BTreeMap<String, String>,
}

impl Names {
    /// The names of a model at `path` with adapters of these modules.
    pub(super) fn new(config: &Config, path: &str, modules: &[String]) -> Self {
        let path = path.to_owned();
        let adapter = |module: &String| {
            let layer = config.place(module)?.layer;
            let last = module.rsplit('.').next().unwrap_or(module);
            Some((format!("{path}.{layer}.lora.{last}"), module.clone()))
        };
        let adapters = modules.iter().filter_map(adapter).collect();
        Self { sources: config.parameters_by_name(), adapters, path }
    }

    /// Returns the tensors of a parameter; of an adapter, the one that peft writes.
    pub(super) fn of(&self, parameter: &str) -> Vec<String> {
        for (end, half) in [(".a", ".lora_A.weight"), (".b", ".lora_B.weight")] {
            let module = parameter.strip_suffix(end).and_then(|adapter| self.adapters.get(adapter));
            if let Some(module) = module {
                return vec![format!("{module}{half}")];
            }
        }
        let own = parameter.strip_prefix(&*self.path).and_then(|name| name.strip_prefix('.'));
        match own.and_then(|own| self.sources.get(own)) {
            Some(source) => source.tensors.clone(),
            None => vec![parameter.to_owned()],
        }
    }

    /// Returns the names of the parameters that a pattern means.
    fn matching(&self, option: &'static str, pattern: &str) -> Result<Vec<String>> {
        let refused = |remedy: String| Error::Option {
            part: "Trainer".to_owned(),
            option,
            value: format!("{pattern:?}"),
            remedy,
        };
        let mut found = Vec::new();
        let own = self.sources.keys().map(|name| format!("{}.{name}", self.path));
        let adapters = self.adapters.keys().flat_map(|name| [".a", ".b"].map(|end| format!("{name}{end}")));
        for parameter in own.chain(adapters) {
            let tensors = self.of(&parameter);
            let fits: Vec<bool> = tensors.iter().map(|tensor| matches_name(pattern, tensor)).collect();
            if fits.iter().all(|&fits| fits) {
                found.push(parameter);
            } else if fits.contains(&true) {
                let remedy = format!(
                    "it fits some of {}, which the model holds as one: expected all or none",
                    tensors.join(", ")
                );
                return Err(refused(remedy));
            }
        }
        if found.is_empty() {
            let remedy = "it fits no tensor of the model: expected Hugging Face's names, such as \"model.layers.0.*\" or \
                          \"embed_tokens\"";
            return Err(refused(remedy.to_owned()));
        }
        Ok(found)
    }

    /// Refuses patterns that mean nothing.
    pub(super) fn check(&self, options: &TrainerOptions) -> Result<()> {
        for pattern in &options.frozen {
            self.matching("frozen", pattern)?;
        }
        self.optimizer(&options.optimizer).map(drop)
    }

    /// Freezes the parameters that patterns mean.
    pub(super) fn freeze(&self, patterns: &[String], model: &mut Gpt) -> Result<()> {
        for pattern in patterns {
            let names = self.matching("frozen", pattern)?;
            for parameter in parameters_mut(model) {
                if names.iter().any(|name| **name == **parameter.name()) {
                    parameter.set_trainable(false)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the options with patterns of the model's own names.
    pub(super) fn optimizer(&self, options: &AnyOptimizerOptions) -> Result<AnyOptimizerOptions> {
        let mut groups: Vec<ParameterGroup> = Vec::new();
        for group in options.groups() {
            for pattern in self.matching("groups", &group.pattern)? {
                // The first group that fits has the parameter.
                if !groups.iter().any(|other| other.pattern == pattern) {
                    groups.push(ParameterGroup { pattern, ..group.clone() });
                }
            }
        }
        Ok(options.clone().with_groups(groups))
    }
}
