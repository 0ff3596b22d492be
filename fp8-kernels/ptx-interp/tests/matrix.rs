//! `mma` and `ldmatrix` against plain products and tables, and what the checks see of them.

mod machine;

use half::{bf16, f16};
use machine::{fault, kind, run_seeded, run_words};
use ptx_interp::{Kind, Module};

/// Small numbers that both types hold, different for each place and seed.
fn number(row: usize, column: usize, seed: usize) -> f32 {
    ((row * 31 + column * 17 + seed * 7) % 41) as f32 / 4.0 - 5.0
}

/// The two elements of a register.
fn pair(bits: impl Fn(f32) -> u16, values: [f32; 2]) -> u32 {
    let [low, high] = values.map(|value| u32::from(bits(value)));
    low | high << 16
}

/// Ten words a lane, a0 … a3, b0, b1, c0 … c3, and the four of the result, from the tables of the PTX manual.
fn operands(bits: impl Fn(f32) -> u16 + Copy) -> (Vec<u32>, Vec<u32>) {
    let (a, b, c) = (
        |row, k| number(row, k, 1),
        |k, column| number(k, column, 2),
        |row, column| number(row, column, 3) * 8.0,
    );
    let (mut words, mut wanted) = (Vec::new(), Vec::new());
    for lane in 0..32 {
        let (group, place) = (lane >> 2, lane % 4);
        for i in 0..8 {
            let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
            let column = place * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
            if i % 2 == 0 {
                words.push(pair(bits, [a(row, column), a(row, column + 1)]));
            }
        }
        for i in [0, 2] {
            let row = place * 2 + if i >= 2 { 8 } else { 0 };
            words.push(pair(bits, [b(row, group), b(row + 1, group)]));
        }
        for i in 0..4 {
            let (row, column) = (if i < 2 { group } else { group + 8 }, place * 2 + (i & 1));
            words.push(c(row, column).to_bits());
            let sum: f32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
            wanted.push((c(row, column) + sum).to_bits());
        }
    }
    (words, wanted)
}

/// Loads ten words, multiplies, stores four.
fn multiply(ty: &str) -> String {
    let load = |i: usize| format!("ld.global.u32 %r{}, [%rd6+{}];\n", 10 + i, 4 * i);
    let store = |i: usize| format!("st.global.f32 [%rd7+{}], %f{};\n", 4 * i, 10 + i);
    let loads: String = (0..10).map(load).collect();
    let moves: String = (0..4).map(|i| format!("mov.b32 %f{i}, %r{};\n", 16 + i)).collect();
    let stores: String = (0..4).map(store).collect();
    format!(
        "mul.wide.u32 %rd6, %r1, 40; add.s64 %rd6, %rd6, %rd1; mul.wide.u32 %rd7, %r1, 16; add.s64 %rd7, %rd7, %rd2;\n\
         {loads}{moves}mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {{%f10,%f11,%f12,%f13}}, \
         {{%r10,%r11,%r12,%r13}}, {{%r14,%r15}}, {{%f0,%f1,%f2,%f3}};\n{stores}"
    )
}

#[test]
fn products_of_both_types() {
    let (words, wanted) = operands(|value| bf16::from_f32(value).to_bits());
    let (halves, same) = operands(|value| f16::from_f32(value).to_bits());
    for seed in [0, 1, 2] {
        // Sums of quarters are exact: no order changes them.
        assert_eq!(run_seeded(&multiply("bf16"), &words, 32, 128, seed).unwrap(), wanted);
        assert_eq!(run_seeded(&multiply("f16"), &halves, 32, 128, seed).unwrap(), same);
    }
}

/// Ten words a lane and the four of the result for `m16n8k32`, from the tables of the PTX manual. The codes differ for each
/// place; `values` has what each code of a and of b stands for.
fn operands_of_bytes(values: [&dyn Fn(u8) -> f32; 2]) -> (Vec<u32>, Vec<u32>) {
    // Codes of numbers from 2⁻² to 4 with either sign, in both formats: their products' sums are exact.
    let code = |row: usize, column: usize, seed: usize| {
        let digits = (row * 31 + column * 17 + seed * 7) % 41;
        ((digits % 24) as u8 + if seed == 1 { 0x28 } else { 0x34 }) | ((digits % 2) as u8) << 7
    };
    let (a, b) = (|row, k| code(row, k, 1), |k, column| code(k, column, 2));
    let c = |row, column| number(row, column, 3) * 8.0;
    let (mut words, mut wanted) = (Vec::new(), Vec::new());
    for lane in 0..32 {
        let (group, place) = (lane >> 2, lane % 4);
        // a0 … a15: rows group and group + 8 in turn, four bytes each, columns 16 further on from a8.
        for i in [0, 4, 8, 12] {
            let row = if i == 0 || i == 8 { group } else { group + 8 };
            let column = place * 4 + if i >= 8 { 16 } else { 0 };
            words.push(u32::from_le_bytes([0, 1, 2, 3].map(|e| a(row, column + e))));
        }
        for i in [0, 4] {
            let row = place * 4 + if i >= 4 { 16 } else { 0 };
            words.push(u32::from_le_bytes([0, 1, 2, 3].map(|e| b(row + e, group))));
        }
        for i in 0..4 {
            let (row, column) = (if i < 2 { group } else { group + 8 }, place * 2 + (i & 1));
            words.push(c(row, column).to_bits());
            let sum: f32 = (0..32).map(|k| values[0](a(row, k)) * values[1](b(k, column))).sum();
            wanted.push((c(row, column) + sum).to_bits());
        }
    }
    (words, wanted)
}

#[test]
fn products_of_each_pair_of_fp8_types() {
    let e4m3 = |code: u8| fp8_format::E4M3::from_bits(code).to_f32();
    let e5m2 = |code: u8| fp8_format::E5M2::from_bits(code).to_f32();
    let types: [(&str, &dyn Fn(u8) -> f32); 2] = [("e4m3", &e4m3), ("e5m2", &e5m2)];
    for (left, left_value) in types {
        for (right, right_value) in types {
            let (words, wanted) = operands_of_bytes([left_value, right_value]);
            let text = multiply("bf16")
                .replace("m16n8k16", "m16n8k32")
                .replace("bf16.bf16", &format!("{left}.{right}"));
            assert_eq!(run_words(&text, &words, 32, 128).unwrap(), wanted, "{left} {right}");
        }
    }
}

/// With the sums in the registers that they start in.
fn multiply_in_place() -> String {
    let text = multiply("bf16").replace("%f10,%f11,%f12,%f13", "%f0,%f1,%f2,%f3");
    (0..4).fold(text, |text, i| text.replace(&format!("], %f{};", 10 + i), &format!("], %f{i};")))
}

#[test]
fn products_add_to_what_is_there_in_place() {
    let (words, wanted) = operands(|value| bf16::from_f32(value).to_bits());
    assert_eq!(run_words(&multiply_in_place(), &words, 32, 128).unwrap(), wanted);
}

#[test]
fn sums_take_products_by_rising_k() {
    // 2^24 + 1 is lost, 1 + 1 + … is not: the order shows.
    let sum = |first: bool| {
        let mut words = vec![0; 320];
        let one = u32::from(bf16::from_f32(1.0).to_bits());
        let large = u32::from(bf16::from_f32(16_777_216.0).to_bits());
        // Row 0, columns 0, 1, 8 and 9 of a, all ones in b's column 0.
        let (low, high) =
            if first { (large | one << 16, one | one << 16) } else { (one | one << 16, one | large << 16) };
        (words[0], words[2]) = (low, high);
        (words[4], words[5]) = (one | one << 16, one | one << 16);
        f32::from_bits(run_words(&multiply("bf16"), &words, 32, 128).unwrap()[0])
    };
    assert_eq!(sum(true), 16_777_216.0);
    assert_eq!(sum(false), 16_777_220.0); // 16777219, to even
}

#[test]
fn unwritten_operands_are_reported() {
    let (words, _) = operands(|value| bf16::from_f32(value).to_bits());
    for (register, name) in [(13, "a3"), (15, "b1")] {
        let text = multiply("bf16").replace(&format!("ld.global.u32 %r{register},"), "ld.global.u32 %r30,");
        let report = run_words(&text, &words, 32, 128).unwrap_err();
        assert_eq!(report.kind, Kind::Uninitialised, "{name}");
        assert!(report.detail.contains("a part of a matrix is an unwritten value"), "{report}");
    }
    let text = multiply("bf16").replace("mov.b32 %f2,", "mov.b32 %f30,");
    assert_eq!(run_words(&text, &words, 32, 128).unwrap_err().kind, Kind::Uninitialised);
}

#[test]
fn products_need_the_whole_warp() {
    let (words, _) = operands(|value| bf16::from_f32(value).to_bits());
    let text = multiply_in_place();
    let apart = text.replace("mma.sync", "setp.lt.u32 %p1, %r1, 31;\n@%p1 mma.sync");
    let report = run_words(&apart, &words, 32, 128).unwrap_err();
    assert_eq!(report.kind, Kind::DivergentShuffle);
    assert!(report.detail.contains("lane 31 is in the mask 0xffffffff and not here"), "{report}");
    let gone = text.replace("mma.sync", "setp.eq.u32 %p1, %r1, 3;\n@%p1 ret;\nmma.sync");
    assert!(run_words(&gone, &words, 32, 128).unwrap_err().detail.contains("has left the kernel"));
    assert!(run_words(&text, &words, 16, 128).unwrap_err().detail.contains("does not exist in this block"));
}

const FILL: &str = "shl.b32 %r2, %r1, 4; mov.u32 %r3, dyn; add.s32 %r4, %r3, %r2; mul.wide.u32 %rd6, %r1, 16; add.s64 %rd6, %rd6, %rd1;\n\
    ld.global.v4.u32 {%r5,%r6,%r7,%r8}, [%rd6]; st.shared.v4.u32 [%r4], {%r5,%r6,%r7,%r8};\n";

fn load(count: usize, transposed: bool) -> String {
    let registers: Vec<String> = (0..count).map(|i| format!("%r{}", 10 + i)).collect();
    let (names, trans) = (registers.join(","), if transposed { ".trans" } else { "" });
    let store = |(i, name): (usize, &String)| format!("st.global.u32 [%rd7+{}], {name};\n", 4 * i);
    let stores: String = registers.iter().enumerate().map(store).collect();
    format!(
        "ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r4];\n\
         mul.wide.u32 %rd7, %r1, 16; add.s64 %rd7, %rd7, %rd2;\n{stores}"
    )
}

#[test]
fn matrices_are_loaded_as_they_lie_and_transposed() {
    // 32 rows of eight elements, each telling its row and column.
    let element = |row: usize, column: usize| (row * 256 + column) as u32;
    let words: Vec<u32> = (0..128)
        .map(|i| (i / 4, i % 4 * 2))
        .map(|(row, column)| element(row, column) | element(row, column + 1) << 16)
        .collect();
    for (count, transposed) in [(1, false), (2, false), (4, false), (1, true), (2, true), (4, true)] {
        let text = format!("{FILL} bar.warp.sync -1;\n{}", load(count, transposed));
        let got = run_words(&text, &words, 32, 128).unwrap();
        for lane in 0..32 {
            for matrix in 0..count {
                let (group, place) = (lane / 4, lane % 4 * 2);
                let [low, high] = [place, place + 1].map(|other| {
                    let (row, column) = if transposed { (other, group) } else { (group, other) };
                    element(8 * matrix + row, column)
                });
                assert_eq!(
                    got[lane * 4 + matrix],
                    low | high << 16,
                    "lane {lane}, matrix {matrix} of {count}"
                );
            }
        }
    }
}

#[test]
fn loads_of_matrices_are_checked() {
    let words = vec![0; 128];
    let run = |text: &str| run_words(text, &words, 32, 128).map_err(|report| report.kind);
    let sound = format!("{FILL} bar.warp.sync -1;\n{}", load(4, false));
    assert!(run(&sound).is_ok());
    assert_eq!(run(&sound.replace("bar.warp.sync -1;", "")), Err(Kind::Race));
    assert_eq!(run(&sound.replace(", [%r4];\n", ", [%r4+8];\n")), Err(Kind::Misaligned));
    assert_eq!(run(&sound.replace(", [%r4];\n", ", [%r4+4096];\n")), Err(Kind::OutOfBounds));
    // The addresses of lanes beyond the matrices' rows do not matter, and their bytes are not needed.
    let only = |lanes: u32, count| {
        let guarded = FILL.replace("st.shared", &format!("setp.lt.u32 %p1, %r1, {lanes};\n@%p1 st.shared"));
        run(&format!("{guarded} bar.warp.sync -1;\n{}", load(count, false)))
    };
    assert!(only(8, 1).is_ok() && only(16, 2).is_ok());
    assert_eq!(
        (only(7, 1), only(15, 2), only(31, 4)),
        (Err(Kind::Uninitialised), Err(Kind::Uninitialised), Err(Kind::Uninitialised))
    );
    let report = fault(&load(4, false).replace("ldmatrix", "mov.u32 %r4, dyn; ldmatrix"), 32);
    assert!(report.detail.contains("loaded from unwritten shared memory"), "{report}");
    assert_eq!(kind(&load(4, true), 32), Kind::Uninitialised, "the address was never written");
}

#[test]
fn other_shapes_do_not_load() {
    for text in [
        multiply("bf16").replace("m16n8k16", "m16n8k8"),
        multiply("bf16").replace(".row.col", ".row.row"),
        multiply("bf16").replace(".bf16.bf16", ".bf16.f16"),
        multiply("bf16").replace(".bf16.bf16", ".e4m3.e4m3"),
        multiply("bf16").replace("m16n8k16", "m16n8k32"),
        multiply("bf16").replace("f32 {%f10", "satfinite.f32 {%f10"),
        multiply("bf16").replace("{%r14,%r15}", "{%r14}"),
        load(4, false).replace("x4", "x3"),
        load(2, false).replace("x2", "x4"),
        load(4, false).replace(".shared", ".global"),
        load(4, false).replace("b16", "b8"),
    ] {
        assert!(Module::parse(&machine::module(&text)).is_err(), "{text}");
    }
}
