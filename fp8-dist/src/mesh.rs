//! A mesh of ranks: one group for each way of dividing the work.

use crate::{Error, ProcessGroup, Result, local};
use fp8_recipe::AmaxGroup;
use std::sync::Arc;
use std::time::Duration;

/// The sizes of a [`Mesh`], whose example sets them. Their product is the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshOptions {
    /// The number of replicas, each with its part of the batch (data parallelism). Default: 1.
    pub dp: usize,
    /// The number of ranks that share the layers of a replica (tensor parallelism). Default: 1.
    pub tp: usize,
}

impl Default for MeshOptions {
    fn default() -> Self {
        Self { dp: 1, tp: 1 }
    }
}

/// The ranks of a job, arranged by what they divide: the batch (`dp`) and the layers (`tp`).
///
/// Rank r is number `r % tp` of the ranks that share layers, and number `r / tp` of the replicas: tensor parallelism varies fastest,
/// because its ranks exchange most and are neighbours on one machine.
///
/// ```
/// use fp8_dist::{Mesh, MeshOptions, Result, local};
/// use std::{thread, time::Duration};
///
/// let run = |world: std::sync::Arc<dyn fp8_dist::ProcessGroup>| -> Result<()> {
///     let rank = world.rank();
///     let mesh = Mesh::new(world, &MeshOptions { dp: 2, tp: 2 })?;
///     assert_eq!((mesh.dp().rank(), mesh.tp().rank()), (rank / 2, rank % 2));
///     assert_eq!(mesh.tp().members(), [rank / 2 * 2, rank / 2 * 2 + 1]);
///     assert_eq!(mesh.amax_group().world_size(), 4);
///     Ok(())
/// };
/// thread::scope(|scope| {
///     for world in local("world", 4, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || run(world).unwrap());
///     }
/// });
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    world: Arc<dyn ProcessGroup>,
    dp: Arc<dyn ProcessGroup>,
    tp: Arc<dyn ProcessGroup>,
}

impl Mesh {
    /// Arranges the ranks of `world`. All of them call it, with the same sizes.
    ///
    /// A group of all ranks is `world` itself; groups of some are new ones, called `dp` and `tp`.
    ///
    /// # Errors
    /// Sizes whose product is not the number of ranks; those of [`ProcessGroup::split`].
    pub fn new(world: Arc<dyn ProcessGroup>, options: &MeshOptions) -> Result<Self> {
        let MeshOptions { dp, tp } = *options;
        if dp.checked_mul(tp) != Some(world.world_size()) {
            let (id, value) =
                (world.id().to_owned(), format!("dp {dp} × tp {tp} on {} ranks", world.world_size()));
            let remedy = "expected sizes whose product is the number of ranks";
            return Err(Error::Option { id, option: "mesh", value, remedy });
        }
        let rank = world.rank();
        let axis = |id, size, others, color| match (size, others) {
            (_, 1) => Ok(world.clone()),
            (1, _) => Ok(alone(id)?),
            _ => match world.split(id, Some(color), rank)? {
                Some(group) => Ok(group),
                None => alone(id),
            },
        };
        let tensor = axis("tp", tp, dp, rank / tp)?;
        let data = axis("dp", dp, tp, rank % tp)?;
        Ok(Self { world, dp: data, tp: tensor })
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &Arc<dyn ProcessGroup> {
        &self.world
    }

    /// Returns the group of the replicas of this rank's part of the model: gradients are summed over it.
    pub fn dp(&self) -> &Arc<dyn ProcessGroup> {
        &self.dp
    }

    /// Returns the group of the ranks that share the layers of this rank's replica.
    pub fn tp(&self) -> &Arc<dyn ProcessGroup> {
        &self.tp
    }

    /// Returns the group over which amaxes are reduced: all ranks that share slots, which replicas and parts of a layer do.
    pub fn amax_group(&self) -> Arc<dyn AmaxGroup> {
        self.world.clone()
    }
}

/// The group of a rank that divides this kind of work with no other.
fn alone(id: &str) -> Result<Arc<dyn ProcessGroup>> {
    let mut groups = local(id, 1, Duration::MAX)?;
    Ok(groups.swap_remove(0))
}
