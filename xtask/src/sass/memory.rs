//! The memory that one thread sees: the buffers its kernel was given, and its block's shared memory.

use std::collections::{BTreeMap, BTreeSet};

/// The distance between the addresses of two buffers. The first starts here, so that no buffer is at address 0.
const SPACING: u64 = 1 << 40;
/// More shared memory than a block can have.
pub(super) const SHARED: usize = 256 << 10;

/// The values of a buffer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    /// Normal numbers of a 16-bit type, in pairs.
    Bf16,
    F16,
    /// Normal numbers.
    F32,
    /// 1.0, as scales and cells hold it.
    Ones,
    /// The same byte, an FP8 code.
    Codes(u8),
    /// The same integer.
    Integers(u32),
    /// These 8-byte words, again and again.
    Words(Vec<u64>),
}

/// The bytes that a thread has read from a buffer and written to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) read: u64,
    pub(super) written: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    buffers: Vec<(Content, Traffic)>,
    /// Buffers that caches hold.
    small: BTreeSet<u64>,
    written: BTreeMap<u64, u8>,
}

impl Memory {
    /// Adds a buffer without an end and returns its address.
    pub(super) fn add(&mut self, content: Content) -> u64 {
        self.buffers.push((content, Traffic::default()));
        self.buffers.len() as u64 * SPACING
    }

    pub(super) fn traffic(&self, address: u64) -> Traffic {
        self.buffer(address).map_or_else(Traffic::default, |(_, traffic)| *traffic)
    }

    /// Marks a buffer as so small that caches hold it.
    pub(super) fn mark_small(&mut self, address: u64) {
        self.small.insert(address / SPACING);
    }

    pub(super) fn is_small(&self, address: u64) -> bool {
        self.small.contains(&(address / SPACING))
    }

    /// The bytes written to all buffers.
    pub(super) fn written(&self) -> u64 {
        self.buffers.iter().map(|(_, traffic)| traffic.written).sum()
    }

    /// A word of a buffer of words.
    pub(super) fn word(&self, address: u64, index: usize) -> Option<u64> {
        match self.buffer(address)? {
            (Content::Words(words), _) => words.get(index).copied(),
            _ => None,
        }
    }

    fn buffer(&self, address: u64) -> Option<&(Content, Traffic)> {
        self.buffers.get(usize::try_from(address / SPACING).ok()?.checked_sub(1)?)
    }

    /// Reads up to 16 bytes. Addresses of no buffer are an error: the thread went astray.
    pub(super) fn read(&mut self, address: u64, bytes: usize) -> Option<[u8; 16]> {
        let mut value = [0; 16];
        let (content, _) = self.buffer(address)?;
        for (at, byte) in value.iter_mut().enumerate().take(bytes) {
            let place = address.wrapping_add(at as u64);
            *byte = self.written.get(&place).copied().unwrap_or_else(|| content.byte(place % SPACING));
        }
        self.count(address, |traffic| traffic.read += bytes as u64);
        Some(value)
    }

    pub(super) fn write(&mut self, address: u64, bytes: &[u8]) -> Option<()> {
        self.buffer(address)?;
        self.written.extend((address..).zip(bytes.iter().copied()));
        self.count(address, |traffic| traffic.written += bytes.len() as u64);
        Some(())
    }

    /// Counts an access whose data never pass through registers.
    pub(super) fn count(&mut self, address: u64, count: impl FnOnce(&mut Traffic)) {
        let index = usize::try_from(address / SPACING).ok().and_then(|index| index.checked_sub(1));
        if let Some((_, traffic)) = index.and_then(|index| self.buffers.get_mut(index)) {
            count(traffic);
        }
    }
}

impl Content {
    fn byte(&self, place: u64) -> u8 {
        let byte = |word: &[u8], place: u64| word[(place % word.len() as u64) as usize];
        match self {
            Self::Bf16 => byte(&normal(place / 2).to_bits().to_le_bytes()[2..], place),
            // The exponent of bf16 is that of f32; f16's numbers between 1 and 2 serve as well.
            Self::F16 => byte(&(0x3c00 | (scrambled(place / 2) & 0x83ff) as u16).to_le_bytes(), place),
            Self::F32 => byte(&normal(place / 4).to_bits().to_le_bytes(), place),
            Self::Ones => byte(&1.0_f32.to_le_bytes(), place),
            Self::Codes(code) => *code,
            Self::Integers(value) => byte(&value.to_le_bytes(), place),
            Self::Words(words) => match words.get((place / 8) as usize % words.len().max(1)) {
                Some(word) => byte(&word.to_le_bytes(), place),
                None => 0,
            },
        }
    }
}

/// A number of about a normal distribution: the sum of four uniform ones.
fn normal(index: u64) -> f32 {
    let bits = scrambled(index);
    let sum: u64 = (0..4).map(|part| bits >> (16 * part) & 0xffff).sum();
    (sum as f32 / 65536.0 - 2.0) * 1.732
}

/// SplitMix64.
const fn scrambled(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_hold_their_content_until_it_is_written() {
        let mut memory = Memory::default();
        let (ones, codes) = (memory.add(Content::Ones), memory.add(Content::Codes(0x38)));
        let words = memory.add(Content::Words(vec![7, codes]));
        assert_eq!(memory.read(ones + 8, 4).unwrap()[..4], 1.0_f32.to_le_bytes());
        assert_eq!(memory.read(words + 24, 8).unwrap()[..8], codes.to_le_bytes());
        memory.write(codes + 1, &[1, 2]).unwrap();
        assert_eq!(memory.read(codes, 4).unwrap()[..4], [0x38, 1, 2, 0x38]);
        assert_eq!(memory.traffic(codes + 99), Traffic { read: 4, written: 2 });
        assert_eq!(
            (memory.word(words, 1), memory.word(words, 2), memory.word(ones, 0)),
            (Some(codes), None, None)
        );
        memory.mark_small(ones);
        assert!(memory.is_small(ones + 8) && !memory.is_small(codes) && memory.written() == 2);
        for astray in [0, 16, SPACING - 1, 9 * SPACING, u64::MAX] {
            assert!(memory.read(astray, 4).is_none() && memory.write(astray, &[0]).is_none());
        }
    }

    #[test]
    fn normal_numbers_are_about_normal() {
        let values: Vec<f32> = (0..4096).map(normal).collect();
        let mean = values.iter().sum::<f32>() / 4096.0;
        let variance = values.iter().map(|value| value * value).sum::<f32>() / 4096.0;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.1, "{mean} {variance}");
    }
}
