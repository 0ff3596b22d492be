//! Gradients of every parameter, and 20 steps, of whole models against PyTorch in f64. `tests/golden/parallel/generate.py` made the data.

use super::rig::*;
use crate::every_device::support::{device, relative_rms, rng};
use fp8_nn::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A file of the folder.
struct Golden {
    config: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

impl Golden {
    fn read(name: &str) -> Self {
        let package =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let path = Path::new(&package).join(format!("tests/golden/parallel/{name}.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = serde_json::from_str(&header.metadata().as_ref().unwrap()["config"]).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let data = view.data();
            let values: Vec<f64> = match view.dtype() {
                Dtype::F64 => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
                Dtype::F32 => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
                _ => data.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
            };
            (name.to_owned(), (view.shape().to_vec(), values))
        });
        Self { config, tensors: tensors.collect() }
    }

    fn size(&self, option: &str) -> Option<usize> {
        self.config[option].as_u64().map(|size| size as usize)
    }

    fn numbers(&self, name: &str) -> &[f64] {
        &self.tensors[name].1
    }

    fn integers(&self, name: &str) -> Tensor {
        let (shape, values) = &self.tensors[name];
        let values = values.iter().map(|&value| value as i32).collect();
        Tensor::from_vec::<i32>(values, [shape[0], shape[1]], &device()).unwrap()
    }
}

fn split_mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The weights of the file's README.
fn weights(number: usize, name: &str, shape: &Shape) -> Vec<f32> {
    let (center, bound) = match shape.len() {
        2 => (0.0, 0.25),
        _ if name.ends_with(".bias") => (0.0, 0.05),
        _ => (1.0, 0.2),
    };
    let value = |i: usize| {
        let hash = split_mix((number as u64) << 32 | i as u64);
        let unit = (hash >> 11) as f64 * 2f64.powi(-53);
        (center + bound * (2.0 * unit - 1.0)) as f32
    };
    (0..shape.numel()).map(value).collect()
}

pub(super) fn gpt(rank: &Rank) -> GptOptions {
    let attention = AttentionOptions { num_attention_heads: 4, max_seq_length: 8, ..Default::default() };
    let layer = TransformerLayerOptions {
        hidden_size: 32,
        ffn_hidden_size: 64,
        attention,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    GptOptions { vocab_size: 50, num_layers: 2, layer, learned_positions: true, ..Default::default() }
}

pub(super) fn llama(rank: &Rank) -> GptOptions {
    let norm = NormOptions { normalization: Norm::RmsNorm, ..Default::default() };
    let attention = AttentionOptions {
        num_attention_heads: 8,
        num_gqa_groups: Some(4),
        kv_channels: Some(8),
        max_seq_length: 8,
        qk_norm: Some(norm),
        ..Default::default()
    };
    let layer = TransformerLayerOptions {
        hidden_size: 32,
        ffn_hidden_size: 48,
        attention,
        norm,
        activation: Activation::Swiglu,
        bias: false,
        tensor_parallel: rank.tensor_parallel.clone(),
        ..Default::default()
    };
    GptOptions { vocab_size: 50, num_layers: 2, layer, tie_word_embeddings: true, ..Default::default() }
}

fn trains_as_pytorch(name: &str, options: fn(&Rank) -> GptOptions, layout: Layout) {
    let golden = Golden::read(name);
    assert_eq!(golden.size("vocab_size"), Some(50));
    let all = ranks(layout, |rank| {
        let mut model = Gpt::new("gpt", &options(rank), &device(), &mut rng(1)).unwrap();
        let names: Vec<String> = parameters(&model).iter().map(|p| p.name().to_string()).collect();
        assert_eq!(serde_json::to_value(&names).unwrap(), golden.config["parameters"]);
        set_all(&mut model, weights);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let [ids, targets] = ["ids", "targets"].map(|name| rank.of_batch(&golden.integers(name)));
        let options = ops::CrossEntropyOptions { ignore_index: Some(-100), normalizer: Some(28.0) };
        for (step, (&loss, &norm)) in golden.numbers("losses").iter().zip(golden.numbers("norm")).enumerate()
        {
            let (part, saved) = scaling
                .in_autocast(&Recipe::off(), |cx| {
                    model.loss_with_info(cx, &ids, &targets, options, &SequenceInfo::default())
                })
                .unwrap();
            scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
            all_reduce_gradients(&mut model, &**rank.mesh.dp()).unwrap();
            let found = rank.mesh.dp().all_reduce("loss", &part, ReduceOp::Sum).unwrap().item().unwrap();
            assert!((f64::from(found) / loss - 1.0).abs() < 1e-5, "step {step}: loss {found}, not {loss}");
            if step == 0 {
                for parameter in parameters(&model) {
                    let name = parameter.name();
                    let found = parameter.gather_main_grad().unwrap().to_f32_vec().unwrap();
                    let expected: Vec<f32> =
                        golden.numbers(&format!("grad.{name}")).iter().map(|&v| v as f32).collect();
                    let error = relative_rms(&expected, &found);
                    assert!(error <= 1e-5, "{name}: relative RMS error {error:.1e}");
                }
            }
            let found = clip_grad_norm(&mut model, 1.0).unwrap();
            let tolerance = if step == 0 { 1e-6 } else { 1e-5 };
            let ratio = f64::from(found.item().unwrap()) / norm;
            assert!((ratio - 1.0).abs() < tolerance, "step {step}: norm off by {:.1e}", ratio - 1.0);
            optimizer.step_with_norm(&mut model, 1e-3, &found).unwrap();
            zero_grad(&mut model).unwrap();
        }
        agree(&model, &optimizer, &scaling, &**rank.mesh.dp()).unwrap();
        parameters(&model)
            .iter()
            .map(|p| p.gather_values(DType::F32).unwrap().to_f32_vec().unwrap())
            .collect::<Vec<_>>()
    });
    assert!(all.iter().all(|rank| *rank == all[0]));
}

macro_rules! layouts {
    ($($test:ident: $layout:ident;)*) => {$(
        #[test]
        fn $test() {
            trains_as_pytorch("gpt", gpt, $layout);
            trains_as_pytorch("llama", llama, $layout);
        }
    )*};
}

layouts! {
    one_device_trains_as_pytorch: ONE;
    tp2_trains_as_pytorch: TP2;
    tp4_trains_as_pytorch: TP4;
    tp2_with_sequence_parallelism_trains_as_pytorch: TP2_SP;
    tp4_with_sequence_parallelism_trains_as_pytorch: TP4_SP;
    dp2_tp2_with_sequence_parallelism_trains_as_pytorch: DP2_TP2_SP;
}
