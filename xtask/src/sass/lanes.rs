//! Instructions that ask where a thread is and what the other lanes of its warp have: the same as it has.

use super::listing::Instruction;
use super::operand::Operand;
use super::thread::{Operands, Thread};
use crate::workspace::Result;

pub(super) fn step(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let mut operands = Operands::of(instruction);
    match instruction.opcode.as_str() {
        "S2R" | "S2UR" => {
            let target = operands.target()?;
            let place = thread.place;
            let value = match operands.name()? {
                "SR_TID.X" => place.thread,
                "SR_CTAID.X" => place.block,
                "SR_LANEID" => place.thread % 32,
                "SR_LTMASK" | "SR_LEMASK" => (1 << (place.thread % 32)) - 1,
                _ => 0,
            };
            thread.set(target, value);
        }
        "CS2R" => {
            let target = operands.target()?;
            thread.set_words(target, if instruction.has("32") { &[0] } else { &[0, 0] });
        }
        "B2R" => {
            let target = operands.target()?;
            thread.set(target, 0);
            if let Some(predicate) = operands.optional_predicate() {
                thread.set_predicate(predicate, thread.vote);
            }
        }
        "SHFL" => {
            if let Some(in_range) = operands.optional_predicate() {
                thread.set_predicate(in_range, true);
            }
            let target = operands.target()?;
            let value = operands.next_value()?;
            let value = thread.integer(value)?;
            thread.set(target, value);
        }
        "VOTE" | "VOTEU" => vote(thread, instruction)?,
        "REDUX" => {
            let target = operands.target()?;
            let value = operands.next_value()?;
            let value = thread.integer(value)?;
            thread.set(target, value);
        }
        "MATCH" => {
            if let Some(all) = operands.optional_predicate() {
                thread.set_predicate(all, true);
            }
            let target = operands.target()?;
            thread.set(target, u32::MAX);
        }
        unknown => return Err(format!("the instruction {unknown} is unknown here").into()),
    }
    Ok(())
}

fn vote(thread: &mut Thread<'_>, instruction: &Instruction) -> Result {
    let input = instruction.operands.iter().rev().find_map(|operand| match operand {
        Operand::Predicate(predicate) => Some(*predicate),
        _ => None,
    });
    let value = input.is_some_and(|input| thread.is(input));
    let mut operands = Operands::of(instruction);
    // Of `VOTE.ANY R2, PT, P0` the mask is a value, the verdict a predicate.
    match instruction.operands.first() {
        Some(Operand::Predicate(_)) => {
            let target = operands.predicate()?;
            thread.set_predicate(target, value);
        }
        _ => {
            let target = operands.target()?;
            thread.set(target, if value { u32::MAX } else { 0 });
            if operands.rest().len() > 1
                && let Some(target) = operands.optional_predicate()
            {
                thread.set_predicate(target, value);
            }
        }
    }
    Ok(())
}
