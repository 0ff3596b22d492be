//! The errors of layers, optimizers and checkpoints.

use fp8_kernels::{DType, Shape};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Every error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An input of another dtype than the parameters, in a scope without `compute_dtype`.
    #[error(
        "{layer}: the input is {input} and `{parameter}` is {found}: give both one dtype, or set \
         AutocastOptions::compute_dtype"
    )]
    DTypes {
        /// The layer.
        layer: String,
        /// The input's dtype.
        input: DType,
        /// The parameter.
        parameter: Arc<str>,
        /// The parameter's dtype.
        found: DType,
    },
    /// An input or gradient whose shape does not fit the layer.
    #[error("{layer}: {argument} of shape {shape}: expected {expected}")]
    ArgumentShape {
        /// The layer's path.
        layer: String,
        /// The argument, for example `input` or `dy`.
        argument: &'static str,
        /// The shape that was passed.
        shape: Shape,
        /// The shapes that fit.
        expected: String,
    },
    /// An input or gradient of a dtype that the layer does not take.
    #[error("{layer}: {argument} has dtype {found}: expected {expected}")]
    ArgumentDType {
        /// The layer's path.
        layer: String,
        /// The argument, for example `input` or `dy`.
        argument: &'static str,
        /// The dtype that was passed.
        found: DType,
        /// The dtypes that fit.
        expected: &'static str,
    },
    /// An input or gradient on another device than the layer's parameters.
    #[error(
        "{layer}: {argument} is on {found}, the layer on {expected}: move it there with Tensor::to_device"
    )]
    ArgumentDevice {
        /// The layer's path.
        layer: String,
        /// The argument, for example `input` or `dy`.
        argument: &'static str,
        /// The device of what was passed.
        found: String,
        /// The layer's device.
        expected: String,
    },
    /// A fused operation that did not quantize with the slot that it was given.
    #[error(
        "{layer}: the closure returned {argument} in {found}, its slot asks for {expected}: pass the slot to the operation \
         that quantizes"
    )]
    FusedOperand {
        /// The layer's path.
        layer: String,
        /// The argument: `input` or `dy`.
        argument: &'static str,
        /// The format that was returned.
        found: String,
        /// The slot's format.
        expected: String,
    },
    /// A fused backward without the gradient of the layer's bias.
    #[error(
        "{layer}: the closure returned no gradient of the bias: return the column sums of dy, which \
         ops::quantize_dbias and ops::activation_backward_quantize_dbias compute"
    )]
    BiasGradient {
        /// The layer's path.
        layer: String,
    },
    /// An option outside its range.
    #[error("{part}: {option} = {value}: {remedy}")]
    Option {
        /// The layer, model or function whose option it is.
        part: String,
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// Advice on a correct value.
        remedy: String,
    },
    /// Two parameters with the same name.
    #[error("parameter `{0}` occurs twice: give the two layers different paths")]
    DuplicateParameter(Arc<str>),
    /// An update in high precision of a parameter that is stored in FP8.
    #[error(
        "`{parameter}` is stored in codes, which round small updates away: train it with an AdamW whose quantize_weights stored it, \
         which keeps f32 copies"
    )]
    StoredInFp8 {
        /// The parameter.
        parameter: Arc<str>,
    },
    /// A gradient that is being summed over a group.
    #[error(
        "the gradient of `{parameter}` is being summed over the ranks: call Gradients::finish before it is used; if a backward pass \
         reaches its layer twice, set GradientsOptions::overlap to false"
    )]
    GradientAway {
        /// The parameter.
        parameter: Arc<str>,
    },
    /// A gradient that is summed over a group again.
    #[error(
        "all_reduce_gradients: the gradient of `{parameter}` is already a sum over group `{group}`, which a second one would \
         multiply: reduce once, after the last microbatch's backward, and call zero_grad before the next one"
    )]
    SummedTwice {
        /// The parameter.
        parameter: Arc<str>,
        /// The group's id.
        group: String,
    },
    /// A gradient of which each rank has a part, before the sum.
    #[error(
        "the gradient of `{parameter}` is a part of the sum over group `{group}`: call all_reduce_gradients or Gradients::finish over the \
         data-parallel group, also if that has one rank, before the gradient is used"
    )]
    PartialGradient {
        /// The parameter.
        parameter: Arc<str>,
        /// The id of the group of tensor parallelism.
        group: String,
    },
    /// A group for replicas of a parameter that has ranks with other parts of the model.
    #[error(
        "{call}: group `{group}` has ranks with other parts of `{parameter}`'s layer: pass the group of replicas, `mesh.dp()`"
    )]
    NotReplicas {
        /// The function.
        call: &'static str,
        /// The parameter.
        parameter: Arc<str>,
        /// The group's id.
        group: String,
    },
    /// A function that takes whole parameters, and a parameter of which each rank has a part.
    #[error("{call}: `{parameter}` is cut over ranks: {remedy}")]
    Cut {
        /// The function.
        call: &'static str,
        /// The parameter.
        parameter: Arc<str>,
        /// Advice on what to do.
        remedy: &'static str,
    },
    /// A call that all ranks make and that failed on another one.
    #[error("{call}: rank {rank} failed: {problem}")]
    OtherRank {
        /// The function.
        call: &'static str,
        /// The rank that failed.
        rank: usize,
        /// The error that this rank got.
        problem: String,
    },
    /// A gradient that was computed with scales of one rank, under a recipe that reduces amaxes.
    #[error(
        "all_reduce_gradients: the gradient of `{parameter}` was computed under recipe {recipe}, which reduces amaxes, in a scope \
         without a group of more than one rank, so each rank has scales of its own: call Scaling::set_group before the first scope, \
         or set AutocastOptions::allow_scales_per_rank if that is intended"
    )]
    ScalesPerRank {
        /// The parameter.
        parameter: Arc<str>,
        /// The recipe.
        recipe: String,
    },
    /// A delayed weight gradient of another model.
    #[error(
        "backward_dw: the model has no parameter `{0}`: pass the model whose backward delayed the gradient"
    )]
    UnknownWeight(Arc<str>),
    /// A boxed `Saved` that was passed to the wrong layer.
    #[error("backward of layer {index}: its Saved is of a {found}, not of a {expected}")]
    Saved {
        /// The layer's place in the stack.
        index: usize,
        /// The kind of layer that the `Saved` comes from.
        found: &'static str,
        /// The kind of layer that it was passed to.
        expected: &'static str,
    },
    /// Padding, packed sequences or positions for a layer that would not heed them.
    #[error(
        "{layer}: it takes no padding, packed sequences or positions: implement Module::forward_with_info, or \
         Module::is_positionwise if its positions do not depend on each other"
    )]
    SequenceInfo {
        /// The kind of layer.
        layer: &'static str,
    },
    /// A `Saved` with more or fewer parts than the stack has layers.
    #[error(
        "backward of a stack of {layers} layers: its Saved has {found} parts: use the one its forward returned"
    )]
    StackSaved {
        /// The number of layers in the stack.
        layers: usize,
        /// The number of parts in the `Saved`.
        found: usize,
    },
    /// A [`LossScaler`](crate::LossScaler) that was used out of order.
    #[error("LossScaler: {problem}: {remedy}")]
    LossScaler {
        /// A description of the mistake.
        problem: &'static str,
        /// Advice on the correct use.
        remedy: &'static str,
    },
    /// A file that cannot be read or written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A file that is not a checkpoint of this model.
    #[error("{}: {problem}", .path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// A description of the problem.
        problem: String,
    },
    /// A parameter, moment or f32 copy that is not worth saving.
    #[error(
        "`{name}` is {value} at element {index} of {elements}: training has diverged; go on from an earlier checkpoint, \
         with a lower rate"
    )]
    NotFinite {
        /// The parameter, or the part of its state.
        name: String,
        /// The element.
        value: f32,
        /// Its place.
        index: usize,
        /// The number of elements.
        elements: usize,
    },
    /// An error of an operation.
    #[error(transparent)]
    Kernels(#[from] fp8_kernels::Error),
    /// An error of a recipe or scope.
    #[error(transparent)]
    Recipe(fp8_recipe::Error),
    /// An error of a process group.
    #[error(transparent)]
    Dist(#[from] fp8_dist::Error),
}

/// The error of a group becomes [`Error::Dist`] again, on its way through a recipe too.
impl From<fp8_recipe::Error> for Error {
    fn from(error: fp8_recipe::Error) -> Self {
        match error {
            fp8_recipe::Error::Group(error) => match error.downcast() {
                Ok(error) => Self::Dist(*error),
                Err(error) => Self::Recipe(fp8_recipe::Error::Group(error)),
            },
            error => Self::Recipe(error),
        }
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
        let text = "slot `fc.input` is not registered: build Scaling from the model that holds this layer";
        let error = Error::from(fp8_recipe::Error::UnknownSlot("fc.input".into()));
        assert_eq!((format!("{error:?}"), error.to_string()), (text.to_owned(), text.to_owned()));
        let text = "parameter `fc.weight` occurs twice: give the two layers different paths";
        assert_eq!(format!("{:?}", Error::DuplicateParameter("fc.weight".into())), text);
    }
}
