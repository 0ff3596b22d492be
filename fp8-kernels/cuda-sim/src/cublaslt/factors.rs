//! Factors of FP8 and FP4 operands, in the layouts of cuBLAS documentation, "Data layout usage" of scaling factors.

use fp8_format::{E4M3, E8M0};
use ptx_interp::Memory;

use super::types::ScaleMode;
use crate::fault::Fault;

/// The factors of an operand `[rows, k]`, as they are in memory.
pub(super) struct Factors {
    mode: ScaleMode,
    rows: usize,
    /// Blocks of k, as the layout counts them.
    pitch: usize,
    values: Vec<f32>,
}

/// Returns the size and the alignment of the factors, in bytes.
pub(super) fn size(mode: ScaleMode, [rows, k]: [usize; 2]) -> (u64, u64) {
    let (count, pitch) = (count(mode, rows, k), 16);
    match mode {
        ScaleMode::Scalar => (4, 4),
        ScaleMode::Vec16 | ScaleMode::Vec32 => (count as u64, pitch),
        ScaleMode::Outer | ScaleMode::Vec128 | ScaleMode::Tile128 => (4 * count as u64, pitch),
    }
}

/// Blocks of k in a row of the layout.
fn pitch(mode: ScaleMode, k: usize) -> usize {
    match mode {
        ScaleMode::Scalar | ScaleMode::Outer => 1,
        ScaleMode::Vec16 => k.div_ceil(16).next_multiple_of(4),
        ScaleMode::Vec32 => k.div_ceil(32).next_multiple_of(4),
        ScaleMode::Vec128 => k.div_ceil(128),
        ScaleMode::Tile128 => k.div_ceil(128).next_multiple_of(4),
    }
}

fn count(mode: ScaleMode, rows: usize, k: usize) -> usize {
    let rows = match mode {
        ScaleMode::Scalar => 1,
        ScaleMode::Outer | ScaleMode::Vec128 => rows,
        ScaleMode::Vec16 | ScaleMode::Vec32 => rows.next_multiple_of(128),
        ScaleMode::Tile128 => rows.div_ceil(128),
    };
    rows * pitch(mode, k)
}

impl Factors {
    /// All factors at `address`, with their padding; 1 for those of address 0.
    pub(super) fn read(
        memory: &Memory,
        address: u64,
        mode: ScaleMode,
        [rows, k]: [usize; 2],
    ) -> Result<Self, Fault> {
        let pitch = pitch(mode, k);
        if address == 0 {
            return Ok(Self { mode: ScaleMode::Scalar, rows, pitch, values: vec![1.0] });
        }
        let mut bytes = vec![0; usize::try_from(size(mode, [rows, k]).0).unwrap_or(usize::MAX)];
        memory.read(address, &mut bytes)?;
        Ok(Self { mode, rows, pitch, values: values(mode, &bytes) })
    }

    /// The factor of the block `block` of k in `row`.
    pub(super) fn at(&self, row: usize, block: usize) -> f32 {
        let index = match self.mode {
            ScaleMode::Scalar => 0,
            ScaleMode::Outer => row,
            ScaleMode::Vec128 => block * self.rows + row,
            ScaleMode::Tile128 => row / 128 * self.pitch + block,
            // Tiles of 128 rows by 4 blocks, 512 bytes each: four rows that are 32 apart lie next to each other.
            ScaleMode::Vec16 | ScaleMode::Vec32 => {
                let tile = row / 128 * (self.pitch / 4) + block / 4;
                tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
            }
        };
        self.values[index]
    }
}

fn values(mode: ScaleMode, bytes: &[u8]) -> Vec<f32> {
    match mode {
        ScaleMode::Vec16 => bytes.iter().map(|bits| unsigned(*bits)).collect(),
        ScaleMode::Vec32 => bytes.iter().map(|bits| E8M0::from_bits(*bits).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
    }
}

/// UE4M3 is E4M3 without a sign. A byte with one is a mistake of the caller, which NaN makes visible.
fn unsigned(bits: u8) -> f32 {
    if bits < 0x80 { E4M3::from_bits(bits).to_f32() } else { f32::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    fn recorded(set: &str) -> Vec<u8> {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
        std::fs::read(format!("{golden}/{set}/layouts.safetensors")).unwrap()
    }

    /// Recorded buffers hold the recorded factors where the layouts say, and nothing else: zeros are padding.
    #[test]
    fn recorded_layouts_are_read() {
        let bytes = recorded("blocks");
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let modes = [
            ("vec128", ScaleMode::Vec128, 1),
            ("blk128", ScaleMode::Tile128, 1),
            ("vec32", ScaleMode::Vec32, 1),
            ("vec128_as_vec32", ScaleMode::Vec32, 4),
        ];
        for (name, mode, repeats) in modes {
            for index in 0..4 {
                let logical = file.tensor(&format!("{name}.{index}")).unwrap();
                let buffer = file.tensor(&format!("{name}.{index}.out")).unwrap();
                let [rows, wide] = [logical.shape()[0], logical.shape()[1]];
                // A recorded row of tiles stands for 128 rows of the operand.
                let tall = if mode == ScaleMode::Tile128 { 128 } else { 1 };
                let shape = [rows * tall, wide * repeats * mode.depth().unwrap_or(1)];
                assert_eq!(size(mode, shape).0, buffer.data().len() as u64, "{name}.{index}");
                let is_e8m0 = logical.data().len() == rows * wide;
                let wanted =
                    values(if is_e8m0 { ScaleMode::Vec32 } else { ScaleMode::Outer }, logical.data());
                let factors = Factors {
                    mode,
                    rows: shape[0],
                    pitch: pitch(mode, shape[1]),
                    values: values(mode, buffer.data()),
                };
                for (i, want) in wanted.iter().enumerate() {
                    for repeat in 0..repeats {
                        let got = factors.at(i / wide * tall, i % wide * repeats + repeat);
                        assert_eq!(got.to_bits(), want.to_bits(), "{name}.{index} [{i}, {repeat}]");
                    }
                }
                let filled = buffer.data().chunks(buffer.data().len() / factors.values.len());
                let nonzero = filled.filter(|bytes| bytes.iter().any(|byte| *byte != 0)).count();
                assert!(nonzero <= wanted.len() * repeats, "{name}.{index}");
            }
        }
    }

    #[test]
    fn recorded_factors_of_sixteen_values_are_read() {
        let bytes = recorded("nvfp4");
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for index in 0..3 {
            let logical = file.tensor(&index.to_string()).unwrap();
            let buffer = file.tensor(&format!("{index}.out")).unwrap();
            let [rows, wide] = [logical.shape()[0], logical.shape()[1]];
            let (mode, k) = (ScaleMode::Vec16, wide * 16);
            assert_eq!(size(mode, [rows, k]), (buffer.data().len() as u64, 16), "{index}");
            // The places of the bytes, of which E4M3 has two for NaN.
            let bytes = Factors {
                mode,
                rows,
                pitch: pitch(mode, k),
                values: buffer.data().iter().copied().map(f32::from).collect(),
            };
            for (i, byte) in logical.data().iter().enumerate() {
                assert_eq!(bytes.at(i / wide, i % wide), f32::from(*byte), "{index} [{i}]");
            }
            let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
            assert_eq!(sum(buffer.data()), sum(logical.data()), "{index}: zeros are padding");
        }
    }

    #[test]
    fn factors_of_sixteen_values_have_no_sign() {
        let bytes = [0x00, 0x01, 0x38, 0x7e, 0x7f, 0x80, 0xb8];
        let values = values(ScaleMode::Vec16, &bytes);
        assert_eq!(values[..4], [0.0, 1.0 / 512.0, 1.0, 448.0]);
        assert!(values[4..].iter().all(|value| value.is_nan()), "{values:?}");
    }
}
