//! The answers of the real library when it plans the graphs of attention for GPUs that are only described.
//!
//! `cargo xtask cudnn-check` runs the ignored test below over a driver without a device. The answers are what the simulated
//! cuDNN knows: `fp8-kernels/cuda-sim/src/cudnn/answers.txt`, whose format is described there.

use super::attention::{Attention, Direction, Element, Layout, Lengths, Mask, Sums};
use super::describe::Target;
use super::descriptor::Descriptor;
use super::device::way;
use super::graph::{Graph, Operation, Storage, TensorId};
use super::library::{Cudnn, written};
use super::numbers::{Attribute, DataType, Kind};
use super::plan::{Choice, Plan};
use std::fmt::Write;
use std::path::Path;

/// The described GPUs: their compute capability, and what differs from an H100.
const DEVICES: [((i32, i32), &str); 3] = [
    (
        (9, 0),
        r#""deviceName":"NVIDIA H100 80GB HBM3","deviceVer":900,"multiProcessorCount":132,"maxSharedMemoryPerBlockOptin":232448"#,
    ),
    (
        (10, 0),
        r#""deviceName":"NVIDIA B200","deviceVer":1000,"multiProcessorCount":148,"maxSharedMemoryPerBlockOptin":232448"#,
    ),
    (
        (12, 0),
        r#""deviceName":"NVIDIA RTX PRO 6000","deviceVer":1200,"multiProcessorCount":170,"maxSharedMemoryPerBlockOptin":101376"#,
    ),
];

const COMMON: &str = r#""cudaDeviceId":0,"driverVer":13000,"isTccDriver":0,"l2CacheSize":52428800,"maxCtasPerSM":32,"maxRegistersPerSM":65536,"maxSharedMemoryPerBlock":49152,"oversizedSharedMemoryPerBlock":0,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"memClockRateKHz":2619000,"memoryBusWidth":5120,"pciDeviceId":9008,"regsPerBlock":65536,"reservedSharedMemoryPerBlock":1024,"smClockRateKHz":1980000,"supportCoopLaunch":1,"totalGlobalMem":85017755648,"warpSize":32,"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64]"#;

const NONE: Mask = Mask { causal: false, left: None, bottom_right: false };
const CAUSAL: Mask = Mask { causal: true, ..NONE };

/// Masks and lengths that calls have, with their names. Only causal masks meet padding.
const CALLS: [(&str, Mask, Lengths); 10] = [
    ("full", NONE, Lengths::All),
    ("causal", CAUSAL, Lengths::All),
    ("window", Mask { left: Some(40), ..NONE }, Lengths::All),
    ("causal-window", Mask { left: Some(40), ..CAUSAL }, Lengths::All),
    ("bottom-right", Mask { bottom_right: true, ..CAUSAL }, Lengths::All),
    ("bottom-right-window", Mask { left: Some(40), bottom_right: true, causal: true }, Lengths::All),
    ("padded", NONE, Lengths::Padded),
    ("causal-padded", CAUSAL, Lengths::Padded),
    ("packed", NONE, Lengths::Packed),
    ("causal-packed", CAUSAL, Lengths::Packed),
];

/// Head sizes, with those of models, some that no kernel is for, and small ones for tests.
const HEADS: [usize; 24] = [
    8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 224, 256, 100, 300, 512,
];

/// A call of two batch entries with four heads. q, k and v, and their gradients, are parts of one tensor.
fn call(
    direction: Direction,
    element: Element,
    groups: usize,
    head_dim: usize,
    mask: Mask,
    lengths: Lengths,
) -> Attention {
    let (batch, heads, queries) = (2, 4, 192);
    let keys = if mask.bottom_right { 250 } else { queries };
    let rows = |rows| Layout::dense(rows, heads + 2 * groups, head_dim);
    let own = Layout::dense(queries, heads, head_dim);
    let (of_queries, of_keys) = (rows(queries), rows(keys));
    Attention {
        direction,
        element,
        batch,
        heads,
        groups,
        queries,
        keys,
        head_dim,
        mask,
        lengths,
        q: of_queries,
        k: of_keys,
        v: of_keys,
        o: own,
        dq: of_queries,
        dk: of_keys,
        dv: of_keys,
        dy: own,
        stats_head: queries as i64,
        stats_batch: (heads * queries) as i64,
    }
}

/// A graph's operations and how they are connected, as the simulated cuDNN writes them before it computes a hash.
fn structure(graph: &Graph) -> String {
    let mut text = String::new();
    let mut seen: Vec<i64> = Vec::new();
    for operation in &graph.operations {
        let tensors: Vec<TensorId> = match *operation {
            Operation::Pointwise { mode, axis, x, b, t, y, .. } => {
                let _ = write!(text, "pointwise {}", mode as i32);
                if let Some(axis) = axis {
                    let _ = write!(text, " axis {axis}");
                }
                [Some(x), b, t, Some(y)].into_iter().flatten().collect()
            }
            Operation::Matmul { a, b, c, real } => {
                let flags = real.iter().map(|real| if real.is_some() { 'r' } else { '-' });
                let _ = write!(text, "matmul {}", flags.collect::<String>());
                [a, b].into_iter().chain(real.into_iter().flatten()).chain([c]).collect()
            }
            Operation::Reduction { reduce, x, y } => {
                let _ = write!(text, "reduction {}", reduce as i32);
                vec![x, y]
            }
            Operation::Reshape { x, y } => {
                text += "reshape";
                vec![x, y]
            }
        };
        tensors.into_iter().for_each(|id| append(graph, id, &mut seen, &mut text));
        text.push('\n');
    }
    text
}

fn append(graph: &Graph, id: TensorId, seen: &mut Vec<i64>, text: &mut String) {
    if let Some(number) = seen.iter().position(|known| *known == id.unique()) {
        let _ = write!(text, " {number}");
        return;
    }
    seen.push(id.unique());
    let tensor = graph.tensor(id);
    let kind = match tensor.data_type {
        DataType::F32 => "f32",
        DataType::F16 | DataType::Bf16 => "half",
        DataType::I32 => "i32",
        DataType::Boolean => "bool",
    };
    let storage = match tensor.storage {
        Storage::Virtual => "virtual",
        _ if tensor.is_number() => "number",
        _ => "stored",
    };
    let _ = write!(text, " {}:{kind}:{storage}", seen.len() - 1);
    if let Some(offsets) = tensor.ragged {
        text.push_str(" by");
        append(graph, offsets, seen, text);
    }
}

/// FNV-1a, 64 bits.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn choice_name(choice: Choice) -> String {
    match choice {
        Choice::Heuristics => "heuristics".to_owned(),
        Choice::Engine { number, knobs } => {
            let mut knobs: Vec<(i32, i64)> =
                knobs.iter().map(|(knob, value)| (*knob as i32, *value)).collect();
            knobs.sort_unstable();
            knobs
                .iter()
                .fold(format!("engine-{number}"), |name, (knob, value)| format!("{name}-{knob}={value}"))
        }
    }
}

/// The directions of a device and version, with the kernels that are asked for.
fn directions(capability: (i32, i32), version: usize) -> Vec<(&'static str, Direction, Choice)> {
    let mut all = vec![("forward", Direction::Forward, Choice::Heuristics)];
    for deterministic in [false, true] {
        if let Some((sums, choice)) = way(capability, version, deterministic) {
            let kind = if sums == Sums::Direct { "backward-direct" } else { "backward" };
            all.push((kind, Direction::Backward(sums), choice));
        }
    }
    all
}

fn outcome(library: &Cudnn, device: &Descriptor, call: &Attention, choice: Choice) -> String {
    match Plan::new(library, &call.graph(), choice, Target::Described(device)) {
        Ok(plan) => format!("plans {}", plan.workspace),
        Err((_, status)) => format!("refused {status}"),
    }
}

/// Asks about every structure of a graph, and about every head size.
fn answers(library: &Cudnn, capability: (i32, i32), device: &Descriptor) -> Vec<String> {
    let mut lines = Vec::new();
    let (version, (major, minor)) = (library.version(), capability);
    let start = format!("{} sm_{}", written(version), major * 10 + minor);
    for (kind, direction, choice) in directions(capability, version) {
        let name = choice_name(choice);
        for (what, mask, lengths) in CALLS {
            for groups in if kind == "forward" { &[4][..] } else { &[4, 2][..] } {
                let call = call(direction, Element::Bf16, *groups, 64, mask, lengths);
                let structure = hash(&structure(&call.graph()));
                let outcome = outcome(library, device, &call, choice);
                let groups = if *groups == 4 { "" } else { ", groups" };
                lines.push(format!(
                    "{start} {kind} {name} structure {structure:016x} {outcome} # {what}{groups}"
                ));
            }
        }
        let bf16 = HEADS.iter().map(|size| (Element::Bf16, *size));
        for (element, size) in bf16.chain([16, 40, 64, 128].map(|size| (Element::F16, size))) {
            let call = call(direction, element, 4, size, CAUSAL, Lengths::All);
            let outcome = outcome(library, device, &call, choice);
            lines.push(format!("{start} {kind} {name} head {} {size} {outcome}", element.name()));
        }
    }
    lines
}

#[test]
#[ignore = "needs the real cuDNN over a driver without a device: cargo xtask cudnn-check"]
fn answers_of_the_real_library() {
    let variable = |name: &str| std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set"));
    let (path, out) = (variable("FP8_CUDNN_CHECK_LIBRARY"), variable("FP8_CUDNN_CHECK_ANSWERS"));
    // SAFETY: cuDNN's initializers ask nothing of their caller.
    let library = unsafe { libloading::Library::new(Path::new(&path)) }.unwrap();
    let library = Cudnn::new(Box::leak(Box::new(library))).unwrap();
    let mut lines = Vec::new();
    for (capability, own) in DEVICES {
        let json = format!("{{{own},{COMMON}}}");
        let device = Descriptor::new(&library, Kind::DeviceProperties)
            .and_then(|device| device.text(Attribute::DeviceJson, &json))
            .and_then(Descriptor::finalize)
            .unwrap();
        lines.extend(answers(&library, capability, &device));
    }
    std::fs::write(out, lines.join("\n") + "\n").unwrap();
}
