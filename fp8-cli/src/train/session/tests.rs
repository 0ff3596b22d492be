//! Short trainings of a small model.

use super::*;
use crate::train::options::DeviceName;
use crate::train::options::parse;
use std::fs;
use std::time::Duration;

fn session(recipe: &str) -> Session {
    let line = format!("--layers 1 --hidden 32 --heads 2 --seq 8 --batch 2 --recipe {recipe}");
    let settings = parse(line.split_whitespace()).unwrap().0.settings;
    Session::start(
        &settings,
        Place { device: DeviceName::Cpu, graph: false, sqnr: false, recompute: RecomputeLevel::None },
        &Ranks::default(),
        Run::Fp8,
    )
    .unwrap()
}

fn batch() -> Batch {
    let ids = (0..16).map(|i| i * 7 % 256).collect::<Vec<i32>>();
    Batch { rows: 2, len: 8, targets: ids.iter().map(|id| (id + 7) % 256).collect(), ids }
}

/// Puts `value` into the parameter's middle.
fn inject(session: &mut Session, name: &str, value: f32) {
    for parameter in parameters_mut(&mut session.model) {
        if &**parameter.name() == name {
            let (mut values, shape) =
                (parameter.tensor().to_vec::<f32>().unwrap(), *parameter.tensor().shape());
            let middle = values.len() / 2;
            values[middle] = value;
            parameter.set(Tensor::from_vec(values, shape, &Device::cpu()).unwrap()).unwrap();
        }
    }
}

#[test]
fn a_model_that_is_not_finite_is_not_saved_over_a_good_one() {
    for value in [f32::NAN, f32::INFINITY] {
        let folder = tempfile::tempdir().unwrap();
        let mut session = session("delayed");
        session.step(&batch(), 1e-3, Observe::Nothing).unwrap();
        session.save(folder.path(), &Metadata::new()).unwrap();
        let good = fs::read(checkpoint::path(folder.path())).unwrap();
        inject(&mut session, "gpt.blocks.0.mlp.fc1.weight", value);
        let refused = session.save(folder.path(), &Metadata::new()).unwrap_err();
        let expected =
            "nothing was saved; the checkpoint there is untouched: `gpt.blocks.0.mlp.fc1.weight` is";
        assert!(refused.starts_with(&format!("{expected} {value} at element 2048 of 4096")), "{refused}");
        assert!(good == fs::read(checkpoint::path(folder.path())).unwrap());
        // Nor where there is none yet.
        let other = folder.path().join("other");
        let refused = session.save(&other, &Metadata::new()).unwrap_err();
        assert!(refused.starts_with("nothing was saved: `gpt.blocks.0"), "{refused}");
        assert!(!other.exists());
    }
}

#[test]
fn a_llama_is_saved_with_its_configuration_and_exported() {
    use fp8_hf::{self as hf, ExportOptions, Folder, LoadOptions, QuantizeOptions, Scheme};
    let folder = tempfile::tempdir().unwrap();
    let (saved, out) = (folder.path().join("saved"), folder.path().join("out"));
    let mut llama = session("delayed --model llama");
    llama.step(&batch(), 1e-3, Observe::Nothing).unwrap();
    llama.save(&saved, &Metadata::new()).unwrap();
    let fp8 = QuantizeOptions { scheme: Scheme::Tensor, ..Default::default() };
    let options = ExportOptions { fp8: Some(fp8), static_inputs: true, ..Default::default() };
    hf::export(&saved, &out, &options, &Default::default()).unwrap();
    let exported = Folder::open(&out).unwrap();
    assert_eq!((exported.config.family.model_type, exported.config.intermediate_size), ("llama", 96));
    hf::export(&saved, &folder.path().join("high"), &ExportOptions::default(), &Default::default()).unwrap();
    let model = Folder::open(&folder.path().join("high")).unwrap();
    let model = model.load(&LoadOptions::default(), &Device::cpu()).unwrap();
    for (own, other) in parameters(&llama.model).into_iter().zip(parameters(&model)) {
        assert_eq!(
            own.tensor().to_f32_vec().unwrap(),
            other.tensor().to_f32_vec().unwrap(),
            "{}",
            own.name()
        );
    }
    // No family of Hugging Face has the other kind.
    session("delayed").save(&saved, &Metadata::new()).unwrap();
    let error = hf::export(&saved, &folder.path().join("gpt"), &options, &Default::default()).unwrap_err();
    assert!(error.to_string().contains("it does not say which model it is"), "{error}");
}

#[test]
fn a_training_in_f16_reports_its_loss_scale_and_resumes_with_it() {
    let line = "--layers 1 --hidden 32 --heads 2 --seq 8 --batch 2 --dtype f16";
    let settings = parse(line.split_whitespace()).unwrap().0.settings;
    let place = Place { device: DeviceName::Cpu, graph: false, sqnr: false, recompute: RecomputeLevel::None };
    let mut session = Session::start(&settings, place, &Ranks::default(), Run::Fp8).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let state = LossScaleState { scale: f32::MAX, growth_tracker: 0, skipped_steps: 0 };
    session.scaler.set_state(&state).unwrap();
    session.scale = state;
    let first = session.step(&batch(), 1e-3, Observe::Nothing).unwrap();
    assert_eq!((first.loss_scale, first.skipped), (Some(f32::MAX), true));
    session.scaler.set_state(&LossScaleState { scale: 1024.0, ..state }).unwrap();
    let second = session.step(&batch(), 1e-3, Observe::Nothing).unwrap();
    assert_eq!((second.loss, second.skipped), (first.loss, false), "the first changed no weight");
    session.save(folder.path(), &Metadata::new()).unwrap();
    let mut resumed = Session::resume(&settings, place, &Ranks::default(), Run::Fp8, folder.path()).unwrap();
    let [straight, resumed] =
        [&mut session, &mut resumed].map(|session| session.step(&batch(), 1e-3, Observe::Nothing).unwrap());
    assert_eq!((straight, straight.loss_scale, straight.skipped), (resumed, Some(1024.0), false));
}

#[test]
fn errors_name_the_options_of_this_program() {
    let error = KernelError::HostAllocation { op: "init", bytes: 99 };
    let expected = "99 bytes of host memory cannot be allocated: a smaller --hidden, --layers, --batch or --seq needs less";
    assert_eq!(sentence(error), expected);
    let error = KernelError::OutOfMemory { device: "cuda:0".into(), requested: 3, free: 1, total: 2 };
    assert!(sentence(error).starts_with("--device cuda:0: 3 bytes cannot be allocated, 1 of 2 are free"));
    let error = KernelError::DriverMissing { library: "x", searched: Vec::new() };
    let text = sentence(error);
    assert!(text.ends_with("use --device cpu"), "{text}");
}

#[test]
fn the_example_of_a_recipe_file_trains_and_resumes() {
    let line = "--layers 2 --hidden 32 --heads 2 --seq 8 --batch 2 --recipe recipe.toml";
    let mut settings = parse(line.split_whitespace()).unwrap().0.settings;
    settings.recipe_toml = include_str!("../recipe.toml").to_owned();
    let place = Place { device: DeviceName::Cpu, graph: false, sqnr: false, recompute: RecomputeLevel::None };
    let mut session = Session::start(&settings, place, &Ranks::default(), Run::Fp8).unwrap();
    // Of 24 products, those of the first block's qkv and proj run in high precision.
    assert_eq!(session.fp8_gemms_per_step(), 24 - 6);
    session.step(&batch(), 1e-3, Observe::Counts).unwrap();
    let slots = session.slots().unwrap();
    assert!(slots.iter().all(|slot| !slot.name.contains("blocks.0.attention")), "{slots:?}");
    assert!(slots.iter().any(|slot| slot.name.contains("blocks.1.attention")));
    let folder = tempfile::tempdir().unwrap();
    session.save(folder.path(), &Metadata::new()).unwrap();
    let mut resumed = Session::resume(&settings, place, &Ranks::default(), Run::Fp8, folder.path()).unwrap();
    assert_eq!(resumed.resume_note(), None);
    let [went_on, resumed] =
        [&mut session, &mut resumed].map(|session| session.step(&batch(), 1e-3, Observe::Nothing).unwrap());
    assert_eq!(went_on.loss, resumed.loss);

    settings.recipe_toml = settings.recipe_toml.replace("blocks.0", "blocks.9");
    let refused = Session::start(&settings, place, &Ranks::default(), Run::Fp8).unwrap_err();
    let expected = "recipe by name: pattern `*.blocks.9.attention.*` matches no slot: the nearest are";
    assert!(refused.starts_with(expected), "{refused}");
}

#[test]
fn emulated_products_are_counted_by_kind() {
    let (a, b) = (Emulation::FactorsAfter, Emulation::Rounded);
    assert_eq!(counts([a, b, b, a, b].into_iter()), [(a, 2), (b, 3)]);
    assert_eq!(session("mxfp8").emulated_gemms_per_step(), []); // the CPU has every product
}

#[test]
fn observed_steps_give_advice_and_measure_the_sqnr_when_asked() {
    let line = "--layers 1 --hidden 32 --heads 2 --seq 8 --batch 2 --margin 9";
    let settings = parse(line.split_whitespace()).unwrap().0.settings;
    let run = |sqnr| {
        let place = Place { device: DeviceName::Cpu, graph: false, sqnr, recompute: RecomputeLevel::None };
        let mut session = Session::start(&settings, place, &Ranks::default(), Run::Fp8).unwrap();
        let mut losses = Vec::new();
        for observe in [Observe::Counts, Observe::Nothing, Observe::Blocks] {
            losses.push(session.step(&batch(), 1e-3, observe).unwrap().loss);
            let slots = if observe != Observe::Nothing { session.slots().unwrap() } else { continue };
            assert!(slots.iter().all(|slot| slot.sqnr.is_some() == sqnr), "{slots:?}");
        }
        (losses, session.advice())
    };
    let (losses, advice) = run(false);
    assert_eq!(run(true).0, losses);
    assert!(advice[0].contains("left at least") && advice[0].contains("lower its margin"), "{advice:?}");
}

#[test]
fn a_tensor_in_nvfp4_is_measured_in_the_steps_that_ask_for_its_blocks() {
    let mut session = session("nvfp4");
    let mut slots = |observe| {
        session.step(&batch(), 1e-3, observe).unwrap();
        session.slots().unwrap()
    };
    let counted = slots(Observe::Counts);
    assert_eq!(counted.len(), 12, "three tensors of four Linears: {counted:?}");
    assert!(counted.iter().all(|slot| slot.is_nvfp4 && slot.nvfp4.is_none() && slot.sqnr.is_none()));
    let measured = slots(Observe::Blocks);
    assert!(
        measured
            .iter()
            .all(|slot| slot.nvfp4.is_some_and(|report| report.blocks > 0 && report.fp8_sqnr.is_some()))
    );
    assert!(
        measured.iter().all(|slot| slot.sqnr.is_some_and(|sqnr| (12.0..25.0).contains(&sqnr))),
        "{measured:?}"
    );
}

#[test]
fn gradients_that_are_not_finite_skip_a_step() {
    let mut session = session("current");
    let loss = session.step(&batch(), 1e-2, Observe::Nothing).unwrap().loss;
    let before = session.evaluate(&batch()).unwrap();
    assert!(before < loss);
    for parameter in parameters_mut(&mut session.model) {
        let shape = *parameter.tensor().shape();
        *parameter.main_grad_mut() = Tensor::full(f32::NAN, shape, DType::F32, &Device::cpu()).unwrap();
    }
    let result = session.step(&batch(), 1e-2, Observe::Nothing).unwrap();
    assert!(result.grad_norm.is_nan() && result.loss.is_finite());
    assert_eq!(session.evaluate(&batch()).unwrap(), before);
    assert_eq!(session.optimizer.skipped_steps().unwrap(), 1);
    assert!(session.step(&batch(), 1e-2, Observe::Nothing).unwrap().grad_norm.is_finite());
    assert!(session.evaluate(&batch()).unwrap() < before);
}

/// Losses and gradient norms of five steps, on as many ranks as there are threads.
fn losses(count: usize, options: &str) -> Vec<Vec<[f32; 2]>> {
    let line = format!("--layers 2 --hidden 32 --heads 2 --seq 8 --batch 4 {options}");
    let settings = parse(line.split_whitespace()).unwrap().0.settings;
    let run = if options.contains("none") { Run::HighPrecision } else { Run::Fp8 };
    let train = |ranks: Ranks| {
        let place =
            Place { device: DeviceName::Cpu, graph: false, sqnr: false, recompute: RecomputeLevel::None };
        let mut session = Session::start(&settings, place, &ranks, run).unwrap();
        let mut losses: Vec<[f32; 2]> = (0..5)
            .map(|step| {
                let ids = (0..32).map(|i| (i * 7 + step * 3) % 256).collect::<Vec<i32>>();
                let targets = ids.iter().map(|id| (id + 7) % 256).collect();
                let result =
                    session.step(&Batch { rows: 4, len: 8, ids, targets }, 1e-2, Observe::Nothing).unwrap();
                [result.loss, result.grad_norm]
            })
            .collect();
        // One row is no multiple of the ranks.
        losses.push([session.evaluate(&batch().rows_of(0..1)).unwrap(); 2]);
        losses
    };
    if count == 1 {
        return vec![train(Ranks::default())];
    }
    let groups = local("dp", count, Duration::from_secs(60)).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(|| train(Ranks::replicas(group)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_train_as_one_process_with_the_whole_batch() {
    for (options, tolerance) in [
        ("--recipe none", 1e-5),
        ("--recipe current", 3e-2),
        ("--recipe delayed", 3e-2),
        ("--recipe none --dtype f16", 5e-3),
    ] {
        let alone = losses(1, options).remove(0);
        for count in [2, 4] {
            let ranks = losses(count, options);
            assert!(
                ranks.iter().all(|losses| *losses == ranks[0]),
                "{options}: ranks report different losses"
            );
            for (found, expected) in ranks[0].iter().flatten().zip(alone.iter().flatten()) {
                assert!(
                    (found - expected).abs() <= tolerance * expected,
                    "{options}, {count}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn ranks_draw_dropout_masks_of_their_own_again_after_a_resume() {
    let settings = parse("--layers 1 --hidden 32 --heads 2 --seq 8 --batch 2 --dropout 0.5".split(' '))
        .unwrap()
        .0
        .settings;
    let place = Place { device: DeviceName::Cpu, graph: false, sqnr: false, recompute: RecomputeLevel::None };
    let folder = tempfile::tempdir().unwrap();
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let run = |group: std::sync::Arc<dyn ProcessGroup>| {
        let ranks = Ranks::replicas(group);
        let mut session = Session::start(&settings, place, &ranks, Run::Fp8).unwrap();
        session.step(&batch(), 1e-2, Observe::Nothing).unwrap();
        session.save(folder.path(), &Metadata::new()).unwrap();
        let mut resumed = Session::resume(&settings, place, &ranks, Run::Fp8, folder.path()).unwrap();
        let seeds = [&session, &resumed].map(|session| session.scaling.dropout_seed());
        let losses = [&mut session, &mut resumed]
            .map(|session| session.step(&batch(), 1e-2, Observe::Nothing).unwrap().loss);
        (seeds, losses)
    };
    let [first, second] = std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
        <[_; 2]>::try_from(threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>())
            .unwrap()
    });
    for (seeds, losses) in [&first, &second] {
        assert_eq!((seeds[0], losses[0]), (seeds[1], losses[1]));
    }
    assert_ne!(first.0, second.0);
}
