//! Sums that large numbers pass through and leave without a trace: whoever drops what one addition rounds off loses the
//! small numbers beside them.

use super::case::Outcome;
use super::compare::{close, same};
use super::data::Random;
use fp8_kernels::{DType, Device};
use std::collections::{HashMap, HashSet};

/// The number of large values by seed, half of them negative. Few of them meet late in a sum, many meet at once.
const LARGE: [usize; 5] = [2, 2, 4, 16, 64];

/// Small integers and large numbers that cancel.
pub(crate) struct Cancelling {
    pub(crate) values: Vec<f32>,
    pub(crate) sum: f32,
    /// The sum of the magnitudes.
    pub(crate) size: f64,
}

/// Returns two numbers far apart that `dtype` holds exactly: a large one, and the unit of the small ones.
fn ends(dtype: DType) -> [f32; 2] {
    match dtype {
        DType::F16 => [f32::powi(2.0, 15), f32::powi(2.0, -24)],
        _ => [f32::powi(2.0, 50), 1.0],
    }
}

/// `len` values. Those of one group are added plainly: beside a large number they are zeros.
pub(crate) fn cancelling(
    len: usize,
    dtype: DType,
    seed: usize,
    group: impl Fn(usize) -> usize,
) -> Cancelling {
    let mut random = Random::new(seed as u64);
    let groups = (0..len).map(&group).collect::<HashSet<_>>().len();
    let count = LARGE[seed % LARGE.len()].min(groups / 2 * 2);
    // Groups, and the places in them by sign.
    let (mut taken, mut signs) = (HashSet::new(), HashMap::new());
    while taken.len() < count {
        let place = (random.bits() % len as u64) as usize;
        if taken.insert(group(place)) {
            signs.insert(place, if taken.len() % 2 == 1 { 1.0 } else { -1.0 });
        }
    }
    let [large, unit] = ends(dtype);
    let small = |bits: u64| (bits % 15) as f32 - 7.0;
    let values: Vec<f32> = (0..len)
        .map(|i| match (signs.get(&i), taken.contains(&group(i))) {
            (Some(sign), _) => sign * large,
            (None, true) => 0.0,
            (None, false) => small(random.bits()) * unit,
        })
        .collect();
    let sum = values.iter().map(|&v| f64::from(v)).filter(|v| v.abs() < f64::from(large)).sum::<f64>() as f32;
    let size = values.iter().map(|&v| f64::from(v.abs())).sum();
    Cancelling { values, sum, size }
}

/// Equal bits where sums are compensated: on a GPU. On the CPU what plain additions of numbers of that size may lose.
pub(crate) fn same_sums(what: &str, device: &Device, got: &[f32], want: &[f32], size: f64) -> Outcome {
    if device.to_string() != "cpu" {
        return same(what, got, want, want.len());
    }
    let want: Vec<f64> = want.iter().map(|&v| f64::from(v)).collect();
    close(what, got, &want, want.len(), [0.0, 1e-6 * size])
}
