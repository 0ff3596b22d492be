//! `fp8 train MODEL`: a run from its plan to its result, resumed, killed, over processes and on the simulated GPU.

use super::{command, listing, run};
use crate::folders::copy;
use fp8_hf::{Folder, TrainRecord, TrainRun};
use fp8_nn::fp8_kernels::AtomicFile;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fp8-hf/tests/golden/train/data")
}

/// A folder with `model`, `chat.jsonl` and `text.txt`.
pub(crate) fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    copy(&data().join("model"), &place.path().join("model"));
    let chat = fs::read_to_string(data().join("chat.jsonl")).unwrap();
    let lines: Vec<&str> = chat.lines().take(8).collect();
    fs::write(place.path().join("chat.jsonl"), lines.join("\n")).unwrap();
    fs::write(place.path().join("text.txt"), "The sea is wide, and the ship is small. ".repeat(60)).unwrap();
    place
}

fn train(folder: &Path, line: &str) -> (i32, String, String) {
    run(folder, format!("train {line}").split_whitespace())
}

/// Trains, and returns what was printed.
fn trained(folder: &Path, line: &str) -> String {
    let (code, out, error) = train(folder, line);
    assert_eq!(code, 0, "{line}: {error}");
    out
}

pub(crate) fn losses(run: &Path) -> Vec<f64> {
    TrainRun::read_log(run).unwrap().iter().map(|record: &TrainRecord| record.loss).collect()
}

const TEXT: &str = "model --data text.txt --seq 32 --batch 4 --lr 1e-2 --quiet";

#[test]
fn a_run_leaves_a_model_a_report_and_a_log() {
    let place = place();
    let folder = place.path();
    let (code, out, error) =
        train(folder, "model --data chat.jsonl --validation 0.2 --epochs 2 --batch 1 --lr 1e-2 --out run");
    assert_eq!(code, 0, "{error}");
    for said in [
        " conversations of ",
        " tokens are learned",
        "15,672 parameters are trained, 0 are frozen",
        "memory at the peak, estimated: ",
        "validation loss before the first step: ",
        "step 4/4  loss ",
    ] {
        assert!(error.contains(said), "{said}: {error}");
    }
    assert!(out.contains("validation loss") && out.contains("run/final"), "{out}");
    let report = fs::read_to_string(folder.join("run/report.html")).unwrap();
    for heading in
        ["Loss", "Gradient norm", "Learning rate", "Speed", "Memory", "Saturated values", "Options"]
    {
        assert!(report.contains(&format!("<h2>{heading}</h2>")), "{heading}");
    }
    let losses = losses(&folder.join("run"));
    assert!(losses.len() == 4 && losses[3] < losses[0], "{losses:?}");
    // Tokenizer and chat template are there, and the model can be used.
    for name in
        ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
    {
        assert!(folder.join("run/final").join(name).is_file(), "{name}");
    }
    let (code, _, error) = run(folder, ["eval", "run/final", "--text", "text.txt"]);
    assert_eq!(code, 0, "{error}");
    // Again at the same place: refused before anything happens.
    let before = listing(folder);
    let (code, _, error) = train(folder, "model --data chat.jsonl --out run");
    assert_eq!(
        (code, error.trim()),
        (2, "error: --out run: a run is there already: name a new folder, or go on with --resume")
    );
    assert_eq!(listing(folder), before);
}

#[test]
fn an_adapter_is_trained_saved_and_used() {
    let place = place();
    let folder = place.path();
    for recipe in ["none", "current", "delayed", "block"] {
        let out = trained(
            folder,
            &format!(
                "{TEXT} --lora 4 --lora-targets q_proj v_proj --recipe {recipe} --steps 8 --out {recipe}"
            ),
        );
        assert!(out.contains("fp8 merge"), "{out}");
        let losses = losses(&folder.join(recipe));
        assert!(losses[7] < losses[0], "{recipe}: {losses:?}");
        let config = fs::read_to_string(folder.join(recipe).join("final/adapter_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(4), &json!(8)));
        assert_eq!(config["target_modules"], json!(["q_proj", "v_proj"]));
        let (code, _, error) =
            run(folder, ["eval", "model", "--adapter", &format!("{recipe}/final"), "--text", "text.txt"]);
        assert_eq!(code, 0, "{error}");
        let (code, _, error) =
            run(folder, ["merge", "model", &format!("{recipe}/final"), &format!("{recipe}-merged")]);
        assert_eq!(code, 0, "{error}");
    }
    // It goes on from an adapter.
    trained(folder, &format!("{TEXT} --adapter none/final --recipe none --steps 2 --out more"));
    let (first, more) = (losses(&folder.join("none")), losses(&folder.join("more")));
    assert!(more[0] < first[0], "{first:?} {more:?}");
    // A checkpoint of it holds the adapter alone.
    let checkpoint = folder.join("more/checkpoints/step-00000002/checkpoint.safetensors");
    let base = fs::metadata(folder.join("model/model.safetensors")).unwrap().len();
    let values = 2 * (4 * 24 + 24 * 4) + 2 * (4 * 24 + 12 * 4);
    assert!(fs::metadata(checkpoint).unwrap().len() < 3 * 4 * values + 40_000 && base > 60_000);
}

#[test]
fn the_result_is_written_in_fp8() {
    let place = place();
    let folder = place.path();
    trained(folder, &format!("{TEXT} --steps 2 --export channel --out run"));
    let tuned = Folder::open(&folder.join("run/final")).unwrap();
    assert!(tuned.config.quantization.is_some());
    let names: Vec<String> = fs::read_dir(folder.join("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(!names.iter().any(|name| name.contains("high-precision")), "{names:?}");
    // An adapter beside the codes of an FP8 model.
    let (code, _, error) =
        train(folder, "run/final --data text.txt --seq 32 --lora 4 --steps 2 --out lora --quiet");
    assert_eq!(code, 0, "{error}");
}

#[test]
fn options_come_from_a_file_and_the_command_line_wins() {
    let place = place();
    let folder = place.path();
    let toml = "model = \"model\"\ndata = [\"text.txt\"]\nseq = 32\nsteps = 3\nlr = 0.01\nlora = 4\nlora_targets = [\"q_proj\", \"o_proj\"]\n\
                cross-documents = true\nquiet = true\n[rank-pattern]\no_proj = 2\n";
    fs::write(folder.join("options.toml"), toml).unwrap();
    trained(folder, "--config options.toml --steps 2 --out run");
    let stored = fs::read_to_string(folder.join("run/config.toml")).unwrap();
    for line in [
        "steps = 2",
        "seq = 32",
        "lora = 4",
        "lr = 0.01",
        "rank-pattern = [\"o_proj=2\"]",
        "cross-documents = true",
    ] {
        assert!(stored.lines().any(|stored| stored == line), "{line}: {stored}");
    }
    // The file of a run is one for another.
    trained(folder, "--config run/config.toml --out again --quiet");
    assert_eq!(losses(&folder.join("run")), losses(&folder.join("again")));
    for (text, expected) in [
        ("sequ = 3", "sequ: unknown option; did you mean seq?"),
        ("zz = 3", "zz: unknown option; fp8 train MODEL --help lists the options"),
        ("lora-tragets = [\"q_proj\"]", "lora-tragets: unknown option; did you mean lora-targets?"),
        ("seq = \"many\"", "--seq many: must be a whole number"),
        ("quiet = 3", "quiet: expected true or false"),
        ("seq = [1, {a = 1}]", "seq: expected a text, a number, or a list of them"),
        ("seq = ", "line 1: "),
        ("model = 3", "model: expected the path of a folder, in quotes"),
    ] {
        fs::write(folder.join("wrong.toml"), text).unwrap();
        let (code, _, error) = train(folder, "--config wrong.toml --data text.txt --out wrong");
        assert_eq!(code, 2, "{text}");
        assert!(
            error.starts_with("error: --config wrong.toml: ") && error.contains(expected),
            "{text}: {error}"
        );
    }
}

#[test]
fn every_optimizer_trains_and_resumes() {
    let place = place();
    let folder = place.path();
    for (index, options) in [
        "--optimizer lion --lr 3e-3",
        "--optimizer sgd --lr 3e-2",
        "--moments fp8",
        "--moments bf16",
        "--params bf16",
        "--params bf16 --stochastic-rounding --moments fp8",
        "--optimizer lion --lr 3e-3 --moments fp8 --lora 4 --lora-dtype bf16",
    ]
    .into_iter()
    .enumerate()
    {
        let line = format!(
            "model --data text.txt --seq 32 --batch 4 --epochs 4 --quiet --checkpoint-every 5 --keep 99 --lr 1e-2 {options}"
        );
        // The last rate wins in a file, and only one may be on the line.
        let line = if options.contains("--lr") { line.replace("--lr 1e-2 ", "") } else { line };
        let out = folder.join(format!("run{index}"));
        trained(folder, &format!("{line} --out run{index}"));
        let whole = losses(&out);
        assert!(whole[whole.len() - 1] < whole[0], "{options}: {whole:?}");
        // Again from a checkpoint in the middle.
        fs::remove_dir_all(out.join("final")).unwrap();
        for entry in fs::read_dir(out.join("checkpoints")).unwrap() {
            let path = entry.unwrap().path();
            if !path.ends_with("step-00000005") {
                fs::remove_dir_all(path).unwrap();
            }
        }
        trained(folder, &format!("--resume run{index} --quiet"));
        assert_eq!(losses(&out), whole, "{options}");
    }
}

#[test]
fn a_dry_run_writes_nothing() {
    let place = place();
    let folder = place.path();
    let before = listing(folder);
    let out = trained(folder, "model --data chat.jsonl --dry-run --time --lora 2");
    for said in [
        "are trained, 15,672 are frozen",
        "few steps teach little: --epochs N",
        "⟦448.<|im_end|>⟧",
        "a step takes ",
        "memory at the peak",
    ] {
        assert!(out.contains(said), "{said}: {out}");
    }
    let out = trained(folder, "model --data chat.jsonl --dry-run --json");
    let plan: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&plan["samples"], &plan["learned"], &plan["trained"]),
        (&json!(8), &json!(168), &json!(15672))
    );
    assert_eq!(listing(folder), before);
}

#[test]
fn lines_of_json_are_for_machines() {
    let place = place();
    let (code, out, error) = train(place.path(), "model --data text.txt --seq 32 --steps 3 --json --out run");
    assert_eq!((code, error.as_str()), (0, ""));
    let lines: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 5);
    assert_eq!(lines[0]["steps"], 3);
    assert_eq!([1, 2, 3].map(|index| lines[index]["step"].as_u64().unwrap()), [1, 2, 3]);
    assert_eq!(lines[4]["result"], "run/final");
}

/// The parameters at the end, without the header, which has no order.
fn result(run: &Path) -> Vec<u8> {
    let bytes = fs::read(run.join("final/model.safetensors")).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].to_vec()
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_the_same() {
    let place = place();
    let folder = place.path();
    let kills: u64 = std::env::var("FP8_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let options = "model --data text.txt --seq 32 --batch 4 --lr 1e-2 --recipe delayed --steps 40 --checkpoint-every 2 --quiet";
    trained(folder, &format!("{options} --out whole"));
    let start = Instant::now();
    trained(folder, &format!("{options} --out timed"));
    let whole = start.elapsed();
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut killed = 0;
    let mut line = format!("{options} --out cut");
    for _ in 0..kills {
        let mut child = command(folder)
            .args(format!("train {line}").split_whitespace())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        thread::sleep(whole.mul_f64((state >> 33) as f64 / (1u64 << 31) as f64));
        killed += u64::from(child.try_wait().unwrap().is_none());
        let _ = child.kill();
        child.wait().unwrap();
        let has_options = folder.join("cut/config.toml").exists();
        if has_options {
            line = "--resume cut --quiet".to_owned();
        } else {
            // Killed before the first step: there is nothing to go on with.
            let _ = fs::remove_dir_all(folder.join("cut"));
        }
        if folder.join("cut/final").exists() {
            fs::remove_dir_all(folder.join("cut")).unwrap();
            line = format!("{options} --out cut");
        }
    }
    assert!(killed > 0);
    trained(folder, &line);
    assert_eq!(losses(&folder.join("cut")), losses(&folder.join("whole")), "{killed} kills");
    assert_eq!(result(&folder.join("cut")), result(&folder.join("whole")));
    // Nothing is left of files that were being written.
    let is_rest = |path: &str| {
        let name = Path::new(path).file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with(AtomicFile::PREFIX) && name != ".fp8-tokens"
    };
    let rests: Vec<_> = listing(folder).into_iter().filter(|(name, _)| is_rest(name)).collect();
    assert!(rests.is_empty(), "{rests:?}");
}

#[cfg(unix)]
#[test]
fn a_signal_saves_and_the_run_goes_on() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    let place = place();
    let folder = place.path();
    for (index, signal) in [Signal::SIGINT, Signal::SIGTERM].into_iter().enumerate() {
        let line = format!("train {TEXT} --steps 2000 --out run{index}");
        let child = command(folder).args(line.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
        let log = folder.join(format!("run{index}/log.jsonl"));
        let deadline = Instant::now() + Duration::from_secs(60);
        while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 3 && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(5));
        }
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{error}");
        assert!(error.contains("; saved: fp8 train --resume run"), "{error}");
        let done = losses(&folder.join(format!("run{index}"))).len();
        assert!(
            folder.join(format!("run{index}/checkpoints/step-{done:08}/checkpoint.safetensors")).is_file()
        );
        assert!(folder.join(format!("run{index}/report.html")).is_file());
    }
    // What decides the results cannot change.
    let (code, _, error) = train(folder, "--resume run0 --lr 1e-3");
    assert_eq!(code, 2);
    assert!(
        error
            .contains("--lr decides the results of the run, whose options are there: leave it out to resume"),
        "{error}"
    );
}

#[test]
fn processes_share_the_steps() {
    let place = place();
    let folder = place.path();
    let options = "model --data chat.jsonl --epochs 4 --no-pack --batch 4 --lr 1e-2 --recipe none --quiet";
    trained(folder, &format!("{options} --out one"));
    let line = format!("launch -n 2 -- fp8 train {options} --dp 2 --out two");
    let (code, _, error) = run(folder, line.split_whitespace());
    assert_eq!(code, 0, "{error}");
    let (one, two) = (losses(&folder.join("one")), losses(&folder.join("two")));
    assert_eq!(one.len(), 8);
    for (one, two) in one.iter().zip(&two) {
        assert!((one / two - 1.0).abs() < 1e-5, "{one} {two}");
    }
    // It goes on with another number of processes.
    let (code, _, error) = train(folder, "--resume two --dp 1 --quiet");
    assert_eq!(code, 0, "{error}");
    let line = format!("launch -n 2 -- fp8 train {options} --out three");
    let (code, _, error) = run(folder, line.split_whitespace());
    assert_eq!(code, 2);
    assert!(error.contains("--dp"), "{error}");
}

#[cfg(unix)]
#[test]
fn the_simulated_gpu_trains_eagerly_and_as_a_graph() {
    let (place, gpu) = (place(), crate::data_parallel::simulated_gpu());
    let folder = place.path();
    let train = |line: &str| {
        let output = command(folder)
            .args(
                format!("train model --seq 16 --batch 2 --accumulate 2 --lr 1e-2 --steps 4 --quiet {line}")
                    .split_whitespace(),
            )
            .env("FP8_CUDA_LIB_DIR", gpu.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for (name, options, tolerance) in [
        ("full", "--data text.txt --recipe none", 1e-5),
        ("full-fp8", "--data text.txt --recipe delayed", 1e-3),
        ("lora", "--data text.txt --recipe none --lora 4", 1e-5),
        // Softmax and cross entropy differ in their last bits, after which some codes are the next ones.
        ("lora-fp8", "--data text.txt --recipe current --lora 4", 3e-3),
    ] {
        train(&format!("{options} --out {name}-cpu"));
        train(&format!("{options} --device cuda:0 --graph --out {name}-graph"));
        train(&format!("{options} --device cuda:0 --out {name}-eager"));
        let [cpu, eager, graph] =
            ["cpu", "eager", "graph"].map(|kind| losses(&folder.join(format!("{name}-{kind}"))));
        assert_eq!(eager, graph, "{name}");
        assert_eq!(eager.len(), 4);
        for (cpu, gpu) in cpu.iter().zip(&eager) {
            assert!((cpu / gpu - 1.0).abs() <= tolerance, "{name}: {cpu} {gpu}");
        }
    }
}

/// Mistakes of a person that are none of the data's: the command line and a part of the sentence.
const MISTAKES: [(&str, &str); 52] = [
    ("model --data text.txt", "no place for the result: name a new folder with --out RUN"),
    ("model --out run", "no data: give texts, JSON lines or tokens with --data FILE"),
    ("--data text.txt --out run", "no model: expected a Hugging Face folder behind fp8 train"),
    ("nothing --data text.txt --out run", "nothing: no such folder: expected a Hugging Face folder"),
    ("text.txt --data text.txt --out run", "text.txt: not a folder"),
    ("model --data nothing.jsonl --out run", "nothing.jsonl"),
    (
        "model --data text.txt --out no/run",
        "--out no/run: the folder around it does not exist: create that one first",
    ),
    ("model --data text.txt --out model", "--out model: the folder has files: name a new one"),
    (
        "model --data text.txt --out text.txt",
        "--out text.txt: it is a file: expected the name of a new folder",
    ),
    (
        "model --data text.txt --out model/run",
        "--out model/run: it would be inside model, which is read: choose a place outside it",
    ),
    (
        "model --text text.txt --out run",
        "--text is an option of the small run, which has no model's folder; a fine-tuning has --data",
    ),
    (
        "model --data text.txt --save run",
        "--save is an option of the small run, which has no model's folder; a fine-tuning has --out",
    ),
    ("model --data text.txt --out run --hidden 3", "--hidden is an option of the small run"),
    ("model --data text.txt --out run --layers=3", "--layers is an option of the small run"),
    ("model --data text.txt --out run --compare all", "a fine-tuning has one run for each recipe"),
    ("model --data text.txt --out run --epcohs 3", "unknown option --epcohs; did you mean --epochs?"),
    ("model --data text.txt --out run --epochs 3 --steps 2", "--epochs and --steps exclude each other"),
    ("model --data text.txt --out run --seq 100000", "--seq 100000: expected at most"),
    ("model --data text.txt --out run --lr -1", "--lr -1: a learning rate must be finite and above zero"),
    (
        "model --data text.txt --out run --validation 1.5",
        "--validation 1.5: a share must be more than 0 and less than 1",
    ),
    (
        "model --data text.txt --out run --warmup 2.5",
        "--warmup 2.5: must be a share from 0 to 1 such as 0.05, or a whole number of steps",
    ),
    (
        "model --data text.txt --out run --warmup 10 --steps 10",
        "--warmup 10: the run has 10 steps: expected fewer",
    ),
    (
        "model --data text.txt --out run --accumulate 9",
        "--accumulate 9: each replica has 8 of the --batch 8 sequences of a step: expected at most 8",
    ),
    ("model --data text.txt --out run --lora 0", "--lora 0: must be at least 1"),
    (
        "model --data text.txt --out run --lora 4 --lora-targets query",
        "--lora-targets \"query\": no Linear in the model's layers is called so",
    ),
    (
        "model --data text.txt --out run --lora 4 --lora-layers 9",
        "--lora-layers 9: the model has 2 layers: expected 0 to 1",
    ),
    (
        "model --data text.txt --out run --lora 4 --rank-pattern q_proj",
        "--rank-pattern q_proj: must be PATTERN=NUMBER",
    ),
    (
        "model --data text.txt --out run --lora 4 --alpha-pattern q_proj=x",
        "--alpha-pattern q_proj=x: must be a finite number above 0",
    ),
    (
        "model --data text.txt --out run --lora-alpha 4",
        "--lora-alpha goes with --lora RANK, which makes an adapter",
    ),
    ("model --data text.txt --out run --rslora", "--rslora goes with --lora RANK, which makes an adapter"),
    (
        "model --data text.txt --out run --adapter model --lora-targets q_proj",
        "--lora-targets is for new adapters: that of --adapter has its own ranks and targets",
    ),
    ("model --data text.txt --out run --lora 4 --adapter model", "exclude each other"),
    (
        "model --data text.txt --out run --lora 4 --export tensor",
        "--export writes a whole model, and the result of --lora is an adapter",
    ),
    (
        "model --data text.txt --out run --export fp4",
        "--export fp4: unknown; the known ones are tensor, channel, block128, vllm, nvfp4, nvfp4a16, and none",
    ),
    (
        "model --data text.txt --out run --export nvfp4",
        "--export nvfp4: it needs the largest inputs of each layer",
    ),
    (
        "model --data text.txt --out run --export block128",
        "--export block128: `model.layers.0.self_attn.q_proj.weight` is",
    ),
    ("model --data text.txt --out run --lora 4 --fp8-weights", "--fp8-weights is for training the model"),
    ("model --data text.txt --out run --fp8-weights --recipe none", "--fp8-weights needs a recipe"),
    (
        "model --data text.txt --out run --lora 4 --params bf16",
        "--params is the type of a model that is trained",
    ),
    ("model --data text.txt --out run --lora-dtype bf16", "--lora-dtype is the type of an adapter"),
    (
        "model --data text.txt --out run --stochastic-rounding",
        "--stochastic-rounding is for parameters in bf16",
    ),
    ("model --data text.txt --out run --time", "--time goes with --dry-run"),
    ("model --data text.txt --out run --graph", "--graph: a CPU does not record steps"),
    ("model --data text.txt --out run --adapter model", "adapter_config.json"),
    (
        "model --data text.txt --out run --freeze nothing",
        "--freeze \"nothing\": it fits no tensor of the model",
    ),
    ("model --data text.txt --out run --freeze *", "--freeze [\"*\"]: nothing is left to train"),
    ("model --data text.txt --out run --group q:lr", "--group q:lr: must be PATTERN:lr=FACTOR"),
    ("model --data text.txt --out run --recipe fp4", "--recipe fp4: unknown; the known ones are"),
    ("model --data text.txt --out run --recipe no.toml", "--recipe no.toml: "),
    (
        "model --data text.txt --out run --loss answers",
        "--loss: the data are text, which have no answers: use --loss all",
    ),
    ("model --data text.txt --out run --pack whole --cross-documents", "--cross-documents"),
    (
        "--resume model",
        "--resume takes a folder that --save wrote, or a run of fp8 train MODEL with its config.toml",
    ),
];

#[test]
fn mistakes_get_a_sentence_and_nothing_is_written() {
    let place = place();
    let folder = place.path();
    let before = listing(folder);
    for (line, expected) in MISTAKES {
        let (code, out, error) = train(folder, line);
        assert_eq!((code, out.as_str()), (2, ""), "{line}: {error}");
        assert!(error.starts_with("error: ") || error.starts_with("--"), "{line}: {error}");
        assert_eq!(error.trim().lines().count(), 1, "{line}: {error}");
        assert!(error.contains(expected), "{line}: {error}");
        assert_eq!(listing(folder), before, "{line}");
    }
}

#[test]
fn mistakes_in_data_get_a_sentence_and_nothing_is_written() {
    let place = place();
    let folder = place.path();
    let mistakes = data().join("mistakes");
    let cases: Value =
        serde_json::from_str(&fs::read_to_string(mistakes.join("cases.json")).unwrap()).unwrap();
    let before = listing(folder);
    for case in cases.as_array().unwrap() {
        let file = mistakes.join(case["file"].as_str().unwrap());
        // Other tokenizers have no model beside them.
        if case["tokenizer"] != "model" {
            continue;
        }
        let words = ["train", "model", "--data", file.to_str().unwrap(), "--out", "run"];
        let (code, out, error) = run(folder, words);
        assert_eq!((code, out.as_str()), (2, ""), "{}: {error}", file.display());
        assert!(error.trim().lines().count() == 1, "{error}");
        for name in case["names"].as_array().unwrap() {
            assert!(error.contains(name.as_str().unwrap()), "{}: {name}: {error}", file.display());
        }
        assert_eq!(listing(folder), before, "{}", file.display());
    }
}
