//! Each sum over ranks, each gradient of which ranks have parts, and each place of a part, on its own: a test fails if its sum is left
//! out, doubled or averaged.

use super::rig::*;
use crate::every_device::support::{device, ids, noise, relative_rms, rng};
use fp8_nn::prelude::*;

/// Values of a tensor whose number is `seed`.
fn wave(shape: impl Into<Shape>, seed: u64) -> Tensor {
    noise(shape, seed)
}

fn fill(model: &mut dyn Layer) {
    set_all(model, |number, _, shape| wave(*shape, number as u64 + 10).to_f32_vec().unwrap());
}

/// A layer's output, the gradient of its input, and all whole gradients by name.
#[derive(Debug)]
struct Pass {
    y: Vec<f32>,
    dx: Vec<f32>,
    gradients: Vec<(String, Vec<f32>)>,
}

/// The part of a tensor that this rank has: its tokens, or its features.
#[derive(Clone, Copy)]
enum Has {
    Tokens,
    Features,
}

fn cut(rank: &Rank, has: Has, x: &Tensor) -> Tensor {
    match (&rank.tensor_parallel, has) {
        (Some(ranks), Has::Tokens) if ranks.options().sequence_parallel => {
            ranks.scatter_tokens("x", x).unwrap()
        }
        (Some(_), Has::Features) => {
            let tp = rank.mesh.tp();
            let share = x.shape().last_dim() / tp.world_size();
            ops::split(x, &vec![share; tp.world_size()]).unwrap().swap_remove(tp.rank())
        }
        _ => x.clone(),
    }
}

/// Runs a layer, made by `make`, whose input and output each rank has so.
fn pass<M: Module>(rank: &Rank, make: impl Fn(&Rank) -> M, widths: [usize; 2], has: [Has; 2]) -> Pass {
    let mut layer = make(rank);
    fill(&mut layer);
    let mut scaling = Scaling::new(&layer, &device()).unwrap();
    scaling.set_group(rank.mesh.amax_group());
    let [x, dy] = [0, 1].map(|i| cut(rank, has[i], &wave([8, widths[i]], i as u64)));
    let info = SequenceInfo { batch_and_length: Some([2, 4]), ..Default::default() };
    let (y, saved) =
        scaling.in_autocast(&Recipe::off(), |cx| layer.forward_with_info(cx, &x, &info)).unwrap();
    let dx = scaling.in_backward(|cx| layer.backward(cx, saved, &dy)).unwrap();
    all_reduce_gradients(&mut layer, &**rank.mesh.dp()).unwrap();
    let whole = |p: &&Parameter| (p.name().to_string(), p.gather_main_grad().unwrap().to_f32_vec().unwrap());
    let gradients = parameters(&layer).iter().map(whole).collect();
    Pass { y: y.to_f32_vec().unwrap(), dx: dx.to_f32_vec().unwrap(), gradients }
}

/// Compares what `of` takes from a pass with this rank's part of it on one device.
fn compare<M: Module>(
    make: impl Fn(&Rank) -> M + Sync,
    widths: [usize; 2],
    has: [Has; 2],
    of: impl Fn(&Pass) -> Vec<f32> + Sync,
    part: Option<(usize, Has)>,
) {
    let alone = ranks(ONE, |rank| pass(rank, &make, widths, has)).remove(0);
    for layout in [TP2, TP2_SP] {
        ranks(layout, |rank| {
            let found = of(&pass(rank, &make, widths, has));
            let expected = match part {
                None => of(&alone),
                Some((width, has)) => {
                    let whole = Tensor::from_vec(of(&alone), [8, width], &device()).unwrap();
                    cut(rank, has, &whole).to_f32_vec().unwrap()
                }
            };
            let error = relative_rms(&expected, &found);
            assert!(error < 1e-5, "{layout:?}: relative RMS error {error:.1e}");
        });
    }
}

fn linear(rank: &Rank, parallel_mode: ParallelMode) -> Linear {
    let options = LinearOptions {
        in_features: 8,
        out_features: 12,
        parallel_mode,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    Linear::new("fc", options, &device(), &mut rng(1)).unwrap()
}

fn row(rank: &Rank) -> Linear {
    linear(rank, ParallelMode::Row)
}

fn column(rank: &Rank) -> Linear {
    linear(rank, ParallelMode::Column)
}

const OF_ROW: [Has; 2] = [Has::Features, Has::Tokens];
const OF_COLUMN: [Has; 2] = [Has::Tokens, Has::Features];

fn gradient(pass: &Pass, name: &str) -> Vec<f32> {
    pass.gradients.iter().find(|(of, _)| of == name).unwrap().1.clone()
}

#[test]
fn the_output_of_a_row_layer_is_summed_once_and_has_its_bias_once() {
    compare(row, [8, 12], OF_ROW, |pass| pass.y.clone(), Some((12, Has::Tokens)));
}

#[test]
fn the_gradient_of_a_column_layers_input_is_summed_once() {
    compare(column, [8, 12], OF_COLUMN, |pass| pass.dx.clone(), Some((8, Has::Tokens)));
}

#[test]
fn the_gradient_of_a_row_layers_input_reads_the_tokens_of_all_ranks() {
    compare(row, [8, 12], OF_ROW, |pass| pass.dx.clone(), Some((8, Has::Features)));
}

#[test]
fn the_output_of_a_column_layer_reads_the_tokens_of_all_ranks() {
    compare(column, [8, 12], OF_COLUMN, |pass| pass.y.clone(), Some((12, Has::Features)));
}

#[test]
fn weight_gradients_read_the_tokens_of_all_ranks() {
    compare(column, [8, 12], OF_COLUMN, |pass| gradient(pass, "fc.weight"), None);
    compare(row, [8, 12], OF_ROW, |pass| gradient(pass, "fc.weight"), None);
}

#[test]
fn the_gradient_of_a_row_layers_bias_is_the_sum_over_all_tokens_once() {
    compare(row, [8, 12], OF_ROW, |pass| gradient(pass, "fc.bias"), None);
}

#[test]
fn the_gradient_of_a_column_layers_bias_is_cut() {
    compare(column, [8, 12], OF_COLUMN, |pass| gradient(pass, "fc.bias"), None);
}

fn norm_linear(rank: &Rank) -> LayerNormLinear {
    let options = LayerNormLinearOptions {
        in_features: 8,
        out_features: 12,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    LayerNormLinear::new("fc", options, &device(), &mut rng(1)).unwrap()
}

#[test]
fn gradients_of_a_norm_are_sums_over_all_tokens_once() {
    for name in ["fc.norm.weight", "fc.norm.bias"] {
        compare(norm_linear, [8, 12], OF_COLUMN, |pass| gradient(pass, name), None);
    }
}

fn norm(rank: &Rank) -> RmsNorm {
    let options = NormLayerOptions {
        hidden_size: 8,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    RmsNorm::new("norm", &options, &device()).unwrap()
}

#[test]
fn gradients_of_a_norm_alone_are_sums_over_all_tokens_once() {
    compare(norm, [8, 8], [Has::Tokens, Has::Tokens], |pass| gradient(pass, "norm.weight"), None);
}

fn mlp(rank: &Rank) -> LayerNormMlp {
    let options = LayerNormMlpOptions {
        hidden_size: 8,
        ffn_hidden_size: 12,
        activation: Activation::Swiglu,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    LayerNormMlp::new("mlp", options, &device(), &mut rng(1)).unwrap()
}

#[test]
fn both_halves_of_a_gated_mlp_are_cut() {
    compare(mlp, [8, 8], [Has::Tokens, Has::Tokens], |pass| gradient(pass, "mlp.fc1.weight"), None);
    compare(mlp, [8, 8], [Has::Tokens, Has::Tokens], |pass| pass.y.clone(), Some((8, Has::Tokens)));
}

fn attention(rank: &Rank) -> MultiheadAttention {
    let options = MultiheadAttentionOptions {
        hidden_size: 8,
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: Some(2),
            kv_channels: Some(4),
            qk_norm: Some(NormOptions::default()),
            ..Default::default()
        },
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    MultiheadAttention::new("attention", options, &device(), &mut rng(1)).unwrap()
}

/// Attention takes `[batch, seq, features]` where a rank has all tokens.
#[derive(Debug)]
struct Flat(MultiheadAttention, bool);
composite!(Flat { 0; skip 1 });

impl Module for Flat {
    type Saved = MultiheadAttentionSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }
    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, Self::Saved)> {
        let x = if self.1 { x.clone() } else { x.reshape([2, 4, 8])? };
        self.0.forward_with_info(cx, &x, info)
    }
    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let dy = if self.1 { dy.clone() } else { dy.reshape([2, 4, 8])? };
        self.0.backward(cx, saved, &dy)
    }
}

fn flat(rank: &Rank) -> Flat {
    let cuts = rank.tensor_parallel.as_ref().is_some_and(|ranks| ranks.options().sequence_parallel);
    Flat(attention(rank), cuts)
}

#[test]
fn gradients_of_norms_of_heads_are_sums_over_the_heads_of_all_ranks_once() {
    for name in ["attention.q_norm.weight", "attention.q_norm.bias", "attention.k_norm.weight"] {
        compare(flat, [8, 8], [Has::Tokens, Has::Tokens], |pass| gradient(pass, name), None);
    }
}

#[test]
fn heads_of_queries_keys_and_values_are_cut_each() {
    compare(flat, [8, 8], [Has::Tokens, Has::Tokens], |pass| gradient(pass, "attention.qkv.weight"), None);
    compare(flat, [8, 8], [Has::Tokens, Has::Tokens], |pass| pass.y.clone(), Some((8, Has::Tokens)));
}

/// The rows of a table and their gradients, and the norm of these.
#[test]
fn rows_of_a_table_are_looked_up_on_the_rank_that_has_them() {
    let run = |rank: &Rank| {
        let options = EmbeddingOptions {
            num_embeddings: 13,
            hidden_size: 8,
            tensor_parallel: rank.tensor_parallel.clone(),
            ..Default::default()
        };
        let mut table = Embedding::new("table", &options, &device(), &mut rng(1)).unwrap();
        fill(&mut table);
        let mut scaling = Scaling::new(&table, &device()).unwrap();
        let ids = ids([2, 4], 13, 3);
        let (y, saved) = scaling.in_autocast(&Recipe::off(), |cx| table.forward(cx, &ids)).unwrap();
        let dy = cut(rank, Has::Tokens, &wave([2, 4, 8], 5));
        table.backward(&saved, &dy).unwrap();
        all_reduce_gradients(&mut table, &**rank.mesh.dp()).unwrap();
        let gradient = table.weight().gather_main_grad().unwrap().to_f32_vec().unwrap();
        (y.to_f32_vec().unwrap(), gradient)
    };
    let (y, gradient) = ranks(ONE, run).remove(0);
    for layout in [TP2, TP2_SP, TP4] {
        ranks(layout, |rank| {
            let (found, of_table) = run(rank);
            let y = cut(rank, Has::Tokens, &Tensor::from_vec(y.clone(), [8, 8], &device()).unwrap());
            assert_eq!(found, y.to_f32_vec().unwrap(), "{layout:?}");
            assert_eq!(of_table, gradient, "{layout:?}");
        });
    }
}

/// A norm of gradients counts what all ranks have once, and the parts of all.
#[test]
fn the_norm_counts_replicas_once_and_all_parts() {
    let run = |rank: &Rank| {
        let mut layer = norm_linear(rank);
        for parameter in parameters_mut(&mut layer) {
            *parameter.main_grad_mut() =
                Tensor::full(2.0, *parameter.shape(), DType::F32, &device()).unwrap();
        }
        if rank.tensor_parallel.as_ref().is_some_and(|ranks| ranks.options().sequence_parallel) {
            // Each rank has half of what the norm's parameters have in all.
            for parameter in parameters_mut(&mut layer).into_iter().filter(|p| p.name().contains("norm")) {
                *parameter.main_grad_mut() =
                    Tensor::full(1.0, *parameter.shape(), DType::F32, &device()).unwrap();
            }
        }
        all_reduce_gradients(&mut layer, &**rank.mesh.dp()).unwrap();
        clip_grad_norm(&mut layer, 1.0).unwrap().item().unwrap()
    };
    let elements = (8 + 8 + 8 * 12 + 12) as f32;
    for layout in [ONE, TP2, TP2_SP] {
        for norm in ranks(layout, run) {
            assert!((norm / (4.0 * elements).sqrt() - 1.0).abs() < 1e-6, "{layout:?}: {norm}");
        }
    }
}

fn language_model(rank: &Rank, tie_word_embeddings: bool) -> Gpt {
    let layer = TransformerLayerOptions {
        hidden_size: 8,
        ffn_hidden_size: 8,
        attention: AttentionOptions { num_attention_heads: 2, max_seq_length: 4, ..Default::default() },
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    let options = GptOptions {
        vocab_size: 7,
        num_layers: 1,
        layer,
        tie_word_embeddings,
        learned_positions: true,
        ..Default::default()
    };
    let mut model = Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap();
    fill(&mut model);
    model
}

/// The loss, and a gradient of the model.
fn model_compares(name: &str, tied: bool) {
    let run = |rank: &Rank| {
        let mut model = language_model(rank, tied);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let [x, targets] = [1, 2].map(|seed| ids([2, 4], 7, seed));
        let (loss, saved) = scaling.in_autocast(&Recipe::off(), |cx| model.loss(cx, &x, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        all_reduce_gradients(&mut model, &**rank.mesh.dp()).unwrap();
        let parameter = parameters(&model).into_iter().find(|p| **p.name() == *name).unwrap();
        (loss.item().unwrap(), parameter.gather_main_grad().unwrap().to_f32_vec().unwrap())
    };
    let (loss, gradient) = ranks(ONE, run).remove(0);
    for layout in [TP2, TP2_SP] {
        for (found, of_parameter) in ranks(layout, run) {
            assert!((found / loss - 1.0).abs() < 1e-5, "{layout:?}: loss {found}, not {loss}");
            let error = relative_rms(&gradient, &of_parameter);
            assert!(error < 1e-5, "{layout:?}: relative RMS error {error:.1e}");
        }
    }
}

#[test]
fn the_loss_sums_the_exponentials_of_all_ranks_and_finds_the_targets() {
    model_compares("gpt.head.weight", false);
}

#[test]
fn the_gradient_of_the_heads_input_is_summed_once() {
    model_compares("gpt.norm.weight", false);
    model_compares("gpt.norm.weight", true);
}

#[test]
fn a_tied_table_has_the_gradients_of_both_uses() {
    model_compares("gpt.embedding.weight", true);
}

#[test]
fn positions_are_those_of_this_ranks_tokens() {
    model_compares("gpt.position.weight", false);
}
