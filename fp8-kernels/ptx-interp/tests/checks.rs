//! Each check on the smallest kernel that fails it, beside one that passes.

mod machine;

use machine::{Arg, fault, kind, launch, module, params, run_seeded, run_words};
use ptx_interp::{Kind, Launch, Memory, MemoryError, Module};

const SHARED: &str = ".shared .align 4 .b8 tile[256];\n.shared .align 4 .b8 other[256];\nmul.lo.s32 %r2, %r1, 4; mov.u32 %r3, tile; add.s32 %r4, %r3, %r2;\n";

#[test]
fn accesses_outside_allocations_are_named() {
    let report = fault("st.global.u32 [%rd5+4], %r1;", 32);
    assert_eq!(report.kind, Kind::OutOfBounds);
    assert_eq!((report.thread, report.allocation.as_deref()), ([31, 0, 0], Some("y")));
    assert!(report.detail.contains("0 bytes past the end of 'y' (128 bytes)"), "{report}");
    let report = fault("ld.global.u32 %r2, [%rd4+-4];", 32);
    assert!(report.detail.contains("4 bytes before 'x'") || report.detail.contains("before 'x'"), "{report}");
    let report = fault("mov.u64 %rd6, 0; ld.global.u32 %r2, [%rd6];", 1);
    assert_eq!((report.kind, report.address), (Kind::OutOfBounds, Some(0)));
}

#[test]
fn vectors_are_aligned_as_a_whole() {
    let report = fault("ld.global.v2.u32 {%r2, %r3}, [%rd1+4];", 8);
    assert_eq!(report.kind, Kind::Misaligned);
    assert!(report.detail.contains("no multiple of 8"), "{report}");
    assert_eq!(kind("ld.global.u16 %rs1, [%rd1+1];", 8), Kind::Misaligned);
    assert_eq!(kind("st.shared.v4.u32 [dyn+8], {%r1, %r1, %r1, %r1};", 1), Kind::Misaligned);
}

#[test]
fn freed_memory_is_recognised() {
    let text = module("ld.global.u32 %r2, [%rd4];");
    let module = Module::parse(&text).unwrap();
    let kernel = module.kernel("k").unwrap();
    let memory = Memory::new();
    let (x, y) = (memory.allocate(64, "gone"), memory.allocate(64, "y"));
    memory.free(x).unwrap();
    let report = launch(kernel, &memory, (1, 1), &[Arg::U64(x), Arg::U64(y)], 0).unwrap_err();
    assert_eq!((report.kind, report.allocation.as_deref()), (Kind::UseAfterFree, Some("gone")));
    assert!(memory.free(x).is_err() && memory.free(y + 4).is_err());
    assert!(matches!(memory.read(x, &mut [0]), Err(MemoryError::OutOfBounds { .. })));
}

#[test]
fn unwritten_values_matter_when_they_decide_something() {
    let read = |use_it: &str| {
        let text = module(&format!("add.s64 %rd6, %rd2, 64; ld.global.u32 %r2, [%rd6];\n{use_it}"));
        let module = Module::parse(&text).unwrap();
        let kernel = module.kernel("k").unwrap();
        let memory = Memory::new();
        let (x, y) = (memory.allocate(128, "x"), memory.allocate(128, "y"));
        launch(kernel, &memory, (1, 1), &[Arg::U64(x), Arg::U64(y)], 0)
    };
    assert!(read("add.s32 %r3, %r2, 1;").is_ok(), "reading alone is harmless");
    assert!(read("selp.b32 %r3, %r1, %r2, %p1; setp.eq.s32 %p2, %r1, 0; selp.b32 %r4, %r1, %r2, %p2; st.global.u32 [%rd1], %r4;").is_ok());
    let report = read("add.s32 %r3, %r2, 1; st.global.u32 [%rd1], %r3;").unwrap_err();
    assert_eq!(report.kind, Kind::Uninitialised);
    assert!(report.detail.contains("loaded from unwritten memory"), "{report}");
    assert_eq!(read("setp.eq.s32 %p1, %r2, 0; @%p1 bra done; done:").unwrap_err().kind, Kind::Uninitialised);
    assert_eq!(
        read("cvt.u64.u32 %rd7, %r2; ld.global.u32 %r3, [%rd7];").unwrap_err().kind,
        Kind::Uninitialised
    );
    assert_eq!(read("red.global.add.u32 [%rd6], 1;").unwrap_err().kind, Kind::Uninitialised);
    let report = read("st.global.f32 [%rd1], %f9;").unwrap_err();
    assert!(report.detail.contains("a register that was never written"), "{report}");
    // Through shared memory the mark travels with the value.
    assert_eq!(
        kind(&format!("{SHARED} ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd5], %r5;"), 8),
        Kind::Uninitialised
    );
    let carried = format!(
        "{SHARED} ld.shared.u32 %r5, [%r4]; st.shared.u32 [other], %r5; ld.shared.u32 %r6, [other]; st.global.u32 [%rd5], %r6;"
    );
    assert_eq!(kind(&carried, 1), Kind::Uninitialised);
    // A written false decides a conjunction alone.
    assert!(
        read(
            "setp.eq.s32 %p1, %r2, 0; setp.ne.s32 %p2, %r1, 0; and.pred %p3, %p1, %p2; @%p3 bra done; done:"
        )
        .is_ok()
    );
}

#[test]
fn shared_arrays_have_ends() {
    let report = fault(&format!("{SHARED} st.shared.u32 [%r4+4], %r1;"), 64);
    assert_eq!((report.kind, report.allocation.as_deref()), (Kind::OutOfBounds, Some("tile")));
    assert!(report.detail.contains("0 bytes past the end of shared array 'tile' (256 bytes)"), "{report}");
    assert_eq!(kind(&format!("{SHARED} st.shared.u32 [tile+256], %r1;"), 1), Kind::OutOfBounds);
    assert_eq!(kind("st.shared.u32 [dyn+4096], %r1;", 1), Kind::OutOfBounds);
    assert!(run_words("st.shared.u32 [dyn+4092], %r1;", &[0], 1, 1).is_ok());
    // Also through a pointer that a loop moves, and one made generic.
    let walk = format!(
        "{SHARED} mov.u32 %r7, 0;\nloop: st.shared.u32 [%r4], %r1; add.s32 %r4, %r4, 4; add.s32 %r7, %r7, 1; setp.lt.s32 %p1, %r7, 65; @%p1 bra loop;"
    );
    assert_eq!(kind(&walk, 1), Kind::OutOfBounds);
    let generic = "cvta.shared.u64 %rd7, %rd6; st.u32 [%rd7+256], %r1;";
    assert_eq!(kind(&format!("{SHARED} mov.u64 %rd6, tile; {generic}"), 1), Kind::OutOfBounds);
}

#[test]
fn shared_memory_races() {
    let exchange = |between: &str| {
        format!(
            "{SHARED} st.shared.u32 [%r4], %r1; {between} xor.b32 %r5, %r2, 4; add.s32 %r5, %r5, %r3; ld.shared.u32 %r6, [%r5]; st.global.u32 [%rd5], %r6;"
        )
    };
    for seed in [0, 1, 2] {
        let run = |between: &str| run_seeded(&exchange(between), &[0; 64], 64, 64, seed);
        assert_eq!(run("").unwrap_err().kind, Kind::Race);
        let want: Vec<u32> = (0..64).map(|i| i ^ 1).collect();
        assert_eq!(run("bar.sync 0;").unwrap(), want);
        assert_eq!(run("bar.warp.sync -1;").unwrap(), want, "within a warp");
        assert_eq!(run("membar.cta;").unwrap_err().kind, Kind::Race, "a fence orders no threads");
    }
    // Across warps a warp's synchronisation does not help.
    let far = exchange("bar.warp.sync -1;").replace("xor.b32 %r5, %r2, 4;", "xor.b32 %r5, %r2, 128;");
    let report = fault(&far, 64);
    assert!(matches!(report.kind, Kind::Race | Kind::Uninitialised), "{report}");
    // Write after read, and two writers.
    assert_eq!(kind("st.shared.u32 [dyn], %r1;", 2), Kind::Race);
    let reused = format!(
        "{SHARED} st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r6, [tile]; setp.eq.s32 %p1, %r1, 0; @%p1 st.shared.u32 [tile], 7;"
    );
    assert_eq!(kind(&reused, 64), Kind::Race);
    let apart = reused.replace("setp.eq", "bar.sync 0; setp.eq");
    assert!(run_words(&apart, &[0; 64], 64, 64).is_ok());
}

/// The accesses are checked as ever.
#[test]
fn races_are_ignored_if_a_launch_does_not_look_for_them() {
    for (body, with, without) in [
        ("st.shared.u32 [dyn], %r1; st.global.u32 [%rd1], %r1;", Some(Kind::Race), None),
        ("red.global.add.u32 [%rd1], 3; ld.global.u32 %r3, [%rd1];", Some(Kind::Race), None),
        (
            "ld.shared.u32 %r3, [dyn]; st.global.u32 [%rd1], %r3;",
            Some(Kind::Uninitialised),
            Some(Kind::Uninitialised),
        ),
    ] {
        let module = Module::parse(&module(body)).unwrap();
        let kernel = module.kernel("k").unwrap();
        let found = [true, false].map(|races| {
            let memory = Memory::new();
            let [x, y] = ["x", "y"].map(|name| memory.allocate(256, name));
            memory.fill(x, &[0], 256).unwrap();
            let params = params(kernel, &[Arg::U64(x), Arg::U64(y)]);
            let launch =
                Launch { block: [2, 1, 1], dynamic_shared: 64, params: &params, races, ..Launch::default() };
            ptx_interp::run(kernel, &launch, &memory).err().map(|report| report.kind)
        });
        assert_eq!(found, [with, without], "{body}");
    }
}

#[test]
fn shared_memory_is_each_blocks_own() {
    let text = module(&format!(
        "{SHARED} st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r6, [%r4]; mov.u32 %r7, %ctaid.x; mad.lo.s32 %r7, %r7, 64, %r1; mul.wide.u32 %rd6, %r7, 4; add.s64 %rd6, %rd6, %rd2; st.global.u32 [%rd6], %r6;"
    ));
    let module = Module::parse(&text).unwrap();
    let memory = Memory::new();
    let (x, y) = (memory.allocate(4, "x"), memory.allocate(4 * 64 * 4, "y"));
    for seed in [0, 5, 6] {
        let args = [Arg::U64(x), Arg::U64(y)];
        launch(module.kernel("k").unwrap(), &memory, (4, 64), &args, seed).unwrap();
    }
}

#[test]
fn global_memory_races() {
    let text = |body: &str| {
        module(&format!(
            "mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd6, %r2, 4; add.s64 %rd6, %rd6, %rd1;\n{body}"
        ))
    };
    let run = |body: &str, grid: u32, seed: u64| {
        let module = Module::parse(&text(body)).unwrap();
        let kernel = module.kernel("k").unwrap();
        let memory = Memory::new();
        let (x, y) = (memory.allocate(256, "x"), memory.allocate(256, "y"));
        memory.fill(x, &[0], 256).unwrap();
        memory.fill(y, &[0], 256).unwrap();
        let result = launch(kernel, &memory, (grid, 1), &[Arg::U64(x), Arg::U64(y)], seed);
        // Launches are ordered: the same accesses once more are no race with the first.
        if result.is_ok() {
            launch(kernel, &memory, (grid, 1), &[Arg::U64(x), Arg::U64(y)], seed).unwrap();
        }
        result.map(|_| ()).map_err(|report| report.kind)
    };
    for seed in [0, 5, 6] {
        assert_eq!(run("st.global.u32 [%rd6], %r2;", 8, seed), Ok(()));
        assert_eq!(run("st.global.u32 [%rd1], 3;", 8, seed), Err(Kind::Race), "two blocks write");
        assert_eq!(
            run("ld.global.u32 %r3, [%rd1]; st.global.u32 [%rd6], %r3;", 8, seed),
            Err(Kind::Race),
            "one reads what another writes"
        );
        assert_eq!(run("red.global.add.u32 [%rd1], 3;", 8, seed), Ok(()));
        assert_eq!(run("red.global.add.u32 [%rd1], 3; ld.global.u32 %r3, [%rd1];", 8, seed), Err(Kind::Race));
        assert_eq!(
            run("red.global.add.u32 [%rd1], 3; ld.relaxed.gpu.global.u32 %r3, [%rd1];", 8, seed),
            Ok(())
        );
        assert_eq!(
            run("ld.global.nc.u32 %r3, [%rd6]; st.global.u32 [%rd6], %r3;", 8, seed),
            Err(Kind::NonCoherentRead)
        );
        assert_eq!(
            run("st.global.u32 [%rd6], 1; ld.global.nc.u32 %r3, [%rd6];", 8, seed),
            Err(Kind::NonCoherentRead)
        );
        assert_eq!(
            run("cvt.u64.u32 %rd7, %r2; add.s64 %rd7, %rd1, %rd7; st.global.u8 [%rd7], %r2;", 8, seed),
            Ok(()),
            "neighbouring bytes"
        );
        assert_eq!(
            run(
                "cvt.u64.u32 %rd7, %r2; add.s64 %rd7, %rd1, %rd7; st.global.u8 [%rd7], %r2; ld.global.u32 %r3, [%rd1];",
                8,
                seed
            ),
            Err(Kind::Race)
        );
    }
}

#[test]
fn barriers_need_everybody() {
    let half = "setp.lt.u32 %p1, %r1, 16; @%p1 bra skip; bar.sync 0; skip:";
    assert_eq!(kind(half, 32), Kind::DivergentBarrier);
    let sides = "setp.lt.u32 %p1, %r1, 16; @%p1 bra other; bar.sync 0; bra done; other: bar.sync 0; done:";
    assert_eq!(kind(sides, 32), Kind::DivergentBarrier);
    let warps = sides.replace("16", "32");
    assert_eq!(kind(&warps, 64), Kind::DivergentBarrier);
    assert_eq!(kind("shr.u32 %r2, %r1, 5; bar.sync %r2;", 64), Kind::Deadlock);
    assert_eq!(kind("bar.sync 0, 32;", 64), Kind::Unsupported);
    let count = "setp.lt.u32 %p1, %r1, 40; bar.red.popc.u32 %r2, 0, %p1; st.global.u32 [%rd5], %r2;";
    assert_eq!(run_words(count, &[0; 64], 64, 64).unwrap(), [40; 64]);
    let any = "setp.eq.u32 %p1, %r1, 40; bar.red.or.pred %p2, 0, %p1; selp.u32 %r2, 1, 0, %p2; st.global.u32 [%rd5], %r2;";
    assert_eq!(run_words(any, &[0; 64], 64, 64).unwrap(), [1; 64]);
}

#[test]
fn shuffles_need_the_lanes_of_their_mask() {
    let left = "setp.ge.u32 %p1, %r1, 20; @%p1 bra done; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; done:";
    let report = fault(left, 32);
    assert_eq!(report.kind, Kind::DivergentShuffle);
    assert!(
        report.detail.contains("lane 20 is in the mask 0xffffffff and not here: it has left"),
        "{report}"
    );
    let waits =
        "setp.ge.u32 %p1, %r1, 20; @%p1 bra wait; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; wait: bar.sync 0;";
    assert!(fault(waits, 32).detail.contains("waits at the barrier"));
    let outside =
        "setp.ge.u32 %p1, %r1, 16; @%p1 bra done; shfl.sync.down.b32 %r2, %r1, 1, 31, 0xffff; done:";
    assert!(fault(outside, 32).detail.contains("lane 15 reads lane 16, which is not in the mask"));
    assert_eq!(kind("shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffff;", 32), Kind::DivergentShuffle);
    assert_eq!(kind("vote.sync.ballot.b32 %r2, %p1, -1;", 16), Kind::DivergentShuffle, "half a warp exists");
    // Both sides of a branch with masks of their own.
    let sides = "setp.lt.u32 %p1, %r1, 16; @%p1 bra low; shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffff0000; bra done;\n\
                 low: shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffff; done: st.global.u32 [%rd5], %r2;";
    let want: Vec<u32> = (0..32).map(|i| i ^ 1).collect();
    assert_eq!(run_words(sides, &[0; 32], 32, 32).unwrap(), want);
}

#[test]
fn only_shuffles_and_barriers_of_a_warp_order_its_memory() {
    let across = |operation: &str| {
        format!(
            "xor.b32 %r2, %r1, 1; mul.wide.u32 %rd6, %r2, 4; add.s64 %rd7, %rd2, %rd6; setp.gt.u32 %p1, %r1, 20;\n\
             st.global.u32 [%rd5], %r1; {operation} ld.global.u32 %r3, [%rd7]; bar.warp.sync -1; st.global.u32 [%rd5], %r3;"
        )
    };
    let crossed: Vec<u32> = (0..32).map(|i| i ^ 1).collect();
    for order in ["bar.warp.sync -1;", "shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1;"] {
        assert_eq!(run_words(&across(order), &[0; 32], 32, 32).unwrap(), crossed, "{order}");
    }
    for none in [
        "",
        "vote.sync.ballot.b32 %r4, %p1, -1;",
        "vote.sync.any.pred %p2, %p1, -1;",
        "redux.sync.add.u32 %r4, %r1, -1;",
        "match.any.sync.b32 %r4, %r1, -1;",
        "match.all.sync.b32 %r4, %r1, -1;",
    ] {
        assert_eq!(kind(&across(none), 32), Kind::Race, "{none}");
    }
}

#[test]
fn warp_operations_compute() {
    let run =
        |code: &str| run_words(&format!("{code} st.global.u32 [%rd5], %r2;"), &[0; 32], 32, 32).unwrap();
    let want = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    assert_eq!(run("shfl.sync.up.b32 %r2, %r1, 3, 0, -1;"), want(|i| if i < 3 { i } else { i - 3 }));
    assert_eq!(run("shfl.sync.down.b32 %r2|%p1, %r1, 3, 31, -1;"), want(|i| if i > 28 { i } else { i + 3 }));
    assert_eq!(
        run("shfl.sync.down.b32 %r2, %r1, 3, 0x181f, -1;"),
        want(|i| if i % 8 > 4 { i } else { i + 3 }),
        "width 8"
    );
    assert_eq!(run("shfl.sync.idx.b32 %r2, %r1, 9, 31, -1;"), want(|_| 9));
    assert_eq!(run("shfl.sync.idx.b32 %r2, %r1, 1, 0x101f, -1;"), want(|i| i / 16 * 16 + 1), "width 16");
    assert_eq!(run("setp.gt.u32 %p1, %r1, 20; vote.sync.ballot.b32 %r2, %p1, -1;"), want(|_| 0xffe0_0000));
    assert_eq!(
        run("setp.gt.u32 %p1, %r1, 20; vote.sync.any.pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2;"),
        want(|_| 1)
    );
    assert_eq!(
        run("setp.gt.u32 %p1, %r1, 20; vote.sync.all.pred %p2, !%p1, -1; selp.u32 %r2, 1, 0, %p2;"),
        want(|_| 0)
    );
    assert_eq!(run("redux.sync.add.u32 %r2, %r1, -1;"), want(|_| 496));
    assert_eq!(run("sub.s32 %r3, 5, %r1; redux.sync.min.s32 %r2, %r3, -1;"), want(|_| -26i32 as u32));
    assert_eq!(
        run("and.b32 %r3, %r1, 1; match.any.sync.b32 %r2, %r3, -1;"),
        want(|i| 0x5555_5555 << (i & 1))
    );
    assert_eq!(run("activemask.b32 %r2;"), want(|_| !0));
    assert_eq!(
        run("mov.u32 %r2, 7; setp.gt.u32 %p1, %r1, 20; @%p1 activemask.b32 %r2;"),
        want(|i| if i > 20 { 0xffe0_0000 } else { 7 }),
        "a lane that is predicated off does not count"
    );
    assert_eq!(run("mov.u32 %r2, %lanemask_lt;"), want(|i| (1 << i) - 1));
}

#[test]
fn atomics_return_the_old_value_in_some_order() {
    for seed in 0..4 {
        let out = run_seeded(
            "atom.global.add.u32 %r2, [%rd1], 1; st.global.u32 [%rd5], %r2;",
            &[100; 64],
            64,
            64,
            seed,
        )
        .unwrap();
        let mut sorted = out.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (100..164).collect::<Vec<u32>>());
        assert_eq!(out.is_sorted(), seed == 0, "other seeds have other orders");
    }
    let one = |code: &str, old: u32| {
        run_words(
            &format!("{code} bar.warp.sync 1; ld.global.u32 %r3, [%rd1]; st.global.u32 [%rd2], %r3;"),
            &[old],
            1,
            1,
        )
        .unwrap()[0]
    };
    assert_eq!(one("atom.global.max.s32 %r2, [%rd1], 5;", 0xbf80_0000), 5);
    assert_eq!(one("red.global.max.u32 [%rd1], 5;", 0xbf80_0000), 0xbf80_0000);
    assert_eq!(one("atom.global.cas.b32 %r2, [%rd1], 7, 9;", 7), 9);
    assert_eq!(one("atom.global.exch.b32 %r2, [%rd1], 9;", 7), 9);
    assert_eq!(one("atom.global.inc.u32 %r2, [%rd1], 7;", 7), 0);
    assert_eq!(
        one("mov.f32 %f2, 0f3F800000; red.global.add.f32 [%rd1], %f2;", 2.5f32.to_bits()),
        3.5f32.to_bits()
    );
    assert_eq!(one("atom.relaxed.gpu.global.and.b32 %r2, [%rd1], 12;", 10), 8);
}

#[test]
fn endless_loops_and_traps_stop() {
    let text = module("loop: bra loop;");
    let module = Module::parse(&text).unwrap();
    let params = [0; 16];
    let launch = Launch { step_limit: 1000, params: &params, ..Launch::default() };
    let report = ptx_interp::run(module.kernel("k").unwrap(), &launch, &Memory::new()).unwrap_err();
    assert_eq!(report.kind, Kind::StepLimit);
    assert_eq!(kind("trap;", 1), Kind::Trap);
}

#[test]
fn jump_tables_jump() {
    let body = "and.b32 %r2, %r1, 3; mov.u32 %r3, 0;\ntable: .branchtargets one, two, three, done;\nbrx.idx %r2, table;\n\
                one: mov.u32 %r3, 10; bra done; two: mov.u32 %r3, 20; bra done; three: mov.u32 %r3, 30; done: st.global.u32 [%rd5], %r3;";
    assert_eq!(run_words(body, &[0; 8], 8, 8).unwrap(), [10, 20, 30, 0, 10, 20, 30, 0]);
}

#[test]
fn launches_have_a_shape() {
    let text = module("");
    let module = Module::parse(&text).unwrap();
    let kernel = module.kernel("k").unwrap();
    let params = [0; 16];
    let run =
        |launch: Launch<'_>| ptx_interp::run(kernel, &launch, &Memory::new()).map_err(|report| report.kind);
    let good = Launch { params: &params, ..Launch::default() };
    assert!(run(good).is_ok());
    assert_eq!(run(Launch { grid: [0, 1, 1], ..good }), Err(Kind::LaunchShape));
    assert_eq!(run(Launch { grid: [1, 65536, 1], ..good }), Err(Kind::LaunchShape));
    assert_eq!(run(Launch { block: [1025, 1, 1], ..good }), Err(Kind::LaunchShape));
    assert_eq!(run(Launch { params: &[0; 15], ..good }), Err(Kind::LaunchShape));
    assert_eq!(run(Launch { dynamic_shared: 228 << 10, ..good }), Err(Kind::SharedSize));
    assert!(run(Launch { dynamic_shared: 227 << 10, ..good }).is_ok());
}

#[test]
fn local_memory_is_each_threads_own() {
    let body = ".local .align 8 .b8 depot[16]; mov.u64 %rd6, depot; st.local.u32 [%rd6+4], %r1; cvta.local.u64 %rd7, %rd6; ld.u32 %r2, [%rd7+4]; st.global.u32 [%rd5], %r2;";
    assert_eq!(run_words(body, &[0; 40], 40, 40).unwrap(), (0..40).collect::<Vec<u32>>());
    assert_eq!(kind(&body.replace("depot[16]", "depot[4]"), 1), Kind::LocalMemory);
}

#[test]
fn the_host_reads_only_what_was_written() {
    let memory = Memory::new();
    let (x, y) = (memory.allocate(16, "x"), memory.allocate(16, "y"));
    assert_eq!((x % 256, y % 256), (0, 0));
    assert!(y >= x + 16 + 256);
    memory.write(x + 4, &[1; 4]).unwrap();
    memory.copy(y, x, 16).unwrap();
    assert_eq!(memory.read(y + 4, &mut [0; 4]), Ok(()));
    let error = memory.read(y, &mut [0; 8]).unwrap_err().to_string();
    assert!(error.contains("byte 0 of 'y' was never written"), "{error}");
    let error = memory.write(x + 10, &[0; 8]).unwrap_err().to_string();
    assert!(error.contains("byte 10 of 'x' (16 bytes)"), "{error}");
    assert!(memory.fill(x, &[1, 2, 3], 1).is_err());
    memory.fill(x, &[1, 2, 3, 4], 4).unwrap();
    memory.read(x, &mut [0; 16]).unwrap();
    assert_eq!((memory.live().len(), memory.live_bytes()), (2, 32));
}

#[test]
fn memory_and_modules_cross_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Memory>();
    shared::<Module>();
}
