//! The choice of the instructions that the CPU backend uses.

use super::lanes::Portable;
use super::path::CpuPath;
use super::vectors::Vectors;
use crate::{Error, Result};
use std::sync::OnceLock;

/// Whether a product is computed with pairs of bf16 values, on a CPU that has them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pairs {
    /// It would have other bits.
    Never,
    /// If the CPU multiplies pairs faster than f32 values.
    IfFaster,
    /// It takes less time to decode pairs of FP8 codes than to decode f32 values, however they are multiplied.
    Always,
}

impl CpuPath {
    /// Iterates over the paths of this CPU, from the slowest to the fastest.
    ///
    /// ```
    /// use fp8_kernels::CpuPath;
    /// assert_eq!(CpuPath::available().next(), Some(CpuPath::Scalar)); // every CPU has it
    /// ```
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::ALL.into_iter().filter(|path| path.is_available())
    }

    /// Returns the path in use: that of `FP8_CPU_PATH`, or the fastest one available. The variable is read once.
    ///
    /// # Errors
    /// `FP8_CPU_PATH` is not the name of a path that this CPU has.
    ///
    /// ```
    /// println!("the CPU backend uses {}", fp8_kernels::CpuPath::current()?);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn current() -> Result<Self> {
        static CURRENT: OnceLock<std::result::Result<CpuPath, String>> = OnceLock::new();
        let current = CURRENT.get_or_init(|| match crate::environment::cpu_path() {
            None => Ok(Self::best()),
            Some(name) => name.parse().ok().filter(|path: &Self| path.is_available()).ok_or(name),
        });
        current.as_ref().copied().map_err(|name| Self::unavailable(name))
    }

    fn best() -> Self {
        Self::available().next_back().unwrap_or(Self::Scalar)
    }

    fn unavailable(name: &str) -> Error {
        let names: Vec<_> = Self::available().map(Self::name).collect();
        let remedy = format!("this CPU has {}", names.join(", "));
        Error::Environment { name: "FP8_CPU_PATH", value: name.to_owned(), remedy }
    }

    fn is_available(self) -> bool {
        Vectors::detect(self).is_some()
    }

    /// Returns the vectors of a product.
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no other CPU has pairs"))]
    pub(super) fn vectors(self, pairs: Pairs) -> Vectors {
        let vectors = Vectors::detect(self).unwrap_or(Vectors::Scalar(Portable));
        #[cfg(target_arch = "x86_64")]
        if let (true, Some(singles)) = (vectors.has_pairs(), Vectors::detect(Self::Avx512)) {
            static IS_FASTER: OnceLock<bool> = OnceLock::new();
            let takes_pairs = match pairs {
                Pairs::Never => false,
                Pairs::IfFaster => *IS_FASTER.get_or_init(|| super::probe::is_faster(vectors, singles)),
                Pairs::Always => true,
            };
            return if takes_pairs { vectors } else { singles };
        }
        vectors
    }
}
