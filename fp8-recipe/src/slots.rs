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
    /// The activation that goes in.
    Input,
    /// The weight.
    Weight,
    /// The activation that comes out, where it is wanted in FP8.
    Output,
    /// The gradient that comes in.
    GradOutput,
    /// The gradient that goes out, where it is wanted in FP8.
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

/// The five slots of one GEMM; a field of every layer that has one. Clones are the slots of the same layer.
#[derive(Debug, Clone)]
pub struct GemmSlots {
    /// The activation that goes in.
    pub input: SlotName,
    /// The weight.
    pub weight: SlotName,
    /// The activation that comes out.
    pub output: SlotName,
    /// The gradient that comes in.
    pub grad_output: SlotName,
    /// The gradient that goes out.
    pub grad_input: SlotName,
}

impl GemmSlots {
    /// The slots of a new layer at `path`, told from those of any other layer at the same path.
    pub fn new(path: &str) -> Self {
        let owner = Arc::new(());
        let slot = |role| SlotName { owner: Some(owner.clone()), ..SlotName::new(path, role) };
        Self {
            input: slot(SlotRole::Input),
            weight: slot(SlotRole::Weight),
            output: slot(SlotRole::Output),
            grad_output: slot(SlotRole::GradOutput),
            grad_input: slot(SlotRole::GradInput),
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
        [&self.input, &self.weight, &self.output, &self.grad_output, &self.grad_input]
            .into_iter()
            .for_each(f);
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
