//! Reference of `optimizer_step`.
//!
//! Blocks of 128 elements of a row are independent of each other, so pieces of whole blocks are the work of threads.

use super::loss_scale::decide;
use super::{Buffer, dispatch::vectorized, parallel, parallel::CHUNK, quantize};
use crate::element::Float;
use crate::ops::{
    AdamWStep, Factors, MOMENT_BLOCK, Moment, NormCheck, OptimizerGroup, OptimizerTensor, StepCheck,
    UpdateRule,
};
use crate::{DType, Fp8Tensor, Result};
use fp8_format::{E4M3, philox};
use half::{bf16, f16};

/// Random numbers of one counter.
const LANES: usize = 4;
// Pieces of a long row are whole blocks.
const _: () = assert!(CHUNK.is_multiple_of(MOMENT_BLOCK));

/// The use of an element's random numbers.
#[derive(Clone, Copy)]
enum Stream {
    First = 0,
    Second = 1,
    Param = 2,
}

pub(crate) fn optimizer_step(
    groups: &mut [OptimizerGroup<'_, '_>],
    check: StepCheck<'_>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let decided = match check {
        StepCheck::Never => Some(None),
        StepCheck::Norm(NormCheck { norm, skipped }) => {
            let is_finite = norm.item()?.is_finite();
            if !is_finite {
                skipped.add_one()?;
            }
            is_finite.then_some(None)
        }
        StepCheck::Scaled(step) => decide(&step)?.map(Some),
    };
    if let Some(decided) = decided {
        for (tensors, numbers) in groups.iter_mut() {
            let step = numbers.step();
            let factors =
                decided.as_ref().map_or_else(|| Factors::new(&step), |decided| decided.factors(&step));
            tensors.iter_mut().try_for_each(|tensor| one(tensor, &factors, &step))?;
        }
    }
    let quantized = |tensor: &OptimizerTensor<'_>| -> Result<Option<Fp8Tensor>> {
        let Some(slot) = tensor.slot else { return Ok(None) };
        Ok(quantize::quantize(tensor.param, &slot)?.as_fp8().cloned())
    };
    groups.iter().map(|(tensors, _)| tensors.iter().map(quantized).collect()).collect()
}

fn one(tensor: &mut OptimizerTensor<'_>, factors: &Factors, step: &AdamWStep) -> Result<()> {
    let (name, cols) = (tensor.name, tensor.param.shape().last_dim());
    let main = tensor.main_param.as_deref_mut();
    let (rule, second) = match &mut tensor.rule {
        UpdateRule::AdamW { exp_avg_sq } => {
            (Rule::AdamW, Some(Values::of(exp_avg_sq, &format!("{name}.exp_avg_sq"))?))
        }
        UpdateRule::Lion => (Rule::Lion, None),
        UpdateRule::Sgd { nesterov } => (Rule::Sgd { nesterov: *nesterov }, None),
    };
    let rest = Piece {
        first_block: 0,
        param: &mut [],
        main: main.map(|main| main.as_mut_slice::<f32>(&format!("{name}.main_param"))).transpose()?,
        grad: tensor.main_grad.cpu_slice("adamw")?,
        first: Values::of(&mut tensor.exp_avg, &format!("{name}.exp_avg"))?,
        second,
    };
    let (stochastic, key) = (tensor.is_rounded_stochastically, tensor.seed);
    let update = Update { factors, step, rule, key };
    match tensor.param.cpu_buffer("adamw")? {
        Buffer::BF16(_) if stochastic => {
            update.run(rest.with(tensor.param.as_mut_slice::<bf16>(name)?), cols, |block, values, out| {
                update.round_bf16(block, Stream::Param, values, out);
            });
        }
        Buffer::BF16(_) => update.run(rest.with(tensor.param.as_mut_slice::<bf16>(name)?), cols, nearest),
        Buffer::F16(_) => update.run(rest.with(tensor.param.as_mut_slice::<f16>(name)?), cols, nearest),
        _ => update.run(rest.with(tensor.param.as_mut_slice::<f32>(name)?), cols, nearest),
    }
    Ok(())
}

#[inline(always)]
fn nearest<T: Float>(_: u64, values: &[f32], out: &mut [T]) {
    T::round(values, out);
}

/// A moment's elements, as they are stored.
enum Values<'a> {
    F32(&'a mut [f32]),
    BF16(&'a mut [bf16]),
    /// Codes, and the scale of each block.
    Fp8(&'a mut [u8], &'a mut [f32]),
}

impl<'a> Values<'a> {
    fn of(moment: &'a mut Moment<'_>, name: &str) -> Result<Self> {
        Ok(match &mut moment.scale_inv {
            Some(scale_inv) => Self::Fp8(
                moment.values.as_mut_slice(name)?,
                scale_inv.as_mut_slice(&format!("{name}_scale_inv"))?,
            ),
            None if moment.values.dtype() == DType::BF16 => Self::BF16(moment.values.as_mut_slice(name)?),
            None => Self::F32(moment.values.as_mut_slice(name)?),
        })
    }

    fn split(self, elements: usize, blocks: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => {
                let (head, rest) = values.split_at_mut(elements);
                (Self::F32(head), Self::F32(rest))
            }
            Self::BF16(values) => {
                let (head, rest) = values.split_at_mut(elements);
                (Self::BF16(head), Self::BF16(rest))
            }
            Self::Fp8(codes, scales) => {
                let (codes, rest) = codes.split_at_mut(elements);
                let (scales, scales_rest) = scales.split_at_mut(blocks);
                (Self::Fp8(codes, scales), Self::Fp8(rest, scales_rest))
            }
        }
    }

    /// Reads the elements from `start` on, of block `block`. Codes give code · scale.
    #[inline(always)]
    fn read(&self, start: usize, block: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        match self {
            Self::F32(values) => out.copy_from_slice(&values[range]),
            Self::BF16(values) => bf16::widen(&values[range], out),
            Self::Fp8(codes, scales) => {
                let scale = scales[block];
                out.iter_mut()
                    .zip(&codes[range])
                    .for_each(|(v, code)| *v = E4M3::from_bits(*code).to_f32() * scale);
            }
        }
    }
}

/// Whole blocks of one parameter, consecutive ones.
struct Piece<'a, T> {
    first_block: u64,
    param: &'a mut [T],
    main: Option<&'a mut [f32]>,
    grad: &'a [f32],
    first: Values<'a>,
    /// AdamW's second moment.
    second: Option<Values<'a>>,
}

impl<'a> Piece<'a, f32> {
    /// The same piece of this parameter.
    fn with<T>(self, param: &'a mut [T]) -> Piece<'a, T> {
        let Self { first_block, main, grad, first, second, .. } = self;
        Piece { first_block, param, main, grad, first, second }
    }
}

impl<'a, T> Piece<'a, T> {
    fn split(self, elements: usize, blocks: usize) -> (Self, Self) {
        let Self { first_block, param, main, grad, first, second } = self;
        let (param, param_rest) = param.split_at_mut(elements);
        let (main, main_rest) = main.map(|main| main.split_at_mut(elements)).unzip();
        let (grad, grad_rest) = grad.split_at(elements);
        let (first, first_rest) = first.split(elements, blocks);
        let (second, second_rest) = second.map(|second| second.split(elements, blocks)).unzip();
        let rest = Self {
            first_block: first_block + blocks as u64,
            param: param_rest,
            main: main_rest,
            grad: grad_rest,
            first: first_rest,
            second: second_rest,
        };
        (Self { first_block, param, main, grad, first, second }, rest)
    }
}

/// The numbers that all blocks of a parameter are updated with.
struct Update<'a> {
    factors: &'a Factors,
    step: &'a AdamWStep,
    rule: Rule,
    key: u64,
}

/// The rule of an update.
#[derive(Clone, Copy)]
enum Rule {
    AdamW,
    Lion,
    Sgd { nesterov: bool },
}

impl Update<'_> {
    /// Updates all elements of rows of `cols`. `round` stores the new parameters of a block.
    fn run<T: Float>(
        &self,
        mut rest: Piece<'_, T>,
        cols: usize,
        round: impl Fn(u64, &[f32], &mut [T]) + Sync,
    ) {
        let mut pieces = Vec::new();
        // Elements of this row that are not in a piece yet.
        let mut left = 0;
        while !rest.param.is_empty() {
            if left == 0 {
                left = cols;
            }
            let (elements, width) = if cols <= CHUNK {
                ((CHUNK / cols * cols).min(rest.param.len()), cols)
            } else {
                (left.min(CHUNK), left.min(CHUNK))
            };
            left -= width.min(left);
            let blocks = elements / width * width.div_ceil(MOMENT_BLOCK);
            let (piece, others) = rest.split(elements, blocks);
            pieces.push((piece, width));
            rest = others;
        }
        parallel::for_each(pieces.into_iter(), |(mut piece, width)| {
            vectorized(|| {
                let (mut start, mut block) = (0, 0);
                while start < piece.param.len() {
                    let left = width - start % width;
                    let len = left.min(MOMENT_BLOCK);
                    self.block(&mut piece, start, len, block, &round);
                    start += len;
                    block += 1;
                }
            });
        });
    }

    #[inline(always)]
    fn block<T: Float>(
        &self,
        piece: &mut Piece<'_, T>,
        start: usize,
        len: usize,
        block: usize,
        round: &impl Fn(u64, &[f32], &mut [T]),
    ) {
        let [mut values, mut first, mut second] = [[0.0; MOMENT_BLOCK]; 3];
        let (values, first, second) = (&mut values[..len], &mut first[..len], &mut second[..len]);
        let range = start..start + len;
        match &piece.main {
            Some(main) => values.copy_from_slice(&main[range.clone()]),
            None => T::widen(&piece.param[range.clone()], values),
        }
        piece.first.read(start, block, first);
        if let Some(stored) = &piece.second {
            stored.read(start, block, second);
            if let Values::Fp8(..) = stored {
                second.iter_mut().for_each(|v| *v *= *v);
            }
        }
        let moments = first.iter_mut().zip(second.iter_mut());
        for ((value, &g), (m, v)) in values.iter_mut().zip(&piece.grad[range.clone()]).zip(moments) {
            *value = self.one(*value, g, m, v);
        }
        let number = piece.first_block + block as u64;
        match &mut piece.first {
            Values::F32(stored) => stored[range.clone()].copy_from_slice(first),
            Values::BF16(stored) => self.round_bf16(number, Stream::First, first, &mut stored[range.clone()]),
            Values::Fp8(codes, scales) => {
                scales[block] = self.first_codes(number, first, &mut codes[range.clone()]);
            }
        }
        match &mut piece.second {
            None => {}
            Some(Values::F32(stored)) => stored[range.clone()].copy_from_slice(second),
            Some(Values::BF16(stored)) => {
                self.round_bf16(number, Stream::Second, second, &mut stored[range.clone()])
            }
            Some(Values::Fp8(codes, scales)) => {
                scales[block] = self.second_codes(number, second, &mut codes[range.clone()]);
            }
        }
        if let Some(main) = &mut piece.main {
            main[range.clone()].copy_from_slice(values);
        }
        round(number, values, &mut piece.param[range]);
    }

    /// The new parameter; the moments become the new ones.
    #[inline(always)]
    fn one(&self, p: f32, grad: f32, m: &mut f32, v: &mut f32) -> f32 {
        let Self { factors, step, .. } = self;
        let g = grad * factors.grad_scale;
        match self.rule {
            Rule::AdamW => factors.step(p, grad, m, v),
            Rule::Lion => {
                let c = *m + factors.new_first * (g - *m);
                *m += factors.new_second * (g - *m);
                let sign = if c > 0.0 {
                    1.0
                } else if c < 0.0 {
                    -1.0
                } else {
                    c
                };
                p * factors.keep - step.lr * sign
            }
            Rule::Sgd { nesterov } => {
                let d = g + step.weight_decay * p;
                *m = step.beta1 * *m + d;
                p - step.lr * if nesterov { d + step.beta1 * *m } else { *m }
            }
        }
    }

    /// Calls `f` with each value of a block, its random number, and the place of its result.
    #[inline(always)]
    fn each<T>(&self, block: u64, stream: Stream, values: &[f32], out: &mut [T], f: impl Fn(f32, u32) -> T) {
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let [c2, c3] = halves(self.step.step);
        let first = (block * (MOMENT_BLOCK / LANES) as u64) | ((stream as u64) << 62);
        for ((values, out), quad) in values.chunks(LANES).zip(out.chunks_mut(LANES)).zip(first..) {
            let [c0, c1] = halves(quad);
            let random = philox::block([c0, c1, c2, c3], halves(self.key));
            for ((out, value), random) in out.iter_mut().zip(values).zip(random) {
                *out = f(*value, random);
            }
        }
    }

    #[inline(always)]
    fn round_bf16(&self, block: u64, stream: Stream, values: &[f32], out: &mut [bf16]) {
        self.each(block, stream, values, out, stochastic_bf16);
    }

    /// Stores the codes of a block of the first moment and returns their scale.
    #[inline(always)]
    fn first_codes(&self, block: u64, values: &[f32], codes: &mut [u8]) -> f32 {
        let [scale_inv, scale] = scales(values.iter().fold(0.0, |amax, v| v.abs().max(amax)));
        self.each(block, Stream::First, values, codes, |value, random| {
            E4M3::from_f32_stochastic(value * scale, random).to_bits()
        });
        scale_inv
    }

    /// Stores the codes of the roots of a block of the second moment and returns their scale.
    #[inline(always)]
    fn second_codes(&self, block: u64, values: &[f32], codes: &mut [u8]) -> f32 {
        let [scale_inv, scale] = scales(values.iter().fold(0.0, |amax, v| v.sqrt().max(amax)));
        self.each(block, Stream::Second, values, codes, |value, random| second_code(value, scale, random));
        scale_inv
    }
}

/// The scale of a block with this amax, a power of two, and its inverse.
fn scales(amax: f32) -> [f32; 2] {
    // Carries into the exponent if the mantissa is greater than that of 448.
    let rounded = (amax.to_bits() + 0x1F_FFFF) >> 23;
    let field = match rounded {
        0..9 => 1,
        9..=254 => rounded - 8,
        _ => 246,
    };
    [field, 254 - field].map(|field| f32::from_bits(field << 23))
}

/// The code of the root of v: of the two around it, so that the square of what is stored is v in the mean.
#[inline(always)]
fn second_code(v: f32, scale: f32, random: u32) -> u8 {
    let low = E4M3::from_f32_stochastic(v.sqrt() * scale, 0).to_bits();
    // The largest value and NaN, which have no code above.
    if low >= 0x7E {
        return low;
    }
    let [a, b] = [low, low + 1].map(|code| E4M3::from_bits(code).to_f32());
    let part = (v * scale * scale - a * a) / (b * b - a * a);
    let code = low + u8::from(((random >> 8) as f32) < part * 16_777_216.0);
    if code == 0 && v > 0.0 { 1 } else { code }
}

/// Rounds to one of the two neighbours: up in magnitude if the bits that are dropped and 16 random bits carry. Finite values
/// stay finite.
#[inline(always)]
fn stochastic_bf16(value: f32, random: u32) -> bf16 {
    let magnitude = value.to_bits() & 0x7FFF_FFFF;
    if magnitude >= 0x7F80_0000 {
        return bf16::nearest(value);
    }
    let rounded = ((magnitude + (random >> 16)) >> 16).min(0x7F7F);
    bf16::from_bits((rounded | (value.to_bits() >> 16 & 0x8000)) as u16)
}
