//! Memory of tensors on the CPU: what is kept of freed tensors, what is returned to the system, and what happens when the
//! system has no more.
//!
//! The allocator of this program counts the bytes in use and refuses large blocks beyond a limit.

#![expect(unsafe_code, reason = "an allocator that counts and refuses")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fp8_kernels::fp8_format::philox::philox4x32_10;
use fp8_kernels::{DType, Device, Error, Shape, Tensor, bf16};
use std::alloc::{GlobalAlloc, Layout, System};
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

const MIB: usize = 1 << 20;

/// The bytes that the test harness may allocate during a test.
const SLACK: usize = MIB;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

struct Limited;

/// Counts a block, unless it is large and beyond the limit.
fn count(layout: Layout) -> bool {
    let live = LIVE.fetch_add(layout.size(), SeqCst) + layout.size();
    let allowed = layout.size() < MIB || live <= LIMIT.load(SeqCst);
    if !allowed {
        LIVE.fetch_sub(layout.size(), SeqCst);
    }
    allowed
}

// SAFETY: the memory is the system allocator's; a null pointer reports that there is none.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !count(layout) {
            return ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !count(layout) {
            return ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// The memory of one test at a time. It starts with nothing kept and without a limit.
struct Process {
    _one: MutexGuard<'static, ()>,
    base: usize,
}

impl Process {
    fn new() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        LIMIT.store(usize::MAX, SeqCst);
        Device::cpu().release_memory().unwrap();
        Self { _one: one, base: LIVE.load(SeqCst) }
    }

    /// Bytes in use since the start.
    fn grown(&self) -> usize {
        LIVE.load(SeqCst).saturating_sub(self.base)
    }

    /// Allows `bytes` more than at the start.
    fn limit(&self, bytes: usize) {
        LIMIT.store(self.base + bytes, SeqCst);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        LIMIT.store(usize::MAX, SeqCst);
    }
}

fn full(value: f32, mib: usize) -> Result<Tensor, Error> {
    Tensor::full(value, [mib, MIB / 4], DType::F32, &Device::cpu())
}

#[track_caller]
fn expect_all(x: &Tensor, value: f32) {
    assert!(x.as_slice::<f32>().unwrap().iter().all(|&v| v == value));
}

#[test]
fn freed_memory_is_kept_until_it_is_released() {
    let process = Process::new();
    drop(full(1.0, 16).unwrap());
    let kept = process.grown();
    assert!((16 * MIB..18 * MIB + SLACK).contains(&kept), "{kept}");
    // The same memory, whatever the type of its elements.
    let codes = Tensor::zeros([16 * MIB], DType::U8, &Device::cpu()).unwrap();
    let values = codes.as_slice::<u8>().unwrap();
    assert!(values.iter().all(|&v| v == 0) && process.grown() <= kept + SLACK);
    drop(codes);
    Device::cpu().release_memory().unwrap();
    assert!(process.grown() <= SLACK, "{}", process.grown());
}

#[test]
fn kept_memory_is_returned_when_the_system_has_no_more() {
    let process = Process::new();
    drop(full(1.0, 48).unwrap());
    process.limit(64 * MIB);
    // A size that the kept block does not serve.
    let x = full(2.0, 20).unwrap();
    assert!(process.grown() <= 24 * MIB + SLACK, "{}", process.grown());
    // A vector for the user, likewise.
    drop(full(3.0, 24).unwrap());
    let vector = x.to_vec::<f32>().unwrap();
    assert!(process.grown() <= 44 * MIB + SLACK, "{}", process.grown());
    assert_eq!((vector.len(), vector[0]), (5 * MIB, 2.0));
    expect_all(&x, 2.0);
}

#[test]
fn where_memory_ends_the_error_has_the_size_and_nothing_is_lost() {
    let process = Process::new();
    let (x, y) = (full(1.0, 24).unwrap(), full(2.0, 4).unwrap());
    process.limit(48 * MIB);
    for _ in 0..3 {
        let error = full(3.0, 24).unwrap_err();
        assert!(matches!(error, Error::HostAllocation { op: "full", bytes } if bytes == 24 * MIB), "{error}");
    }
    let most = Tensor::zeros([Shape::MAX_NUMEL], DType::F32, &Device::cpu()).unwrap_err();
    assert!(matches!(most, Error::HostAllocation { .. }), "{most}");
    expect_all(&x, 1.0);
    drop(x);
    let z = full(3.0, 24).unwrap();
    expect_all(&y, 2.0);
    expect_all(&z, 3.0);
}

#[test]
fn no_more_is_kept_than_was_used_at_once() {
    let process = Process::new();
    let (mut live, mut used, mut peak) = (Vec::new(), 0, 0);
    for step in 0..3000u32 {
        let [length, victim, ..] = philox4x32_10(step.into(), 1).map(|random| random as usize);
        let len = 2000 + length % 2_000_000;
        let value = bf16::from_f32(step as f32);
        let x = Tensor::full(value.to_f32(), [len], DType::BF16, &Device::cpu()).unwrap();
        used += 2 * len;
        peak = peak.max(used);
        live.push((value, x));
        while live.len() > step as usize % 8 {
            let (value, x) = live.swap_remove(victim % live.len());
            assert!(x.as_slice::<bf16>().unwrap().iter().all(|&v| v == value));
            used -= 2 * x.numel();
        }
        // Sizes are rounded up by an eighth at most.
        let most = (used + peak) / 8 * 9 + SLACK;
        assert!(process.grown() <= most, "step {step}: {} of {most} bytes", process.grown());
    }
}

#[test]
fn a_users_vector_is_neither_copied_nor_kept() {
    let process = Process::new();
    let vector = vec![1.0f32; 4 * MIB];
    let (address, before) = (vector.as_ptr(), process.grown());
    let x = Tensor::from_vec(vector, [4 * MIB], &Device::cpu()).unwrap();
    assert_eq!(x.as_slice::<f32>().unwrap().as_ptr(), address);
    assert!(process.grown() <= before + SLACK);
    drop(x);
    assert!(process.grown() <= SLACK, "{}", process.grown());
}

/// The variable is read once, so each value needs a process.
#[test]
fn the_variable_decides_what_is_kept() {
    const VARIABLE: &str = "FP8_CPU_ALLOCATOR";
    const NAME: &str = "the_variable_decides_what_is_kept";
    const CHILD: &str = "FP8_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        for value in ["exact", "caching", "jemalloc"] {
            let child = Command::new(std::env::current_exe().unwrap())
                .args([NAME, "--exact"])
                .envs([(VARIABLE, value), (CHILD, "1")])
                .output()
                .unwrap();
            assert!(child.status.success(), "{value}: {}", String::from_utf8_lossy(&child.stdout));
        }
        return;
    }
    let process = Process::new();
    let first = full(1.0, 16);
    match std::env::var(VARIABLE).unwrap().as_str() {
        "jemalloc" => {
            let error = first.unwrap_err().to_string();
            assert_eq!(error, "FP8_CPU_ALLOCATOR=jemalloc: expected caching or exact");
        }
        value => {
            drop(first.unwrap());
            assert_eq!(process.grown() >= 16 * MIB, value == "caching", "{value}: {}", process.grown());
        }
    }
}
