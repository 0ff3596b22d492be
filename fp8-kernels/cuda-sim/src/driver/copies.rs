//! Copies and fills.
//!
//! CUDA Driver API, "API synchronization behavior": host memory that is not page-locked is read before an asynchronous
//! upload returns, and an asynchronous download to it "will return only once the copy has completed"; page-locked memory
//! is read and written when the stream gets there.

use core::ffi::{c_uchar, c_uint, c_ushort};

use crate::code::{Code, Outcome};
use crate::entry::entries;
use crate::ffi::Host;
use crate::queue::{StreamId, Until};
use crate::state::Driver;
use crate::work::Work;

/// CUDA Driver API, CUDA_ERROR_INVALID_VALUE: a device range that is not in an allocation is seen at the call.
fn expect_block(driver: &mut Driver, address: u64, bytes: usize) -> Outcome {
    if driver.context()?.blocks.holds(address, bytes as u64) { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

fn upload(driver: &mut Driver, stream: StreamId, to: u64, from: Host, bytes: usize) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    expect_block(driver, to, bytes)?;
    if driver.context()?.is_pinned(from, bytes) {
        driver.submit(stream, Work::UploadPinned { to, from, bytes })
    } else {
        let bytes = from.read(bytes)?;
        driver.submit(stream, Work::Upload { to, bytes })
    }
}

fn download(driver: &mut Driver, stream: StreamId, to: Host, from: u64, bytes: usize) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    expect_block(driver, from, bytes)?;
    if to.address() == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let pinned = driver.context()?.is_pinned(to, bytes);
    if !pinned {
        driver.context()?.captures.expect_outside(stream)?;
        driver.drive(Until::Stream(stream))?;
    }
    driver.submit(stream, Work::Download { from, to, bytes, pinned })?;
    if pinned { Ok(()) } else { driver.drive(Until::Stream(stream)) }
}

fn copy(driver: &mut Driver, stream: StreamId, to: u64, from: u64, bytes: usize) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    expect_block(driver, to, bytes)?;
    expect_block(driver, from, bytes)?;
    driver.submit(stream, Work::Copy { to, from, bytes })
}

/// CUDA Driver API, cuMemsetD16 and cuMemsetD32: "The dstDevice pointer must be two byte" and "four byte aligned".
fn fill(driver: &mut Driver, stream: StreamId, to: u64, pattern: &[u8], count: usize) -> Outcome {
    let bytes = count.checked_mul(pattern.len()).ok_or(Code::INVALID_VALUE)?;
    if !to.is_multiple_of(pattern.len() as u64) {
        return Err(Code::INVALID_VALUE);
    }
    if bytes == 0 {
        return Ok(());
    }
    expect_block(driver, to, bytes)?;
    driver.submit(stream, Work::Fill { to, pattern: pattern.to_vec(), count })
}

entries! {
    Context fn cuMemcpyHtoDAsync_v2(to: u64, from: Host, bytes: usize, stream: u64) |driver| {
        let stream = driver.context()?.queue.find(stream)?;
        upload(driver, stream, to, from, bytes)
    }

    Context fn cuMemcpyDtoHAsync_v2(to: Host, from: u64, bytes: usize, stream: u64) |driver| {
        let stream = driver.context()?.queue.find(stream)?;
        download(driver, stream, to, from, bytes)
    }

    Context fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) |driver| {
        let stream = driver.context()?.queue.find(stream)?;
        copy(driver, stream, to, from, bytes)
    }

    Context fn cuMemcpyHtoD_v2(to: u64, from: Host, bytes: usize) |driver| {
        driver.drive(Until::Stream(StreamId::Legacy))?;
        upload(driver, StreamId::Legacy, to, from, bytes)?;
        driver.drive(Until::Stream(StreamId::Legacy))
    }

    Context fn cuMemcpyDtoH_v2(to: Host, from: u64, bytes: usize) |driver| {
        download(driver, StreamId::Legacy, to, from, bytes)?;
        driver.drive(Until::Stream(StreamId::Legacy))
    }

    // "For transfers from device memory to device memory, no host-side synchronization is performed."
    Context fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) |driver| {
        copy(driver, StreamId::Legacy, to, from, bytes)
    }

    // "The synchronous memset functions are asynchronous with respect to the host except when the target is pinned host
    // memory or a Unified Memory region".
    Context fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) |driver| {
        fill(driver, StreamId::Legacy, to, &[value], count)
    }

    Context fn cuMemsetD16_v2(to: u64, value: c_ushort, count: usize) |driver| {
        fill(driver, StreamId::Legacy, to, &value.to_le_bytes(), count)
    }

    Context fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) |driver| {
        fill(driver, StreamId::Legacy, to, &value.to_le_bytes(), count)
    }

    Context fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: u64) |driver| {
        let stream = driver.context()?.queue.find(stream)?;
        fill(driver, stream, to, &[value], count)
    }

    Context fn cuMemsetD16Async(to: u64, value: c_ushort, count: usize, stream: u64) |driver| {
        let stream = driver.context()?.queue.find(stream)?;
        fill(driver, stream, to, &value.to_le_bytes(), count)
    }

    Context fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: u64) |driver| {
        let stream = driver.context()?.queue.find(stream)?;
        fill(driver, stream, to, &value.to_le_bytes(), count)
    }
}
