//! The list's word for a mutant.

use super::edits::Mutant;
use super::survivors::{Known, Reason, key_of_unreached};

/// Returns the list's reason for this mutant, from a line of its own or from one for all that are spelled alike.
pub(crate) fn reason_for<'a>(mutant: &Mutant, known: &'a Known) -> Option<&'a Reason> {
    [mutant.key(), mutant.key_of_all()].iter().find_map(|key| known.get(key))
}

/// The line of the list for all that no case reaches in the mutant's kernel.
pub(crate) fn key_of_unreached_by(mutant: &Mutant) -> String {
    key_of_unreached(&mutant.file, &mutant.kernel)
}
