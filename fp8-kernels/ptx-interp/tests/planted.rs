//! Bugs planted in small CUDA kernels: which check finds each, under which orders, and that the sound kernels pass.
//!
//! `planted/*.cu`, each behind `planted/prelude.cuh`, compiled by NVRTC 13.0 with `-arch=compute_90 -std=c++17 -fmad=false
//! -lineinfo`: `NAME.ptx` as it is, `NAME.bug.ptx` with `BUG_…` defined. Some bugs no check can see: they compute
//! something else, which only the right data shows, so a needle (one extreme value) goes through every lane.

mod machine;

use machine::case::{Case, floats};
use ptx_interp::{Kind, Module};

const SEEDS: [u64; 6] = [0, 1, 2, 3, 77, 1 << 40];

enum Found {
    /// By a check: the first of these where blocks and warps run in order, one of them in any other order.
    By(&'static [Kind]),
    /// By a wrong result alone.
    Result,
}

struct Bug {
    name: &'static str,
    kernel: &'static str,
    ptx: &'static str,
    found: Found,
}

macro_rules! bug {
    ($kernel:literal, $name:literal, $found:expr) => {
        Bug {
            name: $name,
            kernel: $kernel,
            ptx: include_str!(concat!("planted/", $kernel, ".", $name, ".ptx")),
            found: $found,
        }
    };
}

/// With a barrier of the warp alone, a warp reads what others have not written yet, or are just writing.
const EARLY: Found = Found::By(&[Kind::Uninitialised, Kind::Race]);
const RACE: Found = Found::By(&[Kind::Race]);
const BOUNDS: Found = Found::By(&[Kind::OutOfBounds]);
const SHUFFLE: Found = Found::By(&[Kind::DivergentShuffle]);

const BUGS: [Bug; 25] = [
    bug!("tiles", "no_tile_barrier", EARLY),
    bug!("tiles", "no_barrier_in_block_max", EARLY),
    bug!("rows", "no_barrier_before_scratch_reuse", RACE),
    bug!("tiles", "no_barrier_before_tile_reuse", RACE),
    bug!("tiles", "plain_amax", RACE),
    bug!("scales", "one_slot_too_many", RACE),
    bug!("sums", "dbias_row_too_many", RACE),
    bug!("tiles", "tile_row_short", RACE),
    bug!("flat", "tail_too_long", BOUNDS),
    bug!("flat", "vector_too_many", BOUNDS),
    bug!("tiles", "pitch_66", Found::By(&[Kind::Misaligned])),
    bug!("rows", "early_return", SHUFFLE),
    bug!("rows", "shuffle_in_divergent_code", SHUFFLE),
    bug!("tiles", "wrong_smem_index", Found::Result),
    bug!("tiles", "amax_after_scaling", Found::Result),
    bug!("tiles", "short_shuffle_tree", Found::Result),
    bug!("scales", "wrong_roll", Found::Result),
    bug!("tiles", "unsigned_atomic_max", Found::Result),
    bug!("product", "no_wait", RACE),
    bug!("product", "no_barrier_after_wait", Found::By(&[Kind::Race, Kind::Uninitialised])),
    bug!("product", "divergent_product", SHUFFLE),
    bug!("product", "wrong_fragment", Found::Result),
    bug!("product", "wrong_result_row", Found::Result),
    bug!("ranks", "vote_for_barrier", RACE),
    bug!("ranks", "votes_of_the_next_round", RACE),
];

const KERNELS: [(&str, &str); 7] = [
    ("tiles", include_str!("planted/tiles.ptx")),
    ("rows", include_str!("planted/rows.ptx")),
    ("scales", include_str!("planted/scales.ptx")),
    ("sums", include_str!("planted/sums.ptx")),
    ("flat", include_str!("planted/flat.ptx")),
    ("product", include_str!("planted/product.ptx")),
    ("ranks", include_str!("planted/ranks.ptx")),
];

/// Small integers, and a needle.
fn values(count: usize, needle: usize) -> Vec<f32> {
    (0..count).map(|i| if i == needle { -300.0 } else { (i * 37 % 101) as f32 - 50.0 }).collect()
}

/// A needle in each lane of a row of tiles' columns, in rows of every warp.
fn tiles() -> Vec<Case> {
    let (rows, cols, run, scale) = (256, 64, 2, 1.5f32);
    let case = |needle: usize| {
        let x = values(rows * cols, (needle * 5 % rows) * cols + needle);
        let code = |v: &f32| (v * scale).clamp(-127.0, 127.0).round_ties_even() as i32 as u8;
        let codes: Vec<u8> = x.iter().map(code).collect();
        let turned = (0..cols * rows).map(|i| codes[i % rows * cols + i / rows]).collect();
        let largest: Vec<f32> = (0..rows / 64 * cols)
            .map(|i| (0..64).map(|r| x[(i / cols * 64 + r) * cols + i % cols].abs()).fold(0.0, f32::max))
            .collect();
        let amax = largest.iter().copied().fold(0.0, f32::max);
        Case::new([2, 2, 1], 256)
            .shared(32 * 68 + 8 * 32 * 4 + 8 * 4)
            .input(floats(&x))
            .u32(rows)
            .u32(cols)
            .u32(run)
            .f32(scale)
            .buffer(None, codes)
            .buffer(None, turned)
            .buffer(None, floats(&largest))
            .buffer(Some(floats(&[-1.0])), floats(&[amax]))
    };
    (0..cols).map(case).collect()
}

fn rows() -> Vec<Case> {
    let (rows, cols) = (3, 100);
    let case = |needle: usize| {
        let x = values(rows * cols, needle);
        let y = |row: &[f32]| {
            // Threads without a column count as 0.
            let (m, s) = (row.iter().copied().fold(0.0, f32::max), row.iter().sum::<f32>());
            row.iter().map(|v| (v - m) + s).collect::<Vec<f32>>()
        };
        let y: Vec<f32> = x.chunks(cols).flat_map(y).collect();
        Case::new([rows as u32, 1, 1], 128).input(floats(&x)).buffer(None, floats(&y)).u32(cols)
    };
    [0, 31, 99, 101, 299].map(case).into()
}

fn scales() -> Vec<Case> {
    let (slots, length) = (40, 3);
    let case = |newest: usize| {
        // Of each slot another row is the largest; cells first, then history.
        let amax = |row: usize, slot: usize| {
            if (row + slot) % 4 == newest { 100.0 + slot as f32 } else { slot as f32 }
        };
        let row = |row: usize| (0..slots).map(move |slot| amax(row, slot)).collect::<Vec<f32>>();
        let top = |slot: usize| (0..length).map(|r| amax(r, slot)).fold(0.0, f32::max);
        let (before, after) = (vec![1.0; slots], (0..slots).map(top).collect::<Vec<f32>>());
        let scale = |f: fn(f32) -> f32| {
            after.iter().map(|&top| if top > 0.0 { f(top) } else { 1.0 }).collect::<Vec<f32>>()
        };
        // Behind the arena lies what belongs to somebody else.
        let rest = vec![7.0; 8];
        let old = [row(0), before.clone(), before, row(1), row(2), row(3), rest.clone()].concat();
        let new = [
            vec![-1.0; slots],
            scale(|top| 448.0 / top),
            scale(|top| top / 448.0),
            row(0),
            row(1),
            row(2),
            rest,
        ];
        let arena = floats(&new.concat());
        Case::new([1; 3], 64).buffer(Some(floats(&old)), arena).u32(slots).u32(length)
    };
    (0..4).map(case).collect()
}

fn sums() -> Vec<Case> {
    let (rows, cols) = (70, 40);
    let x = values(rows * cols, 17);
    let sum =
        |i: usize| (i / cols * 16..rows.min(i / cols * 16 + 16)).map(|row| x[row * cols + i % cols]).sum();
    let mut partial: Vec<f32> = (0..5 * cols).map(sum).collect();
    partial.extend(vec![7.0; cols]);
    let before = vec![7.0; partial.len()];
    let case = Case::new([3, 1, 1], 64).input(floats(&x));
    vec![case.buffer(Some(floats(&before)), floats(&partial)).u32(rows).u32(cols)]
}

fn flat() -> Vec<Case> {
    let case = |n: usize| {
        let x = values(n, n / 2);
        let y: Vec<f32> = x.iter().map(|v| 2.0 * v).collect();
        Case::new([2, 1, 1], 64).input(floats(&x)).buffer(None, floats(&y)).u32(n)
    };
    [512, 514, 3].map(case).into()
}

/// A needle in each row and column of a tile of the left matrix. All numbers are exact in bf16, all sums in f32.
fn product() -> Vec<Case> {
    let (rows, columns, k) = (32, 16, 64);
    let bf16s = |values: &[f32]| {
        values.iter().flat_map(|v| (v.to_bits() >> 16).to_le_bytes()[..2].to_vec()).collect()
    };
    let b = values(columns * k, 100);
    let case = |needle: usize| {
        let a = values(rows * k, needle % rows * k + needle * 7 % k);
        let sum = |i: usize| (0..k).map(|j| a[i / columns * k + j] * b[i % columns * k + j]).sum();
        let c: Vec<f32> = (0..rows * columns).map(sum).collect();
        Case::new([1; 3], 64).input(bf16s(&a)).input(bf16s(&b)).u32(k).buffer(None, floats(&c))
    };
    (0..rows).map(case).collect()
}

/// Keys of two warps; one of them is rare, in each lane in turn.
fn ranks() -> Vec<Case> {
    let words = |values: &[u32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let case = |rare: usize| {
        let keys: Vec<u32> = (0..128).map(|i| if i % 64 == rare { 9 } else { (i * i % 7) as u32 }).collect();
        let place = |i: usize| {
            let warp = i / 64 * 64..i / 64 * 64 + 64;
            warp.filter(|&j| keys[j] < keys[i] || (keys[j] == keys[i] && j < i)).count() as u32
        };
        let places: Vec<u32> = (0..128).map(place).collect();
        Case::new([1; 3], 64).input(words(&keys)).buffer(None, words(&places))
    };
    (0..64).map(case).collect()
}

fn cases(kernel: &str) -> Vec<Case> {
    match kernel {
        "tiles" => tiles(),
        "rows" => rows(),
        "scales" => scales(),
        "sums" => sums(),
        "product" => product(),
        "ranks" => ranks(),
        _ => flat(),
    }
}

#[test]
fn sound_kernels_pass() {
    for (name, ptx) in KERNELS {
        let module = Module::parse(ptx).unwrap();
        for (i, case) in cases(name).iter().enumerate() {
            for seed in SEEDS.into_iter().take(if i == 0 { SEEDS.len() } else { 2 }) {
                let right = case.right(&module, name, seed).unwrap_or_else(|report| panic!("{report}"));
                assert!(right, "{name}: case {i}, seed {seed}");
            }
        }
    }
}

#[test]
fn checks_find_planted_bugs() {
    for Bug { name, kernel, ptx, found } in &BUGS {
        let Found::By(kinds) = found else { continue };
        let module = Module::parse(ptx).unwrap();
        for seed in SEEDS {
            // Every launch fails, whatever its data.
            for case in cases(kernel).iter().step_by(16) {
                let report = match case.right(&module, kernel, seed) {
                    Err(report) => report,
                    Ok(right) => panic!("{kernel}, {name}, seed {seed}: no report (result right: {right})"),
                };
                let expected = if seed == 0 { &kinds[..1] } else { kinds };
                assert!(expected.contains(&report.kind), "{name}, seed {seed}: {report}");
                assert!(report.line.is_some(), "{name}: {report} names no line of the source");
            }
        }
    }
}

#[test]
fn needles_find_the_other_bugs() {
    for Bug { name, kernel, ptx, found } in &BUGS {
        let Found::Result = found else { continue };
        let module = Module::parse(ptx).unwrap();
        for seed in [0, 5] {
            let wrong =
                |case: &Case| !case.right(&module, kernel, seed).unwrap_or_else(|r| panic!("{name}: {r}"));
            let found = cases(kernel).iter().filter(|case| wrong(case)).count();
            assert!(found > 0, "{kernel}, {name}, seed {seed}: every result is right");
        }
    }
}

#[test]
fn one_needle_is_not_enough() {
    let module = |name| Module::parse(BUGS.iter().find(|bug| bug.name == name).unwrap().ptx).unwrap();
    let short = module("short_shuffle_tree");
    let found = tiles().iter().map(|case| !case.right(&short, "tiles", 0).unwrap()).collect::<Vec<bool>>();
    assert!(found.contains(&true) && found.contains(&false), "{found:?}");
}
