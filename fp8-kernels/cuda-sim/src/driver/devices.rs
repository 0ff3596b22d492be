//! Device management.

use core::ffi::{c_char, c_int};

use crate::code::{Code, Outcome};
use crate::device;
use crate::entry::entries;
use crate::ffi::Out;

/// `CUdevice` of the only device.
pub(crate) const DEVICE: c_int = 0;
/// Handle of the device's memory pool.
pub(crate) const POOL: u64 = 0xc0de_0000_0000_0002;

/// CUDA Driver API, CUDA_ERROR_INVALID_DEVICE: "the device ordinal supplied by the user does not correspond to a valid
/// CUDA device".
pub(crate) fn expect_device(device: c_int) -> Outcome {
    if device == DEVICE { Ok(()) } else { Err(Code::INVALID_DEVICE) }
}

entries! {
    Init fn cuDeviceGetCount(count: Out<c_int>) |_| {
        count.set(1)
    }

    Init fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) |_| {
        let device = device.checked()?;
        expect_device(ordinal)?;
        device.set(DEVICE)
    }

    Init fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: c_int) |driver| {
        expect_device(device)?;
        // CUDA Driver API, cuDeviceGetName: "len specifies the maximum length of the string that may be returned."
        let room = usize::try_from(length).map_err(|_| Code::INVALID_VALUE)?;
        name.set_text(&driver.settings.arch.name(), room)
    }

    Init fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) |_| {
        expect_device(device)?;
        uuid.set(*b"fp8-cuda-sim-000")
    }

    Init fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) |_| {
        expect_device(device)?;
        uuid.set(*b"fp8-cuda-sim-000")
    }

    Init fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) |driver| {
        expect_device(device)?;
        bytes.set(usize::try_from(driver.settings.memory).unwrap_or(usize::MAX))
    }

    Init fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) |driver| {
        let value = value.checked()?;
        expect_device(device)?;
        let settings = &driver.settings;
        // CUDA Driver API, cuDeviceGetAttribute: returns CUDA_ERROR_INVALID_VALUE, here for an attribute it does not know.
        let found = device::attribute(settings.arch, settings.sm_count, attribute).ok_or(Code::INVALID_VALUE)?;
        value.set(found)
    }

    Init fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: c_int) |_| {
        expect_device(device)?;
        pool.set(POOL)
    }

    Init fn cuDeviceGetMemPool(pool: Out<u64>, device: c_int) |_| {
        expect_device(device)?;
        pool.set(POOL)
    }
}
