//! The tensors that ranks have gathered, and whether in FP8.

use fp8_recipe::SlotName;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor that a recipe quantizes and whose tokens the ranks gather, as they gathered it last.
///
/// ```
/// use fp8_nn::Gather;
/// let gather = Gather { tensor: "fc.input".into(), again: true, in_fp8: false };
/// assert_eq!(gather.to_string(), "fc.input, again for its weight gradient: gathered in high precision");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gather {
    /// The name of the slot that quantizes it.
    pub tensor: Arc<str>,
    /// Whether backward gathers an input again, for the gradient of the weight.
    pub again: bool,
    /// Whether codes are gathered, in NVFP4 those of 4 bits. Where they cannot be, because a block or a columnwise scale would span tokens of two ranks, or because a
    /// GEMM or an adapter reads values, the values are gathered, and each rank quantizes the whole.
    pub in_fp8: bool,
}

impl std::fmt::Display for Gather {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let again = if self.again { ", again for its weight gradient" } else { "" };
        let form = if self.in_fp8 { "FP8" } else { "high precision" };
        write!(f, "{}{again}: gathered in {form}", self.tensor)
    }
}

/// The last gathers, by tensor and whether again.
#[derive(Debug, Default)]
pub(super) struct Gathers(Mutex<BTreeMap<(Arc<str>, bool), bool>>);

impl Gathers {
    /// Returns all, sorted by name.
    pub(super) fn all(&self) -> Vec<Gather> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let gather = |((tensor, again), in_fp8): (&(Arc<str>, bool), &bool)| Gather {
            tensor: tensor.clone(),
            again: *again,
            in_fp8: *in_fp8,
        };
        all.iter().map(gather).collect()
    }

    pub(super) fn note(&self, slot: &SlotName, again: bool, in_fp8: bool) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((slot.name().clone(), again), in_fp8);
    }
}
