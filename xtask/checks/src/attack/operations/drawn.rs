//! Recipes and rules that several families draw.

use fp8_kernels::{Encoding, ScalePolicy, ScaleRule};
use fp8_recipe::{AmaxComputeAlgo, DelayedScaling, Format, ScalingFactorComputeAlgo};

use super::super::draw::Draw;

/// Mostly options that are in range.
pub(crate) fn delayed(draw: &mut Draw) -> DelayedScaling {
    let usual = DelayedScaling::default();
    let (margin, interval, len) =
        (draw.pick(&[0, 0, 0, 1, 3, -2]), draw.pick(&[1, 1, 1, 2, 3]), draw.pick(&[1, 2, 3, 4, 9]));
    let mut recipe = DelayedScaling {
        margin: if draw.once_in(20) { draw.pick(&[100, -100, 101, i32::MIN, i32::MAX]) } else { margin },
        interval: if draw.once_in(20) { draw.pick(&[0, u64::MAX]) } else { interval },
        fp8_format: if draw.once_in(20) { Format::E5M2 } else { draw.pick(&[Format::Hybrid, Format::E4M3]) },
        amax_history_len: if draw.once_in(20) { draw.pick(&[0, 1024, 1 << 40, usize::MAX]) } else { len },
        ..usual
    };
    if draw.once_in(3) {
        recipe.amax_compute_algo = match draw.below(3) {
            0 => AmaxComputeAlgo::MaxOfLast(draw.below(5)),
            1 => AmaxComputeAlgo::Average { decay: draw.pick(&[0.1, 0.9]) },
            _ => AmaxComputeAlgo::MostRecent,
        };
    }
    if draw.once_in(4) {
        recipe.scaling_factor_compute_algo = ScalingFactorComputeAlgo::PowerOfTwo;
    }
    if draw.once_in(4) {
        recipe.override_linear_precision = (draw.flip(), draw.flip(), draw.flip());
    }
    if draw.once_in(4) { recipe.with_te_rules() } else { recipe }
}

/// A rule for first scales, or for all of them.
pub(crate) fn rule(draw: &mut Draw, encoding: Encoding) -> ScaleRule {
    let fp8_max = if draw.once_in(40) { draw.pick(&[1.0, f32::MAX, 1e-45]) } else { encoding.max() };
    let margin = draw.pick(&[0, 0, 0, 1, 3, -2, 140, -140, i32::MAX, i32::MIN]);
    match draw.below(4) {
        0 => {
            let epsilon = draw.pick(&[0.0, 1e-3, 10.0]);
            let (epsilon, power_2_scales) = (draw.option(epsilon), draw.flip());
            ScaleRule::Current { fp8_max, epsilon, power_2_scales }
        }
        1 => ScaleRule::Delayed { fp8_max, margin, policy: ScalePolicy::PowerOfTwo },
        _ => ScaleRule::Delayed { fp8_max, margin, policy: ScalePolicy::Exact },
    }
}
