//! cuBLASLt's functions from the loaded library, and products made with them.

#![allow(dead_code, reason = "every test binary uses a part")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use fp8_cuda_sim::library_path;
use libloading::os::unix::Library;

use crate::rig::Rig;

pub(crate) const F32: i32 = 0;
pub(crate) const F16: i32 = 2;
pub(crate) const BF16: i32 = 14;
pub(crate) const E4M3: i32 = 28;
pub(crate) const E5M2: i32 = 29;
pub(crate) const E2M1: i32 = 33;

pub(crate) const INVALID: i32 = 7;
pub(crate) const NOT_SUPPORTED: i32 = 15;

pub(crate) type Algo = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Found {
    pub(crate) algo: Algo,
    pub(crate) workspace: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! api {
    ($($name:ident($($argument:ty),*);)*) => {
        #[expect(non_snake_case, reason = "cuBLAS's names")]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Api {
            fn load() -> Self {
                // SAFETY: the library has no initializers.
                let library = unsafe { Library::new(library_path().unwrap()) }.unwrap();
                // SAFETY: the types are those of cublasLt.h; the library stays loaded.
                let api = unsafe {
                    Self { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes()).unwrap(),)* }
                };
                std::mem::forget(library);
                api
            }
        }
    };
}

api! {
    cublasLtCreate(*mut u64);
    cublasLtDestroy(u64);
    cublasLtMatmulDescCreate(*mut u64, c_int, c_int);
    cublasLtMatmulDescSetAttribute(u64, c_int, *const c_void, usize);
    cublasLtMatmulDescDestroy(u64);
    cublasLtMatrixLayoutCreate(*mut u64, c_int, u64, u64, i64);
    cublasLtMatrixLayoutDestroy(u64);
    cublasLtMatmulPreferenceCreate(*mut u64);
    cublasLtMatmulPreferenceSetAttribute(u64, c_int, *const c_void, usize);
    cublasLtMatmulPreferenceDestroy(u64);
    cublasLtMatmulAlgoGetHeuristic(u64, u64, u64, u64, u64, u64, u64, c_int, *mut Found, *mut c_int);
    cublasLtMatmulAlgoCheck(u64, u64, u64, u64, u64, u64, *const Algo, *mut Found);
    cublasLtMatmul(
        u64, u64, *const f32, u64, u64, u64, u64, *const f32, u64, u64, u64, u64, *const Algo, u64, usize, *mut c_void
    );
}

/// Type, rows, columns and leading dimension: A, B, C, D.
pub(crate) type Layouts = [(i32, u64, u64, i64); 4];

/// `D = alpha · scales · op(A) · op(B) + beta · scale · C + bias`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// A, B, C, D.
    pub(crate) types: [i32; 4],
    /// m, n, k.
    pub(crate) sizes: [usize; 3],
    pub(crate) transposed: [bool; 2],
    /// By how much leading dimensions exceed the rows.
    pub(crate) gap: usize,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// Its type.
    pub(crate) bias: Option<i32>,
    pub(crate) scales: [Option<f32>; 4],
    pub(crate) amax: bool,
    pub(crate) fast: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            types: [E4M3, E4M3, BF16, BF16],
            sizes: [32, 16, 32],
            transposed: [true, false],
            gap: 0,
            alpha: 1.0,
            beta: 0.0,
            bias: None,
            scales: [None; 4],
            amax: false,
            fast: false,
        }
    }
}

impl Case {
    /// With a scale for every matrix in FP8, as heuristics want it.
    pub(crate) fn scaled(&self) -> Self {
        let mut scales = self.scales;
        for i in [0, 1, 3] {
            scales[i] = scales[i].or(is_fp8(self.types[i]).then_some(1.0));
        }
        Self { scales, ..*self }
    }

    /// The attributes with the addresses that it sets: scales, amax and bias.
    fn attributes(&self) -> Vec<c_int> {
        let scales = [17, 18, 19, 20].into_iter().zip(self.scales.map(|scale| scale.is_some()));
        let all = scales.chain([(21, self.amax), (8, self.bias.is_some())]);
        all.filter(|(_, is_set)| *is_set).map(|(attribute, _)| attribute).collect()
    }

    pub(crate) fn layouts(&self) -> Layouts {
        let [m, n, k] = self.sizes;
        let flip = |rows, cols, flipped| if flipped { [cols, rows] } else { [rows, cols] };
        let extents = [flip(m, k, self.transposed[0]), flip(k, n, self.transposed[1]), [m, n], [m, n]];
        let layout = |i: usize| {
            let [rows, cols] = extents[i];
            (self.types[i], rows as u64, cols as u64, (rows + self.gap) as i64)
        };
        [layout(0), layout(1), layout(2), layout(3)]
    }
}

/// Whether a type is FP8.
const fn is_fp8(kind: i32) -> bool {
    kind == E4M3 || kind == E5M2
}

/// The element of matrix `which` at row `i`, column `j`: an integer from −2 to 2.
pub(crate) fn value(which: usize, i: usize, j: usize) -> f64 {
    ((i * 7 + j * 3 + which * 11 + i * j) % 5) as f64 - 2.0
}

/// Returns the value of an FP8 code; NaN for NaNs and infinities.
fn fp8(code: u8, kind: i32) -> f64 {
    let (mantissa_bits, bias) = if kind == E4M3 { (3, 7) } else { (2, 15) };
    let exponent = i32::from((code & 0x7f) >> mantissa_bits);
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let sign = if code >= 128 { -1.0 } else { 1.0 };
    match exponent {
        15 if kind == E4M3 && mantissa == 0.875 => f64::NAN,
        31 => f64::NAN,
        0 => sign * mantissa * 2f64.powi(1 - bias),
        _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
    }
}

/// The nearest code; of two the even one; the largest for what is beyond.
fn nearest(value: f64, kind: i32) -> u8 {
    let distance = |code: u8| (fp8(code, kind) - value).abs();
    let finite = (0..=255u8).filter(|code| !fp8(*code, kind).is_nan() && (*code >= 128) == (value < 0.0));
    finite.min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

pub(crate) fn encode(value: f64, kind: i32) -> Vec<u8> {
    match kind {
        F32 => (value as f32).to_le_bytes().to_vec(),
        F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
        BF16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
        _ => vec![nearest(value, kind)],
    }
}

pub(crate) fn decode(bytes: &[u8], kind: i32) -> f64 {
    let two = || u16::from_le_bytes(bytes.try_into().unwrap());
    match kind {
        F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        F16 => half::f16::from_bits(two()).to_f64(),
        BF16 => half::bf16::from_bits(two()).to_f64(),
        _ => fp8(bytes[0], kind),
    }
}

/// The value in the type.
pub(crate) fn round(value: f64, kind: i32) -> f64 {
    decode(&encode(value, kind), kind)
}

const fn size(kind: i32) -> usize {
    match kind {
        F32 => 4,
        F16 | BF16 => 2,
        _ => 1,
    }
}

/// A library handle and a stream.
pub(crate) struct Lab<'a> {
    pub(crate) api: Api,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) library: u64,
    /// Zeros, for the addresses of factors and biases that no product reads.
    zeros: CudaSlice<u8>,
    _rig: &'a Rig,
}

impl Drop for Lab<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { (self.api.cublasLtDestroy)(self.library) };
    }
}

impl<'a> Lab<'a> {
    pub(crate) fn new(rig: &'a Rig) -> Self {
        let (api, mut library) = (Api::load(), 0);
        // SAFETY: the handle lives through the call.
        assert_eq!(unsafe { (api.cublasLtCreate)(&mut library) }, 0);
        let stream = rig.context.new_stream().unwrap();
        let zeros = stream.alloc_zeros(4096).unwrap();
        Self { api, stream, library, zeros, _rig: rig }
    }

    pub(crate) fn address(&self, slice: &CudaSlice<u8>) -> u64 {
        slice.device_ptr(&self.stream).0
    }

    pub(crate) fn address_f32(&self, slice: &CudaSlice<f32>) -> u64 {
        slice.device_ptr(&self.stream).0
    }

    pub(crate) fn set(&self, operation: u64, attribute: c_int, value: &[u8]) -> i32 {
        // SAFETY: the value lives through the call and has the size given with it.
        unsafe {
            (self.api.cublasLtMatmulDescSetAttribute)(
                operation,
                attribute,
                value.as_ptr().cast(),
                value.len(),
            )
        }
    }

    /// A descriptor without addresses.
    pub(crate) fn operation(&self, case: &Case) -> u64 {
        let mut operation = 0;
        // SAFETY: the handle lives through the call.
        assert_eq!(unsafe { (self.api.cublasLtMatmulDescCreate)(&mut operation, 68, 0) }, 0);
        for (attribute, transposed) in [3, 4].into_iter().zip(case.transposed) {
            assert_eq!(self.set(operation, attribute, &i32::from(transposed).to_le_bytes()), 0);
        }
        assert_eq!(self.set(operation, 25, &[u8::from(case.fast)]), 0);
        if let Some(kind) = case.bias {
            assert_eq!(self.set(operation, 7, &4u32.to_le_bytes()), 0);
            assert_eq!(self.set(operation, 26, &kind.to_le_bytes()), 0);
        }
        operation
    }

    /// A descriptor with the addresses that the case sets, each of zeros.
    pub(crate) fn addressed(&self, case: &Case) -> u64 {
        let (operation, at) = (self.operation(case), self.address(&self.zeros));
        for attribute in case.attributes() {
            assert_eq!(self.set(operation, attribute, &at.to_le_bytes()), 0);
        }
        operation
    }

    pub(crate) fn destroy_operation(&self, operation: u64) {
        // SAFETY: made by `operation`.
        assert_eq!(unsafe { (self.api.cublasLtMatmulDescDestroy)(operation) }, 0);
    }

    fn with_layouts<T>(&self, layouts: Layouts, with: impl FnOnce([u64; 4]) -> T) -> T {
        let mut handles = [0; 4];
        for (handle, (kind, rows, cols, ld)) in handles.iter_mut().zip(layouts) {
            // SAFETY: the handle lives through the call.
            assert_eq!(unsafe { (self.api.cublasLtMatrixLayoutCreate)(handle, kind, rows, cols, ld) }, 0);
        }
        let result = with(handles);
        for handle in handles {
            // SAFETY: made above, destroyed once.
            assert_eq!(unsafe { (self.api.cublasLtMatrixLayoutDestroy)(handle) }, 0);
        }
        result
    }

    fn find(&self, operation: u64, layouts: Layouts, room: u64, most: usize) -> Result<Vec<Found>, i32> {
        let (mut preference, mut count) = (0, 0);
        let mut found = vec![Found::default(); most.max(1)];
        // SAFETY: all handles are alive, `found` has room for `most`.
        let status = self.with_layouts(layouts, |[a, b, c, d]| unsafe {
            assert_eq!((self.api.cublasLtMatmulPreferenceCreate)(&mut preference), 0);
            let set = self.api.cublasLtMatmulPreferenceSetAttribute;
            assert_eq!(set(preference, 1, std::ptr::from_ref(&room).cast(), 8), 0);
            let most = c_int::try_from(most).unwrap();
            let find = self.api.cublasLtMatmulAlgoGetHeuristic;
            let results = found.as_mut_ptr();
            let status = find(self.library, operation, a, b, c, d, preference, most, results, &mut count);
            assert_eq!((self.api.cublasLtMatmulPreferenceDestroy)(preference), 0);
            status
        });
        found.truncate(usize::try_from(count).unwrap());
        if status == 0 { Ok(found) } else { Err(status) }
    }

    /// With the addresses of all scales that there are.
    pub(crate) fn heuristics(&self, case: &Case, room: u64, most: usize) -> Result<Vec<Found>, i32> {
        let operation = self.addressed(&case.scaled());
        let found = self.find(operation, case.layouts(), room, most);
        self.destroy_operation(operation);
        found
    }

    /// Returns the answer of the heuristics for a descriptor as it is.
    pub(crate) fn heuristics_of(&self, operation: u64, case: &Case) -> Result<Vec<Found>, i32> {
        self.find(operation, case.layouts(), 0, 1)
    }

    /// With the addresses of all scales that there are.
    pub(crate) fn check(&self, case: &Case, algo: &Algo) -> Result<Found, i32> {
        let operation = self.addressed(&case.scaled());
        let found = self.check_of(operation, case, algo);
        self.destroy_operation(operation);
        found
    }

    /// Checks a kernel against a descriptor as it is and returns the answer.
    pub(crate) fn check_of(&self, operation: u64, case: &Case, algo: &Algo) -> Result<Found, i32> {
        let mut found = Found::default();
        // SAFETY: all handles are alive, `algo` and `found` live through the call.
        let status = self.with_layouts(case.layouts(), |[a, b, c, d]| unsafe {
            (self.api.cublasLtMatmulAlgoCheck)(self.library, operation, a, b, c, d, algo, &mut found)
        });
        if status == 0 { Ok(found) } else { Err(status) }
    }

    /// With `alpha` 1.
    pub(crate) fn multiply(
        &self,
        operation: u64,
        layouts: Layouts,
        places: [u64; 4],
        beta: f32,
        algo: Option<&Algo>,
        workspace: (u64, usize),
    ) -> i32 {
        self.enqueue(self.library, operation, layouts, places, [1.0, beta], algo, workspace)
    }

    /// By the library of that handle.
    pub(crate) fn multiply_by(
        &self,
        library: u64,
        operation: u64,
        layouts: Layouts,
        places: [u64; 4],
    ) -> i32 {
        self.enqueue(library, operation, layouts, places, [1.0, 0.0], None, (0, 0))
    }

    /// With the factors at these addresses on the device, as the descriptor must say.
    pub(crate) fn multiply_on_device(
        &self,
        operation: u64,
        layouts: Layouts,
        places: [u64; 4],
        scalars: [u64; 2],
    ) -> i32 {
        let scalars = scalars.map(|at| std::ptr::without_provenance(at as usize));
        self.enqueue_at(self.library, operation, layouts, places, scalars, None, (0, 0))
    }

    #[expect(clippy::too_many_arguments, reason = "cublasLtMatmul's")]
    fn enqueue(
        &self,
        library: u64,
        operation: u64,
        layouts: Layouts,
        places: [u64; 4],
        [alpha, beta]: [f32; 2],
        algo: Option<&Algo>,
        workspace: (u64, usize),
    ) -> i32 {
        self.enqueue_at(library, operation, layouts, places, [&alpha, &beta], algo, workspace)
    }

    #[expect(clippy::too_many_arguments, reason = "cublasLtMatmul's")]
    fn enqueue_at(
        &self,
        library: u64,
        operation: u64,
        layouts: Layouts,
        [a, b, c, d]: [u64; 4],
        [alpha, beta]: [*const f32; 2],
        algo: Option<&Algo>,
        (workspace, bytes): (u64, usize),
    ) -> i32 {
        let algo = algo.map_or(std::ptr::null(), std::ptr::from_ref);
        let stream = self.stream.cu_stream().cast();
        // SAFETY: the simulator checks handles and addresses; factors live through the call.
        self.with_layouts(layouts, |[la, lb, lc, ld]| unsafe {
            (self.api.cublasLtMatmul)(
                library, operation, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace, bytes, stream,
            )
        })
    }

    /// Returns the status codes of the heuristics and of the product itself, on memory that exists.
    pub(crate) fn codes(&self, case: &Case) -> [i32; 2] {
        let buffer = self.stream.alloc_zeros::<u8>(1 << 16).unwrap();
        let (at, layouts) = (self.address(&buffer), case.layouts());
        // A C of another type than D is another matrix; it is not read.
        let c = if layouts[2] == layouts[3] { at } else { 0 };
        self.codes_of(case, layouts, [at, at, c, at])
    }

    pub(crate) fn codes_of(&self, case: &Case, layouts: Layouts, places: [u64; 4]) -> [i32; 2] {
        let operation = self.addressed(&case.scaled());
        let found = self.find(operation, layouts, 0, 1).err().unwrap_or(0);
        let run = self.multiply(operation, layouts, places, case.beta, None, (0, 0));
        self.destroy_operation(operation);
        [found, run]
    }

    /// D without its gaps, and the amax. Gaps stay as they were.
    pub(crate) fn run(&self, case: &Case) -> (Vec<f64>, f32) {
        let (case, layouts) = (&case.scaled(), case.layouts());
        let upload = |bytes: &[u8]| self.stream.clone_htod(bytes).unwrap();
        let matrix = |which: usize| {
            let (kind, rows, cols, ld) = layouts[which];
            let element = |at: usize| {
                let (i, j) = (at % ld as usize, at / ld as usize);
                let flipped = case.transposed.get(which) == Some(&true);
                match i < rows as usize {
                    true if which == 3 => vec![0xee; size(kind)],
                    true => encode(if flipped { value(which, j, i) } else { value(which, i, j) }, kind),
                    false => vec![0x7f; size(kind)],
                }
            };
            upload(&(0..ld as usize * cols as usize).flat_map(element).collect::<Vec<_>>())
        };
        let matrices = [matrix(0), matrix(1), matrix(2), matrix(3)];
        let operation = self.operation(case);
        let mut factors: Vec<f32> = case.scales.iter().map(|scale| scale.unwrap_or(f32::NAN)).collect();
        factors.push(1e30);
        let factors = upload(&factors.iter().flat_map(|factor| factor.to_le_bytes()).collect::<Vec<_>>());
        let wanted = [0, 1, 2, 3].map(|i| case.scales[i].is_some()).into_iter().chain([case.amax]);
        for (i, _) in wanted.enumerate().filter(|(_, wanted)| *wanted) {
            let address = self.address(&factors) + 4 * i as u64;
            assert_eq!(self.set(operation, 17 + i as c_int, &address.to_le_bytes()), 0);
        }
        let bias = case.bias.map(|kind| {
            let values: Vec<u8> = (0..case.sizes[0]).flat_map(|i| encode(value(3, i, 0), kind)).collect();
            let bias = upload(&values);
            assert_eq!(self.set(operation, 8, &self.address(&bias).to_le_bytes()), 0);
            bias
        });
        let places = [0, 1, 2, 3].map(|i| self.address(&matrices[i]));
        // The kernel that takes workspace.
        let found = self.find(operation, layouts, 64 << 10, 3).unwrap();
        let workspace = self.stream.alloc_zeros::<u8>(64 << 10).unwrap();
        let room = (self.address(&workspace), 64 << 10);
        let factors_of = [case.alpha, case.beta];
        let algo = found.last().map(|found| &found.algo);
        assert_eq!(
            self.enqueue(self.library, operation, layouts, places, factors_of, algo, room),
            0,
            "{case:?}"
        );
        self.destroy_operation(operation);
        drop(bias);
        let (kind, rows, _, ld) = layouts[3];
        let back = self.stream.clone_dtoh(&matrices[3]).unwrap();
        let mut result = Vec::new();
        for (at, bytes) in back.chunks(size(kind)).enumerate() {
            if at % (ld as usize) < rows as usize {
                result.push(decode(bytes, kind));
            } else {
                assert!(bytes.iter().all(|byte| *byte == 0x7f), "a gap was written");
            }
        }
        let factors = self.stream.clone_dtoh(&factors).unwrap();
        (result, decode(&factors[16..], F32) as f32)
    }
}
