//! A small harness: kernels from PTX text, arguments by type, buffers by label.
#![allow(dead_code, reason = "each test file uses its part of the harness")]
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step is a failed test")]

pub(crate) mod case;

use ptx_interp::{Kind, Launch, Memory, Module, Report, Stats};

/// An argument of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    U32(u32),
    U64(u64),
    F32(f32),
}

/// Lays arguments out as the kernel declares them.
pub(crate) fn params(kernel: &ptx_interp::Kernel, args: &[Arg]) -> Vec<u8> {
    let mut bytes = vec![0; kernel.params_size()];
    assert_eq!(kernel.params().len(), args.len(), "{}: number of arguments", kernel.name());
    for (param, arg) in kernel.params().iter().zip(args) {
        let value = match arg {
            Arg::U32(value) => value.to_le_bytes().to_vec(),
            Arg::U64(value) => value.to_le_bytes().to_vec(),
            Arg::F32(value) => value.to_le_bytes().to_vec(),
        };
        assert_eq!(value.len(), param.size, "{}: size of an argument", kernel.name());
        bytes[param.offset..param.offset + param.size].copy_from_slice(&value);
    }
    bytes
}

/// A module of one body: `(.param .u64 k_param_0, …)` for each of `pointers`, then scalars.
pub(crate) fn module(body: &str) -> String {
    module_for("sm_90", body)
}

/// A [`module`] for another target.
pub(crate) fn module_for(target: &str, body: &str) -> String {
    format!(
        ".version 9.0\n.target {target}\n.address_size 64\n.extern .shared .align 16 .b8 dyn[];\n\
         .visible .entry k(\n.param .u64 k_param_0,\n.param .u64 k_param_1\n)\n{{\n\
         .reg .pred %p<20>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<40>;\n.reg .f32 %f<40>;\n.reg .b64 %rd<20>;\n.reg .f64 %fd<10>;\n\
         ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n{body}\nret;\n}}\n"
    )
}

pub(crate) fn bytes<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| to(value)).collect()
}

pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Runs the kernel `k` of [`module`] with `input` words, for as many threads, and gives `outputs` words.
pub(crate) fn run_words(
    body: &str,
    input: &[u32],
    block: u32,
    outputs: usize,
) -> Result<Vec<u32>, Box<Report>> {
    run_seeded(body, input, block, outputs, 0)
}

pub(crate) fn run_seeded(
    body: &str,
    input: &[u32],
    block: u32,
    outputs: usize,
    seed: u64,
) -> Result<Vec<u32>, Box<Report>> {
    run_text(&module(body), input, block, outputs, seed)
}

/// Runs the kernel `k` of a module's text like [`run_words`].
pub(crate) fn run_text(
    text: &str,
    input: &[u32],
    block: u32,
    outputs: usize,
    seed: u64,
) -> Result<Vec<u32>, Box<Report>> {
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let kernel = module.kernel("k").unwrap();
    let memory = Memory::new();
    let x = memory.allocate(input.len() * 4, "x");
    memory.write(x, &bytes(input, u32::to_le_bytes)).unwrap();
    let y = memory.allocate(outputs * 4, "y");
    memory.fill(y, &[0], outputs * 4).unwrap();
    let params = params(kernel, &[Arg::U64(x), Arg::U64(y)]);
    let launch =
        Launch { block: [block, 1, 1], dynamic_shared: 4096, params: &params, seed, ..Launch::default() };
    ptx_interp::run(kernel, &launch, &memory)?;
    let mut out = vec![0; outputs * 4];
    memory.read(y, &mut out).unwrap();
    Ok(words(&out))
}

/// The report of a body that fails.
pub(crate) fn fault(body: &str, block: u32) -> Report {
    let input: Vec<u32> = (0..block).collect();
    *run_words(body, &input, block, block as usize).expect_err("the kernel should have been stopped")
}

/// The kind of a body's report.
pub(crate) fn kind(body: &str, block: u32) -> Kind {
    fault(body, block).kind
}

pub(crate) fn launch(
    kernel: &ptx_interp::Kernel,
    memory: &Memory,
    (grid, block): (u32, u32),
    args: &[Arg],
    seed: u64,
) -> Result<Stats, Box<Report>> {
    let params = params(kernel, args);
    let launch =
        Launch { grid: [grid, 1, 1], block: [block, 1, 1], params: &params, seed, ..Launch::default() };
    ptx_interp::run(kernel, &launch, memory)
}
