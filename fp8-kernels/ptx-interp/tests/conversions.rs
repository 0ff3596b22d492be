//! `cvt` against Rust, `half` and `fp8-format`: every code, every 16-bit value, and the f32 values around them.
#![expect(clippy::panic, reason = "a failed step is a failed test")]

mod machine;

use fp8_format::{E2M1, E4M3, E5M2};
use half::{bf16, f16};
use machine::{module_for, run_text, run_words};
use ptx_interp::Module;

/// Runs `code` once per input word (in %r2 and %f2), with the result in %r4.
fn each(code: &str, input: &[u32], oracle: impl Fn(u32) -> u32) {
    let body = format!("ld.global.u32 %r2, [%rd4]; mov.b32 %f2, %r2;\n{code}\nst.global.u32 [%rd5], %r4;");
    for chunk in input.chunks(1024) {
        let out = run_words(&body, chunk, chunk.len() as u32, chunk.len())
            .unwrap_or_else(|e| panic!("{code}: {e}"));
        for (&a, got) in chunk.iter().zip(out) {
            let want = oracle(a);
            assert_eq!(got, want, "{code}: {a:#x} ({:?}): {got:#x} instead of {want:#x}", f32::from_bits(a));
        }
    }
}

fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

/// The values of a narrow format in f32, the midpoints between them, and the neighbours of both, with both signs.
fn around(values: impl Iterator<Item = f32>) -> Vec<u32> {
    let mut sorted: Vec<f32> = values.filter(|x| x.is_finite() && *x >= 0.0).collect();
    sorted.sort_by(f32::total_cmp);
    sorted.dedup();
    let mut out = vec![
        f32::INFINITY.to_bits(),
        0xff80_0000,
        0x7fc0_0000,
        0xffc0_1234,
        0x7f80_0001,
        f32::MAX.to_bits(),
        1,
        0x8000_0001,
    ];
    for pair in sorted.windows(2) {
        let middle = ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
        for x in [pair[0], middle, pair[1], pair[1] + (pair[1] - middle)] {
            for y in [x.next_down(), x, x.next_up()] {
                out.extend([y.to_bits(), (-y).to_bits()]);
            }
        }
    }
    out
}

#[test]
fn f32_to_fp8_codes_saturates_and_takes_even() {
    let values = around((0..=255u8).map(|code| E4M3::from_bits(code).to_f32()));
    let upper = "mov.f32 %f3, 0f3F800000; cvt.rn.satfinite.e4m3x2.f32 %rs1, %f2, %f3; cvt.u32.u16 %r4, %rs1;";
    each(upper, &values, |a| {
        u32::from(if f(a).is_nan() { 0xff } else { E4M3::from_f32_saturating(f(a)).to_bits() }) << 8 | 0x38
    });
    let values = around((0..=255u8).map(|code| E5M2::from_bits(code).to_f32()));
    let lower = "mov.f32 %f3, 0f3F800000; cvt.rn.satfinite.e5m2x2.f32 %rs1, %f3, %f2; cvt.u32.u16 %r4, %rs1;";
    each(lower, &values, |a| {
        u32::from(if f(a).is_nan() { 0xfe } else { E5M2::from_f32_saturating(f(a)).to_bits() }) | 0x3c00
    });
}

/// Codes of %f2 in the high half of a byte and of its negative in the low one.
const TO_E2M1: &str =
    "{ .reg .b8 c; neg.f32 %f3, %f2; cvt.rn.satfinite.e2m1x2.f32 c, %f2, %f3; cvt.u32.u8 %r4, c; }";

#[test]
fn f32_to_e2m1_codes_saturates_and_takes_even() {
    // Every binade: its ends, its quarters, where ties are, and their neighbours.
    let edges =
        (0..4_u32).flat_map(|quarter| [quarter << 21, (quarter << 21) + 1, ((quarter + 1) << 21) - 1]);
    let magnitudes = edges.flat_map(|edge| (0..256_u32).map(move |exponent| exponent << 23 | edge));
    let values: Vec<u32> = magnitudes.flat_map(|bits| [bits, bits | 1 << 31]).collect();
    let body = format!("ld.global.f32 %f2, [%rd4];\n{TO_E2M1}\nst.global.u32 [%rd5], %r4;");
    let text = module_for("sm_100a", &body);
    let code = |x: f32| u32::from(E2M1::from_f32(x).to_bits());
    for chunk in values.chunks(1024) {
        let out =
            run_text(&text, chunk, chunk.len() as u32, chunk.len(), 0).unwrap_or_else(|e| panic!("{e}"));
        for (&a, got) in chunk.iter().zip(out) {
            assert_eq!(got, code(f(a)) << 4 | code(-f(a)), "{a:#x} ({:?}): {got:#x}", f(a));
        }
    }
    // And not only as the crate has them.
    let known = [0.25, 5.0, f32::NAN, -f32::NAN, -0.0, 1e9].map(f32::to_bits);
    let out = run_text(&text, &known, 6, 6, 0).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(out, [0x08, 0x6e, 0x77, 0x77, 0x80, 0x7f]);
}

#[test]
fn targets_without_the_conversion_to_e2m1_are_refused() {
    // As ptxas of CUDA 13.0 does.
    for target in ["sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"] {
        let why = Module::parse(&module_for(target, TO_E2M1)).map(drop).unwrap_err().to_string();
        assert!(why.contains(&format!("target {target} has no conversion to E2M1: sm_100a")), "{why}");
    }
    for number in [100, 103, 110, 120, 121] {
        for suffix in ["a", "f"] {
            Module::parse(&module_for(&format!("sm_{number}{suffix}"), TO_E2M1))
                .unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

#[test]
fn fp8_codes_to_f16_are_exact() {
    let codes: Vec<u32> = (0..=255).collect();
    let nan = |x: f32| if x.is_nan() { 0x7fff } else { f16::from_f32(x).to_bits() };
    let code = |name: &str| {
        format!(
            "cvt.u16.u32 %rs1, %r2; or.b16 %rs1, %rs1, 0x3000; cvt.rn.f16x2.{name} %r4, %rs1; and.b32 %r4, %r4, 0xffff;"
        )
    };
    each(&code("e4m3x2"), &codes, |a| u32::from(nan(E4M3::from_bits(a as u8).to_f32())));
    each(&code("e5m2x2"), &codes, |a| u32::from(nan(E5M2::from_bits(a as u8).to_f32())));
}

#[test]
fn halves_widen_and_narrow() {
    let all: Vec<u32> = (0..=0xffff).collect();
    let canonical = |x: f32| if x.is_nan() { 0x7fff_ffff } else { x.to_bits() };
    each("cvt.u16.u32 %rs1, %r2; cvt.f32.f16 %f4, %rs1; mov.b32 %r4, %f4;", &all, |a| {
        canonical(f16::from_bits(a as u16).to_f32())
    });
    each("cvt.u16.u32 %rs1, %r2; cvt.f32.bf16 %f4, %rs1; mov.b32 %r4, %f4;", &all, |a| {
        canonical(bf16::from_bits(a as u16).to_f32())
    });
    let step = around((0..0x7c00u16).step_by(61).map(|bits| f16::from_bits(bits).to_f32()));
    let h = |x: f32| u32::from(if x.is_nan() { 0x7fff } else { f16::from_f32(x).to_bits() });
    each("cvt.rn.f16.f32 %rs1, %f2; cvt.u32.u16 %r4, %rs1;", &step, |a| h(f(a)));
    each("mov.f32 %f3, 0f40000000; cvt.rn.f16x2.f32 %r4, %f2, %f3;", &step, |a| h(f(a)) << 16 | 0x4000);
    each("mov.f32 %f3, 0f40000000; cvt.rn.f16x2.f32 %r4, %f3, %f2;", &step, |a| h(f(a)) | 0x4000_0000);
    each("neg.f32 %f3, %f2; cvt.rn.f16x2.f32 %r4, %f2, %f3;", &step, |a| h(f(a)) << 16 | h(-f(a)));
    let step = around((0..0x7f80u16).step_by(67).map(|bits| bf16::from_bits(bits).to_f32()));
    let b = |x: f32| u32::from(if x.is_nan() { 0x7fff } else { bf16::from_f32(x).to_bits() });
    each("cvt.rn.bf16.f32 %rs1, %f2; cvt.u32.u16 %r4, %rs1;", &step, |a| b(f(a)));
    each("mov.f32 %f3, 0f40000000; cvt.rn.bf16x2.f32 %r4, %f3, %f2;", &step, |a| b(f(a)) | 0x4000_0000);
    each("mov.f32 %f3, 0f40000000; cvt.rn.bf16x2.f32 %r4, %f2, %f3;", &step, |a| b(f(a)) << 16 | 0x4000);
    each("neg.f32 %f3, %f2; cvt.rn.bf16x2.f32 %r4, %f2, %f3;", &step, |a| b(f(a)) << 16 | b(-f(a)));
    each("cvt.rz.bf16.f32 %rs1, %f2; cvt.u32.u16 %r4, %rs1;", &step, |a| {
        if f(a).is_nan() { 0x7fff } else { a >> 16 }
    });
    each(
        "cvt.u16.u32 %rs1, %r2; cvt.rn.satfinite.e4m3x2.f16x2 %rs2, %r2; cvt.u32.u16 %r4, %rs2;",
        &all,
        |a| {
            let x = f16::from_bits(a as u16).to_f32();
            u32::from(if x.is_nan() { 0xff } else { E4M3::from_f32_saturating(x).to_bits() })
        },
    );
}

#[test]
fn integers_and_floats() {
    let mut values = around((0..64).map(|i| i as f32 * 0.5));
    values.extend(around((0..64u32).map(|i| 2f32.powi(i as i32 - 8))));
    let int = |mode: &str, oracle: fn(f32) -> f32| {
        each(&format!("cvt.{mode}.s32.f32 %r4, %f2;"), &values, |a| oracle(f(a)) as i32 as u32);
        each(&format!("cvt.{mode}.u32.f32 %r4, %f2;"), &values, |a| oracle(f(a)) as u32);
        each(
            &format!("cvt.{mode}.s64.f32 %rd6, %f2; shr.u64 %rd7, %rd6, 32; cvt.u32.u64 %r4, %rd7;"),
            &values,
            |a| if f(a).is_nan() { 1 << 31 } else { ((oracle(f(a)) as i64) >> 32) as u32 },
        );
        each(&format!("cvt.{mode}.f32.f32 %f4, %f2; mov.b32 %r4, %f4;"), &values, |a| {
            let x = oracle(f(a));
            if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
        });
        each(&format!("cvt.{mode}.s8.f32 %r4, %f2;"), &values, |a| oracle(f(a)) as i8 as u32);
    };
    int("rni", f32::round_ties_even);
    int("rzi", f32::trunc);
    int("rmi", f32::floor);
    int("rpi", f32::ceil);
    let mut integers: Vec<u32> =
        (0..32).flat_map(|i| [1u32 << i, (1u32 << i).wrapping_sub(1), (1 << i) + 1, !(1 << i)]).collect();
    integers.extend([0x0100_0001, 0x0100_0003, 0x01ff_ffff, 0x7fff_ffbf, 0x7fff_ffc0, 0x7fff_ffc1]);
    each("cvt.rn.f32.s32 %f4, %r2; mov.b32 %r4, %f4;", &integers, |a| (a as i32 as f32).to_bits());
    each("cvt.rn.f32.u32 %f4, %r2; mov.b32 %r4, %f4;", &integers, |a| (a as f32).to_bits());
    each("cvt.rz.f32.u32 %f4, %r2; mov.b32 %r4, %f4;", &integers, |a| {
        let x = a as f32;
        if f64::from(x) > f64::from(a) { x.next_down().to_bits() } else { x.to_bits() }
    });
    each("mul.wide.u32 %rd6, %r2, %r2; cvt.rn.f32.u64 %f4, %rd6; mov.b32 %r4, %f4;", &integers, |a| {
        ((u64::from(a) * u64::from(a)) as f32).to_bits()
    });
    each("mul.wide.s32 %rd6, %r2, 77777; cvt.rn.f32.s64 %f4, %rd6; mov.b32 %r4, %f4;", &integers, |a| {
        ((i64::from(a as i32) * 77777) as f32).to_bits()
    });
    each("cvt.s32.s8 %r4, %r2;", &integers, |a| a as i8 as u32);
    each("cvt.u32.u8 %r4, %r2;", &integers, |a| a & 255);
    each("cvt.s32.s16 %r4, %r2;", &integers, |a| a as i16 as u32);
    each("cvt.sat.u8.s32 %r4, %r2;", &integers, |a| (a as i32).clamp(0, 255) as u32);
    each("cvt.sat.s16.s32 %r4, %r2;", &integers, |a| (a as i32).clamp(-32768, 32767) as u32);
    each("cvt.s64.s32 %rd6, %r2; shr.s64 %rd6, %rd6, 5; cvt.u32.u64 %r4, %rd6;", &integers, |a| {
        (i64::from(a as i32) >> 5) as u32
    });
    each("cvt.s16.s8 %rs1, %r2; cvt.u32.u16 %r4, %rs1;", &integers, |a| u32::from(a as i8 as i16 as u16));
    each("cvt.rn.f64.s32 %fd1, %r2; cvt.rzi.s32.f64 %r4, %fd1;", &integers, |a| a);
}

#[test]
fn a_nan_becomes_zero_or_the_highest_bit_by_both_widths() {
    let nans = [0x7fc0_0000, 0xffc0_1234, 0x7f80_0001];
    let f64 = "or.b32 %r3, %r2, 0x7ff00000; mov.b64 %fd1, {1, %r3};";
    let halves = ["cvt.u32.u64 %r4, %rd6;", "shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r4, %rd6;"];
    for sign in ["s", "u"] {
        let extended = |bit: u32| if sign == "s" { (1u32 << bit).wrapping_neg() } else { 1 << bit };
        for (width, high) in [(8, extended(7)), (16, extended(15)), (32, 1 << 31)] {
            each(&format!("cvt.rzi.{sign}{width}.f32 %r4, %f2;"), &nans, |_| 0);
            each(&format!("{f64} cvt.rzi.{sign}{width}.f64 %r4, %fd1;"), &nans, |_| high);
        }
        for (half, want) in halves.iter().zip([0, 1 << 31]) {
            each(&format!("cvt.rzi.{sign}64.f32 %rd6, %f2; {half}"), &nans, |_| want);
            each(&format!("{f64} cvt.rzi.{sign}64.f64 %rd6, %fd1; {half}"), &nans, |_| want);
        }
    }
    let f16 = "cvt.u16.u32 %rs1, %r2;";
    each(&format!("{f16} cvt.rzi.s32.f16 %r4, %rs1;"), &[0x7e00, 0xfc01], |_| 0);
    each(&format!("{f16} cvt.rzi.u64.f16 %rd6, %rs1; {}", halves[1]), &[0x7e00, 0xfc01], |_| 1 << 31);
}
