//! `cp.async`: when its bytes arrive, for whom, and what the checks see of early and late touches.

mod machine;

use machine::{Arg, module, params, run_seeded, run_words, words};
use ptx_interp::{Kind, Launch, Memory, Module};

/// Each thread copies its 16 bytes to its place and reads a neighbour's first word, `between` in between.
fn exchange(copy: &str, between: &str, other: u32) -> String {
    format!(
        "shl.b32 %r2, %r1, 4; mov.u32 %r3, dyn; add.s32 %r4, %r3, %r2; mul.wide.u32 %rd6, %r1, 16; add.s64 %rd6, %rd6, %rd1;\n\
         {copy}\n{between}\nxor.b32 %r5, %r2, {}; add.s32 %r5, %r5, %r3; ld.shared.u32 %r6, [%r5]; st.global.u32 [%rd5], %r6;",
        16 * other
    )
}

const COPY: &str = "cp.async.cg.shared.global [%r4], [%rd6], 16;";
const COMMIT: &str = "cp.async.commit_group;";
const WAIT: &str = "cp.async.wait_group 0;";
const SEEDS: [u64; 3] = [0, 1, 2];

fn input(threads: u32) -> Vec<u32> {
    (0..4 * threads).map(|i| 1000 + i).collect()
}

fn run(text: &str, threads: u32, seed: u64) -> Result<Vec<u32>, Kind> {
    let result = run_seeded(text, &input(threads), threads, threads as usize, seed);
    result.map_err(|report| report.kind)
}

#[test]
fn own_bytes_are_there_after_waiting_and_others_behind_a_barrier() {
    for seed in SEEDS {
        let own: Vec<u32> = (0..64).map(|i| 1000 + 4 * i).collect();
        let next: Vec<u32> = (0..64).map(|i| 1000 + 4 * (i ^ 1)).collect();
        let far: Vec<u32> = (0..64).map(|i| 1000 + 4 * (i ^ 32)).collect();
        let waited = format!("{COMMIT} {WAIT}");
        assert_eq!(run(&exchange(COPY, &waited, 0), 64, seed), Ok(own.clone()));
        assert_eq!(run(&exchange(COPY, "cp.async.wait_all;", 0), 64, seed), Ok(own));
        assert_eq!(run(&exchange(COPY, &format!("{waited} bar.sync 0;"), 32), 64, seed), Ok(far));
        assert_eq!(run(&exchange(COPY, &format!("{waited} bar.warp.sync -1;"), 1), 64, seed), Ok(next));
        for other in [1, 32] {
            // A warp that is ahead finds bytes that nobody has written.
            let found = run(&exchange(COPY, &waited, other), 64, seed);
            assert!(matches!(found, Err(Kind::Race | Kind::Uninitialised)), "no barrier: {found:?}");
        }
    }
}

#[test]
fn early_touches_race_with_the_copy() {
    for seed in SEEDS {
        // Nobody has waited; no group was made of it; another group was waited for.
        for between in ["", COMMIT, WAIT, "cp.async.commit_group; cp.async.wait_group 1;", "bar.sync 0;"] {
            assert_eq!(run(&exchange(COPY, between, 0), 64, seed), Err(Kind::Race), "{between}");
        }
        // A barrier in front of the wait orders nothing.
        let before = format!("{COMMIT} bar.sync 0; {WAIT}");
        assert_eq!(run(&exchange(COPY, &before, 32), 64, seed), Err(Kind::Race));
        // Writes of the same thread, before its copy has arrived.
        let store = format!("{COMMIT} st.shared.u32 [%r4], 7; {WAIT}");
        assert_eq!(run(&exchange(COPY, &store, 0), 64, seed), Err(Kind::Race));
        // A copy into what others read in the same phase.
        let reused = format!("{COMMIT} {WAIT} bar.sync 0; ld.shared.u32 %r9, [dyn]; {COPY} {COMMIT} {WAIT}");
        assert_eq!(run(&exchange(COPY, &reused, 0), 64, seed), Err(Kind::Race));
    }
    let report = run_words(&exchange(COPY, COMMIT, 0), &input(1), 1, 1).unwrap_err();
    assert!(report.detail.contains("the copy has not been waited for"), "{report}");
}

#[test]
fn groups_arrive_in_their_order() {
    let second = "add.s32 %r7, %r4, 2048; cp.async.cg.shared.global [%r7], [%rd6], 16;";
    let two = |most: u32, read: &str| {
        let text = exchange(COPY, &format!("{COMMIT} {second} {COMMIT} cp.async.wait_group {most};"), 0);
        run(&text.replace("ld.shared.u32 %r6, [%r5]", read), 32, 0)
    };
    let (first, last) = ("ld.shared.u32 %r6, [%r4]", "ld.shared.u32 %r6, [%r7]");
    assert!(two(1, first).is_ok() && two(0, first).is_ok() && two(0, last).is_ok());
    assert_eq!((two(2, first), two(1, last)), (Err(Kind::Race), Err(Kind::Race)));
    // An empty group counts.
    let empty = exchange(COPY, &format!("{COMMIT} {COMMIT} cp.async.wait_group 1;"), 0);
    assert!(run(&empty, 32, 0).is_ok());
}

#[test]
fn sizes() {
    let copied = |text: &str| run(&exchange(text, "cp.async.wait_all;", 0), 8, 0);
    let own: Vec<u32> = (0..8).map(|i| 1000 + 4 * i).collect();
    for bytes in [4, 8, 16] {
        assert_eq!(copied(&format!("cp.async.ca.shared.global [%r4], [%rd6], {bytes};")), Ok(own.clone()));
        assert_eq!(
            copied(&format!("cp.async.ca.shared::cta.global.L2::128B [%r4], [%rd6], {bytes}, {bytes};")),
            Ok(own.clone())
        );
        // Zeros, from an address that nothing stands behind.
        let none = format!(
            "mov.u32 %r9, 0; mov.u64 %rd8, 16; cp.async.ca.shared.global [%r4], [%rd8], {bytes}, %r9;"
        );
        assert_eq!(copied(&none), Ok(vec![0; 8]));
    }
    // The low half of the first word, zeros behind.
    let part = copied("mov.u32 %r9, 2; cp.async.cg.shared.global [%r4], [%rd6], 16, %r9;").unwrap();
    assert_eq!(part, own.iter().map(|word| word & 0xffff).collect::<Vec<u32>>());
    assert_eq!(
        copied("mov.u32 %r9, 17; cp.async.cg.shared.global [%r4], [%rd6], 16, %r9;"),
        Err(Kind::OutOfBounds)
    );
    assert_eq!(copied("cp.async.cg.shared.global [%r4], [%rd6], 16, %r30;"), Err(Kind::Uninitialised));
}

#[test]
fn both_ends_are_checked() {
    let copied = |text: &str| run(&exchange(text, "cp.async.wait_all;", 0), 8, 0);
    assert_eq!(copied("cp.async.cg.shared.global [%r4+8], [%rd6], 16;"), Err(Kind::Misaligned));
    assert_eq!(copied("cp.async.cg.shared.global [%r4], [%rd6+8], 16;"), Err(Kind::Misaligned));
    assert_eq!(copied("cp.async.cg.shared.global [%r4+4096], [%rd6], 16;"), Err(Kind::OutOfBounds));
    assert_eq!(copied("cp.async.cg.shared.global [%r4], [%rd6+16], 16;"), Err(Kind::OutOfBounds));
    assert_eq!(copied("cp.async.cg.shared.global [%r30], [%rd6], 16;"), Err(Kind::Uninitialised));
    // Global memory that nobody wrote, and that another thread is writing.
    let text = exchange("cp.async.ca.shared.global [%r4], [%rd5], 4;", "cp.async.wait_all;", 0);
    let written = text.replace("cp.async.ca", "st.global.u32 [%rd2], %r1;\ncp.async.ca");
    assert_eq!(run(&written, 8, 0), Err(Kind::Race));
}

#[test]
fn a_new_block_starts_without_copies() {
    // The first block leaves copies behind; the second one's wait brings none of them.
    let skip =
        format!("mov.u32 %r10, %ctaid.x; setp.eq.u32 %p1, %r10, 0; @!%p1 bra second;\n{COPY}\nret;\nsecond:");
    let text = module(&exchange(&skip, &format!("st.shared.u32 [%r4], 7; {COMMIT} {WAIT}"), 0));
    let module = Module::parse(&text).unwrap();
    let kernel = module.kernel("k").unwrap();
    let memory = Memory::new();
    let (x, y) = (memory.allocate(128, "x"), memory.allocate(32, "y"));
    memory.fill(x, &[1], 128).unwrap();
    let params = params(kernel, &[Arg::U64(x), Arg::U64(y)]);
    let launch = Launch {
        grid: [2, 1, 1],
        block: [8, 1, 1],
        dynamic_shared: 4096,
        params: &params,
        ..Launch::default()
    };
    ptx_interp::run(kernel, &launch, &memory).unwrap();
    let mut out = [0; 32];
    memory.read(y, &mut out).unwrap();
    assert_eq!(words(&out), [7; 8]);
}

#[test]
fn other_forms_do_not_load() {
    for text in [
        "cp.async.cg.shared.global [%r4], [%rd6], 8;",
        "cp.async.ca.shared.global [%r4], [%rd6], 12;",
        "cp.async.cg.global.shared [%rd6], [%r4], 16;",
        "cp.async.wait_group %r1;",
        "cp.async.bulk.shared.global [%r4], [%rd6], 16;",
        "cp.sync;",
    ] {
        assert!(Module::parse(&module(text)).is_err(), "{text}");
    }
}
