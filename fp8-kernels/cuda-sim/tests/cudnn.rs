//! cuDNN's descriptors: what is refused, each with its status.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod rig;

use std::ffi::{c_int, c_void};

use fp8_cuda_sim::library_path;
use libloading::os::unix::Library;
use rig::rig;

const BAD_PARAM: c_int = 2000;
const NULL: c_int = 2002;
const NOT_FINALIZED: c_int = 2004;
const SHAPE: c_int = 2008;
const TYPE: c_int = 2010;
const NOT_SUPPORTED: c_int = 3000;

struct Api {
    create: unsafe extern "C" fn(c_int, *mut u64) -> c_int,
    destroy: unsafe extern "C" fn(u64) -> c_int,
    set: unsafe extern "C" fn(u64, c_int, c_int, i64, *const c_void) -> c_int,
    finalize: unsafe extern "C" fn(u64) -> c_int,
}

impl Api {
    fn load() -> Self {
        // SAFETY: the library has no initializers.
        let library = unsafe { Library::new(library_path().unwrap()) }.unwrap();
        macro_rules! symbol {
            ($name:literal) => {{
                // SAFETY: the types above are those of cudnn_graph.h; the library stays loaded.
                *unsafe { library.get($name) }.unwrap()
            }};
        }
        let api = Self {
            create: symbol!(b"cudnnBackendCreateDescriptor\0"),
            destroy: symbol!(b"cudnnBackendDestroyDescriptor\0"),
            set: symbol!(b"cudnnBackendSetAttribute\0"),
            finalize: symbol!(b"cudnnBackendFinalize\0"),
        };
        std::mem::forget(library);
        api
    }

    fn made(&self, kind: c_int) -> u64 {
        let mut handle = 0;
        // SAFETY: `handle` lives through the call.
        assert_eq!(unsafe { (self.create)(kind, &mut handle) }, 0);
        handle
    }

    fn set<T>(&self, descriptor: u64, attribute: c_int, kind: c_int, values: &[T]) -> c_int {
        // SAFETY: as many values as are named.
        unsafe { (self.set)(descriptor, attribute, kind, values.len() as i64, values.as_ptr().cast()) }
    }

    fn finalize(&self, descriptor: u64) -> c_int {
        // SAFETY: takes any handle.
        unsafe { (self.finalize)(descriptor) }
    }

    fn destroy(&self, descriptor: u64) -> c_int {
        // SAFETY: takes any handle.
        unsafe { (self.destroy)(descriptor) }
    }

    /// A virtual f32 tensor without gaps.
    fn tensor(&self, id: i64, extents: [i64; 4]) -> u64 {
        let [_, b, c, d] = extents;
        let tensor = self.made(17);
        assert_eq!(self.set(tensor, 901, 1, &[0i32]), 0);
        assert_eq!(self.set(tensor, 902, 3, &extents), 0);
        assert_eq!(self.set(tensor, 903, 3, &[b * c * d, c * d, d, 1]), 0);
        assert_eq!(self.set(tensor, 906, 3, &[id]), 0);
        assert_eq!(self.set(tensor, 907, 2, &[true]), 0);
        tensor
    }
}

#[test]
fn attributes_are_those_of_the_kind_and_of_their_types() {
    let rig = rig();
    let api = Api::load();
    let tensor = api.made(17);
    assert_eq!(api.set(tensor, 1500, 1, &[0i32]), BAD_PARAM, "a matmul's attribute");
    assert_eq!(api.set(tensor, 901, 3, &[0i64]), TYPE);
    assert_eq!(api.set(tensor, 906, 3, &[1i64, 2]), BAD_PARAM, "two ids");
    // SAFETY: the library refuses a null pointer before it reads.
    assert_eq!(unsafe { (api.set)(tensor, 906, 3, 1, std::ptr::null()) }, NULL);
    assert_eq!(api.finalize(tensor), BAD_PARAM, "no extents");
    assert_eq!(api.destroy(tensor), 0);
    assert_eq!(api.set(tensor, 906, 3, &[1i64]), BAD_PARAM, "destroyed");
    let mut handle = 0;
    // SAFETY: `handle` lives through the call.
    assert_eq!(unsafe { (api.create)(12, &mut handle) }, NOT_SUPPORTED, "another kind of operation");
    rig.finish();
}

#[test]
fn a_finalized_descriptor_does_not_change() {
    let rig = rig();
    let api = Api::load();
    let tensor = api.tensor(1, [1, 2, 3, 4]);
    assert_eq!(api.finalize(tensor), 0);
    assert_eq!(api.set(tensor, 906, 3, &[2i64]), BAD_PARAM);
    assert_eq!(api.destroy(tensor), 0);
    rig.finish();
}

#[test]
fn operations_take_finalized_tensors_that_fit() {
    let rig = rig();
    let api = Api::load();
    let (x, y) = (api.tensor(1, [1, 2, 3, 4]), api.tensor(2, [1, 2, 3, 5]));
    let part = api.made(0);
    assert_eq!(api.set(part, 0, 14, &[13i32]), 0);
    assert_eq!(api.set(part, 1, 1, &[0i32]), 0);
    assert_eq!(api.finalize(part), 0);
    let operation = api.made(13);
    for (attribute, of) in [(750, part), (751, x), (753, y)] {
        assert_eq!(api.set(operation, attribute, 15, &[of]), 0);
    }
    assert_eq!(api.finalize(operation), NOT_FINALIZED);
    assert_eq!([x, y].map(|tensor| api.finalize(tensor)), [0, 0]);
    assert_eq!(api.finalize(operation), SHAPE);
    assert_eq!([x, y, part, operation].map(|descriptor| api.destroy(descriptor)), [0; 4]);
    rig.finish();
}
