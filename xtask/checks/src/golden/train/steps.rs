//! A run: its steps as the library makes them, beside those that PyTorch has made.

use super::super::hf::check::{Check, close, text};
use super::values::{floats, integers};
use fp8_hf::{Adapter, Config, Folder, LoadOptions};
use fp8_nn::fp8_kernels::ops::CrossEntropyOptions;
use fp8_nn::prelude::*;
use safetensors::SafeTensors;
use serde::Deserialize;
use std::fs;
use std::path::Path;

/// The id of positions that are not learned.
const IGNORED: i32 = -100;

/// `run.json`.
#[derive(Debug, Deserialize)]
pub(super) struct Run {
    pub(super) base: Option<String>,
    betas: [f32; 2],
    eps: f32,
    weight_decay: f32,
    max_grad_norm: Option<f32>,
    frozen: Vec<String>,
    rates: Vec<(String, f32)>,
    steps_done: Vec<Step>,
}

#[derive(Debug, Deserialize)]
struct Step {
    lr: f64,
    loss: f64,
    grad_norm: f64,
}

impl Run {
    pub(super) fn read(case: &Path) -> Check<Self> {
        let text_of = fs::read_to_string(case.join("run.json")).map_err(text)?;
        serde_json::from_str(&text_of).map_err(text)
    }

    fn optimizer(&self, groups: Vec<ParameterGroup>) -> Check<AdamW> {
        let [beta1, beta2] = self.betas;
        let (eps, weight_decay) = (self.eps, self.weight_decay);
        let options = AdamWOptions { beta1, beta2, eps, weight_decay, groups, ..Default::default() };
        AdamW::new(options).map_err(text)
    }

    /// Makes all steps with `model`, and compares losses and norms.
    fn train(&self, case: &Path, model: &mut Gpt, groups: Vec<ParameterGroup>) -> Check {
        let bytes = fs::read(case.join("data.safetensors")).map_err(text)?;
        let data = SafeTensors::deserialize(&bytes).map_err(text)?;
        let (ids, shape) = integers(&data, "input_ids")?;
        let (labels, _) = integers(&data, "labels")?;
        let &[steps, micro, batch, seq] = &*shape else { return Err(format!("`input_ids` is {shape:?}")) };
        if steps != self.steps_done.len() {
            return Err(format!("data of {steps} steps, and results of {}", self.steps_done.len()));
        }
        let device = parameters(model).first().map(|p| p.device().clone()).unwrap_or_else(Device::cpu);
        let mut scaling = Scaling::new(model, &device).map_err(text)?;
        let mut optimizer = self.optimizer(groups)?;
        // Position i is predicted by the logits at i − 1, and position 0 by none.
        let part = |all: &[i32], first: usize| -> Vec<i32> {
            all.chunks(seq).flat_map(|row| row[first..first + seq - 1].to_vec()).collect()
        };
        let of_step = micro * batch * seq;
        for (number, step) in self.steps_done.iter().enumerate() {
            let place = number * of_step..(number + 1) * of_step;
            let targets = part(&labels[place.clone()], 1);
            let learned = targets.iter().filter(|&&id| id != IGNORED).count();
            let options =
                CrossEntropyOptions { ignore_index: Some(IGNORED), normalizer: Some(learned as f32) };
            let mut sum = 0.0;
            let inputs = ids[place].chunks(batch * seq);
            for (ids, targets) in inputs.zip(targets.chunks(batch * (seq - 1))) {
                let tensor = |ids: Vec<i32>| Tensor::from_vec(ids, [batch, seq - 1], &device).map_err(text);
                let (ids, targets) = (tensor(part(ids, 0))?, tensor(targets.to_vec())?);
                let info = SequenceInfo::default();
                let loss = scaling.in_autocast(&Recipe::off(), |cx| {
                    model.loss_with_info(cx, &ids, &targets, options, &info)
                });
                let (loss, saved) = loss.map_err(text)?;
                sum += f64::from(loss.item().map_err(text)?);
                scaling.in_backward(|cx| model.loss_backward(cx, saved)).map_err(text)?;
            }
            let what = |name: &str| format!("step {number}: {name}");
            close(&what("loss"), &[step.loss as f32], &[sum as f32], 1e-5)?;
            let most = self.max_grad_norm.unwrap_or(f32::MAX);
            let norm = clip_grad_norm(model, most).map_err(text)?;
            let found = norm.item().map_err(text)?;
            close(&what("gradient norm"), &[step.grad_norm as f32], &[found], 3e-5)?;
            optimizer.step_with_norm(model, step.lr as f32, &norm).map_err(text)?;
            zero_grad(model).map_err(text)?;
        }
        Ok(())
    }
}

/// Trains a whole model.
pub(super) fn full(case: &Path, device: &Device) -> Check {
    let run = Run::read(case)?;
    let folder = Folder::open(case).map_err(text)?;
    let options = LoadOptions { trainable: true, ..Default::default() };
    let mut model = folder.load(&options, device).map_err(text)?;
    let mut groups = Vec::new();
    for source in folder.config.parameters() {
        let name = format!("model.{}", source.parameter);
        let all = |part: &String| source.tensors.iter().all(|tensor| tensor.contains(part));
        if let Some((_, lr_factor)) = run.rates.iter().find(|(part, _)| all(part)) {
            groups.push(ParameterGroup {
                pattern: name.clone(),
                lr_factor: *lr_factor,
                ..Default::default()
            });
        }
        if run.frozen.iter().any(all) {
            for parameter in parameters_mut(&mut model).into_iter().filter(|p| **p.name() == *name) {
                parameter.set_trainable(false).map_err(text)?;
            }
        }
    }
    run.train(case, &mut model, groups)?;
    let bytes = fs::read(case.join("expected.safetensors")).map_err(text)?;
    let expected = SafeTensors::deserialize(&bytes).map_err(text)?;
    compare_parameters(&folder.config, &model, &expected)
}

/// Compares the parameters at the end.
fn compare_parameters(config: &Config, model: &Gpt, expected: &SafeTensors<'_>) -> Check {
    let mut compared = 0;
    for source in config.parameters() {
        let name = format!("model.{}", source.parameter);
        let parameter = parameters(model).into_iter().find(|p| **p.name() == *name);
        let parameter = parameter.ok_or_else(|| format!("the model has no `{name}`"))?;
        let value = parameter.values(DType::F32).map_err(text)?;
        let value = if source.is_transposed { ops::transpose(&value).map_err(text)? } else { value };
        let values = value.to_vec::<f32>().map_err(text)?;
        let mut rest = &values[..];
        for tensor in &source.tensors {
            let wanted = floats(expected, &format!("final.{tensor}"))?;
            let (own, behind) =
                rest.split_at_checked(wanted.len()).ok_or_else(|| format!("`{tensor}` has another size"))?;
            // Adam turns rounding noise into steps where a gradient is nearly 0.
            let tolerance = if tensor.ends_with("k_proj.bias") { 3e-4 } else { 1e-4 };
            close(tensor, &wanted, own, tolerance)?;
            rest = behind;
            compared += 1;
        }
    }
    let present = expected.names().iter().filter(|name| name.starts_with("final.")).count();
    if compared == present {
        Ok(())
    } else {
        Err(format!("{compared} of {present} parameters are the model's"))
    }
}

/// Trains an adapter beside a frozen base, and compares it with the one at the end.
pub(super) fn adapter(case: &Path, base: &Path, device: &Device) -> Check {
    let run = Run::read(case)?;
    let folder = Folder::open(base).map_err(text)?;
    let mut model = folder.load(&LoadOptions::default(), device).map_err(text)?;
    let open = |name: &str| Adapter::open(&case.join(name), &folder.config).map_err(text);
    open("initial")?.add_to(&mut model, &folder.config, DType::F32).map_err(text)?;
    run.train(case, &mut model, Vec::new())?;
    let mut expected = folder.load(&LoadOptions::default(), device).map_err(text)?;
    open("adapter")?.add_to(&mut expected, &folder.config, DType::F32).map_err(text)?;
    for (found, wanted) in parameters(&model).into_iter().zip(parameters(&expected)) {
        let [found_values, wanted_values] = [found, wanted].map(|p| p.tensor().to_f32_vec().map_err(text));
        let (found_values, wanted_values) = (found_values?, wanted_values?);
        if found.is_trainable() {
            close(found.name(), &wanted_values, &found_values, 1e-4)?;
        } else if found_values != wanted_values {
            return Err(format!("`{}` of the frozen base has changed", found.name()));
        }
    }
    Ok(())
}
