//! Attacks on NVFP4: quantization with rules of every kind, tensors from codes, and products of what comes of them.

use fp8_kernels::fp8_format::{Blocks, TensorScale};
use fp8_kernels::ops::{self, Accumulation, DropoutKey};
use fp8_kernels::{
    DType, DropoutDraw, Encoding, Fp8Tensor, Nvfp4Rule, Operand, Scale, Shape, Slot, StochasticRounding,
    Tensor,
};

use super::super::case::Case;
use super::super::draw::Kind;
use super::super::outcome::Tolerance;

/// The parts of a slot in NVFP4, which borrows them.
struct Parts {
    encoding: Encoding,
    blocks: Blocks,
    hadamard: bool,
    amax: Option<Tensor>,
    random: Option<DropoutDraw>,
    origin: [usize; 2],
    whole: Option<[usize; 2]>,
    columnwise: bool,
}

impl Parts {
    fn draw(case: &mut Case<'_>, matrix: [usize; 2]) -> Option<Self> {
        let encoding = if case.draw.once_in(20) { case.draw.encoding() } else { Encoding::E2M1 };
        let blocks = match case.draw.below(16) {
            0 => Blocks::B128x128,
            1 => Blocks::Mx32,
            2..=6 => Blocks::B16x16,
            _ => Blocks::B1x16,
        };
        let hadamard = case.draw.flip() && (blocks == Blocks::B1x16 || case.draw.once_in(8));
        let is_given = case.draw.once_in(3);
        let (amaxes, shape) = ([case.draw.option(3.0), case.draw.option(0.5)], case.draw.mostly(&[2]));
        let of = case.draw.dtype_like(DType::F32);
        let amax = match is_given {
            true if shape == [2] && of == DType::F32 => {
                let device = case.place();
                Some(case.aside("from_vec", || Tensor::from_vec(amaxes.to_vec(), [2], &device))?)
            }
            true => Some(case.tensor(&shape, of, Kind::Special)?.tensor),
            false => None,
        };
        let key = DropoutKey { seed: case.draw.bits(), offset: case.draw.bits() };
        let random = (case.draw.flip() && (blocks == Blocks::B1x16 || case.draw.once_in(8)))
            .then(|| DropoutDraw::from(key));
        let mut at = || match case.draw.below(12) {
            0 => case.draw.huge(),
            1 => case.draw.below(40),
            _ => 16 * case.draw.below(4),
        };
        let (origin, beyond) = ([at(), at()], [at(), at()]);
        let whole = case.draw.flip().then(|| {
            [0, 1].map(|axis| origin[axis].saturating_add(matrix[axis]).saturating_add(beyond[axis]))
        });
        let parts =
            Self { encoding, blocks, hadamard, amax, random, origin, whole, columnwise: case.draw.flip() };
        case.say(|| format!("{:?}", parts.slot()));
        Some(parts)
    }

    fn slot(&self) -> Slot<'_> {
        let (origin, whole) = (self.origin, self.whole);
        let random = self.random.as_ref().map(|draw| StochasticRounding { draw, origin, whole });
        let rule =
            Nvfp4Rule { blocks: self.blocks, hadamard: self.hadamard, amax: self.amax.as_ref(), random };
        Slot { scale: Scale::Nvfp4(rule), columnwise: self.columnwise, ..Slot::off(self.encoding) }
    }
}

pub(super) fn quantize(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype, kind) = (case.draw.below(4), case.draw.dtype(), case.draw.kind());
    let limit = if case.draw.once_in(50) { 40_000 } else { 4096 };
    let shape = case.draw.extents(rank, limit);
    let x = case.tensor(&shape, dtype, kind)?;
    let parts = Parts::draw(case, x.shape().matrix())?;
    let hadamard = case.draw.flip();
    if let Some(amax) = case.aside("nvfp4_amax", || ops::nvfp4_amax(&x, hadamard)) {
        case.exact("amax", &amax);
    }
    let y = if case.draw.flip() {
        case.call("quantize", || ops::quantize(&x, &parts.slot()))?
    } else {
        let (y, db) = case.call("quantize_dbias", || ops::quantize_dbias(&x, &parts.slot()))?;
        let atol = if kind == Kind::Wild { f64::INFINITY } else { x.numel() as f64 * x.size * 1e-6 };
        case.close("db", &db, Tolerance::of(DType::F32, atol));
        y
    };
    let Operand::Fp8(y) = y else {
        case.fail("quantize: a slot with a scale gave high precision".to_owned());
        return None;
    };
    case.nvfp4("y", &y);
    let dtype = case.draw.dtype();
    if let Some(values) = case.call("dequantize", || y.dequantize(dtype)) {
        case.exact("values", &values);
    }
    if let Some(both) = case.call("with_columnwise", || y.clone().with_columnwise()) {
        case.nvfp4("both", &both);
    }
    let turned = case.call("transposed", || y.transposed())?;
    case.nvfp4("turned", &turned);
    Some(())
}

/// Codes, scales and factors that belong together, and others.
pub(super) fn tensors(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let rank = case.draw.below(3);
    let extents = case.draw.extents(rank, 1024);
    let shape = Shape::from_slice(&extents)?;
    let [rows, cols] = shape.matrix();
    let blocks = case.draw.pick(&[Blocks::B1x16, Blocks::B1x16, Blocks::B16x16, Blocks::Row]);
    let count = |len: Option<usize>| len.filter(|&len| len <= 4096);
    let len = count(rows.checked_mul(cols.div_ceil(2)))?;
    let grid = count(blocks.grid(rows, cols).into_iter().try_fold(1, usize::checked_mul))?;
    let bytes = |case: &mut Case<'_>, len: usize| -> Option<Tensor> {
        let len = if case.draw.once_in(12) { case.draw.below(50) } else { len };
        let bytes: Vec<u8> = (0..len).map(|_| case.draw.bits() as u8).collect();
        case.bytes(bytes, &[len])
    };
    let (codes, scales) = (bytes(case, len)?, bytes(case, grid)?);
    let factors = TensorScale::from_encode(case.draw.option(4.0));
    let x = case.call("from_nvfp4", || Fp8Tensor::from_nvfp4(codes, shape, blocks, scales, factors))?;
    case.nvfp4("x", &x);
    let dtype = case.draw.dtype();
    if let Some(values) = case.call("dequantize", || x.dequantize(dtype)) {
        case.exact("values", &values);
    }
    let factors = case.tensor(&[2], DType::F32, Kind::Tame)?.tensor;
    let x = case.call("with_tensor_scale", || x.with_tensor_scale(factors, None))?;
    case.nvfp4("rescaled", &x);
    let turned = case.call("transposed", || x.transposed())?;
    case.nvfp4("turned", &turned);
    Some(())
}

pub(super) fn products(case: &mut Case<'_>) -> Option<()> {
    let all = case.draw.extents(3, 1 << 13);
    let [m, n, k] = [all[0], all[1], all[2]];
    let (kind, dtype) = (case.draw.pick(&[Kind::Tame, Kind::Special]), case.draw.dtype());
    let to = case.draw.dtype();
    let mut operand = |shape: [usize; 2]| -> Option<(Operand, f64)> {
        let x = case.tensor(&shape, dtype, kind)?;
        let mut parts = Parts::draw(case, x.shape().matrix())?;
        parts.columnwise = true;
        // An amax from elsewhere bounds nothing.
        parts.amax = None;
        let y = case.call("quantize", || ops::quantize(&x, &parts.slot()))?;
        Some((y, x.size))
    };
    let ((x, x_size), (w, w_size), (dy, dy_size)) = (operand([m, k])?, operand([n, k])?, operand([m, n])?);
    // Infinities make factors of 1 and values up to 2688; a Hadamard transform adds 16 values.
    let near = |dtype, k: usize, a: f64, b: f64| {
        let [a, b] = [a, b].map(|size| if kind == Kind::Special { size.max(2688.0) } else { size });
        Tolerance::of(dtype, k as f64 * 16.0 * a * b * 1e-6)
    };
    if let Some(y) = case.call("fprop", || ops::fprop(&x, &w, None, to, Accumulation::Fast)) {
        case.close("y", &y, near(to, k, x_size, w_size));
    }
    let (x, w) = (x.for_backward(), w.for_backward());
    if let Some(dx) = case.call("dgrad", || ops::dgrad(&dy, &w, to, Accumulation::Split)) {
        case.close("dx", &dx, near(to, n, dy_size, w_size));
    }
    if n.checked_mul(k).is_none_or(|len| len > 1 << 16) {
        return None;
    }
    let mut dw = case.tensor(&[n, k], DType::F32, Kind::Tame)?;
    case.call("wgrad", || ops::wgrad(&dy, &x, &mut dw.tensor, "dw", Accumulation::Split))?;
    let near = near(DType::F32, m, dy_size, x_size);
    case.close("dw", &dw.tensor, Tolerance { atol: near.atol + dw.size * 1e-6, ..near });
    Some(())
}
