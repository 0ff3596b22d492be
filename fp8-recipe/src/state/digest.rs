//! Digests of training state, by which ranks compare it.
//!
//! Ranks compare digests, not values: one collective for a whole arena, however long its histories are. A digest is the first
//! 128 bits of a SHA-256 over the bits of the values, so equal NaNs are equal.

use sha2::{Digest as _, Sha256};
use std::sync::Arc;

/// The name of a piece of training state, and a digest of its value. Ranks compare digests to find the first piece that
/// differs.
///
/// ```
/// use fp8_recipe::StateDigest;
/// let of = |bytes: &[u8]| StateDigest::new("the number of steps", [bytes]);
/// assert_eq!(of(&7u64.to_le_bytes()), of(&7u64.to_le_bytes()));
/// assert_ne!(of(&7u64.to_le_bytes()), of(&8u64.to_le_bytes()));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDigest {
    /// The name of the piece, as error messages show it: ``the value of `fc.weight` ``.
    pub name: Arc<str>,
    /// The first 128 bits of the SHA-256 of its value.
    pub digest: [u8; 16],
}

impl StateDigest {
    /// Digests the bytes of `parts`, one after the other.
    pub fn new<P: AsRef<[u8]>>(name: impl Into<Arc<str>>, parts: impl IntoIterator<Item = P>) -> Self {
        let mut hasher = Sha256::new();
        parts.into_iter().for_each(|part| hasher.update(part));
        let mut digest = [0; 16];
        digest.iter_mut().zip(hasher.finalize()).for_each(|(to, from)| *to = from);
        Self { name: name.into(), digest }
    }
}
