//! Instructions that read and write memory, and products of matrices.

use super::listing::Instruction;
use super::operand::{Address, Operand, Register};
use super::thread::{Operands, Thread};
use crate::workspace::Result;

/// A pair of 1.0 in bf16, which products and loads of matrices return.
const ONES: u32 = 0x3f80_3f80;

pub(super) fn step(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let mut operands = Operands::of(instruction);
    match instruction.opcode.as_str() {
        "LDC" | "ULDC" => load_constant(thread, instruction, &mut operands)?,
        "LDG" | "LD" | "LDL" => load(thread, instruction, operands)?,
        "LDS" => {
            let target = operands.target()?;
            let place = operands.memory()?;
            let bytes = width(instruction);
            let from = shared_place(thread, place, bytes)?;
            thread.tally.shared += bytes as u64;
            let value = word_at(&thread.shared[from..from + bytes]);
            set(thread, instruction, target, value, bytes);
        }
        "LDSM" => {
            let target = operands.target()?;
            let count = instruction.modifiers.last().and_then(|count| count.parse().ok()).unwrap_or(1);
            // Each matrix has 8 × 8 numbers of 16 bits, four bytes of it for each lane.
            thread.tally.ldmatrix += 1;
            thread.tally.shared += 4 * count as u64;
            thread.set_words(target, &vec![ONES; count]);
        }
        "STG" | "ST" | "STL" => {
            let place = operands.memory()?;
            let value = operands.target()?;
            let bytes = stored(thread, value, width(instruction));
            let at = thread.sum(place);
            thread.memory.write(at, &bytes).ok_or_else(|| astray(at))?;
        }
        "STS" => {
            let place = operands.memory()?;
            let value = operands.target()?;
            let bytes = stored(thread, value, width(instruction));
            let to = shared_place(thread, place, bytes.len())?;
            thread.tally.shared += bytes.len() as u64;
            thread.shared[to..to + bytes.len()].copy_from_slice(&bytes);
        }
        "LDGSTS" => {
            operands.memory()?;
            let from = operands.memory()?;
            let bytes = width(instruction) as u64;
            let at = thread.sum(from);
            thread.memory.read(at, 1).ok_or_else(|| astray(at))?;
            thread.memory.count(at, |traffic| traffic.read += bytes - 1);
            thread.tally.shared += bytes;
            thread.copy(bytes);
        }
        "HMMA" => multiply(thread, &mut operands)?,
        "RED" | "REDG" | "REDS" => {}
        "ATOM" | "ATOMG" | "ATOMS" => atomic(thread, instruction)?,
        // Whether an address is in shared memory.
        "QSPC" => {
            if let Some(is) = operands.optional_predicate() {
                thread.set_predicate(is, false);
            }
        }
        unknown => return Err(format!("the instruction {unknown} is unknown here").into()),
    }
    Ok(())
}

fn load_constant(thread: &mut Thread<'_>, instruction: &Instruction, operands: &mut Operands<'_>) -> Result {
    let target = operands.target()?;
    let value = operands.next_value()?;
    let super::operand::Source::Constant(bank, place) = &value.source else {
        return Err("a place in constant memory is wanted".into());
    };
    let bytes = width(instruction);
    let word = thread.constant(*bank, place, bytes)?;
    let words = [sign_extended(instruction, word) as u32, (word >> 32) as u32];
    thread.set_words(target, &words[..bytes.div_ceil(4)]);
    Ok(())
}

/// A product of matrices whose result is ones.
fn multiply(thread: &mut Thread<'_>, operands: &mut Operands<'_>) -> Result {
    let target = operands.target()?;
    thread.tally.hmma += 1;
    let one = 1.0_f32.to_bits();
    // The inputs are waited for.
    for operand in operands.rest() {
        if let Operand::Value(value) = operand {
            thread.bits(value)?;
        }
    }
    thread.set_words(target, &[one; 4]);
    Ok(())
}

/// `DEPBAR.LE SB0, 0x1` waits until at most one group of copies is under way.
pub(super) fn wait(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let groups = instruction.operands.iter().find_map(|operand| match operand {
        Operand::Value(value) => Some(value),
        _ => None,
    });
    if let Some(groups) = groups {
        let groups = thread.integer(groups)? as usize;
        thread.wait_for_copies(groups);
    }
    Ok(())
}

/// The size of an access in bytes.
fn width(instruction: &Instruction) -> usize {
    let sizes = [("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)];
    sizes.iter().find(|(name, _)| instruction.has(name)).map_or(4, |(_, size)| *size)
}

fn astray(address: u64) -> String {
    format!("address {address:#x} is in no buffer of the case")
}

fn shared_place(thread: &mut Thread<'_>, place: &Address, bytes: usize) -> Result<usize> {
    let at = thread.sum(place) as u32 as usize;
    if at + bytes > thread.shared.len() {
        return Err(format!("place {at:#x} is beyond shared memory").into());
    }
    Ok(at)
}

fn word_at(bytes: &[u8]) -> u128 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u128::from(*byte))
}

fn sign_extended(instruction: &Instruction, value: u64) -> u64 {
    match () {
        () if instruction.has("S8") => value as i8 as u64,
        () if instruction.has("S16") => value as i16 as u64,
        () => value,
    }
}

fn set(thread: &mut Thread<'_>, instruction: &Instruction, target: Register, value: u128, bytes: usize) {
    if bytes < 4 {
        thread.set(target, sign_extended(instruction, value as u64) as u32);
    } else {
        let words: Vec<u32> = (0..bytes / 4).map(|word| (value >> (32 * word)) as u32).collect();
        thread.set_words(target, &words);
    }
}

fn stored(thread: &mut Thread<'_>, value: Register, bytes: usize) -> Vec<u8> {
    let words = thread.words(value, bytes.div_ceil(4));
    words.into_iter().flat_map(u32::to_le_bytes).take(bytes).collect()
}

fn load(thread: &mut Thread<'_>, instruction: &Instruction, mut operands: Operands<'_>) -> Result {
    operands.optional_predicate();
    let target = operands.target()?;
    let place = operands.memory()?;
    let bytes = width(instruction);
    let at = thread.sum(place);
    let value = thread.memory.read(at, bytes).ok_or_else(|| astray(at))?;
    set(thread, instruction, target, word_at(&value[..bytes]), bytes);
    if !thread.memory.is_small(at) {
        thread.depart(target, bytes as u64);
    }
    Ok(())
}

/// An atomic operation returns 0, and a compare-and-swap what it compares with, so that loops end.
fn atomic(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let mut operands = Operands::of(instruction);
    let succeeded = operands.optional_predicate();
    if let Some(succeeded) = succeeded {
        thread.set_predicate(succeeded, true);
    }
    let target = match instruction.operands.get(usize::from(succeeded.is_some())) {
        Some(Operand::Value(_)) => operands.target()?,
        _ => return Ok(()),
    };
    operands.memory()?;
    let words = if instruction.has("64") { 2 } else { 1 };
    let is_swap = instruction.has("CAS") || instruction.has("CAST");
    let result = match is_swap {
        true => {
            let compared = operands.target()?;
            thread.words(compared, words)
        }
        false => vec![0; words],
    };
    thread.set_words(target, &result);
    Ok(())
}
