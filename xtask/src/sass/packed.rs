//! Pairs of 16-bit floats in a register, and the instructions that compute with them.

use super::float16::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::listing::Instruction;
use super::operand::Half;
use super::thread::{Operands, Thread};
use crate::workspace::Result;

/// The type of both numbers of a pair.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    is_bf16: bool,
}

impl Lanes {
    pub(super) fn of(instruction: &Instruction) -> Self {
        Self { is_bf16: instruction.modifiers.iter().any(|modifier| modifier.starts_with("BF16")) }
    }

    pub(super) fn split(self, word: u32) -> [f32; 2] {
        let decode = if self.is_bf16 { bf16_to_f32 } else { f16_to_f32 };
        [decode(word as u16), decode((word >> 16) as u16)]
    }

    pub(super) fn join(self, [low, high]: [f32; 2]) -> u32 {
        let encode = if self.is_bf16 { f32_to_bf16 } else { f32_to_f16 };
        u32::from(encode(low)) | u32::from(encode(high)) << 16
    }

    /// The next operand as a pair. Two numbers stand for one pair, the upper first.
    pub(super) fn read(self, thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result<[f32; 2]> {
        let value = operands.next_value()?;
        if let super::operand::Source::Number(high) = value.source {
            let low = operands.number()?;
            return Ok([f32::from_bits(low), f32::from_bits(high)]);
        }
        let word = thread.bits(value)?;
        let [low, high] = self.split(word);
        let pair = match value.half {
            None => [low, high],
            Some(Half::Low) => [low, low],
            Some(Half::High) => [high, high],
        };
        let absolute = |x: f32| if value.is_absolute { x.abs() } else { x };
        let signed = |x: f32| if value.is_negated { -absolute(x) } else { absolute(x) };
        Ok(pair.map(signed))
    }
}

/// `HADD2`, `HMUL2`, `HFMA2`, `HMNMX2` and `VHMNMX`; of `HADD2.F32` the result is one f32.
pub(super) fn arithmetic(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let lanes = Lanes::of(instruction);
    let mut operands = Operands::of(instruction);
    let target = operands.target()?;
    if instruction.has("F32") {
        let (a, b) = (operands.next_value()?, operands.next_value()?);
        let sum = thread.float(a)? + thread.float(b)?;
        thread.set(target, sum.to_bits());
        return Ok(());
    }
    let a = lanes.read(thread, &mut operands)?;
    let b = lanes.read(thread, &mut operands)?;
    let each = |f: &dyn Fn(f32, f32) -> f32| [f(a[0], b[0]), f(a[1], b[1])];
    let result = match instruction.opcode.as_str() {
        "HADD2" => each(&|a, b| a + b),
        "HMUL2" => each(&|a, b| a * b),
        "HFMA2" => {
            let c = lanes.read(thread, &mut operands)?;
            [a[0] * b[0] + c[0], a[1] * b[1] + c[1]]
        }
        _ => {
            // `VHMNMX` may have a third pair.
            let third = match operands.rest() {
                [_, _, ..] => Some(lanes.read(thread, &mut operands)?),
                _ => None,
            };
            let takes_least = thread.is(operands.predicate()?);
            let propagates = instruction.has("NAN");
            let extreme = |a: f32, b: f32| match (a.is_nan(), b.is_nan()) {
                (true, _) | (_, true) if propagates => f32::NAN,
                _ if takes_least => a.min(b),
                _ => a.max(b),
            };
            let [low, high] = each(&extreme);
            third.map_or([low, high], |[c, d]| [extreme(low, c), extreme(high, d)])
        }
    };
    thread.set(target, lanes.join(result));
    Ok(())
}

/// `F2FP`: two floats, or FP8 codes, to a pair and back. Codes are those of 1.0 whatever the value was.
pub(super) fn convert(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    const ONES: u32 = 0x3838;
    let mut operands = Operands::of(instruction);
    let target = operands.target()?;
    let is_fp8 = instruction.has("E4M3") || instruction.has("E5M2");
    if is_fp8 && instruction.has("UNPACK_B") {
        thread.set(target, Lanes { is_bf16: false }.join([1.0, 1.0]));
        return Ok(());
    }
    let (a, b) = (operands.next_value()?, operands.next_value()?);
    let (high, low) = (thread.float(a)?, thread.float(b)?);
    if is_fp8 {
        let kept = if operands.is_empty() { 0 } else { thread.integer(operands.next_value()?)? };
        thread.set(target, ONES | kept << 16);
    } else {
        thread.set(target, Lanes::of(instruction).join([low, high]));
    }
    Ok(())
}
