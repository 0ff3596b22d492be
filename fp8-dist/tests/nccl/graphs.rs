//! Collectives inside captured graphs: every replay is one, and no host says a word.

use crate::rig::{Rig, SEEDS, ranks, tensor};
use fp8_dist::{ReduceOp, Result};
use fp8_kernels::{Arena, ArenaOptions, DType};

#[test]
fn every_replay_reduces() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        rig.control.set("reset_calls", "").unwrap();
        let results = ranks(2, |group, device| {
            let rank = group.rank();
            let arena =
                Arena::new(3, ArenaOptions { history_len: 2, ..ArenaOptions::default() }, device).unwrap();
            let mut x = tensor(&[1.0; 4], &[4], DType::F32, device);
            // Once outside: calls are compared, and NCCL has what it needs.
            group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap();
            group.all_reduce_max("forward", &arena).unwrap();
            let step = || -> Result<()> {
                group.all_reduce_in_place("x", &mut x, ReduceOp::Sum)?;
                group.all_reduce_max("forward", &arena).unwrap();
                Ok(())
            };
            let (graph, ()) = device.capture(step).unwrap(); // runs it once
            let mut rows = Vec::new();
            for round in 0..3 {
                arena.merge_staged(&[[1.0, -1.0, 0.5], [0.25, -1.0, 8.0 * round as f32]][rank]).unwrap();
                graph.replay().unwrap();
                rows.push(arena.staged().unwrap());
            }
            drop(graph);
            (x.to_vec::<f32>().unwrap(), rows)
        });
        let rows = vec![vec![1.0, -1.0, 0.5], vec![1.0, -1.0, 8.0], vec![1.0, -1.0, 16.0]];
        assert_eq!(results, vec![(vec![32.0; 4], rows); 2], "seed {seed}");
        assert_eq!(rig.calls("ncclAllReduce"), 8); // four each: two outside, two captured
    }
    rig.finish();
}
