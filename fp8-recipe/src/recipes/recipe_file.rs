//! Recipes from TOML files.

use crate::recipes::presets::preset;
use crate::recipes::recipe_options::{Options, Value};
use crate::{Error, Recipe, Result};
use std::collections::BTreeMap;
use toml::{Table, Value as Toml};

#[cfg_attr(docsrs, doc(cfg(feature = "toml")))]
impl Recipe {
    /// Reads a recipe from the text of a TOML file.
    ///
    /// `recipe` is one of [`NAMES`](Self::NAMES) or `off`. The other keys are the options of this recipe, by the names of its
    /// fields; those that are left out have the recipe's defaults. Functions of your own cannot be written in a file. Each
    /// `[[slots]]` table is a pattern with a recipe of its own, in the order of [`by_name`](Self::by_name); the recipe at the
    /// top is then the default.
    ///
    /// ```
    /// use fp8_recipe::{CurrentScaling, DelayedScaling, Recipe};
    ///
    /// let recipe = Recipe::from_toml(
    ///     r#"
    ///     recipe = "delayed"
    ///     margin = 1
    ///
    ///     [[slots]]
    ///     pattern = "*.grad_output"
    ///     recipe = "current"
    ///     fp8_format = "hybrid"
    ///
    ///     [[slots]]
    ///     pattern = "blocks.0.*"
    ///     recipe = "off"
    ///     "#,
    /// )?;
    /// let expected = "by name (*.grad_output: current; blocks.0.*: off; default: delayed (margin=1))";
    /// assert_eq!(recipe.to_string(), expected);
    ///
    /// let error = Recipe::from_toml("recipe = \"delayed\"\nmargn = 1").unwrap_err();
    /// assert!(error.to_string().starts_with("recipe file: unknown key `margn`: the options of delayed are margin, "));
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    ///
    /// | key | values |
    /// |---|---|
    /// | `fp8_format` | `"hybrid"`, `"e4m3"` |
    /// | `override_linear_precision`, `use_split_accumulator` | `[fprop, dgrad, wgrad]`, each `true` or `false` |
    /// | `power_2_scale` | `true` or `false`, or `[input, weight, grad_output]`: the fields of [`QParams`](crate::QParams) |
    /// | `amax_epsilon` | a number, or `[input, weight, grad_output]` |
    /// | `amax_compute_algo` | `"max"`, `"most_recent"`, `"max_of_last(16)"`, `"average(0.9)"` |
    /// | `scaling_factor_compute_algo` | `"exact"`, `"power_of_two"` |
    /// | `fp8_dpa`, `fp8_mha` | `true` or `false`, for delayed and current scaling |
    /// | all others | a number, `true` or `false` |
    ///
    /// # Errors
    /// A text that is not TOML, with the line; a key that is unknown, with the known ones; a value of another type or out of
    /// range.
    pub fn from_toml(text: &str) -> Result<Self> {
        let refused = |problem: String| Error::RecipeFile { problem };
        let mut table: Table = text.parse().map_err(|error| refused(not_toml(text, &error)))?;
        let slots = match table.remove("slots") {
            None => Vec::new(),
            Some(Toml::Array(slots)) => slots,
            Some(other) => {
                return Err(refused(format!("slots = {other}: expected [[slots]] tables")));
            }
        };
        let recipe = one(table).map_err(refused)?;
        recipe.validate()?;
        if slots.is_empty() {
            return Ok(recipe);
        }
        let mut rules = Vec::new();
        for (index, slot) in slots.into_iter().enumerate() {
            let (pattern, recipe) = rule(slot)
                .map_err(|problem| refused(format!("[[slots]] number {}: {problem}", index + 1)))?;
            recipe.validate()?;
            rules.push((pattern, recipe));
        }
        Ok(Self::by_name(rules, recipe))
    }
}

/// Reads a pattern and its recipe.
fn rule(slot: Toml) -> Result<(String, Recipe), String> {
    let Toml::Table(mut table) = slot else { return Err(format!("{slot}: expected a table")) };
    match table.remove("pattern") {
        Some(Toml::String(pattern)) => Ok((pattern, one(table)?)),
        Some(other) => Err(format!("pattern = {other}: expected a text, such as \"*.fc2.grad_output\"")),
        None => Err("`pattern` is missing: expected a text, such as \"*.fc2.grad_output\"".to_owned()),
    }
}

/// Reads a recipe with its options.
fn one(mut table: Table) -> Result<Recipe, String> {
    let known = || format!("expected one of {}, off", Recipe::NAMES.join(", "));
    let name = match table.remove("recipe") {
        Some(Toml::String(name)) => name,
        Some(other) => return Err(format!("recipe = {other}: {}", known())),
        None => return Err(format!("`recipe` is missing: {}", known())),
    };
    let given: BTreeMap<String, Value> =
        table.into_iter().map(|(name, found)| (name, value(found))).collect();
    let mut options = Options::new(given);
    let recipe = match &*name {
        "off" => Recipe::off(),
        _ => preset(&name, &mut options).ok_or_else(|| format!("recipe = {name:?}: {}", known()))??,
    };
    options.finish(&name)?;
    Ok(recipe)
}

fn value(found: Toml) -> Value {
    match found {
        Toml::String(value) => Value::Text(value),
        Toml::Integer(value) => Value::Integer(value),
        Toml::Float(value) => Value::Float(value),
        Toml::Boolean(value) => Value::Flag(value),
        Toml::Array(values) => Value::List(values.into_iter().map(value).collect()),
        Toml::Table(_) => Value::Other("a table"),
        Toml::Datetime(_) => Value::Other("a date"),
    }
}

/// Describes an error of syntax, with the line.
fn not_toml(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().trim();
    match error.span().and_then(|span| text.get(..span.start)) {
        Some(before) => format!("line {}: {message}", before.matches('\n').count() + 1),
        None => message.to_owned(),
    }
}
