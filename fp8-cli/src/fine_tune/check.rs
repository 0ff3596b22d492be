//! Options that do not belong together, and places where a run cannot be, refused before anything is read.

use crate::failure::Failure;
use crate::fine_tune::line::CONFIG;
use crate::fine_tune::options::{FineTune, ValidationName};
use crate::train::options::RecipeName;
use fp8_hf::{Folder, Scheme, TensorSpec};
use fp8_nn::prelude::DType;
use std::fs;
use std::path::{Path, PathBuf};

/// Refuses options that do not belong together.
pub(super) fn options(options: &FineTune) -> Result<(), Failure> {
    let refused = |text: &str| Err(Failure::input(text));
    let is_new = options.lora.is_some();
    let has_adapter = is_new || options.adapter.is_some();
    let of_new = [
        ("--lora-alpha", options.lora_alpha.is_some()),
        ("--lora-targets", !options.lora_targets.is_empty()),
        ("--lora-exclude", !options.lora_exclude.is_empty()),
        ("--lora-layers", !options.lora_layers.is_empty()),
        ("--rank-pattern", !options.rank_pattern.is_empty()),
        ("--alpha-pattern", !options.alpha_pattern.is_empty()),
        ("--rslora", options.rslora),
    ];
    if let Some((name, _)) = of_new.iter().find(|(_, is_given)| *is_given).filter(|_| !is_new) {
        return Err(Failure::input(match options.adapter {
            Some(_) => format!("{name} is for new adapters: that of --adapter has its own ranks and targets"),
            None => format!("{name} goes with --lora RANK, which makes an adapter"),
        }));
    }
    if options.export.is_some_and(|export| export.0.is_some()) && has_adapter {
        return refused(
            "--export writes a whole model, and the result of --lora is an adapter: fp8 merge --scheme adds it to the model in FP8",
        );
    }
    if options.fp8_weights && has_adapter {
        return refused(
            "--fp8-weights is for training the model: beside an adapter its weights are in FP8 anyway",
        );
    }
    if options.fp8_weights && options.layout.tp() > 1 {
        return refused(
            "--fp8-weights stores whole weights in FP8, and --tp gives each process a part of them: leave one of them out",
        );
    }
    if options.fp8_weights && options.recipe == Some(RecipeName::None) {
        return refused("--fp8-weights needs a recipe, and --recipe none has none: leave one of them out");
    }
    if has_adapter && options.params != DType::F32 {
        return refused(
            "--params is the type of a model that is trained; beside it, an adapter has --lora-dtype",
        );
    }
    if !has_adapter && options.lora_dtype != DType::F32 {
        return refused(
            "--lora-dtype is the type of an adapter: add --lora RANK, or give a trained model's type with --params",
        );
    }
    let trained = if has_adapter { options.lora_dtype } else { options.params };
    if options.stochastic_rounding && trained != DType::BF16 {
        return refused(
            "--stochastic-rounding is for parameters in bf16: add --params bf16, or --lora-dtype bf16 beside an adapter",
        );
    }
    if options.time && !options.dry_run {
        return refused("--time goes with --dry-run, of which it takes a step");
    }
    Ok(())
}

/// Refuses a folder for the run that has something in it, or is where another program would read what it writes.
pub(super) fn places(options: &FineTune, out: &Path) -> Result<(), Failure> {
    let inputs = options.base.iter().chain(&options.data).chain(&options.adapter);
    let validation = match &options.validation {
        Some(ValidationName::File(file)) => Some(file),
        _ => None,
    };
    let inputs: Vec<&PathBuf> = inputs.chain(validation).collect();
    let out_path = out.to_path_buf();
    if let Some(path) = inputs.iter().copied().chain([&out_path]).find(|path| path.to_str().is_none()) {
        return Err(Failure::input(format!(
            "{}: a run notes its paths as UTF-8, which this is not: rename it",
            path.display()
        )));
    }
    if options.resume.is_some() || options.dry_run {
        return Ok(());
    }
    let refused = |problem: &str| Err(Failure::input(format!("--out {}: {problem}", out.display())));
    if out.join(CONFIG).exists() {
        return refused("a run is there already: name a new folder, or go on with --resume");
    }
    if out.symlink_metadata().is_ok() && !out.is_dir() {
        return refused("it is a file: expected the name of a new folder");
    }
    if fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some()) {
        return refused("the folder has files: name a new one");
    }
    match out.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(parent) if !parent.is_dir() => {
            return refused("the folder around it does not exist: create that one first");
        }
        _ => {}
    }
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
    for input in inputs.into_iter().filter(|input| input.is_dir()) {
        if input.canonicalize().is_ok_and(|input| place.starts_with(input)) {
            return refused(&format!(
                "it would be inside {}, which is read: choose a place outside it",
                input.display()
            ));
        }
    }
    Ok(())
}

/// Refuses a scheme of `--export` that the model's matrices do not take, and one for a run that has its result.
pub(super) fn export(options: &FineTune, folder: &Folder) -> Result<(), Failure> {
    let Some(scheme) = options.export.and_then(|export| export.0) else { return Ok(()) };
    if scheme == Scheme::Nvfp4 {
        return Err(Failure::input(
            "--export nvfp4: it needs the largest inputs of each layer, which training does not record: use nvfp4a16, or --export none \
             and fp8 quantize with --calibrate",
        ));
    }
    let multiples = scheme.multiples();
    let is_ragged =
        |spec: &TensorSpec| spec.shape.iter().zip(multiples).any(|(side, of)| !side.is_multiple_of(of));
    let specs = folder.config.tensors();
    let ragged = specs.iter().filter(|spec| spec.kind.is_linear());
    let mut ragged = ragged.filter(|spec| is_ragged(spec));
    match ragged.next() {
        None => Ok(()),
        Some(spec) => Err(Failure::input(format!(
            "--export {scheme}: `{}` is {:?}, no multiple of {}: use channel or tensor, or --export none and fp8 quantize, which can \
             leave layers out",
            spec.name,
            &spec.shape[..],
            multiples[1]
        ))),
    }
}
