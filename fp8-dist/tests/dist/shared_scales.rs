//! Shards that ranks quantize on their own with the scale of the whole.

use crate::{ranks, tensor};
use fp8_dist::{Error, SharedScales};
use fp8_kernels::{Cell, DType, Device, Encoding, REST, Scale, ScalePolicy, ScaleRule, Slot, UNSET, ops};

const DELAYED: ScaleRule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
const CURRENT: ScaleRule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };

fn kept(cell: &Cell) -> Scale<'_> {
    Scale::Cell { cell, first: &DELAYED, keep: true }
}

fn forgotten(cell: &Cell) -> Scale<'_> {
    Scale::Cell { cell, first: &DELAYED, keep: false }
}

/// The scale that each rank has quantized with, the value of its cell afterwards, the amax that it has recorded, and how often the
/// operation ran.
fn run(
    shards: &[&[f32]],
    of: fn(&Cell) -> Scale<'_>,
    held: f32,
    in_replay: bool,
) -> Vec<(Option<f32>, f32, f32, usize)> {
    ranks(shards.len(), |group| {
        let device = Device::cpu();
        let (cell, amax) = (Cell::new(held, &device).unwrap(), Cell::new(REST, &device).unwrap());
        let shard = shards[group.rank()];
        let x = tensor(shard, &[shard.len(), 1], DType::F32, &device);
        let slot = Slot { scale: of(&cell), amax: Some(&amax), ..Slot::off(Encoding::E4M3) };
        let mut runs = 0;
        let quantize = |slot: &Slot<'_>| {
            runs += 1;
            Ok::<_, Error>((ops::quantize(&x, slot)?, ()))
        };
        let scales = SharedScales::default();
        let (found, ()) = scales.quantize(&*group, "x", &slot, &device, in_replay, quantize).unwrap();
        let scale = found.as_fp8().map(|codes| codes.scale_inv().item().unwrap().recip());
        (scale, cell.read().unwrap(), amax.read().unwrap(), runs)
    })
}

#[test]
fn a_scale_that_is_set_takes_one_pass() {
    assert_eq!(
        run(&[&[1.0], &[4.0]], kept, 2.0, false),
        [(Some(2.0), 2.0, 1.0, 1), (Some(2.0), 2.0, 4.0, 1)]
    );
    // Provisional: of an earlier microbatch of the first step.
    assert_eq!(run(&[&[1.0], &[4.0]], kept, -2.0, false)[0], (Some(2.0), -2.0, 1.0, 1));
}

#[test]
fn a_first_scale_is_that_of_the_largest_amax() {
    // Each rank records the amax of its own shard.
    assert_eq!(
        run(&[&[1.0], &[-448.0], &[]], kept, UNSET, false),
        [(Some(1.0), -1.0, 1.0, 2), (Some(1.0), -1.0, 448.0, 2), (Some(1.0), -1.0, REST, 2)]
    );
    assert_eq!(run(&[&[1.0], &[3.5]], kept, UNSET, false)[0], (Some(128.0), -128.0, 1.0, 2));
    assert_eq!(run(&[&[1.0], &[3.5]], forgotten, UNSET, false)[0], (Some(128.0), UNSET, 1.0, 2));
}

/// As on one device, they give no scale.
#[test]
fn amaxes_of_zero_and_infinity_leave_the_slot_unset() {
    assert_eq!(run(&[&[0.0], &[0.0]], kept, UNSET, false)[1], (Some(1.0), UNSET, 0.0, 2));
    assert_eq!(run(&[&[2.0], &[f32::INFINITY]], kept, UNSET, false)[0], (Some(1.0), UNSET, 2.0, 2));
    assert_eq!(run(&[&[3.5], &[f32::NAN]], kept, UNSET, false)[1].0, Some(128.0));
}

/// The first run has found an amax that gives no scale: no rank looks for its own.
#[test]
fn an_unset_scale_of_a_replay_is_1() {
    for (scale, cell, _, _) in run(&[&[2.0], &[f32::INFINITY]], forgotten, UNSET, true) {
        assert_eq!((scale, cell), (Some(1.0), UNSET));
    }
}

#[test]
fn current_scaling_takes_the_largest_amax() {
    for in_replay in [false, true] {
        let found = run(&[&[1.0, 2.0], &[3.5], &[]], |_| Scale::FromTensor(&CURRENT), UNSET, in_replay);
        assert_eq!(found.iter().map(|rank| rank.0).collect::<Vec<_>>(), [Some(128.0); 3]);
    }
}

#[test]
fn what_needs_no_other_rank_is_passed_on() {
    assert_eq!(run(&[&[1.0], &[4.0]], |_| Scale::Off, UNSET, false)[1], (None, UNSET, 4.0, 1));
    assert_eq!(
        run(&[&[1.0], &[4.0]], |_| Scale::FromAmax { amax: 3.5, rule: &CURRENT }, UNSET, false)[0].0,
        Some(128.0)
    );
}

#[test]
fn ranks_that_wait_are_told_of_an_operation_that_failed() {
    let all = ranks(2, |group| {
        let device = Device::cpu();
        let x = tensor(&[1.0], &[1, 1], DType::F32, &device);
        let slot = Slot { scale: Scale::FromTensor(&CURRENT), ..Slot::off(Encoding::E4M3) };
        let quantize = |slot: &Slot<'_>| match group.rank() {
            0 => Ok((ops::quantize(&x, slot)?, ())),
            _ => {
                Err(Error::from(fp8_kernels::Tensor::zeros([2, 2], DType::F32, &device)?.item().unwrap_err()))
            }
        };
        SharedScales::default()
            .quantize(&*group, "x", &slot, &device, false, quantize)
            .unwrap_err()
            .to_string()
    });
    assert!(all[0].contains(&format!("rank 1 gave up: x: {}", all[1])), "{all:?}");
}
