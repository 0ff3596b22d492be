//! A mesh of ranks: one group for each way of dividing the work.

use crate::{Error, ProcessGroup, Result};
use fp8_recipe::AmaxGroup;
use std::io;
use std::sync::Arc;

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
    /// A group of all ranks is `world` itself; groups of some, or of one, are new ones, called `dp` and `tp`.
    ///
    /// # Errors
    /// Other sizes than another rank passes; sizes whose product is not the number of ranks; those of [`ProcessGroup::split`].
    pub fn new(world: Arc<dyn ProcessGroup>, options: &MeshOptions) -> Result<Self> {
        let MeshOptions { dp, tp } = *options;
        let sizes = [("dp", dp), ("tp", tp)].map(|(name, size)| format!("{name} {size}").into());
        world.agree_on_names("mesh", &sizes).map_err(|error| own(&*world, error))?;
        if dp.checked_mul(tp) != Some(world.world_size()) {
            let (id, value) =
                (world.id().to_owned(), format!("dp {dp} × tp {tp} on {} ranks", world.world_size()));
            let remedy = "expected sizes whose product is the number of ranks";
            return Err(Error::Option { id, option: "mesh", value, remedy });
        }
        let rank = world.rank();
        let axis = |id, others, color| -> Result<Arc<dyn ProcessGroup>> {
            if others == 1 {
                return Ok(world.clone());
            }
            // Every rank has a color, so it joins a group.
            Ok(world.split(id, Some(color), rank)?.unwrap_or_else(|| world.clone()))
        };
        let tensor = axis("tp", dp, rank / tp)?;
        let data = axis("dp", tp, rank % tp)?;
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

/// The error of this crate behind one of fp8-recipe's.
fn own(group: &dyn ProcessGroup, error: fp8_recipe::Error) -> Error {
    let source = match error {
        fp8_recipe::Error::Group(error) => match error.downcast::<Error>() {
            Ok(error) => return *error,
            Err(error) => io::Error::other(error),
        },
        error => io::Error::other(error),
    };
    Error::Network { id: group.id().to_owned(), what: "comparing sizes".to_owned(), source }
}
