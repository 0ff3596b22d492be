//! Gathers of a tensor's parts, such as codes and the scales of their blocks. The hosts compare the extents of all ranks' parts once
//! for a layout and a shape of this rank's shard. After that, the devices compare the calls, and everything can be recorded.

use super::agreed::{self, Agreed};
use super::group::{Group, address, call};
use crate::gather::gatherer::{Factor, Gatherer};
use crate::message::{Call, Message, Operation, Part};
use crate::{ReduceOp, Result};
use fp8_kernels::{DType, Device, Scale, Shape, Tensor};
use std::sync::Arc;

/// One tensor's gathers.
pub(super) struct Known<'a> {
    group: &'a Group,
    function: &'static str,
    what: &'a str,
    /// The layout and shape of this rank's shard. The extents of the other ranks' parts depend on it: parts of several shards may
    /// have the same shape.
    shard: String,
}

impl<'a> Known<'a> {
    /// Gathers the parts of a shard with this layout and shape. Errors name `function` and `what`.
    pub(super) fn new(
        group: &'a Group,
        function: &'static str,
        what: &'a str,
        layout: &str,
        shape: Shape,
    ) -> Self {
        Self { group, function, what, shard: format!("{layout}, {shape}") }
    }

    fn named(&self) -> String {
        format!("{} `{}`", self.function, self.what)
    }

    /// Returns the agreement on the parts of this call. The hosts compare the first of a shape.
    fn agreed(&self, call: &Call, part: Part, device: &Device) -> Result<Arc<Agreed>> {
        let group = self.group;
        group.expect_alive(call)?;
        group.expect_device(call, device)?;
        let (key, shape) = (format!("{}; {}", self.shard, call.what), part.shape);
        let label = format!("{} `{}`", self.function, call.what);
        if let Some(agreed) = group.agreed(&key, &label, shape, Scale::Off) {
            return Ok(agreed);
        }
        let remedy = "call it once before recording, with this name and shape";
        device.expect_eager(&self.named(), remedy)?;
        let message = Message { call: call.clone(), names: Vec::new(), part: Some(part) };
        let shards = agreed::shapes(&group.exchange(message)?);
        let number = Tensor::from_vec(vec![agreed::number(&label, &shards)], [1], device)?;
        let call = group.number_of(&label);
        let agreed = Arc::new(Agreed { label, committed: None, shards, number, call });
        group.agreed.lock().insert((key, shape), agreed.clone());
        Ok(agreed)
    }

    /// Gathers parts along dimension 0.
    fn gather(&self, name: &str, part: &Tensor, factor: Option<&Tensor>) -> Result<Tensor> {
        let _turn = self.group.turn.lock();
        let call = call(Operation::AllGather, name);
        let agreed = self.agreed(&call, Part::expected(part), part.device())?;
        let mut named = self.named();
        if factor.is_some() {
            named += " by dequantization factors";
        }
        let factor = factor.map(address).transpose()?;
        self.group.gather_compared(&call, &named, &agreed, part, factor)
    }
}

impl Gatherer for Known<'_> {
    fn all_gather(&self, name: &str, part: &Tensor) -> Result<Tensor> {
        self.gather(name, part, None)
    }

    fn gather_codes(&self, name: &str, codes: &Tensor, factor: &Factor<'_>) -> Result<Tensor> {
        self.gather(name, codes, Some(factor.value))
    }

    fn are_multiples(&self, name: &str, rows: usize, unit: usize, on: &Device) -> Result<(bool, usize)> {
        let all = self.rows(name, rows, on)?;
        let fits = all.split_last().is_none_or(|(_, others)| others.iter().all(|n| n.is_multiple_of(unit)));
        Ok((fits, all.len()))
    }

    fn rows(&self, name: &str, rows: usize, on: &Device) -> Result<Vec<usize>> {
        let _turn = self.group.turn.lock();
        let call = call(Operation::AllGather, &format!("{name}: rows"));
        let agreed = self.agreed(&call, Part { dtype: DType::U8, shape: [rows].into(), data: None }, on)?;
        Ok(agreed.shards.iter().filter_map(|shape| shape.first().copied()).collect())
    }

    fn largest(&self, name: &str, mut values: Tensor) -> Result<Tensor> {
        self.group.reduce_in_place(name, &mut values, ReduceOp::Max)?;
        Ok(values)
    }
}
