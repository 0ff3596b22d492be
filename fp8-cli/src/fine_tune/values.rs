//! The options of a run, as its `config.toml` stores them.

use crate::fine_tune::line::RECIPE;
use crate::fine_tune::options::{
    FineTune, LOSSES, MOMENTS, OPTIMIZERS, PACKS, PARAMS, TOO_LONG, ValidationName, name_of,
};
use crate::train::options::RecipeName;
use fp8_hf::Warmup;
use std::path::PathBuf;

/// Names and values.
type Values = Vec<(&'static str, toml::Value)>;

/// An absolute path, so that a run can be resumed from any folder.
fn path(path: &PathBuf) -> toml::Value {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.clone());
    toml::Value::String(absolute.display().to_string())
}

fn integer(number: usize) -> toml::Value {
    toml::Value::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

/// A number as the command line has it: an f32 would get digits that it does not mean.
fn decimal(number: f32) -> toml::Value {
    toml::Value::Float(number.to_string().parse().unwrap_or(f64::from(number)))
}

fn word(text: impl ToString) -> toml::Value {
    toml::Value::String(text.to_string())
}

fn array(list: impl IntoIterator<Item = toml::Value>) -> Option<toml::Value> {
    let list: Vec<toml::Value> = list.into_iter().collect();
    (!list.is_empty()).then_some(toml::Value::Array(list))
}

fn flag(is_on: bool) -> Option<toml::Value> {
    is_on.then_some(toml::Value::Boolean(true))
}

impl FineTune {
    /// Returns every option that a run depends on and that has a value, as `config.toml` stores it.
    pub(crate) fn values(&self) -> Values {
        let all = [
            self.of_data(),
            self.of_steps(),
            self.of_optimizer(),
            self.of_model(),
            self.of_adapter(),
            self.of_run(),
        ];
        let given = all.into_iter().flatten();
        given.filter_map(|(name, value)| Some((name, value?))).collect()
    }

    fn of_data(&self) -> Vec<(&'static str, Option<toml::Value>)> {
        let validation = self.validation.as_ref().map(|validation| match validation {
            ValidationName::Share(share) => toml::Value::Float(*share),
            ValidationName::File(file) => path(file),
        });
        vec![
            ("model", self.base.as_ref().map(path)),
            ("data", array(self.data.iter().map(path))),
            ("validation", validation),
            ("loss", self.loss.map(|loss| word(name_of(&loss, &LOSSES)))),
            ("pack", self.pack.map(|pack| word(name_of(&pack, &PACKS)))),
            ("no-pack", flag(self.no_pack)),
            ("cross-documents", flag(self.cross_documents)),
            ("too-long", self.too_long.map(|too_long| word(name_of(&too_long, &TOO_LONG)))),
            ("seq", self.seq.map(integer)),
        ]
    }

    fn of_steps(&self) -> Vec<(&'static str, Option<toml::Value>)> {
        let warmup = match self.warmup.0 {
            Warmup::Share(share) => toml::Value::Float(share),
            Warmup::Steps(steps) => integer(usize::try_from(steps).unwrap_or(usize::MAX)),
        };
        // A seed may be more than TOML's integers hold.
        let seed = i64::try_from(self.seed).map_or_else(|_| word(self.seed), toml::Value::Integer);
        vec![
            ("batch", Some(integer(self.batch))),
            ("accumulate", self.accumulate.map(integer)),
            ("steps", self.steps.map(integer)),
            ("epochs", self.steps.is_none().then(|| integer(self.epochs))),
            ("lr", self.lr.map(decimal)),
            ("schedule", Some(word(self.schedule))),
            ("warmup", Some(warmup)),
            ("min-lr", Some(decimal(self.min_lr))),
            ("seed", Some(seed)),
        ]
    }

    fn of_optimizer(&self) -> Vec<(&'static str, Option<toml::Value>)> {
        vec![
            ("optimizer", Some(word(name_of(&self.optimizer, &OPTIMIZERS)))),
            ("beta1", Some(decimal(self.beta1))),
            ("beta2", self.beta2.map(decimal)),
            ("eps", Some(decimal(self.eps))),
            ("weight-decay", Some(decimal(self.weight_decay))),
            ("moments", Some(word(name_of(&self.moments, &MOMENTS)))),
            ("stochastic-rounding", flag(self.stochastic_rounding)),
            ("clip", Some(decimal(self.clip))),
            ("group", array(self.group.iter().map(word))),
            ("freeze", array(self.freeze.iter().map(word))),
        ]
    }

    fn of_model(&self) -> Vec<(&'static str, Option<toml::Value>)> {
        let recipe = self.recipe.as_ref().map(|recipe| match recipe {
            // A copy of it is in the run's folder.
            RecipeName::File(_) => word(RECIPE),
            name => word(name),
        });
        vec![
            ("recipe", recipe),
            ("dtype", Some(word(self.dtype))),
            ("params", Some(word(name_of(&self.params, &PARAMS)))),
            ("fp8-weights", flag(self.fp8_weights)),
            ("recompute", Some(word(self.recompute.name()))),
        ]
    }

    fn of_adapter(&self) -> Vec<(&'static str, Option<toml::Value>)> {
        let ranks = self.rank_pattern.iter().map(|(key, rank)| word(format!("{key}={rank}")));
        let alphas = self.alpha_pattern.iter().map(|(key, alpha)| word(format!("{key}={alpha}")));
        vec![
            ("lora", self.lora.map(integer)),
            ("lora-alpha", self.lora_alpha.map(toml::Value::Float)),
            ("lora-targets", array(self.lora_targets.iter().map(word))),
            ("lora-exclude", array(self.lora_exclude.iter().map(word))),
            ("lora-layers", array(self.lora_layers.iter().copied().map(integer))),
            ("rank-pattern", array(ranks)),
            ("alpha-pattern", array(alphas)),
            ("rslora", flag(self.rslora)),
            ("lora-dtype", Some(word(name_of(&self.lora_dtype, &PARAMS)))),
            ("adapter", self.adapter.as_ref().map(path)),
        ]
    }

    fn of_run(&self) -> Vec<(&'static str, Option<toml::Value>)> {
        vec![
            ("export", self.export.map(word)),
            ("device", Some(word(self.device))),
            ("graph", flag(self.graph)),
            ("dp", self.layout.dp.filter(|&dp| dp > 1).map(integer)),
            ("tp", self.layout.tp.filter(|&tp| tp > 1).map(integer)),
            ("sequence-parallel", flag(self.layout.sequence_parallel)),
            ("threads", self.threads.map(integer)),
            ("eval-every", self.eval_every.map(integer)),
            ("eval-sequences", Some(integer(self.eval_sequences))),
            ("checkpoint-every", Some(integer(self.checkpoint_every))),
            ("checkpoint-minutes", Some(toml::Value::Float(self.checkpoint_minutes))),
            ("keep", Some(integer(self.keep))),
            ("skip-non-finite", Some(integer(self.skip_non_finite))),
        ]
    }
}
