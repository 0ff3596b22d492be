//! Trainings: how steps are cut, what is saved, and what is refused.

use fp8_hf::data::{IGNORED, Sequence};
use fp8_hf::{
    Adapter, Error, Folder, Fp8Weights, LoraTargets, QuantizeOptions, Scheme, TrainPlan, TrainRanks,
    TrainRun, TrainRunOptions, TrainStep, Trainer, TrainerOptions, quantize,
};
use fp8_nn::fp8_dist::{Mesh, MeshOptions, local};
use fp8_nn::prelude::*;
use fp8_nn::{AnyOptimizerOptions, ParameterGroup, RecomputeLevel};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

const SEQ: usize = 16;

/// A model with biases of q, k and v, and one without.
fn models() -> [PathBuf; 2] {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/train/lora");
    [golden.join("base_qwen2_bf16"), golden.join("base_llama")]
}

fn open(path: &Path) -> Folder {
    Folder::open(path).unwrap()
}

/// Eight sequences with answers of different lengths; one has none.
fn ragged() -> Vec<Sequence> {
    let mut state = 1u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    (0..8)
        .map(|index| {
            let len = 3 + draw(SEQ as u64 - 3) as usize;
            let tokens: Vec<i32> = (0..=len).map(|_| draw(60) as i32).collect();
            let (ids, mut targets) = (tokens[..len].to_vec(), tokens[1..].to_vec());
            let masked = if index == 3 { len } else { draw(len as u64) as usize };
            targets[..masked].fill(IGNORED);
            let first = 1 + draw(len as u64 - 1) as usize;
            Sequence { ids, targets, lengths: vec![first, len - first] }
        })
        .collect()
}

fn options(micro_batch: usize) -> TrainerOptions {
    TrainerOptions { seq: SEQ, micro_batch, max_grad_norm: None, ..Default::default() }
}

/// A step with all sequences, and the gradients by name.
type Result1 = (TrainStep, Vec<(String, Vec<f32>)>);

fn step(trainer: &mut Trainer, data: &[Sequence]) -> Result1 {
    let step = trainer.step(data.len(), &mut |index| Ok(data[index].clone()), 1e-3).unwrap();
    let gradients = parameters(trainer.model()).into_iter();
    let gradients = gradients.map(|p| (p.name().to_string(), p.main_grad().to_f32_vec().unwrap()));
    (step, gradients.collect())
}

fn norm<'a>(values: impl Iterator<Item = &'a f32>) -> f64 {
    values.map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Compares a step with the same one in a single micro-batch.
fn expect_same(what: &str, (one, gradients): &Result1, (other, others): &Result1) {
    assert!((one.loss / other.loss - 1.0).abs() <= 1e-6, "{what}: loss {} and {}", one.loss, other.loss);
    assert_eq!((one.learned, one.tokens), (other.learned, other.tokens), "{what}");
    let largest = gradients.iter().flat_map(|(_, values)| values).fold(0f32, |most, x| most.max(x.abs()));
    let (mut difference, mut whole) = (0.0, 0.0);
    for ((name, one), (_, other)) in gradients.iter().zip(others) {
        let apart: Vec<f32> = one.iter().zip(other).map(|(a, b)| a - b).collect();
        let (distance, length) = (norm(apart.iter()), norm(one.iter()));
        difference += distance.powi(2);
        whole += length.powi(2);
        // A third of the biases are of keys, whose gradient is 0 in exact arithmetic; q and v have none of that kind.
        let is_near_zero = name.ends_with("qkv.bias");
        let bound = if is_near_zero {
            f64::from(largest) * 1e-6 * (one.len() as f64).sqrt() + 1e-5 * length
        } else {
            1e-5 * length
        };
        assert!(distance <= bound, "{what}: {name}: {distance} of {length}");
    }
    assert!(difference.sqrt() <= 2e-6 * whole.sqrt(), "{what}: {} of {}", difference.sqrt(), whole.sqrt());
}

#[test]
fn a_step_is_the_same_however_it_is_cut() {
    let data = ragged();
    for model in models() {
        let new = |micro_batch, ranks| {
            Trainer::new(open(&model), None, &options(micro_batch), &Device::cpu(), ranks).unwrap()
        };
        let whole = step(&mut new(8, None), &data);
        let learned: usize = data.iter().map(Sequence::learned).sum();
        assert_eq!(whole.0.learned, learned as u64);
        for micro_batch in [4, 1, 3] {
            let cut = step(&mut new(micro_batch, None), &data);
            expect_same(&format!("{micro_batch} at once"), &whole, &cut);
        }
        for (ranks, micro_batch) in [(2, 4), (2, 1), (3, 2)] {
            let groups = local("dp", ranks, Duration::from_secs(60)).unwrap();
            let results: Vec<Result1> = thread::scope(|scope| {
                let threads: Vec<_> = groups
                    .into_iter()
                    .map(|group| {
                        let (new, data) = (&new, &data);
                        scope.spawn(move || {
                            let mesh = Mesh::new(group, &MeshOptions { dp: ranks, tp: 1 }).unwrap();
                            let control = mesh.world().clone();
                            let ranks = TrainRanks { mesh, tensor_parallel: Default::default(), control };
                            step(&mut new(micro_batch, Some(ranks)), data)
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for result in &results {
                expect_same(&format!("{ranks} ranks, {micro_batch} at once"), &whole, result);
            }
            assert!(results.iter().all(|(step, _)| step.loss.to_bits() == results[0].0.loss.to_bits()));
        }
    }
}

#[test]
fn a_step_without_learned_tokens_changes_nothing() {
    let data = vec![ragged().swap_remove(3)];
    let mut trainer = Trainer::new(open(&models()[1]), None, &options(1), &Device::cpu(), None).unwrap();
    let before = parameters(trainer.model())[0].tensor().to_f32_vec().unwrap();
    let (step, _) = step(&mut trainer, &data);
    assert!(step.skipped && step.loss.is_nan() && step.learned == 0 && step.non_finite.is_none());
    assert_eq!(parameters(trainer.model())[0].tensor().to_f32_vec().unwrap(), before);
}

fn adapter(folder: &Folder) -> Option<Adapter> {
    let targets = LoraTargets { rank: 4, ..Default::default() };
    Some(Adapter::new(&folder.config, &targets, 7).unwrap())
}

fn recipe(name: &str) -> Recipe {
    if name == "off" { Recipe::off() } else { Recipe::from_name(name).unwrap() }
}

fn run_options() -> TrainRunOptions {
    TrainRunOptions { batch: 2, epochs: 2, lr: 5e-3, checkpoint_every: 3, ..Default::default() }
}

/// The losses of all steps behind a run's present one, and the values of its parameters at the end.
fn finish(mut run: TrainRun) -> (Vec<u64>, Vec<Vec<u32>>) {
    let mut losses = Vec::new();
    while let Some(record) = run.step().unwrap() {
        losses.push(record.loss.to_bits());
    }
    let values = parameters(run.trainer().model()).into_iter();
    let bits = |p: &Parameter| {
        p.values(DType::F32).unwrap().to_f32_vec().unwrap().iter().map(|x| x.to_bits()).collect()
    };
    (losses, values.map(bits).collect())
}

#[test]
fn a_resumed_run_goes_on_bit_for_bit() {
    let place = tempfile::tempdir().unwrap();
    for (index, (name, is_lora, fp8_weights)) in [
        ("off", false, false),
        ("delayed", false, false),
        ("delayed", false, true),
        ("off", true, false),
        ("delayed", true, false),
        ("block", true, false),
        ("mxfp8", true, false),
    ]
    .into_iter()
    .enumerate()
    {
        let options = TrainerOptions { recipe: recipe(name), fp8_weights, ..options(2) };
        let trainer = || {
            let folder = open(&models()[1]);
            let adapter = if is_lora { adapter(&folder) } else { None };
            Trainer::new(folder, adapter, &options, &Device::cpu(), None).unwrap()
        };
        let data = || Box::new(ragged());
        let out = |kind: &str| place.path().join(format!("{index}-{kind}"));
        let whole = TrainRun::start(&out("whole"), trainer(), data(), None, &run_options()).unwrap();
        let (losses, values) = finish(whole);
        let mut run = TrainRun::start(&out("cut"), trainer(), data(), None, &run_options()).unwrap();
        for _ in 0..5 {
            run.step().unwrap();
        }
        drop(run); // behind step 5; the checkpoint is of step 3
        let run = TrainRun::resume(&out("cut"), trainer(), data(), None, &run_options()).unwrap();
        assert_eq!(run.done(), 3);
        let (rest, end) = finish(run);
        assert_eq!(rest, losses[3..], "{name}, LoRA {is_lora}");
        assert!(end == values, "{name}, LoRA {is_lora}: the parameters differ");
        let log = TrainRun::read_log(&out("cut")).unwrap();
        assert_eq!(log.iter().map(|record| record.step).collect::<Vec<_>>(), (1..=8).collect::<Vec<_>>());
        assert_eq!(log.iter().map(|record| record.loss.to_bits()).collect::<Vec<_>>(), losses);
    }
}

#[test]
fn a_checkpoint_of_other_data_or_options_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("run");
    let trainer = || Trainer::new(open(&models()[1]), None, &options(2), &Device::cpu(), None).unwrap();
    let mut run = TrainRun::start(&out, trainer(), Box::new(ragged()), None, &run_options()).unwrap();
    run.step().unwrap();
    run.save_checkpoint().unwrap();
    drop(run);
    let resumed = |data: Vec<Sequence>, options: &TrainRunOptions| {
        TrainRun::resume(&out, trainer(), Box::new(data), None, options).unwrap_err().to_string()
    };
    let mut other = ragged();
    other[0].ids[0] += 1;
    assert!(resumed(other, &run_options()).contains("the data differ from those that it was trained on"));
    let validation: Option<Box<dyn fp8_hf::SequenceSource>> = Some(Box::new(ragged()));
    let error = TrainRun::resume(&out, trainer(), Box::new(ragged()), validation, &run_options());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the validation data differ from those that it was measured with"), "{error}");
    for (options, expected) in [
        (
            TrainRunOptions { batch: 4, ..run_options() },
            "the sequences differ: it was saved with 8 sequences, 2 in a step, seed 1337",
        ),
        (TrainRunOptions { lr: 1.0, ..run_options() }, "the learning rates differ"),
        (TrainRunOptions { epochs: 3, ..run_options() }, "the numbers of steps differ"),
    ] {
        let error = resumed(ragged(), &options);
        assert!(error.contains(expected), "{error}");
    }
    let again =
        TrainRun::start(&out, trainer(), Box::new(ragged()), None, &run_options()).unwrap_err().to_string();
    assert!(again.contains("a run is there already: name a new folder, or resume this one"), "{again}");
    let file = place.path().join("file");
    fs::write(&file, "").unwrap();
    let error =
        TrainRun::start(&file, trainer(), Box::new(ragged()), None, &run_options()).unwrap_err().to_string();
    assert!(error.contains("it is a file: expected the path of a new folder"), "{error}");
    // A folder that a killed process has left empty is no checkpoint.
    fs::create_dir(out.join("checkpoints/step-00000009")).unwrap();
    let run = TrainRun::resume(&out, trainer(), Box::new(ragged()), None, &run_options()).unwrap();
    assert_eq!(run.done(), 1);
    assert!(!out.join("checkpoints/step-00000009").exists());
    drop(run);
    // A renamed one is refused.
    fs::rename(out.join("checkpoints/step-00000001"), out.join("checkpoints/step-00000002")).unwrap();
    let error = resumed(ragged(), &run_options());
    assert!(error.contains("it is of step 1: expected 2, as its folder says"), "{error}");
}

#[test]
fn an_adapter_beside_another_model_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let trainer = |path: &Path| {
        let folder = open(path);
        let adapter = adapter(&folder);
        Trainer::new(folder, adapter, &options(1), &Device::cpu(), None).unwrap()
    };
    let mut one = trainer(&models()[1]);
    one.save_checkpoint(place.path(), &Default::default()).unwrap();
    assert_eq!(Trainer::base_of(place.path()).unwrap(), models()[1]);
    // The same model with one value changed.
    let folder = open(&models()[1]);
    let other = place.path().join("other");
    let mut values = folder.values("model.norm.weight").unwrap();
    values[0] += 1.0;
    let shape = [values.len()];
    let values = Tensor::from_vec(values, shape, &Device::cpu()).unwrap();
    folder.save(&other, &[("model.norm.weight".to_owned(), values)].into()).unwrap();
    let error = trainer(&other).load_checkpoint(place.path()).unwrap_err().to_string();
    assert!(error.contains("it was trained beside") && error.contains("expected the same ones"), "{error}");
}

#[test]
fn checkpoints_are_kept_as_asked() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("run");
    let trainer = Trainer::new(open(&models()[1]), None, &options(2), &Device::cpu(), None).unwrap();
    // A high rate: the validation loss is lowest at first.
    let options =
        TrainRunOptions { lr: 0.3, checkpoint_every: 1, keep: 2, eval_every: Some(1), ..run_options() };
    let validation: Option<Box<dyn fp8_hf::SequenceSource>> = Some(Box::new(ragged()));
    let mut run = TrainRun::start(&out, trainer, Box::new(ragged()), validation, &options).unwrap();
    let before = run.evaluate().unwrap().unwrap();
    assert_eq!(before.learned, ragged().iter().map(Sequence::learned).sum::<usize>() as u64);
    let mut losses = Vec::new();
    while let Some(record) = run.step().unwrap() {
        losses.push(record.validation_loss.unwrap());
    }
    let best = (0..losses.len()).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap() as u64 + 1;
    let mut kept: Vec<String> = fs::read_dir(out.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    kept.sort();
    let mut expected = vec![best, 7, 8];
    expected.sort_unstable();
    expected.dedup();
    assert_eq!(kept, expected.iter().map(|step| format!("step-{step:08}")).collect::<Vec<_>>());
}

#[test]
fn adapters_train_beside_every_kind_of_base() {
    let place = tempfile::tempdir().unwrap();
    let data = ragged();
    for recipe_name in ["off", "current", "delayed", "rowwise", "block", "mxfp8"] {
        let folder = open(&models()[1]);
        let adapter = adapter(&folder);
        let options = TrainerOptions { recipe: recipe(recipe_name), ..options(4) };
        let mut trainer = Trainer::new(folder, adapter, &options, &Device::cpu(), None).unwrap();
        let codes =
            |trainer: &Trainer| parameters(trainer.model()).iter().filter(|p| p.fp8().is_some()).count();
        assert_eq!(codes(&trainer) > 0, recipe_name != "off", "{recipe_name}");
        expect_learning(recipe_name, &mut trainer, &data);
        assert_eq!(codes(&trainer) > 0, recipe_name != "off", "{recipe_name}");
        trainer.save_result(&place.path().join(recipe_name), None).unwrap();
    }
    for scheme in [Scheme::Tensor, Scheme::Channel, Scheme::Block128, Scheme::Vllm] {
        let fp8 = place.path().join(format!("base-{}", scheme.name()));
        let quantized = QuantizeOptions { scheme, allow_ragged: true, ..Default::default() };
        quantize(&open(&models()[1]), &fp8, &quantized, &Default::default()).unwrap();
        let folder = open(&fp8);
        let adapter = adapter(&folder);
        let recipe = folder.recipe().unwrap();
        let options = TrainerOptions { recipe, fp8: Fp8Weights::Keep, ..options(4) };
        let mut trainer = Trainer::new(folder, adapter, &options, &Device::cpu(), None).unwrap();
        assert!(parameters(trainer.model()).iter().any(|p| p.fp8().is_some()), "{}", scheme.name());
        expect_learning(scheme.name(), &mut trainer, &data);
    }
}

fn expect_learning(what: &str, trainer: &mut Trainer, data: &[Sequence]) {
    let losses: Vec<f64> = (0..12)
        .map(|_| trainer.step(data.len(), &mut |index| Ok(data[index].clone()), 2e-2).unwrap().loss)
        .collect();
    assert!(losses[11] < losses[0] - 0.3, "{what}: {losses:?}");
}

#[test]
fn gradients_that_are_not_finite_end_a_run_with_the_name_of_the_tensor() {
    let place = tempfile::tempdir().unwrap();
    let trainer = Trainer::new(open(&models()[1]), None, &options(2), &Device::cpu(), None).unwrap();
    // Without clipping, the first steps make the weights so large that the next gradients overflow.
    let options =
        TrainRunOptions { lr: 1e30, most_non_finite: 3, checkpoint_every: 1, epochs: 20, ..run_options() };
    let mut run =
        TrainRun::start(&place.path().join("run"), trainer, Box::new(ragged()), None, &options).unwrap();
    let error = loop {
        match run.step() {
            Ok(record) => assert!(record.is_some(), "it has not diverged"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("3 steps in a row had gradients that are not finite, last of model."), "{error}");
    // What was saved is from before.
    let log = TrainRun::read_log(&place.path().join("run")).unwrap();
    let bad = log.iter().find(|record| record.skipped).unwrap();
    assert!(bad.non_finite.is_some());
    let steps: Vec<String> = fs::read_dir(place.path().join("run/checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(
        !steps.is_empty() && steps.iter().all(|step| **step < *format!("step-{:08}", bad.step)),
        "{steps:?}"
    );
    assert!(error.contains(&format!("the checkpoint of step {} is from before", bad.step - 1)), "{error}");
}

#[test]
fn a_model_that_is_not_finite_is_refused() {
    let place = tempfile::tempdir().unwrap();
    for value in [f32::NAN, f32::INFINITY] {
        let folder = open(&models()[1]);
        let name = "model.layers.0.mlp.down_proj.weight";
        let mut values = folder.values(name).unwrap();
        values[3] = value;
        let shape = Shape::from_slice(&folder.weights.info(name).unwrap().shape).unwrap();
        let values = Tensor::from_vec(values, shape, &Device::cpu()).unwrap();
        let broken = place.path().join(value.to_string());
        folder.save(&broken, &[(name.to_owned(), values)].into()).unwrap();
        for is_lora in [false, true] {
            let folder = open(&broken);
            let adapter = if is_lora { adapter(&folder) } else { None };
            let error =
                Trainer::new(folder, adapter, &options(2), &Device::cpu(), None).unwrap_err().to_string();
            let expected = format!("a value of {name} is {value}: a model to train has finite values");
            assert!(error.contains(&expected), "{error}");
        }
    }
}

#[test]
fn a_folder_has_one_run_at_a_time() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("run");
    let trainer = || Trainer::new(open(&models()[1]), None, &options(2), &Device::cpu(), None).unwrap();
    let mut run = TrainRun::start(&out, trainer(), Box::new(ragged()), None, &run_options()).unwrap();
    run.step().unwrap();
    run.save_checkpoint().unwrap();
    let error =
        TrainRun::resume(&out, trainer(), Box::new(ragged()), None, &run_options()).unwrap_err().to_string();
    assert!(error.ends_with("another process trains there: wait for it, or stop it"), "{error}");
    run.step().unwrap();
    run.save_checkpoint().unwrap();
    drop(run);
    // The newest one is damaged: an older one is used, and that is said.
    fs::write(out.join("checkpoints/step-00000002/checkpoint.safetensors"), "x").unwrap();
    let run = TrainRun::resume(&out, trainer(), Box::new(ragged()), None, &run_options()).unwrap();
    assert_eq!(run.done(), 1);
    assert!(
        run.resume_note()
            .unwrap()
            .ends_with("step-00000002 cannot be read, so that the run goes on from an older one")
    );
    drop(run);
    fs::remove_dir_all(out.join("checkpoints")).unwrap();
    let mut run = TrainRun::resume(&out, trainer(), Box::new(ragged()), None, &run_options()).unwrap();
    assert_eq!(
        run.resume_note(),
        Some("there is no checkpoint that can be read, so that the run begins anew")
    );
    while run.step().unwrap().is_some() {}
    // Something that is no result is not taken for one.
    fs::create_dir(out.join("final")).unwrap();
    fs::write(out.join("final/x"), "").unwrap();
    let error = run.finish(None).unwrap_err().to_string();
    assert!(
        error.contains("it is there already and is no result") && error.ends_with(": remove it"),
        "{error}"
    );
    fs::remove_file(out.join("final/x")).unwrap();
    run.finish(None).unwrap();
    assert!(Folder::open(&out.join("final")).is_ok());
}

#[test]
fn patterns_are_of_the_names_in_the_files() {
    let data = ragged();
    let group = |pattern: &str, lr_factor| ParameterGroup {
        pattern: pattern.to_owned(),
        lr_factor,
        ..Default::default()
    };
    let with = |frozen: &[&str], groups: Vec<ParameterGroup>| TrainerOptions {
        frozen: frozen.iter().map(|pattern| (*pattern).to_owned()).collect(),
        optimizer: AnyOptimizerOptions::AdamW(AdamWOptions { groups, ..Default::default() }),
        ..options(8)
    };
    let new =
        |options: &TrainerOptions| Trainer::new(open(&models()[1]), None, options, &Device::cpu(), None);
    let mut trainer = new(&with(&["embed_tokens", "model.layers.0.*"], vec![group("mlp", 0.0)])).unwrap();
    let values = |trainer: &Trainer| {
        let all = parameters(trainer.model()).into_iter();
        all.map(|p| (p.name().to_string(), p.tensor().to_f32_vec().unwrap())).collect::<Vec<_>>()
    };
    let before = values(&trainer);
    step(&mut trainer, &data);
    for ((name, old), (_, new)) in before.iter().zip(values(&trainer)) {
        let stays = name.contains("embedding") || name.contains("blocks.0.") || name.contains(".mlp.fc");
        assert_eq!(*old == new, stays, "{name}");
    }
    let [trained, frozen] = trainer.num_parameters();
    let plan =
        TrainPlan::new(trainer.folder(), None, &with(&["embed_tokens", "model.layers.0.*"], Vec::new()))
            .unwrap();
    assert_eq!((plan.trained, plan.frozen), (trained, frozen));
    // Frozen tensors keep their bytes.
    let place = tempfile::tempdir().unwrap();
    trainer.save_result(&place.path().join("out"), None).unwrap();
    let tuned = open(&place.path().join("out"));
    for name in ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"] {
        assert_eq!(tuned.values(name).unwrap(), trainer.folder().values(name).unwrap());
    }
    for (options, expected) in [
        (
            with(&["q_proj"], Vec::new()),
            "Trainer: frozen = \"q_proj\": it fits some of model.layers.0.self_attn.q_proj.weight, ",
        ),
        (
            with(&["nothing"], Vec::new()),
            "Trainer: frozen = \"nothing\": it fits no tensor of the model: expected Hugging Face's names",
        ),
        (with(&[], vec![group("v_proj", 1.0)]), "Trainer: groups = \"v_proj\": it fits some of"),
        (with(&["*"], Vec::new()), "Trainer: frozen = [\"*\"]: nothing is left to train"),
    ] {
        let error = new(&options).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn mistakes_are_named() {
    let new = |options: TrainerOptions| {
        Trainer::new(open(&models()[1]), None, &options, &Device::cpu(), None).unwrap_err().to_string()
    };
    let plain = || options(1);
    for (options, expected) in [
        (TrainerOptions { seq: 0, ..plain() }, "Trainer: seq = 0: expected at least 1"),
        (TrainerOptions { micro_batch: 0, ..plain() }, "Trainer: micro_batch = 0: expected at least 1"),
        (
            TrainerOptions { micro_batch: 1 << 30, ..plain() },
            "Trainer: micro_batch = 1073741824: expected fewer than 2³¹ tokens at once",
        ),
        (
            TrainerOptions { compute_dtype: DType::I32, ..plain() },
            "Trainer: compute_dtype = i32: expected f32, bf16 or f16",
        ),
        (
            TrainerOptions { max_grad_norm: Some(0.0), ..plain() },
            "Trainer: max_grad_norm = 0: expected greater than 0, or none",
        ),
        (
            TrainerOptions { graph: true, ..plain() },
            "Trainer: graph = true: a CPU does not record steps: expected a GPU",
        ),
        (TrainerOptions { seq: 1 << 20, ..plain() }, "Trainer: seq = 1048576: expected at most "),
    ] {
        let error = new(options);
        assert!(error.starts_with(expected), "{error}");
    }
    let mut trainer = Trainer::new(open(&models()[1]), None, &options(1), &Device::cpu(), None).unwrap();
    let sequence = Sequence { ids: vec![1, 2, 3], targets: vec![2, 3, 4], lengths: vec![3] };
    let vocabulary = open(&models()[1]).config.vocab_size;
    for (sequence, expected) in [
        (
            Sequence { ids: vec![1; 17], targets: vec![1; 17], lengths: vec![17] },
            "Sequence: ids = 17 tokens: expected at most 16",
        ),
        (
            Sequence { targets: vec![1], ..sequence.clone() },
            "Sequence: targets = 1 tokens: expected 3, one for each of `ids`",
        ),
        (
            Sequence { lengths: vec![2, 2], ..sequence.clone() },
            "Sequence: lengths = [2, 2]: expected a sum of at most 3",
        ),
        (Sequence { lengths: vec![usize::MAX, 2], ..sequence.clone() }, "Sequence: lengths = "),
        (Sequence { ids: vec![-1, 2, 3], ..sequence.clone() }, "Sequence: ids = -1: expected 0 to "),
        (Sequence { targets: vec![2, 3, vocabulary as i32], ..sequence.clone() }, "Sequence: targets = "),
        (Sequence { lengths: vec![2], ..sequence }, "Sequence: lengths = [2]: padding learns nothing"),
    ] {
        let error = trainer.step(1, &mut |_| Ok(sequence.clone()), 1e-3).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let read = |_: usize| Err(Error::NotFound { path: "data".into() });
    assert_eq!(trainer.step(1, &mut { read }, 1e-3).unwrap_err().to_string(), "data: not found");
    // A vector knows how long it is.
    let error = fp8_hf::SequenceSource::read(&ragged(), 8).unwrap_err().to_string();
    assert_eq!(error, "SequenceSource: index = 8: expected less than 8");
}

#[test]
fn a_plan_tells_what_a_training_takes() {
    let data = ragged();
    for (is_lora, name, recompute) in [
        (false, "off", RecomputeLevel::None),
        (false, "current", RecomputeLevel::None),
        (false, "nvfp4", RecomputeLevel::None),
        (true, "off", RecomputeLevel::None),
        (true, "current", RecomputeLevel::None),
        (true, "nvfp4", RecomputeLevel::None),
        (false, "off", RecomputeLevel::Block),
    ] {
        let folder = open(&models()[1]);
        let adapter = if is_lora { adapter(&folder) } else { None };
        let options = TrainerOptions { recipe: recipe(name), recompute, ..options(1) };
        let plan = TrainPlan::new(&folder, adapter.as_ref(), &options).unwrap();
        let mut trainer = Trainer::new(folder, adapter, &options, &Device::cpu(), None).unwrap();
        step(&mut trainer, &data);
        assert_eq!([plan.trained, plan.frozen], trainer.num_parameters());
        let moments = plan.memory.optimizer;
        assert_eq!(moments, 8 * plan.trained);
        let stored: usize = parameters(trainer.model())
            .iter()
            .map(|p| {
                let bytes = |codes: &Fp8Tensor| codes.rowwise().map_or(0, Tensor::numel);
                p.fp8().map_or_else(|| p.shape().numel() * p.dtype().size(), bytes)
            })
            .sum();
        assert!(plan.memory.parameters >= stored, "{name}: {} of {stored}", plan.memory.parameters);
        assert!(
            plan.memory.parameters <= stored + stored / 2,
            "{name}: {} of {stored}",
            plan.memory.parameters
        );
    }
}
