//! A descriptor of cuDNN's: created, given its attributes, finalized; destroyed when dropped.

use super::library::{Cudnn, Failure, Handle};
use super::numbers::{Attribute, DataType, Kind, ValueType};
use std::ffi::{c_int, c_void};

/// One descriptor. The library keeps no reference to descriptors that another one was made of, as far as is documented; plans
/// keep them alive all the same.
#[derive(Debug)]
pub(super) struct Descriptor {
    library: Cudnn,
    handle: Handle,
}

// SAFETY: descriptors belong to the process, not to a thread; they are used behind the device's lock.
unsafe impl Send for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.library.destroy_descriptor(self.handle);
    }
}

impl Descriptor {
    pub(super) fn new(library: &Cudnn, kind: Kind) -> Result<Self, Failure> {
        Ok(Self { library: *library, handle: library.create_descriptor(kind)? })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    pub(super) fn finalize(self) -> Result<Self, Failure> {
        self.library.finalize(self.handle)?;
        Ok(self)
    }

    fn set<T: Copy>(&self, attribute: Attribute, kind: ValueType, values: &[T]) -> Result<(), Failure> {
        // SAFETY: the callers below give values of the type that they name, as many as the slice has.
        unsafe { self.library.set(self.handle, attribute, kind, values.len(), values.as_ptr().cast()) }
    }

    pub(super) fn ints(self, attribute: Attribute, values: &[i64]) -> Result<Self, Failure> {
        self.set(attribute, ValueType::Int64, values)?;
        Ok(self)
    }

    pub(super) fn double(self, attribute: Attribute, value: f64) -> Result<Self, Failure> {
        self.set(attribute, ValueType::Double, &[value])?;
        Ok(self)
    }

    pub(super) fn flag(self, attribute: Attribute, value: bool) -> Result<Self, Failure> {
        self.set(attribute, ValueType::Boolean, &[value])?;
        Ok(self)
    }

    pub(super) fn data_type(self, attribute: Attribute, value: DataType) -> Result<Self, Failure> {
        self.set(attribute, ValueType::DataType, &[value as c_int])?;
        Ok(self)
    }

    /// Sets an attribute to a number of one of the library's enumerations, which are all `int`.
    pub(super) fn choice(self, attribute: Attribute, kind: ValueType, value: c_int) -> Result<Self, Failure> {
        self.set(attribute, kind, &[value])?;
        Ok(self)
    }

    pub(super) fn descriptors(self, attribute: Attribute, values: &[&Self]) -> Result<Self, Failure> {
        let handles: Vec<Handle> = values.iter().map(|value| value.handle).collect();
        self.set(attribute, ValueType::Descriptor, &handles)?;
        Ok(self)
    }

    pub(super) fn library_handle(self, attribute: Attribute, value: Handle) -> Result<Self, Failure> {
        self.set(attribute, ValueType::Handle, &[value])?;
        Ok(self)
    }

    pub(super) fn pointers(self, attribute: Attribute, values: &[*mut c_void]) -> Result<Self, Failure> {
        self.set(attribute, ValueType::Pointer, values)?;
        Ok(self)
    }

    #[cfg(test)]
    pub(super) fn text(self, attribute: Attribute, value: &str) -> Result<Self, Failure> {
        self.set(attribute, ValueType::Char, value.as_bytes())?;
        Ok(self)
    }

    pub(super) fn get_int(&self, attribute: Attribute) -> Result<i64, Failure> {
        let mut value = 0i64;
        let place = std::ptr::from_mut(&mut value).cast();
        // SAFETY: room for one value of the type.
        unsafe { self.library.get(self.handle, attribute, ValueType::Int64, 1, place) }?;
        Ok(value)
    }

    /// Reads up to `most` descriptors of a kind.
    pub(super) fn get_descriptors(
        &self,
        attribute: Attribute,
        kind: Kind,
        most: usize,
    ) -> Result<Vec<Self>, Failure> {
        let mut found = Vec::with_capacity(most);
        for _ in 0..most {
            found.push(Self::new(&self.library, kind)?);
        }
        let mut handles: Vec<Handle> = found.iter().map(|descriptor| descriptor.handle).collect();
        let place = handles.as_mut_ptr().cast();
        // SAFETY: room for as many descriptors, each created with the kind that the attribute has.
        let count = unsafe { self.library.get(self.handle, attribute, ValueType::Descriptor, most, place) }?;
        // It fills the descriptors that it was given.
        found.truncate(count);
        Ok(found)
    }
}
