//! The codec's tables and edge sets.
//!
//! | file | records, little-endian |
//! |---|---|
//! | `{e4m3,e5m2}_decode_{f32,f16,bf16}.bin` | the decoded bits, index = code |
//! | `{f16,bf16}_{e4m3,e5m2}_{sat,nosat}.u8` | the code, index = the source's 16-bit pattern |
//! | `{f32,f64}_edges.bin` | the source's bits, then four codes: E4M3 saturating, E4M3 not, E5M2 saturating, E5M2 not |
//!
//! How many records a file has, its length says. Each conversion in a file is a case.

use std::fmt;
use std::fs;
use std::path::Path;

use fp8_format::{E4M3, E5M2, Fp8};
use half::{bf16, f16};

use super::tally::{Mismatches, Tally, listing, say_ignored};
use crate::result::Result;

pub(super) fn run(folder: &Path, tally: &mut Tally) -> Result {
    let mut ignored = Vec::new();
    for (name, path) in listing(folder)? {
        let Some(content) = Content::of(&name) else {
            ignored.push(name);
            continue;
        };
        let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for (conversion, result) in content.check(&bytes) {
            tally.record(&format!("codec/{name} {conversion}"), result);
        }
    }
    say_ignored("codec", &ignored);
    Ok(())
}

/// A type on the other side of a conversion.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Float {
    F16,
    Bf16,
    F32,
    F64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    E4m3,
    E5m2,
}

/// The content of a file, according to its name.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    Decode(Format, Float),
    Encode(Float, Format, Overflow),
    Edges(Float),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Overflow {
    Saturates,
    IsKept,
}

/// The codes of an edge record, in the file's order.
const EDGE_CODES: [(Format, Overflow); 4] = [
    (Format::E4m3, Overflow::Saturates),
    (Format::E4m3, Overflow::IsKept),
    (Format::E5m2, Overflow::Saturates),
    (Format::E5m2, Overflow::IsKept),
];

/// A case's name and result.
type Checked = (String, std::result::Result<(), String>);

impl Content {
    fn of(name: &str) -> Option<Self> {
        if let Some(source) = name.strip_suffix("_edges.bin") {
            return Float::of(source).filter(|float| float.bytes() >= 4).map(Self::Edges);
        }
        if let Some((format, target)) = name.strip_suffix(".bin").and_then(|stem| stem.split_once("_decode_"))
        {
            let target = Float::of(target).filter(|&float| float != Float::F64)?;
            return Some(Self::Decode(Format::of(format)?, target));
        }
        let mut parts = name.strip_suffix(".u8")?.split('_');
        let source = Float::of(parts.next()?).filter(|float| float.bytes() == 2)?;
        let format = Format::of(parts.next()?)?;
        let overflow = match (parts.next()?, parts.next()) {
            ("sat", None) => Overflow::Saturates,
            ("nosat", None) => Overflow::IsKept,
            _ => return None,
        };
        Some(Self::Encode(source, format, overflow))
    }

    fn check(self, bytes: &[u8]) -> Vec<Checked> {
        match self {
            Self::Decode(format, target) => {
                let result = records(bytes, target.bytes(), 256).and_then(|records| {
                    let mut mismatches = Mismatches::default();
                    for (code, record) in (0..=u8::MAX).zip(records) {
                        let (actual, expected) = (decode(format, code, target), little_endian(record));
                        mismatches.compare(actual == expected, || {
                            format!(
                                "code {code:#04x} is {}, expected {}",
                                target.show(actual),
                                target.show(expected)
                            )
                        });
                    }
                    mismatches.finish()
                });
                vec![(format!("{format} → {target}"), result)]
            }
            Self::Encode(source, format, overflow) => {
                let result = records(bytes, 1, 1 << 16).and_then(|records| {
                    let pairs = (0..).zip(records.flatten().copied());
                    encode_all(source, format, overflow, pairs)
                });
                vec![(format!("{source} → {format}{overflow}"), result)]
            }
            Self::Edges(source) => EDGE_CODES
                .iter()
                .enumerate()
                .map(|(column, &(format, overflow))| {
                    let size = source.bytes() + EDGE_CODES.len();
                    let result = records(bytes, size, usize::MAX).and_then(|records| {
                        let pairs = records.map(|record| {
                            let (pattern, codes) = record.split_at(source.bytes());
                            (little_endian(pattern), codes[column])
                        });
                        encode_all(source, format, overflow, pairs)
                    });
                    (format!("{source} → {format}{overflow}"), result)
                })
                .collect(),
        }
    }
}

/// Cuts a file into records; `most` bounds the tables, whose index is an input.
fn records(
    bytes: &[u8],
    size: usize,
    most: usize,
) -> std::result::Result<std::slice::Chunks<'_, u8>, String> {
    let (count, rest) = (bytes.len() / size, bytes.len() % size);
    if rest != 0 {
        Err(format!(
            "{} bytes are {count} records of {size} bytes and {rest} over: the file is cut short or another",
            bytes.len()
        ))
    } else if count == 0 {
        Err("the file is empty: it holds no record".to_owned())
    } else if count > most {
        Err(format!("{count} records of {size} bytes: the table has at most {most}"))
    } else {
        Ok(bytes.chunks(size))
    }
}

fn encode_all(
    source: Float,
    format: Format,
    overflow: Overflow,
    pairs: impl Iterator<Item = (u64, u8)>,
) -> std::result::Result<(), String> {
    let mut mismatches = Mismatches::default();
    for (entry, (pattern, expected)) in pairs.enumerate() {
        let actual = encode(source, pattern, format, overflow);
        mismatches.compare(actual == expected, || {
            let value = source.show(pattern);
            let (actual, expected) = (format.show(actual), format.show(expected));
            format!("entry {entry}: {value} became {actual}, expected {expected}")
        });
    }
    mismatches.finish()
}

fn encode(source: Float, pattern: u64, format: Format, overflow: Overflow) -> u8 {
    match format {
        Format::E4m3 => encode_to::<E4M3>(source, pattern, overflow),
        Format::E5m2 => encode_to::<E5M2>(source, pattern, overflow),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a pattern is as wide as its source type")]
fn encode_to<T: Fp8>(source: Float, pattern: u64, overflow: Overflow) -> u8 {
    let code = match (source, overflow) {
        (Float::F16, Overflow::Saturates) => T::from_f16_saturating(f16::from_bits(pattern as u16)),
        (Float::F16, Overflow::IsKept) => T::from_f16(f16::from_bits(pattern as u16)),
        (Float::Bf16, Overflow::Saturates) => T::from_bf16_saturating(bf16::from_bits(pattern as u16)),
        (Float::Bf16, Overflow::IsKept) => T::from_bf16(bf16::from_bits(pattern as u16)),
        (Float::F32, Overflow::Saturates) => T::from_f32_saturating(f32::from_bits(pattern as u32)),
        (Float::F32, Overflow::IsKept) => T::from_f32(f32::from_bits(pattern as u32)),
        (Float::F64, Overflow::Saturates) => T::from_f64_saturating(f64::from_bits(pattern)),
        (Float::F64, Overflow::IsKept) => T::from_f64(f64::from_bits(pattern)),
    };
    code.to_bits()
}

fn decode(format: Format, code: u8, target: Float) -> u64 {
    match format {
        Format::E4m3 => decode_to(E4M3::from_bits(code), target),
        Format::E5m2 => decode_to(E5M2::from_bits(code), target),
    }
}

fn decode_to<T: Fp8>(code: T, target: Float) -> u64 {
    match target {
        Float::F16 => code.to_f16().to_bits().into(),
        Float::Bf16 => code.to_bf16().to_bits().into(),
        Float::F32 => code.to_f32().to_bits().into(),
        Float::F64 => code.to_f64().to_bits(),
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte))
}

impl Float {
    fn of(name: &str) -> Option<Self> {
        [Self::F16, Self::Bf16, Self::F32, Self::F64].into_iter().find(|float| float.to_string() == name)
    }

    fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The value and its bits.
    #[expect(clippy::cast_possible_truncation, reason = "a pattern is as wide as its type")]
    fn show(self, pattern: u64) -> String {
        let value = match self {
            Self::F16 => f16::from_bits(pattern as u16).to_f64(),
            Self::Bf16 => bf16::from_bits(pattern as u16).to_f64(),
            Self::F32 => f32::from_bits(pattern as u32).into(),
            Self::F64 => f64::from_bits(pattern),
        };
        format!("{value:e} ({pattern:#0width$x})", width = 2 + 2 * self.bytes())
    }
}

impl Format {
    fn of(name: &str) -> Option<Self> {
        match name {
            "e4m3" => Some(Self::E4m3),
            "e5m2" => Some(Self::E5m2),
            _ => None,
        }
    }

    /// The value and its code.
    fn show(self, code: u8) -> String {
        format!("{:e} ({code:#04x})", f64::from_bits(decode(self, code, Float::F64)))
    }
}

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::E4m3 => "E4M3",
            Self::E5m2 => "E5M2",
        })
    }
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Saturates => ", saturating",
            Self::IsKept => "",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(name: &str, bytes: &[u8]) -> std::result::Result<(), String> {
        Content::of(name).unwrap().check(bytes).remove(0).1
    }

    #[test]
    fn names_say_what_a_file_holds_and_other_files_are_no_data() {
        assert_eq!(Content::of("e5m2_decode_bf16.bin"), Some(Content::Decode(Format::E5m2, Float::Bf16)));
        assert_eq!(
            Content::of("f16_e4m3_nosat.u8"),
            Some(Content::Encode(Float::F16, Format::E4m3, Overflow::IsKept))
        );
        assert_eq!(Content::of("f64_edges.bin"), Some(Content::Edges(Float::F64)));
        let others = [
            "README.md",
            "MANIFEST.json",
            "f32_e4m3_sat.u8",
            "e4m3_decode_f64.bin",
            "f16_edges.bin",
            "x_edges.bin",
        ];
        for name in others {
            assert_eq!(Content::of(name), None, "{name}");
        }
    }

    #[test]
    fn the_count_of_records_comes_from_the_length() {
        let one = 3.3f32.to_bits().to_le_bytes(); // E4M3: 3.25 = 0x45; E5M2: 3.5 = 0x43
        let record = [&one[..], &[0x45, 0x45, 0x43, 0x43]].concat();
        for count in [1, 7] {
            for (case, result) in Content::Edges(Float::F32).check(&record.repeat(count)) {
                assert_eq!(result, Ok(()), "{case}");
            }
        }
        assert_eq!(
            only("f32_edges.bin", &record[..7]),
            Err("7 bytes are 0 records of 8 bytes and 7 over: the file is cut short or another".to_owned())
        );
        assert_eq!(only("f32_edges.bin", &[]), Err("the file is empty: it holds no record".to_owned()));
        let long = only("e4m3_decode_f16.bin", &[0; 514]);
        assert_eq!(long, Err("257 records of 2 bytes: the table has at most 256".to_owned()));
    }

    #[test]
    fn a_mismatch_tells_entry_values_bits_and_count() {
        let one = 3.3f32.to_bits().to_le_bytes();
        let good = [&one[..], &[0x45, 0x45, 0x43, 0x43]].concat();
        let bad = [&one[..], &[0x46, 0x45, 0x43, 0x43]].concat();
        let results = Content::Edges(Float::F32).check(&[good, bad].concat());
        assert_eq!(results[0].0, "f32 → E4M3, saturating");
        assert_eq!(
            results[0].1,
            Err("entry 1: 3.299999952316284e0 (0x40533333) became 3.25e0 (0x45), expected 3.5e0 (0x46); 1 of 2 differ"
                .to_owned())
        );
        assert!(results[1..].iter().all(|(_, result)| result.is_ok()));
        assert_eq!(
            only("e4m3_decode_bf16.bin", &[0, 0, 0, 0]),
            Err("code 0x01 is 1.953125e-3 (0x3b00), expected 0e0 (0x0000); 1 of 2 differ".to_owned())
        );
    }
}
