//! The driver through cudarc as it is: context, memory, copies, launches, events, refusals.
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls of the C interface, one after another under one contract"
)]

mod rig;

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;
use rig::{code, rig, shape, status};

#[test]
fn the_device_describes_itself() {
    let rig = rig();
    assert_eq!(CudaContext::device_count().unwrap(), 1);
    assert_eq!(rig.context.name().unwrap(), "PTX interpreter (sm_90)");
    assert_eq!(rig.context.compute_capability().unwrap(), (9, 0));
    assert_eq!(rig.context.total_mem().unwrap(), 2 << 30);
    assert_eq!(rig.context.mem_get_info().unwrap(), (2 << 30, 2 << 30));
    let attribute = |attribute| rig.context.attribute(attribute).unwrap();
    assert_eq!(attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 4);
    assert_eq!(
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        227 << 10
    );
    assert_eq!(attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE), 0);
    assert_eq!(attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE), 0);
    assert_eq!(code(CudaContext::new(1)), 101);
    let mut version = 0;
    // SAFETY: the integer lives through the call.
    assert_eq!(status(unsafe { sys::cuDriverGetVersion(&mut version) }), 0);
    assert_eq!(version, 13_000);
    rig.control.set("sm_count", "17").unwrap();
    assert_eq!(attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 17);
    rig.finish();
}

#[test]
fn null_out_parameters_and_wild_handles_are_refused() {
    let rig = rig();
    let null = std::ptr::null_mut();
    let wild = 0x1234_5678usize as *mut std::ffi::c_void;
    // SAFETY: null and wild arguments are what the test is about; the simulator checks them before any use.
    unsafe {
        assert_eq!(status(sys::cuDeviceGetCount(std::ptr::null_mut())), 1);
        assert_eq!(status(sys::cuMemAlloc_v2(std::ptr::null_mut(), 16)), 1);
        assert_eq!(status(sys::cuModuleLoadData(std::ptr::null_mut(), null)), 1);
        assert_eq!(status(sys::cuStreamSynchronize(wild.cast())), 400);
        assert_eq!(status(sys::cuEventSynchronize(wild.cast())), 400);
        assert_eq!(status(sys::cuModuleUnload(wild.cast())), 400);
        assert_eq!(status(sys::cuCtxSetCurrent(wild.cast())), 201);
        assert_eq!(status(sys::cuMemFreeHost(wild)), 1);
        assert_eq!(status(sys::cuInit(1)), 1);
    }
    rig.finish();
}

#[test]
fn a_thread_without_a_context_is_told_so() {
    let rig = rig();
    let other = std::thread::spawn(|| {
        // SAFETY: synchronizing takes no arguments.
        status(unsafe { sys::cuCtxSynchronize() })
    });
    assert_eq!(other.join().unwrap(), 201);
    rig.finish();
}

#[test]
fn copies_and_fills_move_bytes() {
    let rig = rig();
    let stream = rig.context.default_stream();
    let data: Vec<u32> = (0..1000).collect();
    let device = stream.clone_htod(&data).unwrap();
    let mut twin = stream.alloc_zeros::<u32>(1000).unwrap();
    assert_eq!(stream.clone_dtoh(&twin).unwrap(), vec![0; 1000]);
    stream.memcpy_dtod(&device.slice(500..), &mut twin.slice_mut(..500)).unwrap();
    let back = stream.clone_dtoh(&twin).unwrap();
    assert_eq!(back[..500], data[500..]);
    assert_eq!(back[500..], [0; 500]);
    assert_eq!(rig.context.mem_get_info().unwrap().0, (2 << 30) - 8000);
    drop((device, twin, stream));
    rig.finish();
}

#[test]
fn a_pattern_of_four_bytes_fills() {
    let rig = rig();
    let stream = rig.context.default_stream();
    // SAFETY: raw calls on an allocation made here; lengths as allocated.
    unsafe {
        let address = result::malloc_sync(64).unwrap();
        assert_eq!(status(sys::cuMemsetD32Async(address, 0xbf80_0000, 16, stream.cu_stream())), 0);
        assert_eq!(status(sys::cuMemsetD32Async(address + 2, 0, 1, stream.cu_stream())), 1);
        let mut back = [0f32; 16];
        result::memcpy_dtoh_sync(&mut back, address).unwrap();
        assert_eq!(back, [-1.0; 16]);
        result::free_sync(address).unwrap();
    }
    drop(stream);
    rig.finish();
}

#[test]
fn a_kernel_runs_with_its_arguments() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let kernel = rig.load("add_one");
    let data: Vec<u32> = (0..100).collect();
    let mut device = stream.clone_htod(&data).unwrap();
    let count = 99u32;
    // SAFETY: the kernel's parameters are an address and a count; the slice holds 100 words.
    unsafe { stream.launch_builder(&kernel).arg(&mut device).arg(&count).launch(shape(2, 64)) }.unwrap();
    let back = stream.clone_dtoh(&device).unwrap();
    let expected: Vec<u32> = data.iter().map(|x| if *x < 99 { x + 1 } else { *x }).collect();
    assert_eq!(back, expected);
    drop((kernel, device, stream));
    rig.finish();
}

#[test]
fn shared_memory_and_barriers_work_under_every_seed() {
    let rig = rig();
    let stream = rig.context.default_stream();
    let kernel = rig.load("reverse_block");
    for seed in 0..8 {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let data: Vec<u32> = (0..64).collect();
        let mut device = stream.clone_htod(&data).unwrap();
        // SAFETY: one block of 64 threads over 64 words.
        unsafe { stream.launch_builder(&kernel).arg(&mut device).launch(shape(1, 64)) }.unwrap();
        let back = stream.clone_dtoh(&device).unwrap();
        assert!(back.iter().rev().eq(data.iter()), "seed {seed}: {back:?}");
    }
    drop((kernel, stream));
    rig.finish();
}

#[test]
fn launches_that_cannot_be_are_refused_at_the_call() {
    let rig = rig();
    let stream = rig.context.default_stream();
    let (free, bounded) = (rig.load("add_one"), rig.load("copy_words"));
    let launch = |grid_dim, block_dim, shared_mem_bytes| {
        let config = LaunchConfig { grid_dim, block_dim, shared_mem_bytes };
        let (address, count) = (0u64, 0u32);
        // SAFETY: the arguments fit the kernel; with a count of zero it touches no memory.
        code(unsafe { stream.launch_builder(&free).arg(&address).arg(&count).launch(config) })
    };
    assert_eq!(launch((1, 1, 1), (64, 1, 1), 48 << 10), 0);
    assert_eq!(launch((0, 1, 1), (64, 1, 1), 0), 1);
    assert_eq!(launch((1, 1, 1), (0, 1, 1), 0), 1);
    assert_eq!(launch((1, 65_536, 1), (64, 1, 1), 0), 1);
    assert_eq!(launch((1, 1, 65_536), (64, 1, 1), 0), 1);
    assert_eq!(launch((1 << 31, 1, 1), (64, 1, 1), 0), 1);
    assert_eq!(launch((u32::MAX, 1, 1), (64, 1, 1), 0), 1);
    assert_eq!(launch((1, 1, 1), (1025, 1, 1), 0), 1);
    assert_eq!(launch((1, 1, 1), (512, 2, 2), 0), 1);
    assert_eq!(launch((1, 1, 1), (64, 1, 1), (48 << 10) + 1), 1);
    let limit = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    free.set_attribute(limit, 100 << 10).unwrap();
    assert_eq!(launch((1, 1, 1), (64, 1, 1), 100 << 10), 0);
    assert_eq!(code(free.set_attribute(limit, (227 << 10) + 1)), 1);
    let (to, from, count) = (0u64, 0u64, 0u32);
    // SAFETY: as above; more threads than `.maxntid` allows.
    let many =
        unsafe { stream.launch_builder(&bounded).arg(&to).arg(&from).arg(&count).launch(shape(1, 65)) };
    assert_eq!(code(many), 701);
    drop((free, bounded, stream));
    rig.finish();
}

#[test]
fn a_kernel_with_more_static_shared_memory_than_a_block_has_is_not_loaded() {
    let rig = rig();
    let load = |bytes: u32| {
        let ptx = format!(
            ".version 8.0\n.target sm_89\n.address_size 64\n.visible .entry wide()\n{{\n\
             .shared .align 4 .b8 tile[{}];\n.shared .align 4 .b8 rest[1024];\nret;\n}}\n",
            bytes - 1024
        );
        code(rig.context.load_module(Ptx::from_src(ptx)))
    };
    assert_eq!(load(48 << 10), 0);
    // The driver's compiler fails: CUDA_ERROR_INVALID_PTX.
    assert_eq!(load((48 << 10) + 1), 218);
    assert_eq!(load(99 << 10), 218);
    rig.finish();
}

#[test]
fn a_null_argument_list_is_refused() {
    let rig = rig();
    let kernel = rig.load("add_one");
    let mut function = std::ptr::null_mut();
    let module = rig.context.load_module(Ptx::from_src(rig::PTX)).unwrap();
    drop(module);
    let mut raw = std::ptr::null_mut();
    let text = std::ffi::CString::new(rig::PTX).unwrap();
    let null: *mut std::ffi::c_void = std::ptr::null_mut();
    // SAFETY: every pointer is valid or the null that the test is about.
    unsafe {
        assert_eq!(status(sys::cuModuleLoadData(&mut raw, text.as_ptr().cast())), 0);
        assert_eq!(status(sys::cuModuleGetFunction(&mut function, raw, c"add_one".as_ptr())), 0);
        assert_eq!(status(sys::cuModuleGetFunction(&mut function, raw, c"add_two".as_ptr())), 500);
        assert_eq!(
            status(sys::cuLaunchKernel(
                function,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                std::ptr::null_mut(),
                null.cast(),
                null.cast()
            )),
            1
        );
        let (mut offset, mut size) = (0, 0);
        assert_eq!(status(sys::cuFuncGetParamInfo(function, 1, &mut offset, &mut size)), 0);
        assert_eq!((offset, size), (8, 4));
        assert_eq!(status(sys::cuFuncGetParamInfo(function, 2, &mut offset, &mut size)), 1);
        let mut name = std::ptr::null();
        assert_eq!(status(sys::cuFuncGetName(&mut name, function)), 0);
        assert_eq!(std::ffi::CStr::from_ptr(name), c"add_one");
        assert_eq!(status(sys::cuModuleUnload(raw)), 0);
        assert_eq!(status(sys::cuFuncGetName(&mut name, function)), 400);
    }
    drop(kernel);
    rig.finish();
}

#[test]
fn occupancy_follows_threads_and_shared_memory() {
    let rig = rig();
    let kernel = rig.load("add_one");
    let blocks = |threads, shared| {
        kernel.occupancy_max_active_blocks_per_multiprocessor(threads, shared, None).unwrap()
    };
    assert_eq!(blocks(1024, 0), 2);
    assert_eq!(blocks(64, 0), 32);
    assert_eq!(blocks(256, 100 << 10), 2);
    assert_eq!(blocks(256, 227 << 10), 1);
    assert_eq!(blocks(256, 228 << 10), 0);
    assert!((1..=64).contains(&kernel.num_regs().unwrap()));
    let bounded = rig.load("copy_words");
    assert_eq!(bounded.max_threads_per_block().unwrap(), 64);
    drop((kernel, bounded));
    rig.finish();
}

#[test]
fn events_order_and_time() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let (start, end) = (rig.context.new_event(timed).unwrap(), rig.context.new_event(timed).unwrap());
    assert!(start.is_complete(), "an event never recorded has nothing to wait for");
    start.record(&stream).unwrap();
    let memory = stream.alloc_zeros::<u8>(1 << 20).unwrap();
    end.record(&stream).unwrap();
    let mut milliseconds = 0f32;
    // SAFETY: both events live; the float lives through the call.
    let early = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, start.cu_event(), end.cu_event()) };
    assert_eq!(status(early), 600);
    let mut polls = 0;
    while !end.is_complete() {
        polls += 1;
        assert!(polls < 100, "polling ends");
    }
    assert!(start.elapsed_ms(&end).unwrap() > 0.0);
    let untimed = rig.context.new_event(None).unwrap();
    untimed.record(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(code(start.elapsed_ms(&untimed)), 400);
    drop((start, end, untimed, memory, stream));
    rig.finish();
}

#[test]
fn modules_for_other_devices_are_refused() {
    let rig = rig();
    let load = |ptx: &str| code(rig.context.load_module(Ptx::from_src(ptx)));
    assert_eq!(load("not PTX"), 200);
    assert_eq!(load(&rig::PTX.replace("sm_89", "sm_100")), 209);
    assert_eq!(load(&rig::PTX.replace("sm_89", "sm_90a")), 0);
    assert_eq!(load(&rig::PTX.replace("sm_89", "sm_89a")), 209);
    assert_eq!(load(&rig::PTX.replace("9.0", "9.1")), 222);
    assert_eq!(load(&rig::PTX.replace("mad.lo.s32", "mad.high.s31")), 218);
    rig.finish();
}

#[test]
fn freeing_twice_or_what_was_never_allocated_is_refused() {
    let rig = rig();
    let stream = rig.context.default_stream();
    // SAFETY: the misuse is refused before it touches anything.
    unsafe {
        let address = result::malloc_async(stream.cu_stream(), 256).unwrap();
        assert_eq!(code(result::free_async(address + 16, stream.cu_stream())), 1);
        assert_eq!(code(result::free_async(address, stream.cu_stream())), 0);
        assert_eq!(code(result::free_async(address, stream.cu_stream())), 1);
        assert_eq!(code(result::free_sync(address)), 1);
        let address = result::malloc_sync(256).unwrap();
        assert_eq!(code(result::free_sync(address)), 0);
        assert_eq!(code(result::free_sync(address)), 1);
        assert_eq!(code(result::free_sync(0)), 0);
        assert_eq!(code(result::malloc_sync(0)), 1);
    }
    drop(stream);
    rig.finish();
}

#[test]
fn copies_outside_an_allocation_are_refused_at_the_call() {
    let rig = rig();
    let stream = rig.context.default_stream();
    // SAFETY: the simulator checks device ranges; the host array is long enough.
    unsafe {
        let address = result::malloc_async(stream.cu_stream(), 64).unwrap();
        let mut host = [0u8; 128];
        assert_eq!(code(result::memcpy_htod_async(address, &host[..65], stream.cu_stream())), 1);
        assert_eq!(code(result::memcpy_htod_async(address, &host[..64], stream.cu_stream())), 0);
        assert_eq!(code(result::memcpy_dtoh_async(&mut host[..2], address + 63, stream.cu_stream())), 1);
        assert_eq!(code(result::memset_d8_async(address, 1, 65, stream.cu_stream())), 1);
        result::free_async(address, stream.cu_stream()).unwrap();
        assert_eq!(code(result::memset_d8_async(0x10, 1, 1, stream.cu_stream())), 1);
    }
    drop(stream);
    rig.finish();
}
