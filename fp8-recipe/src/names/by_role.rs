//! One value for each role of a slot.

use crate::SlotRole;

/// A value for each [`SlotRole`].
#[derive(Debug, Clone)]
pub(crate) struct ByRole<T> {
    input: T,
    weight: T,
    output: T,
    grad_output: T,
    grad_input: T,
}

impl<T> ByRole<T> {
    /// Calls `f` for each role.
    pub(crate) fn from_fn(mut f: impl FnMut(SlotRole) -> T) -> Self {
        Self {
            input: f(SlotRole::Input),
            weight: f(SlotRole::Weight),
            output: f(SlotRole::Output),
            grad_output: f(SlotRole::GradOutput),
            grad_input: f(SlotRole::GradInput),
        }
    }

    pub(crate) const fn get(&self, role: SlotRole) -> &T {
        match role {
            SlotRole::Input => &self.input,
            SlotRole::Weight => &self.weight,
            SlotRole::Output => &self.output,
            SlotRole::GradOutput => &self.grad_output,
            SlotRole::GradInput => &self.grad_input,
        }
    }
}
