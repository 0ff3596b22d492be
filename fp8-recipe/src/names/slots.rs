//! Names of quantized tensors. A layer makes them from its path when it is constructed and never changes them.

use crate::SlotUse;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The pass that a slot belongs to.
///
/// ```
/// use fp8_recipe::{Direction, SlotRole};
/// assert_eq!(SlotRole::Weight.direction(), Direction::Forward);
/// assert_eq!(SlotRole::GradOutput.direction().to_string(), "backward");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Inputs, weights and outputs.
    Forward,
    /// Gradients.
    Backward,
}

impl Direction {
    /// Both passes, forward first.
    pub const ALL: [Self; 2] = [Self::Forward, Self::Backward];

    /// Returns one of the roles of this pass.
    pub(crate) const fn any_role(self) -> SlotRole {
        match self {
            Self::Forward => SlotRole::Input,
            Self::Backward => SlotRole::GradOutput,
        }
    }

    /// Returns `forward` or `backward`.
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

/// The part that a slot's tensor plays in its GEMM.
///
/// ```
/// use fp8_recipe::{SlotName, SlotRole};
/// assert_eq!(&**SlotName::new("fc", SlotRole::GradOutput).name(), "fc.grad_output");
/// ```
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
    /// Returns the last part of the slot's name: `input`, `weight`, `output`, `grad_output` or `grad_input`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::Output => "output",
            Self::GradOutput => "grad_output",
            Self::GradInput => "grad_input",
        }
    }

    /// Returns the pass that it belongs to.
    pub const fn direction(self) -> Direction {
        match self {
            Self::Input | Self::Weight | Self::Output => Direction::Forward,
            Self::GradOutput | Self::GradInput => Direction::Backward,
        }
    }
}

/// The name of one quantized tensor: `<layer path>.<role>`.
///
/// Two names are equal if their texts are. A name from [`GemmSlots`] also identifies its layer: a
/// [`Scaling`](crate::Scaling) refuses the names of a layer that it was not made from, even one with the same path.
///
/// ```
/// use fp8_recipe::{Direction, SlotName, SlotRole};
/// let slot = SlotName::new("blocks.3.fc1", SlotRole::Weight);
/// assert_eq!(&**slot.name(), "blocks.3.fc1.weight");
/// assert_eq!((&**slot.layer(), slot.role()), ("blocks.3.fc1", SlotRole::Weight));
/// assert_eq!(slot.direction(), Direction::Forward);
/// ```
#[derive(Clone)]
pub struct SlotName {
    layer: Arc<str>,
    name: Arc<str>,
    role: SlotRole,
    owner: Option<Arc<()>>,
    /// For a tensor that attention reads, which needs one scale: which recipes use it.
    attention: Option<SlotUse>,
}

/// Writes the name: `SlotName(fc.input)`.
impl fmt::Debug for SlotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotName({})", self.name)
    }
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
    /// Creates the name of a slot of the layer at `path`. It is accepted for any layer at that path.
    pub fn new(path: &str, role: SlotRole) -> Self {
        let name = format!("{path}.{}", role.name()).into();
        Self { layer: path.into(), name, role, owner: None, attention: None }
    }

    /// Creates the name of a slot at `path` whose tensor attention reads in FP8. Recipes that `used` leaves out, and recipes that
    /// give the tensor more than one scale, leave the slot off. [`SlotUse`] has an example.
    pub fn of_attention(path: &str, role: SlotRole, used: SlotUse) -> Self {
        Self { attention: Some(used), ..Self::new(path, role) }
    }

    /// Returns whether attention reads the tensor, for which it needs one scale.
    pub(crate) const fn is_of_attention(&self) -> bool {
        self.attention.is_some()
    }

    /// Returns which recipes use the slot.
    pub(crate) fn used_by(&self) -> SlotUse {
        self.attention.unwrap_or(SlotUse::Always)
    }

    /// Returns the identity of the slot's layer, if it is known.
    pub(crate) const fn owner(&self) -> Option<&Arc<()>> {
        self.owner.as_ref()
    }

    /// Returns the layer's path.
    pub fn layer(&self) -> &Arc<str> {
        &self.layer
    }

    /// Returns the whole name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the part that the tensor plays in its GEMM.
    pub const fn role(&self) -> SlotRole {
        self.role
    }

    /// Returns the pass that it belongs to.
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
#[derive(Clone)]
pub struct GemmSlots {
    /// The activation that the GEMM reads.
    pub input: SlotName,
    /// The weight.
    pub weight: SlotName,
    /// The gradient of the GEMM's output.
    pub grad_output: SlotName,
}

/// Writes the layer's path: `GemmSlots(fc)`.
impl fmt::Debug for GemmSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GemmSlots({})", self.weight.layer)
    }
}

impl GemmSlots {
    /// Creates the slots of a new layer at `path`. They differ from those of any other layer, even at the same path.
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

/// Something that has quantized tensors: a layer or a model. [`Scaling::new`](crate::Scaling::new) registers its slots.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{Direction, GemmSlots, Scaling, SlotName, Slots};
///
/// struct Mlp {
///     fc1: GemmSlots,
///     fc2: GemmSlots,
/// }
///
/// impl Slots for Mlp {
///     fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
///         self.fc1.slots(f);
///         self.fc2.slots(f);
///     }
/// }
///
/// let mlp = Mlp { fc1: GemmSlots::new("fc1"), fc2: GemmSlots::new("fc2") };
/// let scaling = Scaling::new(&mlp, &Device::cpu())?;
/// assert_eq!(scaling.slot_names(Direction::Backward).len(), 2); // fc1.grad_output, fc2.grad_output
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
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
