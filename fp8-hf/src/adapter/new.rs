//! Adapters that have not been trained yet.

use super::config::{LoraConfig, Targets};
use super::{Adapter, CONFIG, Linear, Module, linears};
use crate::config::Config;
use crate::{Error, Result};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Options of [`Adapter::new`], which have the names and meanings of peft's `LoraConfig`.
///
/// ```
/// use fp8_hf::LoraTargets;
/// let targets = LoraTargets { rank: 8, target_modules: vec!["q_proj".into(), "v_proj".into()], ..Default::default() };
/// assert_eq!((targets.alpha, targets.use_rslora), (None, false));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LoraTargets {
    /// r, the rank. Default: 16.
    pub rank: usize,
    /// α: the product B · A is multiplied by α / r. Default: `None`, which is 2 · r.
    pub alpha: Option<f64>,
    /// Whether the factor is α / √r. Default: false.
    pub use_rslora: bool,
    /// The modules that get an adapter, by their names or the ends of their names, such as `q_proj`; or one regular expression,
    /// which must fit a whole name and is known by a character that names do not have. Default: empty, which is all Linears but the
    /// head.
    pub target_modules: Vec<String>,
    /// Modules that get none, in the same form. Default: none.
    pub exclude_modules: Vec<String>,
    /// The layers whose modules get one. Default: empty, which is all.
    pub layers_to_transform: Vec<usize>,
    /// Ranks of their own for modules whose names end with a pattern. Default: none.
    pub rank_pattern: BTreeMap<String, usize>,
    /// The same for α. Default: none.
    pub alpha_pattern: BTreeMap<String, f64>,
}

impl Default for LoraTargets {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: None,
            use_rslora: false,
            target_modules: Vec::new(),
            exclude_modules: Vec::new(),
            layers_to_transform: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }
}

/// The characters of regular expressions that no name of a module has.
const OF_PATTERNS: &[char] = &['\\', '*', '+', '?', '[', ']', '(', ')', '{', '}', '|', '^', '$'];

/// Names as a list, or a regular expression as a text, as `adapter_config.json` tells them apart.
fn names(names: &[String]) -> Value {
    match names {
        [one] if one.contains(OF_PATTERNS) => json!(one),
        names => json!(names),
    }
}

impl LoraTargets {
    fn config(&self) -> std::result::Result<LoraConfig, String> {
        let targets = match &self.target_modules[..] {
            [] => json!("all-linear"),
            [one] if one == "all-linear" => json!(one),
            targets => names(targets),
        };
        let mut map = json!({
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha.unwrap_or(2.0 * self.rank as f64),
            "use_rslora": self.use_rslora,
            "target_modules": targets,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        });
        if !self.exclude_modules.is_empty() {
            map["exclude_modules"] = names(&self.exclude_modules);
        }
        if !self.layers_to_transform.is_empty() {
            map["layers_to_transform"] = json!(self.layers_to_transform);
        }
        LoraConfig::from_json(&map.to_string())
    }
}

impl Adapter {
    /// Makes a new adapter for a model of this configuration. A of each module is drawn uniformly in ±1/√in from `seed`, and B is 0, so
    /// that nothing changes at first.
    ///
    /// ```
    /// use fp8_hf::{Adapter, Config, LoraTargets};
    /// let config = Config::from_json(
    ///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    ///         "num_attention_heads": 2}"#,
    /// )?;
    /// let targets = LoraTargets { rank: 2, target_modules: vec!["up_proj".into()], ..Default::default() };
    /// let adapter = Adapter::new(&config, &targets, 1)?;
    /// let modules: Vec<&str> = adapter.modules().collect();
    /// assert_eq!(modules, ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]);
    /// assert_eq!(adapter.num_parameters(), 2 * (2 * 8 + 12 * 2));
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`] for a rank of 0 or one that a module's sides do not have, a name, pattern or layer that fits no Linear of the
    /// model, a factor that is not finite.
    pub fn new(model: &Config, targets: &LoraTargets, seed: u64) -> Result<Self> {
        let refused = |option: &'static str, value: String, remedy: String| Error::Option {
            part: "LoRA".to_owned(),
            option,
            value,
            remedy,
        };
        if targets.rank == 0 {
            return Err(refused("rank", "0".into(), "expected at least 1".into()));
        }
        let config = targets.config().map_err(|problem| {
            refused("targets", format!("{:?}", targets.target_modules), problem.replace(CONFIG, "they"))
        })?;
        let linears = linears(model);
        targets.expect_layers(model, &refused)?;
        for (option, list) in
            [("target_modules", &targets.target_modules), ("exclude_modules", &targets.exclude_modules)]
        {
            expect_fits(option, list, &linears, &refused)?;
        }
        for pattern in targets
            .rank_pattern
            .keys()
            .map(|key| ("rank_pattern", key))
            .chain(targets.alpha_pattern.keys().map(|key| ("alpha_pattern", key)))
        {
            let (option, key) = pattern;
            if !linears.iter().any(|linear| config.has_pattern(option, key, &linear.module)) {
                let remedy = "it fits no Linear in the model's layers";
                return Err(refused(option, format!("{key:?}"), remedy.into()));
            }
        }
        let chosen: Vec<&Linear> =
            linears.iter().filter(|linear| config.fits(&linear.module, linear.layer)).collect();
        if chosen.is_empty() {
            let remedy = "they choose no Linear in the model's layers".to_owned();
            return Err(refused("target_modules", format!("{:?}", targets.target_modules), remedy));
        }
        let mut modules = Vec::with_capacity(chosen.len());
        for (index, linear) in chosen.into_iter().enumerate() {
            let [rows, cols] = linear.shape;
            let (rank, scale) = (config.rank_of(&linear.module), config.scale_of(&linear.module));
            if let Some(option) = config.ambiguous(&linear.module) {
                let remedy = format!("several of its entries fit `{}`: expected one", linear.module);
                return Err(refused(option, "given".into(), remedy));
            }
            if rank > rows.min(cols) {
                let remedy =
                    format!("`{}` is {rows} × {cols}: expected at most {}", linear.module, rows.min(cols));
                return Err(refused("rank", rank.to_string(), remedy));
            }
            if !(scale as f32).is_finite() {
                return Err(refused("alpha", scale.to_string(), "expected a finite factor".into()));
            }
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(index as u64);
            let bound = 1.0 / (cols as f32).sqrt();
            let a = (0..rank * cols).map(|_| rng.random_range(-bound..bound)).collect();
            modules.push(Module {
                name: linear.module.clone(),
                rank,
                scale,
                shape: linear.shape,
                a,
                b: vec![0.0; rows * rank],
            });
        }
        Ok(Self { path: PathBuf::from("a new adapter"), config, modules })
    }
}

type Refused<'a> = &'a dyn Fn(&'static str, String, String) -> Error;

impl LoraTargets {
    fn expect_layers(&self, model: &Config, refused: Refused<'_>) -> Result<()> {
        let layers = model.num_hidden_layers;
        match self.layers_to_transform.iter().find(|&&layer| layer >= layers) {
            None => Ok(()),
            Some(layer) => {
                let remedy =
                    format!("the model has {layers} layers: expected 0 to {}", layers.saturating_sub(1));
                Err(refused("layers_to_transform", layer.to_string(), remedy))
            }
        }
    }
}

/// Refuses a name that no Linear has.
fn expect_fits(
    option: &'static str,
    list: &[String],
    linears: &[Linear],
    refused: Refused<'_>,
) -> Result<()> {
    let fits = |name: &str| linears.iter().any(|linear| super::is_named(&linear.module, name));
    match list {
        [one] if one.contains(OF_PATTERNS) || one == Targets::ALL_LINEAR => Ok(()),
        list => match list.iter().find(|name| !fits(name)) {
            None => Ok(()),
            Some(name) => {
                let mut known: Vec<&str> =
                    linears.iter().map(|linear| super::model::last(&linear.module)).collect();
                known.sort_unstable();
                known.dedup();
                let remedy = format!(
                    "no Linear in the model's layers is called so: they are {}; a head takes no adapter",
                    known.join(", ")
                );
                Err(refused(option, format!("{name:?}"), remedy))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config::from_json(
            r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
                "num_attention_heads": 2}"#,
        )
        .unwrap()
    }

    #[test]
    fn targets_are_chosen_as_peft_chooses_them() {
        let count = |targets: &LoraTargets| Adapter::new(&config(), targets, 0).unwrap().modules.len();
        let of = |names: &[&str]| LoraTargets {
            rank: 2,
            target_modules: names.iter().map(|name| (*name).to_owned()).collect(),
            ..Default::default()
        };
        assert_eq!(count(&of(&[])), 14);
        assert_eq!(count(&of(&["all-linear"])), 14);
        assert_eq!(count(&of(&["q_proj", "v_proj"])), 4);
        assert_eq!(count(&of(&["model\\.layers\\.1\\..*proj"])), 7);
        let some = LoraTargets {
            exclude_modules: vec!["down_proj".into()],
            layers_to_transform: vec![1],
            rank_pattern: [("q_proj".to_owned(), 4)].into(),
            alpha_pattern: [("q_proj".to_owned(), 4.0)].into(),
            ..of(&[])
        };
        let adapter = Adapter::new(&config(), &some, 0).unwrap();
        assert_eq!(adapter.modules.len(), 6);
        let query = &adapter.modules[0];
        assert_eq!(
            (query.name.as_str(), query.rank, query.scale),
            ("model.layers.1.self_attn.q_proj", 4, 1.0)
        );
        assert_eq!((adapter.modules[1].rank, adapter.modules[1].scale), (2, 2.0));
        let bound = 1.0 / 8f32.sqrt();
        assert!(query.a.iter().all(|x| x.abs() <= bound) && query.a.iter().any(|x| x.abs() > 0.7 * bound));
        assert!(query.b.iter().all(|&x| x == 0.0));
        let stable = LoraTargets { rank: 4, use_rslora: true, ..of(&[]) };
        assert_eq!(Adapter::new(&config(), &stable, 0).unwrap().modules[0].scale, 4.0);
    }

    #[test]
    fn mistakes_are_named() {
        let plain = || LoraTargets { rank: 2, ..Default::default() };
        let cases = [
            (LoraTargets { rank: 0, ..plain() }, "LoRA: rank = 0: expected at least 1"),
            (
                LoraTargets { rank: 9, ..plain() },
                "LoRA: rank = 9: `model.layers.0.self_attn.q_proj` is 8 × 8: expected at most 8",
            ),
            (
                LoraTargets { target_modules: vec!["query".into()], ..plain() },
                "LoRA: target_modules = \"query\": no Linear in the model's layers is called so: they are down_proj, gate_proj, k_proj, \
                 o_proj, q_proj, up_proj, v_proj; a head takes no adapter",
            ),
            (
                LoraTargets { target_modules: vec!["lm_head".into(), "q_proj".into()], ..plain() },
                "LoRA: target_modules = \"lm_head\": no Linear",
            ),
            (
                LoraTargets { target_modules: vec!["nothing.*".into()], ..plain() },
                "LoRA: target_modules = [\"nothing.*\"]: they choose no Linear in the model's layers",
            ),
            (
                LoraTargets { target_modules: vec!["(".into()], ..plain() },
                "LoRA: targets = [\"(\"]: `target_modules` is \"(\"",
            ),
            (
                LoraTargets { layers_to_transform: vec![2], ..plain() },
                "LoRA: layers_to_transform = 2: the model has 2 layers: expected 0 to 1",
            ),
            (
                LoraTargets { rank_pattern: [("c_attn".to_owned(), 4)].into(), ..plain() },
                "LoRA: rank_pattern = \"c_attn\": it fits no Linear in the model's layers",
            ),
            (
                LoraTargets {
                    alpha_pattern: [("q_proj".to_owned(), 4.0), ("self_attn.q_proj".to_owned(), 5.0)].into(),
                    ..plain()
                },
                "LoRA: alpha_pattern = given: several of its entries fit `model.layers.0.self_attn.q_proj`: expected one",
            ),
            (LoraTargets { alpha: Some(1e300), ..plain() }, "LoRA: alpha = "),
        ];
        for (targets, expected) in cases {
            let error = Adapter::new(&config(), &targets, 0).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
