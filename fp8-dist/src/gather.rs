//! All-gather of a sharded tensor in FP8: a quarter of f32's traffic, and the same bytes that one device would compute.
//!
//! 1. Each rank sends two floats: its scale and, if a scale has to be computed, the amax of its shard. Different scales are an
//!    error. The largest amax is that of the whole tensor, so an outlier on one rank determines the scale of all.
//! 2. Each rank quantizes its shard with that scale and records its own amax and counters as usual.
//! 3. The rowwise bytes are gathered along dimension 0 as u8. A transposed copy is computed from the gathered bytes, because the
//!    transposes of the shards are not contiguous in the transpose of the whole tensor.
//!
//! One exchange carries both amaxes and scales. With a reduction followed by a comparison, a rank with a calibrated slot and one
//! without would not get the error that names their scales.
//!
//! On GPUs the first calls of a name work this way. After that `nccl/gather.rs` does all of it on the devices, with one scale once it is
//! committed. `nccl/known.rs` has gathers of codes, and with scales for blocks.

pub(crate) mod blocks;
pub(crate) mod codes;
pub(crate) mod exchange;
pub(crate) mod gatherer;
pub(crate) mod nvfp4;
pub(crate) mod shard;

use crate::{Error, ProcessGroup, Result};
use fp8_kernels::{Fp8Tensor, Operand, Slot, Tensor};

/// Quantizes the shards of a tensor and gathers the codes: returns the whole tensor in FP8 on every rank. The result has the same
/// bytes as [`ops::quantize`](fp8_kernels::ops::quantize()) of the concatenated tensor.
///
/// Each rank passes some rows of the tensor, in rank order. Shards are f32, bf16 or f16, the same on all ranks. They may differ in
/// dimension 0, which may be 0, but not in the other dimensions. `slot` determines the format and the scale:
///
/// - from a cell (delayed scaling): the scale in the cell, which must be equal on all ranks. While it is unset, the scale is
///   computed from the amax of the whole tensor, and stored provisionally if the slot keeps it.
/// - from the tensor (current scaling): computed from the amax of the whole tensor.
/// - for rows or blocks: codes and scales are gathered where each block is within one shard. Otherwise the shards are gathered in
///   high precision and each rank quantizes the whole: for 128 × 128 blocks if a shard other than the last has no multiple of 128
///   rows; and for the columnwise copy of rows, of 16-bit shards, and of shards without a multiple of 128 rows (MX blocks: 32).
/// - in NVFP4: by the amaxes of the whole tensor, which ranks reduce, and with its random numbers. Codes and scales are gathered where each
///   shard but the last has a multiple of 16 rows; without a columnwise copy and random numbers, of any shards that have rows. Otherwise the
///   shards are gathered in high precision.
/// - off: the shards are gathered in high precision.
///
/// In a group of GPUs (`nccl`) only the first calls of a name involve the hosts, which compare the shapes of the shards and exchange
/// scales. Once a call has found a committed scale that is equal on all ranks, later calls with the same name, slot, dtype and shape
/// read nothing from the device and exchange nothing between hosts, so they can be recorded in a graph. With scales for rows or
/// blocks, and in high precision, that is so after the first call. The devices then compare calls, and the scale where there is one for
/// all elements (and reduce the amax of current scaling); if they differ, the next call that waits for the device returns the error. Use a name of its own for each tensor: a name must keep its slot. The hosts compare again when the slot has another name or
/// [`Cell`](fp8_kernels::Cell), or when the host has unset its scale, as loading a state may; this must happen on all ranks together.
///
/// A name may have many shapes, as sequences of several lengths have. The hosts compare each shape of this rank's shard once, and
/// expect the shapes of the other ranks that came with it. Where these vary while this rank's shape does not, make what they depend
/// on a part of the name ("x of 17 tokens"): otherwise a call ends the group, at the deadline at the latest.
///
/// ```
/// use fp8_dist::{local, quantized_all_gather};
/// use fp8_kernels::{Device, Encoding, Scale, ScaleRule, Slot, Tensor};
/// use std::{thread, time::Duration};
///
/// let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
/// let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
/// thread::scope(|scope| {
///     for group in local("tp", 2, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || {
///             let shard = [1.0f32, 448.0][group.rank()]; // amax 1 here, 448 there: the scale is 1
///             let shard = Tensor::from_vec(vec![shard], [1, 1], &Device::cpu()).unwrap();
///             let whole = quantized_all_gather(&*group, "x", &shard, &slot).unwrap();
///             assert_eq!(whole.as_fp8().unwrap().codes().unwrap(), [0x38, 0x7E]);
///         });
///     }
/// });
/// ```
///
/// # Errors
/// Scales, formats, rules, dtypes or shapes (apart from dimension 0) that differ between ranks; a dtype that is not a float; a
/// user's scale policy that returns no usable scale; any failure of the group. After these errors the group has failed. Recording the first call of a name is an error too, which leaves the group
/// usable.
pub fn quantized_all_gather(
    group: &dyn ProcessGroup,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Operand> {
    tell(group, group.quantized_all_gather(what, shard, slot))
}

/// Gathers the shards of a tensor that is in FP8 already, such as the output of a fused norm: returns the whole tensor on every rank,
/// with the bytes that quantizing the whole gives. [`quantized_all_gather`] quantizes the shards, too.
///
/// Each rank passes some rows of the tensor, in rank order, all with the same format, layouts and other dimensions. Shards with one
/// scale must have been quantized with the same one. Rowwise codes and their scales are gathered. The whole has a columnwise copy if
/// the shards have one:
///
/// - with one scale, or one for each 128 × 128 or 16 × 16 elements, it is made of the gathered codes;
/// - with scales for 1 × 128 or 1 × 16 elements or MX blocks, it is gathered as well;
/// - with a scale for each row of the copy, it cannot be gathered.
///
/// Scales must be finite and greater than 0. Shards with blocks have two dimensions or more.
///
/// Blocks must not lie in two shards: with a scale for each 128 × 128 elements, and with a columnwise copy in blocks, each shard but
/// the last needs a multiple of 128 rows (MX blocks: 32, NVFP4: 16). In NVFP4 shards must have been quantized with the amaxes of the whole
/// ([`Nvfp4Rule::amax`](fp8_kernels::Nvfp4Rule::amax)): the ranks compare the factors that come from them.
///
/// In a group of GPUs (`nccl`), the hosts compare the first call of a name, layout and shape. Later ones involve no host, so they can be
/// recorded in a graph; the devices compare a scale that all elements share. [`quantized_all_gather`] says what a name must keep.
///
/// ```
/// use fp8_dist::{gather_codes, local};
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
/// use std::{thread, time::Duration};
///
/// thread::scope(|scope| {
///     for group in local("tp", 2, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || {
///             let cpu = Device::cpu();
///             let code = [0x38u8, 0x40][group.rank()]; // 1 and 2 in E4M3
///             let codes = Tensor::from_vec(vec![code; 3], [1, 3], &cpu).unwrap();
///             let scale_inv = Tensor::scalar(0.5, &cpu).unwrap();
///             let shard = Fp8Tensor::from_codes(codes, [1, 3], Encoding::E4M3, scale_inv).unwrap();
///             let whole = gather_codes(&*group, "x", &shard).unwrap();
///             let values = whole.dequantize(DType::F32).unwrap().to_vec::<f32>().unwrap();
///             assert_eq!(values, [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]);
///         });
///     }
/// });
/// ```
///
/// # Errors
/// Scales, formats, layouts or shapes (apart from dimension 0) that differ between ranks; shards that cannot be joined; any failure
/// of the group. After these errors the group has failed. Recording the first call of a name is an error too, which leaves the group
/// usable.
pub fn gather_codes(group: &dyn ProcessGroup, what: &str, shard: &Fp8Tensor) -> Result<Fp8Tensor> {
    tell(group, group.gather_codes(what, shard))
}

/// If the group has failed, the others know. Otherwise tells them, so that they do not wait for this rank. A call that cannot be
/// recorded has sent nothing yet.
fn tell<V>(group: &dyn ProcessGroup, gathered: Result<V>) -> Result<V> {
    if let Err(error) = gathered.as_ref()
        && error.failure().is_none()
        && !matches!(error, Error::Kernels(error) if matches!(**error, fp8_kernels::Error::Capture { .. }))
    {
        group.poison(&error.to_string());
    }
    gathered
}
