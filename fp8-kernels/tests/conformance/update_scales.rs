use super::case::{Outcome, cases};
use super::compare::{equal, refused, same};
use super::data::{Random, exact, rules};
use super::reference::{Got, same_as_cpu};
use crate::oracle::scales as oracle;
use fp8_kernels::{
    Arena, ArenaOptions, Cell, CustomPolicy, Device, Encoding, Error, REST, ScalePolicy, ScaleRule, UNSET,
    UpdateClock, ops,
};
use ops::{AmaxRule, ScaleUpdate};
use std::collections::VecDeque;
use std::sync::Arc;

cases![
    a_random_run_equals_the_oracle,
    one_row_is_staging_and_window,
    every_rule_at_its_ends,
    needles,
    every_length,
    worked_run,
    the_oldest_counts_once_more,
    did_not_run,
    zeros_are_zeros,
    a_non_finite_amax_is_left_out,
    a_first_scale_becomes_final_or_unset,
    interval,
    scales_of_every_kind_at_each_interval,
    arenas_with_one_clock_know_which_updated_a_slot_last,
    cast_scales_are_those_before_the_update_or_the_first,
    cast_scales_of_an_update_that_keeps_the_scales,
    custom_functions,
    a_refused_scale_changes_nothing,
];

/// One amax a slot, from the smallest to those that say nothing: the CPU's scales and histories.
fn every_rule_at_its_ends(device: &Device) -> Outcome {
    let amaxes = [
        f32::from_bits(1),
        1e-41,
        f32::from_bits(0x007F_FFFF),
        f32::MIN_POSITIVE,
        1e-30,
        1.0,
        3.3,
        448.0,
        1e30,
        f32::MAX,
        0.0,
        f32::INFINITY,
        f32::NAN,
    ];
    for rule in rules() {
        for (history_len, record_non_finite) in [(1, false), (2, false), (5, false), (1, true), (5, true)] {
            same_as_cpu(&format!("{rule:?}, {history_len} rows"), device, |device| {
                let options = ArenaOptions { history_len, ..ArenaOptions::default() };
                let mut arena = Arena::new(amaxes.len(), options, device)?;
                let update = ScaleUpdate { amax: AmaxRule::Max, rule: &rule, interval: 1, record_non_finite };
                let mut results = Vec::new();
                let mut turned = amaxes;
                turned.reverse();
                // Then those that say nothing meet scales that are set.
                for amaxes in [amaxes, amaxes, turned] {
                    arena.merge_staged(&amaxes)?;
                    ops::update_scales(&mut arena, &update)?;
                    results.extend([arena.scales()?, arena.history()?].map(Got::Numbers));
                }
                Ok(results)
            })?;
        }
    }
    Ok(())
}

/// The largest of a window in every row, for slots that fill blocks and one more.
fn needles(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    for (slots, history_len) in [
        (1, 40usize),
        (7, 9),
        (8, 33),
        (9, 34),
        (17, 16),
        (3, 1027),
        (2, 100),
        (1, 12),
        (1, 23),
        (1, 27),
        (1, 31),
    ] {
        for place in (0..history_len - 1).step_by(history_len.div_ceil(40)).chain([history_len - 2]) {
            same_as_cpu(&format!("row {place} of {history_len}, {slots} slots"), device, |device| {
                let options = ArenaOptions { history_len, ..ArenaOptions::default() };
                let mut arena = Arena::new(slots, options, device)?;
                let mut rows = vec![1.0; (history_len - 1) * slots];
                // Another row for each slot.
                for slot in 0..slots {
                    rows[(place + slot) % (history_len - 1) * slots + slot] = 64.0 + slot as f32;
                }
                arena.set_history(&rows)?;
                arena.merge_staged(&vec![2.0; slots])?;
                let update =
                    ScaleUpdate { amax: AmaxRule::Max, rule: &rule, interval: 1, record_non_finite: false };
                ops::update_scales(&mut arena, &update)?;
                Ok([arena.scales()?, arena.history()?, arena.staged()?].map(Got::Numbers).into())
            })?;
        }
    }
    Ok(())
}

/// Windows that end at each of the rows that a GPU's thread takes.
fn every_length(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    for history_len in 1..=66 {
        same_as_cpu(&format!("{history_len} rows"), device, |device| {
            let mut arena = Arena::new(9, ArenaOptions { history_len, ..ArenaOptions::default() }, device)?;
            let rows = (0..(history_len - 1) * 9).map(|i| (i * 7919 % 1009) as f32 + 1.0);
            arena.set_history(&rows.collect::<Vec<_>>())?;
            arena.merge_staged(&[2.0; 9])?;
            ops::update_scales(&mut arena, &update(&rule))?;
            Ok([arena.scales()?, arena.history()?, arena.staged()?].map(Got::Numbers).into())
        })?;
    }
    Ok(())
}

/// Amaxes of a slot, and its scale and cast scale after each.
fn cast_scales_are_those_before_the_update_or_the_first(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    for first in [UNSET, 1.0] {
        let steps = [
            (Some(0.0), first, UNSET),
            (Some(f32::INFINITY), first, UNSET),
            (None, first, UNSET),
            (Some(3.5), 128.0, 128.0),
            (None, 128.0, 128.0),
            (Some(7.0), 64.0, 128.0),
            (None, 64.0, 64.0),
            (Some(0.0), 64.0, 64.0),
            (Some(f32::NAN), 64.0, 64.0),
            (Some(1.75), 256.0, 64.0),
        ];
        let options = ArenaOptions { history_len: 2, first_scale: first, ..ArenaOptions::default() };
        let mut arena = Arena::new(11, options, device)?;
        let update =
            ScaleUpdate { amax: AmaxRule::MostRecent, rule: &rule, interval: 1, record_non_finite: false };
        for (step, (amax, scale, cast_scale)) in steps.into_iter().enumerate() {
            // Slot 3 runs a step later than slot 10, and the others do not.
            for (slot, delay) in [(10, 0), (3, 1)] {
                let amax = step.checked_sub(delay).and_then(|step| steps[step].0);
                amax.map_or(Ok(()), |amax| staging(&arena, slot)?.merge_max(amax))?;
            }
            let kept = arena.kept_scales()?;
            ops::update_scales(&mut arena, &update)?;
            let what = format!("first scale {first}, step {step} of amax {amax:?}");
            let found = [arena.scales()?[10], arena.cast_scales()?[10]];
            same(&what, &found, &[scale, cast_scale], 1)?;
            let cells = kept.fill(&arena, &[10, 3])?;
            let before = if step == 0 { UNSET } else { steps[step - 1].2 };
            same(&what, &[cells[0].read()?, cells[1].read()?], &[cast_scale, before], 1)?;
            equal(&what, arena.cast_scales()?[0], UNSET)?;
        }
        equal("determined", [arena.is_determined(10), arena.is_determined(0)], [true, false])?;
    }
    Ok(())
}

/// With an interval, only some updates compute scales.
fn cast_scales_of_an_update_that_keeps_the_scales(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    let options = ArenaOptions { history_len: 1, first_scale: 1.0, ..ArenaOptions::default() };
    let mut arena = Arena::new(1, options, device)?;
    let update = ScaleUpdate { amax: AmaxRule::Max, rule: &rule, interval: 2, record_non_finite: false };
    let steps = [(3.5, 1.0, UNSET), (7.0, 64.0, 64.0), (3.5, 64.0, 64.0), (3.5, 128.0, 64.0)];
    for (amax, scale, cast_scale) in steps {
        arena.merge_staged(&[amax])?;
        ops::update_scales(&mut arena, &update)?;
        same("scales", &[arena.scales()?[0], arena.cast_scales()?[0]], &[scale, cast_scale], 1)?;
    }
    Ok(())
}

pub(super) fn staging(arena: &Arena, slot: usize) -> Result<&Cell, Error> {
    arena.staging(slot).ok_or(Error::Option {
        op: "test",
        option: "slot",
        value: slot.to_string(),
        remedy: "no such slot".to_owned(),
    })
}

pub(super) fn scale(arena: &Arena, slot: usize) -> Result<f32, Error> {
    arena.scale(slot).map_or(Ok(f32::NAN), Cell::read)
}

pub(super) fn rule(margin: i32, policy: ScalePolicy) -> ScaleRule {
    ScaleRule::Delayed { fp8_max: 448.0, margin, policy }
}

pub(super) const fn update(rule: &ScaleRule) -> ScaleUpdate<'_> {
    ScaleUpdate { amax: AmaxRule::Max, rule, interval: 1, record_non_finite: false }
}

fn a_random_run_equals_the_oracle(device: &Device) -> Outcome {
    let mut random = Random::new(17);
    for history_len in [1, 2, 3, 7, 16] {
        for choice in 0..40 {
            let [power_of_two, keep_non_finite, te_rest] = [1, 2, 4].map(|bit| choice & bit != 0);
            let margin = [0, 2, -3, 200][choice % 4];
            let interval = [1, 3][choice / 2 % 2];
            let rest = if te_rest { 0.0 } else { REST };
            let options = ArenaOptions { history_len, rest, first_scale: if te_rest { 1.0 } else { UNSET } };
            let mut arena = Arena::new(5, options, device)?;
            let policy = if power_of_two { ScalePolicy::PowerOfTwo } else { ScalePolicy::Exact };
            let rule = rule(margin, policy);
            let n = 1 + choice % history_len;
            let decay = [0.5, 0.9, 0.999, 1e-3][choice % 4];
            let (amax, told) = match choice / 8 {
                0 => (AmaxRule::Max, oracle::Choice::Largest(history_len)),
                1 => (AmaxRule::MostRecent, oracle::Choice::Largest(1)),
                2 => (AmaxRule::MaxOfLast(n), oracle::Choice::Largest(n)),
                _ => (AmaxRule::Average { decay }, oracle::Choice::Average { decay }),
            };
            let told =
                oracle::Options { fp8_max: 448.0, margin, power_of_two, choice: told, keep_non_finite };
            let window: VecDeque<f32> = std::iter::repeat_n(0.0, history_len - 1).collect();
            let fresh = oracle::Slot { window, scale: te_rest.then_some(1.0), non_finite: 0 };
            let mut slots = vec![fresh; 5];
            for step in 1..24u64 {
                for (slot, expected) in slots.iter_mut().enumerate() {
                    let value = match random.bits() % 12 {
                        0 | 1 => None,
                        2 => Some(0.0),
                        3 => Some(f32::INFINITY),
                        4 => Some(f32::NAN),
                        5 => Some(f32::from_bits(1)),
                        6 => Some(f32::MAX),
                        _ => Some(random.normal().abs() * f32::powi(2.0, (random.bits() % 40) as i32 - 20)),
                    };
                    if let Some(value) = value {
                        staging(&arena, slot)?.merge_max(value)?;
                    }
                    // Under the rule that rests at 0, a zero did not run.
                    let value = value.filter(|&value| !(te_rest && value == 0.0));
                    expected.update(value, step % interval == 0, &told);
                }
                let update = ScaleUpdate { amax, rule: &rule, interval, record_non_finite: keep_non_finite };
                ops::update_scales(&mut arena, &update)?;
                for (slot, expected) in slots.iter().enumerate() {
                    let what = format!("len {history_len}, choice {choice}, step {step}, slot {slot}");
                    same(
                        &format!("{what}: scale"),
                        &[scale(&arena, slot)?],
                        &[expected.scale.unwrap_or(UNSET)],
                        1,
                    )?;
                    let window: Vec<f32> = expected.window.iter().copied().collect();
                    same(&format!("{what}: window"), &arena.window(slot)?, &window, 1)?;
                    equal(&what, arena.skipped_non_finite(slot)?, expected.non_finite)?;
                    same(&format!("{what}: staging"), &[staging(&arena, slot)?.read()?], &[rest], 1)?;
                }
            }
            equal("updates", arena.updates(), 23)?;
        }
    }
    Ok(())
}

fn one_row_is_staging_and_window(device: &Device) -> Outcome {
    let rule = rule(0, ScalePolicy::Exact);
    for (amax, want) in
        [(0.0, 1.0), (f32::INFINITY, 1.0), (f32::NAN, 1.0), (448.0 / f32::MAX / 2.0, f32::MAX), (3.5, 128.0)]
    {
        let options = ArenaOptions { history_len: 1, first_scale: 1.0, ..ArenaOptions::default() };
        for record_non_finite in [false, true] {
            let mut arena = Arena::new(1, options, device)?;
            staging(&arena, 0)?.merge_max(amax)?;
            ops::update_scales(&mut arena, &ScaleUpdate { record_non_finite, ..update(&rule) })?;
            equal(&format!("scale for {amax}"), scale(&arena, 0)?, want)?;
            equal("staging", staging(&arena, 0)?.read()?, REST)?;
        }
    }
    Ok(())
}

fn worked_run(device: &Device) -> Outcome {
    let mut arena = Arena::new(1, ArenaOptions::default(), device)?;
    let rule = rule(2, ScalePolicy::Exact);
    for (step, want) in [448.0, 89.6, 49.7778, 34.4615].into_iter().enumerate() {
        staging(&arena, 0)?.merge_max(step as f32 + 0.25)?;
        ops::update_scales(&mut arena, &update(&rule))?;
        equal("scale", (scale(&arena, 0)? * 1e4).round(), (want * 1e4f32).round())?;
    }
    let window = arena.window(0)?;
    equal("rows", window.len(), 1023)?;
    equal("tail", window[1018..].to_vec(), vec![0.0, 0.25, 1.25, 2.25, 3.25])
}

fn the_oldest_counts_once_more(device: &Device) -> Outcome {
    let mut arena = Arena::new(1, ArenaOptions { history_len: 3, ..ArenaOptions::default() }, device)?;
    arena.set_window(0, &[7.0, 1.0])?;
    let rule = exact(Encoding::E4M3);
    for (amax, want, window) in [(2.0, 64.0, [1.0, 2.0]), (1.0, 224.0, [2.0, 1.0])] {
        staging(&arena, 0)?.merge_max(amax)?;
        ops::update_scales(&mut arena, &update(&rule))?;
        equal("scale", scale(&arena, 0)?, want)?;
        equal("window", arena.window(0)?, window.to_vec())?;
    }
    Ok(())
}

fn did_not_run(device: &Device) -> Outcome {
    let mut arena = Arena::new(3, ArenaOptions { history_len: 4, ..ArenaOptions::default() }, device)?;
    arena.set_window(1, &[1.0, 2.0, 3.0])?;
    arena.scale(1).ok_or("slot 1")?.write(5.0)?;
    // Not a first scale: those are negative.
    arena.scale(2).ok_or("slot 2")?.write(0.0)?;
    staging(&arena, 0)?.merge_max(7.0)?;
    ops::update_scales(&mut arena, &update(&exact(Encoding::E4M3)))?;
    equal("scales", arena.scales()?, vec![64.0, 5.0, 0.0])?;
    equal("window", arena.window(1)?, vec![1.0, 2.0, 3.0])
}

fn zeros_are_zeros(device: &Device) -> Outcome {
    for (rest, want) in [(REST, vec![2.0, 0.0]), (0.0, vec![1.0, 2.0])] {
        let options = ArenaOptions { history_len: 3, rest, first_scale: 1.0 };
        let mut arena = Arena::new(1, options, device)?;
        arena.set_window(0, &[1.0, 2.0])?;
        staging(&arena, 0)?.merge_max(0.0)?;
        ops::update_scales(&mut arena, &update(&exact(Encoding::E4M3)))?;
        equal(&format!("window, rest {rest}"), arena.window(0)?, want)?;
    }
    Ok(())
}

fn a_non_finite_amax_is_left_out(device: &Device) -> Outcome {
    for amax in [f32::INFINITY, f32::NAN] {
        let options = ArenaOptions { history_len: 3, first_scale: 9.0, ..ArenaOptions::default() };
        let (mut arena, rule) = (Arena::new(1, options, device)?, exact(Encoding::E4M3));
        arena.set_window(0, &[1.0, 2.0])?;
        staging(&arena, 0)?.merge_max(amax)?;
        ops::update_scales(&mut arena, &update(&rule))?;
        equal("window", arena.window(0)?, vec![1.0, 2.0])?;
        equal("scale and count", (scale(&arena, 0)?, arena.skipped_non_finite(0)?), (9.0, 1))?;
        staging(&arena, 0)?.merge_max(amax)?;
        let recording = ScaleUpdate { record_non_finite: true, ..update(&rule) };
        ops::update_scales(&mut arena, &recording)?;
        same("recorded", &arena.window(0)?, &[2.0, amax], 1)?;
        // NaN is skipped by the maximum; an infinity keeps the old scale.
        equal("scale", scale(&arena, 0)?, if amax.is_nan() { 224.0 } else { 9.0 })?;
    }
    Ok(())
}

fn a_first_scale_becomes_final_or_unset(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    for (amax, want) in [
        (Some(3.5), 128.0), // the reduced amax decides, not the local one the scale was taken from
        (Some(0.0), UNSET),
        (Some(f32::INFINITY), UNSET),
        (None, UNSET),
    ] {
        let mut arena = Arena::new(1, ArenaOptions { history_len: 2, ..ArenaOptions::default() }, device)?;
        arena.scale(0).ok_or("slot 0")?.write(-77.0)?;
        if let Some(amax) = amax {
            staging(&arena, 0)?.merge_max(amax)?;
        }
        ops::update_scales(&mut arena, &ScaleUpdate { interval: 100, ..update(&rule) })?;
        equal(&format!("scale after {amax:?}"), scale(&arena, 0)?, want)?;
    }
    let arena = Arena::new(2, ArenaOptions::default(), device)?;
    arena.scale(0).ok_or("slot 0")?.write(-77.0)?;
    arena.scale(1).ok_or("slot 1")?.write(77.0)?;
    staging(&arena, 1)?.merge_max(2.0)?;
    arena.roll_back()?;
    equal("rolled back", (scale(&arena, 0)?, scale(&arena, 1)?), (UNSET, 77.0))?;
    equal("staging", arena.staged()?, vec![REST, REST])
}

fn interval(device: &Device) -> Outcome {
    let options = ArenaOptions { history_len: 3, first_scale: 1.0, ..ArenaOptions::default() };
    let mut arena = Arena::new(1, options, device)?;
    let rule = exact(Encoding::E4M3);
    for (step, want) in [1.0, 1.0, 448.0 / 3.0, 448.0 / 3.0, 448.0 / 3.0, 448.0 / 6.0].into_iter().enumerate()
    {
        staging(&arena, 0)?.merge_max(step as f32 + 1.0)?;
        ops::update_scales(&mut arena, &ScaleUpdate { interval: 3, ..update(&rule) })?;
        equal(&format!("scale after update {}", step + 1), scale(&arena, 0)?, want)?;
        equal("newest", arena.window(0)?[1], step as f32 + 1.0)?;
    }
    Ok(())
}

/// Blocks of slots and one more; slots that run in one arena, the other, both or neither; amaxes that are left out.
/// Scales that only [`Arena::set_scales`] can store, NaN among them, in updates that keep scales and in those that do not.
fn scales_of_every_kind_at_each_interval(device: &Device) -> Outcome {
    let scales = [f32::NAN, -f32::NAN, f32::INFINITY, UNSET, -64.0, -0.0, 0.0, f32::from_bits(1), 64.0];
    let rule = exact(Encoding::E4M3);
    for interval in [1, 2, 3, u64::MAX] {
        for amax in [3.5, 0.0, f32::INFINITY] {
            same_as_cpu(&format!("interval {interval}, amax {amax}"), device, |device| {
                let options = ArenaOptions { history_len: 3, ..ArenaOptions::default() };
                let mut arena = Arena::new(scales.len(), options, device)?;
                arena.set_scales(&scales)?;
                let update =
                    ScaleUpdate { amax: AmaxRule::Max, rule: &rule, interval, record_non_finite: false };
                let mut results = Vec::new();
                for _ in 0..3 {
                    arena.merge_staged(&[amax; 9])?;
                    ops::update_scales(&mut arena, &update)?;
                    results.extend([arena.scales()?, arena.cast_scales()?].map(Got::Numbers));
                }
                Ok(results)
            })?;
        }
    }
    Ok(())
}

fn arenas_with_one_clock_know_which_updated_a_slot_last(device: &Device) -> Outcome {
    const SLOTS: usize = 17;
    let rule = exact(Encoding::E4M3);
    let newest = |window: &[f32]| window.last().copied().unwrap_or(0.0);
    for amax in [AmaxRule::Max, AmaxRule::Custom(&newest)] {
        for history_len in [1, 3] {
            let clock = UpdateClock::new(SLOTS, device)?;
            let options = ArenaOptions { history_len, ..ArenaOptions::default() };
            let mut arenas = [Arena::with_clock(&clock, options)?, Arena::with_clock(&clock, options)?];
            let mut counted = [0u64; SLOTS];
            let mut last = [[0u64; SLOTS]; 2];
            for step in 0..6 {
                let which = step % 3 % 2;
                let staged: Vec<f32> = (0..SLOTS)
                    .map(|slot| match (slot + step) % 5 {
                        0 => REST,
                        1 => f32::INFINITY,
                        2 => 0.0,
                        _ => 1.0 + slot as f32,
                    })
                    .collect();
                arenas[which].merge_staged(&staged)?;
                // Scales are not recomputed at each update; windows roll all the same.
                let interval = 1 + step as u64 % 2;
                ops::update_scales(&mut arenas[which], &ScaleUpdate { amax, interval, ..update(&rule) })?;
                for slot in (0..SLOTS).filter(|&slot| staged[slot] >= 0.0 && staged[slot].is_finite()) {
                    counted[slot] += 1;
                    last[which][slot] = counted[slot];
                }
                let what = format!("{amax:?}, {history_len} rows, step {step}");
                equal(&format!("{what}: clock"), clock.read()?, counted.to_vec())?;
                for (arena, last) in arenas.iter().zip(&last) {
                    equal(&what, arena.last_updates()?, last.to_vec())?;
                }
            }
            // Resuming sets both, and counting goes on from there.
            clock.set(&[40; SLOTS])?;
            arenas[0].set_last_updates(&[7; SLOTS])?;
            let mut staged = [REST; SLOTS];
            staged[16] = 2.0;
            arenas[0].merge_staged(&staged)?;
            ops::update_scales(&mut arenas[0], &ScaleUpdate { amax, ..update(&rule) })?;
            let mut expected = vec![7; SLOTS];
            expected[16] = 41;
            equal("last updates after resuming", arenas[0].last_updates()?, expected)?;
            refused(clock.set(&[1; SLOTS - 1]), "16 elements")?;
            refused(arenas[0].set_last_updates(&[1; SLOTS + 1]), "18 elements")?;
        }
    }
    Ok(())
}

fn custom_functions(device: &Device) -> Outcome {
    let options = ArenaOptions { history_len: 3, first_scale: 1.0, ..ArenaOptions::default() };
    let mut arena = Arena::new(1, options, device)?;
    arena.set_window(0, &[4.0, 2.0])?;
    staging(&arena, 0)?.merge_max(8.0)?;
    // Oldest to newest, the current one last.
    let digits = |window: &[f32]| window.iter().fold(0.0, |sum, v| sum * 10.0 + v);
    let function = Arc::new(|amax: f32, old: f32, max: f32| amax + old + max);
    let policy = ScalePolicy::Custom(CustomPolicy { name: "sum".into(), function });
    let rule = rule(0, policy);
    let update = ScaleUpdate { amax: AmaxRule::Custom(&digits), ..update(&rule) };
    ops::update_scales(&mut arena, &update)?;
    equal("scale", scale(&arena, 0)?, 428.0 + 1.0 + 448.0)?;
    equal("window", arena.window(0)?, vec![2.0, 8.0])
}

fn a_refused_scale_changes_nothing(device: &Device) -> Outcome {
    let options = ArenaOptions { history_len: 3, first_scale: 1.0, ..ArenaOptions::default() };
    let mut arena = Arena::new(2, options, device)?;
    arena.set_window(0, &[4.0, 2.0])?;
    staging(&arena, 0)?.merge_max(1.0)?;
    staging(&arena, 1)?.merge_max(5.0)?;
    let function = Arc::new(|amax: f32, _: f32, _: f32| if amax > 4.0 { f32::NAN } else { 2.0 });
    let policy = ScalePolicy::Custom(CustomPolicy { name: "picky".into(), function });
    let rule = rule(0, policy);
    let update = update(&rule);
    refused(ops::check_scales(&arena, &update), "scale policy `picky` returned NaN for amax 5")?;
    refused(ops::update_scales(&mut arena, &update), "scale policy `picky` returned NaN for amax 5")?;
    equal("scales", [scale(&arena, 0)?, scale(&arena, 1)?], [1.0, 1.0])?;
    equal("window", arena.window(0)?, vec![4.0, 2.0])?;
    equal("staging", arena.staged()?, vec![1.0, 5.0])?;
    equal("updates", arena.updates(), 0)
}
