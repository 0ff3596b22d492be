//! The functions of cuBLASLt that this backend calls, through a table of its own: the file the loader chose, an error for
//! a missing function, integers for results.
//!
//! Descriptors are made by the library (`…Create`), never on the caller's stack: their size has changed between versions.
//! Numbers of attributes and types are those of the header `cublasLt.h`.

use crate::{Encoding, Error, Result};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;

pub(super) type Status = c_int;
/// A library handle, descriptor, layout or preference.
pub(super) type Handle = *mut c_void;

/// Element types, `cudaDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
    /// Two codes a byte, the first in the low half.
    E2m1,
}

impl Type {
    pub(super) const fn number(self) -> c_int {
        match self {
            Self::F32 => 0,
            Self::F16 => 2,
            Self::Bf16 => 14,
            Self::E4m3 => 28,
            Self::E5m2 => 29,
            Self::E2m1 => 33,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "E4M3",
            Self::E5m2 => "E5M2",
            Self::E2m1 => "E2M1",
        }
    }

    const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::E4m3 | Self::E5m2 => 8,
            Self::E2m1 => 4,
        }
    }

    /// The bytes of `count` elements.
    pub(super) const fn bytes(self, count: usize) -> usize {
        (count * self.bits()).div_ceil(8)
    }

    pub(super) const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }

    /// Whether operands of the type have factors.
    pub(super) const fn has_factors(self) -> bool {
        self.is_fp8() || matches!(self, Self::E2m1)
    }
}

impl From<Encoding> for Type {
    fn from(encoding: Encoding) -> Self {
        match encoding {
            Encoding::E4M3 => Self::E4m3,
            Encoding::E5M2 => Self::E5m2,
            Encoding::E2M1 => Self::E2m1,
        }
    }
}

/// Attributes of a product's descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attribute {
    PointerMode = 2,
    TransposeA = 3,
    TransposeB = 4,
    Epilogue = 7,
    Bias = 8,
    ScaleA = 17,
    ScaleB = 18,
    ScaleD = 20,
    AmaxD = 21,
    FastAccumulation = 25,
    BiasType = 26,
    ScaleModeA = 31,
    ScaleModeB = 32,
}

/// The places of alpha and beta.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scalars {
    /// An alpha of 1, and beta.
    Host { beta: f32 },
    /// The addresses of an f32 each, for a descriptor whose pointer mode says so.
    Device { alpha: u64, beta: u64 },
}

impl Scalars {
    /// `cublasLtPointerMode_t`: one alpha and one beta, both on the device.
    pub(super) const DEVICE: c_int = 1;
}

/// Attributes of a search for kernels.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wish {
    WorkspaceBytes = 1,
    ReductionSchemes = 3,
    AlignmentA = 5,
    AlignmentB = 6,
    AlignmentC = 7,
    AlignmentD = 8,
}

/// `cublasLtMatmulAlgo_t`: a kernel, in words that only the library reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Algo(pub(super) [u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Found {
    pub(super) algo: Algo,
    pub(super) workspace: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// The matrices of a product, as handles of their layouts: A, B, C, D.
pub(super) type Layouts = [Handle; 4];

const COMPUTE_F32: c_int = 68;

type GetHeuristic = unsafe extern "C" fn(
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    c_int,
    *mut Found,
    *mut c_int,
) -> Status;
type AlgoCheck =
    unsafe extern "C" fn(Handle, Handle, Handle, Handle, Handle, Handle, *const Algo, *mut Found) -> Status;
type Matmul = unsafe extern "C" fn(
    Handle,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const Algo,
    u64,
    usize,
    *mut c_void,
) -> Status;

/// The library's functions, which may be called from any thread; descriptors are changed behind a lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct CublasLt {
    version: unsafe extern "C" fn() -> usize,
    status_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(*mut Handle) -> Status,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    operation_create: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status,
    operation_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    operation_destroy: unsafe extern "C" fn(Handle) -> Status,
    layout_create: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status,
    layout_destroy: unsafe extern "C" fn(Handle) -> Status,
    preference_create: unsafe extern "C" fn(*mut Handle) -> Status,
    preference_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    preference_destroy: unsafe extern "C" fn(Handle) -> Status,
    get_heuristic: GetHeuristic,
    algo_check: AlgoCheck,
    matmul: Matmul,
}

macro_rules! symbol {
    ($library:expr, $name:literal) => {{
        // SAFETY: the type is the one that cuBLAS's documentation gives this function; the library stays loaded.
        let found = unsafe { $library.get(concat!($name, "\0").as_bytes()) };
        *found.map_err(|_| Error::SymbolMissing {
            library: "libcublasLt".to_owned(),
            symbol: $name.to_owned(),
            remedy: "install cuBLAS 12.1 or newer".to_owned(),
        })?
    }};
}

/// A call that failed.
pub(super) type Failure = (&'static str, Status);

impl CublasLt {
    /// The functions of `library`, which must stay loaded.
    pub(super) fn new(library: &'static Library) -> Result<Self> {
        Ok(Self {
            version: symbol!(library, "cublasLtGetVersion"),
            status_string: symbol!(library, "cublasLtGetStatusString"),
            create: symbol!(library, "cublasLtCreate"),
            destroy: symbol!(library, "cublasLtDestroy"),
            operation_create: symbol!(library, "cublasLtMatmulDescCreate"),
            operation_set: symbol!(library, "cublasLtMatmulDescSetAttribute"),
            operation_destroy: symbol!(library, "cublasLtMatmulDescDestroy"),
            layout_create: symbol!(library, "cublasLtMatrixLayoutCreate"),
            layout_destroy: symbol!(library, "cublasLtMatrixLayoutDestroy"),
            preference_create: symbol!(library, "cublasLtMatmulPreferenceCreate"),
            preference_set: symbol!(library, "cublasLtMatmulPreferenceSetAttribute"),
            preference_destroy: symbol!(library, "cublasLtMatmulPreferenceDestroy"),
            get_heuristic: symbol!(library, "cublasLtMatmulAlgoGetHeuristic"),
            algo_check: symbol!(library, "cublasLtMatmulAlgoCheck"),
            matmul: symbol!(library, "cublasLtMatmul"),
        })
    }

    /// `130100` for 13.1.0.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the function takes no arguments and returns a number.
        unsafe { (self.version)() }
    }

    pub(super) fn describe(&self, status: Status) -> String {
        // SAFETY: takes any integer.
        let text = unsafe { (self.status_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: the library returns a zero-terminated string that lives as long as itself.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// A handle on the current context's device.
    pub(super) fn create(&self) -> Result<Handle, Failure> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` lives through the call.
        ok("cublasLtCreate", unsafe { (self.create)(&mut handle) })?;
        Ok(handle)
    }

    pub(super) fn destroy(&self, handle: Handle) {
        // SAFETY: made by `create` and destroyed once, by its owner's Drop; nothing can be done about a failure.
        unsafe { (self.destroy)(handle) };
    }

    /// A descriptor: sums and factors in f32.
    pub(super) fn operation(&self) -> Result<Handle, Failure> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` lives through the call.
        let status = unsafe { (self.operation_create)(&mut handle, COMPUTE_F32, Type::F32.number()) };
        ok("cublasLtMatmulDescCreate", status)?;
        Ok(handle)
    }

    /// `value` has the type that the header gives for the attribute.
    pub(super) fn set<T: Copy>(
        &self,
        operation: Handle,
        attribute: Attribute,
        value: T,
    ) -> Result<(), Failure> {
        let from = std::ptr::from_ref(&value).cast();
        // SAFETY: the descriptor is alive; `value` lives through the call and has the size given with it.
        let status = unsafe { (self.operation_set)(operation, attribute as c_int, from, size_of::<T>()) };
        ok("cublasLtMatmulDescSetAttribute", status)
    }

    pub(super) fn destroy_operation(&self, handle: Handle) {
        // SAFETY: made by `operation` and destroyed once, by its owner's Drop.
        unsafe { (self.operation_destroy)(handle) };
    }

    /// A column-major matrix without gaps.
    pub(super) fn layout(&self, kind: Type, rows: usize, cols: usize) -> Result<Handle, Failure> {
        let mut handle = std::ptr::null_mut();
        let (rows, cols, ld) = (rows as u64, cols as u64, rows as i64);
        // SAFETY: `handle` lives through the call.
        let status = unsafe { (self.layout_create)(&mut handle, kind.number(), rows, cols, ld) };
        ok("cublasLtMatrixLayoutCreate", status)?;
        Ok(handle)
    }

    pub(super) fn destroy_layout(&self, handle: Handle) {
        // SAFETY: made by `layout` and destroyed once, by its owner's Drop.
        unsafe { (self.layout_destroy)(handle) };
    }

    /// Up to `N` kernels for a product, the one that heuristics like best first.
    pub(super) fn heuristics(
        &self,
        library: Handle,
        operation: Handle,
        [a, b, c, d]: Layouts,
        wishes: &[(Wish, u64)],
        most: usize,
    ) -> Result<Vec<Found>, Failure> {
        let preference = Preference::new(self)?;
        for (wish, value) in wishes {
            preference.set(*wish, *value)?;
        }
        let mut found = vec![MaybeUninit::<Found>::uninit(); most];
        let (requested, mut count) = (c_int::try_from(most).unwrap_or(c_int::MAX), 0);
        // SAFETY: all handles are alive; `found` has room for `requested` results, `count` lives through the call.
        let status = unsafe {
            (self.get_heuristic)(
                library,
                operation,
                a,
                b,
                c,
                d,
                preference.handle,
                requested,
                found.as_mut_ptr().cast(),
                &mut count,
            )
        };
        ok("cublasLtMatmulAlgoGetHeuristic", status)?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        // SAFETY: the library has written the first `count` results.
        let found = found.into_iter().map(|found| unsafe { found.assume_init() });
        Ok(found.filter(|found| found.status == 0).collect())
    }

    /// The workspace that `algo` needs for a product, if it is a kernel for it.
    pub(super) fn check(
        &self,
        library: Handle,
        operation: Handle,
        [a, b, c, d]: Layouts,
        algo: &Algo,
    ) -> Option<Found> {
        let mut found = MaybeUninit::<Found>::uninit();
        // SAFETY: all handles are alive; `algo` and `found` live through the call.
        let status = unsafe { (self.algo_check)(library, operation, a, b, c, d, algo, found.as_mut_ptr()) };
        // SAFETY: after a success the library has written it.
        (status == 0).then(|| unsafe { found.assume_init() }).filter(|found| found.status == 0)
    }

    /// Enqueues `d = alpha · a · b + beta · c`, as the descriptor says.
    ///
    /// # Safety
    /// The addresses name matrices on the device as the layouts say, the workspace has room for what the kernel needs, and
    /// every address in the descriptor names memory of its kind; all are used on `stream` alone. `scalars` are where the
    /// descriptor's pointer mode says.
    #[expect(clippy::too_many_arguments, reason = "cublasLtMatmul's")]
    pub(super) unsafe fn matmul(
        &self,
        library: Handle,
        operation: Handle,
        layouts: Layouts,
        [a, b, c, d]: [u64; 4],
        scalars: Scalars,
        algo: &Algo,
        workspace: (u64, usize),
        stream: *mut c_void,
    ) -> Result<(), Failure> {
        let one = 1.0f32;
        let [a_layout, b_layout, c_layout, d_layout] = layouts;
        let (alpha, beta): (*const c_void, *const c_void) = match &scalars {
            Scalars::Host { beta } => (std::ptr::from_ref(&one).cast(), std::ptr::from_ref(beta).cast()),
            Scalars::Device { alpha, beta } => {
                (std::ptr::without_provenance(*alpha as usize), std::ptr::without_provenance(*beta as usize))
            }
        };
        // SAFETY: factors on the host are read before the call returns; the caller vouches for the rest.
        let status = unsafe {
            (self.matmul)(
                library,
                operation,
                alpha,
                a,
                a_layout,
                b,
                b_layout,
                beta,
                c,
                c_layout,
                d,
                d_layout,
                algo,
                workspace.0,
                workspace.1,
                stream,
            )
        };
        ok("cublasLtMatmul", status)
    }
}

fn ok(call: &'static str, status: Status) -> Result<(), Failure> {
    if status == 0 { Ok(()) } else { Err((call, status)) }
}

/// The preferences of a search for kernels; destroyed when dropped.
struct Preference<'a> {
    library: &'a CublasLt,
    handle: Handle,
}

impl<'a> Preference<'a> {
    fn new(library: &'a CublasLt) -> Result<Self, Failure> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` lives through the call.
        ok("cublasLtMatmulPreferenceCreate", unsafe { (library.preference_create)(&mut handle) })?;
        Ok(Self { library, handle })
    }

    fn set(&self, wish: Wish, value: u64) -> Result<(), Failure> {
        // The workspace is a size; the others are u32, the first half of a little-endian u64.
        let size = if matches!(wish, Wish::WorkspaceBytes) { 8 } else { 4 };
        let from = std::ptr::from_ref(&value).cast();
        // SAFETY: the preference is alive; `value` lives through the call and has at least `size` bytes.
        let status = unsafe { (self.library.preference_set)(self.handle, wish as c_int, from, size) };
        ok("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once.
        unsafe { (self.library.preference_destroy)(self.handle) };
    }
}
