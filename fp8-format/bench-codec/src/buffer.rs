//! Memory for measurements: aligned to pages of 2 MiB, touched, of such pages where the system has them.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
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
/// Every pattern of bits is a value.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: a number, and transparent wrappers of numbers.
unsafe impl Plain for u8 {}
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

// SAFETY: it owns its memory alone, and numbers may be read and written by any thread.
unsafe impl<T: Plain + Send> Send for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    pub(crate) fn new(len: usize, value: impl Fn(usize) -> T) -> Result<Self, std::alloc::LayoutError> {
        let layout = Layout::array::<T>(len.max(1))?.align_to(PAGE)?;
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) }.cast::<T>();
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        // SAFETY: the range was just allocated; the advice changes its pages' size alone. Without it pages are small.
        let _ = unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
        let mut buffer = Self { start, len, layout };
        for (i, place) in buffer.iter_mut().enumerate() {
            *place = value(i);
        }
        Ok(buffer)
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements, zeroed when they were allocated, which is a value of each plain type.
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
