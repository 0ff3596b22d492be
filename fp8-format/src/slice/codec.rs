//! How slices are converted: with which instructions, past which caches, by how many threads.

use crate::slice::Path;

/// How slices are converted. The functions of this module are those of `Codec::new()`; all others give the same bits.
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
    /// The fastest path of this machine, on the calling thread.
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

    /// With these instructions.
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

    /// Results go past the caches where source and destination together have more than so many bytes: at once to memory,
    /// without reading first what they overwrite, and without driving other data from the caches. Unless told otherwise
    /// that is where they do not fit the last-level cache.
    ///
    /// Such stores belong to AVX2 and AVX-512; the scalar path and NEON have none. Nor have the stochastic functions and those
    /// from and to f64, on any path, nor `quantize_transpose` unless the columns are a multiple of 1024.
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

    /// Slices of more than 65,536 elements are shared between the threads of rayon's pool.
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

    /// The instructions.
    #[must_use]
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Whether results of so many bytes in and out go past the caches.
    #[inline]
    pub(super) fn streams(&self, bytes: usize) -> bool {
        #[cfg(feature = "std")]
        let most = self.streaming.unwrap_or_else(crate::arch::last_level);
        #[cfg(not(feature = "std"))]
        let most = self.streaming.unwrap_or(usize::MAX);
        bytes > most
    }

    /// `f` of the slices, or of their parts on several threads with the index of each part's first element; the largest of
    /// what it gives.
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

    /// Elements of each thread's parts, where there is more than one part: whole cache lines.
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
