//! Tensors of which each rank of a group has a part: the first rank joins them in host memory, one at a time.

use super::stream::{Elements, on_host};
use crate::data_parallel::own;
use crate::{Cut, Result};
use fp8_dist::ProcessGroup;
use fp8_kernels::{DType, Element, Tensor, bf16, f16};
use std::borrow::Cow;
use std::sync::Arc;

/// This rank's part of a tensor.
#[derive(Debug)]
pub(super) struct Part {
    tensor: Tensor,
    cut: Cut,
    ranks: Arc<dyn ProcessGroup>,
}

impl Part {
    pub(super) fn new(tensor: Tensor, cut: Cut, ranks: Arc<dyn ProcessGroup>) -> Self {
        Self { tensor, cut, ranks }
    }

    /// Returns the elements of the whole on the first rank, and `None` on the others, which send their parts. All ranks call it. `what`
    /// names the tensor in errors.
    pub(super) fn join(&self, what: &str) -> Result<Option<Elements<'static>>> {
        if self.ranks.rank() > 0 {
            self.ranks.send(what, &self.tensor, 0)?;
            return Ok(None);
        }
        Ok(Some(match self.tensor.dtype() {
            DType::F32 => Elements::F32(self.receive::<f32>(what)?),
            DType::BF16 => Elements::BF16(self.receive::<bf16>(what)?),
            DType::F16 => Elements::F16(self.receive::<f16>(what)?),
            DType::I32 => Elements::I32(self.receive::<i32>(what)?),
            DType::U8 => Elements::U8(self.receive::<u8>(what)?),
        }))
    }

    /// Joins this rank's part and those that it receives.
    fn receive<T: Element + Default>(&self, what: &str) -> Result<Cow<'static, [T]>> {
        let (cut, group) = (&self.cut, &*self.ranks);
        let mut whole = vec![T::default(); cut.global().numel()];
        cut.place(0, &own(group, on_host::<T>(&self.tensor))?, &mut whole);
        for rank in 1..group.world_size() {
            // A rank that does not receive leaves the others with tensors that were never taken: it ends the group.
            let part = Tensor::zeros(cut.shape_of(rank), T::DTYPE, self.tensor.device());
            let mut part = own(group, part.map_err(Into::into))?;
            group.recv(what, &mut part, rank)?;
            cut.place(rank, &own(group, on_host::<T>(&part))?, &mut whole);
        }
        Ok(Cow::Owned(whole))
    }
}
