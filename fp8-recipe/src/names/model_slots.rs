//! The slots of one model, registered by name.

use crate::names::by_direction::ByDirection;
use crate::names::fp8_attention::Fp8Attention;
use crate::names::used_slots::UsedSlots;
use crate::{Direction, Error, Result, SlotName, SlotRole, Slots};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Every slot of a model, sorted by the recipes that use it and then by name.
#[derive(Debug)]
pub(crate) struct ModelSlots {
    /// Identifies the model's `Scaling` inside a `Saved`.
    identity: Arc<()>,
    slots: ByDirection<Vec<SlotName>>,
    names: ByDirection<Vec<Arc<str>>>,
    roles: ByDirection<Vec<SlotRole>>,
    used: ByDirection<UsedSlots>,
    indices: HashMap<Arc<str>, usize>,
}

impl ModelSlots {
    /// Registers every slot of `model`.
    ///
    /// # Errors
    /// A slot's name that occurs twice.
    pub(crate) fn new(model: &(impl Slots + ?Sized)) -> Result<Self> {
        let mut slots = ByDirection::<Vec<SlotName>>::default();
        model.slots(&mut |slot| slots[slot.direction()].push(slot.clone()));
        let mut indices = HashMap::new();
        for (_, slots) in slots.each_mut() {
            slots.sort_by(|a, b| (a.used_by(), a.name()).cmp(&(b.used_by(), b.name())));
            for (index, slot) in slots.iter().enumerate() {
                if indices.insert(slot.name().clone(), index).is_some() {
                    return Err(Error::DuplicateSlot(slot.name().clone()));
                }
            }
        }
        Ok(Self {
            identity: Arc::new(()),
            names: slots.each_ref().map(|slots| slots.iter().map(|slot| slot.name().clone()).collect()),
            roles: slots.each_ref().map(|slots| slots.iter().map(SlotName::role).collect()),
            used: slots.each_ref().map(|slots| UsedSlots::new(slots)),
            slots,
            indices,
        })
    }

    pub(crate) const fn identity(&self) -> &Arc<()> {
        &self.identity
    }

    pub(crate) const fn all(&self) -> &ByDirection<Vec<SlotName>> {
        &self.slots
    }

    /// Returns each slot with its pass and its index in it.
    pub(crate) fn enumerated(&self) -> impl Iterator<Item = (Direction, usize, &SlotName)> {
        self.slots.each_ref().into_iter().flat_map(|(direction, slots)| {
            slots.iter().enumerate().map(move |(index, slot)| (direction, index, slot))
        })
    }

    pub(crate) fn names(&self, direction: Direction) -> &[Arc<str>] {
        &self.names[direction]
    }

    pub(crate) fn roles(&self, direction: Direction) -> &[SlotRole] {
        &self.roles[direction]
    }

    /// Returns the ranges of slots that a recipe uses.
    pub(crate) fn used_by(&self, attention: Fp8Attention) -> ByDirection<Range<usize>> {
        self.used.each_ref().map(|used| used.of(attention))
    }

    /// Returns the names of the slots that all recipes use.
    pub(crate) fn always_used(&self, direction: Direction) -> &[Arc<str>] {
        &self.names[direction][self.used[direction].of(Fp8Attention::Off)]
    }

    /// Returns the index of the slot of this name in its pass.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.indices.get(name).copied()
    }

    /// Returns the slot of this name.
    pub(crate) fn by_name(&self, name: &str) -> Option<&SlotName> {
        let index = self.position(name)?;
        let slots = self.slots.each_ref().into_iter();
        slots.filter_map(|(_, slots)| slots.get(index)).find(|slot| &**slot.name() == name)
    }

    /// Returns the index of a slot, which must belong to the pass of `scope`.
    pub(crate) fn index(&self, slot: &SlotName, scope: Direction) -> Result<usize> {
        let index = self.position(slot.name()).ok_or_else(|| Error::UnknownSlot(slot.name().clone()))?;
        if slot.direction() == scope {
            let ours = self.slots[scope].get(index).and_then(SlotName::owner);
            return match (ours, slot.owner()) {
                (Some(ours), Some(theirs)) if !Arc::ptr_eq(ours, theirs) => {
                    Err(Error::OtherLayer(slot.name().clone()))
                }
                _ => Ok(index),
            };
        }
        Err(Error::Direction { slot: slot.name().clone(), slot_direction: slot.direction(), scope })
    }
}
