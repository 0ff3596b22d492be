//! Matrices with elements of all kinds.

/// Random numbers by a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 >> 33) ^ self.0;
        (mixed.wrapping_mul(0xFF51_AFD7_ED55_8CCD) >> 32) as u32
    }

    fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }
}

/// A matrix of pieces of 24 to 87 elements, each of a kind: ordinary numbers, a wide range, few significand bits, subnormal
/// numbers, zeros, all with or without infinities and NaN.
pub(crate) fn matrix(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Random(seed ^ 0x9E37_79B9_7F4A_7C15);
    let mut x = Vec::with_capacity(len);
    while x.len() < len {
        let (kind, few, binade) = (random.below(8), random.below(6), random.below(254) << 23);
        for _ in 0..24 + random.below(64) {
            let (bits, sign) = (random.next(), random.next() & 0x8000_0000);
            let magnitude = match kind {
                0..3 => (bits & 0x007F_FFFF) | ((118 + (bits >> 23) % 12) << 23),
                3 => (bits & 0x007F_FFFF) | ((70 + (bits >> 23) % 100) << 23),
                4 => (bits & 0x0070_0000) | (binade & 0x7F80_0000),
                5 => bits & 0x00FF_FFFF,
                6 => 0,
                _ => bits & 0x7FFF_FFFF,
            };
            let special = random.below(600);
            let magnitude = match (few, special) {
                (0, 0..4) => 0x7F80_0000,
                (1, 0..20) => 0x7F80_0001 + (bits & 0x007F_FFF0),
                (2, 0..9) => 0,
                _ => magnitude,
            };
            // Only one kind has NaN by chance.
            let is_chance = magnitude > 0x7F80_0000 && few != 1 && kind != 7;
            x.push(f32::from_bits(if is_chance { 0 } else { magnitude } | sign));
        }
    }
    x.truncate(len);
    x
}
