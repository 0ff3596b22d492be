//! Allocation and release of device and pinned host memory.
//!
//! Memory allocated in stream order is there from the point where its stream runs the allocation to the one where a
//! stream runs the free: what another stream does to it before the one or after the other, for want of a wait, is found
//! when it runs. CUDA C++ Programming Guide, "Stream Ordered Memory Allocator": "the user must guarantee that the access
//! will happen after the allocation operation, otherwise the behavior is undefined", and "that the free operation happens
//! after the allocation operation and any use of the allocation".

use core::ffi::c_uint;

use crate::code::{Code, Outcome};
use crate::context::Pinned;
use crate::entry::entries;
use crate::ffi::{Host, Out};
use crate::queue::Until;
use crate::state::Driver;
use crate::thread::thread;
use crate::work::Work;

/// `CU_MEMHOSTALLOC_PORTABLE`, `…_DEVICEMAP`, `…_WRITECOMBINED`.
const HOST_FLAGS: c_uint = 7;

/// CUDA Driver API, cuMemAlloc: "If bytesize is 0, cuMemAlloc() returns CUDA_ERROR_INVALID_VALUE";
/// CUDA_ERROR_OUT_OF_MEMORY: "unable to allocate enough memory". Queued frees run before memory counts as used up.
///
/// With a stream the memory is the pool's, and there once the stream gets to this point. In a capture that would be a
/// memory node of the graph; those are not simulated: CUDA_ERROR_NOT_SUPPORTED.
fn allocate(
    driver: &mut Driver,
    pointer: Out<u64>,
    bytes: usize,
    function: &str,
    stream: Option<u64>,
) -> Outcome {
    let pointer = pointer.checked()?;
    let context = driver.context()?;
    let stream = stream.map(|handle| context.queue.find(handle)).transpose()?;
    if stream.is_some_and(|stream| context.captures.is_capturing(stream)) {
        return Err(Code::NOT_SUPPORTED);
    }
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let (bytes, limit) = (bytes as u64, driver.settings.memory);
    let fits = |used: u64| used.checked_add(bytes).is_some_and(|all| all <= limit);
    if !fits(driver.context()?.blocks.used()) {
        driver.drive(Until::Everything)?;
        if !fits(driver.context()?.blocks.used()) {
            return Err(Code::OUT_OF_MEMORY);
        }
    }
    let address = driver.context()?.allocate(bytes, function, stream.is_some())?;
    if let Some(stream) = stream
        && let Err(code) = driver.submit(stream, Work::Allocate { address })
    {
        driver.context()?.free_now(address)?;
        return Err(code);
    }
    pointer.set(address)
}

entries! {
    Context fn cuMemAlloc_v2(pointer: Out<u64>, bytes: usize) |driver| {
        driver.context()?.captures.expect_unsafe_allowed(thread())?;
        allocate(driver, pointer, bytes, "cuMemAlloc", None)
    }

    Context fn cuMemAllocAsync(pointer: Out<u64>, bytes: usize, stream: u64) |driver| {
        allocate(driver, pointer, bytes, "cuMemAllocAsync", Some(stream))
    }

    Context fn cuMemAllocFromPoolAsync(pointer: Out<u64>, bytes: usize, pool: u64, stream: u64) |driver| {
        super::pools::expect_pool(pool)?;
        allocate(driver, pointer, bytes, "cuMemAllocFromPoolAsync", Some(stream))
    }

    // CUDA Driver API, cuMemFree: "Frees the memory space pointed to by dptr, which must have been returned by a previous
    // call", else CUDA_ERROR_INVALID_VALUE; null is accepted. CUDA C++ Programming Guide, "Stream Ordered Memory
    // Allocator": freeing pool memory this way, "the driver assumes that all accesses to the allocation are complete and
    // performs no further synchronization"; other memory waits for the device.
    Release fn cuMemFree_v2(pointer: u64) |driver| {
        if pointer == 0 {
            return Ok(());
        }
        driver.context()?.captures.expect_unsafe_allowed(thread())?;
        let block = driver.context()?.blocks.start_mut(pointer).ok_or(Code::INVALID_VALUE)?;
        if !block.pooled && driver.dead.is_none() {
            // An error of the device is reported; the memory is gone all the same.
            let outcome = driver.drive(Until::Everything);
            if outcome == Err(Code::STALLED) {
                return outcome;
            }
            driver.context()?.free_now(pointer)?;
            return outcome;
        }
        driver.context()?.free_now(pointer)
    }

    // CUDA Driver API, cuMemFreeAsync: "Inserts a free operation into hStream. The allocation must not be accessed after
    // stream execution reaches the free." What is no live allocation is CUDA_ERROR_INVALID_VALUE. In a capture the free
    // would be a memory node, as an allocation: CUDA_ERROR_NOT_SUPPORTED.
    Release fn cuMemFreeAsync(pointer: u64, stream: u64) |driver| {
        let dead = driver.dead.is_some();
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        if pointer == 0 {
            return Ok(());
        }
        if !dead && context.captures.is_capturing(id) {
            return Err(Code::NOT_SUPPORTED);
        }
        let block = context.blocks.start_mut(pointer).ok_or(Code::INVALID_VALUE)?;
        block.freed = true;
        if dead {
            return context.free_now(pointer);
        }
        driver.submit(id, Work::Free { address: pointer })
    }

    // Memory whose free still waits in a stream counts as used: it is, until the stream gets there.
    Context fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |driver| {
        let (limit, used) = (driver.settings.memory, driver.context()?.blocks.used());
        free.checked()?;
        total.set(usize::try_from(limit).unwrap_or(usize::MAX))?;
        free.set(usize::try_from(limit.saturating_sub(used)).unwrap_or(usize::MAX))
    }

    // CUDA Driver API, cuMemHostAlloc: "The Flags parameter enables different options", three; others are
    // CUDA_ERROR_INVALID_VALUE.
    Context fn cuMemHostAlloc(pointer: Out<usize>, bytes: usize, flags: c_uint) |driver| {
        driver.context()?.captures.expect_unsafe_allowed(thread())?;
        let pointer = pointer.checked()?;
        if flags & !HOST_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let block = Pinned::new(bytes)?;
        let start = block.start();
        driver.context()?.pinned.insert(start, block);
        pointer.set(start)
    }

    // CUDA Driver API, cuMemFreeHost: "Frees the memory space pointed to by p, which must have been returned by a
    // previous call to cuMemAllocHost()", else CUDA_ERROR_INVALID_VALUE. The device finishes its work before the pages go.
    Release fn cuMemFreeHost(pointer: Host) |driver| {
        if pointer.address() == 0 {
            return Ok(());
        }
        driver.context()?.captures.expect_unsafe_allowed(thread())?;
        if !driver.context()?.pinned.contains_key(&pointer.address()) {
            return Err(Code::INVALID_VALUE);
        }
        let outcome = if driver.dead.is_none() { driver.drive(Until::Everything) } else { Ok(()) };
        if outcome != Err(Code::STALLED) {
            driver.context()?.pinned.remove(&pointer.address());
        }
        outcome
    }
}
