//! Times kernels in the interpreter: `cargo run --release -p ptx-interp --example speed [-- FOLDER [NAME]]`.
//!
//! FOLDER holds PTX files of the library's kernels and defaults to those it ships. Printed for each kernel: instructions,
//! counted once for each thread that ran them, and how many of them a second of one core.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use ptx_interp::{Launch, Memory, Module};

/// An argument: bytes of memory, or a number.
enum Arg {
    Buffer(Vec<u8>),
    U64(u64),
    U32(u32),
    F32(f32),
}

struct Case {
    name: &'static str,
    file: &'static str,
    kernel: &'static str,
    launch: (u32, u32),
    args: Vec<Arg>,
}

const ROWS: usize = 256;
const COLS: usize = 512;

/// bf16 values from -4 to 4.
fn values(count: usize) -> Arg {
    let value = |i: usize| ((i * 7919 % 8191) as f32 / 1024.0 - 4.0).to_bits() >> 16;
    Arg::Buffer((0..count).flat_map(|i| (value(i) as u16).to_le_bytes()).collect())
}

fn floats(values: &[f32]) -> Arg {
    Arg::Buffer(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn room(bytes: usize) -> Arg {
    Arg::Buffer(vec![0; bytes])
}

fn activation(name: &'static str, kind: u32, codes: bool) -> Case {
    let n = ROWS * COLS;
    let (wide, out) = if codes { (Arg::U64(0), room(n)) } else { (room(4 * n), Arg::U64(0)) };
    let columnwise = if codes { room(n) } else { Arg::U64(0) };
    let args = vec![
        values(n),
        Arg::U32(1),
        Arg::U32(kind),
        Arg::U64(ROWS as u64),
        Arg::U64(COLS as u64),
        Arg::U64(1),
        out,
        columnwise,
        Arg::U32(0),
        if codes { floats(&[8.0]) } else { Arg::U64(0) },
        if codes { floats(&[0.0]) } else { Arg::U64(0) },
        wide,
        Arg::U64(0),
        if codes { floats(&[-1.0]) } else { Arg::U64(0) },
        Arg::U64(0),
    ];
    let blocks = (ROWS.div_ceil(128) * COLS.div_ceil(64)) as u32;
    Case { name, file: "activation.ptx", kernel: "activation", launch: (blocks, 256), args }
}

fn cases() -> Vec<Case> {
    let n = ROWS * COLS;
    let quantize = vec![
        values(n),
        Arg::U64(n as u64),
        room(n),
        Arg::U32(0),
        floats(&[8.0]),
        floats(&[0.0]),
        floats(&[-1.0]),
        Arg::U64(0),
    ];
    let mut softmax = vec![
        values(n),
        room(2 * n),
        Arg::U32(1),
        Arg::U64(ROWS as u64),
        Arg::U32(COLS as u32),
        Arg::U64(ROWS as u64),
        Arg::F32(1.0),
        Arg::U32(1),
        Arg::U64(0),
    ];
    softmax.extend([1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0].map(Arg::U64));
    vec![
        Case {
            name: "quantize_bf16",
            file: "quantize.ptx",
            kernel: "quantize_bf16",
            launch: (8, 256),
            args: quantize,
        },
        activation("activation gelu", 0, false),
        activation("activation silu, codes", 1, true),
        activation("activation relu", 3, false),
        Case {
            name: "softmax_warp",
            file: "softmax.ptx",
            kernel: "softmax_warp",
            launch: (32, 128),
            args: softmax,
        },
    ]
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = std::env::args().skip(1);
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../ptx");
    let folder = options.next().unwrap_or_else(|| shipped.to_owned());
    let only = options.next().unwrap_or_default();
    let mut out = std::io::stdout();
    for case in cases().into_iter().filter(|case| case.name.contains(&only)) {
        let text = std::fs::read_to_string(Path::new(&folder).join(case.file))?;
        let module = Module::parse(&text)?;
        let kernel = module.kernel(case.kernel).ok_or("no such kernel")?;
        let memory = Memory::new();
        let mut params = vec![0; kernel.params_size()];
        for (param, arg) in kernel.params().iter().zip(&case.args) {
            let value = match arg {
                Arg::Buffer(bytes) => {
                    let address = memory.allocate(bytes.len(), case.name);
                    memory.write(address, bytes)?;
                    address
                }
                Arg::U64(value) => *value,
                Arg::U32(value) => u64::from(*value),
                Arg::F32(value) => u64::from(value.to_bits()),
            };
            params[param.offset..param.offset + param.size]
                .copy_from_slice(&value.to_le_bytes()[..param.size]);
        }
        let (grid, block) = case.launch;
        for seed in [0, 1] {
            let launch = Launch {
                grid: [grid, 1, 1],
                block: [block, 1, 1],
                params: &params,
                seed,
                ..Launch::default()
            };
            // The best of many: other programs only slow it down.
            let (start, mut best, mut stats) = (Instant::now(), Duration::MAX, None);
            while start.elapsed() < Duration::from_secs(1) {
                let run = Instant::now();
                stats = Some(ptx_interp::run(kernel, &launch, &memory)?);
                best = best.min(run.elapsed());
            }
            let (seconds, Some(stats)) = (best.as_secs_f64(), stats) else { continue };
            let rate = stats.thread_instructions as f64 / seconds / 1e6;
            let lanes = stats.thread_instructions as f64 / stats.warp_instructions as f64;
            writeln!(
                out,
                "{:24} seed {seed}: {:8.3} M instructions in {:6.1} ms: {rate:6.1} M/s ({lanes:.1} lanes at a time)",
                case.name,
                stats.thread_instructions as f64 / 1e6,
                seconds * 1e3,
            )?;
        }
    }
    Ok(())
}
