//! The state that an open, recording scope keeps until it ends, and the state that forward scopes leave for the next
//! backward scope.

use crate::reports::error_squares::Measured;
use crate::reports::slot_sums::Sums;
use crate::scopes::forward_outcome::ForwardOutcome;
use crate::weights::weight_cache::Added;
use crate::{AmaxGroup, Direction};
use fp8_kernels::{Cell, DropoutDraw};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

/// The work of an open, recording scope, which it must commit or undo.
#[derive(Debug)]
pub(crate) struct Scope {
    pub(crate) direction: Direction,
    /// The domains whose arenas its commit updates.
    pub(crate) touched: Vec<usize>,
    /// The plans of the forward scope and of those nested in it.
    pub(crate) plans: Vec<usize>,
    /// The weights cached in it.
    pub(crate) cached: Vec<Added>,
    /// The number of uses of cached weights before the scope.
    pub(crate) weight_uses: u64,
    pub(crate) snapshots: bool,
    /// The dropout masks drawn in it.
    pub(crate) draws: u64,
    /// The random numbers of the slot that was lent last, if its tensor is rounded stochastically.
    pub(crate) rounding: Option<DropoutDraw>,
    /// The sums of the tensors that were measured.
    pub(crate) measured: BTreeMap<Measured, Sums>,
    /// The number of this rank's replica, if the scope has one of its own.
    pub(crate) replica: Option<usize>,
    /// The cells that learn at the commit whether gradients overflowed on any rank.
    pub(crate) overflow: Vec<Cell>,
    pub(crate) outcome: Arc<ForwardOutcome>,
    /// The last error in the scope. The other ranks get it if the scope is dropped without commit.
    pub(crate) cause: Option<String>,
    /// A recipe of the scope whose scales differ between ranks.
    pub(crate) lone: Option<Arc<str>>,
    /// Groups in which layers have collectives of their own.
    pub(crate) groups: Vec<Arc<dyn AmaxGroup>>,
}

impl Scope {
    pub(crate) fn new(direction: Direction, touched: Vec<usize>, weight_uses: u64, number: u64) -> Self {
        Self {
            direction,
            touched,
            plans: Vec::new(),
            cached: Vec::new(),
            weight_uses,
            snapshots: false,
            draws: 0,
            rounding: None,
            measured: BTreeMap::new(),
            replica: None,
            overflow: Vec::new(),
            outcome: Arc::new(ForwardOutcome::of_scope(number)),
            cause: None,
            lone: None,
            groups: Vec::new(),
        }
    }

    /// Notes a group in which layers have collectives of their own.
    pub(crate) fn add_group(&mut self, group: &Arc<dyn AmaxGroup>) {
        note(&mut self.groups, group);
    }

    /// The number of the scope, by which later ones know what it has used.
    pub(crate) fn number(&self) -> u64 {
        self.outcome.scope()
    }

    /// Returns whether it collects if gradients overflow.
    pub(crate) fn watches_overflow(&self) -> bool {
        !self.overflow.is_empty()
    }

    pub(crate) fn touch(&mut self, domains: &[usize]) {
        touch(&mut self.touched, domains);
    }

    pub(crate) fn touch_plan(&mut self, plan: usize, domains: &[usize]) {
        touch(&mut self.plans, &[plan]);
        self.touch(domains);
    }

    /// Returns the reason that the other ranks get if the scope is dropped without commit.
    pub(crate) fn reason(&self) -> String {
        let direction = self.direction;
        match &self.cause {
            _ if thread::panicking() => format!("panicked in a {direction} scope"),
            Some(cause) => format!("in a {direction} scope: {cause}"),
            None => format!("left a {direction} scope without commit"),
        }
    }
}

fn note(groups: &mut Vec<Arc<dyn AmaxGroup>>, group: &Arc<dyn AmaxGroup>) {
    if !groups.iter().any(|known| Arc::ptr_eq(known, group)) {
        groups.push(group.clone());
    }
}

fn touch(touched: &mut Vec<usize>, domains: &[usize]) {
    for domain in domains {
        if !touched.contains(domain) {
            touched.push(*domain);
        }
    }
}

/// The domains that forward scopes have touched and whose backward has not run yet.
///
/// Each backward scope updates their arenas, whether or not a layer runs in it, so a rank whose layers have nothing to do
/// takes part in the reductions of the others. All ranks commit the same forward scopes, so all have the same list.
#[derive(Debug, Default)]
pub(crate) struct Awaiting {
    domains: Vec<usize>,
    /// Whether a backward scope was committed after the last forward scope.
    is_answered: bool,
    /// A recipe of the forward scopes whose scales differ between ranks.
    lone: Option<Arc<str>>,
    /// The groups in which layers have had collectives of their own. Their backward pass has some, too: its ranks are told even of an
    /// error before the first of them.
    groups: Vec<Arc<dyn AmaxGroup>>,
}

impl Awaiting {
    /// Returns whether the forward scopes before this one have had their backward.
    pub(crate) fn forward_committed(
        &mut self,
        touched: &[usize],
        lone: Option<Arc<str>>,
        groups: &[Arc<dyn AmaxGroup>],
    ) -> bool {
        let was_answered = std::mem::take(&mut self.is_answered);
        if was_answered {
            self.domains.clear();
            self.lone = None;
            self.groups.clear();
        }
        touch(&mut self.domains, touched);
        self.lone = self.lone.take().or(lone);
        groups.iter().for_each(|group| note(&mut self.groups, group));
        was_answered
    }

    pub(crate) fn groups(&self) -> &[Arc<dyn AmaxGroup>] {
        &self.groups
    }

    /// Adds a domain whose forward scope was committed before the state was saved.
    pub(crate) fn resume(&mut self, domain: usize) {
        touch(&mut self.domains, &[domain]);
    }

    /// Returns whether no backward scope was committed since the last forward scope of a domain.
    pub(crate) fn includes(&self, domain: usize) -> bool {
        !self.is_answered && self.domains.contains(&domain)
    }

    /// Returns whether a backward scope was committed after the last forward scope.
    pub(crate) fn is_answered(&self) -> bool {
        self.is_answered
    }

    /// Keeps the domains until the next forward scope, since several forward scopes may each have a backward scope.
    pub(crate) fn backward_committed(&mut self) {
        self.is_answered = true;
    }

    pub(crate) fn domains(&self) -> &[usize] {
        &self.domains
    }

    pub(crate) fn lone(&self) -> Option<&Arc<str>> {
        self.lone.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_scopes_await_the_forward_scopes_since_the_last_one() {
        let mut awaiting = Awaiting::default();
        assert!(awaiting.domains().is_empty());
        awaiting.backward_committed(); // a backward scope without forward
        awaiting.forward_committed(&[2, 0], None, &[]);
        awaiting.forward_committed(&[0, 1], None, &[]);
        assert_eq!(awaiting.domains(), [2, 0, 1]);
        awaiting.backward_committed();
        assert_eq!(awaiting.domains(), [2, 0, 1]); // of the second microbatch
        awaiting.backward_committed();
        awaiting.forward_committed(&[1], None, &[]);
        assert_eq!(awaiting.domains(), [1]);
    }
}
