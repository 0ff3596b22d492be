//! The rules by which optimizers update parameters.

/// The rule of an optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Rule {
    #[default]
    AdamW,
    Lion,
    Sgd {
        nesterov: bool,
    },
}

impl Rule {
    /// The name of the optimizer in errors and checkpoints.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AdamW => "AdamW",
            Self::Lion => "Lion",
            Self::Sgd { .. } => "Sgd",
        }
    }

    /// The name of the option for the decay of its first moment.
    pub(super) fn decay_option(self) -> &'static str {
        if matches!(self, Self::Sgd { .. }) { "momentum" } else { "beta1" }
    }

    /// Whether it has a second moment.
    pub(crate) fn has_second_moment(self) -> bool {
        self == Self::AdamW
    }
}
