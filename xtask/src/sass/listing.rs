//! Listings of machine code, as `nvdisasm` prints a whole cubin: the instructions of each kernel, its labels and its constants.

use std::collections::BTreeMap;

use super::operand::{Operand, Predicate, operand, predicate};
use crate::workspace::Result;

/// One instruction.
#[derive(Clone, Debug)]
pub(super) struct Instruction {
    pub(super) address: u32,
    pub(super) guard: Option<Predicate>,
    /// `ISETP` of `ISETP.GE.U32.AND`.
    pub(super) opcode: String,
    /// `GE`, `U32` and `AND` of it.
    pub(super) modifiers: Vec<String>,
    pub(super) operands: Vec<Operand>,
    /// The text, for messages.
    pub(super) text: String,
}

impl Instruction {
    pub(super) fn has(&self, modifier: &str) -> bool {
        self.modifiers.iter().any(|found| found == modifier)
    }
}

/// The machine code of one kernel.
#[derive(Clone, Debug, Default)]
pub(super) struct Listing {
    pub(super) kernel: String,
    pub(super) instructions: Vec<Instruction>,
    /// The number of the instruction behind each label.
    labels: BTreeMap<String, usize>,
    /// Bytes of constant banks besides that of the parameters.
    pub(super) constants: BTreeMap<u8, Vec<u8>>,
}

impl Listing {
    pub(super) fn label(&self, name: &str) -> Option<usize> {
        self.labels.get(name).copied()
    }

    pub(super) fn at(&self, address: u32) -> Option<usize> {
        self.instructions.binary_search_by_key(&address, |instruction| instruction.address).ok()
    }
}

/// The kernels of a listing by name.
///
/// # Errors
/// An instruction that is not understood, with its line; a listing without kernels.
pub(super) fn kernels(text: &str) -> Result<BTreeMap<String, Listing>> {
    let mut found: BTreeMap<String, Listing> = BTreeMap::new();
    let mut section = Section::Other;
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(head) = line.strip_prefix("//---") {
            section = Section::named(head.trim_matches(|c| c == '-' || c == ' '));
            if let Section::Code(kernel) = &section {
                let listing = Listing { kernel: kernel.clone(), ..Listing::default() };
                found.entry(kernel.clone()).or_insert(listing);
            }
            continue;
        }
        let of = |kernel: &String| found.get(kernel).map(|listing| listing.instructions.len());
        let problem = || format!("sass: line {number} of the listing is not understood: {}", line.trim());
        match &section {
            Section::Code(kernel) => {
                let next = of(kernel).unwrap_or(0);
                let Some(listing) = found.get_mut(kernel) else { continue };
                if let Some(label) = line.strip_suffix(':').filter(|label| !label.starts_with(['\t', ' '])) {
                    listing.labels.insert(label.to_owned(), next);
                } else if line.trim_start().starts_with("/*") && !line.contains(".byte") {
                    // Every second line of a full listing is only the encoding.
                    if let Some(text) = code(line) {
                        listing.instructions.push(instruction(text).ok_or_else(problem)?);
                    }
                }
            }
            Section::Constant(bank, kernel) => {
                let bytes = line.split_once(".byte").map(|(_, bytes)| bytes);
                if let Some(bytes) = bytes {
                    let listing = found
                        .entry(kernel.clone())
                        .or_insert_with(|| Listing { kernel: kernel.clone(), ..Listing::default() });
                    for byte in bytes.split(',') {
                        let digits = byte.trim().trim_start_matches("0x");
                        let byte = u8::from_str_radix(digits, 16).map_err(|_| problem())?;
                        listing.constants.entry(*bank).or_default().push(byte);
                    }
                }
            }
            Section::Other => {}
        }
    }
    found.retain(|_, listing| !listing.instructions.is_empty());
    if found.is_empty() {
        return Err("sass: the listing contains no kernel".into());
    }
    Ok(found)
}

enum Section {
    Code(String),
    Constant(u8, String),
    Other,
}

impl Section {
    fn named(name: &str) -> Self {
        if let Some(kernel) = name.strip_prefix(".text.") {
            return Self::Code(kernel.to_owned());
        }
        let constant = name.strip_prefix(".nv.constant").and_then(|rest| rest.split_once('.'));
        match constant.and_then(|(bank, kernel)| Some((bank.parse().ok()?, kernel))) {
            Some((0, _)) | None => Self::Other,
            Some((bank, kernel)) => Self::Constant(bank, kernel.to_owned()),
        }
    }
}

/// The part of a line from its address on, if it holds an instruction and not only an encoding.
fn code(line: &str) -> Option<&str> {
    let line = line.trim();
    let address = line.strip_prefix("/*")?.split("*/").next()?;
    (!address.trim().starts_with("0x")).then_some(line)
}

/// `/*0080*/ @P0 EXIT ;`, also with the encoding in a comment behind it.
fn instruction(line: &str) -> Option<Instruction> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    let address = u32::from_str_radix(address, 16).ok()?;
    let text = rest[..rest.rfind(';')?].trim();
    let (guard, body) = match text.strip_prefix('@') {
        Some(guarded) => {
            let (name, body) = guarded.split_once(' ')?;
            (Some(predicate(name)?), body.trim())
        }
        None => (None, text),
    };
    // Targets of an indirect branch follow in a comment.
    let body = body.split("(*").next()?.trim();
    let (name, operands) = body.split_once(' ').unwrap_or((body, ""));
    let mut words = name.split('.');
    let opcode = words.next().filter(|word| is_opcode(word))?.to_owned();
    let modifiers = words.map(str::to_owned).collect();
    let operands = match opcode.as_str() {
        // `BRX R2 -0xd0`
        "BRX" | "BRXU" => operands.split(' ').map(operand).collect::<Option<_>>()?,
        // ``RET.REL.NODEC R2 `(kernel)``: the address is in the register.
        "RET" => vec![operand(operands.split(' ').next()?)?],
        // Barriers, scoreboards and such name resources that nothing here depends on.
        "BAR" | "DEPBAR" | "BSSY" | "BSYNC" | "BREAK" | "WARPSYNC" | "NOP" | "CCTL" | "MEMBAR" => {
            split(operands).into_iter().filter_map(operand).collect()
        }
        _ => split(operands).into_iter().map(operand).collect::<Option<_>>()?,
    };
    Some(Instruction { address, guard, opcode, modifiers, operands, text: text.to_owned() })
}

fn is_opcode(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit())
}

/// Divides at commas outside of brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_i32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_labels_and_constants_are_read() {
        let text = "\
\t.target\tsm_90a
//--------------------- .nv.constant2.second --------------------------
\t.section\t.nv.constant2.second,\"a\",@progbits
        /*0000*/ \t.byte\t0x60, 0x07, 0x00, 0x00
//--------------------- .text.first          --------------------------
first:
.text.first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000800 */
.L_x_0:
        /*0010*/               @!P0 BRA `(.L_x_0) ;
        /*0020*/                   EXIT ;
//--------------------- .text.second --------------------------
        /*0000*/                   BRX R2 -0xd0        (*\"BRANCH_TARGETS .L_x_1,.L_x_2\"*);
";
        let found = kernels(text).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["first", "second"]);
        let first = &found["first"];
        assert_eq!((first.instructions.len(), first.label(".L_x_0"), first.at(0x20)), (3, Some(1), Some(2)));
        assert_eq!(found["second"].constants[&2], [0x60, 7, 0, 0]);
        assert_eq!(found["second"].instructions[0].operands.len(), 2);
    }

    #[test]
    fn a_listing_that_is_cut_or_damaged_is_an_error_with_its_line() {
        let head = "//----- .text.k -----\n";
        for line in [
            "        /*0000*/                   LDC R1, c[0x0][0x2",
            "        /*0000*/                   MOV R1, @@ ;",
            "        /*zz*/  EXIT ;",
            "        /*0000*/               @ EXIT ;",
            "        /*0000*/ ;",
        ] {
            let error = kernels(&format!("{head}{line}\n")).unwrap_err().to_string();
            assert_eq!(error, format!("sass: line 2 of the listing is not understood: {}", line.trim()));
        }
        for empty in ["", head, "//----\n//---- .nv.constant2.k ----\n"] {
            assert_eq!(kernels(empty).unwrap_err().to_string(), "sass: the listing contains no kernel");
        }
    }
}
