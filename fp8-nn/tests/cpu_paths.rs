//! A training gives the same bits with each set of instructions that the CPU backend can use, and with any number of threads.
//!
//! `FP8_CPU_PATH` is read once a process, so each path trains in a process of its own: this program, started again. A path
//! that this CPU lacks is ignored with that reason, and counted.
#![expect(clippy::print_stdout, reason = "what a training computed, for the process that compares")]

use fp8_nn::fp8_kernels::CpuPath;
use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

/// Its presence makes a process train, and print the bits.
const TRAIN: &str = "FP8_TEST_TRAIN";
const STEPS: usize = 6;

fn main() -> ExitCode {
    if std::env::var_os(TRAIN).is_some() {
        return match train_all() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let paths = ["scalar", "neon", "avx2", "avx512", "avx512-bf16"];
    let mut trials: Vec<_> = paths
        .into_iter()
        .map(|name| {
            let has_it = CpuPath::available().any(|path| path.name() == name);
            let reason = if has_it { String::new() } else { format!(" (this CPU has no {name})") };
            let trial = Trial::test(format!("path::{name}{reason}"), move || {
                same_as_scalar(&[("FP8_CPU_PATH", name)])
            });
            trial.with_ignored_flag(!has_it)
        })
        .collect();
    trials.extend([1, 2, 3].map(|threads| {
        Trial::test(format!("threads::{threads}"), move || {
            same_as_scalar(&[("RAYON_NUM_THREADS", &threads.to_string())])
        })
    }));
    trials.push(Trial::test("an_unknown_path_is_an_error_that_names_those_there_are", unknown));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn same_as_scalar(variables: &[(&str, &str)]) -> Result<(), Failed> {
    static SCALAR: OnceLock<Result<String, String>> = OnceLock::new();
    let scalar = || output(&[("FP8_CPU_PATH", "scalar"), ("RAYON_NUM_THREADS", "1")]);
    let want =
        SCALAR.get_or_init(|| scalar().map_err(|failed| failed.message().unwrap_or("no output").to_owned()));
    let (want, got) = (want.as_ref()?, output(variables)?);
    if want.lines().count() != 3 * STEPS {
        return Err(format!("{} lines of {}", want.lines().count(), 3 * STEPS).into());
    }
    match want.lines().zip(got.lines()).find(|(want, got)| want != got) {
        None if want.len() == got.len() => Ok(()),
        None => Err("fewer steps".into()),
        Some((want, got)) => Err(format!("{variables:?}: {got}, and with one scalar thread {want}").into()),
    }
}

fn unknown() -> Result<(), Failed> {
    let error =
        output(&[("FP8_CPU_PATH", "avx3")]).err().and_then(|failed| failed.message().map(str::to_owned));
    let names: Vec<_> = CpuPath::available().map(CpuPath::name).collect();
    let want = format!("FP8_CPU_PATH=avx3: this CPU has {}\n", names.join(", "));
    if error.as_ref() == Some(&want) { Ok(()) } else { Err(format!("{error:?}, not {want:?}").into()) }
}

/// Returns the text that this program prints when it trains with the environment `variables`.
fn output(variables: &[(&str, &str)]) -> Result<String, Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    let output =
        command.env_remove("FP8_CPU_PATH").env(TRAIN, "1").envs(variables.iter().copied()).output()?;
    let text = String::from_utf8(output.stdout)?;
    if output.status.success() { Ok(text) } else { Err(text.into()) }
}

/// Trains in f32, in bf16 with FP8, and in f32 with FP8; prints the bits of each step.
fn train_all() -> Result<()> {
    let fp8 = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    for (dtype, recipe) in [(DType::F32, None), (DType::BF16, Some(&fp8)), (DType::F32, Some(&fp8))] {
        train(dtype, recipe)?;
    }
    Ok(())
}

fn train(params_dtype: DType, recipe: Option<&Recipe>) -> Result<()> {
    const SEQ: usize = 24;
    let device = Device::cpu();
    let options = GptOptions {
        vocab_size: 50,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 48,
            ffn_hidden_size: 192,
            attention: AttentionOptions { num_attention_heads: 3, max_seq_length: SEQ, ..Default::default() },
            params_dtype,
            ..Default::default()
        },
        ..Default::default()
    };
    let mut rng = StdRng::seed_from_u64(1);
    let mut model = Gpt::new("gpt", &options, &device, &mut rng)?;
    let mut scaling = Scaling::new(&model, &device)?;
    let mut optimizer = AdamW::new(AdamWOptions::default())?;
    let any = Recipe::from(DelayedScaling::default());
    let scope = AutocastOptions { enabled: recipe.is_some(), ..Default::default() };
    for step in 0..STEPS {
        let mut ids = || {
            let ids = (0..3 * SEQ).map(|_| rng.random_range(0..50i32)).collect();
            Tensor::from_vec(ids, [3, SEQ], &device)
        };
        let (ids, targets) = (ids()?, ids()?);
        let mut cx = scaling.scope(recipe.unwrap_or(&any), &scope)?;
        let (loss, saved) = model.loss(&mut cx, &ids, &targets)?;
        cx.commit()?;
        let mut cx = scaling.backward()?;
        model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        let norm = clip_grad_norm(&mut model, 1.0)?;
        optimizer.step_with_norm(&mut model, 1e-2, &norm)?;
        zero_grad(&mut model)?;
        let (loss, norm) = (loss.item()?, norm.item()?);
        println!(
            "{params_dtype} step {step}: loss {:08x}, gradient norm {:08x}",
            loss.to_bits(),
            norm.to_bits()
        );
    }
    Ok(())
}
