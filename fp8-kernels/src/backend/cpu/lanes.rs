//! Sums and maxima over a slice, in an order that depends on its length alone and compiles to vectors.

const LANES: usize = 16;

/// The sum, in f32.
#[inline(always)]
pub(crate) fn sum(values: &[f32]) -> f32 {
    sum_by(values, |v| v)
}

/// `Σ f(v)`, in f32: element i goes to lane i mod 16, then lanes are added in halves.
#[inline(always)]
pub(crate) fn sum_by(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f(*v);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane += f(*v);
    }
    tree(lanes)
}

/// `Σ aᵢ·bᵢ`, in f32.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a.remainder(), b.remainder());
    for (a, b) in a.zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += a * b;
    }
    tree(lanes)
}

/// `Σ vᵢ²`, in f64: no f32 overflows it.
#[inline(always)]
pub(crate) fn sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    let square = |v: f32| f64::from(v) * f64::from(v);
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += square(*v);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane += square(*v);
    }
    lanes.iter().sum()
}

/// The largest value; NaN is skipped, no values give −∞.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *v);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, *v);
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, larger)
}

#[inline(always)]
fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
