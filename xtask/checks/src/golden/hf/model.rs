//! Compares the results of one model with the expected values.

use super::check::{Check, Outcome, bytes, close, close_to, largest, text};
use fp8_hf::{Config, Folder, Fp8Weights, LoadOptions, ParameterSource};
use fp8_nn::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// One comparison; `Outcome::Nothing` if the files have nothing to compare with.
type CaseCheck = fn(&Case<'_>) -> Check<Outcome>;

/// The comparisons of each model.
pub(super) const CHECKS: [(&str, CaseCheck); 7] = [
    ("logits", |case| case.logits()),
    ("logits in chunks", |case| case.chunks()),
    ("loss and gradients", |case| case.gradients()),
    ("greedy tokens", |case| case.greedy()),
    ("config.v4.json", |case| case.older_spelling()),
    ("weights as codes, inputs in FP8", |case| case.codes()),
    ("saved again", |case| case.saved()),
];

/// The path of the loaded model.
const MODEL: &str = "model";

/// A model and the values that it must compute.
pub(super) struct Case<'a> {
    pub(super) path: &'a Path,
    pub(super) expected: &'a SafeTensors<'a>,
    pub(super) device: &'a Device,
}

impl Case<'_> {
    fn load(&self, trainable: bool) -> Check<(Folder, Gpt)> {
        let folder = Folder::open(self.path).map_err(text)?;
        let options = LoadOptions { path: MODEL.to_owned(), trainable, ..Default::default() };
        let model = folder.load(&options, self.device).map_err(text)?;
        Ok((folder, model))
    }

    fn logits(&self) -> Check<Outcome> {
        let (_, model) = self.load(false)?;
        let ids = self.ids("input_ids")?;
        close("logits", &self.floats("logits")?, &forward(&model, &ids)?, 1e-5)?;
        Ok(Outcome::Compared)
    }

    fn gradients(&self) -> Check<Outcome> {
        if !self.has("loss") {
            return Ok(Outcome::Nothing);
        }
        let expected = self.floats("loss")?;
        let (folder, mut model) = self.load(true)?;
        let all = self.ids("input_ids")?;
        let &[batch, seq] = &**all.shape() else { return Err("`input_ids` is not [batch, seq]".to_owned()) };
        let ids = all.to_vec::<i32>().map_err(text)?;
        let part = |first: usize| {
            let rows = ids.chunks(seq).flat_map(|row| row[first..first + seq - 1].to_vec()).collect();
            Tensor::from_vec::<i32>(rows, [batch, seq - 1], self.device).map_err(text)
        };
        let (inputs, targets) = (part(0)?, part(1)?);
        let mut scaling = Scaling::new(&model, self.device).map_err(text)?;
        let recipe = Recipe::off();
        let run = scaling.in_autocast(&recipe, |cx| model.loss(cx, &inputs, &targets));
        let (loss, saved) = run.map_err(text)?;
        close("loss", &expected, &[loss.item().map_err(text)?], 1e-6)?;
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).map_err(text)?;
        let sources = folder.config.parameters();
        let mut compared = 0;
        for parameter in parameters(&model) {
            let name = parameter.name().strip_prefix("model.").unwrap_or_default();
            let source = sources.iter().find(|source| source.parameter == name);
            let source = source.ok_or_else(|| format!("no tensor belongs to `{name}`"))?;
            compared += self.gradient(parameter, source)?;
        }
        match self.gradient_names().count() {
            present if present == compared => Ok(Outcome::Compared),
            present => Err(format!("{compared} of {present} gradients belong to parameters of the model")),
        }
    }

    /// Compares the gradient of a parameter with those of its tensors. Returns how many of them have one.
    fn gradient(&self, parameter: &Parameter, source: &ParameterSource) -> Check<usize> {
        let names: Vec<String> = source.tensors.iter().map(|tensor| format!("grad.{tensor}")).collect();
        if !names.iter().any(|name| self.has(name)) {
            return Ok(0);
        }
        let gradient = parameter.main_grad();
        let gradient = if source.is_transposed { ops::transpose(gradient) } else { Ok(gradient.clone()) };
        let values = gradient.and_then(|gradient| gradient.to_f32_vec()).map_err(text)?;
        let mut first = 0;
        for name in &names {
            let expected = self.floats(name)?;
            let last = first + expected.len();
            let rows = values.get(first..last).ok_or_else(|| format!("`{name}` has too many elements"))?;
            // A gradient that is zero contains rounding errors only: they are compared with the other gradients.
            let largest = match largest(&expected) {
                0.0 => self.largest_gradient()?,
                largest => largest,
            };
            close_to(name, &expected, rows, 2e-5, largest)?;
            first = last;
        }
        Ok(names.len())
    }

    fn gradient_names(&self) -> impl Iterator<Item = &str> {
        self.expected.names().into_iter().filter(|name| name.starts_with("grad."))
    }

    fn largest_gradient(&self) -> Check<f32> {
        let mut each = self.gradient_names().map(|name| self.floats(name));
        each.try_fold(0.0, |most: f32, found| Ok(most.max(largest(&found?))))
    }

    /// Feeds the ids in chunks through a cache, then one by one.
    fn chunks(&self) -> Check<Outcome> {
        if !self.has("chunks") {
            return Ok(Outcome::Nothing);
        }
        let chunks = self.ids("chunks")?;
        let (_, model) = self.load(false)?;
        let (ids, logits) = (self.ids("input_ids")?, self.floats("logits")?);
        let [rows, len] = matrix(&ids)?;
        let ids = ids.to_vec::<i32>().map_err(text)?;
        let vocab = logits.len() / ids.len();
        let sizes = chunks.to_vec::<i32>().map_err(text)?.into_iter().map(|size| size as usize);
        for sizes in [sizes.collect::<Vec<_>>(), vec![1; len]] {
            let mut scaling = Scaling::new(&model, self.device).map_err(text)?;
            let mut cx = scaling.eval(&Recipe::off()).map_err(text)?;
            let mut cache = model.kv_cache(rows, len, DType::F32).map_err(text)?;
            let mut first = 0;
            for size in sizes {
                let of_rows = |row: usize| row * len + first..row * len + first + size;
                let part = (0..rows).flat_map(|row| ids[of_rows(row)].to_vec()).collect();
                let part = Tensor::from_vec::<i32>(part, [rows, size], self.device).map_err(text)?;
                let found = model.extend_all(&mut cx, &part, &vec![size; rows], &mut cache).map_err(text)?;
                let found = found.to_f32_vec().map_err(text)?;
                for row in 0..rows {
                    let range = of_rows(row);
                    let expected = &logits[range.start * vocab..range.end * vocab];
                    let found = &found[row * size * vocab..(row + 1) * size * vocab];
                    let what = format!("logits of {size} ids at {first}, row {row}");
                    close_to(&what, expected, found, 1e-5, largest(&logits))?;
                }
                first += size;
            }
        }
        Ok(Outcome::Compared)
    }

    /// Continues the prompts through a cache.
    fn greedy(&self) -> Check<Outcome> {
        if !self.has("greedy.prompt") {
            return Ok(Outcome::Nothing);
        }
        let prompt = self.ids("greedy.prompt")?;
        let (_, model) = self.load(false)?;
        let (tokens, logits) = (self.ids("greedy.tokens")?, self.floats("greedy.logits")?);
        let ([rows, len], [_, steps]) = (matrix(&prompt)?, matrix(&tokens)?);
        let tokens = tokens.to_vec::<i32>().map_err(text)?;
        let vocab = logits.len() / tokens.len();
        let mut scaling = Scaling::new(&model, self.device).map_err(text)?;
        let mut cx = scaling.eval(&Recipe::off()).map_err(text)?;
        let mut cache = model.kv_cache(rows, len + steps, DType::F32).map_err(text)?;
        let (mut ids, mut count) = (prompt.clone(), len);
        for step in 0..steps {
            let found = model.extend(&mut cx, &ids, &vec![count; rows], &mut cache).map_err(text)?;
            let found = found.to_f32_vec().map_err(text)?;
            let expected = (0..rows).flat_map(|row| &logits[(row * steps + step) * vocab..][..vocab]);
            let expected: Vec<f32> = expected.copied().collect();
            close_to(&format!("logits of step {step}"), &expected, &found, 1e-5, largest(&logits))?;
            let next = (0..rows).map(|row| tokens[row * steps + step]).collect();
            (ids, count) = (Tensor::from_vec::<i32>(next, [rows, 1], self.device).map_err(text)?, 1);
        }
        let prompts = prompt.to_vec::<i32>().map_err(text)?;
        let prompts: Vec<&[i32]> = prompts.chunks(len).collect();
        let options = GenerateOptions { max_new_tokens: steps, ..Default::default() };
        let found = model.generate(&mut cx, &prompts, &options, |_, _| {}).map_err(text)?;
        let want: Vec<Vec<i32>> = tokens.chunks(steps).map(<[i32]>::to_vec).collect();
        if found == want {
            Ok(Outcome::Compared)
        } else {
            Err(format!("tokens {found:?}, expected {want:?}"))
        }
    }

    fn older_spelling(&self) -> Check<Outcome> {
        let older = self.path.join("config.v4.json");
        if !older.is_file() {
            return Ok(Outcome::Nothing);
        }
        let [new, old] =
            [&self.path.join("config.json"), &older].map(|path| Config::read(path).map_err(text));
        let [new, old] = [new?, old?].map(|config| format!("{:?}", config.gpt_options()));
        if new == old { Ok(Outcome::Compared) } else { Err(format!("{old}\nexpected {new}")) }
    }

    /// Keeps FP8 weights as codes, and quantizes inputs as the checkpoint says.
    fn codes(&self) -> Check<Outcome> {
        let folder = Folder::open(self.path).map_err(text)?;
        if folder.config.quantization.is_none() {
            return Ok(Outcome::Nothing);
        }
        let options = LoadOptions { path: MODEL.to_owned(), fp8: Fp8Weights::Keep, ..Default::default() };
        let model = folder.load(&options, self.device).map_err(text)?;
        let kept = parameters(&model).into_iter().filter(|parameter| parameter.fp8().is_some()).count();
        if kept != 4 * folder.config.num_hidden_layers {
            return Err(format!("{kept} parameters have codes, expected 4 in each layer"));
        }
        let ids = self.ids("input_ids")?;
        close("logits", &self.floats("logits")?, &forward(&model, &ids)?, 1e-5)?;
        let mut scaling = Scaling::new(&model, self.device).map_err(text)?;
        folder.load_input_scales(&model, &mut scaling).map_err(text)?;
        let mut cx = scaling.eval(&folder.recipe().map_err(text)?).map_err(text)?;
        let found = model.logits(&mut cx, &ids, &SequenceInfo::default()).map_err(text)?;
        let found = found.to_f32_vec().map_err(text)?;
        close("logits.activations", &self.floats("logits.activations")?, &found, 1e-5)?;
        Ok(Outcome::Compared)
    }

    /// Writes the model again and compares the bytes of each tensor.
    fn saved(&self) -> Check<Outcome> {
        let (folder, model) = self.load(false)?;
        let place = tempfile::tempdir().map_err(text)?;
        let out = place.path().join("model");
        folder.save_model(&out, &model, None).map_err(text)?;
        let again = Folder::open(&out).map_err(text)?;
        if !folder.weights.names().eq(again.weights.names()) {
            return Err("it has other tensors".to_owned());
        }
        for name in folder.weights.names() {
            if bytes(&folder, name)? != bytes(&again, name)? {
                return Err(format!("`{name}` has other bytes"));
            }
        }
        Ok(Outcome::Compared)
    }

    fn has(&self, name: &str) -> bool {
        self.expected.tensor(name).is_ok()
    }

    pub(super) fn ids(&self, name: &str) -> Check<Tensor> {
        let view = self.expected.tensor(name).map_err(text)?;
        if view.dtype() != Dtype::I64 {
            return Err(format!("`{name}` is {:?}, expected i64", view.dtype()));
        }
        let ids = view.data().as_chunks::<8>().0.iter();
        let ids = ids.map(|&bytes| i32::try_from(i64::from_le_bytes(bytes)).map_err(text));
        let shape =
            Shape::from_slice(view.shape()).ok_or_else(|| format!("`{name}` has too many dimensions"))?;
        Tensor::from_vec::<i32>(ids.collect::<Check<_>>()?, shape, self.device).map_err(text)
    }

    fn floats(&self, name: &str) -> Check<Vec<f32>> {
        let view = self.expected.tensor(name).map_err(text)?;
        if view.dtype() != Dtype::F32 {
            return Err(format!("`{name}` is {:?}, expected f32", view.dtype()));
        }
        Ok(view.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
    }
}

fn matrix(ids: &Tensor) -> Check<[usize; 2]> {
    match **ids.shape() {
        [rows, len] if rows > 0 => Ok([rows, len]),
        _ => Err(format!("prompts of shape {}: expected [rows, length]", ids.shape())),
    }
}

fn forward(model: &Gpt, ids: &Tensor) -> Check<Vec<f32>> {
    let mut scaling = Scaling::new(model, ids.device()).map_err(text)?;
    let mut cx = scaling.eval(&Recipe::off()).map_err(text)?;
    let logits = model.logits(&mut cx, ids, &SequenceInfo::default()).map_err(text)?;
    logits.to_f32_vec().map_err(text)
}
