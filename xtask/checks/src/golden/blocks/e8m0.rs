//! Conversions between f32 and E8M0.

use fp8_format::E8M0;
use safetensors::Dtype;

use super::file::{Check, File};
use crate::golden::tally::{Mismatches, Tally};

type Conversion = (&'static str, fn(f32) -> E8M0);

/// Conversions from f32, by the names of the tensors with their results.
const CONVERSIONS: [Conversion; 4] = [
    ("floor_sat", E8M0::from_f32_floor_saturating),
    ("ceil_sat", E8M0::from_f32_ceil_saturating),
    ("floor_nosat", E8M0::from_f32_floor),
    ("ceil_nosat", E8M0::from_f32_ceil),
];

pub(super) fn check(file: &File<'_>, name: &str, tally: &mut Tally) -> Check {
    let bits = |tensor| file.elements(tensor, Dtype::U32, u32::from_le_bytes);
    let sources = bits("f32_bits")?;
    for (conversion, convert) in CONVERSIONS {
        let want = file.bytes(conversion)?;
        let mut mismatches = Mismatches::default();
        mismatches.compare(want.len() == sources.len() && !want.is_empty(), || {
            format!("{} results of {} numbers", want.len(), sources.len())
        });
        for (source, want) in sources.iter().zip(want) {
            let got = convert(f32::from_bits(*source)).to_bits();
            mismatches.compare(got == want, || {
                format!(
                    "{:e} ({source:#010x}) became {got:#04x}, expected {want:#04x}",
                    f32::from_bits(*source)
                )
            });
        }
        tally.record(&format!("blocks/{name} {conversion}"), mismatches.finish());
    }
    let values = bits("decode")?;
    let mut mismatches = Mismatches::default();
    mismatches.compare(values.len() == 256, || format!("{} values, expected 256", values.len()));
    for (code, want) in (0..=u8::MAX).zip(values) {
        let (got, want) = (E8M0::from_bits(code).to_f32(), f32::from_bits(want));
        let is_equal = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        mismatches.compare(is_equal, || format!("code {code:#04x} is {got:e}, expected {want:e}"));
    }
    tally.record(&format!("blocks/{name} decode"), mismatches.finish());
    Ok(())
}
