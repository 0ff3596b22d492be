//! The names of recipes. This is the one place that lists the kinds.

use crate::recipes::recipe_options::Options;
use crate::{BlockScaling, CurrentScaling, DelayedScaling, Error, Mxfp8, Nvfp4, Recipe, Result};

/// Creates a recipe with the options that are given. The error says what is wrong with one of them.
type Preset = fn(&mut Options) -> Result<Recipe, String>;

/// Each name, with the recipe that it stands for.
const PRESETS: [(&str, Preset); 9] = [
    ("delayed", |options| DelayedScaling::default().with_options(options)),
    ("current", |options| CurrentScaling::default().with_options(options)),
    ("te-v0", |options| DelayedScaling::te_v0().with_options(options)),
    ("rowwise", |options| CurrentScaling::rowwise().with_options(options)),
    ("rowwise-gw-hp", |options| CurrentScaling::rowwise_gw_hp().with_options(options)),
    ("block", |options| BlockScaling::default().with_options(options)),
    ("deepseek", |options| BlockScaling::deepseek().with_options(options)),
    ("mxfp8", |options| Mxfp8::default().with_options(options)),
    ("nvfp4", |options| Nvfp4::default().with_options(options)),
];

/// Returns the recipe with this name and these options, or `None` if there is no such name.
pub(crate) fn preset(name: &str, options: &mut Options) -> Option<Result<Recipe, String>> {
    let (_, preset) = PRESETS.iter().find(|(known, _)| *known == name)?;
    Some(preset(options))
}

/// The end of the error for other names.
const KNOWN: &str =
    "known recipes are delayed, current, te-v0, rowwise, rowwise-gw-hp, block, deepseek, mxfp8 and nvfp4";

const fn names() -> [&'static str; PRESETS.len()] {
    let mut names = [""; PRESETS.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = PRESETS[index].0;
        index += 1;
    }
    names
}

impl Recipe {
    /// The names that [`from_name`](Self::from_name) takes.
    pub const NAMES: [&'static str; PRESETS.len()] = names();

    /// Returns the recipe with this name, with its defaults.
    ///
    /// # Errors
    /// An unknown name; the error lists the known ones.
    pub fn from_name(name: &str) -> Result<Self> {
        let recipe = preset(name, &mut Options::default()).and_then(Result::ok);
        recipe.ok_or_else(|| Error::Recipe {
            recipe: "recipe",
            option: "name",
            value: name.to_owned(),
            remedy: KNOWN,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_lists_every_name() {
        let listed = KNOWN.strip_prefix("known recipes are ").unwrap().replace(" and ", ", ");
        assert_eq!(listed.split(", ").collect::<Vec<_>>(), Recipe::NAMES);
    }
}
