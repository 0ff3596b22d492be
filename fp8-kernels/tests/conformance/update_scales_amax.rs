//! Tests how an update takes an amax from a window, and which values a user's functions see.

use super::case::{Outcome, cases};
use super::compare::{equal, refused, same};
use super::data::{Random, exact};
use super::update_scales::{rule, scale, staging, update};
use crate::oracle::scales as oracle;
use fp8_kernels::{Arena, ArenaOptions, CustomPolicy, Device, Encoding, ScalePolicy, UNSET, ops};
use ops::{AmaxRule, ScaleUpdate};
use std::sync::Arc;

cases![
    the_maximum_of_the_newest_amaxes,
    an_average_is_that_of_the_oracle,
    an_average_is_never_below_the_newest_amax,
    an_average_that_rounds_to_zero_is_still_an_average,
    an_infinity_in_the_window_keeps_the_scale_of_an_average,
    an_amax_rule_out_of_range_is_refused,
    a_user_function_sees_only_finite_amaxes_above_zero,
    a_user_amax_that_says_nothing_keeps_the_scale,
];

/// Every `n` of windows around the rows that a GPU's thread takes: 9 slots whose amaxes fall with age, rise or jump.
fn the_maximum_of_the_newest_amaxes(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    for history_len in [1, 2, 3, 9, 32, 33, 70] {
        let rows: Vec<f32> = (0..(history_len - 1) * 9)
            .map(|i| match i % 9 {
                0 => (i / 9) as f32 + 1.0,
                1 => (history_len - i / 9) as f32,
                _ => (i * 7919 % 1009) as f32 + 1.0,
            })
            .collect();
        for n in 1..=history_len {
            let mut arena = Arena::new(9, ArenaOptions { history_len, ..ArenaOptions::default() }, device)?;
            arena.set_history(&rows)?;
            arena.merge_staged(&[2.0; 9])?;
            ops::update_scales(&mut arena, &ScaleUpdate { amax: AmaxRule::MaxOfLast(n), ..update(&rule) })?;
            let expected: Vec<f32> = (0..9)
                .map(|slot| {
                    let newest = rows.iter().skip(slot).step_by(9).rev().take(n - 1);
                    448.0 / newest.fold(2.0, |largest, &amax| if amax > largest { amax } else { largest })
                })
                .collect();
            same(&format!("{n} of {history_len} rows"), &arena.scales()?, &expected, 1)?;
        }
    }
    Ok(())
}

/// Long windows of amaxes of many magnitudes, with rows of 0 and NaN.
fn an_average_is_that_of_the_oracle(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    let mut random = Random::new(29);
    // Every number of rows that a thread has left at the end.
    for history_len in (1..=17).chain([65, 300]) {
        for decay in [f32::MIN_POSITIVE, 0.3, 0.9, 1.0 - f32::EPSILON / 2.0] {
            let slots = 9;
            let mut amax = || match random.bits() % 8 {
                0 => 0.0,
                1 => f32::NAN,
                2 => f32::from_bits(1 + (random.bits() % 9) as u32),
                _ => random.normal().abs() * f32::powi(2.0, (random.bits() % 60) as i32 - 30),
            };
            let rows: Vec<f32> = (0..(history_len - 1) * slots).map(|_| amax()).collect();
            let newest: Vec<f32> = (0..slots).map(|_| amax()).collect();
            let options = ArenaOptions { history_len, ..ArenaOptions::default() };
            let mut arena = Arena::new(slots, options, device)?;
            arena.set_history(&rows)?;
            for (slot, &amax) in newest.iter().enumerate() {
                staging(&arena, slot)?.merge_max(amax)?;
            }
            let average = AmaxRule::Average { decay };
            let update = ScaleUpdate { amax: average, record_non_finite: true, ..update(&rule) };
            ops::update_scales(&mut arena, &update)?;
            let choice = oracle::Choice::Average { decay };
            let told = oracle::Options {
                fp8_max: 448.0,
                margin: 0,
                power_of_two: false,
                choice,
                keep_non_finite: true,
            };
            for (slot, &amax) in newest.iter().enumerate() {
                let window = rows.iter().skip(slot).step_by(slots).copied().collect();
                let mut expected = oracle::Slot { window, scale: None, non_finite: 0 };
                expected.update(Some(amax), true, &told);
                let what = format!("{history_len} rows, decay {decay}, slot {slot}");
                same(&what, &[scale(&arena, slot)?], &[expected.scale.unwrap_or(UNSET)], 1)?;
                // What a start from saved amaxes computes on the host.
                let window: Vec<f32> = rows.iter().skip(slot).step_by(slots).copied().chain([amax]).collect();
                same(&what, &[update.scale_of(&window, UNSET)?], &[scale(&arena, slot)?], 1)?;
            }
        }
    }
    Ok(())
}

fn an_average_is_never_below_the_newest_amax(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    let update = ScaleUpdate { amax: AmaxRule::Average { decay: 0.5 }, ..update(&rule) };
    let mut arena = Arena::new(1, ArenaOptions { history_len: 4, ..ArenaOptions::default() }, device)?;
    // 8 → 8; then 0.5 · 8 + 0.5 · 2 = 5; the zero is skipped: 5; then 0.5 · 5 + 0.5 · 64 = 34.5 < 64.
    for (amax, chosen) in [(8.0, 8.0), (2.0, 5.0), (0.0, 5.0), (64.0, 64.0)] {
        staging(&arena, 0)?.merge_max(amax)?;
        ops::update_scales(&mut arena, &update)?;
        equal(&format!("scale after {amax}"), scale(&arena, 0)?, 448.0 / chosen)?;
    }
    equal("window", arena.window(0)?, vec![2.0, 0.0, 64.0])?;
    // The window holds the amaxes alone. Of zeros alone there is no average.
    let mut arena = Arena::new(1, ArenaOptions { history_len: 4, ..ArenaOptions::default() }, device)?;
    staging(&arena, 0)?.merge_max(0.0)?;
    ops::update_scales(&mut arena, &update)?;
    equal("scale of zeros", scale(&arena, 0)?, UNSET)
}

/// The average of two smallest numbers rounds to 0 and is no less an average: the next amax has its share of the weight. Each
/// slot has them in another row.
fn an_average_that_rounds_to_zero_is_still_an_average(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    let (slots, history_len) = (9, 13);
    let mut rows = vec![0.0; (history_len - 1) * slots];
    for slot in 0..slots {
        for (row, amax) in [f32::from_bits(1), f32::from_bits(1), 4.0].into_iter().enumerate() {
            rows[(slot + row) * slots + slot] = amax;
        }
    }
    let mut arena = Arena::new(slots, ArenaOptions { history_len, ..ArenaOptions::default() }, device)?;
    arena.set_history(&rows)?;
    arena.merge_staged(&[1.0; 9])?;
    ops::update_scales(&mut arena, &ScaleUpdate { amax: AmaxRule::Average { decay: 0.5 }, ..update(&rule) })?;
    // 0; 0.5 · 0 + 0.5 · 4 = 2; 0.5 · 2 + 0.5 · 1 = 1.5.
    equal("scales", arena.scales()?, vec![448.0 / 1.5; 9])
}

fn an_infinity_in_the_window_keeps_the_scale_of_an_average(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    for record_non_finite in [false, true] {
        let average = AmaxRule::Average { decay: 0.5 };
        let update = ScaleUpdate { amax: average, record_non_finite, ..update(&rule) };
        let mut arena = Arena::new(1, ArenaOptions { history_len: 3, ..ArenaOptions::default() }, device)?;
        let mut scales = Vec::new();
        for amax in [4.0, f32::INFINITY, 2.0, 2.0, 2.0] {
            staging(&arena, 0)?.merge_max(amax)?;
            ops::update_scales(&mut arena, &update)?;
            scales.push(448.0 / scale(&arena, 0)?);
        }
        let expected = if record_non_finite { [4.0, 4.0, 4.0, 4.0, 2.0] } else { [4.0, 4.0, 3.0, 2.5, 2.0] };
        same("amaxes", &scales, &expected, 1)?;
    }
    Ok(())
}

fn an_amax_rule_out_of_range_is_refused(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    let mut arena = Arena::new(1, ArenaOptions { history_len: 3, ..ArenaOptions::default() }, device)?;
    staging(&arena, 0)?.merge_max(2.0)?;
    for (amax, message) in [
        (AmaxRule::MaxOfLast(0), "MaxOfLast = 0: expected 1 to 3, the rows of the history"),
        (AmaxRule::MaxOfLast(4), "MaxOfLast = 4: expected 1 to 3, the rows of the history"),
        (AmaxRule::Average { decay: 0.0 }, "decay = 0: expected a number between 0 and 1, exclusive"),
        (AmaxRule::Average { decay: 1.0 }, "decay = 1: expected a number between 0 and 1, exclusive"),
        (AmaxRule::Average { decay: f32::NAN }, "decay = NaN: expected a number between 0 and 1, exclusive"),
    ] {
        let update = ScaleUpdate { amax, ..update(&rule) };
        refused(ops::update_scales(&mut arena, &update), message)?;
        refused(ops::check_scales(&arena, &update), message)?;
        refused(update.scale_of(&[1.0, 2.0, 3.0], UNSET).map(drop), message)?;
    }
    equal("staging", arena.staged()?, vec![2.0])
}

/// A slot of zeros, one of an infinity and one that is set, under every amax rule.
fn a_user_function_sees_only_finite_amaxes_above_zero(device: &Device) -> Outcome {
    let function = Arc::new(|amax: f32, _: f32, fp8_max: f32| 0.5 * fp8_max / amax);
    let rule = rule(0, ScalePolicy::Custom(CustomPolicy { name: "half".into(), function }));
    let newest = |window: &[f32]| window[window.len() - 1];
    let average = AmaxRule::Average { decay: 0.5 };
    for amax in
        [AmaxRule::Max, AmaxRule::MostRecent, AmaxRule::MaxOfLast(1), average, AmaxRule::Custom(&newest)]
    {
        for first_scale in [UNSET, 1.0] {
            let options = ArenaOptions { history_len: 2, first_scale, ..ArenaOptions::default() };
            let mut arena = Arena::new(3, options, device)?;
            arena.scale(2).ok_or("slot 2")?.write(7.0)?;
            arena.merge_staged(&[0.0, f32::INFINITY, 0.0])?;
            let update = ScaleUpdate { amax, record_non_finite: true, ..update(&rule) };
            ops::check_scales(&arena, &update)?;
            ops::update_scales(&mut arena, &update)?;
            let what = format!("{amax:?}, first scale {first_scale}");
            equal(&what, arena.scales()?, vec![first_scale, first_scale, 7.0])?;
            arena.merge_staged(&[3.5, 3.5, 3.5])?;
            ops::update_scales(&mut arena, &ScaleUpdate { amax: AmaxRule::MostRecent, ..update })?;
            equal(&what, arena.scales()?, vec![64.0; 3])?;
        }
    }
    Ok(())
}

fn a_user_amax_that_says_nothing_keeps_the_scale(device: &Device) -> Outcome {
    let function = Arc::new(|amax: f32, _: f32, fp8_max: f32| fp8_max / amax);
    let custom = rule(0, ScalePolicy::Custom(CustomPolicy { name: "bare".into(), function }));
    for rule in [custom, exact(Encoding::E4M3), rule(0, ScalePolicy::PowerOfTwo)] {
        for nothing in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let function = move |_: &[f32]| nothing;
            let update = ScaleUpdate { amax: AmaxRule::Custom(&function), ..update(&rule) };
            let mut arena =
                Arena::new(2, ArenaOptions { history_len: 2, ..ArenaOptions::default() }, device)?;
            arena.scale(1).ok_or("slot 1")?.write(7.0)?;
            arena.merge_staged(&[3.5, 3.5])?;
            ops::update_scales(&mut arena, &update)?;
            equal(&format!("{nothing} under {rule:?}"), arena.scales()?, vec![UNSET, 7.0])?;
        }
    }
    Ok(())
}
