//! Adapters that peft has written: logits, gradients, merged weights, and folders that are refused.

use super::super::hf::check::{Check, close, name, text};
use super::super::tally::Tally;
use super::steps::{self, Run};
use super::values::{floats, integers};
use crate::result::Result as TaskResult;
use fp8_hf::{Adapter, Config, Dtype, Folder, LoadOptions, Weights};
use fp8_nn::prelude::*;
use safetensors::SafeTensors;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The dtypes of merged weights, by the names in the files.
const KINDS: [(&str, DType, Dtype); 2] =
    [("f32", DType::F32, Dtype::F32), ("bf16", DType::BF16, Dtype::BF16)];

pub(super) fn compare(lora: &Path, case: &Path, device: &Device, tally: &mut Tally) {
    let record = |tally: &mut Tally, what: &str, result: Check| {
        tally.record(&format!("train/lora/{} {what}", name(case)), result);
    };
    let base = Run::read(case).and_then(|run| run.base.ok_or_else(|| "run.json has no `base`".to_owned()));
    let base = match base {
        Ok(base) => lora.join(base),
        Err(error) => return record(tally, "run.json", Err(error)),
    };
    if case.join("initial").is_dir() {
        record(tally, "run", steps::adapter(case, &base, device));
    }
    for kind in ["adapter", "adapter_bf16"] {
        record(tally, kind, logits(case, &base, kind, device));
    }
    record(tally, "gradients", gradients(case, &base, device));
    let others = other_kinds(case);
    if others > 0 {
        tally.leave_out("merged weights of other kinds than f32 and bf16", others);
    }
    for (kind, dtype, stored) in KINDS {
        match merged(case, &base, kind, dtype, stored) {
            Ok(false) => {}
            Ok(true) => record(tally, &format!("merged {kind}"), Ok(())),
            Err(error) => record(tally, &format!("merged {kind}"), Err(error)),
        }
    }
}

/// A base with an adapter, whose parameters are trainable.
fn adapted(case: &Path, base: &Path, kind: &str, device: &Device) -> Check<(Folder, Gpt)> {
    let folder = Folder::open(base).map_err(text)?;
    let mut model = folder.load(&LoadOptions::default(), device).map_err(text)?;
    let adapter = Adapter::open(&case.join(kind), &folder.config).map_err(text)?;
    adapter.add_to(&mut model, &folder.config, DType::F32).map_err(text)?;
    Ok((folder, model))
}

fn probe(expected: &SafeTensors<'_>, device: &Device) -> Check<Tensor> {
    let (ids, shape) = integers(expected, "probe_ids")?;
    let shape = Shape::from_slice(&shape).ok_or("`probe_ids` has too many dimensions")?;
    Tensor::from_vec(ids, shape, device).map_err(text)
}

fn logits(case: &Path, base: &Path, kind: &str, device: &Device) -> Check {
    let bytes = fs::read(case.join("expected.safetensors")).map_err(text)?;
    let expected = SafeTensors::deserialize(&bytes).map_err(text)?;
    let (_, model) = adapted(case, base, kind, device)?;
    let mut scaling = Scaling::new(&model, device).map_err(text)?;
    let mut cx = scaling.eval(&Recipe::off()).map_err(text)?;
    let (found, _) = model.forward(&mut cx, &probe(&expected, device)?).map_err(text)?;
    let wanted = floats(&expected, &format!("logits.{kind}"))?;
    close("logits", &wanted, &found.to_f32_vec().map_err(text)?, 1e-5)
}

/// Those of the mean loss over the probe, all learned, at the final adapter.
fn gradients(case: &Path, base: &Path, device: &Device) -> Check {
    let bytes = fs::read(case.join("expected.safetensors")).map_err(text)?;
    let expected = SafeTensors::deserialize(&bytes).map_err(text)?;
    let (folder, mut model) = adapted(case, base, "adapter", device)?;
    let all = probe(&expected, device)?;
    let &[batch, seq] = &**all.shape() else { return Err("`probe_ids` is not [batch, seq]".to_owned()) };
    let ids = all.to_vec::<i32>().map_err(text)?;
    let part = |first: usize| {
        let rows = ids.chunks(seq).flat_map(|row| row[first..first + seq - 1].to_vec()).collect();
        Tensor::from_vec::<i32>(rows, [batch, seq - 1], device).map_err(text)
    };
    let (inputs, targets) = (part(0)?, part(1)?);
    let mut scaling = Scaling::new(&model, device).map_err(text)?;
    let run = scaling.in_autocast(&Recipe::off(), |cx| model.loss(cx, &inputs, &targets));
    let (_, saved) = run.map_err(text)?;
    scaling.in_backward(|cx| model.loss_backward(cx, saved)).map_err(text)?;
    // Written as an adapter, the gradients have peft's names.
    for parameter in parameters_mut(&mut model).into_iter().filter(|p| p.is_trainable()) {
        let gradient = parameter.main_grad().clone();
        parameter.set(gradient).map_err(text)?;
    }
    let place = tempfile::tempdir().map_err(text)?;
    let out = place.path().join("gradients");
    fp8_hf::save_adapter(&out, &model, &folder.config, "").map_err(text)?;
    let bytes = fs::read(out.join("adapter_model.safetensors")).map_err(text)?;
    let found = SafeTensors::deserialize(&bytes).map_err(text)?;
    let mut compared = 0;
    for name in found.names() {
        close(name, &floats(&expected, &format!("grad.{name}"))?, &floats(&found, name)?, 2e-5)?;
        compared += 1;
    }
    let present = expected.names().iter().filter(|name| name.starts_with("grad.")).count();
    if compared == present {
        Ok(())
    } else {
        Err(format!("{compared} of {present} gradients are the adapter's"))
    }
}

/// Returns the number of kinds of merged weights that are not those that this library writes, such as the products rounded to bf16
/// before the sum of peft's `safe_merge`.
fn other_kinds(case: &Path) -> usize {
    let Ok(bytes) = fs::read(case.join("expected.safetensors")) else { return 0 };
    let Ok(expected) = SafeTensors::deserialize(&bytes) else { return 0 };
    let kinds =
        expected.names().into_iter().filter_map(|name| name.strip_prefix("merged.")?.split('.').next());
    let others = kinds.filter(|kind| KINDS.iter().all(|(known, ..)| known != kind));
    others.collect::<BTreeSet<_>>().len()
}

/// Returns false if no weights of this dtype are expected.
fn merged(case: &Path, base: &Path, kind: &str, dtype: DType, stored: Dtype) -> Check<bool> {
    let bytes = fs::read(case.join("expected.safetensors")).map_err(text)?;
    let expected = SafeTensors::deserialize(&bytes).map_err(text)?;
    let prefix = format!("merged.{kind}.");
    let names: Vec<&str> =
        expected.names().into_iter().filter_map(|name| name.strip_prefix(&*prefix)).collect();
    if names.is_empty() {
        return Ok(false);
    }
    let folder = Folder::open(base).map_err(text)?;
    let adapter = Adapter::open(&case.join("adapter"), &folder.config).map_err(text)?;
    let place = tempfile::tempdir().map_err(text)?;
    let out = place.path().join("merged");
    adapter.merge(&folder, &out, Some(dtype)).map_err(text)?;
    let weights = Weights::open(&out).map_err(text)?;
    for name in names {
        let wanted = expected.tensor(&format!("{prefix}{name}")).map_err(text)?;
        let mut found = vec![0; wanted.data().len()];
        if weights.info(name).is_none_or(|info| info.dtype != stored) {
            return Err(format!("{name} is not {stored:?}"));
        }
        weights.read(name, 0, &mut found).map_err(text)?;
        if stored == Dtype::F32 {
            let of = |bytes: &[u8]| -> Vec<f32> {
                bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
            };
            close(name, &of(wanted.data()), &of(&found), 1e-6)?;
            continue;
        }
        let pairs = found.chunks(2).zip(wanted.data().chunks(2));
        let differ = pairs.filter(|(a, b)| a != b).count();
        if differ * 1000 > found.len() / 2 {
            return Err(format!("{name}: {differ} of {} values differ", found.len() / 2));
        }
    }
    Ok(true)
}

/// A folder that is no adapter of Linears, and what an error about it must say.
#[derive(Deserialize)]
struct Refused {
    folder: String,
    base: String,
    names: Vec<String>,
}

pub(super) fn refused(lora: &Path, refuse: &Path, tally: &mut Tally) -> TaskResult {
    let cases: Vec<Refused> = serde_json::from_str(&fs::read_to_string(refuse.join("cases.json"))?)?;
    for Refused { folder, base, names } in cases {
        let check = || {
            let config = Config::read(&lora.join(&base).join("config.json")).map_err(text)?;
            match Adapter::open(&refuse.join(&folder), &config) {
                Ok(_) => Err("it was loaded".to_owned()),
                Err(error) => match names.iter().find(|name| !error.to_string().contains(*name)) {
                    None => Ok(()),
                    Some(name) => Err(format!("the error does not say {name}: {error}")),
                },
            }
        };
        tally.record(&format!("train/lora/refuse/{folder}"), check());
    }
    Ok(())
}
