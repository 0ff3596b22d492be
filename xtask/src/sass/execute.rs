//! The effect of one instruction on a thread.

use super::listing::Instruction;
use super::operand::{Operand, Source};
use super::thread::{Operands, Thread};
use super::{access, float, integer, lanes, packed};
use crate::workspace::Result;

/// The instruction that follows.
pub(super) enum Next {
    Following,
    /// The number of an instruction.
    Jump(usize),
    Exit,
}

pub(super) fn step(thread: &mut Thread<'_>, instruction: &Instruction) -> Result<Next> {
    match instruction.opcode.as_str() {
        "NOP" | "BSSY" | "BSYNC" | "BREAK" | "WARPSYNC" | "ENDCOLLECTIVE" | "ERRBAR" | "MEMBAR" | "YIELD"
        | "CCTL" | "NANOSLEEP" | "FENCE" | "ACQBULK" | "WARPGROUP" => {}
        "EXIT" => return Ok(Next::Exit),
        "BRA" | "CALL" | "RET" | "BRX" | "BRXU" => return branch(thread, instruction),
        "BAR" => {
            // The result of `BAR.RED.OR` and `BAR.RED.AND` is the thread's own value.
            let value = instruction.operands.iter().rev().find_map(|operand| match operand {
                Operand::Predicate(predicate) => Some(*predicate),
                _ => None,
            });
            thread.vote = value.is_some_and(|predicate| thread.is(predicate));
        }
        "DEPBAR" => access::wait(thread, instruction)?,
        "LDGDEPBAR" => thread.commit_copies(),
        "MOV" | "UMOV" | "R2UR" | "IADD3" | "UIADD3" | "VIADD" | "IMAD" | "UIMAD" | "LEA" | "ULEA"
        | "LOP3" | "ULOP3" | "PLOP3" | "UPLOP3" | "ISETP" | "UISETP" | "SEL" | "USEL" | "VIADDMNMX"
        | "VIMNMX" | "UVIMNMX" | "SHF" | "USHF" | "PRMT" | "UPRMT" | "IABS" | "POPC" | "UPOPC" | "FLO"
        | "UFLO" | "BREV" | "UBREV" | "P2R" | "R2P" | "SGXT" | "USGXT" | "BMSK" | "UBMSK" | "UP2UR"
        | "UR2UP" => {
            integer::step(thread, instruction)?;
        }
        "FADD" | "FMUL" | "FFMA" | "FMNMX" | "FSEL" | "FSETP" | "FSET" | "FCHK" | "MUFU" | "F2I" | "I2F"
        | "I2FP" | "F2F" | "FRND" => float::step(thread, instruction)?,
        "HADD2" | "HMUL2" | "HFMA2" | "HMNMX2" | "VHMNMX" => packed::arithmetic(thread, instruction)?,
        "F2FP" => packed::convert(thread, instruction)?,
        "S2R" | "S2UR" | "CS2R" | "B2R" | "SHFL" | "VOTE" | "VOTEU" | "REDUX" | "MATCH" => {
            lanes::step(thread, instruction)?;
        }
        "LDC" | "ULDC" | "LDG" | "LD" | "LDS" | "LDL" | "LDSM" | "STG" | "ST" | "STS" | "STL" | "LDGSTS"
        | "HMMA" | "RED" | "REDG" | "REDS" | "ATOM" | "ATOMG" | "ATOMS" | "QSPC" => {
            access::step(thread, instruction)?
        }
        unknown => return Err(format!("the instruction {unknown} is unknown here").into()),
    }
    Ok(Next::Following)
}

fn branch(thread: &mut Thread<'_>, instruction: &Instruction) -> Result<Next> {
    // The lanes are alike, so that they never diverge.
    if instruction.has("DIV") {
        return Ok(Next::Following);
    }
    let mut operands = Operands::of(instruction);
    while let Some(condition) = operands.optional_predicate() {
        if !thread.is(condition) {
            return Ok(Next::Following);
        }
    }
    let at = |thread: &Thread<'_>, address: u32| {
        let number = thread.listing.at(address);
        number.map(Next::Jump).ok_or_else(|| format!("no instruction is at {address:#x}"))
    };
    match instruction.opcode.as_str() {
        "RET" => {
            let address = operands.next_value()?;
            let address = thread.integer(address)?;
            Ok(at(thread, address)?)
        }
        "BRX" | "BRXU" => {
            // The table holds addresses within the kernel, from which the branch takes its own away again.
            let base = operands.next_value()?;
            let base = thread.integer(base)?;
            let offset = operands.number()?;
            let address = base.wrapping_add(offset).wrapping_add(instruction.address + 16);
            Ok(at(thread, address)?)
        }
        _ => {
            let label = operands.rest().iter().find_map(|operand| match operand {
                Operand::Label(label) => Some(label.as_str()),
                _ => None,
            });
            if let Some(label) = label {
                let number = thread.listing.label(label);
                return Ok(Next::Jump(number.ok_or_else(|| format!("there is no label {label}"))?));
            }
            let address = operands.rest().iter().find_map(|operand| match operand {
                Operand::Value(value) => match value.source {
                    Source::Number(address) => Some(address),
                    _ => None,
                },
                _ => None,
            });
            Ok(at(thread, address.ok_or("a branch without a target")?)?)
        }
    }
}
