//! Bugs planted in the kernels this library ships, as edits of their PTX: each is found, by a check or by a wrong result,
//! and without the edit the same launches pass in every order with the same results.
//!
//! An edit names its instruction by what is in it, never by line, and fails loudly where the kernel has no such one.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed step is a failed test")]

mod machine;

use machine::case::{Case, Outputs, floats};
use ptx_interp::{Kind, Module};

const SEEDS: [u64; 4] = [0, 1, 2, 1 << 40];

/// The lines to change, among those that hold a text.
#[derive(Clone, Copy)]
enum Which {
    Nth(usize),
    Last,
    All,
}

use Which::{All, Last, Nth};

enum Found {
    /// By one of these checks, in every order.
    By(&'static [Kind]),
    /// By the result of one of the launches.
    Result,
}

struct Bug {
    name: &'static str,
    kernel: &'static str,
    /// The lines that change: those with all of this text.
    holds: &'static [&'static str],
    which: Which,
    edit: fn(&str) -> String,
    found: Found,
}

const SYNC: Found = Found::By(&[Kind::Race, Kind::Uninitialised]);
const RACE: Found = Found::By(&[Kind::Race]);

fn nothing(_: &str) -> String {
    String::new()
}

const BUGS: [Bug; 18] = [
    Bug {
        name: "no barrier behind a tile's codes",
        kernel: "quantize_tiles",
        holds: &["bar.sync"],
        which: Nth(0),
        edit: nothing,
        found: SYNC,
    },
    Bug {
        name: "no barrier before the next tile",
        kernel: "quantize_tiles",
        holds: &["bar.sync"],
        which: Nth(1),
        edit: nothing,
        found: RACE,
    },
    Bug {
        name: "no barrier behind a tile",
        kernel: "transpose_u8",
        holds: &["bar.sync"],
        which: Nth(0),
        edit: nothing,
        found: SYNC,
    },
    Bug {
        name: "no barrier before the next tile",
        kernel: "transpose_u8",
        holds: &["bar.sync"],
        which: Last,
        edit: nothing,
        found: RACE,
    },
    Bug {
        name: "no barrier in a row's sum",
        kernel: "norm_held_block",
        holds: &["bar.sync"],
        which: Nth(0),
        edit: nothing,
        found: SYNC,
    },
    Bug {
        name: "no barrier in a row's maximum or sum",
        kernel: "softmax_block",
        holds: &["bar.sync"],
        which: Nth(0),
        edit: nothing,
        found: SYNC,
    },
    Bug {
        name: "no barrier before the tree",
        kernel: "reduce_columns_finish",
        holds: &["bar.sync"],
        which: Nth(0),
        edit: nothing,
        found: SYNC,
    },
    Bug {
        name: "no barrier in the tree",
        kernel: "reduce_columns_finish",
        holds: &["bar.sync"],
        which: Last,
        edit: nothing,
        found: RACE,
    },
    Bug {
        name: "the tail goes one too far",
        kernel: "quantize_bf16",
        holds: &["setp.ge.u64"],
        which: Last,
        edit: |line| line.replace(".ge.", ".gt."),
        found: Found::By(&[Kind::OutOfBounds]),
    },
    Bug {
        name: "the last vector is left out",
        kernel: "quantize_bf16",
        holds: &["setp.gt.u64"],
        which: All,
        edit: |line| line.replace(".gt.", ".ge."),
        found: Found::Result,
    },
    Bug {
        name: "vectors at odd places",
        kernel: "quantize_bf16",
        holds: &["v4.u32"],
        which: Nth(0),
        edit: |line| line.replace(']', "+4]"),
        found: Found::By(&[Kind::Misaligned]),
    },
    Bug {
        name: "the other format",
        kernel: "quantize_bf16",
        holds: &["e4m3x2"],
        which: All,
        edit: |line| line.replace("e4m3x2", "e5m2x2"),
        found: Found::Result,
    },
    Bug {
        name: "half a mask",
        kernel: "amax",
        holds: &["mov.u32", ", -1;"],
        which: Last,
        edit: |line| line.replace("-1", "65535"),
        found: Found::By(&[Kind::DivergentShuffle]),
    },
    Bug {
        name: "a short tree",
        kernel: "amax",
        holds: &["mov.u32", ", 16;"],
        which: Last,
        edit: |line| line.replace("16;", "8;"),
        found: Found::Result,
    },
    Bug {
        name: "a plain store for the atomic",
        kernel: "amax",
        holds: &["atom.global.max.s32"],
        which: Last,
        edit: |line| {
            let operands = line.find('[').map_or("", |at| &line[at..]);
            format!("st.global.u32 {operands}")
        },
        found: RACE,
    },
    Bug {
        name: "an unsigned maximum",
        kernel: "amax",
        holds: &["atom.global.max.s32"],
        which: Last,
        edit: |line| line.replace(".s32", ".u32"),
        found: Found::Result,
    },
    Bug {
        name: "the neighbour's scale",
        kernel: "update_scales",
        holds: &["st.global.f32"],
        which: Last,
        edit: |line| line.replace(']', "+4]"),
        found: RACE,
    },
    Bug {
        name: "a row of the tile is not stored",
        kernel: "transpose_u8",
        holds: &["st.shared.u32"],
        which: Nth(3),
        edit: nothing,
        found: Found::By(&[Kind::Uninitialised]),
    },
];

fn file(kernel: &str) -> &'static str {
    match kernel {
        "quantize_tiles" => include_str!("../../ptx/quantize_tiles.ptx"),
        "quantize_bf16" => include_str!("../../ptx/quantize.ptx"),
        "transpose_u8" => include_str!("../../ptx/transpose.ptx"),
        "norm_held_block" => include_str!("../../ptx/norm.ptx"),
        "softmax_block" => include_str!("../../ptx/softmax.ptx"),
        "reduce_columns_finish" => include_str!("../../ptx/reduce.ptx"),
        "amax" => include_str!("../../ptx/amax.ptx"),
        "update_scales" => include_str!("../../ptx/update_scales.ptx"),
        _ => panic!("{kernel}: which file has it?"),
    }
}

/// The text before the kernel, the kernel, and the text behind it.
fn split(kernel: &str) -> [&'static str; 3] {
    let text = file(kernel);
    let start = text
        .find(&format!(".visible .entry {kernel}("))
        .unwrap_or_else(|| panic!("{kernel}: the snapshot has no such kernel"));
    let length = text[start..].find("\n}").unwrap_or_else(|| panic!("{kernel}: has no end")) + 2;
    let [before, rest] = [&text[..start], &text[start..]];
    [before, &rest[..length], &rest[length..]]
}

fn mutated(bug: &Bug) -> String {
    let [before, body, behind] = split(bug.kernel);
    let mut lines: Vec<String> = body.lines().map(str::to_owned).collect();
    let places: Vec<usize> =
        (0..lines.len()).filter(|&i| bug.holds.iter().all(|text| lines[i].contains(text))).collect();
    let chosen = match bug.which {
        Nth(n) => places.get(n).copied().into_iter().collect(),
        Last => places.last().copied().into_iter().collect(),
        All => places,
    };
    assert!(
        !chosen.is_empty(),
        "{}, {}: no line with {:?} where one was: the kernel has changed, and this edit must follow",
        bug.kernel,
        bug.name,
        bug.holds
    );
    for at in chosen {
        let line = (bug.edit)(&lines[at]);
        assert_ne!(line, lines[at], "{}, {}: the edit changes nothing", bug.kernel, bug.name);
        lines[at] = line;
    }
    [before, &lines.join("\n"), behind].concat()
}

/// bf16 values from -4 to 4, and a needle.
fn bf16(count: usize, needle: usize) -> Vec<u8> {
    let value = |i: usize| if i == needle { 96.0 } else { (i * 7919 % 8191) as f32 / 1024.0 - 4.0 };
    (0..count).flat_map(|i| ((value(i).to_bits() >> 16) as u16).to_le_bytes()).collect()
}

const BF16: usize = 1;
const REST: f32 = -1.0;

/// Adds the parameters that a quantization ends with: format, scale, its inverse, amax, counts.
fn slot(case: Case) -> Case {
    case.u32(0).input(floats(&[8.0])).room(4).cells(floats(&[REST])).cells(vec![0; 24])
}

fn quantize_tiles() -> Vec<Case> {
    let (rows, cols, run) = (200, 72, 2);
    let case = Case::new([2, 1, 1], 256).input(bf16(rows * cols, 3)).u32(BF16).u64(rows).u64(cols).u64(run);
    let case = slot(case.room(rows * cols).room(rows * cols));
    // The column sums have barriers of their own, which also part the tiles.
    vec![case.clone().room(2 * cols * 4), case.null()]
}

fn quantize_bf16() -> Vec<Case> {
    let case = |n: usize| {
        let case = Case::new([2, 1, 1], 256).input(bf16(n, n - 1)).u64(n).room(n);
        slot(case)
    };
    vec![case(5608), case(5603)]
}

fn transpose_u8() -> Vec<Case> {
    let (rows, cols) = (260, 72);
    let codes: Vec<u8> = (0..rows * cols).map(|i| (i % 251) as u8).collect();
    let turned = (0..cols * rows).map(|i| codes[i % rows * cols + i / rows]).collect();
    vec![Case::new([2, 1, 1], 256).input(codes).u64(rows).u64(cols).buffer(None, turned)]
}

fn norm_held_block() -> Vec<Case> {
    let (rows, cols) = (3, 2048);
    let case = Case::new([2, 1, 1], 64).input(bf16(rows * cols, 7)).u32(BF16);
    let case = case.input(floats(&vec![1.5; cols])).u32(0).input(floats(&vec![0.25; cols])).u32(0);
    let case = case.u32(1).u32(0).f32(1e-5).u64(rows).u64(cols).room(rows * 4).room(rows * 4);
    let case = case.room(rows * cols * 2).null().u32(0).null().null();
    vec![case.cells(floats(&[REST])).null().null()]
}

fn softmax_block() -> Vec<Case> {
    let (rows, keys) = (3, 1600);
    let case = Case::new([1, 1, 1], 512).input(bf16(rows * keys, 5)).room(rows * keys * 2).u32(BF16);
    let case = case.u64(rows).u32(keys).u64(rows).f32(0.5).u32(0).null();
    vec![(0..11).fold(case, |case, i| case.u64(usize::from(i < 5)))]
}

fn reduce_columns_finish() -> Vec<Case> {
    let (pieces, cols) = (40, 32);
    let partial: Vec<f32> = (0..pieces * cols).map(|i| (i % 97) as f32).collect();
    let sums: Vec<f32> = (0..cols).map(|c| (0..pieces).map(|p| partial[p * cols + c]).sum()).collect();
    let added: Vec<f32> = sums.iter().map(|sum| sum + 0.5).collect();
    let case = || Case::new([1; 3], 256).input(floats(&partial)).u64(pieces).u64(cols).u32(32);
    let written = case().buffer(None, floats(&sums)).u32(0);
    vec![written, case().buffer(Some(floats(&vec![0.5; cols])), floats(&added)).u32(1)]
}

fn amax() -> Vec<Case> {
    let n = 8 * 256 + 5;
    let case = |needle: usize| {
        let case = Case::new([2, 1, 1], 256).input(bf16(n, needle)).u32(BF16).u64(n).null();
        case.buffer(Some(floats(&[REST])), floats(&[96.0]))
    };
    [0, 8 * 17, 8 * 31 + 7, 8 * 255, n - 1].map(case).into()
}

fn update_scales() -> Vec<Case> {
    let (slots, rows) = (11, 5);
    let history: Vec<f32> = (0..slots * rows).map(|i| 1.0 + (i * 7 % 13) as f32).collect();
    let case = Case::new([2, 1, 1], 32).cells(floats(&history)).cells(floats(&vec![2.0; slots]));
    let counts = || vec![0; 8 * slots];
    let case = case.cells(floats(&vec![REST; slots])).cells(counts()).cells(counts()).cells(counts());
    let case = case.u64(slots).u64(rows).f32(REST).u32(1).u64(rows).f32(0.0).u32(0);
    vec![case.u32(0).f32(448.0).f32(448.0).u32(0).f32(0.0)]
}

fn cases(kernel: &str) -> Vec<Case> {
    match kernel {
        "quantize_tiles" => quantize_tiles(),
        "quantize_bf16" => quantize_bf16(),
        "transpose_u8" => transpose_u8(),
        "norm_held_block" => norm_held_block(),
        "softmax_block" => softmax_block(),
        "reduce_columns_finish" => reduce_columns_finish(),
        "amax" => amax(),
        _ => update_scales(),
    }
}

/// The outputs of the kernel as it is: right where they are known, the same in every order, and all written.
fn sound(kernel: &str) -> Vec<Outputs> {
    let module = Module::parse(&split(kernel).concat()).unwrap();
    let run = |case: &Case| {
        let outputs = SEEDS.map(|seed| {
            assert!(
                case.right(&module, kernel, seed).unwrap_or_else(|report| panic!("{report}")),
                "{kernel}"
            );
            case.run(&module, kernel, seed).unwrap()
        });
        assert!(outputs[0].iter().all(Option::is_some), "{kernel}: not everything is written");
        assert!(outputs.iter().all(|other| *other == outputs[0]), "{kernel}: the order changes results");
        outputs[0].clone()
    };
    cases(kernel).iter().map(run).collect()
}

#[test]
fn edits_of_shipped_kernels_are_found() {
    let mut known: Vec<(&str, Vec<Outputs>)> = Vec::new();
    for bug in &BUGS {
        let (name, kernel) = (bug.name, bug.kernel);
        if !known.iter().any(|(other, _)| *other == kernel) {
            known.push((kernel, sound(kernel)));
        }
        let right = known.iter().find(|(other, _)| *other == kernel).map(|(_, outputs)| outputs).unwrap();
        let module = Module::parse(&mutated(bug)).unwrap_or_else(|error| panic!("{kernel}, {name}: {error}"));
        for seed in SEEDS {
            let results = cases(kernel).into_iter().map(|case| case.run(&module, kernel, seed));
            match &bug.found {
                Found::By(kinds) => {
                    let reports: Vec<_> = results.filter_map(Result::err).collect();
                    assert!(!reports.is_empty(), "{kernel}, {name}, seed {seed}: no report");
                    for report in reports {
                        assert!(kinds.contains(&report.kind), "{name}, seed {seed}: {report}");
                    }
                }
                Found::Result => {
                    let results: Result<Vec<Outputs>, _> = results.collect();
                    let results = results.unwrap_or_else(|report| panic!("{name}, seed {seed}: {report}"));
                    assert!(results != *right, "{kernel}, {name}, seed {seed}: every result is right");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "the kernel has changed, and this edit must follow")]
fn an_edit_that_fits_nowhere_fails() {
    let [.., last] = BUGS;
    mutated(&Bug { holds: &["no such instruction"], ..last });
}
