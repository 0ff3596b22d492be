//! Refusals of layers over ranks, with the text of each error, on every rank.

use super::rig::*;
use crate::every_device::support::{delayed, device, error, ids, noise, off, rng};
use fp8_nn::prelude::*;
use fp8_nn::{LoraOptions, ParallelMode, TensorParallel, TensorParallelOptions};

fn layer(rank: &Rank) -> TransformerLayerOptions {
    TransformerLayerOptions {
        hidden_size: 32,
        ffn_hidden_size: 48,
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: Some(2),
            max_seq_length: 8,
            ..Default::default()
        },
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    }
}

fn gpt(rank: &Rank) -> Gpt {
    let options = GptOptions { vocab_size: 10, num_layers: 1, layer: layer(rank), ..Default::default() };
    Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap()
}

/// The one error that all ranks get.
fn refused<T>(layout: Layout, f: impl Fn(&Rank) -> Result<T> + Sync) -> String {
    let all = ranks(layout, |rank| error(f(rank)));
    assert!(all.iter().all(|text| *text == all[0]), "{all:?}");
    all[0].clone()
}

fn new_block(layout: Layout, change: impl Fn(&mut TransformerLayerOptions) + Sync) -> String {
    refused(layout, |rank| {
        let mut options = layer(rank);
        change(&mut options);
        TransformerLayer::new("block", options, &device(), &mut rng(1))
    })
}

#[test]
fn sizes_that_ranks_cannot_share() {
    assert_eq!(
        new_block(TP4, |_| ()),
        "block.attention: num_gqa_groups = 2: 4 ranks of tensor parallelism cannot share it evenly: expected a multiple of 4, or 1, 2 \
         ranks"
    );
    assert_eq!(
        new_block(TP4, |layer| layer.attention.num_attention_heads = 2),
        "block.attention: num_attention_heads = 2: 4 ranks of tensor parallelism cannot share it evenly: expected a multiple of 4, or \
         1, 2 ranks"
    );
    assert_eq!(
        new_block(TP2, |layer| layer.ffn_hidden_size = 45),
        "block.mlp: ffn_hidden_size = 45: 2 ranks of tensor parallelism cannot share it evenly: expected a multiple of 2, or 1, 3, 5, \
         9, 15, 45 ranks"
    );
    let linear = |rank: &Rank, parallel_mode, output_parts: Vec<usize>| {
        let options = LinearOptions {
            in_features: 6,
            out_features: 9,
            parallel_mode,
            output_parts,
            tensor_parallel: rank.tensor_parallel.clone(),
            ..Default::default()
        };
        Linear::new("fc", options, &device(), &mut rng(1))
    };
    assert_eq!(
        refused(TP2, |rank| linear(rank, ParallelMode::Column, vec![])),
        "fc: out_features = 9: 2 ranks of tensor parallelism cannot share it evenly: expected a multiple of 2, or 1, 3, 9 ranks"
    );
    assert_eq!(
        refused(TP4, |rank| linear(rank, ParallelMode::Row, vec![])),
        "fc: in_features = 6: 4 ranks of tensor parallelism cannot share it evenly: expected a multiple of 4, or 1, 2, 3, 6 ranks"
    );
    assert_eq!(
        refused(TP2, |rank| linear(rank, ParallelMode::Column, vec![4, 4])),
        "fc: output_parts = [4, 4]: expected numbers of features that add up to out_features, 9"
    );
    assert_eq!(
        refused(TP2, |rank| linear(rank, ParallelMode::Row, vec![9])),
        "fc: output_parts = [9]: a row-parallel layer cuts features of its input: expected none"
    );
    let vocabulary = |rank: &Rank| {
        let mut layer = layer(rank);
        layer.attention.num_gqa_groups = Some(4);
        let options = GptOptions { vocab_size: 3, num_layers: 1, layer, ..Default::default() };
        Gpt::new("gpt", &options, &device(), &mut rng(1))
    };
    assert_eq!(
        refused(TP4, vocabulary),
        "gpt.embedding: num_embeddings = 3: 4 ranks of tensor parallelism share the rows: expected 4 at least"
    );
}

#[test]
fn tokens_that_ranks_cannot_share() {
    let run = |rank: &Rank, shape: [usize; 2]| {
        let model = gpt(rank);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let ids = ids(shape, 10, 1);
        scaling.in_autocast(&Recipe::off(), |cx| model.forward(cx, &ids))
    };
    assert_eq!(
        refused(TP2_SP, |rank| run(rank, [3, 5])),
        "gpt.embedding: tokens = 15 of 32 features: 2 ranks share the tokens of all sequences (sequence parallelism): expected a \
         multiple of 2, such as 16"
    );
    let narrow = |rank: &Rank| {
        let ranks = rank.tensor_parallel.as_ref().unwrap();
        ranks.scatter_tokens("x", &noise([6, 3], 1))
    };
    assert_eq!(
        refused(TP2_SP, narrow),
        "x: tokens = 6 of 3 features: a rank's 3 tokens have 9 elements: expected a multiple of 4, in which masks of dropout are drawn"
    );
}

#[test]
fn inputs_of_blocks_are_this_ranks_tokens() {
    let run = |rank: &Rank, x: Tensor, info: SequenceInfo| {
        let block = TransformerLayer::new("block", layer(rank), &device(), &mut rng(1)).unwrap();
        let mut scaling = Scaling::new(&block, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        scaling.in_autocast(&Recipe::off(), |cx| block.forward_with_info(cx, &x, &info))
    };
    assert_eq!(
        refused(TP2_SP, |rank| run(rank, noise([8, 32], 1), SequenceInfo::default())),
        "block: batch_and_length = None: ranks have parts of the tokens (sequence parallelism): set SequenceInfo::batch_and_length to \
         [batch, seq]"
    );
    let info = SequenceInfo { batch_and_length: Some([2, 8]), ..Default::default() };
    assert_eq!(
        refused(TP2_SP, |rank| run(rank, noise([2, 8, 32], 1), info.clone())),
        "block: input of shape [2, 8, 32]: expected [8, 32], this rank's tokens of [2, 8, 32]"
    );
}

#[test]
fn blocks_that_a_cut_would_split() {
    let text = |recipe: Recipe| {
        refused(TP2, |rank| {
            let model = gpt(rank);
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            scaling.set_group(rank.mesh.amax_group());
            scaling.in_autocast(&recipe, |cx| model.forward(cx, &ids([2, 8], 10, 1)))
        })
    };
    // Of k and v, whose rows are cut by themselves.
    assert_eq!(
        text(Nvfp4::default().into()),
        "gpt.blocks.0.attention.qkv: out_features = 8 on each of 2 ranks: the recipe has a scale for each 16 of them, and the cut would \
         split blocks: expected a multiple of 16 on each rank, 32 of all, or a recipe with one scale for a tensor"
    );
    assert_eq!(
        text(BlockScaling::default().into()),
        "gpt.blocks.0.attention.qkv: out_features = 16 on each of 2 ranks: the recipe has a scale for each 128 of them, and the cut \
         would split blocks: expected a multiple of 128 on each rank, 256 of all, or a recipe with one scale for a tensor"
    );
}

#[test]
fn groups_without_the_ranks_and_scales_of_their_own() {
    let run = |rank: &Rank, recipe: Recipe, sets_group: bool| {
        let model = gpt(rank);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        if sets_group {
            scaling.set_group(rank.mesh.dp().clone()); // without the ranks that share layers
        }
        scaling.in_autocast(&recipe, |cx| model.forward(cx, &ids([2, 8], 10, 1)))
    };
    let all = ranks(TP2, |rank| error(run(rank, delayed(), false)));
    assert_eq!(
        all[0],
        "slot `gpt.blocks.0.attention.qkv.input`: parts of its tensor are on ranks [0, 1] of the job, too, but the scope has no group: \
         reduce amaxes over a group of all ranks that share the model's layers, `scaling.set_group(mesh.amax_group())`"
    );
    let all = ranks(TP2, |rank| error(run(rank, delayed(), true)));
    assert_eq!(
        all[1],
        "slot `gpt.blocks.0.attention.qkv.input`: parts of its tensor are on ranks [0] of the job, too, but group `dp` does not have \
         them: reduce amaxes over a group of all ranks that share the model's layers, `scaling.set_group(mesh.amax_group())`"
    );
    let own: Recipe = DelayedScaling { reduce_amax: false, ..Default::default() }.into();
    assert_eq!(
        refused(TP2_SP, |rank| run(rank, own.clone(), false)),
        "slot `gpt.blocks.0.attention.qkv.input`: reduce_amax = false, but parts of its tensor are gathered as codes, which takes one \
         scale on all ranks: set reduce_amax to true, or sequence_parallel to false"
    );
    // Without gathers each rank may have scales of its own.
    ranks(TP2, |rank| run(rank, own.clone(), false).map(drop).unwrap());
}

#[test]
fn drop_path_with_sequence_parallelism() {
    assert_eq!(
        new_block(TP2_SP, |layer| layer.drop_path_rate = 0.1),
        "block: drop_path_rate = 0.1: it drops whole sequences, of which ranks have parts (sequence parallelism): expected 0, or \
         sequence_parallel = false"
    );
    ranks(TP2, |rank| {
        let options = TransformerLayerOptions { drop_path_rate: 0.1, ..layer(rank) };
        TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap();
    });
}

#[test]
fn generation_and_heads_of_ones_own() {
    assert_eq!(
        refused(TP2, |rank| gpt(rank).kv_cache(1, 8, DType::F32)),
        "gpt: tensor_parallel = 2 ranks: generation needs a whole model on each rank: load its checkpoint or folder without tensor \
         parallelism"
    );
    let own = |rank: &Rank| gpt(rank).with_head(|_| unreachable!());
    assert_eq!(
        refused(TP2, own),
        "gpt: with_head = a head of the user's own: ranks have parts of the logits (tensor parallelism), which only the model's own \
         heads compute"
    );
}

/// A step whose partial gradients nobody has summed.
fn step(rank: &Rank) -> Gpt {
    let mut model = gpt(rank);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_group(rank.mesh.amax_group());
    let mut cx = scaling.scope(&delayed(), &off()).unwrap();
    let (_, saved) = model.loss(&mut cx, &ids([2, 8], 10, 1), &ids([2, 8], 10, 2)).unwrap();
    cx.commit().unwrap();
    scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
    model
}

#[test]
fn parts_of_gradients_before_their_sum() {
    let text = "the gradient of `gpt.blocks.0.attention.norm.weight` is a part of the sum over group `world`: call \
                all_reduce_gradients or Gradients::finish over the data-parallel group, also if that has one rank, before the \
                gradient is used";
    let optimizer = || AdamW::new(AdamWOptions::default()).unwrap();
    assert_eq!(refused(TP2_SP, |rank| clip_grad_norm(&mut step(rank), 1.0)), text);
    assert_eq!(refused(TP2_SP, |rank| optimizer().step(&mut step(rank), 1e-3)), text);
    let norm = Tensor::scalar(1.0, &device()).unwrap();
    assert_eq!(refused(TP2_SP, |rank| optimizer().step_with_norm(&mut step(rank), 1e-3, &norm)), text);
    let gather = |rank: &Rank| {
        let model = step(rank);
        let norm =
            parameters(&model).into_iter().find(|p| p.name().ends_with("attention.norm.weight")).unwrap();
        norm.gather_main_grad()
    };
    assert_eq!(refused(TP2_SP, gather), text);
    let twice = |rank: &Rank| {
        let mut model = step(rank);
        all_reduce_gradients(&mut model, &**rank.mesh.dp())?;
        all_reduce_gradients(&mut model, &**rank.mesh.dp())
    };
    assert!(refused(TP2_SP, twice).contains("is already a sum over group `world`"));
}

#[test]
fn groups_of_ranks_with_other_parts() {
    let text = |call: &str| {
        format!(
            "{call}: group `world` has ranks with other parts of `gpt.embedding.weight`'s layer: pass the group of replicas, \
             `mesh.dp()`"
        )
    };
    let reduce = |rank: &Rank| all_reduce_gradients(&mut step(rank), &**rank.mesh.world());
    assert_eq!(refused(DP2_TP2_SP, reduce), text("all_reduce_gradients"));
    let broadcast = |rank: &Rank| broadcast_parameters(&mut gpt(rank), &**rank.mesh.world());
    assert_eq!(refused(TP2, broadcast), text("broadcast_parameters"));
    let watch = |rank: &Rank| Gradients::new(&gpt(rank), rank.mesh.world().clone(), Default::default());
    assert_eq!(refused(TP2, watch), text("Gradients::new"));
    let state = |rank: &Rank| {
        let mut model = gpt(rank);
        let (mut optimizer, mut scaling) =
            (AdamW::new(AdamWOptions::default())?, Scaling::new(&model, &device())?);
        assert_eq!(error(agree(&model, &optimizer, &scaling, &**rank.mesh.world())), text("agree"));
        broadcast_state(&mut model, &mut optimizer, &mut scaling, &**rank.mesh.world(), 0)
    };
    assert_eq!(refused(TP2, state), text("broadcast_state"));
}

#[test]
fn options_and_dropout_seeds_that_differ() {
    let options = |rank: &Rank| {
        let options =
            TensorParallelOptions { sequence_parallel: rank.mesh.tp().rank() == 1, ..Default::default() };
        TensorParallel::new(rank.mesh.tp().clone(), &options)
    };
    assert!(refused(TP2, options).contains("sequence_parallel: true"));
    let seeds = |rank: &Rank| {
        let options = GptOptions {
            vocab_size: 10,
            num_layers: 1,
            layer: layer(rank),
            embedding_dropout: 0.1,
            ..Default::default()
        };
        let model = Gpt::new("gpt", &options, &device(), &mut rng(1))?;
        let mut scaling = Scaling::new(&model, &device())?;
        scaling.set_group(rank.mesh.amax_group());
        scaling.set_dropout_seed(rank.mesh.tp().rank() as u64)?;
        scaling.in_autocast(&Recipe::off(), |cx| model.forward(cx, &ids([2, 8], 10, 1)))
    };
    let text = refused(TP2, seeds);
    assert!(text.contains("dropout seed 1") && text.contains("dropout seed 0"), "{text}");
}

/// Ranks that share a layer round its gradients with the numbers of one seed.
#[test]
fn seeds_of_stochastic_rounding_that_differ() {
    let step = |rank: &Rank, parallel_mode, recipe: &Recipe| {
        let tensor_parallel = rank.tensor_parallel.clone();
        let options = LinearOptions {
            in_features: 32,
            out_features: 32,
            parallel_mode,
            tensor_parallel,
            ..Default::default()
        };
        let mut fc = Linear::new("fc", options, &device(), &mut rng(1))?;
        let mut scaling = Scaling::new(&fc, &device())?;
        scaling.set_dropout_seed(rank.mesh.tp().rank() as u64)?;
        let x = noise([32, fc.weight().shape().last_dim()], 1);
        let (y, saved) = scaling.in_autocast(recipe, |cx| fc.forward(cx, &x))?;
        scaling.in_backward(|cx| fc.backward(cx, saved, &y))
    };
    let nearest = Nvfp4 { disable_stochastic_rounding: true, ..Default::default() };
    for mode in [ParallelMode::Column, ParallelMode::Row] {
        for layout in [TP2, TP2_SP] {
            let text = refused(layout, |rank| step(rank, mode, &Nvfp4::default().into()));
            assert!(text.contains("dropout seed 1") && text.contains("dropout seed 0"), "{text}");
            ranks(layout, |rank| step(rank, mode, &nearest.into()).map(drop).unwrap());
        }
    }
}

/// A rank that fails between collectives tells those that wait for it, also where it has other groups.
#[test]
fn ranks_that_wait_for_one_that_fails_are_told() {
    let start = std::time::Instant::now();
    let all = ranks(DP2_TP2_SP, |rank| {
        let mut model = gpt(rank);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let mut cx = scaling.autocast(&delayed()).unwrap();
        let (_, saved) = model.loss(&mut cx, &ids([2, 8], 10, 1), &ids([2, 8], 10, 2)).unwrap();
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        if rank.mesh.world().rank() == 3 {
            let other = TransformerLayer::new("other", layer(rank), &device(), &mut rng(1)).unwrap();
            *model.block_mut(0).unwrap() = other;
        }
        let failed = model.loss_backward(&mut cx, saved).and_then(|()| Ok(cx.commit()?));
        // The guard is dropped with the error, and the rank goes on for a while.
        std::thread::sleep(std::time::Duration::from_millis(200));
        error(failed)
    });
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    assert!(all[3].contains("other"), "{}", all[3]);
    assert!(all[2].contains("rank 1 gave up: in a backward scope"), "{}", all[2]);
    assert!(all.iter().all(|text| text.contains("gave up") || text.contains("other")), "{all:?}");
}

/// Nothing in the scope has needed the ranks yet.
#[test]
fn errors_before_the_first_collective_are_told() {
    let start = std::time::Instant::now();
    let all = ranks(DP2_TP2_SP, |rank| {
        let model = gpt(rank);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let targets = ids([2, if rank.mesh.world().rank() == 3 { 7 } else { 8 }], 10, 2);
        let failed = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &ids([2, 8], 10, 1), &targets));
        std::thread::sleep(std::time::Duration::from_millis(200));
        error(failed)
    });
    assert!(all[3].contains("targets"), "{}", all[3]);
    assert!(all[2].contains("rank 1 gave up: in a forward scope: gpt: targets"), "{}", all[2]);

    let all = ranks(DP2_TP2_SP, |rank| {
        let options = |in_features, out_features, parallel_mode| LinearOptions {
            in_features,
            out_features,
            parallel_mode,
            tensor_parallel: rank.tensor_parallel.clone(),
            ..Default::default()
        };
        let fc = |path: &str, options| Linear::new(path, options, &device(), &mut rng(1)).unwrap();
        let first = fc("first", options(16, 32, ParallelMode::Column));
        let second = fc("second", options(32, 16, ParallelMode::Row));
        let mut model = Stack(vec![Box::new(first), Box::new(second)]);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let run = |cx: &mut Forward<'_>| model.forward(cx, &noise([4, 16], 1));
        let (y, saved) = scaling.in_autocast(&delayed(), run).unwrap();
        let dy = if rank.mesh.world().rank() == 3 { noise([4, 15], 1) } else { y };
        let failed = scaling.in_backward(|cx| model.backward(cx, saved, &dy));
        std::thread::sleep(std::time::Duration::from_millis(200));
        error(failed)
    });
    assert!(all[3].contains("[4, 15]"), "{}", all[3]);
    assert!(all[2].contains("rank 1 gave up: in a backward scope: second"), "{}", all[2]);
    assert!(start.elapsed().as_secs() < 40, "{:?}", start.elapsed());
}

/// A parameter has a placement, or its gradient would be taken for the whole.
#[test]
fn blocks_of_ones_own_with_sequence_parallelism() {
    let with = |place: bool| {
        move |rank: &Rank| {
            gpt(rank).with_blocks(|_, inner| {
                let options = LinearOptions { in_features: 32, out_features: 32, ..Default::default() };
                let mut fc = Linear::new("own", options, &device(), &mut rng(1))?;
                if let Some(ranks) = rank.tensor_parallel.as_ref().filter(|_| place) {
                    ranks.place_by_tokens(&mut fc);
                }
                Ok(Box::new(Behind { inner, fc }))
            })
        }
    };
    assert_eq!(
        refused(TP2_SP, with(false)),
        "gpt: with_blocks = `own.weight` without a placement: with sequence parallelism, each rank has a part of its gradient: call \
         TensorParallel::place_by_tokens with the layer, or Parameter::placed"
    );
    assert!(ranks(TP2_SP, with(true)).into_iter().all(|model| model.is_ok()));
    assert!(ranks(TP2, with(false)).into_iter().all(|model| model.is_ok()));
}

#[test]
fn parts_of_another_shape() {
    let set = |rank: &Rank| {
        let mut model = gpt(rank);
        parameters_mut(&mut model)[0].set_part_of(&noise([5, 32], 1)) // of 10 rows
    };
    assert!(refused(TP2, set).contains("[5, 32]"), "{}", refused(TP2, set));
}

/// One rank would have an adapter without elements.
#[test]
fn adapters_of_rows_that_a_rank_has_none_of() {
    let add = |rank: &Rank| {
        let options = LinearOptions {
            in_features: 8,
            out_features: 16,
            tensor_parallel: rank.tensor_parallel.clone(),
            ..Default::default()
        };
        let mut fc = Linear::new("fc", options, &device(), &mut rng(1))?;
        fc.loras_mut().add("one", 2..6, &LoraOptions { rank: 2, ..Default::default() }, &mut rng(1))
    };
    assert_eq!(
        refused(TP2, add),
        "fc.lora.one: rows = 2..6: rank 1 of tensor parallelism has none of them: expected some rows of each rank"
    );
}

/// The rank that has the element names it, and the others hear of it.
#[test]
fn values_that_are_not_finite_on_one_rank() {
    let all = ranks(TP2, |rank| {
        let mut model = gpt(rank);
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        checkpoint::expect_finite(&model, &optimizer).unwrap();
        let table = parameters_mut(&mut model).remove(0);
        if rank.mesh.tp().rank() == 1 {
            table.set(Tensor::full(f32::NAN, *table.shape(), DType::F32, &device()).unwrap()).unwrap();
        }
        error(checkpoint::expect_finite(&model, &optimizer))
    });
    let own = "`gpt.embedding.weight` is NaN at element 0 of 160: training has diverged; go on from an earlier checkpoint, with a lower \
               rate";
    assert_eq!(all, [format!("expect_finite: rank 1 failed: {own}"), own.to_owned()]);
}

/// Replicas of ranks that share layers are compared, too: norms and biases that all have.
#[test]
fn parameters_that_all_ranks_have_and_that_differ() {
    let run = |rank: &Rank| {
        let mut model = step(rank);
        let name = "gpt.blocks.0.attention.norm.weight";
        let parameter = parameters_mut(&mut model).into_iter().find(|p| &**p.name() == name).unwrap();
        parameter.set(Tensor::full(1.0 + rank.mesh.tp().rank() as f32, [32], DType::F32, &device())?)?;
        all_reduce_gradients(&mut model, &**rank.mesh.dp())
    };
    let text = refused(TP2_SP, run);
    assert!(
        text.contains("the value of `gpt.blocks.0.attention.norm.weight` differs between rank 1 and rank 0"),
        "{text}"
    );
}
