//! The errors of this crate.

use crate::Direction;
use std::fmt;
use std::sync::Arc;

/// Every error of this crate. `Display` and `Debug` write one sentence that says what was wrong and what would be right.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{GemmSlots, Scaling};
/// let error = Scaling::new(&vec![GemmSlots::new("fc"), GemmSlots::new("fc")], &Device::cpu()).unwrap_err();
/// assert_eq!(error.to_string(), "slot `fc.input` occurs twice: give the two layers different paths");
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two layers have the same path.
    #[error("slot `{0}` occurs twice: give the two layers different paths")]
    DuplicateSlot(Arc<str>),
    /// A slot of a layer that was not part of the model passed to `Scaling::new`.
    #[error("slot `{0}` is not registered: build Scaling from the model that holds this layer")]
    UnknownSlot(Arc<str>),
    /// A slot of another model's layer at the same path.
    #[error(
        "slot `{0}` belongs to another layer at the same path: this Scaling serves the model it was made from; \
         make one for each model by Scaling::new"
    )]
    OtherLayer(Arc<str>),
    /// A slot of the other pass than the scope's.
    #[error("slot `{slot}` belongs to the {} pass: a {} scope does not lend it", .slot_direction, .scope)]
    Direction {
        /// The slot's name.
        slot: Arc<str>,
        /// The slot's pass.
        slot_direction: Direction,
        /// The scope's pass.
        scope: Direction,
    },
    /// A `Saved` that was passed to the wrong backward.
    #[error(
        "backward of `{layer}`: its Saved comes from {found}: expected one from a committed training scope"
    )]
    Origin {
        /// The layer whose backward was called.
        layer: String,
        /// The layer or scope that the `Saved` comes from.
        found: String,
    },
    /// A replay of a snapshot without scales.
    #[error(
        "replay: no scales were kept: the forward scope of this Saved was an evaluation or left without commit"
    )]
    NoSnapshot,
    /// An option of a recipe outside its range.
    #[error("{recipe}: {option} = {value}: {remedy}")]
    Recipe {
        /// The name of the recipe.
        recipe: &'static str,
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// The valid values, or what to use instead.
        remedy: &'static str,
    },
    /// A TOML file that describes no recipe.
    #[error("recipe file: {problem}")]
    RecipeFile {
        /// The line or key that is wrong, and what would be right.
        problem: String,
    },
    /// A number of a [`CustomRecipe`](crate::CustomRecipe) that cannot be used.
    #[error("recipe {recipe:?}, slot `{slot}`: {problem}")]
    CustomRecipe {
        /// The name of the recipe.
        recipe: String,
        /// The slot's name.
        slot: String,
        /// The number, and what would be right.
        problem: String,
    },
    /// A pattern of [`Recipe::by_name`](crate::Recipe::by_name) that matches no slot of the model.
    #[error("recipe by name: pattern `{pattern}` matches no slot: {}", listed(.nearest))]
    Pattern {
        /// The pattern.
        pattern: Arc<str>,
        /// The names that are most like it.
        nearest: Vec<Arc<str>>,
    },
    /// Recipes of two slots whose tensors cannot be multiplied.
    #[error("recipe by name: {gemm} of `{layer}`: {problem}")]
    Operands {
        /// The path of the layer.
        layer: Arc<str>,
        /// `fprop`, `dgrad` or `wgrad`.
        gemm: &'static str,
        /// Why, and what would be right.
        problem: String,
    },
    /// A scope that quantizes weights in another way than a weight is stored in FP8.
    #[error(
        "slot `{slot}`: the weight is stored in {stored}, but this scope's recipe quantizes it in {wanted}: use the recipe \
         that the weight was quantized with, or keep its values in high precision"
    )]
    WeightFormat {
        /// The weight's slot.
        slot: Arc<str>,
        /// Format and granularity of the codes.
        stored: String,
        /// Those of the recipe.
        wanted: String,
    },
    /// A scope whose group lacks ranks that have parts of a tensor.
    #[error(
        "slot `{slot}`: parts of its tensor are on ranks {missing:?} of the job, too, but {}: reduce amaxes over a group of all ranks \
         that share the model's layers, `scaling.set_group(mesh.amax_group())`",
        .group.as_ref().map_or_else(|| "the scope has no group".to_owned(), |group| format!("group `{group}` does not have them"))
    )]
    AmaxRanks {
        /// The slot's name.
        slot: Arc<str>,
        /// The scope's group, if it has one.
        group: Option<String>,
        /// The ranks of the job that it lacks.
        missing: Vec<usize>,
    },
    /// A recipe without reduced amaxes for a tensor whose parts are gathered in FP8.
    #[error(
        "slot `{slot}`: reduce_amax = false, but parts of its tensor are gathered as codes, which takes one scale on all ranks: set \
         reduce_amax to true, or sequence_parallel to false"
    )]
    OwnScales {
        /// The slot's name.
        slot: Arc<str>,
    },
    /// A backward scope whose delayed weight gradients would be lost.
    #[error(
        "{delayed} weight gradients were delayed: take them from the backward scope by take_wgrads() before its commit"
    )]
    DelayedWgrads {
        /// The number of delayed weight gradients.
        delayed: usize,
    },
    /// Saved scaling state that cannot be loaded.
    #[error("scaling state of {recipe}, {direction}: {problem}")]
    State {
        /// The recipe's short name, and its group.
        recipe: String,
        /// Forward or backward.
        direction: &'static str,
        /// The field that is wrong, its value, and the expected value.
        problem: String,
    },
    /// An error of an operation.
    #[error(transparent)]
    Kernels(#[from] fp8_kernels::Error),
    /// An error of an [`AmaxGroup`](crate::AmaxGroup). The group's crate converts its error type into this variant.
    #[error(transparent)]
    Group(Box<dyn std::error::Error + Send + Sync>),
}

fn listed(nearest: &[Arc<str>]) -> String {
    match nearest {
        [] => "the model has no slots".to_owned(),
        [one] => format!("the nearest is `{one}`"),
        [all @ .., last] => format!("the nearest are `{}` and `{last}`", all.join("`, `")),
    }
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_prints_the_sentence() {
        let kernels = fp8_kernels::Error::Elements { op: "from_vec", len: 3, shape: [2].into() };
        let sentence = kernels.to_string();
        for (error, text) in [
            (
                Error::DuplicateSlot("fc.input".into()),
                "slot `fc.input` occurs twice: give the two layers different paths",
            ),
            (Error::Kernels(kernels), sentence.as_str()),
            (Error::Group("rank 1 failed".into()), "rank 1 failed"),
        ] {
            assert_eq!(format!("{error:?}"), text);
            assert_eq!(error.to_string(), text);
        }
    }
}
