//! NVRTC's functions as a host calls them, and the way from source to a running kernel on each architecture.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls of the C interface, one after another under one contract"
)]

mod rig;

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use cudarc::driver::{CudaContext, PushKernelArg};
use cudarc::nvrtc::Ptx;
use libloading::os::unix::Library;
use rig::{code, rig, shape, turn};
use sha2::{Digest, Sha256};

const SOURCE: &str = "extern \"C\" __global__ void add_one(unsigned *x, unsigned n) { … }";
const OPTIONS: [&str; 3] = ["-std=c++17", "-fmad=false", "-lineinfo"];

type Program = *mut c_void;

/// A program of the simulated NVRTC; destroyed when dropped.
struct Compiled {
    library: Library,
    program: Program,
    status: c_int,
}

impl Compiled {
    fn new(source: &str, options: &[&str]) -> Self {
        let path = fp8_cuda_sim::library_path().unwrap();
        // SAFETY: the library is loaded already and has no initializers.
        let library = unsafe { Library::new(path) }.unwrap();
        let (source, options): (CString, Vec<CString>) = (
            CString::new(source).unwrap(),
            options.iter().map(|option| CString::new(*option).unwrap()).collect(),
        );
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        // SAFETY: the types are NVRTC's; every pointer lives through its call.
        let status = unsafe {
            let create = library.get::<Create>(b"nvrtcCreateProgram").unwrap();
            let none = std::ptr::null();
            assert_eq!(create(&mut program, source.as_ptr(), c"add.cu".as_ptr(), 0, none, none), 0);
            library.get::<Compile>(b"nvrtcCompileProgram").unwrap()(
                program,
                pointers.len() as c_int,
                pointers.as_ptr(),
            )
        };
        Self { library, program, status }
    }

    /// The bytes of one of NVRTC's getters, by the pair of its names.
    fn bytes(&self, size: &str, text: &str) -> Result<Vec<u8>, c_int> {
        let mut count = 0usize;
        // SAFETY: the types are NVRTC's; the buffer has the size that NVRTC asked for.
        unsafe {
            let size = self
                .library
                .get::<unsafe extern "C" fn(Program, *mut usize) -> c_int>(size.as_bytes())
                .unwrap();
            let text =
                self.library.get::<unsafe extern "C" fn(Program, *mut u8) -> c_int>(text.as_bytes()).unwrap();
            let status = size(self.program, &mut count);
            if status != 0 {
                return Err(status);
            }
            let mut bytes = vec![0; count];
            match text(self.program, bytes.as_mut_ptr()) {
                0 => Ok(bytes),
                status => Err(status),
            }
        }
    }

    fn log(&self) -> String {
        let bytes = self.bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").unwrap();
        CStr::from_bytes_with_nul(&bytes).unwrap().to_str().unwrap().to_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, c_int> {
        self.bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        // SAFETY: the type is NVRTC's; the program is destroyed once.
        let status = unsafe {
            let destroy = self
                .library
                .get::<unsafe extern "C" fn(*mut Program) -> c_int>(b"nvrtcDestroyProgram")
                .unwrap();
            destroy(&mut self.program)
        };
        assert_eq!((status, self.program.is_null()), (0, true));
    }
}

fn snapshot(source: &str) -> String {
    let hash: String = Sha256::digest(source).iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "// fp8-kernels kernel snapshot: add.cu\n// source sha256: {hash}\n// options: {}\n// nvrtc: 13.0.88\n{}",
        OPTIONS.join(" "),
        rig::PTX
    )
}

fn with_arch(arch: &str) -> Vec<&str> {
    OPTIONS.iter().copied().chain([arch]).collect()
}

#[test]
fn source_becomes_a_running_kernel() {
    let rig = rig();
    rig.control.set("snapshot", &snapshot(SOURCE)).unwrap();
    let compiled = Compiled::new(SOURCE, &with_arch("-arch=sm_90"));
    assert_eq!((compiled.status, compiled.log().as_str()), (0, ""));
    let ptx = compiled.bytes("nvrtcGetPTXSize", "nvrtcGetPTX").unwrap();
    assert!(ptx.ends_with(b"\0") && String::from_utf8_lossy(&ptx).contains(".target sm_90\n"));
    let cubin = compiled.cubin().unwrap();
    assert!(cubin.starts_with(b"\x7fELF"));
    drop(compiled);

    let stream = rig.context.default_stream();
    let kernel = rig.context.load_module(Ptx::from_binary(cubin)).unwrap().load_function("add_one").unwrap();
    let mut memory = stream.clone_htod(&[41u32; 64]).unwrap();
    let count = 64u32;
    // SAFETY: the arguments fit the kernel and its 64 words.
    unsafe { stream.launch_builder(&kernel).arg(&mut memory).arg(&count).launch(shape(1, 64)) }.unwrap();
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [42; 64]);
    drop((memory, kernel, stream));
    rig.finish();
}

#[test]
fn what_has_no_snapshot_does_not_compile() {
    let (control, _turn) = turn();
    let unknown = Compiled::new("nobody wrote this", &with_arch("-arch=sm_90"));
    assert_eq!(unknown.status, 6);
    assert!(unknown.log().contains("no snapshot of add.cu with this text"), "{}", unknown.log());
    assert!(unknown.log().contains("cargo xtask ptx"), "{}", unknown.log());
    assert_eq!(unknown.cubin(), Err(4));
    drop(unknown);
    assert_eq!(control.live(), "");
}

#[test]
fn options_are_those_of_the_snapshot() {
    let (control, _turn) = turn();
    control.set("snapshot", &snapshot(SOURCE)).unwrap();
    let status = |options: &[&str]| {
        let compiled = Compiled::new(SOURCE, options);
        (compiled.status, compiled.log())
    };
    let (refused, log) = status(&["-std=c++17", "-fmad=true", "-lineinfo", "-arch=sm_90"]);
    assert_eq!(refused, 6);
    assert!(log.contains("-fmad=true") && log.contains("-fmad=false"), "{log}");
    assert_eq!(status(&["-std=c++17", "-lineinfo", "-fmad=false", "-arch=sm_90"]).0, 6, "the order counts");
    assert_eq!(status(&with_arch("--make-it-fast")).0, 5);
    for arch in ["-arch=sm_91", "-arch=sm_89a", "-arch=sm_90f", "-arch=hopper"] {
        assert_eq!(status(&with_arch(arch)).0, 5, "{arch}");
    }
    assert_eq!(status(&with_arch("-arch=sm_80")).0, 6, "no FP8 conversions there");
    for arch in ["-arch=sm_89", "-arch=sm_90a", "--gpu-architecture=sm_100f", "-arch=sm_120"] {
        assert_eq!(status(&with_arch(arch)).0, 0, "{arch}");
    }
    let virtual_target = Compiled::new(SOURCE, &with_arch("-arch=compute_90"));
    assert_eq!((virtual_target.status, virtual_target.cubin()), (0, Err(4)));
}

#[test]
fn each_architecture_takes_its_own_code_only() {
    let (control, _turn) = turn();
    control.set("snapshot", &snapshot(SOURCE)).unwrap();
    for (arch, capability) in [("89", (8, 9)), ("sm_90", (9, 0)), ("100", (10, 0)), ("120", (12, 0))] {
        control.set("arch", arch).unwrap();
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.compute_capability().unwrap(), capability);
        assert!(context.name().unwrap().ends_with(&format!(
            "({})",
            if arch == "sm_90" { "sm_90".into() } else { format!("sm_{arch}") }
        )));
        for target in ["sm_89", "sm_90", "sm_90a", "sm_100", "sm_100f", "sm_120"] {
            let cubin = Compiled::new(SOURCE, &with_arch(&format!("-arch={target}"))).cubin().unwrap();
            let fits = target.trim_start_matches("sm_").trim_end_matches(['a', 'f'])
                == arch.trim_start_matches("sm_");
            let expected = if fits { 0 } else { 209 };
            assert_eq!(code(context.load_module(Ptx::from_binary(cubin))), expected, "{target} on {arch}");
        }
        assert!(control.set("arch", "90").unwrap_err().to_string().contains("retained"));
        drop(context);
    }
    assert!(control.set("arch", "75").is_err());
    assert_eq!(control.live(), "");
}
