//! The instruction sets that conversions can use.

mod parse;

use core::fmt;

/// An instruction set that slices are converted with: scalar, AVX2, AVX-512 or NEON. All give the same bits.
///
/// ```
/// use fp8_format::slice::Path;
///
/// assert_eq!(Path::available().next(), Some(Path::SCALAR)); // every machine has it
/// assert_eq!(Path::available().last(), Some(Path::best()));
/// assert!("avx3".parse::<Path>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path(pub(crate) Kind);

/// Every path that this target knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Scalar,
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    Avx2,
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    Avx512,
    #[cfg(all(target_arch = "aarch64", feature = "std"))]
    Neon,
}

impl Kind {
    /// From the slowest to the fastest.
    const ALL: &[Self] = &[
        Self::Scalar,
        #[cfg(all(target_arch = "x86_64", feature = "std"))]
        Self::Avx2,
        #[cfg(all(target_arch = "x86_64", feature = "std"))]
        Self::Avx512,
        #[cfg(all(target_arch = "aarch64", feature = "std"))]
        Self::Neon,
    ];

    fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(all(target_arch = "x86_64", feature = "std"))]
            Self::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c")
            }
            #[cfg(all(target_arch = "x86_64", feature = "std"))]
            Self::Avx512 => {
                // Miri knows few of these instructions.
                !cfg!(miri)
                    && Self::Avx2.is_available()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512vbmi")
            }
            #[cfg(all(target_arch = "aarch64", feature = "std"))]
            Self::Neon => {
                // Miri knows few of these instructions, and the order of bytes in vectors is taken to be the usual one.
                !cfg!(miri)
                    && cfg!(target_endian = "little")
                    && std::arch::is_aarch64_feature_detected!("neon")
            }
        }
    }
}

impl Path {
    /// Portable code, one element at a time (the compiler may still vectorize its loops).
    pub const SCALAR: Self = Self(Kind::Scalar);

    /// Iterates over the paths of this machine, from the slowest to the fastest. Without feature `std`, only
    /// [`SCALAR`](Self::SCALAR).
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Kind::ALL.iter().filter(|kind| kind.is_available()).map(|kind| Self(*kind))
    }

    /// Returns the fastest path of this machine. The CPU is queried once.
    #[must_use]
    #[inline]
    pub fn best() -> Self {
        #[cfg(feature = "std")]
        {
            static BEST: std::sync::OnceLock<Path> = std::sync::OnceLock::new();
            *BEST.get_or_init(|| Self::available().next_back().unwrap_or(Self::SCALAR))
        }
        #[cfg(not(feature = "std"))]
        Self::SCALAR
    }

    /// Returns `scalar`, `avx2`, `avx512` or `neon`, which `Display` writes and `FromStr` parses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            Kind::Scalar => "scalar",
            #[cfg(all(target_arch = "x86_64", feature = "std"))]
            Kind::Avx2 => "avx2",
            #[cfg(all(target_arch = "x86_64", feature = "std"))]
            Kind::Avx512 => "avx512",
            #[cfg(all(target_arch = "aarch64", feature = "std"))]
            Kind::Neon => "neon",
        }
    }
}

impl Default for Path {
    fn default() -> Self {
        Self::best()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
