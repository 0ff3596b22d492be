//! The scaling state of one model: every slot registered by name, arenas by recipe and group, cached weights.

use crate::domain::Domain;
use crate::guard::{Frame, Mode, Scope};
use crate::{
    AmaxGroup, AutocastOptions, Direction, Error, Recipe, Result, ScalingState, SlotName, SlotRole, Slots,
};
use fp8_kernels::{Cell, Device, Operand, Scale, Slot, UNSET};
use std::collections::HashMap;
use std::sync::Arc;

/// One owner per model. Scopes borrow it: [`autocast`](Self::autocast), [`backward`](Self::backward),
/// [`eval`](Self::eval).
#[derive(Debug)]
pub struct Scaling {
    pub(crate) device: Device,
    /// Tells this `Scaling` from others in a `Saved`.
    pub(crate) identity: Arc<()>,
    /// Sorted, by direction.
    pub(crate) names: [Vec<Arc<str>>; 2],
    pub(crate) roles: [Vec<SlotRole>; 2],
    indices: HashMap<Arc<str>, usize>,
    group: Option<Arc<dyn AmaxGroup>>,
    pub(crate) domains: Vec<Domain>,
    pub(crate) weights: HashMap<WeightKey, CachedWeight>,
    pub(crate) scope: Option<Scope>,
    /// State loaded before the arenas that it is for.
    pub(crate) pending: ScalingState,
    /// What a slot without arena quantizes with: its own tensor's scale, or 1 under Transformer Engine's first-step rule.
    unset: Cell,
    one: Cell,
    counting: bool,
}

/// Domain and slot.
pub(crate) type WeightKey = (usize, usize);

#[derive(Debug)]
pub(crate) struct CachedWeight {
    pub(crate) version: u64,
    pub(crate) recorded: bool,
    /// The capture in which it was quantized: a recorded step quantizes its weights anew at each replay, and reads no
    /// operand that replays do not.
    pub(crate) capture: Option<u64>,
    pub(crate) operand: Operand,
}

impl Scaling {
    /// Registers every slot of `model`, in the order of the names, not of the visit.
    ///
    /// # Errors
    /// A name that occurs twice; a device that is out of memory or failed.
    pub fn new(model: &(impl Slots + ?Sized), device: &Device) -> Result<Self> {
        let mut slots: [Vec<(Arc<str>, SlotRole)>; 2] = Default::default();
        model.slots(&mut |slot| {
            slots[slot.direction() as usize].push((slot.name().clone(), slot.role()));
        });
        let mut indices = HashMap::new();
        for slots in &mut slots {
            slots.sort_by(|a, b| a.0.cmp(&b.0));
            for (index, (name, _)) in slots.iter().enumerate() {
                if indices.insert(name.clone(), index).is_some() {
                    return Err(Error::DuplicateSlot(name.clone()));
                }
            }
        }
        let roles = slots.each_ref().map(|slots| slots.iter().map(|(_, role)| *role).collect());
        let names = slots.map(|slots| slots.into_iter().map(|(name, _)| name).collect());
        Ok(Self {
            device: device.clone(),
            identity: Arc::new(()),
            names,
            roles,
            indices,
            group: None,
            domains: Vec::new(),
            weights: HashMap::new(),
            scope: None,
            pending: ScalingState::default(),
            unset: Cell::new(UNSET, device)?,
            one: Cell::new(1.0, device)?,
            counting: false,
        })
    }

    /// The group of every scope that names none, so that training and evaluation read as on one device.
    pub fn set_group(&mut self, group: Arc<dyn AmaxGroup>) {
        self.group = Some(group);
    }

    /// Whether scopes count saturated and underflowed values per slot, and, under current scaling, note amaxes and scales
    /// for [`slot_reports`](Self::slot_reports). Costs one more look at each value; off at first.
    pub fn set_counting(&mut self, counting: bool) {
        self.counting = counting;
    }

    /// The names of a direction's slots, sorted.
    pub fn slot_names(&self, direction: Direction) -> &[Arc<str>] {
        &self.names[direction as usize]
    }

    /// The index of the domain of a recipe and group; its arenas are made by the first scope that records, or by the first
    /// scope at all where loaded state waits for them.
    pub(crate) fn domain(
        &mut self,
        recipe: &Recipe,
        options: &AutocastOptions,
        records: bool,
    ) -> Result<usize> {
        recipe.validate()?;
        let group = options.amax_reduction_group.clone().or_else(|| self.group.clone());
        let key = match &group {
            Some(group) => format!("{} group={}", recipe.key(), group.id()),
            None => recipe.key(),
        };
        let index = self.domains.iter().position(|domain| domain.key == key).unwrap_or_else(|| {
            self.domains.push(Domain::new(key, recipe));
            self.domains.len() - 1
        });
        let slots = self.names.each_ref().map(Vec::len);
        self.domains[index].set_group(group);
        if self.domains[index].arenas.is_none() {
            let wanted = records && (matches!(recipe, Recipe::Delayed(_)) || self.counting);
            if wanted || self.has_pending(index, records) {
                self.domains[index].make_arenas(slots, &self.device)?;
                self.load_pending(index, records)?;
            }
        }
        Ok(index)
    }

    /// Where a slot of `scope`'s pass stands.
    pub(crate) fn index(&self, slot: &SlotName, scope: Direction) -> Result<usize> {
        let index = self.indices.get(slot.name()).ok_or_else(|| Error::UnknownSlot(slot.name().clone()))?;
        if slot.direction() == scope {
            return Ok(*index);
        }
        Err(Error::Direction { slot: slot.name().clone(), slot_direction: slot.direction(), scope })
    }

    /// A slot as frame and mode want it used.
    pub(crate) fn slot<'a>(
        &'a self,
        name: &SlotName,
        index: usize,
        frame: Frame,
        mode: &'a Mode,
    ) -> Result<Slot<'a>> {
        let direction = name.direction() as usize;
        let domain = &self.domains[frame.domain];
        let (encoding, first) = (domain.encodings[direction], &domain.rules[direction]);
        let arena = domain.arenas.as_ref().map(|arenas| &arenas[direction]);
        let keep = matches!(mode, Mode::Record) && frame.records();
        let scale = match (&domain.recipe, mode) {
            _ if !frame.enabled => Scale::Off,
            (Recipe::Current(_), _) => Scale::FromTensor(first),
            (Recipe::Delayed(_), Mode::Replay(legacy)) => {
                let scales = legacy.scales.get().and_then(|all| all.get(frame.domain));
                let cell = scales.and_then(|scales| scales.get(index)).ok_or(Error::NoSnapshot)?;
                Scale::Cell { cell, first, keep }
            }
            (Recipe::Delayed(recipe), _) => {
                let untouched = if recipe.calibrate_first_step { &self.unset } else { &self.one };
                let cell = arena.and_then(|arena| arena.scale(index)).unwrap_or(untouched);
                Scale::Cell { cell, first, keep }
            }
        };
        let recorded = arena.filter(|_| keep);
        Ok(Slot {
            encoding,
            scale,
            amax: recorded.and_then(|arena| arena.staging(index)),
            counters: recorded.filter(|_| self.counting).and_then(|arena| arena.counters(index)),
            columnwise: name.role().columnwise() && !matches!(mode, Mode::Evaluate),
        })
    }

    /// First all reductions, then all updates: an error on the way leaves everything to `roll_back`.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let Some(scope) = &mut self.scope else { return Ok(()) };
        let direction = scope.direction;
        scope.touched.sort_by(|&a, &b| self.domains[a].key.cmp(&self.domains[b].key)); // equal on all ranks
        for &index in &scope.touched {
            self.domains[index].reduce(direction, &self.names[direction as usize])?;
        }
        for &index in &scope.touched {
            self.domains[index].check(direction)?;
        }
        let scales = scope.snapshots.then(|| self.domains.iter().map(forward_scales).collect());
        let scales: Option<Vec<_>> = scales.transpose()?;
        for &index in &scope.touched {
            self.domains[index].update(direction)?;
        }
        if let Some(scope) = self.scope.take().filter(|scope| scope.direction == Direction::Forward) {
            scope.legacy.touched.get_or_init(|| scope.touched);
            if let Some(scales) = scales {
                scope.legacy.scales.get_or_init(|| scales);
            }
        }
        Ok(())
    }

    /// Staging cells, provisional scales and newly cached weights of the open scope go.
    pub(crate) fn roll_back(&mut self) -> Option<Scope> {
        let mut scope = self.scope.take()?;
        for domain in &mut self.domains {
            // What fails here is tried again, and told, by the next scope: a guard that is dropped can tell nobody.
            let _ = domain.roll_back(scope.direction);
        }
        for (key, replaced) in scope.cached.drain(..).rev() {
            match replaced {
                Some(weight) => self.weights.insert(key, weight),
                None => self.weights.remove(&key),
            };
        }
        Some(scope)
    }

    /// All ranks leave together; the groups live on.
    pub(crate) fn discard(&mut self) -> Result<()> {
        if let Some(scope) = &self.scope {
            let key = format!("discard {}", scope.direction);
            let groups = distinct(self.domains.iter().filter_map(Domain::reducing_group));
            groups.iter().try_for_each(|group| group.agree_on_names(&key, &[]))?;
        }
        self.roll_back();
        self.restore()
    }

    /// What rolling back left because the device failed.
    fn restore(&mut self) -> Result<()> {
        self.domains.iter_mut().try_for_each(Domain::restore)
    }

    /// Before anything is begun: no scope is open, and nothing of an earlier one is left.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.abandon(); // a guard that was forgotten (`mem::forget`)
        self.restore()
    }

    /// A guard was dropped (`?`, panic): the other ranks must not wait for this one. Nothing to do after a commit; nobody
    /// waits for a forward scope that records nothing.
    pub(crate) fn abandon(&mut self) {
        let Some(scope) = self.roll_back() else { return };
        if scope.direction == Direction::Forward && scope.touched.is_empty() {
            return;
        }
        let reason = format!("left a {} scope without commit", scope.direction);
        let groups = self.domains.iter().filter_map(Domain::group).filter(|group| group.world_size() > 1);
        distinct(groups).iter().for_each(|group| group.poison(&reason));
    }
}

fn forward_scales(domain: &Domain) -> Result<Vec<Cell>> {
    let Some([arena, _]) = &domain.arenas else { return Ok(Vec::new()) };
    Ok(arena.copy_scales()?)
}

/// Each group once, by id: in one order on all ranks.
fn distinct<'a>(groups: impl Iterator<Item = &'a Arc<dyn AmaxGroup>>) -> Vec<&'a Arc<dyn AmaxGroup>> {
    let mut groups: Vec<_> = groups.collect();
    groups.sort_by(|a, b| a.id().cmp(b.id()));
    groups.dedup_by(|a, b| a.id() == b.id());
    groups
}
