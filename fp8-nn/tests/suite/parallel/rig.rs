//! Ranks of a mesh, each a thread, and the models that they share.

use crate::every_device::support::device;
use fp8_nn::fp8_dist::{Mesh, MeshOptions, local};
use fp8_nn::prelude::*;
use fp8_nn::{ReduceDtype, TensorParallel, TensorParallelOptions};
use std::thread;
use std::time::Duration;

/// The arrangement of the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) dp: usize,
    pub(super) tp: usize,
    pub(super) sequence_parallel: bool,
    pub(super) reduce: ReduceDtype,
}

impl Layout {
    const fn new(dp: usize, tp: usize, sequence_parallel: bool) -> Self {
        Self { dp, tp, sequence_parallel, reduce: ReduceDtype::Output }
    }
}

pub(super) const ONE: Layout = Layout::new(1, 1, false);
pub(super) const TP2: Layout = Layout::new(1, 2, false);
pub(super) const TP4: Layout = Layout::new(1, 4, false);
pub(super) const TP2_SP: Layout = Layout::new(1, 2, true);
pub(super) const TP4_SP: Layout = Layout::new(1, 4, true);
pub(super) const DP2: Layout = Layout::new(2, 1, false);
pub(super) const DP2_TP2_SP: Layout = Layout::new(2, 2, true);

/// A rank of the job.
pub(super) struct Rank {
    pub(super) mesh: Mesh,
    pub(super) tensor_parallel: Option<TensorParallel>,
}

impl Rank {
    /// The part of a batch, `[batch, …]`, that this replica trains with.
    pub(super) fn of_batch(&self, x: &Tensor) -> Tensor {
        let rows = x.shape()[0] / self.mesh.dp().world_size();
        let first = self.mesh.dp().rank() * rows;
        ops::rows(x, first..first + rows).unwrap()
    }
}

/// Runs `f` on each rank and returns the results in rank order.
pub(super) fn ranks<T: Send>(layout: Layout, f: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let Layout { dp, tp, sequence_parallel, reduce } = layout;
    thread::scope(|scope| {
        let worlds = local("world", dp * tp, Duration::from_secs(60)).unwrap().into_iter();
        let f = &f;
        let run = move |world| {
            let mesh = Mesh::new(world, &MeshOptions { dp, tp }).unwrap();
            let options = TensorParallelOptions { sequence_parallel, reduce };
            let tensor_parallel = TensorParallel::new(mesh.tp().clone(), &options).unwrap();
            f(&Rank { mesh, tensor_parallel })
        };
        let threads: Vec<_> = worlds.map(|world| scope.spawn(move || run(world))).collect();
        let joined: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        joined.into_iter().map(|rank| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Sets every parameter to its part of what `value` returns for its number, its name and the shape of the whole.
pub(super) fn set_all(model: &mut dyn Layer, mut value: impl FnMut(usize, &str, &Shape) -> Vec<f32>) {
    for (number, parameter) in parameters_mut(model).into_iter().enumerate() {
        let shape = *parameter.global_shape();
        let whole = Tensor::from_vec(value(number, parameter.name(), &shape), shape, &device()).unwrap();
        parameter.set_part_of(&whole).unwrap();
    }
}

/// A transformer block, and a linear behind it whose output is added, which each rank applies to the tokens that it has.
#[derive(Debug)]
pub(super) struct Behind {
    pub(super) inner: TransformerLayer,
    pub(super) fc: Linear,
}
composite!(Behind { inner, fc });

impl Module for Behind {
    type Saved = (fp8_nn::TransformerLayerSaved, fp8_nn::LinearSaved);

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }

    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, Self::Saved)> {
        let (x, inner) = self.inner.forward_with_info(cx, x, info)?;
        let (y, fc) = self.fc.forward(cx, &x)?;
        Ok((ops::add(&x, &y)?, (inner, fc)))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, (inner, fc): Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let dx = ops::add(dy, &self.fc.backward(cx, fc, dy)?)?;
        self.inner.backward(cx, inner, &dx)
    }
}

impl Block for Behind {}
