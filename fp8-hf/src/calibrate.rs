//! Static scales of inputs: what the layers of a model see when it reads a text.

use super::{Folder, Monitor};
use crate::model::NOT_DRAWN;
use crate::{Error, Result};
use fp8_format::E4M3;
use fp8_kernels::{Device, Tensor};
use fp8_nn::{Block as _, SequenceInfo, TransformerLayer, parameters_mut};
use fp8_recipe::{AutocastOptions, DelayedScaling, Recipe, Scaling};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// The path of the one block that is in memory.
const BLOCK: &str = "block";

/// Runs the model of `folder` in f32 over `windows` of tokens, and returns amax / 448 of the input of each layer, by the layer's
/// name, for [`QuantizeOptions::input_scales`](super::QuantizeOptions::input_scales).
///
/// Each window is read from its start. One block of the model is in memory at a time, with the activations of all windows:
/// 4 · `hidden_size` bytes for each token. The scale of an input that is always 0 is 1. `monitor` counts tokens, each as often as
/// there are blocks.
///
/// ```
/// use fp8_hf::{self as hf, Folder, Monitor, QuantizeOptions, Scheme};
/// use fp8_nn::prelude::*;
/// # let place = std::env::temp_dir().join(format!("fp8-calibrate-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let config = hf::Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2, "rms_norm_eps": 1e-30}"#,
/// # )?;
/// # let ones = |spec: &hf::TensorSpec| {
/// #     let ones = vec![1.0_f32; spec.shape.iter().product()];
/// #     Ok::<_, Error>((spec.name.clone(), Tensor::from_vec(ones, spec.shape, &Device::cpu())?))
/// # };
/// # hf::save(&place.join("model"), &config, &config.tensors().iter().map(ones).collect::<Result<_>>()?)?;
/// let folder = Folder::open(&place.join("model"))?; // all weights of this one are 1
/// let windows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]; // from a tokenizer
/// let input_scales = hf::calibrate(&folder, &windows, &Device::cpu(), &Monitor::default())?;
/// assert_eq!(input_scales["model.layers.0.self_attn.q_proj"], 1.0 / 448.0); // the norm's output
/// let options = QuantizeOptions { scheme: Scheme::Tensor, input_scales, ..Default::default() };
/// hf::quantize(&folder, &place.join("fp8"), &options, &Monitor::default())?;
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A model that is quantized already, or of a family that no FP8 format can store; a token outside the vocabulary; a window that is
/// longer than [`Config::longest_sequence`](super::Config::longest_sequence); an input that is infinite or NaN; a file that
/// cannot be read.
pub fn calibrate<W: AsRef<[i32]>>(
    folder: &Folder,
    windows: &[W],
    device: &Device,
    monitor: &Monitor,
) -> Result<BTreeMap<String, f32>> {
    super::plan::expect_quantizable(&folder.config).map_err(|problem| folder.problem(problem))?;
    let config = &folder.config;
    let longest = windows.iter().map(|window| window.as_ref().len()).max().unwrap_or_default();
    let most = config.longest_sequence();
    if longest == 0 || longest > most {
        return Err(Error::Option {
            part: "calibrate".into(),
            option: "windows",
            value: format!("up to {longest} tokens"),
            remedy: format!("expected 1 to {most}, the model's longest sequence"),
        });
    }
    let tokens: usize = windows.iter().map(|window| window.as_ref().len()).sum();
    monitor.start(tokens as u64 * config.num_hidden_layers as u64);
    let mut activations = embed(folder, windows, device)?;
    let mut options = config.gpt_options();
    options.layer.attention.max_seq_length = longest;
    options.layer.init = NOT_DRAWN;
    let sources = config.parameters_by_name();
    let (mut scales, mut table) = (BTreeMap::new(), None);
    for layer in 0..config.num_hidden_layers {
        let rng = &mut ChaCha8Rng::seed_from_u64(0);
        let mut block =
            TransformerLayer::with_rope_table(BLOCK, options.block(layer), &mut table, device, rng)?;
        let prefix = format!("blocks.{layer}.");
        let of_block = |name: &str| {
            let own = name.strip_prefix(BLOCK).and_then(|name| name.strip_prefix('.')).unwrap_or(name);
            sources.get(&format!("{prefix}{own}"))
        };
        for parameter in parameters_mut(&mut block) {
            parameter.set_trainable(false)?;
            let name = parameter.name().clone();
            let source = of_block(&name);
            let source =
                source.ok_or_else(|| folder.problem(format!("no tensor belongs to `{prefix}{name}`")))?;
            folder.read_into(parameter, source)?;
        }
        for (slot, amax) in run(folder, layer, &block, &mut activations, device, monitor)? {
            let module = slot.strip_suffix(".input").unwrap_or(&slot);
            let tensors = of_block(&format!("{module}.weight")).map_or(&[][..], |source| &source.tensors);
            let scale = if amax == 0.0 { 1.0 } else { amax / E4M3::MAX.to_f32() };
            scales.extend(tensors.iter().map(|tensor| (super::plan::module(tensor).to_owned(), scale)));
        }
    }
    Ok(scales)
}

/// Reads the rows of the embedding that the windows need.
fn embed<W: AsRef<[i32]>>(folder: &Folder, windows: &[W], device: &Device) -> Result<Vec<Tensor>> {
    let (vocabulary, hidden) = (folder.config.vocab_size, folder.config.hidden_size);
    let table = folder.config.parameters().into_iter().find(|source| source.parameter == "embedding.weight");
    let table = table.and_then(|source| source.tensors.into_iter().next());
    let table = table.ok_or_else(|| folder.problem("the model has no embedding".into()))?;
    let mut rows = BTreeMap::<i32, Vec<f32>>::new();
    let mut activations = Vec::new();
    for window in windows.iter().map(AsRef::as_ref) {
        let mut values = Vec::with_capacity(window.len() * hidden);
        for &token in window {
            if let Some(row) = rows.get(&token) {
                values.extend_from_slice(row);
                continue;
            }
            let Some(index) = usize::try_from(token).ok().filter(|&index| index < vocabulary) else {
                return Err(Error::Option {
                    part: "calibrate".into(),
                    option: "token",
                    value: token.to_string(),
                    remedy: format!("expected 0 to {}, the tokens of the vocabulary", vocabulary - 1),
                });
            };
            let row = folder.rows(folder.stored(&table), index..index + 1)?;
            values.extend_from_slice(&row);
            rows.insert(token, row);
        }
        activations.push(Tensor::from_vec(values, [1, window.len(), hidden], device)?);
    }
    Ok(activations)
}

/// Replaces the activations by the block's output, and returns the amax of the input of each of its layers.
fn run(
    folder: &Folder,
    layer: usize,
    block: &TransformerLayer,
    activations: &mut [Tensor],
    device: &Device,
    monitor: &Monitor,
) -> Result<Vec<(String, f32)>> {
    let mut scaling = Scaling::new(block, device)?;
    // Reports show the newest amax of a window of at least two.
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 2, ..Default::default() });
    let options = AutocastOptions { enabled: false, calibrating: true, ..Default::default() };
    let mut cx = scaling.scope(&recipe, &options)?;
    for x in activations.iter_mut() {
        *x = block.evaluate(&mut cx, x, &SequenceInfo::default(), None)?;
        // An amax ignores NaN.
        if !x.to_f32_vec()?.iter().all(|value| value.is_finite()) {
            return Err(folder
                .problem(format!("the output of block {layer} is infinite or NaN: nothing to calibrate")));
        }
        monitor.advance(x.shape().matrix()[0] as u64)?;
    }
    cx.commit()?;
    let mut amaxes = Vec::new();
    for report in scaling.slot_reports()? {
        let Some(slot) = report.name.strip_prefix(BLOCK).and_then(|name| name.strip_prefix('.')) else {
            continue;
        };
        if slot.ends_with(".input") {
            if report.non_finite > 0 {
                let text = format!("an input of `{slot}` in block {layer} is infinite: nothing to calibrate");
                return Err(folder.problem(text));
            }
            amaxes.push((slot.to_owned(), report.amax));
        }
    }
    Ok(amaxes)
}
