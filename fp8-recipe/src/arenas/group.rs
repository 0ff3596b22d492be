//! The interface through which a commit reduces amaxes over ranks.

use crate::{Result, StateDigest};
use fp8_kernels::Arena;
use std::fmt::Debug;
use std::sync::Arc;

/// The ranks that share a model's scales.
///
/// Each call carries a key that names the arena: direction, recipe and group. Ranks that pass different keys get an
/// error within a time limit and never wait forever. The process groups of fp8-dist implement this trait; implement it
/// yourself to reduce amaxes over a communication library of your own.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Arena, Device};
/// use fp8_recipe::{AmaxGroup, DelayedScaling, GemmSlots, Result, Scaling};
/// use std::sync::Arc;
///
/// /// A group of one rank.
/// #[derive(Debug)]
/// struct Alone;
///
/// impl AmaxGroup for Alone {
///     fn id(&self) -> &str {
///         "dp"
///     }
///     fn world_size(&self) -> usize {
///         1
///     }
///     fn agree_on_names(&self, _key: &str, _names: &[Arc<str>]) -> Result<()> {
///         Ok(())
///     }
///     fn all_reduce_max(&self, _key: &str, _arena: &Arena) -> Result<()> {
///         Ok(())
///     }
///     fn poison(&self, _reason: &str) {}
/// }
///
/// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
/// scaling.set_group(Arc::new(Alone));
/// scaling.autocast(&DelayedScaling::default().into())?.commit()?;
/// assert_eq!(scaling.slot_reports()?[0].recipe.to_string(), "delayed, group dp");
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
pub trait AmaxGroup: Debug + Send + Sync {
    /// Returns the name of the group's part in the job, such as `dp`. It is the same on all ranks and after a restart.
    fn id(&self) -> &str;

    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Returns which processes of the job the ranks are, in the order of the ranks. Default: 0 to `world_size − 1`, for a group of
    /// all.
    fn members(&self) -> Vec<usize> {
        (0..self.world_size()).collect()
    }

    /// Compares slot names before the first reduction of an arena.
    ///
    /// # Errors
    /// Names that differ, on every rank, with the first difference; a rank that has left, has failed or makes another call.
    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> Result<()>;

    /// Compares training state that all ranks should have in common; `what` says which. Scopes call it before they reduce
    /// an arena for the first time, and again after [`Scaling::load_state`](crate::Scaling::load_state).
    ///
    /// The default compares names with their digests by [`agree_on_names`](Self::agree_on_names). The groups of fp8-dist
    /// have a collective for it, whose error names the piece that differs and after which the group remains usable.
    ///
    /// # Errors
    /// State that differs, on every rank, with the first difference in the order of `state`; a rank that has left, has
    /// failed or makes another call.
    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> Result<()> {
        let text = |piece: &StateDigest| {
            format!("{} (digest {:032x})", piece.name, u128::from_be_bytes(piece.digest)).into()
        };
        self.agree_on_names(what, &state.iter().map(text).collect::<Vec<_>>())
    }

    /// Replaces row 0 of `arena` by its maximum over the ranks.
    ///
    /// # Errors
    /// A rank that has left, has failed or makes another call.
    fn all_reduce_max(&self, key: &str, arena: &Arena) -> Result<()>;

    /// Tells the other ranks that this rank gave up: their pending and later calls fail with the reason.
    fn poison(&self, reason: &str);
}

/// The parts of an arena that the ranks of a group have already compared.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Agreed {
    names: bool,
    /// Since the state was last loaded.
    state: bool,
}

impl Agreed {
    /// Makes the next reduction compare the arena's state, which has been replaced.
    pub(crate) fn forget_state(&mut self) {
        self.state = false;
    }

    /// Replaces row 0 of an arena by its maximum over the ranks. Before the first reduction, and again after state was loaded,
    /// the ranks compare their scales and histories, since unequal ones would diverge unnoticed.
    pub(crate) fn reduce(
        &mut self,
        group: &dyn AmaxGroup,
        key: &str,
        arena: &Arena,
        names: &[Arc<str>],
        digests: impl FnOnce() -> Result<Vec<StateDigest>>,
    ) -> Result<()> {
        if !self.names {
            group.agree_on_names(key, names)?;
        }
        if !self.state {
            let remedy = "ranks compare loaded state in the next step: run one before a step is recorded";
            arena.device().expect_eager("agree_on_state", remedy)?;
            group.agree_on_state(key, &digests()?)?;
        }
        group.all_reduce_max(key, arena)?;
        *self = Self { names: true, state: true };
        Ok(())
    }
}
