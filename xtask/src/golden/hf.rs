//! Hugging Face models: every folder with `config.json` and `expected.safetensors`, FP8 checkpoints in `export/` included.
//!
//! A model is loaded in f32 and run in high precision; FP8 checkpoints also with their codes, and under their recipe. Errors are
//! relative to the largest magnitude of the expected tensor (of all gradients, for one that is zero): logits 1e-5, the loss 1e-6,
//! gradients 2e-5; greedy tokens are equal. Both spellings of the configuration describe one model.
//! Static scales of inputs are those that the library finds itself, within 1e-5. Every folder with `tokenizer.json` and
//! `expected_tokens.json` is compared string by string.

use super::Tally;
use crate::workspace::Result as TaskResult;
use fp8_nn::hf::{
    Config, Folder, Fp8Weights, LoadOptions, Monitor, ParameterSource, Tokenizer, Weights, calibrate,
};
use fp8_nn::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::fs;
use std::path::{Path, PathBuf};

type Check<T = ()> = Result<T, String>;

type CheckCase = fn(&Case<'_>) -> Check;

/// What is compared of each model.
const CHECKS: [(&str, CheckCase); 8] = [
    ("logits", |case| case.logits()),
    ("logits in chunks", |case| case.chunks()),
    ("loss and gradients", |case| case.gradients()),
    ("greedy tokens", |case| case.greedy()),
    ("config.v4.json", |case| case.older_spelling()),
    ("input scales", |case| case.input_scales()),
    ("weights as codes, inputs in FP8", |case| case.codes()),
    ("saved again", |case| case.saved()),
];

/// A folder has one of them.
const WEIGHTS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// The path of the loaded model.
const MODEL: &str = "model";

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    tokenizers(folder, tally)?;
    for (group, parent) in [("hf", folder.to_owned()), ("hf/export", folder.join("export"))] {
        if !parent.is_dir() {
            continue;
        }
        let mut folders: Vec<PathBuf> = fs::read_dir(&parent)?
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<Vec<_>>>()?
            .into_iter()
            .filter(|path| path.join("config.json").is_file() && path.join("expected.safetensors").is_file())
            // Of some exports, this repository has the expectations alone: tests make the weights.
            .filter(|path| WEIGHTS.iter().any(|name| path.join(name).is_file()))
            .collect();
        folders.sort();
        for path in folders {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let bytes = fs::read(path.join("expected.safetensors"))?;
            let expected = SafeTensors::deserialize(&bytes).map_err(|error| error.to_string());
            for (what, check) in CHECKS {
                let result = expected
                    .as_ref()
                    .map_err(Clone::clone)
                    .and_then(|expected| check(&Case { path: &path, expected, device }));
                tally.record(&format!("{group}/{name} {what}"), result);
            }
        }
    }
    Ok(())
}

/// Compares the tokens and texts of every tokenizer.
fn tokenizers(folder: &Path, tally: &mut Tally) -> TaskResult {
    let mut folders: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    folders
        .retain(|path| path.join("tokenizer.json").is_file() && path.join("expected_tokens.json").is_file());
    folders.sort();
    for path in folders {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        tally.record(&format!("hf/{name} tokens"), strings(&path));
    }
    Ok(())
}

fn strings(folder: &Path) -> Check {
    #[derive(serde::Deserialize)]
    struct Case {
        text: String,
        ids: Vec<i32>,
        decoded: String,
        decoded_without_special: String,
    }
    let tokenizer = Tokenizer::open(folder, i32::MAX as usize).map_err(text)?;
    let cases = fs::read(folder.join("expected_tokens.json")).map_err(text)?;
    let cases: Vec<Case> = serde_json::from_slice(&cases).map_err(text)?;
    for case in &cases {
        let ids = tokenizer.encode(&case.text, false).map_err(text)?;
        let all = tokenizer.decode_all(&case.ids).map_err(text)?;
        let without = tokenizer.decode(&case.ids).map_err(text)?;
        if ids != case.ids || all != case.decoded || without != case.decoded_without_special {
            return Err(format!(
                "{:?}: {ids:?}, {all:?} and {without:?}: expected {:?}, {:?} and {:?}",
                case.text, case.ids, case.decoded, case.decoded_without_special
            ));
        }
    }
    if cases.is_empty() { Err("no strings to compare".into()) } else { Ok(()) }
}

/// A model and what it must compute.
struct Case<'a> {
    path: &'a Path,
    expected: &'a SafeTensors<'a>,
    device: &'a Device,
}

impl Case<'_> {
    fn load(&self, trainable: bool) -> Check<(Folder, Gpt)> {
        let folder = Folder::open(self.path).map_err(text)?;
        let options = LoadOptions { path: MODEL.to_owned(), trainable, ..Default::default() };
        let model = folder.load(&options, self.device).map_err(text)?;
        Ok((folder, model))
    }

    fn logits(&self) -> Check {
        let (_, model) = self.load(false)?;
        let ids = self.ids("input_ids")?;
        close("logits", &self.floats("logits")?, &forward(&model, &ids)?, 1e-5)
    }

    /// Finds the scales of a checkpoint with static inputs from the model that it was made of.
    fn input_scales(&self) -> Check {
        let fp8 = Folder::open(self.path).map_err(text)?;
        let names = || fp8.weights.names().filter_map(|name| name.strip_suffix(".input_scale"));
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let (Some((model, _)), Some(parent)) = (name.split_once('-'), self.path.parent()) else {
            return Ok(());
        };
        let source = parent.with_file_name(model);
        if names().next().is_none() || !source.is_dir() {
            return Ok(());
        }
        // The ids of the source: those of a checkpoint are fewer.
        let bytes = fs::read(source.join("expected.safetensors")).map_err(text)?;
        let expected = SafeTensors::deserialize(&bytes).map_err(text)?;
        let ids = Case { path: &source, expected: &expected, device: self.device }.ids("input_ids")?;
        let windows = ids.to_vec::<i32>().map_err(text)?;
        let windows: Vec<&[i32]> = windows.chunks(ids.shape().last_dim()).collect();
        let original = Folder::open(&source).map_err(text)?;
        let scales = calibrate(&original, &windows, self.device, &Monitor::default()).map_err(text)?;
        for module in names() {
            let stored = fp8.values(&format!("{module}.input_scale")).map_err(text)?[0];
            let found = scales.get(module).ok_or_else(|| format!("{module} was not calibrated"))?;
            if (stored - found).abs() > 1e-5 * stored {
                return Err(format!("{module}: an input scale of {found}: expected {stored}"));
            }
        }
        Ok(())
    }

    fn gradients(&self) -> Check {
        let Ok(expected) = self.floats("loss") else { return Ok(()) };
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
        let run = scaling.autocast_with(&recipe, |cx| model.loss(cx, &inputs, &targets));
        let (loss, saved) = run.map_err(text)?;
        close("loss", &expected, &[loss.item().map_err(text)?], 1e-6)?;
        scaling.backward_with(|cx| model.loss_backward(cx, saved)).map_err(text)?;
        let sources = folder.config.parameters();
        for parameter in parameters(&model) {
            let name = parameter.name().strip_prefix("model.").unwrap_or_default();
            let source = sources.iter().find(|source| source.parameter == name);
            let source = source.ok_or_else(|| format!("nothing belongs to `{name}`"))?;
            self.gradient(parameter, source)?;
        }
        Ok(())
    }

    /// Compares the gradient of a parameter with those of its tensors, if there are some.
    fn gradient(&self, parameter: &Parameter, source: &ParameterSource) -> Check {
        let gradient = parameter.main_grad();
        let gradient = if source.is_transposed { ops::transpose(gradient) } else { Ok(gradient.clone()) };
        let values = gradient.and_then(|gradient| gradient.to_f32_vec()).map_err(text)?;
        let mut first = 0;
        for tensor in &source.tensors {
            let Ok(expected) = self.floats(&format!("grad.{tensor}")) else { return Ok(()) };
            let last = first + expected.len();
            let rows = values.get(first..last).ok_or_else(|| format!("`{tensor}` has too many elements"))?;
            // Of a gradient that vanishes, there is rounding alone: it is compared with the others.
            let largest = match largest(&expected) {
                0.0 => self.largest_gradient()?,
                largest => largest,
            };
            close_to(&format!("gradient of {tensor}"), &expected, rows, 2e-5, largest)?;
            first = last;
        }
        Ok(())
    }

    fn largest_gradient(&self) -> Check<f32> {
        let names = self.expected.names().into_iter().filter(|name| name.starts_with("grad."));
        names.map(|name| self.floats(name)).try_fold(0.0, |most: f32, found| Ok(most.max(largest(&found?))))
    }

    /// Feeds the ids in chunks through a cache, then one by one.
    fn chunks(&self) -> Check {
        let Ok(chunks) = self.ids("chunks") else { return Ok(()) };
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
        Ok(())
    }

    /// Continues the prompts through a cache.
    fn greedy(&self) -> Check {
        let Ok(prompt) = self.ids("greedy.prompt") else { return Ok(()) };
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
        if found == want { Ok(()) } else { Err(format!("tokens {found:?}, expected {want:?}")) }
    }

    fn older_spelling(&self) -> Check {
        let older = self.path.join("config.v4.json");
        if !older.is_file() {
            return Ok(());
        }
        let [new, old] =
            [&self.path.join("config.json"), &older].map(|path| Config::read(path).map_err(text));
        let [new, old] = [new?, old?].map(|config| format!("{:?}", config.gpt_options()));
        if new == old { Ok(()) } else { Err(format!("{old}\nexpected {new}")) }
    }

    /// Keeps FP8 weights as codes, and quantizes inputs as the checkpoint says.
    fn codes(&self) -> Check {
        let folder = Folder::open(self.path).map_err(text)?;
        if folder.config.quantization.is_none() {
            return Ok(());
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
        close("logits.activations", &self.floats("logits.activations")?, &found, 1e-5)
    }

    /// Writes the model again and compares the bytes of each tensor.
    fn saved(&self) -> Check {
        let (folder, model) = self.load(false)?;
        let place = tempfile::tempdir().map_err(text)?;
        let out = place.path().join("model");
        folder.save_model(&out, &model, None).map_err(text)?;
        let again = Folder::open(&out).map_err(text)?;
        if !folder.weights.names().eq(again.weights.names()) {
            return Err("it has other tensors".to_owned());
        }
        for name in folder.weights.names() {
            let bytes = |weights: &Weights| {
                let len = weights.info(name).map_or(0, |info| info.bytes as usize);
                let mut bytes = vec![0; len];
                weights.read(name, 0, &mut bytes).map(|()| bytes).map_err(text)
            };
            if bytes(&folder.weights)? != bytes(&again.weights)? {
                return Err(format!("`{name}` has other bytes"));
            }
        }
        Ok(())
    }

    fn ids(&self, name: &str) -> Check<Tensor> {
        let view = self.expected.tensor(name).map_err(text)?;
        if view.dtype() != Dtype::I64 {
            return Err(format!("`{name}` is {:?}, expected i64", view.dtype()));
        }
        let ids = view.data().as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes) as i32);
        let shape =
            Shape::from_slice(view.shape()).ok_or_else(|| format!("`{name}` has too many dimensions"))?;
        Tensor::from_vec::<i32>(ids.collect(), shape, self.device).map_err(text)
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

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |largest, value| largest.max(value.abs()))
}

/// Compares within `tolerance` of the largest expected magnitude.
fn close(what: &str, expected: &[f32], found: &[f32], tolerance: f64) -> Check {
    close_to(what, expected, found, tolerance, largest(expected))
}

/// Compares within `tolerance` of `largest`.
fn close_to(what: &str, expected: &[f32], found: &[f32], tolerance: f64, largest: f32) -> Check {
    if expected.len() != found.len() {
        return Err(format!("{what}: {} values, expected {}", found.len(), expected.len()));
    }
    let differences = expected.iter().zip(found).map(|(&e, &f)| (f64::from(e) - f64::from(f)).abs());
    let worst = differences.enumerate().map(|(i, d)| if d.is_nan() { (i, f64::INFINITY) } else { (i, d) });
    let (at, worst) = worst.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
    let relative = worst / f64::from(largest).max(f64::MIN_POSITIVE);
    if relative <= tolerance {
        return Ok(());
    }
    let (e, f) = (expected[at], found[at]);
    Err(format!("{what}[{at}] is {f}, expected {e}: {relative:.1e} of the largest, at most {tolerance:.0e}"))
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
