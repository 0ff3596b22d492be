//! Inputs that break things: sizes around tiles, special values, and a generator whose stream never changes.

use fp8_kernels::{DType, Device, Encoding, Result, ScalePolicy, ScaleRule, Shape, Tensor, ops};

/// The high-precision types.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

pub(crate) const ENCODINGS: [Encoding; 2] = [Encoding::E4M3, Encoding::E5M2];

/// Elements of one piece of a backend's work: sums and maxima are combined across its ends.
pub(crate) const PIECE: usize = 16 * 1024;

/// Delayed scaling's rule without margin.
pub(crate) fn exact(encoding: Encoding) -> ScaleRule {
    ScaleRule::Delayed { fp8_max: encoding.max(), margin: 0, policy: ScalePolicy::Exact }
}

/// Every kind of rule, with margins that stay in range and that leave it.
pub(crate) fn rules() -> Vec<ScaleRule> {
    let fp8_max = 448.0;
    let delayed = [ScalePolicy::Exact, ScalePolicy::PowerOfTwo].into_iter().flat_map(|policy| {
        [0, 1, 3, -2, 140, -140, i32::MAX, i32::MIN].map(|margin| ScaleRule::Delayed {
            fp8_max,
            margin,
            policy: policy.clone(),
        })
    });
    let current = [0.0, 1e-3, 10.0].into_iter().flat_map(|epsilon| {
        [false, true].map(|power_2_scales| ScaleRule::Current { fp8_max, epsilon, power_2_scales })
    });
    delayed.chain(current).collect()
}

/// Numbers of elements on both sides of 2¹⁶, and it.
pub(crate) const AROUND_2_16: [usize; 3] = [(1 << 16) - 1, 1 << 16, (1 << 16) + 1];

/// Matrices around vectors, tiles and chunks of work; empty ones; primes.
pub(crate) const SHAPES: [[usize; 2]; 24] = [
    [0, 16],
    [3, 0],
    [1, 1],
    [1, 15],
    [16, 1],
    [2, 16],
    [5, 16],
    [6, 8],
    [7, 24],
    [3, 10],
    [3, 11],
    [3, 12],
    [3, 13],
    [3, 14],
    [17, 17],
    [31, 33],
    [33, 31],
    [7, 127],
    [5, 129],
    [63, 65],
    [97, 101],
    [1, AROUND_2_16[0]],
    [AROUND_2_16[1], 1],
    [1, AROUND_2_16[2]],
];

/// Signed zeros, subnormals, ties of both formats and of bf16, the ends of all ranges, infinities, NaNs.
pub(crate) fn specials() -> Vec<f32> {
    let positive = [
        0.0,
        f32::from_bits(1),
        f32::MIN_POSITIVE / 2.0,
        f32::MIN_POSITIVE,
        f32::powi(2.0, -24),
        f32::powi(2.0, -17),
        f32::powi(2.0, -16),
        1.5 * f32::powi(2.0, -16),
        f32::powi(2.0, -10),
        1.5 * f32::powi(2.0, -9),
        2.5 * f32::powi(2.0, -9),
        f32::powi(2.0, -6),
        1.0,
        1.0 + f32::powi(2.0, -4),
        1.0 + 3.0 * f32::powi(2.0, -4),
        1.0 + f32::powi(2.0, -8),
        1.0 + f32::powi(2.0, -3),
        1.0 + 3.0 * f32::powi(2.0, -3),
        3.3,
        447.9,
        448.0,
        463.9,
        464.0,
        464.1,
        480.0,
        57344.0,
        61439.0,
        61440.0,
        65504.0,
        65520.0,
        1e30,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
    ];
    positive.into_iter().flat_map(|v| [v, -v]).collect()
}

/// Returns the special values that arithmetic treats apart: zeros, subnormals, the largest, infinities, NaNs.
pub(crate) fn extremes() -> Vec<f32> {
    specials().into_iter().filter(|v| !v.is_normal() || v.abs() == f32::MAX).collect()
}

/// Normal values in rows of `cols`, and in each row one of `specials`, whose place moves from row to row.
pub(crate) fn special_rows(specials: &[f32], cols: usize, seed: u64) -> Vec<f32> {
    let mut values = Random::new(seed).normals(specials.len() * cols);
    specials.iter().enumerate().for_each(|(row, &special)| values[row * cols + row * 13 % cols] = special);
    values
}

/// Rounds `values` to `dtype`. Values beyond its range become infinite.
pub(crate) fn rounded(values: Vec<f64>, dtype: DType) -> Result<Vec<f64>> {
    let len = values.len();
    f64s(&tensor(values.into_iter().map(|v| v as f32).collect(), [len], dtype, &Device::cpu())?)
}

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// In [0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Mean 0, deviation 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }

    pub(crate) fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

/// Normal values, rounded to `dtype`; another seed, other values.
pub(crate) fn normal(shape: impl Into<Shape>, dtype: DType, seed: u64, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    tensor(Random::new(seed).normals(shape.numel()), shape, dtype, device)
}

/// `values`, rounded to `dtype`.
pub(crate) fn tensor(
    values: Vec<f32>,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    ops::cast(&Tensor::from_vec(values, shape, device)?, dtype)
}

/// The elements in f64.
pub(crate) fn f64s(x: &Tensor) -> Result<Vec<f64>> {
    Ok(x.to_f32_vec()?.into_iter().map(f64::from).collect())
}

/// rtol and atol of a result in `dtype` against the reference.
pub(crate) fn tolerance(dtype: DType) -> [f64; 2] {
    match dtype {
        DType::F16 => [1e-3, 1e-5],
        DType::BF16 => [1.6e-2, 1e-5],
        _ => [1.3e-6, 1e-5],
    }
}

/// Places in `len` elements such that every lane, position of a vector, warp, load and block of a kernel that streams them
/// holds one, and the ends.
pub(crate) fn needle_places(len: usize) -> Vec<usize> {
    let lanes = (0..32).flat_map(|lane| [8 * lane + lane % 8, 4 * lane + lane % 4]);
    let warps = (1..32).map(|warp| 256 * warp + 9 * warp % 256);
    let blocks = (11..20).flat_map(|bits| [(1 << bits) - 1, 1 << bits, 3 << (bits - 1)]);
    let ends = (0..17).chain(len.saturating_sub(17)..len);
    let mut places: Vec<usize> =
        lanes.chain(warps).chain(blocks).chain(ends).filter(|&place| place < len).collect();
    places.sort_unstable();
    places.dedup();
    places
}
