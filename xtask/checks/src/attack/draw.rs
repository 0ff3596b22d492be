//! Random numbers, extents, shapes and values. Everything is a function of the seed, the part and the case's number.

use fp8_kernels::{DType, Encoding};

/// A small generator (SplitMix64): one per case, so that a case can be repeated without those before it.
#[derive(Debug, Clone)]
pub(super) struct Draw(u64);

/// The kind of values that a tensor is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Small, finite, and never all the same.
    Noise,
    /// Finite and of moderate size: results can be compared within a tolerance.
    Tame,
    /// The same with a few NaNs, infinities, signed zeros and subnormals.
    Special,
    /// Anything, up to the largest values: only exact results can be compared.
    Wild,
}

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const DTYPES: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U8];

/// Around vectors, tiles and warps, primes, and nothing.
const EXTENTS: [usize; 22] =
    [0, 1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 97, 128, 129];

/// Extents that are too large to allocate, or whose products overflow.
const HUGE: [usize; 12] = [
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 32) + 1,
    1 << 33,
    1 << 40,
    1 << 45,
    1 << 60,
    1 << 61,
    1 << 62,
    (1 << 63) - 1,
    usize::MAX,
];

impl Draw {
    pub(super) fn new(seed: u64, part: u64, index: u64) -> Self {
        let mut draw = Self(seed ^ part.rotate_left(56) ^ index.wrapping_mul(0xD605_BBB5_8C8A_BC53));
        draw.bits();
        draw
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number less than `limit`, or 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.bits() >> 11) as usize % limit.max(1)
    }

    /// True once in `n` times.
    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(super) fn flip(&mut self) -> bool {
        self.bits() >> 63 == 1
    }

    pub(super) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// In [0, 1).
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// In (−1, 1), more often near 0.
    pub(super) fn noise(&mut self) -> f32 {
        (self.unit() + self.unit() + self.unit()) / 1.5 - 1.0
    }

    pub(super) fn encoding(&mut self) -> Encoding {
        if self.once_in(3) { Encoding::E5M2 } else { Encoding::E4M3 }
    }

    /// A float type; now and then one that is none.
    pub(super) fn dtype(&mut self) -> DType {
        if self.once_in(24) { self.pick(&DTYPES) } else { self.pick(&FLOATS) }
    }

    /// Mostly `dtype`.
    pub(super) fn dtype_like(&mut self, dtype: DType) -> DType {
        if self.once_in(24) { self.pick(&DTYPES) } else { dtype }
    }

    pub(super) fn kind(&mut self) -> Kind {
        self.pick(&[Kind::Tame, Kind::Tame, Kind::Special, Kind::Wild])
    }

    pub(super) fn extent(&mut self) -> usize {
        // Small ones more often: most faults are at edges, and small cases are fast.
        let limit = if self.once_in(3) { EXTENTS.len() } else { 13 };
        EXTENTS[self.below(limit)]
    }

    pub(super) fn huge(&mut self) -> usize {
        self.pick(&HUGE)
    }

    /// `rank` extents of at most `limit` elements together. Sometimes one of them is 0 and others are huge.
    pub(super) fn extents(&mut self, rank: usize, limit: usize) -> Vec<usize> {
        let mut extents: Vec<usize> = (0..rank).map(|_| self.extent()).collect();
        if rank >= 2 && self.once_in(14) {
            extents.fill_with(|| if self.flip() { self.huge() } else { self.extent() });
            extents[self.below(rank)] = 0;
            return extents;
        }
        while extents.iter().product::<usize>() > limit {
            if let Some(largest) = extents.iter_mut().max() {
                *largest = *largest / 2 + *largest % 2;
            }
        }
        extents
    }

    /// One extent of `shape` changed, or one more, or one less.
    pub(super) fn bend(&mut self, shape: &[usize]) -> Vec<usize> {
        let mut bent = shape.to_vec();
        let at = self.below(bent.len());
        match self.below(6) {
            0 if bent.len() < 6 => bent.insert(at, 1),
            1 if !bent.is_empty() => drop(bent.remove(at)),
            2 if !bent.is_empty() => bent[at] = 0,
            3 if !bent.is_empty() => bent[at] = bent[at].saturating_add(1),
            4 if !bent.is_empty() => bent[at] = bent[at].saturating_sub(1),
            _ => bent.reverse(),
        }
        bent
    }

    /// Mostly `shape` as it is.
    pub(super) fn mostly(&mut self, shape: &[usize]) -> Vec<usize> {
        if self.once_in(24) { self.bend(shape) } else { shape.to_vec() }
    }

    pub(super) fn floats(&mut self, kind: Kind, len: usize) -> Vec<f32> {
        let size = self.pick(&[1.0, 1.0, 4.0, 0.02]);
        let pattern = self.below(16);
        let mut values: Vec<f32> = match pattern {
            _ if kind == Kind::Noise => (0..len).map(|_| self.noise()).collect(),
            0 => vec![0.0; len],
            1 => vec![size; len],
            _ => (0..len).map(|_| self.noise() * size).collect(),
        };
        if len == 0 {
            return values;
        }
        match kind {
            Kind::Noise | Kind::Tame => {}
            Kind::Special => {
                for _ in 0..1 + self.below(3) {
                    let special = self.pick(&SPECIALS);
                    values[self.below(len)] = self.signed(special);
                }
            }
            Kind::Wild => {
                let share = 1 + self.below(8);
                for value in &mut values {
                    if self.once_in(share) {
                        let wild = self.pick(&WILD);
                        *value = self.signed(wild);
                    }
                }
            }
        }
        values
    }

    pub(super) fn signed(&mut self, value: f32) -> f32 {
        if self.flip() { -value } else { value }
    }

    /// A number for an option: mostly usable, else anything.
    pub(super) fn option(&mut self, usable: f32) -> f32 {
        if self.once_in(20) {
            let wild = self.pick(&WILD);
            return self.signed(wild);
        }
        usable
    }
}

const SPECIALS: [f32; 6] = [f32::NAN, f32::INFINITY, 0.0, 1e-45, f32::MIN_POSITIVE / 2.0, f32::MIN_POSITIVE];

/// Subnormals, ties and ends of the formats, the ends of all types.
const WILD: [f32; 24] = [
    0.0,
    1e-45,
    f32::MIN_POSITIVE / 2.0,
    f32::MIN_POSITIVE,
    5.960_464_5e-8,
    1.525_878_9e-5,
    0.001_953_125,
    0.015_625,
    1.0,
    1.062_5,
    1.187_5,
    1.003_906_2,
    447.9,
    448.0,
    464.0,
    480.0,
    57344.0,
    61440.0,
    65504.0,
    65520.0,
    1e30,
    f32::MAX,
    f32::INFINITY,
    f32::NAN,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_a_function_of_its_number() {
        let draw = |seed, part, index| {
            let mut draw = Draw::new(seed, part, index);
            (draw.extents(4, 100), draw.floats(Kind::Tame, 5), draw.bits())
        };
        assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
        assert!(draw(1, 2, 3) != draw(1, 2, 4) && draw(1, 2, 3) != draw(2, 2, 3));
        assert!(draw(1, 2, 3) != draw(1, 3, 3));
    }

    #[test]
    fn shapes_fit_unless_they_are_empty() {
        let mut draw = Draw::new(1, 1, 1);
        let (mut empty_and_huge, mut largest) = (0, 0);
        for _ in 0..2000 {
            let extents = draw.extents(3, 500);
            if extents.contains(&0) {
                empty_and_huge += usize::from(extents.iter().any(|extent| *extent > 1 << 20));
            } else {
                largest = largest.max(extents.iter().product());
            }
        }
        assert!(empty_and_huge > 20 && (250..=500).contains(&largest), "{empty_and_huge} {largest}");
    }

    #[test]
    fn wild_values_hold_what_breaks_things() {
        let mut draw = Draw::new(1, 1, 1);
        let values: Vec<f32> = (0..200).flat_map(|_| draw.floats(Kind::Wild, 20)).collect();
        for found in [f32::is_nan, f32::is_infinite, f32::is_subnormal as fn(f32) -> bool] {
            assert!(values.iter().any(|value| found(*value)));
        }
        assert!(values.contains(&f32::MAX) && values.contains(&f32::MIN));
        let tame: Vec<f32> = (0..200).flat_map(|_| draw.floats(Kind::Tame, 20)).collect();
        assert!(tame.iter().all(|value| value.abs() <= 4.0));
    }
}
