//! A model that is nothing but slots, tensors of given amaxes, and a look at one slot's state.

use fp8_recipe::fp8_kernels::{Arena, Device, Operand, Tensor, ops};
use fp8_recipe::{
    AmaxGroup, Backward, DelayedScaling, Direction, Forward, GemmSlots, Origin, Recipe, Result, Scaling,
    SlotName, SlotRole, Slots,
};
use std::sync::Arc;

thread_local! {
    static DEVICE: Device = crate::open();
}

/// Returns the device of this thread. All tensors of a test are on this one device, because tensors of two devices do
/// not mix. Other tests have other devices, because one of them may be recording a step.
pub(crate) fn device() -> Device {
    DEVICE.with(Device::clone)
}

/// Layers of one GEMM each.
pub(crate) struct Model(pub(crate) Vec<GemmSlots>);

impl Slots for Model {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.iter().for_each(|layer| layer.slots(f));
    }
}

pub(crate) fn scaling(paths: &[&str]) -> Scaling {
    Scaling::new(&Model(paths.iter().map(|path| GemmSlots::new(path)).collect()), &device()).unwrap()
}

pub(crate) fn input(path: &str) -> SlotName {
    SlotName::new(path, SlotRole::Input)
}

pub(crate) fn weight(path: &str) -> SlotName {
    SlotName::new(path, SlotRole::Weight)
}

pub(crate) fn grad(path: &str) -> SlotName {
    SlotName::new(path, SlotRole::GradOutput)
}

pub(crate) fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_vec(values.to_vec(), [1, values.len()], &device()).unwrap()
}

/// A history short enough to read.
pub(crate) fn short() -> DelayedScaling {
    DelayedScaling { amax_history_len: 4, ..Default::default() }
}

/// Quantizes a tensor as a layer does in forward.
pub(crate) fn forward(cx: &mut Forward<'_>, slot: &SlotName, values: &[f32]) -> (Operand, Origin) {
    let operand = ops::quantize(&tensor(values), &cx.slot(slot).unwrap()).unwrap();
    (operand, cx.origin(slot))
}

/// Quantizes a tensor as a layer does in backward.
pub(crate) fn backward(cx: &mut Backward<'_>, origin: &Origin, slot: &SlotName, values: &[f32]) -> Operand {
    ops::quantize(&tensor(values), &cx.slot(origin, slot).unwrap()).unwrap()
}

/// One forward scope in which `slot` runs on `values`.
pub(crate) fn step(
    scaling: &mut Scaling,
    recipe: &Recipe,
    slot: &SlotName,
    values: &[f32],
) -> Result<Origin> {
    let mut cx = scaling.autocast(recipe)?;
    let (_, origin) = forward(&mut cx, slot, values);
    cx.commit()?;
    Ok(origin)
}

/// The scale that an operand was quantized with, from its inverse: the shortest number with that inverse.
pub(crate) fn scale_of(operand: &Operand) -> f32 {
    let inverse = operand.as_fp8().unwrap().scale_inv().item().unwrap();
    let near = [inverse.recip().next_down(), inverse.recip(), inverse.recip().next_up()];
    let scales = near.into_iter().filter(|scale| scale.recip() == inverse);
    scales.max_by_key(|scale| scale.to_bits().trailing_zeros()).unwrap()
}

pub(crate) fn codes(operand: &Operand) -> Vec<u8> {
    operand.as_fp8().unwrap().codes().unwrap()
}

/// Scale and window, oldest first, of a slot that stands in one arena only.
pub(crate) fn slot_state(scaling: &Scaling, slot: &SlotName) -> (f32, Vec<f32>) {
    let states = slot_states(scaling, slot);
    assert_eq!(states.len(), 1, "arenas with {}", slot.name());
    states[0].clone()
}

/// The same in every arena.
pub(crate) fn slot_states(scaling: &Scaling, slot: &SlotName) -> Vec<(f32, Vec<f32>)> {
    let position = scaling.slot_names(slot.direction()).iter().position(|name| name == slot.name()).unwrap();
    let state = scaling.state().unwrap();
    let arenas = state.arenas.iter().filter(|arena| arena.direction == slot.direction());
    arenas
        .map(|arena| (arena.scale[position], arena.amax_history.iter().map(|row| row[position]).collect()))
        .collect()
}

/// The same in the one arena whose recipe says `option`.
pub(crate) fn of_recipe(scaling: &Scaling, option: &str, slot: &SlotName) -> (f32, Vec<f32>) {
    let state = scaling.state().unwrap();
    let arenas = state.arenas.iter().filter(|arena| arena.direction == slot.direction());
    let found: Vec<_> =
        arenas.zip(slot_states(scaling, slot)).filter(|(arena, _)| arena.recipe.contains(option)).collect();
    assert_eq!(found.len(), 1, "arenas with {option}");
    found[0].1.clone()
}

/// A group of one rank, with its id.
#[derive(Debug)]
pub(crate) struct Alone(pub(crate) &'static str);

impl AmaxGroup for Alone {
    fn id(&self) -> &str {
        self.0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn agree_on_names(&self, _: &str, _: &[Arc<str>]) -> Result<()> {
        Ok(())
    }

    fn all_reduce_max(&self, _: &str, _: &Arena) -> Result<()> {
        Ok(())
    }

    fn poison(&self, _: &str) {}
}

pub(crate) fn message<T>(result: Result<T>) -> String {
    result.err().unwrap().to_string()
}

pub(crate) fn updates(scaling: &Scaling, direction: Direction) -> Vec<u64> {
    scaling
        .state()
        .unwrap()
        .arenas
        .iter()
        .filter(|arena| arena.direction == direction)
        .map(|arena| arena.updates)
        .collect()
}
