//! Models whose layers ranks share: folders in and out, training, checkpoints.

use crate::folders::{golden, quantize};
use fp8_hf::data::{IGNORED, Sequence};
use fp8_hf::{
    Adapter, Config, Error, Folder, Fp8Weights, LoadOptions, LoraTargets, Scheme, TrainPlan, TrainRanks,
    TrainRun, TrainRunOptions, Trainer, TrainerOptions, save_adapter, save_model,
};
use fp8_nn::fp8_dist::{Mesh, MeshOptions, local};
use fp8_nn::prelude::*;
use fp8_nn::rand::{SeedableRng, rngs::StdRng};
use fp8_nn::{TensorParallel, TensorParallelOptions};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// dp, tp, and whether tokens are shared.
type Layout = (usize, usize, bool);

const LAYOUTS: [Layout; 4] = [(1, 2, false), (1, 2, true), (1, 4, true), (2, 2, true)];
const SEQ: usize = 16;

/// Runs `f` on each rank and returns the results in rank order.
fn ranks<T: Send>((dp, tp, sequence_parallel): Layout, f: impl Fn(TrainRanks) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let worlds = local("world", dp * tp, Duration::from_secs(60)).unwrap().into_iter();
        let f = &f;
        let run = move |world| {
            let mesh = Mesh::new(world, &MeshOptions { dp, tp }).unwrap();
            let tensor_parallel = TensorParallelOptions { sequence_parallel, ..Default::default() };
            f(TrainRanks { control: mesh.world().clone(), mesh, tensor_parallel })
        };
        let threads: Vec<_> = worlds.map(|world| scope.spawn(move || run(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Models that store their parts in different ways: separate and fused q, k and v, biases, transposes, tied heads, learned positions. The
/// vocabulary is no multiple of the ranks.
const CONFIGS: [(&str, &str); 4] = [
    (
        "llama",
        r#"{"model_type": "llama", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32}"#,
    ),
    (
        "qwen2",
        r#"{"model_type": "qwen2", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": true, "max_position_embeddings": 32}"#,
    ),
    (
        "qwen3",
        r#"{"model_type": "qwen3", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 32}"#,
    ),
    (
        "gpt2",
        r#"{"model_type": "gpt2", "vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}"#,
    ),
];

/// Writes a model with random weights, its biases too.
fn write(place: &Path, (name, config): (&str, &str), dtype: Option<DType>) -> PathBuf {
    let config = Config::from_json(config).unwrap();
    let mut rng = StdRng::seed_from_u64(3);
    let mut model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut rng).unwrap();
    for (number, parameter) in parameters_mut(&mut model).into_iter().enumerate() {
        let add = |value: &f32, i: usize| value + ((i * 7 + number * 13) % 11) as f32 / 1000.0 - 0.005;
        let values = parameter.tensor().to_f32_vec().unwrap();
        let values: Vec<f32> = values.iter().enumerate().map(|(i, value)| add(value, i)).collect();
        parameter.set(Tensor::from_vec(values, *parameter.shape(), &Device::cpu()).unwrap()).unwrap();
    }
    let out = place.join(name);
    save_model(&out, &config, &model, dtype).unwrap();
    out
}

fn loads(ranks: &TrainRanks) -> LoadOptions {
    let tensor_parallel = TensorParallel::new(ranks.mesh.tp().clone(), &ranks.tensor_parallel).unwrap();
    LoadOptions { tensor_parallel, ..Default::default() }
}

/// Returns all files of a folder.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect();
    all.sort();
    all
}

#[test]
fn parts_of_folders_are_read_evaluated_and_written_back() {
    let place = tempfile::tempdir().unwrap();
    let ids: Vec<i32> = (0..32).map(|i| (i * 7 + 3) % 50).collect();
    let targets: Vec<i32> = (0..32).map(|i| (i * 5 + 1) % 50).collect();
    let [ids, targets] = [ids, targets].map(|ids| Tensor::from_vec(ids, [2, 16], &Device::cpu()).unwrap());
    let loss = |model: &Gpt| {
        let mut scaling = Scaling::new(model, &Device::cpu()).unwrap();
        let mut cx = scaling.eval(&Recipe::off()).unwrap();
        model.loss(&mut cx, &ids, &targets).unwrap().0.item().unwrap()
    };
    for (config, dtype) in CONFIGS.into_iter().zip([None, Some(DType::BF16), None, None]) {
        let path = write(place.path(), config, dtype);
        let folder = Folder::open(&path).unwrap();
        let alone = folder.load(&LoadOptions::default(), &Device::cpu()).unwrap();
        let (expected, all) = (loss(&alone), folder.weights.bytes_read());
        for layout in LAYOUTS {
            let out = |name: &str| place.path().join(format!("{}-{layout:?}-{name}", config.0));
            let found = ranks(layout, |ranks| {
                let folder = Folder::open(&path).unwrap();
                let model = folder.load(&loads(&ranks), &Device::cpu()).unwrap();
                let read = folder.weights.bytes_read();
                if ranks.mesh.dp().rank() == 0 {
                    save_model(&out("new"), &folder.config, &model, dtype).unwrap();
                    folder.save_model(&out("again"), &model, None).unwrap();
                }
                (loss(&model), read)
            });
            for (loss, read) in found {
                assert!(
                    (loss - expected).abs() <= 1e-5 * expected,
                    "{config:?} {layout:?}: {loss} {expected}"
                );
                assert!(read < all, "{config:?} {layout:?}: {read} of {all} bytes");
            }
            for name in ["new", "again"] {
                let written = crate::folders::tensors(&out(name));
                assert!(written == crate::folders::tensors(&path), "{config:?} {layout:?} {name}");
            }
            assert!(files(&out("again")) == files(&path), "{config:?} {layout:?}");
        }
    }
}

#[test]
fn rows_are_read_by_the_ranks_that_have_them() {
    let place = tempfile::tempdir().unwrap();
    let path = write(place.path(), CONFIGS[0], None);
    let read = ranks((1, 2, false), |ranks| {
        let folder = Folder::open(&path).unwrap();
        folder.load(&loads(&ranks), &Device::cpu()).unwrap();
        folder.weights.bytes_read()
    });
    let folder = Folder::open(&path).unwrap();
    let bytes = |keep: &dyn Fn(&str) -> bool| {
        let names = folder.weights.names().filter(|name| keep(name));
        names.map(|name| folder.weights.info(name).unwrap().bytes).sum::<u64>()
    };
    // Columns are cut from whole rows, and norms are read by all.
    let whole = bytes(&|name| name.contains("norm") || name.contains("o_proj") || name.contains("down_proj"));
    assert_eq!(read, [whole + (bytes(&|_| true) - whole) / 2; 2]);
}

#[test]
fn fp8_folders_are_dequantized_and_their_codes_are_refused() {
    let place = tempfile::tempdir().unwrap();
    for (name, scheme) in [("tensor", Scheme::Tensor), ("block", Scheme::Block128)] {
        let path = place.path().join(name);
        quantize(&golden().join("llama_bf16"), &path, scheme);
        let alone = Folder::open(&path).unwrap().load(&LoadOptions::default(), &Device::cpu()).unwrap();
        let alone: Vec<_> = parameters(&alone).iter().map(|own| own.tensor().to_f32_vec().unwrap()).collect();
        let out = place.path().join(format!("{name}-out"));
        ranks((1, 2, false), |ranks| {
            let folder = Folder::open(&path).unwrap();
            let model = folder.load(&loads(&ranks), &Device::cpu()).unwrap();
            for (own, whole) in parameters(&model).into_iter().zip(&alone) {
                assert!(own.gather_values(DType::F32).unwrap().to_f32_vec().unwrap() == *whole, "{own:?}");
            }
            // Nothing has changed: the codes are kept.
            folder.save_model(&out, &model, None).unwrap();
            let keep = LoadOptions { fp8: Fp8Weights::Keep, ..loads(&ranks) };
            let error = folder.load(&keep, &Device::cpu()).unwrap_err().to_string();
            let expected = "model: fp8 = Keep with tensor_parallel: the codes of a file are those of whole weights: use Fp8Weights::Dequantize";
            assert_eq!(error, expected);
        });
        assert!(files(&out) == files(&path), "{name}");
    }
}

#[test]
fn sizes_that_ranks_cannot_share_and_files_that_cannot_be_written_are_errors_of_all() {
    let place = tempfile::tempdir().unwrap();
    let path = write(place.path(), CONFIGS[0], None);
    for error in ranks((1, 3, false), |ranks| {
        Folder::open(&path).unwrap().load(&loads(&ranks), &Device::cpu()).unwrap_err().to_string()
    }) {
        assert!(error.contains("3 ranks of tensor parallelism cannot share it evenly"), "{error}");
    }
    let errors = ranks((1, 2, false), |ranks| {
        let folder = Folder::open(&path).unwrap();
        let model = folder.load(&loads(&ranks), &Device::cpu()).unwrap();
        let there = folder.save_model(&path, &model, None).unwrap_err();
        // The group goes on.
        folder.save_model(&place.path().join("out"), &model, None).unwrap();
        there
    });
    assert!(matches!(&errors[0], Error::File { problem, .. } if problem.contains("exists")), "{}", errors[0]);
    let expected = format!("another process has failed at writing {}, and says why", path.display());
    assert_eq!(errors[1].to_string(), expected);
}

/// Eight sequences with answers of different lengths.
fn data() -> Vec<Sequence> {
    (0..8)
        .map(|index| {
            let len = 5 + index * 5 % 11;
            let tokens: Vec<i32> = (0..=len).map(|i| (i * 7 + index * 13) as i32 % 50).collect();
            let (ids, mut targets) = (tokens[..len].to_vec(), tokens[1..].to_vec());
            targets[..index % 4].fill(IGNORED);
            Sequence { ids, targets, lengths: vec![2, len - 2] }
        })
        .collect()
}

fn trainer(path: &Path, recipe: &Recipe, is_lora: bool, ranks: Option<TrainRanks>) -> Trainer {
    let folder = Folder::open(path).unwrap();
    let targets = LoraTargets { rank: 4, ..Default::default() };
    let adapter = is_lora.then(|| Adapter::new(&folder.config, &targets, 7).unwrap());
    let options = TrainerOptions { recipe: recipe.clone(), seq: SEQ, micro_batch: 4, ..Default::default() };
    Trainer::new(folder, adapter, &options, &Device::cpu(), ranks).unwrap()
}

/// Losses of five steps and of an evaluation, and norms.
fn train(trainer: &mut Trainer) -> [Vec<f64>; 2] {
    let data = data();
    let mut read = |index: usize| Ok(data[index].clone());
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let step = trainer.step(data.len(), &mut read, 1e-3).unwrap();
        losses.push(step.loss);
        norms.push(step.grad_norm.into());
        assert_eq!(step.learned, data.iter().map(Sequence::learned).sum::<usize>() as u64);
    }
    losses.push(trainer.evaluate(data.len(), &mut read).unwrap().loss);
    [losses, norms]
}

/// The largest relative difference.
fn apart(found: &[f64], expected: &[f64]) -> f64 {
    let apart = |(found, expected): (&f64, &f64)| (found / expected - 1.0).abs();
    found.iter().zip(expected).map(apart).fold(0.0, f64::max)
}

#[test]
fn ranks_that_share_layers_train_as_one_process() {
    let place = tempfile::tempdir().unwrap();
    let delayed = Recipe::from(DelayedScaling::default());
    for config in [CONFIGS[0], CONFIGS[3]] {
        let path = write(place.path(), config, None);
        for (recipe, is_lora, [of_losses, of_norms]) in [
            (Recipe::off(), false, [1e-5, 1e-5]),
            (Recipe::off(), true, [1e-5, 1e-5]),
            // Ranks take the first scales from their parts, so that codes are rounded in other ways.
            (delayed.clone(), false, [2e-3, 3e-2]),
            (delayed.clone(), true, [2e-3, 3e-2]),
        ] {
            let expected = train(&mut trainer(&path, &recipe, is_lora, None));
            for layout in LAYOUTS {
                let what = format!("{} {is_lora} {layout:?}", config.0);
                let found = ranks(layout, |ranks| train(&mut trainer(&path, &recipe, is_lora, Some(ranks))));
                assert!(found.iter().all(|numbers| *numbers == found[0]), "{what}");
                let [losses, norms] = [0, 1].map(|index| apart(&found[0][index], &expected[index]));
                assert!(losses <= of_losses && norms <= of_norms, "{what}: {:?} {expected:?}", found[0]);
            }
        }
    }
}

#[test]
fn adapters_are_read_and_written_as_by_one_process() {
    let place = tempfile::tempdir().unwrap();
    for config in [CONFIGS[0], CONFIGS[1], CONFIGS[3]] {
        let path = write(place.path(), config, None);
        let folder = Folder::open(&path).unwrap();
        let targets = LoraTargets { rank: 4, ..Default::default() };
        let adapter = Adapter::new(&folder.config, &targets, 7).unwrap();
        let mut model = folder.load(&LoadOptions::default(), &Device::cpu()).unwrap();
        adapter.add_to(&mut model, &folder.config, DType::F32).unwrap();
        for parameter in
            parameters_mut(&mut model).into_iter().filter(|parameter| parameter.name().ends_with(".b"))
        {
            let values = (0..parameter.shape().numel()).map(|i| i as f32 / 100.0).collect::<Vec<_>>();
            parameter.set(Tensor::from_vec(values, *parameter.shape(), &Device::cpu()).unwrap()).unwrap();
        }
        let alone = place.path().join(format!("{}-adapter", config.0));
        save_adapter(&alone, &model, &folder.config, "base").unwrap();
        for layout in [(1, 2, false), (1, 4, true)] {
            let out = place.path().join(format!("{}-{layout:?}", config.0));
            ranks(layout, |ranks| {
                let folder = Folder::open(&path).unwrap();
                let mut model = folder.load(&loads(&ranks), &Device::cpu()).unwrap();
                let adapter = Adapter::open(&alone, &folder.config).unwrap();
                adapter.add_to(&mut model, &folder.config, DType::F32).unwrap();
                save_adapter(&out, &model, &folder.config, "base").unwrap();
            });
            assert!(files(&out) == files(&alone), "{config:?} {layout:?}");
        }
    }
}

fn run_options() -> TrainRunOptions {
    TrainRunOptions { batch: 4, epochs: 3, lr: 1e-3, eval_every: Some(2), ..Default::default() }
}

/// Goes on with a run until it is complete, or behind this step; `new` if it is to be started.
fn run(out: &Path, trainer: Trainer, new: bool, until: u64) -> Option<PathBuf> {
    let (data, validation) = (Box::new(data()), Some(Box::new(data()) as Box<dyn fp8_hf::SequenceSource>));
    let mut run = match new {
        true => TrainRun::start(out, trainer, data, validation, &run_options()).unwrap(),
        false => TrainRun::resume(out, trainer, data, validation, &run_options()).unwrap(),
    };
    assert_eq!(run.done() == 0, new);
    while run.done() < until {
        run.step().unwrap().unwrap();
    }
    match run.done() == run.total() {
        true => Some(run.finish(None).unwrap()),
        false => {
            run.save_checkpoint().unwrap();
            None
        }
    }
}

#[test]
fn runs_go_on_in_another_layout() {
    const ALONE: Layout = (1, 1, false);
    let place = tempfile::tempdir().unwrap();
    let path = write(place.path(), CONFIGS[0], None);
    let off = Recipe::off();
    for is_lora in [false, true] {
        let alone = place.path().join(format!("alone-{is_lora}"));
        let result = run(&alone, trainer(&path, &off, is_lora, None), true, 6).unwrap();
        let log = TrainRun::read_log(&alone).unwrap();
        let expected: Vec<f64> = log.iter().map(|record| record.loss).collect();
        assert!(log.iter().all(|record| record.layout.is_none()));
        for (first, second) in [((1, 2, true), ALONE), (ALONE, (2, 2, true)), ((1, 4, false), (1, 2, true))] {
            let out = place.path().join(format!("{is_lora}-{first:?}-{second:?}"));
            let on = |layout: Layout, new, until| match layout {
                ALONE => run(&out, trainer(&path, &off, is_lora, None), new, until),
                _ => ranks(layout, |ranks| run(&out, trainer(&path, &off, is_lora, Some(ranks)), new, until))
                    .remove(0),
            };
            assert_eq!(on(first, true, 3), None);
            let found = on(second, false, 6).unwrap();
            let log = TrainRun::read_log(&out).unwrap();
            let losses: Vec<f64> = log.iter().map(|record| record.loss).collect();
            let worst = apart(&losses, &expected);
            assert!(losses.len() == 6 && worst <= 1e-5, "{first:?} {second:?}: {losses:?} {expected:?}");
            let name = |layout: Layout| match layout {
                ALONE => None,
                (dp, tp, true) => Some(format!("dp {dp}, tp {tp}, sequence parallel")),
                (dp, tp, false) => Some(format!("dp {dp}, tp {tp}")),
            };
            let layouts: Vec<Option<String>> = log.into_iter().map(|record| record.layout).collect();
            assert_eq!((layouts[2].clone(), layouts[3].clone()), (name(first), name(second)));
            let file = if is_lora { "adapter_model.safetensors" } else { "model.safetensors" };
            for ((name, own), (_, whole)) in
                crate::folders::read(&found.join(file)).iter().zip(&crate::folders::read(&result.join(file)))
            {
                let values = |raw: &crate::folders::Raw| -> Vec<f64> {
                    raw.2.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect()
                };
                let distance = |(a, b): (&f64, &f64)| (a - b).abs();
                let worst = values(own).iter().zip(&values(whole)).map(distance).fold(0.0, f64::max);
                assert!(worst <= 1e-4, "{name}: {worst}");
            }
        }
    }
}

#[test]
fn plans_are_those_of_a_rank() {
    let place = tempfile::tempdir().unwrap();
    for config in [CONFIGS[0], CONFIGS[3]] {
        let path = write(place.path(), config, None);
        let plan = |tp, sequence_parallel| {
            let options = TrainerOptions { seq: SEQ, ..Default::default() };
            let parallel = TensorParallelOptions { sequence_parallel, ..Default::default() };
            let folder = Folder::open(&path).unwrap();
            TrainPlan::with_tensor_parallel(&folder, None, &options, tp, &parallel).unwrap()
        };
        let (one, two, shared) = (plan(1, false), plan(2, false), plan(2, true));
        assert_eq!((one.trained, one.frozen), (two.trained, two.frozen));
        assert!(shared.memory.saved < two.memory.saved && two.memory.saved < one.memory.saved);
        let found = ranks((1, 2, false), |ranks| {
            let trainer = trainer(&path, &Recipe::off(), false, Some(ranks));
            assert_eq!(trainer.num_parameters(), [two.trained, two.frozen]);
            let own = parameters(trainer.model()).into_iter().map(|parameter| parameter.shape().numel());
            own.sum::<usize>()
        });
        // Biases count whole.
        let most = found.iter().copied().max().unwrap();
        let planned = two.memory.gradients / 4;
        assert!(planned >= most && planned < most + most / 20, "{planned} {found:?}");
    }
}
