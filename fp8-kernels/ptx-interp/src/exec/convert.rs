//! The conversions that `cvt` does lane by lane.

use crate::ir::{Cvt, Rounding, Ty};
use crate::numeric::{BF16, F16, F32, Format, NAN32, Round, flush, narrow, to_f32, widen};

fn format(ty: Ty) -> Option<Format> {
    match ty {
        Ty::F16 => Some(F16),
        Ty::BF16 => Some(BF16),
        Ty::F32 => Some(F32),
        _ => None,
    }
}

/// An integer in f64, rounded to odd beyond 53 bits, so that a later rounding is the only one.
fn odd(value: i128) -> f64 {
    let magnitude = value.unsigned_abs();
    let excess = (128 - magnitude.leading_zeros()).saturating_sub(53);
    let sticky = u128::from(magnitude & ((1 << excess) - 1) != 0);
    let kept = ((magnitude >> excess) | sticky) as f64 * (1u64 << excess) as f64;
    if value < 0 { -kept } else { kept }
}

/// The value of an integer type's low bits.
fn integer(bits: u64, ty: Ty) -> i128 {
    let spare = 64 - ty.bits();
    if ty.signed() { i128::from((bits << spare) as i64 >> spare) } else { i128::from(bits << spare >> spare) }
}

fn round_to_integer(x: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

fn to_integer(value: i128, cvt: Cvt, saturate: bool) -> u64 {
    let bits = cvt.to.bits();
    let (low, high) = if cvt.to.signed() {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    };
    let value = if saturate { value.clamp(low, high) } else { value };
    // A register wider than the type holds the type's value extended.
    let value = integer(value as u64, cvt.to) as u64;
    value & u64::MAX >> (64 - cvt.bits.clamp(bits, 64))
}

/// Converts one value.
pub(crate) fn convert(cvt: Cvt, bits: u64) -> u64 {
    let Cvt { to, from, round, ftz, sat, .. } = cvt;
    let mode = match round {
        Rounding::Float(mode) | Rounding::Integer(mode) => mode,
        Rounding::None => Round::Nearest,
    };
    if from.integer() {
        let value = integer(bits, from);
        if to.integer() {
            return to_integer(value, cvt, sat);
        }
        let exact = odd(value);
        return to_float(if sat { exact.clamp(0.0, 1.0) } else { exact }, to, mode, false);
    }
    let bits = if ftz && from == Ty::F32 { u64::from(flush(bits as u32)) } else { bits };
    let mut x = match format(from) {
        Some(format) => widen(bits as u32, format),
        None => f64::from_bits(bits),
    };
    if matches!(round, Rounding::Integer(_)) {
        x = round_to_integer(x, mode);
    }
    if to.integer() {
        // PTX ISA, cvt: NaN gives 0 "if source is not .f64 and destination is not .s64, .u64", else
        // "1 << (BitWidth(dst) - 1)". Everything else becomes the nearest value that exists.
        if x.is_nan() {
            let wide = from == Ty::F64 || to.bits() == 64;
            return to_integer(if wide { 1 << (to.bits() - 1) } else { 0 }, cvt, false);
        }
        return to_integer(x.clamp(-1e30, 1e30) as i128, cvt, true);
    }
    if sat {
        x = if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    to_float(x, to, mode, ftz)
}

fn to_float(x: f64, to: Ty, mode: Round, ftz: bool) -> u64 {
    match format(to) {
        None => {
            if x.is_nan() {
                0x7fff_ffff_ffff_ffff
            } else {
                x.to_bits()
            }
        }
        Some(_) if to == Ty::F32 => {
            let bits = if x.is_nan() { NAN32 } else { to_f32(x, mode) };
            u64::from(if ftz { flush(bits) } else { bits })
        }
        Some(format) => u64::from(narrow(x, format, mode)),
    }
}
