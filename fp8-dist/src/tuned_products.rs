//! The kernels of matrix products, the same on all ranks.

use crate::{ProcessGroup, Result};
use fp8_kernels::{Device, Element, Tensor, TunedProducts};

/// Makes all ranks use the kernels that [tuning](fp8_kernels::TunedProducts) chose on rank `root`, for the products that it has
/// tuned, and returns how many of them this rank's device takes.
///
/// Ranks that time kernels each on their own may choose differently, and then round differently. Call this after the steps in
/// which products are tuned and before one is recorded. Choices for another GPU or another version of cuBLASLt are ignored.
/// All ranks of the group call it, each with the kind of device that the others have: on the CPU it sends nothing.
///
/// ```
/// use fp8_dist::{local, share_tuned_products};
/// use fp8_kernels::Device;
/// use std::{thread, time::Duration};
///
/// thread::scope(|scope| {
///     for group in local("dp", 2, Duration::from_secs(10)).unwrap() {
///         // On the CPU there is nothing to tune.
///         scope.spawn(move || assert_eq!(share_tuned_products(&*group, &Device::cpu(), 0).unwrap(), 0));
///     }
/// });
/// ```
///
/// # Errors
/// A `root` that is not a rank, unless the device is the CPU; a step that is being recorded; a device that failed; any failure of the group.
pub fn share_tuned_products(group: &dyn ProcessGroup, device: &Device, root: usize) -> Result<usize> {
    if device.is_same(&Device::cpu()) {
        return Ok(0);
    }
    let is_root = group.rank() == root;
    let text = if is_root { device.tuned_products().to_string() } else { String::new() };
    let length = (text.len() as u64).to_le_bytes().to_vec();
    let length = broadcast(group, "length of the tuned products", length, 8, root, device)?;
    let length = length.try_into().map_or(0, u64::from_le_bytes);
    // The received length may be any number; creating the tensor checks it.
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let text = broadcast(group, "tuned products", text.into_bytes(), length, root, device)?;
    let tuned = String::from_utf8_lossy(&text).parse().unwrap_or_else(|error| {
        tracing::warn!(%error, root, "the tuned products of a rank are not used");
        TunedProducts::default()
    });
    own(group, device.use_tuned_products(&tuned))
}

fn broadcast<T: Element>(
    group: &dyn ProcessGroup,
    what: &str,
    values: Vec<T>,
    len: usize,
    root: usize,
    device: &Device,
) -> Result<Vec<T>> {
    let tensor = match group.rank() == root {
        true => Tensor::from_vec(values, [len], device),
        false => Tensor::zeros([len], T::DTYPE, device),
    };
    let received = group.broadcast(what, &own(group, tensor)?, root)?;
    own(group, received.to_vec())
}

/// Ends the group if this rank fails, so that the others do not wait for it.
fn own<T>(group: &dyn ProcessGroup, result: fp8_kernels::Result<T>) -> Result<T> {
    result.map_err(|error| {
        group.poison(&error.to_string());
        error.into()
    })
}
