//! Memory for measurements: aligned to 2 MiB, written before use, in pages of 2 MiB or of the usual size.

use std::alloc::{Layout, alloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

const PAGE: usize = 2 << 20;

/// Elements of a type whose every pattern of bits is a value.
pub(crate) struct Buffer<T> {
    start: NonNull<T>,
    len: usize,
    layout: Layout,
}

/// Plain numbers.
///
/// # Safety
/// Every pattern of bits is a value, and there is no padding.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: a number, and transparent wrappers of numbers.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for [u8; 2] {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for half::f16 {}
// SAFETY: as above.
unsafe impl Plain for half::bf16 {}
// SAFETY: as above.
unsafe impl Plain for fp8_format::E4M3 {}
// SAFETY: as above.
unsafe impl Plain for fp8_format::E5M2 {}
// SAFETY: as above.
unsafe impl Plain for fp8_format::E8M0 {}

// SAFETY: it owns its memory alone, and numbers may be read and written by any thread.
unsafe impl<T: Plain + Send> Send for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// Allocates `len` elements, in pages of 2 MiB if `has_huge_pages`, and sets each to `value` of its index.
    pub(crate) fn new(
        len: usize,
        has_huge_pages: bool,
        value: impl Fn(usize) -> T,
    ) -> Result<Self, std::alloc::LayoutError> {
        let layout = Layout::array::<T>(len.max(1))?.align_to(PAGE)?;
        // `alloc_zeroed` would write to the memory, and so fix the size of its pages before the advice below.
        // SAFETY: the size is not 0.
        let start = unsafe { alloc(layout) }.cast::<T>();
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        {
            let advice = if has_huge_pages { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
            // SAFETY: the range was just allocated; the advice changes only the size of its pages. It may be ignored.
            let _ = unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), advice) };
        }
        // SAFETY: the range was just allocated for `len` elements.
        unsafe { start.write_bytes(0, len) };
        let mut buffer = Self { start, len, layout };
        for (i, place) in buffer.iter_mut().enumerate() {
            *place = value(i);
        }
        Ok(buffer)
    }
}

impl<T: Plain> Buffer<T> {
    /// Returns the elements as bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: plain types have no padding; the elements are initialized, and borrowed as long as their bytes.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), size_of_val::<[T]>(self)) }
    }

    /// Returns the elements as bytes that may be overwritten with any others.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and any bytes are values of a plain type; borrowed uniquely.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr().cast(), size_of_val::<[T]>(self)) }
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements, zeroed after their allocation; zero is a value of every plain type.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; borrowed uniquely.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr().cast(), self.layout) };
    }
}
