//! Names of quantized tensors. Made once, from the path that a layer is given at construction; never changed.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Which pass a slot belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Inputs, weights, outputs.
    Forward,
    /// Gradients.
    Backward,
}

impl Direction {
    /// Both, forward first.
    pub const ALL: [Self; 2] = [Self::Forward, Self::Backward];

    /// `forward` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a slot's tensor is to its GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SlotRole {
    /// The activation that the GEMM reads.
    Input,
    /// The weight.
    Weight,
    /// The activation that the GEMM writes, for layers that write it in FP8. Not part of [`GemmSlots`].
    Output,
    /// The gradient of the GEMM's output.
    GradOutput,
    /// The gradient of the GEMM's input, for layers that write it in FP8. Not part of [`GemmSlots`].
    GradInput,
}

impl SlotRole {
    /// The last part of the slot's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::Output => "output",
            Self::GradOutput => "grad_output",
            Self::GradInput => "grad_input",
        }
    }

    /// The pass it belongs to.
    pub const fn direction(self) -> Direction {
        match self {
            Self::Input | Self::Weight | Self::Output => Direction::Forward,
            Self::GradOutput | Self::GradInput => Direction::Backward,
        }
    }

    /// Whether dgrad or wgrad reads its transpose.
    pub(crate) const fn columnwise(self) -> bool {
        matches!(self, Self::Input | Self::Weight | Self::GradOutput)
    }
}

/// One quantized tensor's name: `<layer path>.<role>`.
///
/// Two names are equal if they read the same. A name also knows the [`GemmSlots`] that it was made with, if any: a
/// [`Scaling`](crate::Scaling) refuses a layer that is not the one that it was made from, though it has the same path.
#[derive(Debug, Clone)]
pub struct SlotName {
    layer: Arc<str>,
    name: Arc<str>,
    role: SlotRole,
    owner: Option<Arc<()>>,
}

impl PartialEq for SlotName {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for SlotName {}

impl Hash for SlotName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl SlotName {
    /// The name of a slot of the layer at `path`, whichever layer that is: it stands for the slot of any layer there.
    pub fn new(path: &str, role: SlotRole) -> Self {
        Self { layer: path.into(), name: format!("{path}.{}", role.name()).into(), role, owner: None }
    }

    /// The layer whose slot this is, where it is known.
    pub(crate) const fn owner(&self) -> Option<&Arc<()>> {
        self.owner.as_ref()
    }

    /// The layer's path.
    pub fn layer(&self) -> &Arc<str> {
        &self.layer
    }

    /// The whole name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// What the tensor is to its GEMM.
    pub const fn role(&self) -> SlotRole {
        self.role
    }

    /// The pass it belongs to.
    pub const fn direction(&self) -> Direction {
        self.role.direction()
    }
}

/// The three slots of one GEMM: what fprop, dgrad and wgrad quantize. A layer with a GEMM has one as a field. Clones are the
/// slots of the same layer.
///
/// | slot | tensor | read by |
/// |---|---|---|
/// | `input` | the activation `x` | fprop, wgrad |
/// | `weight` | the weight `w` | fprop, dgrad |
/// | `grad_output` | the gradient `dy` | dgrad, wgrad |
///
/// A layer that also writes its output or its input's gradient in FP8 registers a slot for it, with
/// [`SlotRole::Output`] or [`SlotRole::GradInput`], in its own [`Slots`]:
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, Direction, GemmSlots, Scaling, SlotName, SlotRole, Slots};
///
/// struct Fp8Output {
///     gemm: GemmSlots,
///     output: SlotName,
/// }
///
/// impl Slots for Fp8Output {
///     fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
///         self.gemm.slots(f);
///         f(&self.output);
///     }
/// }
///
/// let layer = Fp8Output { gemm: GemmSlots::new("fc"), output: SlotName::new("fc", SlotRole::Output) };
/// let mut scaling = Scaling::new(&layer, &Device::cpu())?;
/// assert_eq!(scaling.slot_names(Direction::Forward).len(), 3); // fc.input, fc.output, fc.weight
///
/// let y = Tensor::from_vec(vec![3.5f32], [1, 1], &Device::cpu())?;
/// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
/// let y8 = ops::quantize(&y, &cx.slot(&layer.output)?)?;
/// cx.commit()?;
/// assert!(y8.is_fp8());
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GemmSlots {
    /// The activation that the GEMM reads.
    pub input: SlotName,
    /// The weight.
    pub weight: SlotName,
    /// The gradient of the GEMM's output.
    pub grad_output: SlotName,
}

impl GemmSlots {
    /// The slots of a new layer at `path`, told from those of any other layer at the same path.
    pub fn new(path: &str) -> Self {
        let owner = Arc::new(());
        let slot = |role| SlotName { owner: Some(owner.clone()), ..SlotName::new(path, role) };
        Self {
            input: slot(SlotRole::Input),
            weight: slot(SlotRole::Weight),
            grad_output: slot(SlotRole::GradOutput),
        }
    }
}

/// All that [`Scaling`](crate::Scaling) asks of a model.
pub trait Slots {
    /// Calls `f` with every slot, in any order.
    fn slots(&self, f: &mut dyn FnMut(&SlotName));
}

impl Slots for GemmSlots {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        [&self.input, &self.weight, &self.grad_output].into_iter().for_each(f);
    }
}

impl<T: Slots + ?Sized> Slots for Box<T> {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        (**self).slots(f);
    }
}

impl<T: Slots> Slots for Option<T> {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.iter().for_each(|layer| layer.slots(f));
    }
}

impl<T: Slots> Slots for Vec<T> {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.iter().for_each(|layer| layer.slots(f));
    }
}
