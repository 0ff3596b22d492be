//! Small mistakes, made in the text of a kernel's PTX: one edit of one instruction each.

use std::collections::HashMap;
use std::ops::Range;

use super::survivors;
use crate::ptx::statements::{Statement, statements};

/// Beyond it the number that is added is a constant of arithmetic.
const LARGEST_INDEX: i64 = 4096;

/// One wrong program: the snapshot with one instruction changed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mutant {
    /// The stem of the kernel file.
    pub(crate) file: String,
    pub(crate) kernel: String,
    /// The kind of change: `delete`, `compare`, …
    pub(crate) kind: &'static str,
    /// The instruction with its registers unnumbered, so that it outlives changes elsewhere.
    pub(crate) instruction: String,
    /// The number of this mutant, from 1, among those of its kind whose instruction is spelled alike in this kernel.
    pub(crate) ordinal: usize,
    range: Range<usize>,
    replacement: String,
}

impl Mutant {
    /// Its line in the list of survivors, without the reason.
    pub(crate) fn key(&self) -> String {
        survivors::key(&self.file, &self.kernel, self.kind, self.ordinal, &self.instruction)
    }

    /// The key of all that are spelled and changed alike in this kernel.
    pub(crate) fn key_of_all(&self) -> String {
        survivors::key_of_all(&self.file, &self.kernel, self.kind, &self.instruction)
    }

    /// The wrong program.
    pub(crate) fn apply(&self, ptx: &str) -> String {
        let (before, after) = (&ptx[..self.range.start], &ptx[self.range.end..]);
        // Nothing is left of a deleted instruction, its semicolon included.
        let after =
            if self.replacement.is_empty() { after.trim_start().trim_start_matches(';') } else { after };
        format!("{before}{}{after}", self.replacement)
    }

    /// The program with a trap in front of the instruction: it passes only where nothing gets there.
    pub(crate) fn trapped(&self, ptx: &str) -> String {
        let (before, after) = ptx.split_at(self.range.start);
        format!("{before}trap; {after}")
    }

    /// Returns the text that replaces the instruction, or `nothing` if the instruction is deleted.
    pub(crate) fn replacement(&self) -> &str {
        if self.replacement.is_empty() { "nothing" } else { &self.replacement }
    }
}

/// All mutants of a snapshot, in its order.
pub(crate) fn mutants(file: &str, ptx: &str) -> Vec<Mutant> {
    let statements = statements(ptx);
    let constants = constants(&statements);
    let mut counts = HashMap::new();
    let mut found = Vec::new();
    for statement in statements.iter().filter(|statement| statement.is_instruction()) {
        let Some(instruction) = Instruction::read(statement.text) else { continue };
        for (kind, replacement) in instruction.edits(statement.kernel, &constants) {
            let spelled = unnumbered(statement.text);
            let count: &mut usize = counts.entry((statement.kernel, kind, spelled.clone())).or_default();
            *count += 1;
            found.push(Mutant {
                file: file.to_owned(),
                kernel: statement.kernel.to_owned(),
                kind,
                instruction: spelled,
                ordinal: *count,
                range: statement.range.clone(),
                replacement,
            });
        }
    }
    found
}

/// An instruction in parts: `@%p1 st.global.f32 [%rd1+4], %f1`.
struct Instruction<'a> {
    /// With the space behind it, or empty.
    guard: &'a str,
    opcode: &'a str,
    operands: Vec<&'a str>,
}

impl<'a> Instruction<'a> {
    fn read(text: &'a str) -> Option<Self> {
        let body = match text.strip_prefix('@') {
            Some(guarded) => guarded.split_once(char::is_whitespace)?.1.trim_start(),
            None => text,
        };
        let guard = &text[..text.len() - body.len()];
        let (opcode, operands) = body.split_once(char::is_whitespace).unwrap_or((body, ""));
        Some(Self { guard, opcode, operands: split(operands) })
    }

    fn is(&self, family: &str) -> bool {
        self.opcode.strip_prefix(family).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    fn has(&self, modifier: &str) -> bool {
        self.opcode.split('.').any(|part| part == modifier)
    }

    /// The last modifier: the type of the operands.
    fn kind(&self) -> &'a str {
        self.opcode.rsplit('.').next().unwrap_or_default()
    }

    fn spell(&self, opcode: &str, operands: &[&str]) -> String {
        format!("{}{opcode} {}", self.guard, operands.join(", "))
    }

    fn with_opcode(&self, from: &str, to: &str) -> String {
        let parts: Vec<&str> =
            self.opcode.split('.').map(|part| if part == from { to } else { part }).collect();
        self.spell(&parts.join("."), &self.operands)
    }

    fn with_operand(&self, index: usize, operand: &str) -> String {
        let mut operands = self.operands.clone();
        operands[index] = operand;
        self.spell(self.opcode, &operands)
    }

    /// All mistakes that can be made with this instruction.
    fn edits(&self, kernel: &str, constants: &HashMap<(&str, &str), u32>) -> Vec<(&'static str, String)> {
        let mut edits = Vec::new();
        let is_atomic = self.is("atom") || self.is("red");
        if is_atomic || self.is("st") || self.is("bar") || self.is("barrier") {
            edits.push(("delete", String::new()));
        }
        if self.is("setp") {
            edits.extend(self.comparison().map(|text| ("compare", text)));
        }
        if (is_atomic || self.is("ld") || self.is("st")) && !self.has("param") {
            edits.extend(self.shifted().map(|text| ("shift", text)));
        }
        if let (true, [to, a, b]) = (self.is("max") || self.is("min"), &*self.operands) {
            let kind = if self.kind().contains("x2") { "b32" } else { self.kind() };
            edits.push(("drop-second", self.spell(&format!("mov.{kind}"), &[to, a])));
            edits.push(("drop-first", self.spell(&format!("mov.{kind}"), &[to, b])));
        }
        if let (true, [_, _, step, ..]) = (self.is("shfl"), &*self.operands) {
            let step = step.parse().ok().or_else(|| constants.get(&(kernel, step)).copied());
            edits.extend(step.map(|step| ("halve", self.with_operand(2, &(step / 2).to_string()))));
        }
        if self.kind() == "f32" {
            for (from, to) in [("add", "sub"), ("sub", "add"), ("mul", "add")] {
                if self.is(from) {
                    edits.push(("arithmetic", self.with_opcode(from, to)));
                }
            }
            if let (true, [to, a, b, _]) = (self.is("fma"), &*self.operands) {
                edits.push(("drop-addend", self.spell("mul.rn.f32", &[to, a, b])));
            }
        }
        for (from, to) in [("e4m3x2", "e5m2x2"), ("e5m2x2", "e4m3x2")] {
            if self.is("cvt") && self.has(from) {
                edits.push(("format", self.with_opcode(from, to)));
            }
        }
        for (from, to) in [("s32", "u32"), ("u32", "s32")] {
            if is_atomic && (self.has("max") || self.has("min")) && self.has(from) {
                edits.push(("sign", self.with_opcode(from, to)));
            }
        }
        if let (true, [to, a, b, choice]) = (self.is("selp"), &*self.operands)
            && a != b
        {
            edits.push(("swap", self.spell(self.opcode, &[to, b, a, choice])));
        }
        let is_integer = ["s32", "u32", "s64", "u64"].contains(&self.kind());
        if let (true, Some(number)) = ((self.is("add") || self.is("mad")) && is_integer, self.number()) {
            let last = self.operands.len() - 1;
            // What is so large is no index: the mistake is to leave it out.
            let wrong = if number.abs() <= LARGEST_INDEX { number + 1 } else { 0 };
            edits.push(("off-by-one", self.with_operand(last, &wrong.to_string())));
        }
        edits
    }

    fn comparison(&self) -> Option<String> {
        const PAIRS: [(&str, &str); 8] = [
            ("lt", "le"),
            ("gt", "ge"),
            ("eq", "ne"),
            ("lo", "ls"),
            ("hi", "hs"),
            ("ltu", "leu"),
            ("gtu", "geu"),
            ("equ", "neu"),
        ];
        let both = PAIRS.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
        both.filter(|(from, _)| self.has(from)).map(|(from, to)| self.with_opcode(from, to)).next()
    }

    /// The address moved by the width of the access.
    fn shifted(&self) -> Option<String> {
        let index = self.operands.iter().position(|operand| operand.starts_with('['))?;
        let inside = self.operands[index].strip_prefix('[')?.strip_suffix(']')?;
        let bits: i64 = self.kind().trim_start_matches(|c: char| !c.is_ascii_digit()).parse().ok()?;
        let lanes = if self.has("v2") {
            2
        } else if self.has("v4") {
            4
        } else {
            1
        };
        let (base, offset) = match inside.split_once('+') {
            Some((base, offset)) => (base, offset.parse::<i64>().ok()?),
            None => (inside, 0),
        };
        Some(self.with_operand(index, &format!("[{base}+{}]", offset + bits / 8 * lanes)))
    }

    /// The immediate at the end.
    fn number(&self) -> Option<i64> {
        self.operands.last()?.parse().ok()
    }
}

/// Splits at the commas outside of braces.
fn split(operands: &str) -> Vec<&str> {
    let (mut depth, mut from, mut found) = (0, 0, Vec::new());
    for (at, c) in operands.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(operands[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    found.push(operands[from..].trim());
    found.retain(|operand| !operand.is_empty());
    found
}

/// Registers that only ever hold one constant, by kernel: where shuffles take their distances from.
fn constants<'a>(statements: &[Statement<'a>]) -> HashMap<(&'a str, &'a str), u32> {
    let mut found = HashMap::new();
    let mut many = Vec::new();
    for statement in statements {
        let Some(Instruction { opcode, operands, .. }) = Instruction::read(statement.text) else { continue };
        let (true, [to, from]) = (opcode.starts_with("mov."), &*operands) else { continue };
        let key = (statement.kernel, *to);
        match from.parse() {
            Ok(number) if found.insert(key, number).is_none_or(|before| before == number) => {}
            _ => many.push(key),
        }
    }
    found.retain(|key, _| !many.contains(key));
    found
}

/// The text with the numbers of registers and labels left out and one space for many.
fn unnumbered(text: &str) -> String {
    let mut short = String::new();
    let mut in_name = false;
    for c in text.split_whitespace().collect::<Vec<_>>().join(" ").chars() {
        in_name = c == '%' || c == '$' || (in_name && (c.is_ascii_alphanumeric() || c == '_'));
        if !(in_name && c.is_ascii_digit()) {
            short.push(c);
        }
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(body: &str) -> Vec<(&'static str, String)> {
        let ptx = format!(".visible .entry k(\n)\n{{\n{body}\n}}\n");
        mutants("f", &ptx).into_iter().map(|mutant| (mutant.kind, mutant.replacement)).collect()
    }

    #[test]
    fn each_kind_of_mistake_is_made() {
        for (body, expected) in [
            ("bar.sync \t0;", vec![("delete", "")]),
            (
                "@%p1 red.global.add.u32 [%rd1], 1;",
                vec![("delete", ""), ("shift", "@%p1 red.global.add.u32 [%rd1+4], 1")],
            ),
            ("setp.ltu.f32 %p1, %f1, %f2;", vec![("compare", "setp.leu.f32 %p1, %f1, %f2")]),
            ("setp.eq.s32 %p1, %r1, 0;", vec![("compare", "setp.ne.s32 %p1, %r1, 0")]),
            (
                "ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+-64];",
                vec![("shift", "ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+-48]")],
            ),
            (
                "st.shared.u8 [scratch], %rs1;",
                vec![("delete", ""), ("shift", "st.shared.u8 [scratch+1], %rs1")],
            ),
            ("ld.param.u64 %rd1, [k_param_0];", vec![]),
            (
                "max.f32 %f1, %f2, %f3;",
                vec![("drop-second", "mov.f32 %f1, %f2"), ("drop-first", "mov.f32 %f1, %f3")],
            ),
            (
                "shfl.sync.bfly.b32 %r1|%p1, %r2, 16, %r3, %r4;",
                vec![("halve", "shfl.sync.bfly.b32 %r1|%p1, %r2, 8, %r3, %r4")],
            ),
            ("add.rn.f32 %f1, %f2, %f3;", vec![("arithmetic", "sub.rn.f32 %f1, %f2, %f3")]),
            ("mul.rn.f32 %f1, %f2, 0f3F800000;", vec![("arithmetic", "add.rn.f32 %f1, %f2, 0f3F800000")]),
            ("fma.rn.f32 %f1, %f2, %f3, %f4;", vec![("drop-addend", "mul.rn.f32 %f1, %f2, %f3")]),
            (
                "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;",
                vec![("format", "cvt.rn.satfinite.e5m2x2.f32 %rs1, %f1, %f2")],
            ),
            ("selp.b16 %rs1, 127, %rs2, %p1;", vec![("swap", "selp.b16 %rs1, %rs2, 127, %p1")]),
            ("add.s64 %rd1, %rd2, -4;", vec![("off-by-one", "add.s64 %rd1, %rd2, -3")]),
            ("mad.lo.s32 %r1, %r2, %r3, 7;", vec![("off-by-one", "mad.lo.s32 %r1, %r2, %r3, 8")]),
            ("add.s32 %r1, %r2, 32767;", vec![("off-by-one", "add.s32 %r1, %r2, 0")]),
            ("ret;", vec![]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(kind, text)| (kind, text.to_owned())).collect();
            assert_eq!(edits(body), expected, "{body}");
        }
        let sign = edits("atom.global.max.s32 %r1, [%rd1], %r2;");
        assert_eq!(sign[2], ("sign", "atom.global.max.u32 %r1, [%rd1], %r2".to_owned()));
    }

    #[test]
    fn a_distance_in_a_register_is_halved_where_it_is_used_if_it_is_a_constant() {
        let body = "mov.u32 %r4, 2;\nshfl.sync.bfly.b32 %r1|%p1, %r2, %r4, %r3, %r5;";
        assert_eq!(edits(body), [("halve", "shfl.sync.bfly.b32 %r1|%p1, %r2, 1, %r3, %r5".to_owned())]);
        assert_eq!(edits(&format!("mov.u32 %r4, 4;\n{body}")), []);
    }

    #[test]
    fn keys_outlive_renumbering_and_count_like_instructions() {
        let key = |body: &str| {
            let ptx = format!(".visible .entry k(\n)\n{{\n{body}\n}}\n");
            mutants("norm", &ptx).iter().map(Mutant::key).collect::<Vec<_>>()
        };
        let keys = key("add.rn.f32 \t%f1, %f2, %f3;\nadd.rn.f32 %f7, %f8, %f9;");
        assert_eq!(keys[0], "norm k arithmetic 1 `add.rn.f32 %f, %f, %f`");
        assert_eq!(keys[1], "norm k arithmetic 2 `add.rn.f32 %f, %f, %f`");
        assert_eq!(key("setp.eq.s32 %p1, %r12, 32;"), ["norm k compare 1 `setp.eq.s32 %p, %r, 32`"]);
    }

    #[test]
    fn an_applied_mutant_differs_in_one_instruction() {
        let ptx = ".visible .entry k(\n)\n{\n\tbar.sync \t0;\n\tadd.rn.f32 %f1, %f2, %f3;\n\tret;\n}\n";
        let texts: Vec<_> = mutants("f", ptx).iter().map(|mutant| mutant.apply(ptx)).collect();
        assert_eq!(texts[0], ptx.replace("bar.sync \t0;", ""));
        assert_eq!(texts[1], ptx.replace("add.rn", "sub.rn"));
        assert_eq!(mutants("f", ptx)[1].trapped(ptx), ptx.replace("add.rn", "trap; add.rn"));
    }
}
