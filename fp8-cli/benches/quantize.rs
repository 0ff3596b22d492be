//! `fp8 quantize` of a synthetic bf16 model beside a loop that reads, writes and fsyncs the same bytes with the same threads.
//!
//! ```text
//! cargo bench -p fp8-nn --features cli --bench quantize -- --mib 4096 --scheme channel
//! cargo bench -p fp8-nn --features cli --bench quantize -- --mib 1024 --python PYTHON   # with torch and safetensors
//! ```
//!
//! The contenders take turns, with the model in the page cache; ratios are medians over rounds. The program's peak memory is
//! Linux' VmHWM. As a test (without `--bench`) it runs once, on a small model.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark fails by panicking and prints a table"
)]

use clap::Parser;
use fp8_hf::Scheme;
use std::fs::{self, File};
use std::io::{BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
struct Options {
    /// The size of the model in MiB
    #[arg(long)]
    mib: Option<usize>,
    /// The number of files
    #[arg(long, default_value_t = 8)]
    files: usize,
    /// tensor, channel, block128 or vllm; all of them without this option
    #[arg(long)]
    scheme: Option<Scheme>,
    /// The number of threads (default: one for each core)
    #[arg(long)]
    threads: Option<usize>,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// A Python with torch and safetensors, to run the same in PyTorch (channel alone)
    #[arg(long)]
    python: Option<PathBuf>,
    /// The folder for model and output, on the disk to measure (default: the temporary folder)
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Bytes that the loop reads at a time.
const CHUNK: usize = 16 << 20;

const PYTHON: &str = "
import sys, os, glob, torch
from safetensors.torch import safe_open, save_file
source, out = sys.argv[1:3]
torch.set_num_threads(int(sys.argv[3]))
os.mkdir(out)
for path in sorted(glob.glob(os.path.join(source, '*.safetensors'))):
    new = {}
    with safe_open(path, 'pt') as f:
        for name in f.keys():
            x = f.get_tensor(name)
            if not name.endswith('_proj.weight'):
                new[name] = x
                continue
            x = x.float()
            scale = x.abs().amax(1, keepdim=True) / 448
            new[name] = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            new[name.replace('.weight', '.weight_scale')] = scale
    to = os.path.join(out, os.path.basename(path))
    save_file(new, to, {'format': 'pt'})
    with open(to, 'rb') as f:
        os.fsync(f.fileno())
";

fn main() {
    let options = Options::parse();
    let mib = options.mib.unwrap_or(if options.bench { 1024 } else { 8 });
    let rounds = if options.bench { options.rounds } else { 1 };
    let threads = options.threads.unwrap_or_else(|| std::thread::available_parallelism().unwrap().get());
    let place = match &options.folder {
        Some(folder) => tempfile::tempdir_in(folder).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let model = place.path().join("model");
    let layers = write_model(&model, mib, options.files);
    println!(
        "{} MiB in bf16, {layers} layers, {} files, {threads} threads, {rounds} rounds",
        bytes(&model) >> 20,
        options.files
    );
    // `nvfp4` reads a text first; it writes the weights that `nvfp4a16` writes.
    let all = || Scheme::ALL.into_iter().filter(|&scheme| scheme != Scheme::Nvfp4).collect();
    let schemes = options.scheme.map_or_else(all, |scheme| vec![scheme]);
    println!("| scheme | fp8 quantize, s | loop, s | ratio | peak, MiB |\n|---|---|---|---|---|");
    let out = place.path().join("out");
    for scheme in schemes {
        let (mut ours, mut loops, mut ratios, mut peak) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for _ in 0..rounds {
            let (time, memory) = quantize(&model, &out, scheme, threads);
            let copied = bytes(&out);
            fs::remove_dir_all(&out).unwrap();
            let copy = copy(&model, &out, copied, threads);
            fs::remove_dir_all(&out).unwrap();
            ours.push(time.as_secs_f64());
            loops.push(copy.as_secs_f64());
            ratios.push(copy.as_secs_f64() / time.as_secs_f64());
            peak = peak.max(memory);
        }
        let [ours, loops, ratio] = [ours, loops, ratios].map(median);
        println!("| {scheme} | {ours:.2} | {loops:.2} | {ratio:.2} | {peak} |");
    }
    if let Some(python) = &options.python {
        let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds.min(3) {
            let (time, _) = quantize(&model, &out, Scheme::Channel, threads);
            fs::remove_dir_all(&out).unwrap();
            let start = Instant::now();
            let mut peer = Command::new(python);
            peer.args(["-c", PYTHON]).args([&model, &out]).arg(threads.to_string());
            assert!(peer.status().unwrap().success());
            let peer = start.elapsed();
            fs::remove_dir_all(&out).unwrap();
            ours.push(time.as_secs_f64());
            theirs.push(peer.as_secs_f64());
            ratios.push(peer.as_secs_f64() / time.as_secs_f64());
        }
        let [ours, theirs, ratio] = [ours, theirs, ratios].map(median);
        println!("PyTorch, channel: {theirs:.2} s, fp8 quantize {ours:.2} s: {ratio:.2} times as fast");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The bytes of a folder's files.
fn bytes(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

/// Runs the program; returns its time and its peak memory in MiB, 0 where /proc does not tell.
fn quantize(model: &Path, out: &Path, scheme: Scheme, threads: usize) -> (Duration, u64) {
    let start = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_fp8"))
        .arg("quantize")
        .args([model, out])
        .args(["--scheme", scheme.name(), "--threads", &threads.to_string(), "--allow-ragged"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut peak = 0;
    let status = loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) >> 10);
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let time = start.elapsed();
    assert!(status.success());
    (time, peak)
}

/// Reads all files of a model, writes `size` bytes in files of the same names, and fsyncs them.
fn copy(model: &Path, out: &Path, size: u64, threads: usize) -> Duration {
    let start = Instant::now();
    fs::create_dir(out).unwrap();
    let total = bytes(model);
    let mut jobs = Vec::new();
    let mut left = Vec::new();
    for entry in fs::read_dir(model).unwrap() {
        let entry = entry.unwrap();
        let (path, len) = (entry.path(), entry.metadata().unwrap().len());
        let to = out.join(entry.file_name());
        File::create(&to).unwrap();
        let parts = len.div_ceil(CHUNK as u64).max(1);
        jobs.extend((0..parts).map(|part| (left.len(), path.clone(), to.clone(), part * CHUNK as u64)));
        left.push(AtomicUsize::new(parts as usize));
    }
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut buffer = Vec::with_capacity(CHUNK);
                while let Some((file, from, to, offset)) = jobs.get(next.fetch_add(1, Relaxed)) {
                    let mut source = File::open(from).unwrap();
                    source.seek(SeekFrom::Start(*offset)).unwrap();
                    buffer.clear();
                    source.take(CHUNK as u64).read_to_end(&mut buffer).unwrap();
                    let scaled =
                        |bytes: u64| (u128::from(bytes) * u128::from(size) / u128::from(total)) as u64;
                    let mut target = File::options().write(true).open(to).unwrap();
                    target.seek(SeekFrom::Start(scaled(*offset))).unwrap();
                    let end = scaled(offset + buffer.len() as u64) - scaled(*offset);
                    target.write_all(&buffer[..end as usize]).unwrap();
                    if left[*file].fetch_sub(1, Relaxed) == 1 {
                        target.sync_all().unwrap();
                    }
                }
            });
        }
    });
    File::open(out).unwrap().sync_all().unwrap();
    start.elapsed()
}

/// Writes a Llama of about this size with weights at random, and returns the number of layers.
fn write_model(folder: &Path, mib: usize, files: usize) -> usize {
    let hidden: usize = if mib < 256 { 256 } else { 2048 };
    let ffn = 4 * hidden;
    let layer = 2 * (4 * hidden * hidden + 3 * hidden * ffn);
    let layers = ((mib << 20) / layer).max(1);
    fs::create_dir(folder).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": hidden / 128,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let config = fp8_hf::Config::from_json(&config.to_string()).unwrap();
    let mut map = serde_json::Map::new();
    let mut parts = vec![Vec::new(); files.min(layers)];
    let count = parts.len();
    for spec in config.tensors() {
        parts[spec.layer.unwrap_or(0) * count / layers].push(spec);
    }
    let mut state = 1u64;
    for (index, specs) in parts.iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        let (mut header, mut end) = (serde_json::Map::new(), 0);
        for spec in specs {
            let begin = end;
            end += 2 * spec.shape.iter().product::<usize>();
            let info = serde_json::json!({"dtype": "BF16", "shape": spec.shape.to_vec(), "data_offsets": [begin, end]});
            header.insert(spec.name.clone(), info);
            map.insert(spec.name.clone(), name.clone().into());
        }
        let header = serde_json::Value::from(header).to_string();
        let mut file = BufWriter::with_capacity(1 << 20, File::create(folder.join(name)).unwrap());
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        for _ in 0..end / 8 {
            // Signs and mantissas at random, exponents from 2⁻⁷ to 2⁰.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (state ^ state >> 29) & 0x83FF_83FF_83FF_83FF | 0x3C00_3C00_3C00_3C00;
            file.write_all(&bits.to_le_bytes()).unwrap();
        }
        file.into_inner().unwrap().sync_all().unwrap();
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    layers
}
