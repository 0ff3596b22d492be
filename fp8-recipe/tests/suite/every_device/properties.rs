//! The update against an oracle written another way: it keeps every amax that was ever recorded and computes each scale
//! from that list, in f64 and with integers.

use super::support::{input, scaling, slot_state};
use fp8_recipe::{AmaxComputeAlgo, DelayedScaling, Format, Recipe, ScalingFactorComputeAlgo};
use proptest::prelude::*;

/// One slot: all amaxes recorded so far and the scale; NaN for one that was never calibrated.
struct Oracle {
    recorded: Vec<f32>,
    scale: f32,
    updates: u64,
}

impl Oracle {
    fn update(&mut self, recipe: &DelayedScaling, staged: Option<f32>) {
        self.updates += 1;
        let ran = staged.filter(|amax| {
            let is_skipped_zero = recipe.zero_is_skipped && *amax == 0.0;
            !is_skipped_zero && (amax.is_finite() || recipe.record_non_finite)
        });
        let Some(amax) = ran else { return };
        self.recorded.push(amax);
        if !self.updates.is_multiple_of(recipe.interval) && !self.scale.is_nan() {
            return;
        }
        let chosen = match recipe.amax_compute_algo {
            AmaxComputeAlgo::Max => {
                let window = self.recorded.iter().rev().take(recipe.amax_history_len);
                let mut numbers: Vec<f32> = window.copied().filter(|amax| !amax.is_nan()).collect();
                numbers.sort_by(f32::total_cmp);
                numbers.last().copied().unwrap_or(f32::NAN)
            }
            _ => amax,
        };
        if chosen == 0.0 || chosen.is_nan() || chosen.is_infinite() {
            return;
        }
        let fp8_max = 448.0_f64;
        self.scale = match recipe.scaling_factor_compute_algo {
            ScalingFactorComputeAlgo::Exact => {
                // The quotient of two f32 in f64, rounded to f32, is their correctly rounded quotient.
                let quotient = (fp8_max / 2_f64.powi(recipe.margin)) / f64::from(chosen);
                (quotient as f32).min(f32::MAX).max(2_f32.powi(-126))
            }
            _ => {
                // Count up from the smallest power while the next still fits.
                let quotient = f64::from((fp8_max / f64::from(chosen)) as f32).min(2_f64.powi(128));
                let mut exponent = -160;
                while 2_f64.powi(exponent + 1) <= quotient {
                    exponent += 1;
                }
                2_f32.powi((exponent - recipe.margin).clamp(-126, 127))
            }
        };
    }

    fn window(&self, len: usize) -> Vec<f32> {
        let zeros = std::iter::repeat_n(0.0, len);
        let all: Vec<f32> = zeros.chain(self.recorded.iter().copied()).collect();
        all[all.len() - (len - 1)..].to_vec()
    }
}

fn recipe() -> impl Strategy<Value = DelayedScaling> {
    let rules = (any::<bool>(), any::<bool>(), any::<bool>());
    (-12..12, 1..5_u64, 1..9_usize, any::<bool>(), any::<bool>(), rules).prop_map(
        |(margin, interval, amax_history_len, max, exact, (calibrate, non_finite, zero))| DelayedScaling {
            margin,
            interval,
            fp8_format: Format::E4M3,
            amax_history_len,
            amax_compute_algo: if max { AmaxComputeAlgo::Max } else { AmaxComputeAlgo::MostRecent },
            scaling_factor_compute_algo: if exact {
                ScalingFactorComputeAlgo::Exact
            } else {
                ScalingFactorComputeAlgo::PowerOfTwo
            },
            calibrate_first_step: calibrate,
            record_non_finite: non_finite,
            zero_is_skipped: zero,
            ..Default::default()
        },
    )
}

/// None: the slot does not run.
fn staged() -> impl Strategy<Value = Option<f32>> {
    prop_oneof![
        2 => Just(None),
        1 => Just(Some(0.0)),
        1 => Just(Some(f32::INFINITY)),
        1 => Just(Some(f32::NAN)),
        1 => Just(Some(f32::MAX)),
        1 => Just(Some(1e-45)),
        4 => (0.0..1000.0_f32).prop_map(Some),
        2 => (0..0x7F80_0000_u32).prop_map(|bits| Some(f32::from_bits(bits))),
        1 => (-20..20_i32).prop_map(|e| Some(2_f32.powi(e))),
    ]
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_update_is_the_oracles(options in recipe(), stream in prop::collection::vec(staged(), 1..40)) {
        let mut scaling = scaling(&["a"]);
        let first = if options.calibrate_first_step { f32::NAN } else { 1.0 };
        let mut oracle = Oracle { recorded: Vec::new(), scale: first, updates: 0 };
        let recipe = Recipe::from(options.clone());
        for (number, staged) in stream.iter().enumerate() {
            let mut cx = scaling.autocast(&recipe).unwrap();
            if let Some(amax) = staged {
                cx.slot(&input("a")).unwrap().amax.unwrap().merge_max(*amax).unwrap();
            }
            cx.commit().unwrap();
            oracle.update(&options, *staged);

            let (scale, window) = slot_state(&scaling, &input("a"));
            let expected = if oracle.scale.is_nan() { -1.0 } else { oracle.scale };
            prop_assert!(same(scale, expected), "step {number}: scale {scale:e}, expected {expected:e}");
            let rows = oracle.window(options.amax_history_len);
            prop_assert!(
                window.len() == rows.len() && window.iter().zip(&rows).all(|(a, b)| same(*a, *b)),
                "step {number}: window {window:?}, expected {rows:?}"
            );
            prop_assert!(scale.is_finite() && scale.recip().is_finite());
        }
    }
}
