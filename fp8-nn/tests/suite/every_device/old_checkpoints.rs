//! Checkpoints of earlier versions load.
//!
//! The files in `tests/golden/checkpoints` were written when every GEMM had five slots: LayerNormMlp `mlp` of sizes 4 and 6,
//! AdamW, histories of 4 rows. `five_slots` is one process after three steps with the default rules and one with Transformer
//! Engine's; `five_slots_of_two_ranks` is rank 0 of two, in the group `dp`, after three steps.

use super::support::{device, noise, rng};
use fp8_nn::fp8_dist::local;
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;
use safetensors::SafeTensors;
use std::path::Path;
use std::thread;
use std::time::Duration;

const ONE: &[u8] = include_bytes!("../../golden/checkpoints/five_slots.safetensors");
const TWO_RANKS: &[u8] = include_bytes!("../../golden/checkpoints/five_slots_of_two_ranks.safetensors");

struct Job {
    model: LayerNormMlp,
    optimizer: AdamW,
    scaling: Scaling,
}

impl Job {
    fn new() -> Self {
        let options = LayerNormMlpOptions { hidden_size: 4, ffn_hidden_size: 6, ..Default::default() };
        let model = LayerNormMlp::new("mlp", options, &device(), &mut rng(9)).unwrap();
        let scaling = Scaling::new(&model, &device()).unwrap();
        Self { model, optimizer: AdamW::new(AdamWOptions::default()).unwrap(), scaling }
    }

    fn load(&mut self, file: &[u8]) -> fp8_nn::fp8_recipe::StateReport {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(checkpoint::path(dir.path()), file).unwrap();
        let Self { model, optimizer, scaling } = self;
        checkpoint::load(dir.path(), model, optimizer, scaling).unwrap().scaling
    }

    fn save(&self, dir: &Path) -> Vec<u8> {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &Default::default()).unwrap();
        std::fs::read(checkpoint::path(dir)).unwrap()
    }

    fn step(&mut self, recipe: &Recipe, seed: u64) -> Result<Vec<f32>> {
        let Self { model, scaling, .. } = self;
        let mut cx = scaling.autocast(recipe)?;
        let (y, saved) = model.forward(&mut cx, &noise([5, 4], seed))?;
        cx.commit()?;
        scaling.in_backward(|cx| model.backward(cx, saved, &noise([5, 4], 100 + seed)))?;
        Ok(y.to_f32_vec()?)
    }
}

fn short() -> DelayedScaling {
    DelayedScaling { amax_history_len: 4, ..Default::default() }
}

/// Scale and history of a slot of the file's `n`-th arena, which is found by its place among the file's slots.
fn slot_of(file: &[u8], n: usize, slot: &str) -> (f32, Vec<f32>) {
    let (_, header) = SafeTensors::read_metadata(file).unwrap();
    let arenas: serde_json::Value =
        serde_json::from_str(&header.metadata().as_ref().unwrap()["fp8.scaling"]).unwrap();
    let names = arenas[n]["slots"].as_array().unwrap();
    let position = names.iter().position(|name| name == slot).unwrap();
    let tensors = SafeTensors::deserialize(file).unwrap();
    let floats = |part: &str| -> Vec<f32> {
        let tensor = tensors.tensor(&format!("scaling.{n}.{part}")).unwrap();
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let column = floats("amax_history").into_iter().skip(position).step_by(names.len());
    (floats("scale")[position], column.collect())
}

/// Every slot of `state` has the scale and history that the file has for it.
fn assert_loaded(file: &[u8], state: &ScalingState) {
    for (n, arena) in state.arenas.iter().enumerate() {
        let expected = match arena.direction.name() {
            "forward" => vec!["mlp.fc1.input", "mlp.fc1.weight", "mlp.fc2.input", "mlp.fc2.weight"],
            _ => vec!["mlp.fc1.grad_output", "mlp.fc2.grad_output"],
        };
        assert!(arena.slots.iter().map(|name| &**name).eq(expected), "{:?}", arena.slots);
        for (position, name) in arena.slots.iter().enumerate() {
            let history = arena.amax_history.iter().map(|row| row[position]).collect();
            assert_eq!((arena.scale[position], history), slot_of(file, n, name), "{name}");
        }
    }
}

#[test]
fn a_checkpoint_with_five_slots_a_gemm_loads() {
    assert_eq!(slot_of(ONE, 0, "mlp.fc1.output"), (-1.0, vec![0.0; 3])); // they are in the file
    assert_eq!(slot_of(ONE, 3, "mlp.fc2.grad_input"), (1.0, vec![0.0; 3]));
    let recipes = [short(), short().with_te_rules()].map(Recipe::from);
    for is_prepared in [false, true] {
        let mut job = Job::new();
        for recipe in recipes.iter().filter(|_| is_prepared) {
            job.scaling.prepare(recipe, &AutocastOptions::default()).unwrap();
        }
        let report = job.load(ONE);
        assert_eq!(report.taken_over.len(), if is_prepared { 12 } else { 0 }, "{report}");
        assert!(report.new.is_empty() && report.recomputed.is_empty(), "{report}");
        let state = job.scaling.state().unwrap();
        assert_eq!(state.arenas.len(), 4);
        assert_loaded(ONE, &state);
        // The next save has no trace of them, and training goes on alike from it.
        let dir = tempfile::tempdir().unwrap();
        let saved = job.save(dir.path());
        assert!(!String::from_utf8_lossy(&saved).contains(".grad_input"));
        let mut resumed = Job::new();
        resumed.load(&saved);
        for (step, recipe) in [0, 1, 0].into_iter().map(|which| &recipes[which]).enumerate() {
            assert_eq!(job.step(recipe, step as u64).unwrap(), resumed.step(recipe, step as u64).unwrap());
        }
        assert_eq!(job.scaling.state().unwrap(), resumed.scaling.state().unwrap());
    }
}

#[test]
fn a_checkpoint_of_two_ranks_with_five_slots_a_gemm_loads_on_both() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let states: Vec<_> = thread::scope(|scope| {
        let rank = |group: std::sync::Arc<dyn ProcessGroup>| {
            let mut job = Job::new();
            let seed = 50 * group.rank() as u64;
            job.scaling.set_group(group.clone());
            // One rank has the file, or both; either way the first commits compare their states.
            if group.rank() == 0 {
                assert_eq!(job.load(TWO_RANKS).unused.len(), 2);
            }
            let Job { model, optimizer, scaling } = &mut job;
            broadcast_state(model, optimizer, scaling, &*group, 0).unwrap();
            assert_loaded(TWO_RANKS, &job.scaling.state().unwrap());
            job.load(TWO_RANKS);
            assert_loaded(TWO_RANKS, &job.scaling.state().unwrap());
            job.step(&short().into(), seed).unwrap();
            job.scaling.state().unwrap()
        };
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(states[0].arenas[0].updates, 4);
    assert_eq!(states[0], states[1]);
}
