//! The keys of recipes, by which arenas, checkpoints and reports identify them: the one place that knows their text.
//!
//! A key is `kind(option=value,…)`. Options that later versions have added and the length of the history follow the parentheses,
//! so that keys of earlier versions stay as they are. Each kind of recipe lists its options once, as [`RecipeOption`]s, for keys
//! and for files.

use crate::Format;
use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::recipe_options::Options;
use std::fmt;

/// Writes the value of an option of a recipe for its key.
pub(crate) type ToKeyText<T> = fn(&T) -> String;

/// Replaces the value of an option of a recipe by the one that a file gives, if it gives one.
pub(crate) type FromFile<T> = fn(&mut T, &mut Options) -> Result<(), String>;

/// An option of the recipes of type `T`.
pub(crate) struct RecipeOption<T> {
    /// Its name and value in keys. `None` if keys do not list it within their parentheses.
    pub(crate) key: Option<(&'static str, ToKeyText<T>)>,
    /// Reads it from a file. `None` if files cannot have it.
    pub(crate) read: Option<FromFile<T>>,
}

/// Lists a field as an option, under its own name in files, and in keys under the name after `as`.
macro_rules! field {
    ($field:ident) => {
        field!($field as stringify!($field))
    };
    ($field:ident as $key:expr) => {
        RecipeOption {
            key: Some(($key, |recipe| KeyText::key_text(&recipe.$field))),
            read: Some(|recipe, options| options.read(stringify!($field), &mut recipe.$field)),
        }
    };
}
pub(crate) use field;

/// Lists a field as an option of files that keys do not list within their parentheses.
macro_rules! file_field {
    ($field:ident) => {
        RecipeOption {
            key: None,
            read: Some(|recipe, options| options.read(stringify!($field), &mut recipe.$field)),
        }
    };
}
pub(crate) use file_field;

/// The text of an option's value in keys.
pub(crate) trait KeyText {
    fn key_text(&self) -> String;
}

macro_rules! displayed {
    ($($value:ty),*) => {$(
        impl KeyText for $value {
            fn key_text(&self) -> String {
                self.to_string()
            }
        }
    )*};
}
displayed!(bool, i32, u64, usize, Format);

impl KeyText for (bool, bool, bool) {
    fn key_text(&self) -> String {
        format!("{self:?}")
    }
}

/// Writes the key of a recipe of this kind.
pub(crate) fn write<T>(
    kind: &str,
    options: &[RecipeOption<T>],
    recipe: &T,
    attention: Fp8Attention,
) -> String {
    let listed = options.iter().filter_map(|option| option.key);
    let listed: Vec<String> = listed.map(|(name, value)| format!("{name}={}", value(recipe))).collect();
    format!("{kind}({}){}", listed.join(","), suffix(attention))
}

/// Appends the length of the history, which the key of a recipe's state leaves out.
pub(crate) fn with_history_len(state_key: &str, len: usize) -> String {
    format!("{state_key},len={len}")
}

/// Replaces the options of a recipe by those that a file gives.
pub(crate) fn read<T>(
    options: &[RecipeOption<T>],
    recipe: &mut T,
    given: &mut Options,
) -> Result<(), String> {
    options.iter().filter_map(|option| option.read).try_for_each(|read| read(recipe, given))
}

/// The end of the key of a recipe that runs attention in FP8.
const fn suffix(attention: Fp8Attention) -> &'static str {
    match attention {
        Fp8Attention::Off => "",
        Fp8Attention::Dpa => ",fp8_dpa=true",
        Fp8Attention::Mha => ",fp8_mha=true",
    }
}

/// Returns the key of a recipe without what it says of attention. A name in the key cannot imitate it, because all names are
/// within the key's parentheses.
pub(crate) fn without_attention(key: &str) -> &str {
    let strip = |attention| key.strip_suffix(suffix(attention));
    [Fp8Attention::Dpa, Fp8Attention::Mha].into_iter().find_map(strip).unwrap_or(key)
}

/// A key that was read: the kind, and the names and values of its options.
#[derive(Debug)]
pub(crate) struct RecipeKey<'a> {
    pub(crate) kind: &'a str,
    options: Vec<KeyOption<'a>>,
}

/// The name and value of an option in a key. `Display` writes it under the name of the recipe's field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyOption<'a> {
    pub(crate) name: &'a str,
    pub(crate) value: &'a str,
}

impl<'a> RecipeKey<'a> {
    /// Reads a key. Commas and parentheses within parentheses or quotes belong to a value.
    pub(crate) fn parse(key: &'a str) -> Option<Self> {
        let (kind, mut rest) = key.split_once('(')?;
        let mut options = Vec::new();
        while !rest.is_empty() {
            let (option, after) = rest.split_at_checked(end_of_option(rest))?;
            if !option.is_empty() {
                let (name, value) = option.split_once('=')?;
                options.push(KeyOption { name, value });
            }
            rest = after.get(1..).unwrap_or_default();
        }
        // Keys of recipes without FP8 attention do not mention it.
        for name in ["fp8_dpa", "fp8_mha"] {
            let given = options.iter().position(|option| option.name == name);
            let option = given.map(|index| options.remove(index));
            options.push(option.unwrap_or(KeyOption { name, value: "false" }));
        }
        Some(Self { kind, options })
    }

    /// Reads the key of a recipe's state, which ends with its parenthesis or with what it says of attention.
    pub(crate) fn parse_state(key: &'a str) -> Option<Self> {
        let key = without_attention(key);
        Self::parse(key).filter(|_| key.ends_with(')'))
    }

    pub(crate) fn options(&self) -> &[KeyOption<'a>] {
        &self.options
    }

    /// Returns the value of an option.
    pub(crate) fn value(&self, name: &str) -> Option<&'a str> {
        self.options.iter().find(|option| option.name == name).map(|option| option.value)
    }

    /// Returns the value of an option that is true or false.
    pub(crate) fn flag(&self, name: &str) -> Option<bool> {
        self.value(name)?.parse().ok()
    }

    /// Returns whether both are of one kind and list the same options.
    pub(crate) fn is_comparable(&self, other: &Self) -> bool {
        let names = |key: &Self| key.options.iter().map(|option| option.name).collect::<Vec<_>>();
        self.kind == other.kind && names(self) == names(other)
    }

    /// Returns the options that differ, of this key and of one that is comparable.
    pub(crate) fn changes<'b>(&self, to: &RecipeKey<'b>) -> Vec<(KeyOption<'a>, KeyOption<'b>)> {
        let pairs = self.options.iter().copied().zip(to.options.iter().copied());
        pairs.filter(|(old, new)| (old.name, old.value) != (new.name, new.value)).collect()
    }
}

impl fmt::Display for KeyOption<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.name {
            "amax" => "amax_compute_algo",
            "scale" => "scaling_factor_compute_algo",
            "override" => "override_linear_precision",
            "len" => "amax_history_len",
            name => name,
        };
        write!(f, "{name}={}", self.value)
    }
}

/// The index of the comma or closing parenthesis that ends the first option of `text`.
fn end_of_option(text: &str) -> usize {
    let (mut depth, mut is_quoted, mut is_escaped) = (0usize, false, false);
    for (index, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ if is_quoted => {}
            '(' => depth += 1,
            ')' | ',' if depth == 0 => return index,
            ')' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_is_stripped_from_the_end_of_a_key_alone() {
        for (key, stripped) in [
            ("delayed(margin=0),fp8_dpa=true", "delayed(margin=0)"),
            ("current(),fp8_mha=true", "current()"),
            ("custom(name=\",fp8_dpa=true\")", "custom(name=\",fp8_dpa=true\")"),
            ("", ""),
        ] {
            assert_eq!(without_attention(key), stripped);
        }
    }
}
