//! Rotary positions in both spellings: `rope_parameters` of transformers 5, and `rope_theta` beside `rope_scaling` of 4.

use super::fields::Fields;
pub use fp8_kernels::ops::RopeScaling;
use serde_json::{Map, Value};

/// The rotary position embedding of a model, as [`Config::rope`](super::Config::rope) has it.
///
/// Element j of a head is paired with element j + head_dim / 2. The frequency of pair j is theta^(−2j / head_dim), which
/// [`scaling`](Self::scaling) changes. The example of [`Config`](super::Config) reads one.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base of the frequencies: `rope_theta`. Default: 10000.
    pub theta: f64,
    /// The scaling that extends the model to longer sequences than it was first trained with. Default: none.
    pub scaling: RopeScaling,
}

const KNOWN: [&str; 14] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
];
/// Says where the scaling comes from and changes nothing.
const HARMLESS: &str = "finetuned";

/// Reads both spellings. Where both are present, they must agree: versions of transformers differ in which one wins.
pub(super) fn rope(config: Fields<'_>) -> Result<Rope, String> {
    let fields = merged(config)?;
    let is_old = config.get("rope_parameters").is_none();
    let path = if is_old { "rope_scaling." } else { "rope_parameters." };
    let rope = Fields::new(&fields, path);
    expect_known(rope, path)?;
    for from in [config, rope] {
        if from.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            let expected = "1: rotating a part of each head is not supported";
            return Err(from.wrong("partial_rotary_factor", expected));
        }
    }
    let theta = theta(config, rope, path)?;
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = rope.text(key)?.unwrap_or("default");
    let required = |field: &str| {
        rope.positive(field)?.ok_or_else(|| format!("`{path}{field}` is missing: {kind} needs it"))
    };
    let original = || {
        let field = "original_max_position_embeddings";
        let found = match rope.size(field)? {
            Some(length) if config.size(field)?.is_some_and(|other| other != length) => {
                return Err(config.wrong(field, &format!("{length}, as `{path}{field}` is")));
            }
            Some(length) => Some(length),
            None => match config.size(field)? {
                Some(length) => Some(length),
                None => config.size("max_position_embeddings")?,
            },
        };
        match found {
            Some(length) if length > 0 => Ok(length),
            _ => Err(format!("`{path}{field}` is missing: {kind} needs it")),
        }
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: required("factor")? },
        "llama3" => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if low >= high {
                return Err(format!(
                    "`{path}low_freq_factor` is {low}: expected less than high_freq_factor, {high}"
                ));
            }
            RopeScaling::Llama3 {
                factor: required("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position: original()?,
            }
        }
        "yarn" => yarn(rope, required("factor")?, original()?)?,
        _ => {
            let known = "\"default\", \"linear\", \"llama3\" or \"yarn\": others are not supported";
            return Err(rope.wrong(key, known));
        }
    };
    Ok(Rope { theta, scaling })
}

/// Returns the fields of both spellings.
fn merged(config: Fields<'_>) -> Result<Map<String, Value>, String> {
    let mut fields = Map::new();
    for spelling in ["rope_scaling", "rope_parameters"] {
        let present = config.object(spelling)?.into_iter().flatten().filter(|(_, value)| !value.is_null());
        let before = fields.clone();
        for (key, value) in present {
            fields.insert(key.clone(), value.clone());
            // `type` is the older name of `rope_type`.
            let other = before.get(key).or_else(|| match key.as_str() {
                "rope_type" => before.get("type"),
                "type" => before.get("rope_type"),
                _ => None,
            });
            let is_other = |other: &&Value| match (other.as_f64(), value.as_f64()) {
                (Some(one), Some(other)) => one != other,
                _ => *other != value,
            };
            if let Some(other) = other.filter(is_other) {
                return Err(format!(
                    "`{key}` is both {other} and {value} in `rope_scaling` and `rope_parameters`: give one of the two"
                ));
            }
        }
    }
    Ok(fields)
}

/// Refuses fields that may change the frequencies.
fn expect_known(rope: Fields<'_>, path: &str) -> Result<(), String> {
    for key in rope.keys().filter(|&key| key != HARMLESS) {
        if key == "attn_factor" {
            return Err(format!(
                "`{path}{key}` is not supported: transformers ignores it: remove it, or give its value as `attention_factor`"
            ));
        }
        if !KNOWN.contains(&key) {
            return Err(format!("`{path}{key}` is not supported: it may change the frequencies"));
        }
    }
    Ok(())
}

/// Returns the base of the frequencies, which stands inside or outside of `rope`.
fn theta(config: Fields<'_>, rope: Fields<'_>, path: &str) -> Result<f64, String> {
    Ok(match (rope.positive("rope_theta")?, config.positive("rope_theta")?) {
        (Some(inner), Some(outer)) if inner != outer => {
            let expected = format!(
                "{inner}, as `{path}rope_theta` is: versions of transformers differ in which one wins"
            );
            return Err(config.wrong("rope_theta", &expected));
        }
        (Some(theta), _) | (None, Some(theta)) => theta,
        (None, None) => 10000.0,
    })
}

/// Returns the `original_max_position_embeddings` of a configuration, in either place.
pub(super) fn original(config: Fields<'_>) -> Result<Option<usize>, String> {
    let field = "original_max_position_embeddings";
    for spelling in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = config.object(spelling)? else { continue };
        if let Some(length) = Fields::new(rope, &format!("{spelling}.")).size(field)? {
            return Ok(Some(length));
        }
    }
    config.size(field)
}

fn yarn(rope: Fields<'_>, factor: f64, original: usize) -> Result<RopeScaling, String> {
    let mscale = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
    let nonzero = |field: &str| Ok::<_, String>(rope.float(field)?.filter(|&value| value != 0.0));
    let attention_factor =
        match (rope.positive("attention_factor")?, nonzero("mscale")?, nonzero("mscale_all_dim")?) {
            (Some(factor), _, _) => factor,
            (None, Some(scale), Some(all_dim)) => mscale(scale) / mscale(all_dim),
            (None, _, _) => mscale(1.0),
        };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: rope.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: rope.positive("beta_slow")?.unwrap_or(1.0),
        truncate: rope.flag("truncate")?.unwrap_or(true),
        attention_factor,
        original_max_position: original,
    })
}
