//! Every opcode family against Rust's own arithmetic, one instruction at a time over many values.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed step is a failed test")]

mod machine;

use std::cmp::Ordering;

use machine::{module, run_words};

/// Bit patterns that break things: zeros, subnormals, ties, extremes, infinities, NaN.
fn floats() -> Vec<u32> {
    let mut values: Vec<u32> =
        [0.0f32, 1.0, 1.5, 2.5, 0.1, 3.0, 448.0, 65504.0, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY]
            .iter()
            .flat_map(|x| [x.to_bits(), (-x).to_bits()])
            .collect();
    values.extend([
        1,
        0x007f_ffff,
        0x8000_0001,
        0x7fc0_0000,
        0xffc0_0001,
        0x7f80_0001,
        0x3f80_0001,
        0x3f7f_ffff,
        0x4b00_0001,
    ]);
    let mut state = 12345u32;
    values.extend((0..200).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let mixed = state ^ state >> 15;
        // Exponents near each other, so that sums round.
        if state & 1 == 0 { mixed } else { mixed & 0x80ff_ffff | 0x3e00_0000 | (mixed >> 3 & 0x0180_0000) }
    }));
    values
}

fn integers() -> Vec<u32> {
    let mut values = vec![
        0,
        1,
        2,
        3,
        7,
        31,
        32,
        33,
        255,
        256,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        !0,
        !1,
        0x0102_0304,
    ];
    let mut state = 99u32;
    values.extend((0..60).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state ^ state >> 13
    }));
    values
}

/// Runs `instruction` on pairs (a, b) in %r2, %r3, result in %r4; c in %r5 is the pair's index hashed.
fn pairs(values: &[u32], instruction: &str, oracle: impl Fn(u32, u32, u32) -> u32) {
    let all: Vec<[u32; 3]> = values
        .iter()
        .flat_map(|&a| values.iter().map(move |&b| (a, b)))
        .enumerate()
        .map(|(i, (a, b))| [a, b, values[i * 7 % values.len()]])
        .collect();
    let body = format!(
        "mad.wide.u32 %rd6, %r1, 8, %rd4;\nld.global.u32 %r2, [%rd6];\nld.global.u32 %r3, [%rd6+4];\nld.global.u32 %r5, [%rd6+8];\n\
         mov.b32 %f2, %r2; mov.b32 %f3, %r3; mov.b32 %f5, %r5;\n{instruction}\nst.global.u32 [%rd5], %r4;"
    );
    for chunk in all.chunks(1024) {
        let input: Vec<u32> = chunk.iter().flatten().copied().collect();
        let out = run_words(&body, &input, chunk.len() as u32, chunk.len())
            .unwrap_or_else(|e| panic!("{instruction}: {e}"));
        for ([a, b, c], got) in chunk.iter().zip(out) {
            let want = oracle(*a, *b, *c);
            assert_eq!(
                got, want,
                "{instruction}: a = {a:#x}, b = {b:#x}, c = {c:#x}: {got:#x} instead of {want:#x}"
            );
        }
    }
}

fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

/// NaN results are the device's.
fn n(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}

fn float(op: &str, oracle: impl Fn(f32, f32, f32) -> u32) {
    pairs(&floats(), &format!("{op} mov.b32 %r4, %f4;"), |a, b, c| oracle(f(a), f(b), f(c)));
}

#[test]
fn float_sums_products_and_quotients_round_once() {
    float("add.f32 %f4, %f2, %f3;", |a, b, _| n(a + b));
    float("add.rn.f32 %f4, %f2, %f3;", |a, b, _| n(a + b));
    float("sub.rn.f32 %f4, %f2, %f3;", |a, b, _| n(a - b));
    float("mul.rn.f32 %f4, %f2, %f3;", |a, b, _| n(a * b));
    float("div.rn.f32 %f4, %f2, %f3;", |a, b, _| n(a / b));
    float("rcp.rn.f32 %f4, %f2;", |a, _, _| n(1.0 / a));
    float("sqrt.rn.f32 %f4, %f2;", |a, _, _| n(a.sqrt()));
    float("fma.rn.f32 %f4, %f2, %f3, %f5;", |a, b, c| n(a.mul_add(b, c)));
}

#[test]
fn directed_rounding_brackets_the_exact_value() {
    // The nearest result is one of the two directed ones; toward zero is the one of smaller magnitude.
    let bracket = |nearest: f32, exact_below: f32, exact_above: f32| {
        nearest.is_nan() || nearest == exact_below || nearest == exact_above
    };
    let values = floats();
    let body = |op: &str| {
        format!(
            "mad.wide.u32 %rd6, %r1, 8, %rd4;\nld.global.f32 %f2, [%rd6];\nld.global.f32 %f3, [%rd6+4];\nld.global.f32 %f5, [%rd6+8];\n\
             {op}\nst.global.f32 [%rd5], %f4;"
        )
    };
    let triples: Vec<u32> = (0..values.len() * 3).map(|i| values[i * 13 % values.len()]).collect();
    let threads = (triples.len() / 3) as u32;
    let run = |op: &str| run_words(&body(op), &triples, threads, threads as usize).unwrap();
    for op in [
        "add.MODE.f32 %f4, %f2, %f3;",
        "mul.MODE.f32 %f4, %f2, %f3;",
        "fma.MODE.f32 %f4, %f2, %f3, %f5;",
        "sub.MODE.f32 %f4, %f2, %f3;",
    ] {
        let [nearest, down, up, zero] = ["rn", "rm", "rp", "rz"].map(|mode| run(&op.replace("MODE", mode)));
        for i in 0..nearest.len() {
            let (n, d, u, z) = (f(nearest[i]), f(down[i]), f(up[i]), f(zero[i]));
            assert!(bracket(n, d, u), "{op}: {d:?} {n:?} {u:?}");
            if !n.is_nan() {
                assert!(d <= u && (d == u || d.next_up() == u), "{op}: {d:?} {u:?}");
                let toward = if u <= 0.0 { u } else { d };
                assert_eq!(z, toward, "{op}: {d:?} {u:?}");
            }
        }
    }
    // Signs of exact cancellations.
    let one = run_words(
        "mov.f32 %f2, 0f3F800000; mov.f32 %f3, 0fBF800000; add.rm.f32 %f4, %f2, %f3; st.global.f32 [%rd5], %f4;",
        &[0],
        1,
        1,
    );
    assert_eq!(one.unwrap(), [0x8000_0000]);
}

#[test]
fn float_selection_and_signs() {
    float("max.f32 %f4, %f2, %f3;", |a, b, _| match (a.is_nan(), b.is_nan()) {
        (true, true) => 0x7fff_ffff,
        (true, _) => b.to_bits(),
        (_, true) => a.to_bits(),
        _ if a == 0.0 && b == 0.0 => a.to_bits() & b.to_bits(),
        _ => if a > b { a } else { b }.to_bits(),
    });
    float("min.f32 %f4, %f2, %f3;", |a, b, _| match (a.is_nan(), b.is_nan()) {
        (true, true) => 0x7fff_ffff,
        (true, _) => b.to_bits(),
        (_, true) => a.to_bits(),
        _ if a == 0.0 && b == 0.0 => a.to_bits() | b.to_bits(),
        _ => if a < b { a } else { b }.to_bits(),
    });
    float("max.NaN.f32 %f4, %f2, %f3;", |a, b, _| {
        if a.is_nan() || b.is_nan() {
            0x7fff_ffff
        } else if a == 0.0 && b == 0.0 {
            a.to_bits() & b.to_bits()
        } else {
            a.max(b).to_bits()
        }
    });
    float("abs.f32 %f4, %f2;", |a, _, _| a.to_bits() & 0x7fff_ffff);
    float("neg.f32 %f4, %f2;", |a, _, _| a.to_bits() ^ 0x8000_0000);
    float("copysign.f32 %f4, %f2, %f3;", |a, b, _| b.to_bits() & 0x7fff_ffff | a.to_bits() & 0x8000_0000);
    float("cvt.sat.f32.f32 %f4, %f2;", |a, _, _| if a > 0.0 { a.min(1.0).to_bits() } else { 0 });
    float("mul.ftz.f32 %f4, %f2, %f3;", |a, b, _| {
        let flush = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
        n(flush(flush(a) * flush(b)))
    });
}

#[test]
fn float_comparisons_treat_nan_as_said() {
    let compare = |name: &str, oracle: fn(f32, f32) -> bool| {
        let text = format!("setp.{name}.f32 %p1, %f2, %f3; selp.b32 %r4, 1, 0, %p1;");
        pairs(&floats(), &text, |a, b, _| u32::from(oracle(f(a), f(b))));
    };
    compare("eq", |a, b| a == b);
    compare("ne", |a, b| matches!(a.partial_cmp(&b), Some(Ordering::Less | Ordering::Greater)));
    compare("lt", |a, b| a < b);
    compare("ge", |a, b| a >= b);
    compare("equ", |a, b| matches!(a.partial_cmp(&b), None | Some(Ordering::Equal)));
    compare("neu", |a, b| a != b);
    compare("ltu", |a, b| a < b || a.is_nan() || b.is_nan());
    compare("leu", |a, b| a <= b || a.is_nan() || b.is_nan());
    compare("gtu", |a, b| a > b || a.is_nan() || b.is_nan());
    compare("geu", |a, b| a >= b || a.is_nan() || b.is_nan());
    compare("num", |a, b| !a.is_nan() && !b.is_nan());
    compare("nan", |a, b| a.is_nan() || b.is_nan());
}

#[test]
fn approximations_are_near() {
    let near = |op: &str, oracle: fn(f64) -> f64| {
        pairs(&floats(), &format!("{op}.f32 %f4, %f2; mov.b32 %r4, %f4;"), |a, _, _| {
            n(oracle(f64::from(f(a))) as f32)
        });
    };
    near("lg2.approx", f64::log2);
    near("tanh.approx", f64::tanh);
    near("rsqrt.approx", |x| 1.0 / x.sqrt());
    near("sqrt.approx", f64::sqrt);
}

/// Inputs and results of an approximation.
fn results_of(op: &str) -> Vec<(u32, u32)> {
    let values = floats();
    let body = format!("ld.global.f32 %f2, [%rd4];\n{op} %f4, %f2;\nst.global.f32 [%rd5], %f4;");
    let got = run_words(&body, &values, values.len() as u32, values.len()).unwrap();
    values.into_iter().zip(got).collect()
}

#[test]
fn approximations_are_within_their_error_and_never_all_exact() {
    let check = |op: &str, most: usize, oracle: fn(f32) -> f32| {
        let mut moves = vec![0; 2 * most + 1];
        for (x, got) in results_of(op) {
            let want = n(oracle(f(x)));
            let by = got.wrapping_sub(want).wrapping_add(most as u32) as usize;
            assert!(by < moves.len(), "{op}: {x:#x}: {got:#x}, not {want:#x}");
            moves[by] += 1;
            assert!(by == most || f(want).is_finite() && f(want) != 0.0, "{op}: {x:#x}: {got:#x}");
        }
        assert!(moves.iter().all(|&count| count > 10), "{op}: {moves:?}");
    };
    check("rcp.approx.f32", 1, |x| 1.0 / x);
    check("ex2.approx.f32", 2, |x| f64::from(x).exp2() as f32);
    let is_small = |bits: u32| bits & 0x7f80_0000 == 0;
    for (x, got) in results_of("rcp.approx.ftz.f32") {
        assert!(!is_small(got) || got & 0x007f_ffff == 0, "{x:#x}: {got:#x}");
        assert!(!is_small(x) || f(got).is_infinite(), "{x:#x}: {got:#x}");
    }
    // 2 to the power of nothing is exact.
    for (x, got) in results_of("ex2.approx.ftz.f32") {
        assert!(!is_small(x) || got == 0x3f80_0000, "{x:#x}: {got:#x}");
    }
}

#[test]
fn integer_arithmetic_wraps() {
    let int = |op: &str, oracle: fn(u32, u32, u32) -> u32| pairs(&integers(), op, oracle);
    int("add.s32 %r4, %r2, %r3;", |a, b, _| a.wrapping_add(b));
    int("sub.s32 %r4, %r2, %r3;", |a, b, _| a.wrapping_sub(b));
    int("mul.lo.s32 %r4, %r2, %r3;", |a, b, _| a.wrapping_mul(b));
    int("mul.hi.u32 %r4, %r2, %r3;", |a, b, _| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    int("mul.hi.s32 %r4, %r2, %r3;", |a, b, _| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
    int("mad.lo.s32 %r4, %r2, %r3, %r5;", |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    int("mad.hi.s32 %r4, %r2, %r3, %r5;", |a, b, c| {
        (((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32).wrapping_add(c)
    });
    int("min.s32 %r4, %r2, %r3;", |a, b, _| (a as i32).min(b as i32) as u32);
    int("max.u32 %r4, %r2, %r3;", |a, b, _| a.max(b));
    int("abs.s32 %r4, %r2;", |a, _, _| (a as i32).wrapping_abs() as u32);
    int("neg.s32 %r4, %r2;", |a, _, _| a.wrapping_neg());
    int("div.u32 %r4, %r2, %r3;", |a, b, _| a.checked_div(b).unwrap_or(!0));
    int("rem.u32 %r4, %r2, %r3;", |a, b, _| a.checked_rem(b).unwrap_or(a));
    int(
        "div.s32 %r4, %r2, %r3;",
        |a, b, _| if b == 0 { !0 } else { (a as i32).wrapping_div(b as i32) as u32 },
    );
    int(
        "rem.s32 %r4, %r2, %r3;",
        |a, b, _| if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 },
    );
    int("mul.wide.s32 %rd6, %r2, %r3; shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r4, %rd6;", |a, b, _| {
        ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
    });
    int("add.cc.u32 %r6, %r2, %r3; addc.u32 %r4, %r5, 0;", |a, b, c| {
        c.wrapping_add(u32::from(a.checked_add(b).is_none()))
    });
    int("sub.cc.u32 %r6, %r2, %r3; subc.u32 %r4, %r5, 0;", |a, b, c| c.wrapping_sub(u32::from(a < b)));
    int("mad.lo.cc.u32 %r6, %r2, %r3, %r5; madc.hi.u32 %r4, %r2, %r3, 0;", |a, b, c| {
        ((u64::from(a) * u64::from(b)).wrapping_add(u64::from(c)) >> 32) as u32
    });
    int(
        "cvt.u16.u32 %rs1, %r2; cvt.u16.u32 %rs2, %r3; add.s16 %rs3, %rs1, %rs2; cvt.u32.u16 %r4, %rs3;",
        |a, b, _| u32::from((a as u16).wrapping_add(b as u16)),
    );
}

#[test]
fn bits_are_moved_as_said() {
    let int = |op: &str, oracle: fn(u32, u32, u32) -> u32| pairs(&integers(), op, oracle);
    int("and.b32 %r4, %r2, %r3;", |a, b, _| a & b);
    int("or.b32 %r4, %r2, %r3;", |a, b, _| a | b);
    int("xor.b32 %r4, %r2, %r3;", |a, b, _| a ^ b);
    int("not.b32 %r4, %r2;", |a, _, _| !a);
    int("shl.b32 %r4, %r2, %r3;", |a, b, _| a.checked_shl(b).unwrap_or(0));
    int("shr.u32 %r4, %r2, %r3;", |a, b, _| a.checked_shr(b).unwrap_or(0));
    int("shr.s32 %r4, %r2, %r3;", |a, b, _| (a as i32 >> b.min(31)) as u32);
    int("popc.b32 %r4, %r2;", |a, _, _| a.count_ones());
    int("clz.b32 %r4, %r2;", |a, _, _| a.leading_zeros());
    int("brev.b32 %r4, %r2;", |a, _, _| a.reverse_bits());
    int("bfind.u32 %r4, %r2;", |a, _, _| 31u32.wrapping_sub(a.leading_zeros()));
    int("shf.l.wrap.b32 %r4, %r2, %r3, %r5;", |a, b, c| {
        (((u64::from(b) << 32 | u64::from(a)) << (c & 31)) >> 32) as u32
    });
    int("shf.r.wrap.b32 %r4, %r2, %r3, %r5;", |a, b, c| {
        ((u64::from(b) << 32 | u64::from(a)) >> (c & 31)) as u32
    });
    int("shf.r.clamp.b32 %r4, %r2, %r3, %r5;", |a, b, c| {
        ((u64::from(b) << 32 | u64::from(a)) >> c.min(32)) as u32
    });
    int("lop3.b32 %r4, %r2, %r3, %r5, 0xe8;", |a, b, c| a & b | a & c | b & c);
    int("lop3.b32 %r4, %r2, %r3, %r5, 0x1a;", |a, b, c| {
        (0..32).fold(0, |out, i| {
            let index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1;
            out | (0x1a >> index & 1) << i
        })
    });
    int("prmt.b32 %r4, %r2, %r3, %r5;", |a, b, c| {
        let bytes = [a.to_le_bytes(), b.to_le_bytes()].concat();
        let pick = |i: u32| {
            let nibble = c >> (4 * i) & 15;
            let byte = bytes[(nibble & 7) as usize];
            if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
        };
        u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
    });
    int("and.b32 %r6, %r3, 31; and.b32 %r7, %r5, 31; bfe.u32 %r4, %r2, %r6, %r7;", |a, b, c| {
        let (from, length) = (b & 31, c & 31);
        ((u64::from(a) >> from) & ((1 << length) - 1)) as u32
    });
    int("and.b32 %r6, %r3, 31; and.b32 %r7, %r5, 31; bfe.s32 %r4, %r2, %r6, %r7;", |a, b, c| {
        let (from, length) = (b & 31, c & 31);
        if length == 0 {
            return 0;
        }
        let wide = i64::from(a as i32) >> from;
        (wide << (64 - length) >> (64 - length)) as u32
    });
    int("and.b32 %r6, %r3, 31; and.b32 %r7, %r5, 31; bfi.b32 %r4, %r2, %r3, %r6, %r7;", |a, b, c| {
        let (from, length) = (b & 31, c & 31);
        let mask = (((1u64 << length) - 1) << from) as u32;
        (u64::from(a) << from) as u32 & mask | b & !mask
    });
    int(
        "setp.lt.s32 %p1, %r2, %r3; setp.gt.and.u32 %p2|%p3, %r2, %r5, %p1; selp.b32 %r4, 2, 0, %p3; @%p2 add.s32 %r4, %r4, 1;",
        |a, b, c| {
            let first = (a as i32) < b as i32;
            u32::from(a > c && first) | u32::from(a <= c && first) << 1
        },
    );
    int("setp.lo.u32 %p1, %r2, %r3; selp.u32 %r4, 1, 0, %p1;", |a, b, _| u32::from(a < b));
}

#[test]
fn packed_halves_round_once() {
    use half::{bf16, f16};
    let halves: Vec<u32> = floats().iter().step_by(3).map(|x| x ^ x >> 16 ^ x << 11).collect();
    let each = |a: u32, b: u32, c: u32, f: &dyn Fn(u16, u16, u16) -> u16| {
        u32::from(f(a as u16, b as u16, c as u16))
            | u32::from(f((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16)) << 16
    };
    let nb = |x: f64| {
        let y = bf16::from_f64(x);
        if y.is_nan() { 0x7fff } else { y.to_bits() }
    };
    let nh = |x: f64| {
        let y = f16::from_f64(x);
        if y.is_nan() { 0x7fff } else { y.to_bits() }
    };
    let b = |x: u16| bf16::from_bits(x).to_f64();
    let h = |x: u16| f16::from_bits(x).to_f64();
    pairs(&halves, "mul.rn.bf16x2 %r4, %r2, %r3;", |x, y, z| each(x, y, z, &|x, y, _| nb(b(x) * b(y))));
    pairs(&halves, "mul.rn.f16x2 %r4, %r2, %r3;", |x, y, z| each(x, y, z, &|x, y, _| nh(h(x) * h(y))));
    pairs(&halves, "add.rn.f16x2 %r4, %r2, %r3;", |x, y, z| each(x, y, z, &|x, y, _| nh(h(x) + h(y))));
    pairs(&halves, "abs.bf16x2 %r4, %r2;", |x, _, _| x & 0x7fff_7fff);
    pairs(&halves, "neg.f16x2 %r4, %r2;", |x, _, _| x ^ 0x8000_8000);
    pairs(&halves, "max.bf16x2 %r4, %r2, %r3;", |x, y, z| {
        each(x, y, z, &|x, y, _| match (b(x).is_nan(), b(y).is_nan()) {
            (true, true) => 0x7fff,
            (true, _) => y,
            (_, true) => x,
            _ if b(x) == b(y) => x & y | if x == y { x } else { 0 },
            _ => {
                if b(x) > b(y) {
                    x
                } else {
                    y
                }
            }
        })
    });
}

#[test]
fn doubles_run_too() {
    let body = "ld.global.f32 %f2, [%rd4]; cvt.f64.f32 %fd1, %f2; add.rn.f64 %fd2, %fd1, %fd1; mul.rn.f64 %fd3, %fd2, %fd1;\n\
                fma.rn.f64 %fd4, %fd3, %fd1, %fd2; div.rn.f64 %fd5, %fd4, %fd3; sqrt.rn.f64 %fd6, %fd5; cvt.rn.f32.f64 %f4, %fd6; st.global.f32 [%rd5], %f4;";
    let out = run_words(body, &[3.5f32.to_bits()], 1, 1).unwrap();
    let x = 3.5f64;
    let want = (((x + x) * x).mul_add(x, x + x) / ((x + x) * x)).sqrt() as f32;
    assert_eq!(f(out[0]), want);
}

#[test]
fn unknown_modifiers_types_and_registers_are_refused() {
    for bad in [
        "add.foo.f32 %f1, %f2, %f3;",
        "add.f32.foo %f1, %f2, %f3;",
        "add.f32 %f1, %f2;",
        "add.f32 %f1, %f2, %rd1;",
        "add.s32 %r1, %r2, %f99;",
        "cvt.rni.s32.s32 %r1, %r2;",
        "cvt.s32.f32 %r1, %f2;",
        "cvt.f32.f64 %f1, %fd2;",
        "cvt.rn.satfinite.relu.e4m3x2.f32 %rs1, %f1, %f2;",
        "div.rz.f32 %f1, %f2, %f3;",
        "fma.f32 %f1, %f2, %f3, %f4;",
        "max.rn.f32 %f1, %f2, %f3;",
        "ld.global.u32.v2 %r1, [%rd1];",
        "ld.global.nc.volatile.u32 %r1, [%rd1];",
        "ld.shared.nc.u32 %r1, [%rd1];",
        "atom.global.add.b32 %r1, [%rd1], %r2;",
        "shfl.bfly.b32 %r1, %r2, 1, 31;",
        "shfl.sync.bfly.b64 %rd1, %rd2, 1, 31, -1;",
        "setp.ltu.s32 %p1, %r1, %r2;",
        "mov.u32 %r1, %clock;",
        "mov.f32 %f1, 1;",
        "mov.u32 %r1, nobody;",
        "bra nowhere;",
        "call nobody;",
        "wgmma.fence.sync.aligned;",
        "bar.arrive 0, 32;",
        "membar;",
        "fence.acq_rel;",
        "prmt.b32.f4e %r1, %r2, %r3, %r4;",
        ".unknown 3;",
        ".reg .b128 %q;",
        ".pragma \"frobnicate\";",
    ] {
        let text = module(bad);
        let error = ptx_interp::Module::parse(&text).expect_err(bad);
        let line = text.lines().position(|l| l.contains(bad)).unwrap() as u32 + 1;
        assert!(error.line == line || bad.starts_with("bra"), "{bad}: {error}");
    }
    let text = module("add.foo.f32 %f1, %f2, %f3;");
    let error = ptx_interp::Module::parse(&text).unwrap_err().to_string();
    assert!(error.contains("add.foo.f32") || error.contains(".foo"), "{error}");
}
