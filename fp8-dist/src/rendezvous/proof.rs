//! Proofs by which two processes show each other that they know the same token, without sending it.
//!
//! Each side draws a nonce. A proof is HMAC-SHA-256, keyed with the token, over the side's role, both nonces and what it
//! has to say; so a proof cannot be used again, on another connection, for other words, or by the other side. Without a
//! token the key is empty and a proof proves nothing.

use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io;

pub(super) const NONCE: usize = 32;
pub(super) const TAG: usize = 32;

pub(super) type Nonce = [u8; NONCE];

/// The side that makes a proof.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    /// The one who connected.
    Guest,
    /// Rank 0, which was connected to.
    Host,
}

/// Random bytes from the system.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}

/// The values of one connection from which its proofs are made: the token and both nonces, the guest's first.
#[derive(Clone, Copy)]
pub(super) struct Challenge<'a> {
    pub(super) token: &'a str,
    pub(super) nonces: [Nonce; 2],
}

impl Challenge<'_> {
    /// Proof of `words`, which are one or more texts; the bounds between them count.
    pub(super) fn prove(&self, role: Role, words: &[&[u8]]) -> io::Result<[u8; TAG]> {
        Ok(self.mac(role, words)?.finalize().into_bytes().into())
    }

    /// Compares in constant time.
    pub(super) fn is_proven(&self, role: Role, words: &[&[u8]], tag: &[u8]) -> io::Result<bool> {
        Ok(self.mac(role, words)?.verify_slice(tag).is_ok())
    }

    fn mac(&self, role: Role, words: &[&[u8]]) -> io::Result<Hmac<Sha256>> {
        let mac = Hmac::new_from_slice(self.token.as_bytes());
        let mut mac = mac.map_err(|error| io::Error::other(error.to_string()))?;
        mac.update(match role {
            Role::Guest => b"fp8-dist guest\0",
            Role::Host => b"fp8-dist host\0\0",
        });
        self.nonces.iter().for_each(|nonce| mac.update(nonce));
        for words in words {
            mac.update(&(words.len() as u64).to_le_bytes());
            mac.update(words);
        }
        Ok(mac)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_token_role_nonces_and_words_alone() {
        let challenge = Challenge { token: "secret", nonces: [[1; NONCE], [2; NONCE]] };
        let words: &[&[u8]] = &[b"hello", b"dp"];
        let tag = challenge.prove(Role::Guest, words).unwrap();
        // By Python's hmac module.
        let expected = "b837b4d6d6db4d03a550e661b4caa86998a12cd181f2ac9b3f0e5b78cd59d42d";
        assert_eq!(tag.map(|byte| format!("{byte:02x}")).concat(), expected);
        let holds = |challenge: &Challenge<'_>, role, words: &[&[u8]]| {
            challenge.is_proven(role, words, &tag).unwrap()
        };
        assert!(holds(&challenge, Role::Guest, words));
        assert!(!holds(&challenge, Role::Host, words));
        assert!(!holds(&challenge, Role::Guest, &[b"hellod", b"p"]));
        assert!(!holds(&challenge, Role::Guest, &[b"hello"]));
        for token in ["", "secre", "Secret"] {
            assert!(!holds(&Challenge { token, ..challenge }, Role::Guest, words));
        }
        for nonces in [[[2; NONCE], [1; NONCE]], [[1; NONCE], [3; NONCE]], [[3; NONCE], [2; NONCE]]] {
            assert!(!holds(&Challenge { nonces, ..challenge }, Role::Guest, words));
        }
        assert!(!challenge.is_proven(Role::Guest, words, &tag[..31]).unwrap());
    }

    #[test]
    fn a_nonce_is_new_each_time() {
        assert_ne!(random::<NONCE>().unwrap(), random::<NONCE>().unwrap());
    }
}
