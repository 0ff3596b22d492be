//! Instructions that compute with f32, and conversions between floats and integers.

use super::float16::{f16_to_f32, f32_to_bf16, f32_to_f16};
use super::integer::set_both;
use super::listing::Instruction;
use super::operand::Predicate;
use super::thread::{Operands, Thread};
use crate::workspace::Result;

pub(super) fn step(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let mut operands = Operands::of(instruction);
    match instruction.opcode.as_str() {
        "FSETP" => return compare(thread, instruction, &mut operands),
        "FCHK" => {
            // Only divisors and quotients at the ends of the range take the slow path.
            let target = operands.predicate()?;
            thread.set_predicate(target, false);
            return Ok(());
        }
        "F2I" => return to_integer(thread, instruction, &mut operands),
        _ => {}
    }
    let target = operands.target()?;
    let result = match instruction.opcode.as_str() {
        "FADD" => read(thread, &mut operands)? + read(thread, &mut operands)?,
        "FMUL" => read(thread, &mut operands)? * read(thread, &mut operands)?,
        "FFMA" => {
            let (a, b) = (read(thread, &mut operands)?, read(thread, &mut operands)?);
            a.mul_add(b, read(thread, &mut operands)?)
        }
        "FMNMX" => {
            let (a, b) = (read(thread, &mut operands)?, read(thread, &mut operands)?);
            let takes_least = thread.is(operands.predicate()?);
            match instruction.has("NAN") && (a.is_nan() || b.is_nan()) {
                true => f32::NAN,
                false if takes_least => a.min(b),
                false => a.max(b),
            }
        }
        "FSEL" => {
            let (yes, no) = (read(thread, &mut operands)?, read(thread, &mut operands)?);
            if thread.is(operands.predicate()?) { yes } else { no }
        }
        "FSET" => {
            let (a, b) = (read(thread, &mut operands)?, read(thread, &mut operands)?);
            let with = operands.optional_predicate().is_none_or(|with| thread.is(with));
            let holds = relation(instruction, a, b)?;
            let holds = if instruction.has("OR") { holds || with } else { holds && with };
            let bits = match (holds, instruction.has("BF")) {
                (false, _) => 0,
                (true, true) => 1.0_f32.to_bits(),
                (true, false) => u32::MAX,
            };
            f32::from_bits(bits)
        }
        "MUFU" => special(instruction, read(thread, &mut operands)?)?,
        "FRND" => {
            let x = read(thread, &mut operands)?;
            match () {
                () if instruction.has("FLOOR") => x.floor(),
                () if instruction.has("CEIL") => x.ceil(),
                () if instruction.has("TRUNC") => x.trunc(),
                () => x.round_ties_even(),
            }
        }
        "I2F" | "I2FP" | "F2F" => convert(thread, instruction, &mut operands)?,
        unknown => return Err(format!("the instruction {unknown} is unknown here").into()),
    };
    thread.set(target, result.to_bits());
    Ok(())
}

fn read(thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result<f32> {
    let value = operands.next_value()?;
    thread.float(value)
}

/// The functions of the special unit.
fn special(instruction: &Instruction, x: f32) -> Result<f32> {
    Ok(match instruction.modifiers.first().map_or("", String::as_str) {
        "RCP" => 1.0 / x,
        "RSQ" => 1.0 / x.sqrt(),
        "SQRT" => x.sqrt(),
        "EX2" => x.exp2(),
        "LG2" => x.log2(),
        "SIN" => x.sin(),
        "COS" => x.cos(),
        "TANH" => x.tanh(),
        unknown => return Err(format!("the function {unknown} is unknown here").into()),
    })
}

fn convert(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result<f32> {
    Ok(match instruction.opcode.as_str() {
        "I2F" | "I2FP" => {
            let value = operands.next_value()?;
            match () {
                () if instruction.has("U64") => thread.wide(value)? as f32,
                () if instruction.has("S64") => thread.wide(value)? as i64 as f32,
                () if instruction.has("U32") => thread.integer(value)? as f32,
                () => thread.integer(value)? as i32 as f32,
            }
        }
        _ => {
            let kinds: Vec<&str> = instruction.modifiers.iter().map(String::as_str).collect();
            let value = operands.next_value()?;
            if kinds.ends_with(&["F16", "F32"]) || kinds.starts_with(&["F16", "F32"]) {
                f32::from_bits(f32_to_f16(thread.float(value)?).into())
            } else if kinds.starts_with(&["BF16", "F32"]) {
                f32::from_bits(f32_to_bf16(thread.float(value)?).into())
            } else if kinds.starts_with(&["F32", "F16"]) {
                f16_to_f32(thread.bits(value)? as u16)
            } else {
                return Err("a conversion that is unknown here".into());
            }
        }
    })
}

fn compare(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result {
    let targets: [Predicate; 2] = [operands.predicate()?, operands.predicate()?];
    let (a, b) = (read(thread, operands)?, read(thread, operands)?);
    let with = operands.predicate()?;
    let with = thread.is(with);
    let holds = relation(instruction, a, b)?;
    set_both(thread, instruction, targets, holds, with);
    Ok(())
}

/// A relation's name ends with U where it also holds for NaN.
fn relation(instruction: &Instruction, a: f32, b: f32) -> Result<bool> {
    let is_relation = |word: &&String| !["BF", "FTZ", "AND", "OR", "XOR"].contains(&word.as_str());
    let name = instruction.modifiers.iter().find(is_relation).map_or("", String::as_str);
    let unordered = a.is_nan() || b.is_nan();
    Ok(match name {
        "EQ" => a == b,
        "NE" => a != b && !unordered,
        "LT" => a < b,
        "LE" => a <= b,
        "GT" => a > b,
        "GE" => a >= b,
        "EQU" => a == b || unordered,
        "NEU" => a != b,
        "LTU" => a < b || unordered,
        "LEU" => a <= b || unordered,
        "GTU" => a > b || unordered,
        "GEU" => a >= b || unordered,
        "NUM" => !unordered,
        "NAN" => unordered,
        unknown => return Err(format!("the comparison {unknown} is unknown here").into()),
    })
}

fn to_integer(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result {
    let target = operands.target()?;
    let x = read(thread, operands)?;
    let x = match () {
        () if instruction.has("TRUNC") => x.trunc(),
        () if instruction.has("FLOOR") => x.floor(),
        () if instruction.has("CEIL") => x.ceil(),
        () => x.round_ties_even(),
    };
    match () {
        () if instruction.has("U64") => thread.set_words(target, &[x as u64 as u32, (x as u64 >> 32) as u32]),
        () if instruction.has("S64") => thread.set_words(target, &[x as i64 as u32, (x as i64 >> 32) as u32]),
        () if instruction.has("U32") => thread.set(target, x as u32),
        () => thread.set(target, x as i32 as u32),
    }
    Ok(())
}
