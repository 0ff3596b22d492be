//! The recipe under which a model computes as an FP8 checkpoint says.

use super::config::InputScales;
use super::folder::Folder;
use super::keep::{Form, recipe_of, recipe_with};
use crate::{Error, Result};
use fp8_kernels::fp8_format::Blocks;
use fp8_nn::Gpt;
use fp8_recipe::{AutocastOptions, DelayedScaling, Direction, QParams, Recipe, Scaling};
use std::collections::BTreeMap;

/// A pattern that matches the weights of all layers.
const WEIGHTS: &str = "*.weight";

impl Folder {
    /// Returns the recipe whose scopes read the weights of this folder as codes and quantize inputs as its
    /// `quantization_config` says, for evaluation with weights that [`Fp8Weights::Keep`](super::Fp8Weights::Keep) has loaded.
    ///
    /// | inputs of the checkpoint | recipe |
    /// |---|---|
    /// | in high precision, or a model without FP8 | [`Recipe::off`] |
    /// | static | [`DelayedScaling`], whose scales [`load_input_scales`](Self::load_input_scales) sets |
    /// | dynamic, one scale | [`CurrentScaling`](fp8_recipe::CurrentScaling) |
    /// | by token | [`CurrentScaling::rowwise`](fp8_recipe::CurrentScaling::rowwise) |
    /// | by 128 columns | [`BlockScaling`](fp8_recipe::BlockScaling) with f32 scales |
    /// | in NVFP4 | [`Nvfp4`](fp8_recipe::Nvfp4) with 1 × 16 weights |
    ///
    /// Weights have the recipe of their own granularity, by name where it differs from that of inputs. Layers whose weights are
    /// not kept as codes run in high precision: those that are not quantized, and those whose codes are E5M2 or stored as
    /// in × out. With `scale_fmt` "ue8m0", the scales of inputs are powers of two. An input x becomes E4M3(x · scale) with scale
    /// = 448 / amax; peers compute x / (amax / 448), which gives the neighbouring code for about one element in ten thousand. In NVFP4
    /// the factor of a whole input is computed from the input; the one of the files is not used.
    ///
    /// ```
    /// use fp8_hf::{self as hf, Config, Folder, Fp8Weights, LoadOptions, QuantizeOptions};
    /// use fp8_nn::prelude::*;
    /// let place = std::env::temp_dir().join(format!("fp8-recipe-of-folder-{}", std::process::id()));
    /// std::fs::create_dir(&place)?;
    /// let config = Config::from_json(
    ///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    ///         "num_attention_heads": 2}"#,
    /// )?;
    /// let device = Device::cpu();
    /// let model = Gpt::new("model", &config.gpt_options(), &device, &mut fp8_nn::rand::rng())?;
    /// hf::save_model(&place.join("model"), &config, &model, None)?;
    /// let original = Folder::open(&place.join("model"))?;
    /// hf::quantize(&original, &place.join("fp8"), &QuantizeOptions::default(), &Default::default())?;
    ///
    /// let folder = Folder::open(&place.join("fp8"))?;
    /// let model = folder.load(&LoadOptions { fp8: Fp8Weights::Keep, ..Default::default() }, &device)?;
    /// assert_eq!(parameters(&model).into_iter().filter(|parameter| parameter.fp8().is_some()).count(), 4);
    /// let (mut scaling, recipe) = (Scaling::new(&model, &device)?, folder.recipe()?);
    /// assert_eq!(recipe.to_string(), "rowwise");
    /// assert_eq!(folder.load_input_scales(&model, &mut scaling)?, 0); // inputs are dynamic
    /// let ids = Tensor::from_vec(vec![1i32, 2, 3], [1, 3], &device)?;
    /// let (logits, _) = model.forward(&mut scaling.eval(&recipe)?, &ids)?;
    /// assert!(logits.to_f32_vec()?.iter().all(|logit| logit.is_finite()));
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoGemm`](crate::Error::NoGemm) for a combination of scales that no GEMM multiplies, which the error
    /// names: the model then runs under [`Recipe::off`]; [`Error::Io`](crate::Error::Io) if a file cannot be read.
    pub fn recipe(&self) -> Result<Recipe> {
        let Some(quantization) = &self.config.quantization else { return Ok(Recipe::off()) };
        let none = |problem: String| Error::NoGemm { path: self.path.clone(), problem };
        let inputs: Form = match quantization.inputs {
            InputScales::None => return Ok(Recipe::off()),
            InputScales::Static | InputScales::Tensor => None,
            InputScales::Token => Some(Blocks::Row),
            InputScales::Group(128) => Some(Blocks::B1x128),
            InputScales::TensorGroup => Some(Blocks::B1x16),
            InputScales::Group(columns) => {
                return Err(none(format!(
                    "inputs are quantized by {columns} columns: GEMMs multiply groups of 128 alone"
                )));
            }
        };
        let weights = self.form()?.map_err(none)?;
        let is_block = |form: Form| matches!(form, Some(Blocks::B1x128 | Blocks::B128x128 | Blocks::B1x16));
        let of_blocks = [inputs, weights].map(is_block);
        if of_blocks[0] != of_blocks[1] {
            let text = "weights in blocks need inputs in groups of 128 columns, and vice versa";
            return Err(none(text.to_owned()));
        }
        let powers = if quantization.power_2_scales { QParams::POWER_2 } else { QParams::default() };
        let of_inputs = match (quantization.inputs, inputs) {
            (InputScales::Static, _) => DelayedScaling { amax_history_len: 1, ..Default::default() }.into(),
            (_, Some(Blocks::B1x128)) => recipe_with(weights, powers),
            (_, form) => recipe_with(form, powers),
        };
        let mut rules: Vec<(String, Recipe)> = Vec::new();
        for (layer, is_kept, _) in self.layers()? {
            if !is_kept {
                rules.push((format!("*.{layer}"), Recipe::off()));
            }
        }
        let is_same = inputs == weights && quantization.inputs != InputScales::Static;
        if !(is_same || of_blocks[0]) {
            rules.push((WEIGHTS.to_owned(), recipe_of(weights)));
        }
        Ok(if rules.is_empty() { of_inputs } else { Recipe::by_name(rules, of_inputs) })
    }

    /// Gives the inputs of a model's layers the static scales of this folder, for evaluation under [`recipe`](Self::recipe), and
    /// returns how many layers have one: 0 if inputs are dynamic. Layers that a model computes as one, such as q, k and v, have
    /// the largest of their scales. The state of `scaling` is replaced. The example of [`recipe`](Self::recipe) calls it.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) if a layer has no scale, and those of [`recipe`](Self::recipe) and
    /// [`Scaling::load_state`].
    pub fn load_input_scales(&self, model: &Gpt, scaling: &mut Scaling) -> Result<usize> {
        let is_static = |quantization: &super::Quantization| quantization.inputs == InputScales::Static;
        if !self.config.quantization.as_ref().is_some_and(is_static) {
            return Ok(0);
        }
        let mut scales = BTreeMap::new();
        for (layer, is_kept, scale) in self.layers()? {
            if is_kept {
                let missing = || self.problem(format!("inputs are static, but `{layer}` has no input scale"));
                scales.insert(format!("{}.{layer}.input", model.path()), scale.ok_or_else(missing)?);
            }
        }
        scaling.prepare(&self.recipe()?, &AutocastOptions::default())?;
        let mut state = scaling.state()?;
        for arena in state.arenas.iter_mut().filter(|arena| arena.direction == Direction::Forward) {
            arena.updates = arena.updates.max(1);
            arena.last_updates.resize(arena.slots.len(), 0);
            for (index, slot) in arena.slots.iter().enumerate() {
                if let Some(&scale) = scales.get(&**slot) {
                    arena.scale[index] = (1.0 / scale).clamp(f32::MIN_POSITIVE, f32::MAX);
                    arena.last_updates[index] = arena.updates;
                    if let Some(newest) = arena.amax_history.last_mut() {
                        newest[index] = 448.0 * scale;
                    }
                }
            }
        }
        scaling.load_state(&state)?;
        Ok(scales.len())
    }

    /// Returns the layers that FP8 checkpoints quantize, by their paths behind the model's: whether the weights of this one can
    /// be kept as codes, and the static scale of the input.
    fn layers(&self) -> Result<Vec<(String, bool, Option<f32>)>> {
        let linear: Vec<String> = self
            .config
            .tensors()
            .into_iter()
            .filter(|spec| spec.kind.is_linear())
            .map(|spec| spec.name)
            .collect();
        let mut layers = Vec::new();
        for source in self.config.parameters() {
            let Some(layer) = source.parameter.strip_suffix(".weight") else { continue };
            if !source.tensors.iter().any(|tensor| linear.contains(tensor)) {
                continue;
            }
            let mut scale = None::<f32>;
            for tensor in &source.tensors {
                let input = self.quantized.get(self.stored(tensor)).and_then(|own| own.input.as_deref());
                for own in input.map(|input| self.scales(input)).transpose()?.into_iter().flatten() {
                    scale = Some(scale.map_or(own, |most| most.max(own)));
                }
            }
            layers.push((layer.to_owned(), self.why_dequantized(&source)?.is_none(), scale));
        }
        Ok(layers)
    }
}
