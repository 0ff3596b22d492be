//! The shipped kernels of NVFP4 give the bytes of `fp8_format::slice`, for every float type, copy and rounding.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step is a failed test")]

mod machine;

use fp8_format::philox::BlockRandom;
use fp8_format::slice::{self, Nvfp4Copy, Nvfp4Options, Nvfp4Output};
use fp8_format::{Blocks, E2M1, E4M3, Source, TensorScale};
use half::{bf16, f16};
use machine::case::{Case, floats};
use ptx_interp::{Module, splitmix64};
use safetensors::SafeTensors;

const SIZES: [[usize; 2]; 5] = [[1, 1], [16, 16], [33, 50], [128, 192], [130, 257]];

/// The random bytes of blocks: seed, offset; first and step of the copy as stored and of its transpose.
const SEED: u64 = 0x0123_4567_89AB_CDEF;
const OFFSET: u64 = u64::MAX - 40;
const FIRST: [u64; 2] = [3, 1 << 33];
const STEP: [u64; 2] = [29, 31];

/// The kernels as all GPUs run them, and as those with the conversion to E2M1 do.
fn modules() -> [Module; 2] {
    let texts = [include_str!("../../ptx/nvfp4.ptx"), include_str!("../../cuda-sim/ptx/nvfp4.sm_100a.ptx")];
    assert_eq!(texts.map(|text| text.contains("cvt.rn.satfinite.e2m1x2.f32")), [false, true]);
    texts.map(|text| Module::parse(text).unwrap())
}

/// A float type as kernels number it.
trait Element: Source {
    const DTYPE: usize;
    fn bytes(self) -> Vec<u8>;
}

impl Element for f32 {
    const DTYPE: usize = 0;
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

impl Element for bf16 {
    const DTYPE: usize = 1;
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

impl Element for f16 {
    const DTYPE: usize = 2;
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

fn bytes<S: Element>(x: &[S]) -> Vec<u8> {
    x.iter().flat_map(|x| x.bytes()).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Data {
    /// Numbers over some binades, of both signs.
    Numbers,
    /// Among them zeros, subnormals, values far below the others and NaN.
    Special,
    /// And infinities.
    Infinite,
}

fn values<S: Element>(n: usize, data: Data) -> Vec<S> {
    let value = |i: usize| {
        let random = splitmix64(&mut (i as u64 + 1));
        let v = ((random >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 2_f32.powi((random & 15) as i32 - 9);
        match (data, random >> 8 & 63) {
            (Data::Numbers, _) => v,
            (_, 0) => 0.0,
            (_, 1) => -0.0,
            (_, 2) => f32::from_bits((random >> 16 & 0xFFF) as u32),
            (_, 3) => -1e-7,
            (_, 4) if random >> 14 & 3 == 0 => f32::from_bits(0xFFC0_0000 | (random >> 33 & 1) as u32),
            (Data::Infinite, 5) => f32::INFINITY.copysign(v),
            _ => v,
        }
    };
    (0..n).map(|i| S::from_f32(value(i))).collect()
}

/// A copy that a launch of `quantize_nvfp4` should give.
struct Copy {
    codes: Vec<u8>,
    scales: Vec<E4M3>,
    tensor: TensorScale,
}

impl Copy {
    fn new<S: Source>(x: &[S], [rows, cols]: [usize; 2], amax: f32, options: &Nvfp4Options) -> Self {
        let [height, width] = options.copy.shape(rows, cols);
        let mut codes = vec![0; height * width.div_ceil(2)];
        let mut scales = vec![E4M3::ZERO; options.blocks.grid(height, width).iter().product()];
        let out = Nvfp4Output::new(&mut codes, &mut scales);
        let tensor = slice::quantize_nvfp4(x, rows, cols, amax, options, out).unwrap();
        Self { codes, scales, tensor }
    }

    fn scale_bytes(&self) -> Vec<u8> {
        self.scales.iter().map(|scale| scale.to_bits()).collect()
    }

    fn factors(&self) -> Vec<u8> {
        floats(&[self.tensor.encode(), self.tensor.decode()])
    }

    /// Adds the parameters of the copy, or nulls.
    fn add(copy: Option<&Self>, case: Case) -> Case {
        match copy {
            None => case.null().null().null(),
            Some(copy) => case
                .buffer(None, copy.codes.clone())
                .buffer(None, copy.scale_bytes())
                .buffer(None, copy.factors()),
        }
    }

    /// Saturated, underflowed, all and NaN elements, as the counters of a rowwise copy have them.
    fn counts<S: Source>(&self, x: &[S], cols: usize, blocks: Blocks) -> [u64; 4] {
        let [height, _] = blocks.size(cols);
        let mut counts = [0, 0, x.len() as u64, 0];
        for (r, (row, codes)) in x.chunks(cols).zip(self.codes.chunks(cols.div_ceil(2))).enumerate() {
            for (c, v) in row.iter().map(|v| v.to_f32()).enumerate() {
                let scale = self.scales[r / height * cols.div_ceil(16) + c / 16];
                let code = E2M1::unpack(codes[c / 2])[c % 2];
                let scaled = v * self.tensor.block_factor(scale);
                let has_scale = !scale.is_nan() && scale != E4M3::ZERO;
                counts[0] += u64::from(has_scale && v.is_finite() && scaled.abs() >= 7.0);
                counts[1] += u64::from(v != 0.0 && self.tensor.value(code, scale) == 0.0);
                counts[3] += u64::from(v.is_nan());
            }
        }
        counts
    }
}

/// The partial sums of columns: a row for each 128 rows, added in the order of the prelude's `tile_sums`.
fn partial_sums<S: Source>(x: &[S], [rows, cols]: [usize; 2]) -> Vec<f32> {
    let at = |r: usize, c: usize| if r < rows { x[r * cols + c].to_f32() } else { 0.0 };
    let sum = |top: usize, c: usize| {
        let four = |r: usize| (0..4).map(|i| r + i).filter(|r| *r < rows).fold(-0.0, |sum, r| sum + at(r, c));
        let warp = |r: usize| (four(r) + four(r + 4)) + (four(r + 8) + four(r + 12));
        (1..8).fold(warp(top), |sum, w| sum + warp(top + 16 * w))
    };
    (0..rows).step_by(128).flat_map(|top| (0..cols).map(move |c| sum(top, c))).collect()
}

fn tiles([rows, cols]: [usize; 2]) -> u32 {
    (rows.div_ceil(128) * cols.div_ceil(64)) as u32
}

/// One launch.
#[derive(Clone, Copy, Debug)]
struct Call {
    size: [usize; 2],
    data: Data,
    tiles: bool,
    hadamard: bool,
    stochastic: bool,
    /// The copies that are made: rowwise, columnwise.
    copies: [bool; 2],
    /// The part of the amaxes that is given.
    given: f32,
}

fn quantizes<S: Element>(modules: &[Module; 2], call: Call, seed: u64) {
    let size @ [rows, cols] = call.size;
    let x: Vec<S> = values(rows * cols, call.data);
    let turned = if call.hadamard { Nvfp4Copy::Hadamard } else { Nvfp4Copy::Columnwise };
    let amaxes = [Nvfp4Copy::Rowwise, turned].map(|copy| slice::nvfp4_amax(&x, rows, cols, copy).unwrap());

    let amax = Case::new([2.min(tiles(size)), 1, 1], 256).input(bytes(&x)).u32(S::DTYPE).u64(rows).u64(cols);
    let amax = amax.u32(call.hadamard.into()).buffer(Some(floats(&[0.0; 2])), floats(&amaxes));
    check(&amax, modules, "nvfp4_amax", seed, &call);

    let amaxes = amaxes.map(|amax| amax * call.given);
    let blocks = if call.tiles { Blocks::B16x16 } else { Blocks::B1x16 };
    let copy = |which: usize, copy| {
        let random = BlockRandom::new(SEED, OFFSET).part(FIRST[which], STEP[which]);
        let options = Nvfp4Options { copy, blocks, random: call.stochastic.then_some(random) };
        Copy::new(&x, size, amaxes[which], &options)
    };
    let (rowwise, columnwise) = (copy(0, Nvfp4Copy::Rowwise), copy(1, turned));
    let case = Case::new([tiles(size), 1, 1], 256).input(bytes(&x)).u32(S::DTYPE).u64(rows).u64(cols);
    let case = case.input(floats(&amaxes)).u32(call.tiles.into()).u32(call.hadamard.into());
    let case = Copy::add(call.copies[0].then_some(&rowwise), case);
    let case = Copy::add(call.copies[1].then_some(&columnwise), case);
    let key: Vec<u8> = [SEED, OFFSET].into_iter().flat_map(u64::to_le_bytes).collect();
    let case = if call.stochastic { case.input(key) } else { case.null() };
    let case = (0..2).fold(case, |case, i| case.u64(FIRST[i] as usize).u64(STEP[i] as usize));
    let counts = rowwise.counts(&x, cols, blocks).map(u64::to_le_bytes).concat();
    let case = if call.copies[0] { case.buffer(Some(vec![0; 32]), counts) } else { case.null() };
    let case = match call.data {
        Data::Numbers => case.buffer(None, floats(&partial_sums(&x, size))),
        Data::Special | Data::Infinite => case.null(),
    };
    check(&case, modules, "quantize_nvfp4", seed, &call);
}

fn check(case: &Case, modules: &[Module; 2], kernel: &str, seed: u64, call: &dyn std::fmt::Debug) {
    for module in modules {
        let target = module.target();
        let right =
            case.right(module, kernel, seed).unwrap_or_else(|report| panic!("{target}: {call:?}: {report}"));
        assert!(right, "{kernel} of {target}: {call:?}: {}", case.difference(module, kernel, seed));
    }
}

fn all_calls<S: Element>() {
    let modules = modules();
    let whole = Call {
        size: [0; 2],
        data: Data::Numbers,
        tiles: false,
        hadamard: false,
        stochastic: false,
        copies: [true; 2],
        given: 1.0,
    };
    for (n, size) in SIZES.into_iter().enumerate() {
        for [tiles, hadamard] in [[false, false], [false, true], [true, false]] {
            for stochastic in [false, true] {
                for data in [Data::Numbers, Data::Special, Data::Infinite] {
                    let call = Call { size, data, tiles, hadamard, stochastic, ..whole };
                    quantizes::<S>(&modules, call, n as u64);
                }
            }
        }
    }
    let small = Call { size: [33, 50], data: Data::Special, ..whole };
    for copies in [[true, false], [false, true]] {
        quantizes::<S>(&modules, Call { copies, ..small }, 1);
        quantizes::<S>(&modules, Call { copies, tiles: true, ..small }, 2);
        quantizes::<S>(&modules, Call { copies, hadamard: true, stochastic: true, ..small }, 3);
    }
    // With an amax that is too small, scales and codes saturate; with one that is too large, they vanish.
    for given in [0.125, 1e6] {
        quantizes::<S>(&modules, Call { given, ..small }, 0);
        quantizes::<S>(&modules, Call { given, tiles: true, stochastic: true, ..small }, 0);
    }
}

#[test]
fn bf16_is_quantized_to_the_same_bytes() {
    all_calls::<bf16>();
}

#[test]
fn f16_is_quantized_to_the_same_bytes() {
    all_calls::<f16>();
}

#[test]
fn f32_is_quantized_to_the_same_bytes() {
    all_calls::<f32>();
}

/// Scales as bytes.
fn scale_bytes(scales: &[E4M3]) -> Vec<u8> {
    scales.iter().map(|scale| scale.to_bits()).collect()
}

/// A packed matrix of all codes, and scales of which some are NaN.
fn packed([rows, cols]: [usize; 2], blocks: Blocks) -> (Vec<u8>, Vec<E4M3>) {
    let random = |i: usize| splitmix64(&mut (i as u64)) as u8;
    let mut codes: Vec<u8> = (0..rows * cols.div_ceil(2)).map(random).collect();
    if cols % 2 == 1 {
        codes.chunks_mut(cols.div_ceil(2)).for_each(|row| row[cols / 2] &= 0xF);
    }
    let scales =
        (0..blocks.grid(rows, cols).iter().product()).map(|i| E4M3::from_bits(random(i + 1000))).collect();
    (codes, scales)
}

fn dequantizes<D: Element>(modules: &[Module; 2], size: [usize; 2], blocks: Blocks) {
    let [rows, cols] = size;
    let (codes, scales) = packed(size, blocks);
    // The second decodes values of f16 to infinity and to subnormals, the last of f32 to subnormals.
    for encode in [4.0, 1e-3, 1e6, f32::MAX] {
        let tensor = TensorScale::from_encode(encode);
        let mut out = vec![D::from_f32(0.0); rows * cols];
        slice::dequantize_nvfp4(&codes, rows, cols, blocks, &scales, tensor, &mut out).unwrap();
        let case = Case::new([3, 1, 1], 256).input(codes.clone()).input(scale_bytes(&scales));
        let case = case.input(floats(&[tensor.encode(), tensor.decode()]));
        let case = case.u32((blocks == Blocks::B16x16).into()).u64(rows).u64(cols);
        let case = case.buffer(None, bytes(&out)).u32(D::DTYPE);
        check(&case, modules, "dequantize_nvfp4", 0, &(size, blocks, D::DTYPE));
    }
}

#[test]
fn codes_are_dequantized_to_the_same_bytes() {
    let modules = modules();
    for size in SIZES {
        for blocks in [Blocks::B1x16, Blocks::B16x16] {
            dequantizes::<f32>(&modules, size, blocks);
            dequantizes::<bf16>(&modules, size, blocks);
            dequantizes::<f16>(&modules, size, blocks);
        }
    }
}

#[test]
fn codes_times_scales_are_exact_in_bf16() {
    let modules = modules();
    for (size @ [rows, cols], width) in SIZES.into_iter().zip([8, 16, 64, 192, 263]) {
        for blocks in [Blocks::B1x16, Blocks::B16x16] {
            let (codes, scales) = packed(size, blocks);
            let mut exact = vec![0.0_f32; rows * cols];
            let one = TensorScale::from_encode(1.0);
            slice::dequantize_nvfp4(&codes, rows, cols, blocks, &scales, one, &mut exact).unwrap();
            let mut out = vec![bf16::ZERO; rows * width];
            for (out, exact) in out.chunks_mut(width).zip(exact.chunks(cols)) {
                out.iter_mut().zip(exact).for_each(|(out, v)| *out = bf16::from_f32(*v));
            }
            let all = out.chunks(width).flat_map(|row| &row[..cols]).zip(&exact);
            assert!(all.into_iter().all(|(out, v)| out.to_f32() == *v || v.is_nan()));
            let case = Case::new([2, 1, 1], 256).input(codes).input(scale_bytes(&scales));
            let case = case.u32((blocks == Blocks::B16x16).into()).u64(rows).u64(cols).u64(width);
            let case = case.buffer(None, bytes(&out));
            check(&case, &modules, "nvfp4_scaled_codes", 0, &(size, blocks, width));
        }
    }
}

#[test]
fn packed_codes_are_transposed() {
    let modules = modules();
    for size @ [rows, cols] in SIZES.into_iter().chain([[2, 7], [7, 2], [23, 15]]) {
        let (codes, _) = packed(size, Blocks::B1x16);
        let code = |r: usize, c: usize| {
            let byte = |byte: &u8| byte >> (4 * (c % 2)) & 0xF;
            if r < rows { byte(&codes[r * cols.div_ceil(2) + c / 2]) } else { 0 }
        };
        let row = |c: usize| (0..rows).step_by(2).map(move |r| (r, c));
        let turned = (0..cols).flat_map(row).map(|(r, c)| code(r, c) | code(r + 1, c) << 4).collect();
        let grid = (rows.div_ceil(128) * cols.div_ceil(128)) as u32;
        let case = Case::new([grid, 1, 1], 256).input(codes.clone()).u64(rows).u64(cols).buffer(None, turned);
        check(&case, &modules, "nvfp4_transpose", 0, &size);
    }
}

#[test]
fn factors_are_laid_out_for_the_matrix_product() {
    let modules = modules();
    for size @ [rows, depth] in SIZES {
        for blocks in [Blocks::B1x16, Blocks::B16x16] {
            let (_, scales) = packed(size, blocks);
            let (across, [height, _]) = (depth.div_ceil(16), blocks.size(depth));
            let mut out = vec![0; rows.next_multiple_of(128) * across.next_multiple_of(4)];
            for (r, b) in (0..rows).flat_map(|r| (0..across).map(move |b| (r, b))) {
                let tile = r / 128 * across.div_ceil(4) + b / 4;
                let place = tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + b % 4;
                out[place] = scales[r / height * across + b].to_bits();
            }
            let case = Case::new([2, 1, 1], 256).input(scale_bytes(&scales));
            let case = case.u32((blocks == Blocks::B16x16).into()).u64(rows).u64(depth);
            let n = out.len();
            check(&case.buffer(None, out).u64(n), &modules, "nvfp4_factors", 0, &(size, blocks));
        }
    }
}

#[test]
fn recorded_factors_are_laid_out_as_recorded() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/nvfp4/layouts.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let modules = modules();
    for name in ["0", "1", "2"] {
        let [scales, buffer] = ["", ".out"].map(|end| file.tensor(&format!("{name}{end}")).unwrap());
        let &[rows, across] = scales.shape() else { panic!("{name}: {:?}", scales.shape()) };
        let (out, n) = (buffer.data().to_vec(), buffer.data().len());
        // A last block of which there is one column, and a whole one.
        for depth in [16 * across - 15, 16 * across] {
            let case = Case::new([2, 1, 1], 256).input(scales.data().to_vec());
            let case = case.u32(0).u64(rows).u64(depth).buffer(None, out.clone()).u64(n);
            check(&case, &modules, "nvfp4_factors", 0, &(name, depth));
        }
    }
}

#[test]
fn alpha_is_the_product_of_what_decodes() {
    let case = Case::new([1; 3], 32).input(floats(&[4.0, 0.25])).input(floats(&[1e3, 1e-3]));
    check(&case.buffer(None, floats(&[0.25 * 1e-3, 0.0, 1.0])), &modules(), "nvfp4_alpha", 0, &());
}
