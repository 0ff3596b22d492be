//! `cvt`: every form that NVRTC or a prelude of inline assembly writes.

use super::operands::{Mods, Result};
use crate::builder::{Builder, Statement};
use crate::ir::{Cvt, Op, Rounding, Ty};
use crate::lanes::{Map, map};
use crate::numeric::{F16, Round, canonical, from_fp8, narrow, to_bf16, to_e2m1, to_fp8};

/// `cvt[.round][.ftz][.sat].to.from d, a`, and the packing forms.
pub(super) fn cvt(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let integer =
        m.one_of(&[("rni", Round::Nearest), ("rzi", Round::Zero), ("rmi", Round::Down), ("rpi", Round::Up)]);
    let round = match integer {
        Some(round) => Rounding::Integer(round),
        None => m.round().map_or(Rounding::None, Rounding::Float),
    };
    if m.take("satfinite") {
        if round != Rounding::Float(Round::Nearest) {
            return s.unknown();
        }
        return if m.take("e2m1x2") { to_e2m1_codes(b, m, s) } else { to_codes(b, m, s) };
    }
    let nearest = round == Rounding::Float(Round::Nearest);
    if let Some(e4m3) = m.one_of(&[("bf16x2", None), ("f16x2", Some(()))]) {
        return if nearest { pairs(b, m, s, e4m3.is_some()) } else { s.unknown() };
    }
    let ftz = m.take("ftz");
    let sat = m.take("sat");
    let (Some(to), Some(from)) = (m.ty(), m.ty()) else { return s.unknown() };
    let bits =
        if let Some(crate::builder::Operand::Register(_, bits)) = s.operands.first() { *bits } else { 0 };
    let cvt = Cvt { to, from, round, ftz, sat, bits };
    if !possible(cvt) {
        return s.unknown();
    }
    s.count(2)?;
    let wide_ok = |ty: Ty| ty.integer();
    let d = s.dest(s.operand(0)?, to, wide_ok(to))?;
    let a = s.value(b, s.operand(1)?, from, wide_ok(from))?;
    let fast: Option<Map> = match (d, a) {
        _ if sat || ftz => None,
        (crate::lanes::Reg::D(_), crate::lanes::Reg::W(_)) => match (to, from) {
            (Ty::U64 | Ty::S64, Ty::U32) => Some(map!(d = w; every |x| u64::from(x))),
            (Ty::U64 | Ty::S64, Ty::S32) => Some(map!(d = w; every |x| i64::from(x as i32) as u64)),
            _ => None,
        },
        (crate::lanes::Reg::W(_), crate::lanes::Reg::D(_)) => match (to, from) {
            (Ty::U32 | Ty::S32, Ty::U64 | Ty::S64) if bits == 32 => Some(map!(w = d; every |x| x as u32)),
            _ => None,
        },
        (crate::lanes::Reg::W(_), crate::lanes::Reg::W(_)) => match (to, from) {
            (Ty::U32 | Ty::S32, Ty::U16) if bits == 32 => Some(map!(w = w; every |x| x & 0xffff)),
            (Ty::U16 | Ty::S16, Ty::U32 | Ty::S32) if bits == 16 => Some(map!(w = w; every |x| x & 0xffff)),
            (Ty::F32, Ty::F16) => {
                Some(map!(w = w; chosen |x| canonical(half::f16::from_bits(x as u16).to_f32())))
            }
            (Ty::F16, Ty::F32) if nearest => {
                Some(map!(w = w; chosen |x| narrow(f64::from(f32::from_bits(x)), F16, Round::Nearest)))
            }
            (Ty::BF16, Ty::F32) if nearest => Some(map!(w = w; every |x| to_bf16(x))),
            (Ty::F32, Ty::S32) if nearest => Some(map!(w = w; every |x| (x as i32 as f32).to_bits())),
            (Ty::F32, Ty::U32) if nearest => Some(map!(w = w; every |x| (x as f32).to_bits())),
            _ => None,
        },
        _ => None,
    };
    Ok(match fast {
        Some(run) => Op::Map { run, d, s: [a; 3], n: 1 },
        None => Op::Convert { cvt, d, a },
    })
}

/// Returns true if the conversion exists.
fn possible(cvt: Cvt) -> bool {
    let Cvt { to, from, round, ftz, sat, .. } = cvt;
    let float = |ty: Ty| matches!(ty, Ty::F16 | Ty::BF16 | Ty::F32 | Ty::F64);
    let bits = |ty: Ty| match ty {
        Ty::BF16 => 31, // wider than f16, narrower than f32
        ty => ty.bits(),
    };
    if ftz && to != Ty::F32 && from != Ty::F32 {
        return false;
    }
    match (to.integer(), from.integer()) {
        (true, true) => round == Rounding::None && !ftz,
        // To an integer and from one: the rounding must be said.
        (true, false) => float(from) && matches!(round, Rounding::Integer(_)),
        (false, true) => float(to) && matches!(round, Rounding::Float(_)),
        (false, false) => {
            if !float(to) || !float(from) || (to == Ty::BF16 || from == Ty::BF16) && sat {
                return false;
            }
            let narrowing = bits(to) < bits(from);
            match round {
                Rounding::None => !narrowing && (to, from) != (Ty::BF16, Ty::F16),
                Rounding::Float(_) => narrowing,
                Rounding::Integer(_) => to == from,
            }
        }
    }
}

/// `cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32 d, a, b`: `a` in the upper byte.
fn to_codes(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    #[inline(always)]
    fn codes(x: u32, y: u32, mantissa: u32) -> u32 {
        to_fp8(f32::from_bits(x), mantissa) << 8 | to_fp8(f32::from_bits(y), mantissa)
    }
    fn of_halves(x: u32, mantissa: u32) -> u32 {
        let code = |half: u32| to_fp8(half::f16::from_bits(half as u16).to_f32(), mantissa);
        code(x >> 16) << 8 | code(x & 0xffff)
    }
    let Some(e4m3) = m.one_of(&[("e4m3x2", true), ("e5m2x2", false)]) else { return s.unknown() };
    let relu = m.take("relu");
    match m.ty() {
        Some(Ty::F32) if !relu => {
            let run: Map = if e4m3 {
                map!(w = w, w; every |x, y| codes(x, y, 3))
            } else {
                map!(w = w, w; every |x, y| codes(x, y, 2))
            };
            s.map(b, run, Ty::B16, &[Ty::F32, Ty::F32])
        }
        Some(Ty::F16x2) if !relu => {
            let run: Map = if e4m3 {
                map!(w = w; chosen |x| of_halves(x, 3))
            } else {
                map!(w = w; chosen |x| of_halves(x, 2))
            };
            s.map(b, run, Ty::B16, &[Ty::F16x2])
        }
        _ => s.unknown(),
    }
}

/// `cvt.rn.satfinite.e2m1x2.f32 d, a, b`: `a` in the upper half of a byte.
fn to_e2m1_codes(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if m.ty() != Some(Ty::F32) {
        return s.unknown();
    }
    if !converts_to_e2m1(&b.target) {
        return s.error(format!(
            "target {} has no conversion to E2M1: sm_100a, sm_103a, sm_110a, sm_120a, sm_121a or their `f` targets have it",
            b.target
        ));
    }
    let run: Map = map!(w = w, w; every |x, y| to_e2m1(f32::from_bits(x)) << 4 | to_e2m1(f32::from_bits(y)));
    s.map(b, run, Ty::B8, &[Ty::F32, Ty::F32])
}

/// Whether the target is one of one architecture or one family of those that convert to E2M1. The assembler refuses plain ones.
fn converts_to_e2m1(target: &str) -> bool {
    let number = target.strip_suffix(['a', 'f']).and_then(|target| target.strip_prefix("sm_"));
    matches!(number, Some("100" | "103" | "110" | "120" | "121"))
}

/// `cvt.rn.{bf16x2,f16x2}.f32 d, a, b` (`a` in the upper half) and `cvt.rn.f16x2.{e4m3x2,e5m2x2} d, a`.
fn pairs(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>, f16: bool) -> Result<Op> {
    fn half(x: u32) -> u32 {
        narrow(f64::from(f32::from_bits(x)), F16, Round::Nearest)
    }
    fn value(code: u32, mantissa: u32) -> u32 {
        narrow(from_fp8(code & 0xff, mantissa), F16, Round::Nearest)
    }
    if let Some(e4m3) = m.one_of(&[("e4m3x2", true), ("e5m2x2", false)]).filter(|_| f16) {
        let run: Map = if e4m3 {
            map!(w = w; chosen |x| value(x >> 8, 3) << 16 | value(x, 3))
        } else {
            map!(w = w; chosen |x| value(x >> 8, 2) << 16 | value(x, 2))
        };
        return s.map(b, run, Ty::F16x2, &[Ty::B16]);
    }
    if m.ty() != Some(Ty::F32) {
        return s.unknown();
    }
    let run: Map = if f16 {
        map!(w = w, w; chosen |x, y| half(x) << 16 | half(y))
    } else {
        map!(w = w, w; every |x, y| to_bf16(x) << 16 | to_bf16(y))
    };
    s.map(b, run, Ty::B32, &[Ty::F32, Ty::F32])
}
