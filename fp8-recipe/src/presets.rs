//! The names of recipes. This is the one place that lists the kinds.

use crate::{CurrentScaling, DelayedScaling, Error, Recipe, Result};

/// Each name, with the recipe that it stands for.
const PRESETS: [(&str, fn() -> Recipe); 3] = [
    ("delayed", || DelayedScaling::default().into()),
    ("current", || CurrentScaling::default().into()),
    ("te-v0", || DelayedScaling::te_v0().into()),
];

/// The end of the error for other names.
const KNOWN: &str = "known recipes are delayed, current and te-v0";

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
        let preset = PRESETS.iter().find(|(known, _)| *known == name);
        preset.map(|(_, recipe)| recipe()).ok_or_else(|| Error::Recipe {
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
