//! `adapter_config.json` of peft: which Linears have an adapter, and with which rank and factor.

use crate::config::fields::Fields;
use crate::json;
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

/// Fields that say where an adapter comes from, how it began or how it was trained: nothing that a model computes.
const WITHOUT_EFFECT: [&str; 15] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// The fields that this crate understands.
const KNOWN: [&str; 13] = [
    "init_lora_weights",
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
    "bias",
    "lora_bias",
];

/// The options of an adapter of the kind LoRA.
#[derive(Debug)]
pub(crate) struct LoraConfig {
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
    pub(crate) use_rslora: bool,
    pub(crate) targets: Targets,
    excluded: Option<Targets>,
    layers: Vec<usize>,
    ranks: Vec<(Regex, f64)>,
    alphas: Vec<(Regex, f64)>,
    pub(crate) base: Option<String>,
}

/// The names of modules.
#[derive(Debug)]
pub(crate) enum Targets {
    /// All Linears but the head.
    AllLinear,
    /// Modules with these names, or with names that end with a dot and one of them.
    Names(Vec<String>),
    /// Modules whose whole names fit.
    Pattern(Regex),
}

impl Targets {
    /// The word for all Linears but the head.
    pub(crate) const ALL_LINEAR: &str = "all-linear";

    fn read(fields: Fields<'_>, key: &str) -> Result<Option<Self>, String> {
        match fields.get(key) {
            None => Ok(None),
            Some(Value::String(text)) if text == Self::ALL_LINEAR => Ok(Some(Self::AllLinear)),
            Some(Value::String(pattern)) => {
                let whole = compile("^", pattern, "$").map(|pattern| Some(Self::Pattern(pattern)));
                whole.ok_or_else(|| {
                    fields.wrong(
                        key,
                        "names of modules, \"all-linear\", or a short regular expression without look-around",
                    )
                })
            }
            Some(_) => fields.texts(key).map(|names| Some(Self::Names(names))),
        }
    }

    fn fit(&self, module: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Names(names) => names.iter().any(|name| is_named(module, name)),
            Self::Pattern(pattern) => pattern.is_match(module),
        }
    }
}

/// Whether the name of a module is `name`, or ends with it.
pub(crate) fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

impl LoraConfig {
    pub(crate) fn from_json(text: &str) -> Result<Self, String> {
        let map = json::object(text)?;
        let fields = Fields::new(&map, "");
        match fields.text("peft_type")? {
            Some("LORA") => {}
            Some(_) => return Err(fields.wrong("peft_type", "\"LORA\": other methods are not supported")),
            None => return Err("`peft_type` is missing: expected \"LORA\"".into()),
        }
        if fields.text("task_type")?.is_some_and(|task| task != "CAUSAL_LM") {
            return Err(fields.wrong("task_type", "\"CAUSAL_LM\""));
        }
        if fields.text("bias")?.is_some_and(|bias| bias != "none") {
            return Err(fields.wrong("bias", "\"none\": trained biases of the base are not supported"));
        }
        expect_plain_start(fields)?;
        if let Some(field) = fields.keys().find(|key| changes_something(fields, key)) {
            return Err(fields.wrong(field, "nothing: this option is not supported"));
        }
        let rank = match fields.size("r")? {
            None => return Err("`r` is missing: expected the rank".into()),
            Some(0) => return Err(fields.wrong("r", "at least 1")),
            Some(rank) => rank,
        };
        let alpha = fields.float("lora_alpha")?.ok_or("`lora_alpha` is missing: expected a number")?;
        let targets = Targets::read(fields, "target_modules")?;
        let targets = targets.ok_or("`target_modules` is missing: expected the names of modules")?;
        Ok(Self {
            rank,
            alpha,
            use_rslora: fields.flag("use_rslora")?.unwrap_or(false),
            targets,
            excluded: Targets::read(fields, "exclude_modules")?,
            layers: layers(fields)?,
            ranks: patterns(fields, "rank_pattern")?,
            alphas: patterns(fields, "alpha_pattern")?,
            base: fields.text("base_model_name_or_path")?.map(str::to_owned),
        })
    }

    /// Whether a module of the model has an adapter.
    pub(crate) fn fits(&self, module: &str, layer: Option<usize>) -> bool {
        let is_excluded = self.excluded.as_ref().is_some_and(|excluded| excluded.fit(module));
        let is_in_layer = self.layers.is_empty() || layer.is_some_and(|layer| self.layers.contains(&layer));
        self.targets.fit(module) && !is_excluded && is_in_layer
    }

    /// Returns the field in which several patterns with different values fit a module. peft takes the first of the file, whose order JSON
    /// does not keep.
    pub(crate) fn ambiguous(&self, module: &str) -> Option<&'static str> {
        let differ = |patterns: &[(Regex, f64)]| {
            let mut fits =
                patterns.iter().filter(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| value);
            fits.next().is_some_and(|first| fits.any(|other| other != first))
        };
        match [&self.ranks, &self.alphas].map(|patterns| differ(patterns)) {
            [true, _] => Some("rank_pattern"),
            [_, true] => Some("alpha_pattern"),
            _ => None,
        }
    }

    /// Returns the rank of a module's adapter.
    pub(crate) fn rank_of(&self, module: &str) -> usize {
        first_fit(&self.ranks, module).map_or(self.rank, |rank| rank as usize)
    }

    /// Whether the entry of `rank_pattern` or `alpha_pattern` with this key fits a module.
    pub(crate) fn has_pattern(&self, option: &str, key: &str, module: &str) -> bool {
        let patterns = if option == "rank_pattern" { &self.ranks } else { &self.alphas };
        let own = pattern_of(key);
        patterns.iter().any(|(pattern, _)| pattern.as_str() == own && pattern.is_match(module))
    }

    /// Returns the factor of B · A.
    pub(crate) fn scale_of(&self, module: &str) -> f64 {
        let (rank, alpha) =
            (self.rank_of(module) as f64, first_fit(&self.alphas, module).unwrap_or(self.alpha));
        if self.use_rslora { alpha / rank.sqrt() } else { alpha / rank }
    }
}

/// Kinds of first values that leave the weights of the base as they are. With others, such as "pissa", the adapter belongs to a base that
/// peft makes from the model again when it loads the adapter.
const PLAIN_STARTS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

fn expect_plain_start(fields: Fields<'_>) -> Result<(), String> {
    let key = "init_lora_weights";
    match fields.get(key) {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(kind)) if PLAIN_STARTS.contains(&kind.to_lowercase().as_str()) => Ok(()),
        Some(_) => Err(fields.wrong(
            key,
            "true, false, \"gaussian\", \"eva\" or \"orthogonal\": others change the base; save the adapter with peft's \
             `path_initial_model_for_weight_conversion`",
        )),
    }
}

/// The most bytes that a compiled pattern may take, and the most patterns of a field.
const MAX_PATTERN: usize = 1 << 18;
const MAX_PATTERNS: usize = 1 << 10;

/// Compiles `front`, a pattern and `end`. The pattern must be one by itself.
fn compile(front: &str, pattern: &str, end: &str) -> Option<Regex> {
    let new = |text: &str| RegexBuilder::new(text).size_limit(MAX_PATTERN).build().ok();
    new(pattern)?;
    new(&format!("{front}(?:{pattern}){end}"))
}

/// Whether a field that is neither known nor without effect has a value that peft would use.
fn changes_something(fields: Fields<'_>, key: &str) -> bool {
    let is_of_bias = key == "lora_bias";
    if !is_of_bias && (KNOWN.contains(&key) || WITHOUT_EFFECT.contains(&key)) {
        return false;
    }
    match fields.get(key) {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(_) => true,
    }
}

/// The layers of `layers_to_transform`: one number, or a list.
fn layers(fields: Fields<'_>) -> Result<Vec<usize>, String> {
    let key = "layers_to_transform";
    let layer = |value: &Value| value.as_u64().and_then(|layer| usize::try_from(layer).ok());
    let layers = match fields.get(key) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(layer).collect(),
        Some(value) => layer(value).map(|layer| vec![layer]),
    };
    layers.ok_or_else(|| fields.wrong(key, "the number of a layer, or a list of them"))
}

/// A pattern of peft fits a module whose name is one that it fits, or ends with a dot and such a name.
fn patterns(fields: Fields<'_>, key: &str) -> Result<Vec<(Regex, f64)>, String> {
    let empty = Map::new();
    let map = fields.object(key)?.unwrap_or(&empty);
    let path = fields.path_of(key);
    let inner = Fields::new(map, &path);
    if map.len() > MAX_PATTERNS {
        return Err(format!("`{key}` has {} entries: expected at most {MAX_PATTERNS} entries", map.len()));
    }
    let pattern = |name: &String| {
        let value = inner.float(name)?.ok_or_else(|| inner.wrong(name, "a number"))?;
        if key == "rank_pattern" && inner.size(name)?.is_none_or(|rank| rank == 0) {
            return Err(inner.wrong(name, "a rank of at least 1"));
        }
        let pattern = compile(FRONT, name, END).ok_or_else(|| {
            format!("`{path}{name}`: expected a short regular expression without look-around")
        })?;
        Ok((pattern, value))
    };
    map.keys().map(pattern).collect()
}

/// A pattern fits the whole name of a module, or the end behind a dot.
const FRONT: &str = "^(?:.*\\.)?";
const END: &str = "$";

/// Returns the regular expression of an entry.
fn pattern_of(key: &str) -> String {
    format!("{FRONT}(?:{key}){END}")
}

fn first_fit(patterns: &[(Regex, f64)], module: &str) -> Option<f64> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &str) -> Result<LoraConfig, String> {
        let front = r#""peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]"#;
        LoraConfig::from_json(&format!("{{{front}{fields}}}"))
    }

    #[test]
    fn patterns_and_layers_choose_as_peft_does() {
        let config = read(
            r#", "rank_pattern": {"down_proj": 2, "layers.1.self_attn.q_proj": 6}, "alpha_pattern": {"o_proj": 16}, "use_rslora": true"#,
        )
        .unwrap();
        assert_eq!(config.rank_of("model.layers.1.self_attn.q_proj"), 6);
        assert_eq!(config.rank_of("model.layers.11.self_attn.q_proj"), 4);
        assert_eq!(config.rank_of("model.layers.0.mlp.down_proj"), 2);
        assert_eq!(config.scale_of("model.layers.0.self_attn.o_proj"), 16.0 / 2.0);
        assert!(config.fits("model.layers.0.self_attn.q_proj", Some(0)));
        assert!(!config.fits("model.layers.0.self_attn.xq_proj", Some(0)));
        let config = read(r#", "layers_to_transform": 1, "exclude_modules": "model\\..*k_proj""#).unwrap();
        assert!(config.fits("model.layers.1.self_attn.q_proj", Some(1)));
        assert!(!config.fits("model.layers.0.self_attn.q_proj", Some(0)));
    }

    #[test]
    fn options_that_are_not_supported_are_named() {
        let cases = [
            (r#", "use_dora": true"#, "`use_dora` is true: expected nothing: this option is not supported"),
            (r#", "bias": "all""#, "`bias` is \"all\": expected \"none\""),
            (r#", "lora_bias": true"#, "`lora_bias` is true"),
            (r#", "modules_to_save": ["lm_head"]"#, "`modules_to_save` is [\"lm_head\"]"),
            (r#", "some_new_option": 3"#, "`some_new_option` is 3"),
            (r#", "task_type": "SEQ_CLS""#, "`task_type` is \"SEQ_CLS\""),
            (r#", "rank_pattern": {"q": 0}"#, "`rank_pattern.q` is 0"),
            (
                r#", "alpha_pattern": {"(?!q)": 1}"#,
                "`alpha_pattern.(?!q)`: expected a short regular expression without look-around",
            ),
            (r#", "exclude_modules": "(""#, "`exclude_modules` is \"(\""),
            (r#", "layers_to_transform": [-1]"#, "`layers_to_transform` is [-1]"),
            (r#", "init_lora_weights": "pissa_niter_4""#, "`init_lora_weights` is \"pissa_niter_4\""),
            (r#", "init_lora_weights": "OLoRA""#, "`init_lora_weights` is \"OLoRA\""),
            (r#", "target_modules2": "a)|(b""#, "`target_modules2` is"),
            (r#", "exclude_modules": "a)|(b""#, "`exclude_modules` is"),
            (
                r#", "rank_pattern": {"\\w{200}x17": 1}"#,
                "`rank_pattern.\\w{200}x17`: expected a short regular expression",
            ),
        ];
        for (fields, expected) in cases {
            let error = read(fields).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        let config = read(r#", "alpha_pattern": {"q_proj": 1, "self_attn.q_proj": 2}"#).unwrap();
        assert_eq!(config.ambiguous("model.layers.0.self_attn.q_proj"), Some("alpha_pattern"));
        assert_eq!(config.ambiguous("model.layers.0.self_attn.k_proj"), None);
        read(r#", "init_lora_weights": "Gaussian", "alpha_pattern": {"q_proj": -3}"#).unwrap();
        let many: Vec<String> = (0..1025).map(|i| format!("\"m{i}\": 1")).collect();
        let error = read(&format!(", \"alpha_pattern\": {{{}}}", many.join(", "))).unwrap_err();
        assert!(error.contains("expected at most 1024 entries"), "{error}");
        // Absent, empty and false are all the same.
        read(r#", "use_dora": false, "modules_to_save": null, "trainable_token_indices": [], "loftq_config": {"a": 1}"#).unwrap();
        for (text, expected) in [
            ("{}", "`peft_type` is missing"),
            (r#"{"peft_type": "LORA"}"#, "`r` is missing"),
            (r#"{"peft_type": "LORA", "r": 2}"#, "`lora_alpha` is missing"),
            (r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 1}"#, "`target_modules` is missing"),
            (r#"{"peft_type": "LORA", "r": 2, "lora_alpha": "1"}"#, "`lora_alpha` is \"1\""),
        ] {
            let error = LoraConfig::from_json(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
