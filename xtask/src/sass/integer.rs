//! Instructions that compute with integers, bits and predicates.

use super::listing::Instruction;
use super::thread::{Operands, Thread};
use crate::workspace::Result;

pub(super) fn step(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let mut operands = Operands::of(instruction);
    let opcode = instruction.opcode.strip_prefix('U').unwrap_or(&instruction.opcode);
    match opcode {
        "PLOP3" => return logic_of_predicates(thread, &mut operands),
        "ISETP" => return compare(thread, instruction, &mut operands),
        "R2P" => return to_predicates(thread, &mut operands),
        "IADD3" => return add(thread, instruction, &mut operands),
        "IMAD" => return multiply(thread, instruction, &mut operands),
        "LEA" => return shift_and_add(thread, instruction, &mut operands),
        "LOP3" => return logic(thread, &mut operands),
        _ => {}
    }
    let also = operands.optional_predicate();
    let target = operands.target()?;
    let signed = !instruction.has("U32");
    let result = match opcode {
        "MOV" | "R2UR" => read(thread, &mut operands)?,
        "VIADD" => read(thread, &mut operands)?.wrapping_add(read(thread, &mut operands)?),
        "SEL" => {
            let (yes, no) = (read(thread, &mut operands)?, read(thread, &mut operands)?);
            if thread.is(operands.predicate()?) { yes } else { no }
        }
        "VIADDMNMX" => {
            let sum = read(thread, &mut operands)?.wrapping_add(read(thread, &mut operands)?);
            let bound = read(thread, &mut operands)?;
            least_or_largest(sum, bound, signed, thread.is(operands.predicate()?))
        }
        "VIMNMX" => {
            let (a, b) = (read(thread, &mut operands)?, read(thread, &mut operands)?);
            least_or_largest(a, b, signed, thread.is(operands.predicate()?))
        }
        "SHF" => shift(thread, instruction, &mut operands)?,
        "PRMT" => permute(thread, &mut operands)?,
        "IABS" => (read(thread, &mut operands)? as i32).unsigned_abs(),
        "POPC" => read(thread, &mut operands)?.count_ones(),
        "BREV" => read(thread, &mut operands)?.reverse_bits(),
        "FLO" => {
            let value = read(thread, &mut operands)?;
            match (value, instruction.has("SH")) {
                (0, _) => u32::MAX,
                (_, true) => value.leading_zeros(),
                (_, false) => 31 - value.leading_zeros(),
            }
        }
        "SGXT" => {
            let (value, width) = (read(thread, &mut operands)?, read(thread, &mut operands)?.clamp(1, 32));
            let up = value << (32 - width);
            if signed { (up as i32 >> (32 - width)) as u32 } else { up >> (32 - width) }
        }
        "BMSK" => {
            let (from, width) = (read(thread, &mut operands)?, read(thread, &mut operands)?);
            let ones = 1_u64.checked_shl(width).map_or(u64::MAX, |bit| bit - 1);
            ones.checked_shl(from).unwrap_or(0) as u32
        }
        "P2R" | "P2UR" => {
            operands.name()?;
            let (kept, mask) = (read(thread, &mut operands)?, operands.number()?);
            kept & !mask | thread.predicate_bits() & mask
        }
        unknown => return Err(format!("the instruction {unknown} is unknown here").into()),
    };
    if let Some(also) = also {
        thread.set_predicate(also, result != 0);
    }
    thread.set(target, result);
    Ok(())
}

fn read(thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result<u32> {
    let value = operands.next_value()?;
    thread.integer(value)
}

fn least_or_largest(a: u32, b: u32, signed: bool, least: bool) -> u32 {
    match (signed, least) {
        (true, true) => (a as i32).min(b as i32) as u32,
        (true, false) => (a as i32).max(b as i32) as u32,
        (false, true) => a.min(b),
        (false, false) => a.max(b),
    }
}

/// The sum of three numbers, with up to two carries in and out.
fn add(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result {
    let target = operands.target()?;
    let carries = [operands.optional_predicate(), operands.optional_predicate()];
    let mut sum = 0_u64;
    for _ in 0..3 {
        let value = operands.next_value()?;
        let bits = u64::from(thread.integer(value)?);
        // −x is ~x + 1, which carries where x is 0.
        sum += if value.is_negated && bits == 0 { 1 << 32 } else { bits };
    }
    if instruction.has("X") {
        while let Some(carry) = operands.optional_predicate() {
            sum += u64::from(thread.is(carry));
        }
    }
    thread.set(target, sum as u32);
    for (carry, bit) in carries.into_iter().zip([32, 33]) {
        if let Some(carry) = carry {
            thread.set_predicate(carry, sum >> bit > 0);
        }
    }
    Ok(())
}

fn multiply(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result {
    let target = operands.target()?;
    let carry = operands.optional_predicate();
    let (a, b) = (read(thread, operands)?, read(thread, operands)?);
    let signed = !instruction.has("U32");
    let product =
        if signed { i128::from(a as i32) * i128::from(b as i32) } else { i128::from(a) * i128::from(b) };
    let third = operands.next_value()?;
    if instruction.has("WIDE") {
        let mut sum = product + i128::from(thread.wide(third)?);
        if instruction.has("X") {
            while let Some(carry) = operands.optional_predicate() {
                sum += i128::from(thread.is(carry));
            }
        }
        thread.set_words(target, &[sum as u32, (sum >> 32) as u32]);
        if let Some(carry) = carry {
            thread.set_predicate(carry, sum >> 64 != 0);
        }
        return Ok(());
    }
    if instruction.has("HI") {
        let sum = product + i128::from(thread.wide(third)?);
        thread.set(target, (sum >> 32) as u32);
        return Ok(());
    }
    let mut sum = (product as u32).wrapping_add(thread.integer(third)?);
    if instruction.has("X") {
        while let Some(carry) = operands.optional_predicate() {
            sum = sum.wrapping_add(thread.is(carry).into());
        }
    }
    thread.set(target, sum);
    Ok(())
}

/// `LEA`: (a << n) + b, and `LEA.HI`: the upper word of (c : a) << n, plus b.
fn shift_and_add(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result {
    let target = operands.target()?;
    let carry = operands.optional_predicate();
    let a = operands.next_value()?;
    let (is_negated, a) = (a.is_negated, thread.integer(a)?);
    let b = read(thread, operands)?;
    if !instruction.has("HI") {
        let shift = if operands.is_empty() { 0 } else { operands.number()? };
        let shifted = a.checked_shl(shift).unwrap_or(0);
        let sum = u64::from(shifted) + u64::from(b) + u64::from(is_negated && shifted == 0) * (1 << 32);
        thread.set(target, sum as u32);
        if let Some(carry) = carry {
            thread.set_predicate(carry, sum >> 32 != 0);
        }
        return Ok(());
    }
    let upper = if instruction.has("SX32") { (a as i32 >> 31) as u32 } else { read(thread, operands)? };
    let shift = operands.number()? & 63;
    let mut sum = ((u64::from(upper) << 32 | u64::from(a)) << shift >> 32) + u64::from(b);
    if let Some(carry) = operands.optional_predicate() {
        sum += u64::from(thread.is(carry));
    }
    thread.set(target, sum as u32);
    if let Some(carry) = carry {
        thread.set_predicate(carry, sum >> 32 != 0);
    }
    Ok(())
}

fn logic(thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result {
    let also = operands.optional_predicate();
    let target = operands.target()?;
    let inputs = [read(thread, operands)?, read(thread, operands)?, read(thread, operands)?];
    let table = operands.number()?;
    let result = (0..8).filter(|row| table >> row & 1 == 1).fold(0, |result, row: u32| {
        let bits = |input: usize| if row >> (2 - input) & 1 == 1 { inputs[input] } else { !inputs[input] };
        result | (bits(0) & bits(1) & bits(2))
    });
    thread.set(target, result);
    if let Some(also) = also {
        thread.set_predicate(also, result != 0);
    }
    Ok(())
}

fn logic_of_predicates(thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result {
    let targets = [operands.predicate()?, operands.predicate()?];
    let mut row = 0;
    for _ in 0..3 {
        let input = operands.predicate()?;
        row = row * 2 + u32::from(thread.is(input));
    }
    for target in targets {
        let table = operands.number()?;
        thread.set_predicate(target, table >> row & 1 == 1);
    }
    Ok(())
}

fn compare(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result {
    let targets = [operands.predicate()?, operands.predicate()?];
    let (a, b) = (read(thread, operands)?, read(thread, operands)?);
    let with = operands.predicate()?;
    let with = thread.is(with);
    let order = if instruction.has("U32") { a.cmp(&b) } else { (a as i32).cmp(&(b as i32)) };
    // The lower words were compared before.
    let lower = match instruction.has("EX") {
        true => Some(thread.is(operands.predicate()?)),
        false => None,
    };
    let relation = instruction.modifiers.first().map_or("", String::as_str);
    let holds = match (relation, lower) {
        ("EQ", lower) => order.is_eq() && lower.unwrap_or(true),
        ("NE", lower) => order.is_ne() || lower.unwrap_or(false),
        ("LT", None) => order.is_lt(),
        ("LE", None) => order.is_le(),
        ("GT", None) => order.is_gt(),
        ("GE", None) => order.is_ge(),
        ("LT" | "LE", Some(lower)) => order.is_lt() || order.is_eq() && lower,
        ("GT" | "GE", Some(lower)) => order.is_gt() || order.is_eq() && lower,
        _ => return Err("a comparison that is unknown here".into()),
    };
    set_both(thread, instruction, targets, holds, with);
    Ok(())
}

/// Writes a comparison's result, and what its opposite gives, each combined with a predicate.
pub(super) fn set_both(
    thread: &mut Thread<'_>,
    instruction: &Instruction,
    [first, second]: [super::operand::Predicate; 2],
    holds: bool,
    with: bool,
) {
    let combined = |result: bool| match () {
        () if instruction.has("AND") => result && with,
        () if instruction.has("XOR") => result != with,
        () => result || with,
    };
    thread.set_predicate(first, combined(holds));
    thread.set_predicate(second, combined(!holds));
}

fn to_predicates(thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result {
    use super::operand::{File, Predicate};
    operands.name()?;
    let (bits, mask) = (read(thread, operands)?, operands.number()?);
    for index in (0..7).filter(|index| mask >> index & 1 == 1) {
        let predicate = Predicate { file: File::Own, index: Some(index), is_negated: false };
        thread.set_predicate(predicate, bits >> index & 1 == 1);
    }
    Ok(())
}

/// A shift of the pair of the third and the first operand, of which one word remains.
fn shift(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result<u32> {
    let (low, amount, high) = (read(thread, operands)?, read(thread, operands)?, read(thread, operands)?);
    let pair = u64::from(high) << 32 | u64::from(low);
    let (is_wide, is_upper) = (instruction.has("U64") || instruction.has("S64"), instruction.has("HI"));
    let limit = if is_wide { 63 } else { 32 };
    let amount = if instruction.has("W") { amount & (limit | 31) & !32 } else { amount.min(limit) };
    Ok(if instruction.has("L") {
        // Alone, the lower word is shifted; of `HI` the upper word takes in the lower one's bits.
        let shifted = u128::from(pair) << amount;
        (if is_upper { shifted >> 32 } else { shifted }) as u32
    } else if instruction.has("S64") || instruction.has("S32") {
        let shifted = pair as i64 >> amount.min(63);
        (if is_upper { i64::from(high as i32) >> amount } else { shifted }) as u32
    } else if is_upper {
        (u64::from(high) >> amount) as u32
    } else {
        (pair >> amount) as u32
    })
}

fn permute(thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result<u32> {
    let (a, selector, b) = (read(thread, operands)?, read(thread, operands)?, read(thread, operands)?);
    let pair = u64::from(b) << 32 | u64::from(a);
    Ok((0..4).fold(0, |word, byte| {
        let choice = selector >> (4 * byte) & 15;
        let chosen = (pair >> (8 * (choice & 7))) as u8;
        let chosen = if choice & 8 == 0 { chosen } else { (chosen as i8 >> 7) as u8 };
        word | u32::from(chosen) << (8 * byte)
    }))
}
