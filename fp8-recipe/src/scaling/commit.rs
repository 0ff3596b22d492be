//! The end of a scope: its commit, its discard, and undoing what a scope that was left has changed.

use crate::arenas::domain::Domain;
use crate::arenas::domains::Domains;
use crate::names::model_slots::ModelSlots;
use crate::scopes::forward_outcome::Ending;
use crate::scopes::open_scope::Scope;
use crate::scopes::overflow::Overflow;
use crate::weights::weight_records::WeightRecords;
use crate::{AmaxGroup, Direction, Result, Scaling};
use fp8_kernels::Cell;
use std::sync::Arc;

impl Scaling {
    /// Runs all reductions, then all updates. After an error, `roll_back` undoes the scope.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let updated = self.update();
        self.scopes.remember(updated)
    }

    fn update(&mut self) -> Result<()> {
        let Some(scope) = self.scopes.current_mut() else { return Ok(()) };
        let direction = scope.direction;
        self.domains.sort(&mut scope.touched, &mut scope.plans);
        self.domains.agree(&scope.plans, &self.slots)?;
        reduce(&mut self.domains, self.overflow.as_ref(), scope, &self.slots)?;
        for &index in &scope.touched {
            self.domains[index].check(direction, self.slots.names(direction), self.slots.roles(direction))?;
        }
        let scales = scope.snapshots.then(|| {
            let capture = self.device.capture_number();
            let in_use = |index| self.weights.scales_in_use(index, capture);
            let scales = |(index, domain)| forward_scales(domain, in_use(index));
            self.domains.iter().enumerate().map(scales).collect()
        });
        let scales: Option<Vec<_>> = scales.transpose()?;
        let records = WeightRecords::before_update(self.domains.all(), &scope.cached)?;
        for &index in &scope.touched {
            self.domains[index].update(direction)?;
        }
        match records.after_update(self.domains.all(), &scope.cached) {
            Ok(records) => records.into_iter().for_each(|(added, record)| self.weights.record(added, record)),
            // The scales have been updated. Weights without a record are quantized and recorded again.
            Err(_) => self.weights.undo(std::mem::take(&mut scope.cached)),
        }
        if let Some(overflow) = &self.overflow {
            overflow.finish(&scope.overflow)?;
        }
        self.close(scales);
        Ok(())
    }

    /// Ends the open scope after its update.
    fn close(&mut self, scales: Option<Vec<Vec<Cell>>>) {
        let Some(Scope { direction, touched, outcome, weight_uses, measured, lone, groups, .. }) =
            self.scopes.take()
        else {
            return;
        };
        self.sqnr.replace(measured);
        match direction {
            Direction::Forward => {
                if self.scopes.awaiting_mut().forward_committed(&touched, lone, &groups) {
                    self.inherited.forward_committed();
                }
                outcome.end(Ending::Committed { touched, scales });
                self.weights.trim(weight_uses);
            }
            Direction::Backward => {
                self.scopes.awaiting_mut().backward_committed();
                self.inherited.backward_committed();
            }
        }
    }

    /// Returns the cell of the open scope's flag, whose reduced value the commit max-combines into `result`.
    pub(crate) fn overflow_flag(&mut self, result: &Cell) -> Result<&Cell> {
        if !self.device.is_same(result.device()) {
            let (op, lhs, rhs) = ("overflow", self.device.to_string(), result.device().to_string());
            return Err(fp8_kernels::Error::Devices { op, lhs, rhs }.into());
        }
        let overflow = match &mut self.overflow {
            Some(overflow) => overflow,
            none => none.insert(Overflow::new(&self.device)?),
        };
        if let Some(scope) = self.scopes.current_mut() {
            scope.overflow.push(result.clone());
        }
        Ok(overflow.flag())
    }

    /// Undoes what the open scope has changed: staging cells, provisional scales and cached weights.
    pub(crate) fn roll_back(&mut self, ending: Ending) -> Option<Scope> {
        let mut scope = self.scopes.take()?;
        scope.outcome.end(ending);
        for domain in self.domains.iter_mut() {
            // A dropped guard cannot return an error. The next scope tries again and returns it.
            let _ = domain.roll_back(scope.direction);
        }
        if let Some(overflow) = self.overflow.as_mut().filter(|_| !scope.overflow.is_empty()) {
            let _ = overflow.roll_back();
        }
        self.weights.undo(std::mem::take(&mut scope.cached));
        Some(scope)
    }

    /// Closes the open scope on all ranks together. The groups remain usable.
    pub(crate) fn discard(&mut self) -> Result<()> {
        if let Some(scope) = self.scopes.current() {
            let key = format!("discard {}", scope.direction);
            let groups = distinct(self.domains.iter().filter_map(Domain::reducing_group));
            let agreed = groups.iter().try_for_each(|group| group.agree_on_names(&key, &[]));
            self.scopes.remember(agreed)?;
        }
        self.roll_back(Ending::Discarded);
        self.restore()
    }

    /// Repeats an earlier roll-back that failed with the device.
    fn restore(&mut self) -> Result<()> {
        self.overflow.as_mut().map_or(Ok(()), Overflow::restore)?;
        self.domains.iter_mut().try_for_each(Domain::restore)
    }

    /// Ends an open scope and undoes what is left of earlier ones. Every scope begins with it.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.abandon(); // the scope of a guard that was forgotten by `mem::forget`
        self.restore()
    }

    /// Tells the other ranks that a guard was dropped (by `?` or a panic), so that they do not wait for this rank. Does
    /// nothing after a commit, and for a forward scope that records nothing, for which no rank waits.
    pub(crate) fn abandon(&mut self) {
        let Some(scope) = self.roll_back(Ending::Left) else { return };
        if scope.direction == Direction::Forward && scope.touched.is_empty() && scope.groups.is_empty() {
            return;
        }
        let reason = scope.reason();
        // Subscribers filter by the target: it stays when this file moves.
        tracing::warn!(
            target: "fp8_recipe::scaling",
            direction = %scope.direction, reason, "a scope was dropped without commit; scales are unchanged"
        );
        let groups = self.domains.iter().filter_map(Domain::group).chain(&scope.groups);
        distinct(groups.filter(|group| group.world_size() > 1))
            .iter()
            .for_each(|group| group.poison(&reason));
    }
}

/// Reduces the amaxes of the domains that a scope has touched, and with them its flag of overflow if it has one.
fn reduce(
    domains: &mut Domains,
    overflow: Option<&Overflow>,
    scope: &Scope,
    slots: &ModelSlots,
) -> Result<()> {
    let (direction, names) = (scope.direction, slots.names(scope.direction));
    let Some(overflow) = overflow.filter(|_| scope.watches_overflow()) else {
        return scope.touched.iter().try_for_each(|&index| domains[index].reduce(direction, names));
    };
    let arenas = scope.touched.iter().filter_map(|&index| domains[index].arenas.as_ref());
    overflow.check_amaxes(arenas.map(|arenas| arenas[direction].own()))?;
    let mut reduced: Vec<String> = Vec::new();
    for &index in &scope.touched {
        let domain = &mut domains[index];
        let group = domain.reducing_group().map(|group| group.id().to_owned());
        match group.filter(|id| !reduced.contains(id)) {
            Some(id) => {
                overflow.reduce_with(domain, direction, names)?;
                reduced.push(id);
            }
            None => domain.reduce(direction, names)?,
        }
    }
    let groups = scope.touched.iter().filter_map(|&index| domains[index].group());
    let groups = groups.chain(domains.default_group()).chain(&scope.groups);
    let groups = groups.filter(|group| group.world_size() > 1);
    let is_left = |group: &&Arc<dyn AmaxGroup>| !reduced.iter().any(|id| id == group.id());
    distinct(groups).into_iter().filter(is_left).try_for_each(|group| overflow.reduce(&**group))
}

/// Returns copies of the scales that a forward scope has quantized with: those of its slots, and of weights that were recorded
/// before, by slot.
fn forward_scales<'a>(
    domain: &Domain,
    recorded: impl Iterator<Item = (usize, &'a Cell)>,
) -> Result<Vec<Cell>> {
    let Some(arenas) = &domain.arenas else { return Ok(Vec::new()) };
    let mut scales = arenas.forward.own().copy_scales()?;
    for (slot, cell) in recorded {
        if let Some(scale) = arenas.forward.index(slot).and_then(|index| scales.get_mut(index)) {
            *scale = cell.clone();
        }
    }
    Ok(scales)
}

/// Returns each group once, sorted by id, so that the order is the same on all ranks.
fn distinct<'a>(groups: impl Iterator<Item = &'a Arc<dyn AmaxGroup>>) -> Vec<&'a Arc<dyn AmaxGroup>> {
    let mut groups: Vec<_> = groups.collect();
    groups.sort_by(|a, b| a.id().cmp(b.id()));
    groups.dedup_by(|a, b| a.id() == b.id());
    groups
}
