//! Continuations behind a cache against the whole sequence, and the choice of tokens.

use super::support::{
    assert_close, bits, current, delayed, device, error, ids, noise, off, relative_rms, rng,
    unless_simulated, values, with_noise,
};
use fp8_nn::fp8_kernels::ops::{CrossEntropyOptions, RopeScaling, SampleOptions};
use fp8_nn::prelude::*;

pub(crate) const VOCABULARY: usize = 20;

pub(crate) fn options() -> GptOptions {
    GptOptions {
        vocab_size: VOCABULARY,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 128,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 16, ..Default::default() },
            init: InitOptions { init_std: 0.15, output_layer_init_std: 0.15 },
            ..Default::default()
        },
        ..Default::default()
    }
}

pub(crate) fn model(options: &GptOptions) -> Gpt {
    with_noise(Gpt::new("gpt", options, &device(), &mut rng(1)).unwrap(), 1)
}

/// As Llama has it: RMSNorm, swiglu, grouped queries, no biases.
pub(crate) fn llama() -> GptOptions {
    GptOptions {
        layer: TransformerLayerOptions {
            attention: AttentionOptions { num_gqa_groups: Some(2), ..options().layer.attention },
            ffn_hidden_size: 48,
            activation: Activation::Swiglu,
            norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
            bias: false,
            ..options().layer
        },
        ..options()
    }
}

/// Each option of the decoder that matters behind a cache.
fn decoders() -> Vec<(&'static str, GptOptions)> {
    vec![
        ("llama, tied", GptOptions { tie_word_embeddings: true, ..llama() }),
        ("windows", GptOptions { sliding_windows: vec![Some(3), None], ..llama() }),
        ("learned positions", GptOptions { learned_positions: true, ..options() }),
        (
            "norms of heads, a size of their own, scaled RoPE",
            GptOptions {
                layer: TransformerLayerOptions {
                    attention: AttentionOptions {
                        qk_norm: Some(NormOptions { normalization: Norm::RmsNorm, ..Default::default() }),
                        kv_channels: Some(12),
                        num_gqa_groups: Some(1),
                        rope_scaling: RopeScaling::Linear { factor: 4.0 },
                        ..llama().layer.attention
                    },
                    qkv_bias: Some(true),
                    ..llama().layer
                },
                ..llama()
            },
        ),
        (
            "f32 residuals, dropout",
            GptOptions {
                embedding_dropout: 0.5,
                layer: TransformerLayerOptions {
                    fp32_residual_connection: true,
                    hidden_dropout: 0.5,
                    recompute: RecomputeLevel::Attention,
                    ..options().layer
                },
                ..options()
            },
        ),
    ]
}

pub(crate) fn on_device(values: Vec<i32>, shape: [usize; 2]) -> Tensor {
    Tensor::from_vec::<i32>(values, shape, &device()).unwrap()
}

/// Ids of one row.
fn of_row(ids: &Tensor, row: usize) -> Vec<i32> {
    let [_, seq] = ids.shape().matrix();
    ids.to_vec::<i32>().unwrap()[row * seq..(row + 1) * seq].to_vec()
}

/// The logits of all ids at once.
fn whole(model: &Gpt, cx: &mut Forward<'_>, ids: &[i32]) -> Vec<Vec<f32>> {
    let ids = on_device(ids.to_vec(), [1, ids.len()]);
    let logits = model.logits(cx, &ids, &SequenceInfo::default()).unwrap();
    values(&logits).chunks(VOCABULARY).map(<[f32]>::to_vec).collect()
}

#[test]
fn chunks_behind_a_cache_are_the_whole_sequence() {
    for (name, options) in decoders() {
        let model = model(&options);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
        let ids = ids([2, 11], VOCABULARY as i32, 5);
        let all = model.logits(&mut cx, &ids, &SequenceInfo::default()).unwrap();
        let all = values(&all);
        let mut cache = model.kv_cache(2, 13, DType::F32).unwrap();
        for chunks in
            unless_simulated(vec![vec![1; 11], vec![11], vec![4, 1, 6], vec![2, 9]], vec![vec![4, 1, 6]])
        {
            cache.clear();
            let mut start = 0;
            for len in chunks {
                let part = [0, 1].map(|row| of_row(&ids, row)[start..start + len].to_vec()).concat();
                let logits =
                    model.extend_all(&mut cx, &on_device(part, [2, len]), &[len; 2], &mut cache).unwrap();
                let want = [0, 1].map(|row| &all[(row * 11 + start) * VOCABULARY..][..len * VOCABULARY]);
                assert_close(&format!("{name}, {start}"), &want.concat(), &values(&logits), 1e-5);
                start += len;
                assert_eq!(cache.lengths(), [start; 2]);
            }
        }
    }
}

#[test]
fn rows_have_lengths_of_their_own() {
    for (name, options) in decoders() {
        let model = model(&options);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
        let ids = ids([3, 12], VOCABULARY as i32, 6);
        let mut cache = model.kv_cache(3, 12, DType::F32).unwrap();
        for counts in [[5, 1, 3], [1, 0, 1], [0, 4, 2], [3, 7, 1]] {
            let seq = counts.into_iter().max().unwrap();
            let new: Vec<Vec<i32>> = (0..3)
                .map(|row| {
                    let start = cache.lengths()[row];
                    let real = of_row(&ids, row)[start..start + counts[row]].to_vec();
                    real.into_iter().chain(std::iter::repeat(19)).take(seq).collect()
                })
                .collect();
            let logits =
                model.extend(&mut cx, &on_device(new.concat(), [3, seq]), &counts, &mut cache).unwrap();
            assert_eq!(**logits.shape(), [3, VOCABULARY]);
            for (row, got) in
                values(&logits).chunks(VOCABULARY).enumerate().filter(|(row, _)| counts[*row] > 0)
            {
                let want = whole(&model, &mut cx, &of_row(&ids, row)[..cache.lengths()[row]]);
                assert_close(&format!("{name}, row {row}"), want.last().unwrap(), got, 1e-5);
            }
        }
        assert_eq!(cache.lengths(), [9, 12, 7]);
        // Another continuation of a row that went too far.
        cache.truncate(1, 4);
        cache.truncate(0, 20);
        assert_eq!((cache.lengths(), cache.capacity()), (&[9, 4, 7][..], 12));
        let logits =
            model.extend(&mut cx, &on_device(vec![0, 7, 0], [3, 1]), &[0, 1, 0], &mut cache).unwrap();
        let sequence = [&of_row(&ids, 1)[..4], &[7]].concat();
        let want = whole(&model, &mut cx, &sequence);
        assert_close(name, want.last().unwrap(), &values(&logits)[VOCABULARY..2 * VOCABULARY], 1e-5);
    }
}

/// Under every recipe; with the weights, and with attention in FP8, too.
#[test]
fn a_cache_in_fp8_stays_near_the_whole_sequence() {
    let mut cases = vec![
        (delayed(), llama()),
        (current(), llama()),
        (Recipe::from_name("block").unwrap(), llama()),
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
        (
            current(),
            GptOptions {
                learned_positions: true,
                layer: TransformerLayerOptions {
                    attention: AttentionOptions { fp8_mha: Some(true), ..options().layer.attention },
                    ..options().layer
                },
                ..options()
            },
        ),
    ];
    for name in unless_simulated(&["te-v0", "rowwise", "rowwise-gw-hp", "deepseek", "mxfp8"][..], &[]) {
        cases.push((Recipe::from_name(name).unwrap(), llama()));
    }
    for (index, (recipe, options)) in cases.into_iter().enumerate() {
        let mut model = model(&GptOptions {
            layer: TransformerLayerOptions {
                init: InitOptions { init_std: 0.05, output_layer_init_std: 0.05 },
                ..options.layer
            },
            ..options
        });
        if index == 1 {
            quantize_weights(&mut model, &recipe).unwrap();
        }
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let ids = ids([2, 10], VOCABULARY as i32, 7);
        // A step calibrates delayed scaling.
        scaling.in_autocast(&recipe, |cx| model.forward(cx, &ids)).unwrap();
        let mut cx = scaling.eval(&recipe).unwrap();
        let want = values(&model.logits(&mut cx, &ids, &SequenceInfo::default()).unwrap());
        let mut cache = model.kv_cache(2, 10, DType::F32).unwrap();
        let mut got = [Vec::new(), Vec::new()];
        let mut start = 0;
        for len in [6, 1, 1, 2] {
            let part = [0, 1].map(|row| of_row(&ids, row)[start..start + len].to_vec()).concat();
            let logits =
                model.extend_all(&mut cx, &on_device(part, [2, len]), &[len; 2], &mut cache).unwrap();
            let logits = values(&logits);
            got.iter_mut().zip(logits.chunks(len * VOCABULARY)).for_each(|(got, new)| got.extend(new));
            start += len;
        }
        drop(cx);
        let mut cx = scaling.eval_with_options(&recipe, &off()).unwrap();
        let high = values(&model.logits(&mut cx, &ids, &SequenceInfo::default()).unwrap());
        let got = got.concat();
        let errors = [(&high, &want), (&high, &got), (&want, &got)].map(|(a, b)| relative_rms(a, b));
        // Both are as near to high precision. Chunks have scales of their own under current scaling, and attention behind a cache
        // reads no FP8 of projections; otherwise the codes are the same.
        let between = if matches!(index, 1 | 4) { 0.05 } else { 0.005 };
        assert!((1e-4..0.05).contains(&errors[0]), "case {index}: {errors:?}");
        assert!(errors[1] < 1.25 * errors[0] && errors[2] < between, "case {index}: {errors:?}");
    }
}

#[test]
fn an_evaluation_is_the_forward_pass() {
    for (name, options) in decoders() {
        let model = model(&options);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let (ids, targets) = (ids([2, 9], VOCABULARY as i32, 8), ids([2, 9], VOCABULARY as i32, 9));
        let lengths = Tensor::from_vec(vec![9i32, 4], [2], &device()).unwrap();
        let info = SequenceInfo::padded(&lengths);
        for recipe in [delayed(), current()] {
            let mut cx = scaling.eval(&recipe).unwrap();
            let (want, _) = model.forward_with_info(&mut cx, &ids, &info).unwrap();
            assert_eq!(bits(&model.logits(&mut cx, &ids, &info).unwrap()), bits(&want), "{name}");
            let options = CrossEntropyOptions { ignore_index: Some(3), ..Default::default() };
            let (want, _) = model.loss_with_info(&mut cx, &ids, &targets, options, &info).unwrap();
            let loss = model.evaluate(&mut cx, &ids, &targets, options, &info).unwrap();
            assert_eq!(bits(&loss), bits(&want), "{name}");
        }
        let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
        let wrong = model.evaluate(&mut cx, &ids, &lengths, CrossEntropyOptions::default(), &info);
        assert_eq!(error(wrong), "gpt: targets of shape [2]: expected [2, 9], the shape of ids");
    }
}

fn argmax(logits: &[f32]) -> i32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&v| v == largest).unwrap() as i32
}

const PROMPTS: [&[i32]; 3] = [&[1, 2, 3, 4, 5], &[6], &[7, 8]];

#[test]
fn greedy_texts_are_the_largest_logits_step_by_step() {
    let model = model(&llama());
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
    let greedy = GenerateOptions { max_new_tokens: 9, ..Default::default() };
    let mut streamed = vec![Vec::new(); 3];
    let texts = model.generate(&mut cx, &PROMPTS, &greedy, |row, token| streamed[row].push(token)).unwrap();
    assert_eq!(texts, streamed);
    for (prompt, text) in PROMPTS.iter().zip(&texts) {
        let mut sequence = prompt.to_vec();
        for _ in 0..9 {
            sequence.push(argmax(whole(&model, &mut cx, &sequence).last().unwrap()));
        }
        assert_eq!(text, &sequence[prompt.len()..]);
    }
    // A text ends behind its first stop token, and the others go on as they would without it.
    let stop = texts[0][3];
    let stopped = GenerateOptions { stop_tokens: vec![-5, stop], ..greedy.clone() };
    let ended = model.generate(&mut cx, &PROMPTS, &stopped, |_, _| ()).unwrap();
    for (text, ended) in texts.iter().zip(&ended) {
        let end = text.iter().position(|&token| token == stop).map_or(9, |at| at + 1);
        assert_eq!(ended, &text[..end]);
    }
    assert!(ended[0].len() <= 4 && ended.iter().any(|text| text.len() > ended[0].len()), "{ended:?}");
    // Where all have ended, nothing follows.
    let every = GenerateOptions { stop_tokens: (0..VOCABULARY as i32).collect(), ..greedy.clone() };
    let mut generation = Generation::new(&model, &cx, &PROMPTS, &every).unwrap();
    let first = generation.next(&mut cx).unwrap().unwrap();
    assert_eq!(first, texts.iter().map(|text| Some(text[0])).collect::<Vec<_>>());
    assert_eq!(generation.next(&mut cx).unwrap(), None);
}

#[test]
fn draws_depend_on_the_seed_and_the_options() {
    let model = model(&llama());
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
    let warm = GenerateOptions { max_new_tokens: 6, temperature: 2.0, seed: 4, ..Default::default() };
    let mut text = |options: &GenerateOptions| model.generate(&mut cx, &PROMPTS, options, |_, _| ()).unwrap();
    let first = text(&warm);
    assert_eq!(first, text(&warm));
    assert_ne!(first, text(&GenerateOptions { seed: 5, ..warm.clone() }));
    let greedy = text(&GenerateOptions { temperature: 0.0, ..warm.clone() });
    assert_ne!(first, greedy);
    assert_eq!(text(&GenerateOptions { top_k: Some(1), ..warm.clone() }), greedy);
    assert_eq!(text(&GenerateOptions { top_p: 1e-6, ..warm.clone() }), greedy);
    assert_eq!(text(&GenerateOptions { temperature: 1e-6, ..warm.clone() }), greedy);
    // A step draws with counters of its own.
    let flat = Tensor::zeros([1, VOCABULARY], DType::F32, &device()).unwrap();
    let at = |step: u64| ops::DropoutKey { seed: 4, offset: step << 32 };
    let drawn =
        |step| ops::sample(&flat, &SampleOptions::default(), at(step)).unwrap().to_vec::<i32>().unwrap()[0];
    let hot = text(&GenerateOptions { temperature: 1e30, ..warm });
    assert_eq!(hot[0], (0..6).map(drawn).collect::<Vec<_>>());
}

#[test]
fn another_dtype_has_a_cache_of_its_own() {
    let model = model(&llama());
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let bf16 = AutocastOptions { compute_dtype: Some(DType::BF16), ..off() };
    let mut cx = scaling.eval_with_options(&delayed(), &bf16).unwrap();
    let options = GenerateOptions { max_new_tokens: 2, ..Default::default() };
    assert_eq!(model.generate(&mut cx, &PROMPTS, &options, |_, _| ()).unwrap()[0].len(), 2);
    let mut cache = model.kv_cache(1, 4, DType::F32).unwrap();
    let refused = model.extend(&mut cx, &on_device(vec![1], [1, 1]), &[1], &mut cache);
    assert_eq!(
        error(refused),
        "gpt.blocks.0.attention: kv_cache = f32: the layer computes in bf16: create the cache with that dtype"
    );
    assert_eq!(cache.lengths(), [0]);
}

#[test]
fn a_full_cache_and_other_mistakes_change_nothing() {
    let model = model(&llama());
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
    let mut cache = model.kv_cache(2, 4, DType::F32).unwrap();
    let three = on_device(vec![1, 2, 3, 4, 5, 6], [2, 3]);
    let first = model.extend(&mut cx, &three, &[3, 1], &mut cache).unwrap();
    let mut refused = |ids: &Tensor, counts: &[usize]| {
        let text = error(model.extend(&mut cx, ids, counts, &mut cache));
        assert_eq!(cache.lengths(), [3, 1], "{text}");
        text
    };
    assert_eq!(
        refused(&three, &[2, 2]),
        "gpt: cache = 3 tokens in row 0: 2 more do not fit into its capacity of 4: clear it, or create a larger one"
    );
    assert_eq!(refused(&three, &[0, 4]), "gpt: counts = 4: expected at most 3, the ids of a row");
    assert_eq!(
        refused(&on_device(vec![1, 2, 3], [3, 1]), &[1, 1, 1]),
        "gpt: ids and counts = 3 rows and 3 counts: the cache has 2 rows: give as many rows of ids, and a count for each"
    );
    assert_eq!(
        refused(&on_device(vec![], [2, 0]), &[0, 0]),
        "gpt: ids of shape [2, 0]: expected [batch, seq], seq at least 1"
    );
    assert_eq!(refused(&noise([2, 1], 1), &[1, 1]), "gpt: ids has dtype f32: expected i32");
    if !device().is_simulated() && device().to_string() == "cpu" {
        let text = refused(&on_device(vec![1, 20], [2, 1]), &[1, 1]);
        assert_eq!(text, "embedding: id 20 at position 1 is out of range 0..20");
    }
    cache.clear();
    let again = model.extend(&mut cx, &three, &[3, 1], &mut cache).unwrap();
    assert_eq!(bits(&first), bits(&again));

    let other = Gpt::new("other", &options(), &device(), &mut rng(1)).unwrap();
    let mut cache = other.kv_cache(2, 4, DType::F32).unwrap();
    assert_eq!(
        error(model.extend(&mut cx, &three, &[3, 1], &mut cache)),
        "gpt: kv_cache = 2 blocks with keys [2, 4, 4, 8]: it belongs to another model: create it with Gpt::kv_cache of this one"
    );
    for (sizes, dtype, text) in [
        ([2, 17], DType::F32, "gpt: capacity = 17: expected at most 16, the max_seq_length"),
        ([0, 4], DType::F32, "gpt: batch = 0: expected at least 1"),
        ([2, 4], DType::U8, "gpt: params_dtype = u8: "),
    ] {
        let found = error(model.kv_cache(sizes[0], sizes[1], dtype));
        assert!(found.starts_with(text), "{found}");
    }
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let model = model(&llama());
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.eval_with_options(&delayed(), &off()).unwrap();
    let mut refused = |prompts: &[&[i32]], max_new_tokens| {
        let options = GenerateOptions { max_new_tokens, ..Default::default() };
        error(model.generate(&mut cx, prompts, &options, |_, _| ()))
    };
    assert!(refused(&[], 1).starts_with("gpt: prompts = 0: "));
    assert!(refused(&PROMPTS, 0).starts_with("gpt: max_new_tokens = 0: "));
    assert_eq!(
        refused(&[&[1], &[]], 1),
        "gpt: prompts = an empty one at 1: expected at least one token, such as the one that begins a text"
    );
    for token in [-1, 20] {
        assert_eq!(
            refused(&[&[1, token]], 1),
            format!("gpt: prompt token = {token}: expected 0 to 19, the tokens of the vocabulary")
        );
    }
    assert_eq!(
        refused(&PROMPTS, 13),
        "gpt: max_new_tokens = 13: the longest prompt has 5 tokens and the model reads at most 16: give at most 12"
    );
    assert_eq!(
        refused(&[&[1; 17]], 1),
        "gpt: max_new_tokens = 1: the longest prompt has 17 tokens, the model reads at most 16"
    );
    // A prompt as long as the model reads has room for one token, which is not read.
    let options = GenerateOptions { max_new_tokens: 1, ..Default::default() };
    assert_eq!(model.generate(&mut cx, &[&[1; 16]], &options, |_, _| ()).unwrap()[0].len(), 1);
    let hot = GenerateOptions { top_p: 2.0, temperature: 1.0, ..options };
    let text = error(model.generate(&mut cx, &PROMPTS, &hot, |_, _| ()));
    assert!(text.starts_with("sample: top_p = 2: "), "{text}");
}

/// Room that is not used costs time, not bits: rows of different lengths, in each dtype, at a capacity that is full and at others.
#[test]
fn the_capacity_of_a_cache_changes_no_bit() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let model = model(&GptOptions {
            layer: TransformerLayerOptions { params_dtype: dtype, ..llama().layer },
            ..llama()
        });
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut run = |capacity: usize| {
            let mut cx = scaling.eval(&Recipe::off()).unwrap();
            let mut cache = model.kv_cache(3, capacity, dtype).unwrap();
            let mut found = Vec::new();
            for (seq, counts) in [(5, [5, 2, 0]), (1, [1, 1, 1]), (1, [1, 0, 1])] {
                let ids = ids([3, seq], VOCABULARY as i32, seq as u64);
                let logits = model.extend(&mut cx, &ids, &counts, &mut cache).unwrap();
                let rows = values(&logits);
                // A row without new tokens has logits that mean nothing.
                let real = rows.chunks(VOCABULARY).zip(counts).filter(|&(_, count)| count > 0);
                found.extend(real.flat_map(|(row, _)| row.iter().map(|x| x.to_bits())));
            }
            found
        };
        let full = run(7);
        for capacity in [8, 13, 16] {
            assert!(run(capacity) == full, "{dtype}, capacity {capacity}");
        }
    }
}
