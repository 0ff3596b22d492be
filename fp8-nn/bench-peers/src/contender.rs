//! The contenders that are compared: this library in several precisions, and other libraries.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::result::Result;

/// One way to do the work. Its name says the precision, and in front of it the library if that is not this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contender {
    /// This library in f32.
    F32,
    /// This library with bf16 activations.
    Bf16,
    /// This library in FP8 with delayed scaling; what is not FP8 is f32.
    Fp8,
    /// This library in FP8 with delayed scaling; what is not FP8 is bf16.
    Fp8Bf16,
    TorchEager,
    TorchCompile,
    /// Eager, under autocast.
    TorchBf16,
    /// Compiled, under autocast.
    TorchCompileBf16,
    /// Eager in f64: a reference for losses.
    TorchF64,
    /// `torch.mm` in f32.
    TorchF32,
    Numpy,
    /// The crate `gemm`.
    Gemm,
    Faer,
}

use Contender::*;

/// The name of each contender.
const NAMES: [(Contender, &str); 13] = [
    (F32, "f32"),
    (Bf16, "bf16"),
    (Fp8, "fp8"),
    (Fp8Bf16, "fp8-bf16"),
    (TorchEager, "torch-eager"),
    (TorchCompile, "torch-compile"),
    (TorchBf16, "torch-bf16"),
    (TorchCompileBf16, "torch-compile-bf16"),
    (TorchF64, "torch-f64"),
    (TorchF32, "torch-f32"),
    (Numpy, "numpy"),
    (Gemm, "gemm"),
    (Faer, "faer"),
];

/// The contenders of `bench train`.
pub(crate) const TRAIN: [Contender; 9] =
    [F32, Bf16, Fp8, Fp8Bf16, TorchEager, TorchCompile, TorchBf16, TorchCompileBf16, TorchF64];

/// The contenders of `bench gemm`.
pub(crate) const GEMM: [Contender; 7] = [F32, Fp8, Gemm, Faer, Numpy, TorchF32, TorchBf16];

impl Contender {
    /// Returns whether `--peers` is needed to measure it.
    pub(crate) fn is_peer(self) -> bool {
        !matches!(self, F32 | Bf16 | Fp8 | Fp8Bf16)
    }

    /// Returns the contenders to measure: those that were `asked` for, which must be among `all`, or by default `usual`, without
    /// peers if there are none.
    pub(crate) fn choose(
        asked: &[Self],
        all: &[Self],
        usual: &[Self],
        with_peers: bool,
    ) -> Result<Vec<Self>> {
        if asked.is_empty() {
            return Ok(usual
                .iter()
                .copied()
                .filter(|contender| with_peers || !contender.is_peer())
                .collect());
        }
        if let Some(other) = asked.iter().find(|contender| !all.contains(contender)) {
            return Err(format!("--contenders: {other} does not take part here: {}", list(all)).into());
        }
        if let Some(peer) = asked.iter().find(|contender| !with_peers && contender.is_peer()) {
            return Err(format!("--contenders: {peer} is another library: add --peers").into());
        }
        let mut chosen = Vec::new();
        for contender in asked {
            if !chosen.contains(contender) {
                chosen.push(*contender);
            }
        }
        Ok(chosen)
    }
}

fn list(contenders: &[Contender]) -> String {
    let names: Vec<_> = contenders.iter().map(Contender::to_string).collect();
    format!("expected some of {}", names.join(", "))
}

impl FromStr for Contender {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(contender, _)| *contender).ok_or_else(|| list(&NAMES.map(|(contender, _)| contender)))
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(contender, _)| contender == self);
        f.pad(name.map_or("", |(_, name)| name))
    }
}

impl Serialize for Contender {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_has_a_name() {
        for contender in TRAIN.into_iter().chain(GEMM) {
            assert_eq!(contender.to_string().parse(), Ok(contender));
        }
        let unknown = "fp9".parse::<Contender>().unwrap_err();
        assert!(unknown.starts_with("expected some of f32, bf16, fp8, "), "{unknown}");
    }

    #[test]
    fn contenders_are_chosen_by_name_or_by_what_there_is() {
        let choose = |asked: &[Contender], with_peers| {
            Contender::choose(asked, &TRAIN, &[F32, Fp8, TorchEager], with_peers)
                .map_err(|error| error.to_string())
        };
        assert_eq!(choose(&[], true), Ok(vec![F32, Fp8, TorchEager]));
        assert_eq!(choose(&[], false), Ok(vec![F32, Fp8]));
        assert_eq!(choose(&[TorchEager, F32, TorchEager], true), Ok(vec![TorchEager, F32]));
        let missing = "--contenders: torch-eager is another library: add --peers".to_owned();
        assert_eq!(choose(&[F32, TorchEager], false), Err(missing));
        let elsewhere = choose(&[Numpy], true).unwrap_err();
        assert!(
            elsewhere.starts_with("--contenders: numpy does not take part here: expected"),
            "{elsewhere}"
        );
    }
}
