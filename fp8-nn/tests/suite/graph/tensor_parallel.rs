//! Recorded steps of ranks that share layers: the bits of eager steps, near one device's, and no host takes part in a replay.

use super::ranks::ranks;
use super::{Group, rate, read};
use crate::every_device::support::*;
use fp8_nn::fp8_dist::{Mesh, MeshOptions};
use fp8_nn::prelude::*;
use fp8_nn::{TensorParallel, TensorParallelOptions};

/// A model that the ranks share, in training.
struct Shared {
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
    mesh: Mesh,
    ids: Tensor,
    targets: Tensor,
}

/// Small, since a GPU is simulated. No block of 32 features is split by two ranks.
fn options(tensor_parallel: Option<TensorParallel>, recompute: RecomputeLevel) -> GptOptions {
    let attention = AttentionOptions {
        num_attention_heads: 2,
        max_seq_length: 8,
        attention_dropout: 0.1,
        ..Default::default()
    };
    let layer = TransformerLayerOptions {
        hidden_size: 64,
        ffn_hidden_size: 64,
        attention,
        hidden_dropout: 0.1,
        recompute,
        tensor_parallel,
        ..Default::default()
    };
    GptOptions { vocab_size: 20, num_layers: 1, layer, ..Default::default() }
}

impl Shared {
    fn new(group: &Group, recipe: &Recipe, sequence_parallel: bool, recompute: RecomputeLevel) -> Self {
        let mesh = Mesh::new(group.clone(), &MeshOptions { dp: 1, tp: group.world_size() }).unwrap();
        let sharing = TensorParallelOptions { sequence_parallel, ..Default::default() };
        let ranks = TensorParallel::new(mesh.tp().clone(), &sharing).unwrap();
        let model = Gpt::new("gpt", &options(ranks, recompute), &device(), &mut rng(3)).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(mesh.amax_group());
        let (ids, targets) = (ids([2, 8], 20, 0), ids([2, 8], 20, 100));
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        Self { model, optimizer, scaling, recipe: recipe.clone(), mesh, ids, targets }
    }

    fn load(&mut self, step: u64) {
        let values = |seed| ids([2, 8], 20, seed).to_vec::<i32>().unwrap();
        self.ids.write(&values(step), "ids").unwrap();
        self.targets.write(&values(100 + step), "targets").unwrap();
    }

    fn queue(&mut self, lr: f32) -> Result<[Tensor; 2]> {
        let (loss, saved) =
            self.scaling.in_autocast(&self.recipe, |cx| self.model.loss(cx, &self.ids, &self.targets))?;
        self.scaling.in_backward(|cx| self.model.loss_backward(cx, saved))?;
        all_reduce_gradients(&mut self.model, &**self.mesh.dp())?;
        let norm = clip_grad_norm(&mut self.model, 1.0)?;
        self.optimizer.step_with_norm(&mut self.model, lr, &norm)?;
        zero_grad(&mut self.model)?;
        Ok([loss, norm])
    }

    fn eager(&mut self, step: u64) -> [u32; 2] {
        self.load(step);
        read(&self.queue(rate(step)).unwrap())
    }
}

#[test]
fn replays_of_ranks_that_share_layers_have_the_bits_of_eager_steps() {
    let recipes: [Recipe; 6] = [
        delayed(),
        CurrentScaling::default().into(),
        CurrentScaling::rowwise().into(),
        Mxfp8::default().into(),
        Recipe::off(),
        Nvfp4::default().into(),
    ];
    let simulated = vec![
        (&recipes[0], false, RecomputeLevel::None),
        (&recipes[0], true, RecomputeLevel::Block),
        (&recipes[3], true, RecomputeLevel::Norm),
        (&recipes[5], true, RecomputeLevel::None),
    ];
    let others = [&recipes[1], &recipes[2], &recipes[4]].map(|recipe| (recipe, true, RecomputeLevel::None));
    let all = simulated.iter().copied().chain(others).collect();
    for (recipe, sequence_parallel, recompute) in unless_simulated(all, simulated) {
        let what = format!("{recipe}, {sequence_parallel}, {recompute}");
        let finals = ranks(|group| {
            let new = || Shared::new(&group, recipe, sequence_parallel, recompute);
            let (mut eager, mut recorded) = (new(), new());
            for step in 0..2 {
                assert_eq!(eager.eager(step), recorded.eager(step), "{what}");
            }
            recorded.load(2);
            let (graph, results) = device().capture(|| recorded.queue(rate(2))).unwrap();
            assert_eq!(eager.eager(2), read(&results), "{what}: the recorded step itself");
            for step in 3..5 {
                recorded.load(step);
                recorded.optimizer.set_lr(rate(step)).unwrap();
                let before = recorded.mesh.tp().traffic().exchanges;
                graph.replay().unwrap();
                let after = recorded.mesh.tp().traffic().exchanges;
                assert_eq!(after, before, "{what}: the hosts exchange nothing");
                assert_eq!(eager.eager(step), read(&results), "{what}, step {step}");
            }
            let all = |shared: &Shared| everything(&shared.model, &shared.scaling);
            assert!(all(&eager) == all(&recorded), "{what}: parameters, histories and scales");
            drop(graph); // which waits for the device, as the ranks share one here
            group.barrier().unwrap();
            (recorded.eager(5), recorded.scaling.state().unwrap())
        });
        assert!(finals.iter().all(|end| *end == finals[0]), "{what}: ranks differ");
    }
}
