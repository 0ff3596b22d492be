//! The settings for converting slices: the instructions, the use of caches, the number of threads.

use crate::slice::Path;

/// Chooses how slices are converted: with which instructions, how results are written, on how many threads.
///
/// The free functions of [`slice`](crate::slice) use `Codec::new()`. Every `Codec` gives the same bits. Defaults: the fastest path
/// of this machine, results that bypass the caches if they do not fit the last-level cache, the calling thread alone.
///
/// ```
/// use fp8_format::slice::{Codec, Path};
/// use fp8_format::E4M3;
///
/// let x = [0.1_f32, -0.75, 2.0, 0.0];
/// let mut codes = [[E4M3::ZERO; 4]; 2];
/// Codec::new().from_f32(&x, &mut codes[0])?;
/// Codec::new().on(Path::SCALAR).from_f32(&x, &mut codes[1])?;
/// assert_eq!(codes[0], codes[1]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codec {
    pub(super) path: Path,
    /// `None`: what the last-level cache holds.
    streaming: Option<usize>,
    #[cfg(feature = "rayon")]
    is_parallel: bool,
}

impl Codec {
    /// Creates a codec that uses the fastest path of this machine on the calling thread.
    #[must_use]
    #[inline]
    pub fn new() -> Self {
        Self {
            path: Path::best(),
            streaming: None,
            #[cfg(feature = "rayon")]
            is_parallel: false,
        }
    }

    /// Uses the instructions of `path`.
    ///
    /// ```
    /// use fp8_format::slice::{Codec, Path};
    ///
    /// assert_eq!(Codec::new().path(), Path::best());
    /// assert_eq!(Codec::new().on(Path::SCALAR).path(), Path::SCALAR);
    /// ```
    #[must_use]
    pub const fn on(self, path: Path) -> Self {
        Self { path, ..self }
    }

    /// Writes results directly to memory, bypassing the caches, if source and destination together have more than `bytes` bytes.
    /// Such stores do not read the lines they overwrite and evict nothing from the caches. Default: the size of the last-level
    /// cache.
    ///
    /// Only AVX2 and AVX-512 have such stores. The stochastic functions, those from and to f64, and `quantize_transpose` of a
    /// matrix whose columns are not a multiple of 1024 never use them.
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let codec = Codec::new().streaming_beyond(1 << 20); // bytes: 205 Ki elements of f32 with their codes
    /// let mut codes = vec![E4M3::ZERO; 1 << 18];
    /// codec.from_f32(&vec![0.3; 1 << 18], &mut codes)?;
    /// assert!(codes.iter().all(|x| x.to_f32() == 0.3125));
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    #[must_use]
    pub const fn streaming_beyond(self, bytes: usize) -> Self {
        Self { streaming: Some(bytes), ..self }
    }

    /// Shares slices of more than 65,536 elements between the threads of rayon's pool.
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let (x, mut codes) = (vec![2.2_f32; 1 << 18], vec![E4M3::ZERO; 1 << 18]);
    /// assert_eq!(Codec::new().parallel().quantize(&x, 0.5, &mut codes)?, 2.2);
    /// assert!(codes.iter().all(|x| x.to_f32() == 1.125)); // of 1.1
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    #[cfg(feature = "rayon")]
    #[must_use]
    pub const fn parallel(self) -> Self {
        Self { is_parallel: true, ..self }
    }

    /// Returns the path in use.
    #[must_use]
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Returns true if a call that reads and writes `bytes` bytes in total bypasses the caches.
    #[inline]
    pub(super) fn streams(&self, bytes: usize) -> bool {
        #[cfg(feature = "std")]
        let most = self.streaming.unwrap_or_else(crate::arch::last_level);
        #[cfg(not(feature = "std"))]
        let most = self.streaming.unwrap_or(usize::MAX);
        bytes > most
    }

    /// Calls `f` with the slices, or on several threads with parts of them and the index of each part's first element. Returns the
    /// largest result.
    #[inline]
    pub(super) fn each<S: Sync, D: Send>(
        &self,
        src: &[S],
        dst: &mut [D],
        f: impl Fn(usize, &[S], &mut [D]) -> f32 + Sync,
    ) -> f32 {
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(src.len()) {
            use rayon::prelude::*;
            let parts = src.par_chunks(part).zip(dst.par_chunks_mut(part)).enumerate();
            return parts.map(|(i, (src, dst))| f(i * part, src, dst)).reduce(|| 0.0, f32::max);
        }
        f(0, src, dst)
    }

    /// Returns how many elements a part has, if there is more than one part. Parts are whole cache lines.
    #[cfg(feature = "rayon")]
    pub(super) fn part(&self, len: usize) -> Option<usize> {
        const LEAST: usize = 1 << 16;
        let parts = 4 * rayon::current_num_threads();
        let part = len.div_ceil(parts).next_multiple_of(crate::arch::TILE).max(LEAST);
        (self.is_parallel && part < len).then_some(part)
    }
}

impl Default for Codec {
    fn default() -> Self {
        Self::new()
    }
}
