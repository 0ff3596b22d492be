//! Pointers that callers pass over the C interface, wrapped so that each is checked once and in one place.
//!
//! Every wrapper is `repr(transparent)` over the pointer, so it stands in an `extern "C"` signature. Their
//! methods rest on the C contract of the entry point that received them: a pointer is null, or valid for the
//! documented access. Null is refused with `CUDA_ERROR_INVALID_VALUE` ("one or more of the parameters passed to
//! the API call is not within an acceptable range of values").

use core::ffi::{CStr, c_char};

use crate::code::{Code, Outcome};

/// An out-parameter: room for one `T`.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Refuses a null pointer before the call has any effect.
    pub(crate) fn checked(self) -> Outcome<Self> {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(self) }
    }

    /// Stores `value`; null is refused.
    pub(crate) fn set(self, value: T) -> Outcome {
        let place = self.checked()?;
        // SAFETY: not null, and the caller of the entry point provides room for one `T`; unaligned stores are allowed.
        unsafe { place.0.write_unaligned(value) };
        Ok(())
    }

    /// Stores `value` unless the pointer is null: for out-parameters that are documented as optional.
    pub(crate) fn set_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, and the caller of the entry point provides room for one `T`.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Stores all elements: the caller asked for their number and provides that much room.
    pub(crate) fn set_all(self, values: &[T]) -> Outcome
    where
        T: Copy,
    {
        let place = self.checked()?;
        // SAFETY: the entry point's contract is room for as many elements as its sibling reports: `values.len()`.
        unsafe { core::ptr::copy_nonoverlapping(values.as_ptr(), place.0, values.len()) };
        Ok(())
    }

    /// The same room as another type, for attributes whose type depends on the attribute's number.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The value stored there, for attributes that are passed by pointer.
    pub(crate) fn value(self) -> Outcome<T>
    where
        T: Copy,
    {
        let place = self.checked()?;
        // SAFETY: not null, and the caller of the entry point stored a `T` there.
        Ok(unsafe { place.0.read_unaligned() })
    }

    /// Stores a text of at most `room` bytes with its final NUL, cut where it is longer.
    pub(crate) fn set_text(self, text: &str, room: usize) -> Outcome
    where
        T: Text,
    {
        let place = self.checked()?;
        let Some(most) = room.checked_sub(1) else { return Err(Code::INVALID_VALUE) };
        let bytes = text.as_bytes();
        let length = bytes.len().min(most);
        let place = place.0.cast::<u8>();
        // SAFETY: the caller provides `room` bytes, and `length + 1 <= room`.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), place, length) };
        // SAFETY: `length < room`, so the offset stays inside the caller's buffer.
        let end = unsafe { place.add(length) };
        // SAFETY: `end` is the byte behind the copied text, inside the caller's buffer.
        unsafe { end.write(0) };
        Ok(())
    }

    /// Stores all of `bytes`: the caller asked for the size and provides that much room.
    pub(crate) fn set_bytes(self, bytes: &[u8]) -> Outcome
    where
        T: Text,
    {
        let place = self.checked()?;
        // SAFETY: the entry point's contract is room for the size that its sibling (`…Size`) reports: `bytes.len()`.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), place.0.cast(), bytes.len()) };
        Ok(())
    }
}

/// Element types of character buffers.
pub(crate) trait Text {}
impl Text for c_char {}

/// A text parameter (`const char *`).
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct In(*const c_char);

impl In {
    /// The text, copied; `None` where the pointer is null.
    pub(crate) fn optional(self) -> Option<Vec<u8>> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null, so by the C contract a NUL-terminated text that lives during the call.
        Some(unsafe { CStr::from_ptr(self.0) }.to_bytes().to_vec())
    }

    /// The text as UTF-8, refusing null and other bytes.
    pub(crate) fn text(self) -> Outcome<String> {
        String::from_utf8(self.optional().ok_or(Code::INVALID_VALUE)?).map_err(|_| Code::INVALID_VALUE)
    }
}

/// An array parameter of `const T`.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Array<T>(*const T);

impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Array<T> {}

impl<T: Copy> Array<T> {
    /// The array at an address that a caller passed without a type.
    pub(crate) fn at(host: Host) -> Self {
        Self(std::ptr::with_exposed_provenance(host.0))
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// A copy of the first `count` elements; null is refused unless `count` is zero.
    pub(crate) fn take(self, count: usize) -> Outcome<Vec<T>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut all = Vec::with_capacity(count.min(1 << 20));
        for index in 0..count {
            // SAFETY: the caller's array has `count` elements, and `index < count`.
            let element = unsafe { self.0.add(index) };
            // SAFETY: `element` lies inside the caller's array; unaligned loads are allowed.
            all.push(unsafe { element.read_unaligned() });
        }
        Ok(all)
    }
}

/// Host memory that the caller names by address, read or written by a copy now or at a later time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Host(usize);

impl Host {
    /// The address of bytes of this process.
    #[cfg(test)]
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(bytes.as_ptr().expose_provenance())
    }

    /// An address that was passed inside an array.
    pub(crate) fn at(address: usize) -> Self {
        Self(address)
    }

    pub(crate) fn address(self) -> usize {
        self.0
    }

    /// A copy of `count` bytes at this address.
    pub(crate) fn read(self, count: usize) -> Outcome<Vec<u8>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        if self.0 == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(count).map_err(|_| Code::INVALID_VALUE)?;
        // SAFETY: the caller promises `count` readable bytes there until the copy is done; the vector has room.
        unsafe {
            core::ptr::copy_nonoverlapping(
                std::ptr::with_exposed_provenance::<u8>(self.0),
                bytes.as_mut_ptr(),
                count,
            )
        };
        // SAFETY: the first `count` bytes were just written, and the capacity is at least `count`.
        unsafe { bytes.set_len(count) };
        Ok(bytes)
    }

    /// Stores `bytes` at this address.
    pub(crate) fn write(self, bytes: &[u8]) -> Outcome {
        if bytes.is_empty() {
            return Ok(());
        }
        if self.0 == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller promises room for the bytes it asked for until the copy is done; `bytes` is our own.
        unsafe {
            core::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                std::ptr::with_exposed_provenance_mut::<u8>(self.0),
                bytes.len(),
            )
        };
        Ok(())
    }

    /// The NUL-terminated text at this address.
    pub(crate) fn c_text(self) -> Outcome<Vec<u8>> {
        In(std::ptr::with_exposed_provenance(self.0)).optional().ok_or(Code::INVALID_VALUE)
    }
}
