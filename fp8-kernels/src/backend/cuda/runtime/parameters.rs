//! Parameters of kernels: typed addresses and numbers, and the list of them that a launch hands to the driver.

use super::memory::Buffer;
use std::ffi::c_void;
use std::marker::PhantomData;

/// The most parameters a kernel here has.
pub(super) const MAX_PARAMETERS: usize = 36;

/// The address of a `const T*`, or null.
#[repr(transparent)]
pub(crate) struct In<T>(u64, PhantomData<fn() -> T>);

/// The address of a `T*`, or null.
#[repr(transparent)]
pub(crate) struct Out<T>(u64, PhantomData<fn() -> T>);

/// Memory whose element type a number beside the address tells.
pub(crate) enum Void {}

/// A source of addresses: a buffer, none (null), or an address.
pub(crate) trait Address {
    fn address(self) -> u64;
}

impl Address for u64 {
    fn address(self) -> u64 {
        self
    }
}

impl Address for &Buffer {
    fn address(self) -> u64 {
        self.ptr()
    }
}

impl Address for Option<&Buffer> {
    fn address(self) -> u64 {
        self.map_or(0, Buffer::ptr)
    }
}

/// `pointees!(f32, float)`: `In::float(address)` and `Out::float(address)`, so that each launch says what its addresses
/// lead to, and does not compile where the kernel says something else.
macro_rules! pointees {
    ($($pointee:ty, $name:ident);* $(;)?) => {$(
        #[allow(dead_code, reason = "most types are either read or written")]
        impl $crate::backend::cuda::runtime::In<$pointee> {
            pub(crate) fn $name(place: impl $crate::backend::cuda::runtime::Address) -> Self {
                Self::new(place.address())
            }
        }

        #[allow(dead_code, reason = "most types are either read or written")]
        impl $crate::backend::cuda::runtime::Out<$pointee> {
            pub(crate) fn $name(place: impl $crate::backend::cuda::runtime::Address) -> Self {
                Self::new(place.address())
            }
        }
    )*};
}
pub(crate) use pointees;

pointees! {
    Void, void; f32, f32; i32, i32; u8, u8; u16, u16; u32, u32; u64, u64; i64, i64; In<f32>, addresses;
}

impl<T> In<T> {
    pub(crate) const fn new(address: u64) -> Self {
        Self(address, PhantomData)
    }
}

impl<T> Out<T> {
    pub(crate) const fn new(address: u64) -> Self {
        Self(address, PhantomData)
    }
}

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

/// Places of a launch's parameters, in the kernel's order.
pub(crate) struct List<'a> {
    pub(super) places: [*mut c_void; MAX_PARAMETERS],
    pub(super) sizes: [usize; MAX_PARAMETERS],
    /// More than [`MAX_PARAMETERS`] fit no kernel.
    pub(super) len: usize,
    parameters: PhantomData<&'a ()>,
}

impl<'a> List<'a> {
    pub(super) const fn new() -> Self {
        let (places, sizes) = ([std::ptr::null_mut(); MAX_PARAMETERS], [0; MAX_PARAMETERS]);
        Self { places, sizes, len: 0, parameters: PhantomData }
    }

    fn push<T>(&mut self, parameter: &'a T) {
        if let (Some(place), Some(size)) = (self.places.get_mut(self.len), self.sizes.get_mut(self.len)) {
            *place = std::ptr::from_ref(parameter).cast_mut().cast();
            *size = size_of::<T>();
        }
        self.len += 1;
    }
}

/// One parameter of a kernel, or several in their order.
pub(crate) trait Parameter {
    fn list<'a>(&'a self, list: &mut List<'a>);
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Parameter for $number {
            fn list<'a>(&'a self, list: &mut List<'a>) {
                list.push(self);
            }
        }
    )*};
}
numbers!(i32, u32, u64, f32);

impl<T> Parameter for In<T> {
    fn list<'a>(&'a self, list: &mut List<'a>) {
        list.push(&self.0);
    }
}

impl<T> Parameter for Out<T> {
    fn list<'a>(&'a self, list: &mut List<'a>) {
        list.push(&self.0);
    }
}

/// The signatures of all kernels, as `cargo xtask ptx` writes them.
macro_rules! signatures {
    (
        pointees $($pointee:ident $function:ident),*;
        $(group $group:ident { $($member:ident: $member_type:ty),* $(,)? })*
        $(kernel $list:ident { $($field:ident: $type:ty),* $(,)? } $($constant:ident = $source:ident $name:literal),+;)*
    ) => {
        $(
            pub(super) enum $pointee {}
            $crate::backend::cuda::runtime::pointees!($pointee, $function);
        )*
        $($crate::backend::cuda::runtime::parameters!($group { $($member: $member_type),* });)*
        $(
            $crate::backend::cuda::runtime::parameters!($list { $($field: $type),* });
            $(
                pub(super) const $constant: $crate::backend::cuda::runtime::Entry<$list> =
                    $crate::backend::cuda::runtime::Entry::new(&Source::$source, $name);
            )*
        )*
    };
}
pub(crate) use signatures;

macro_rules! parameters {
    ($list:ident { $($field:ident: $type:ty),* }) => {
        #[derive(Clone, Copy)]
        pub(super) struct $list {
            $(pub(super) $field: $type),*
        }

        impl $crate::backend::cuda::runtime::Parameter for $list {
            fn list<'a>(&'a self, list: &mut $crate::backend::cuda::runtime::List<'a>) {
                $($crate::backend::cuda::runtime::Parameter::list(&self.$field, list);)*
            }
        }
    };
}
pub(crate) use parameters;
