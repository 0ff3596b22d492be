//! The logits of a row depend on its own tokens alone: not on removed tokens, padding, other rows or failed steps.

use super::generation::{VOCABULARY, llama, model, on_device};
use super::support::{
    assert_close, bits, current, delayed, device, error, ids, linear, off, relative_rms, unless_simulated,
    values,
};
use fp8_nn::LinearSaved;
use fp8_nn::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Recipes whose scales depend on all values of a tensor, without and with attention in FP8.
fn cases() -> Vec<(Recipe, GptOptions)> {
    let mut cases = vec![(
        current(),
        GptOptions {
            layer: TransformerLayerOptions {
                attention: AttentionOptions { fp8_dpa: Some(true), ..llama().layer.attention },
                ..llama().layer
            },
            ..llama()
        },
    )];
    cases.extend(unless_simulated(
        vec![
            (current(), llama()),
            // Without a step before, slots take the scales of their own tensors.
            (
                delayed(),
                GptOptions {
                    layer: TransformerLayerOptions {
                        attention: AttentionOptions { fp8_dpa: Some(true), ..llama().layer.attention },
                        ..llama().layer
                    },
                    ..llama()
                },
            ),
            (Recipe::off(), llama()),
        ],
        vec![],
    ));
    cases
}

#[test]
fn tokens_that_were_removed_leave_no_trace() {
    for (recipe, options) in cases() {
        let model = model(&options);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval(&recipe).unwrap();
        let (first, second) = (ids([2, 6], VOCABULARY as i32, 3), ids([2, 3], VOCABULARY as i32, 4));
        let mut new = model.kv_cache(2, 12, DType::F32).unwrap();
        let mut used = model.kv_cache(2, 12, DType::F32).unwrap();
        model.extend(&mut cx, &first, &[6, 4], &mut used).unwrap();
        used.clear();
        for counts in [[3, 2], [1, 3]] {
            let [want, got] = [&mut new, &mut used]
                .map(|cache| bits(&model.extend(&mut cx, &second, &counts, cache).unwrap()));
            assert!(want == got, "{recipe}, after clear");
        }
        model.extend(&mut cx, &first, &[5, 6], &mut used).unwrap();
        [0, 1].into_iter().for_each(|row| used.truncate(row, new.lengths()[row]));
        let [want, got] =
            [&mut new, &mut used].map(|cache| bits(&model.extend(&mut cx, &second, &[2, 1], cache).unwrap()));
        assert!(want == got, "{recipe}, after truncate");
    }
}

#[test]
fn padding_and_rows_without_new_tokens_leave_no_trace() {
    let mut cases = cases();
    // Biases and LayerNorms make something of 0.
    let residuals = GptOptions {
        layer: TransformerLayerOptions {
            fp32_residual_connection: true,
            ..super::generation::options().layer
        },
        ..super::generation::options()
    };
    cases.extend(unless_simulated(
        vec![(current(), super::generation::options()), (current(), residuals)],
        vec![],
    ));
    for (recipe, options) in cases {
        let mut model = model(&options);
        // A token with values far beyond the others.
        let table = values(model.embedding().weight().tensor());
        let width = table.len() / VOCABULARY;
        let outlier = |(at, value): (usize, f32)| if at / width == 19 { 1000.0 * value } else { value };
        let table: Vec<f32> = table.into_iter().enumerate().map(outlier).collect();
        let table = Tensor::from_vec::<f32>(table, [VOCABULARY, width], &device()).unwrap();
        parameters_mut(&mut model)[0].set(table).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval(&recipe).unwrap();
        let [calm, wild] = [0, 19].map(|padding| {
            let mut cache = model.kv_cache(2, 12, DType::F32).unwrap();
            let prompts = on_device(vec![1, 2, 3, 4, 5, padding], [2, 3]);
            let next = on_device(vec![6, padding], [2, 1]);
            let both = model.extend(&mut cx, &prompts, &[3, 2], &mut cache).unwrap();
            let one = model.extend(&mut cx, &next, &[1, 0], &mut cache).unwrap();
            [bits(&both), bits(&one)[..VOCABULARY].to_vec()].concat()
        });
        assert!(calm == wild, "{recipe}");
    }
}

/// Under delayed scaling, whose scales do not depend on what is read.
#[test]
fn rows_of_different_lengths_have_their_logits_in_fp8() {
    let windows = GptOptions { sliding_windows: vec![Some(3), None], ..llama() };
    let heads = GptOptions {
        layer: TransformerLayerOptions {
            attention: AttentionOptions {
                qk_norm: Some(NormOptions { normalization: Norm::RmsNorm, ..Default::default() }),
                kv_channels: Some(12),
                num_gqa_groups: Some(1),
                ..llama().layer.attention
            },
            ..llama().layer
        },
        ..llama()
    };
    let fp8_dpa = GptOptions {
        layer: TransformerLayerOptions {
            attention: AttentionOptions { fp8_dpa: Some(true), ..llama().layer.attention },
            ..llama().layer
        },
        ..llama()
    };
    for (name, options, dtype) in unless_simulated(
        vec![
            ("windows", windows, DType::F32),
            ("norms of heads", heads, DType::F32),
            ("bf16", llama(), DType::BF16),
            ("attention in FP8", fp8_dpa.clone(), DType::F32),
        ],
        vec![("attention in FP8", fp8_dpa, DType::F32)],
    ) {
        let model = model(&GptOptions {
            layer: TransformerLayerOptions {
                init: InitOptions { init_std: 0.05, output_layer_init_std: 0.05 },
                ..options.layer
            },
            ..options
        });
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let all = ids([3, 9], VOCABULARY as i32, 7);
        let run = AutocastOptions { compute_dtype: Some(dtype), ..Default::default() };
        let mut cx = scaling.scope(&delayed(), &run).unwrap();
        model.forward(&mut cx, &all).unwrap();
        cx.commit().unwrap();
        let mut cx = scaling.eval_with_options(&delayed(), &run).unwrap();
        let tokens = all.to_vec::<i32>().unwrap();
        let mut cache = model.kv_cache(3, 9, dtype).unwrap();
        for counts in [[5, 1, 3], [1, 0, 1], [0, 4, 2], [3, 4, 1]] {
            let seq = counts.into_iter().max().unwrap();
            let new = (0..3).flat_map(|row| {
                let start = 9 * row + cache.lengths()[row];
                (0..seq).map(move |at| if at < counts[row] { start + at } else { 0 })
            });
            let new = on_device(new.map(|at| tokens[at]).collect(), [3, seq]);
            let logits = values(&model.extend(&mut cx, &new, &counts, &mut cache).unwrap());
            for row in (0..3).filter(|&row| counts[row] > 0) {
                let length = cache.lengths()[row];
                let sequence = on_device(tokens[9 * row..9 * row + length].to_vec(), [1, length]);
                let whole = model.logits(&mut cx, &sequence, &SequenceInfo::default()).unwrap();
                let whole = &values(&whole)[(length - 1) * VOCABULARY..];
                let error = relative_rms(whole, &logits[row * VOCABULARY..(row + 1) * VOCABULARY]);
                let most = if dtype == DType::F32 { 0.01 } else { 0.03 };
                assert!(error < most, "{name}, row {row} of length {length}: {error}");
            }
        }
    }
}

/// Blocks with every other order of norms and residual connections.
#[test]
fn blocks_of_other_shapes_extend_a_cache() {
    type Change = fn(&mut TransformerLayerOptions);
    let changes: [(&str, Change); 3] = [
        ("parallel", |options| options.parallel_attention_mlp = true),
        ("norm at the end", |options| options.output_layernorm = true),
        ("residuals behind the norms", |options| options.apply_residual_connection_post_layernorm = true),
    ];
    for (name, change) in changes {
        let plain = Gpt::new("gpt", &llama(), &device(), &mut super::support::rng(1)).unwrap();
        let model = plain.with_blocks(|index, _| {
            let attention =
                AttentionOptions { num_attention_heads: 4, rope: true, causal: true, ..Default::default() };
            let mut options = TransformerLayerOptions {
                hidden_size: 32,
                ffn_hidden_size: 48,
                attention,
                ..Default::default()
            };
            change(&mut options);
            let path = format!("gpt.blocks.{index}");
            Ok(Box::new(TransformerLayer::new(
                &path,
                options,
                &device(),
                &mut super::support::rng(index as u64),
            )?))
        });
        let model = model.unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
        let all = ids([1, 7], VOCABULARY as i32, 5);
        let whole = values(&model.logits(&mut cx, &all, &SequenceInfo::default()).unwrap());
        let mut cache = model.kv_cache(1, 8, DType::F32).unwrap();
        let tokens = all.to_vec::<i32>().unwrap();
        let mut got = Vec::new();
        for part in [&tokens[..3], &tokens[3..4], &tokens[4..]] {
            let part = on_device(part.to_vec(), [1, part.len()]);
            let len = part.numel();
            got.extend(values(&model.extend_all(&mut cx, &part, &[len], &mut cache).unwrap()));
        }
        assert_close(name, &whole, &got, 1e-5);
    }
}

/// A head whose logits are NaN while `is_broken`.
#[derive(Debug)]
struct Head {
    linear: Linear,
    is_broken: Arc<AtomicBool>,
}
composite!(Head { linear; skip is_broken });

impl Module for Head {
    type Saved = LinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LinearSaved)> {
        let (y, saved) = self.linear.forward(cx, x)?;
        let factor = if self.is_broken.load(Relaxed) { f32::NAN } else { 1.0 };
        Ok((ops::scale(&y, factor)?, saved))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: LinearSaved, dy: &Tensor) -> Result<Tensor> {
        self.linear.backward(cx, saved, dy)
    }
}

#[test]
fn a_step_that_fails_can_be_repeated() {
    for temperature in [0.0, 1.0] {
        let is_broken = Arc::new(AtomicBool::new(false));
        let head = Head { linear: linear("gpt.own", 32, VOCABULARY, 9), is_broken: is_broken.clone() };
        let model = model(&llama()).with_head(|_| Ok(Box::new(head))).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
        let options = GenerateOptions { max_new_tokens: 5, temperature, ..Default::default() };
        let prompts: [&[i32]; 2] = [&[1, 2, 3], &[4]];
        let want = model.generate(&mut cx, &prompts, &options, |_, _| {}).unwrap();
        let mut generation = Generation::new(&model, &cx, &prompts, &options).unwrap();
        let mut got = [Vec::new(), Vec::new()];
        for step in 0..5 {
            is_broken.store(step % 2 == 0, Relaxed);
            if step % 2 == 0 {
                assert_eq!(
                    error(generation.next(&mut cx)),
                    "gpt: logits = NaN or -inf for every token of text 0: a weight of the model is not finite, or a value \
                     overflowed: compute in bf16 or f32, and check the weights"
                );
                is_broken.store(false, Relaxed);
            }
            let tokens = generation.next(&mut cx).unwrap().unwrap();
            got.iter_mut().zip(tokens).for_each(|(text, token)| text.push(token.unwrap()));
        }
        assert_eq!(got.to_vec(), want);
    }
}

/// The tokens of each row depend on the row's place, the seed and its own logits.
#[test]
fn other_prompts_do_not_change_what_a_row_draws() {
    let model = model(&llama());
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
    let options = GenerateOptions { max_new_tokens: 6, temperature: 1.0, seed: 3, ..Default::default() };
    let mut second = |first: &[i32], options: &GenerateOptions| {
        model.generate(&mut cx, &[first, &[4, 5]], options, |_, _| {}).unwrap().remove(1)
    };
    let want = second(&[1, 2, 3], &options);
    assert_eq!(second(&[7], &options), want);
    // The first text ends at once, with any token that the second one does not draw.
    let stop_tokens = (0..VOCABULARY as i32).filter(|token| !want.contains(token)).collect();
    assert_eq!(second(&[1, 2, 3], &GenerateOptions { stop_tokens, ..options }), want);
}

#[test]
fn tokens_that_other_weights_have_read_are_refused() {
    let (mut one, other) = (model(&llama()), model(&llama()));
    let mut scaling = Scaling::new(&one, &device()).unwrap();
    let mut scaling_of_other = Scaling::new(&other, &device()).unwrap();
    let mut cache = one.kv_cache(1, 8, DType::F32).unwrap();
    let token = on_device(vec![1], [1, 1]);
    let mut cx = scaling.eval(&Recipe::off()).unwrap();
    let mut cx_of_other = scaling_of_other.eval(&Recipe::off()).unwrap();
    // An empty cache may change hands.
    other.extend(&mut cx_of_other, &token, &[0], &mut cache).unwrap();
    one.extend(&mut cx, &token, &[1], &mut cache).unwrap();
    let refusal = "gpt: kv_cache = tokens computed with other weights: another model computed them, or this one has \
                   changed since: clear the cache";
    assert_eq!(error(other.extend(&mut cx_of_other, &token, &[1], &mut cache)), refusal);
    one.extend(&mut cx, &token, &[1], &mut cache).unwrap();
    for parameter in parameters_mut(&mut one).into_iter().skip(3).take(1) {
        let half = ops::scale(parameter.tensor(), 0.5).unwrap();
        parameter.set(half).unwrap();
    }
    assert_eq!(error(one.extend(&mut cx, &token, &[1], &mut cache)), refusal);
    assert_eq!(cache.lengths(), [2]);
    cache.clear();
    one.extend(&mut cx, &token, &[1], &mut cache).unwrap();
}
