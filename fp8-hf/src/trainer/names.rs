//! Patterns of Hugging Face's names, and the parameters that they mean.

use crate::config::Config;
use crate::parameter_source::ParameterSource;
use crate::{Error, Result};
use fp8_nn::{AdamWOptions, Gpt, ParameterGroup, matches_name, parameters, parameters_mut};
use std::collections::BTreeMap;

/// The names of a parameter in files.
pub(super) struct Names {
    path: String,
    sources: BTreeMap<String, ParameterSource>,
    /// Hugging Face's names of the modules that adapters belong to, by the parameters' names without `.a` and `.b`.
    adapters: BTreeMap<String, String>,
}

impl Names {
    pub(super) fn new(config: &Config, model: &Gpt, modules: &[String]) -> Self {
        let path = model.path().to_owned();
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
    fn matching(&self, option: &'static str, pattern: &str, model: &Gpt) -> Result<Vec<String>> {
        let refused = |remedy: String| Error::Option {
            part: "Trainer".to_owned(),
            option,
            value: format!("{pattern:?}"),
            remedy,
        };
        let mut found = Vec::new();
        for parameter in parameters(model) {
            let tensors = self.of(parameter.name());
            let fits: Vec<bool> = tensors.iter().map(|tensor| matches_name(pattern, tensor)).collect();
            if fits.iter().all(|&fits| fits) {
                found.push(parameter.name().to_string());
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

    /// Freezes the parameters that patterns mean.
    pub(super) fn freeze(&self, patterns: &[String], model: &mut Gpt) -> Result<()> {
        for pattern in patterns {
            let names = self.matching("frozen", pattern, model)?;
            for parameter in parameters_mut(model) {
                if names.iter().any(|name| **name == **parameter.name()) {
                    parameter.set_trainable(false)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the options with patterns of the model's own names.
    pub(super) fn optimizer(&self, options: &AdamWOptions, model: &Gpt) -> Result<AdamWOptions> {
        let mut groups: Vec<ParameterGroup> = Vec::new();
        for group in &options.groups {
            for pattern in self.matching("groups", &group.pattern, model)? {
                // The first group that fits has the parameter.
                if !groups.iter().any(|other| other.pattern == pattern) {
                    groups.push(ParameterGroup { pattern, ..group.clone() });
                }
            }
        }
        Ok(AdamWOptions { groups, ..options.clone() })
    }
}
