//! The operands of machine instructions, as nvdisasm writes them.

/// The registers that one thread has to itself, or those that its warp shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum File {
    Own,
    Uniform,
}

/// The half of a register that an operand reads as a 16-bit float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    Low,
    High,
}

/// A predicate register; without an index it is the one that is always true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Predicate {
    pub(super) file: File,
    pub(super) index: Option<u8>,
    pub(super) is_negated: bool,
}

/// A register; without an index it is the one that is always zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Register {
    pub(super) file: File,
    pub(super) index: Option<u8>,
}

/// A sum of registers and a number: an address in square brackets.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Address {
    pub(super) registers: Vec<(Register, Width)>,
    pub(super) offset: i64,
}

/// The way in which a register takes part in an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Word,
    /// Together with the next register.
    Pair,
    /// Times this factor.
    Times(u32),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    Register(Register),
    /// The bits of a number. A number without `0x` is a float.
    Number(u32),
    /// Bank and place of constant memory.
    Constant(u8, Address),
}

/// A value with what is done to it before it is used.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Value {
    pub(super) source: Source,
    pub(super) is_negated: bool,
    pub(super) is_inverted: bool,
    pub(super) is_absolute: bool,
    pub(super) half: Option<Half>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand {
    Value(Value),
    Predicate(Predicate),
    Memory(Address),
    Label(String),
    /// `SR_TID.X`, `SB0`, `PR`.
    Name(String),
}

/// Reads one operand. The `None` of an unknown form becomes an error that shows the instruction.
pub(super) fn operand(text: &str) -> Option<Operand> {
    let text = text.trim();
    if let Some(label) = text.strip_prefix("`(") {
        return Some(Operand::Label(label.strip_suffix(')')?.to_owned()));
    }
    if let Some(predicate) = predicate(text) {
        return Some(Operand::Predicate(predicate));
    }
    if let Some(rest) = text.strip_prefix("desc[") {
        return Some(Operand::Memory(address(rest.split_once(']')?.1)?));
    }
    if text.starts_with('[') {
        return Some(Operand::Memory(address(text)?));
    }
    if ["SR", "SB", "PR"].iter().any(|start| text.starts_with(start)) {
        return Some(Operand::Name(text.to_owned()));
    }
    value(text).map(Operand::Value)
}

/// `P0`, `!UP3`, `PT`.
pub(super) fn predicate(text: &str) -> Option<Predicate> {
    let (is_negated, text) = stripped(text, "!");
    let (file, index) = match text.strip_prefix("UP") {
        Some(index) => (File::Uniform, index),
        None => (File::Own, text.strip_prefix('P')?),
    };
    let index = match index {
        "T" => None,
        _ => Some(index.parse().ok().filter(|index| *index < 8)?),
    };
    Some(Predicate { file, index, is_negated })
}

fn register(text: &str) -> Option<Register> {
    let (file, index) = match text.strip_prefix("UR") {
        Some(index) => (File::Uniform, index),
        None => (File::Own, text.strip_prefix('R')?),
    };
    let index = match index {
        "Z" => None,
        _ => Some(index.parse().ok()?),
    };
    Some(Register { file, index })
}

fn value(text: &str) -> Option<Value> {
    if let Some(bits) = number(text) {
        let source = Source::Number(bits);
        return Some(Value { source, is_negated: false, is_inverted: false, is_absolute: false, half: None });
    }
    let (is_negated, text) = stripped(text, "-");
    let (is_inverted, text) = stripped(text, "~");
    let (is_absolute, text) = stripped(text, "|");
    let text = if is_absolute { text.replacen('|', "", 1) } else { text.to_owned() };
    let (mut half, mut text) = (None, text.as_str());
    // Suffixes of a register; how wide a value is follows from the instruction.
    while let Some((rest, suffix)) = text.rsplit_once('.').filter(|(rest, _)| !rest.ends_with("c[0x0]")) {
        match suffix {
            "reuse" | "64" | "U32" | "F32" | "noreuse" => {}
            "H0_H0" | "H0" => half = Some(Half::Low),
            "H1_H1" | "H1" => half = Some(Half::High),
            "H1_H0" => {}
            _ => return None,
        }
        text = rest;
    }
    let source = match text.strip_prefix("c[0x") {
        None => Source::Register(register(text)?),
        Some(rest) => {
            let (bank, place) = rest.split_once(']')?;
            Source::Constant(u8::from_str_radix(bank, 16).ok()?, address(place)?)
        }
    };
    Some(Value { source, is_negated, is_inverted, is_absolute, half })
}

/// `0x1f`, `-0x8`, `1.5`, `+INF`, `-QNAN`.
pub(super) fn number(text: &str) -> Option<u32> {
    let (is_negated, digits) = stripped(text, "-");
    if let Some(digits) = digits.strip_prefix("0x") {
        let value = u32::from_str_radix(digits, 16).ok()?;
        return Some(if is_negated { value.wrapping_neg() } else { value });
    }
    let digits = digits.strip_prefix('+').unwrap_or(digits);
    let value = match digits {
        "INF" => f32::INFINITY,
        "QNAN" => f32::NAN,
        _ if digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') => digits.parse().ok()?,
        _ => return None,
    };
    Some((if is_negated { -value } else { value }).to_bits())
}

/// `[R2.64+UR4+0x10]`.
fn address(text: &str) -> Option<Address> {
    let inside = text.strip_prefix('[')?.strip_suffix(']')?;
    let mut address = Address::default();
    for part in inside.replace("+-", "+~").split('+').map(str::trim) {
        let (is_negated, part) = stripped(part, "~");
        let (also, part) = stripped(part, "-");
        if let Some(digits) = part.strip_prefix("0x") {
            let value = i64::from_str_radix(digits, 16).ok()?;
            address.offset += if is_negated || also { -value } else { value };
            continue;
        }
        let (name, width) = match part.split_once('.') {
            None => (part, Width::Word),
            Some((name, "64")) => (name, Width::Pair),
            Some((name, "U32" | "reuse")) => (name, Width::Word),
            Some((name, factor)) => (name, Width::Times(factor.strip_prefix('X')?.parse().ok()?)),
        };
        address.registers.push((register(name)?, width));
    }
    Some(address)
}

fn stripped<'a>(text: &'a str, prefix: &str) -> (bool, &'a str) {
    text.strip_prefix(prefix).map_or((false, text), |rest| (true, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_of_every_form_are_read() {
        let own = |index| Register { file: File::Own, index: Some(index) };
        let Some(Operand::Value(value)) = operand("-|R12.reuse|") else { panic!("a value") };
        assert!(value.is_negated && value.is_absolute && value.source == Source::Register(own(12)));
        let Some(Operand::Value(value)) = operand("|R89|.reuse") else { panic!("a value") };
        assert!(value.is_absolute && value.source == Source::Register(own(89)));
        let Some(Operand::Value(value)) = operand("~UR5") else { panic!("a value") };
        assert!(value.is_inverted);
        let Some(Operand::Value(value)) = operand("R13.reuse.H1_H1") else { panic!("a value") };
        assert_eq!(value.half, Some(Half::High));
        let Some(Operand::Value(value)) = operand("c[0x0][0x228]") else { panic!("a value") };
        assert_eq!(value.source, Source::Constant(0, Address { registers: Vec::new(), offset: 0x228 }));
        let Some(Operand::Memory(place)) = operand("desc[UR4][R2.64+-0x10]") else { panic!("an address") };
        assert_eq!(place, Address { registers: vec![(own(2), Width::Pair)], offset: -0x10 });
        let Some(Operand::Memory(place)) = operand("[R4.X4+UR6+0x20]") else { panic!("an address") };
        assert_eq!((place.registers[0], place.offset), ((own(4), Width::Times(4)), 0x20));
        assert_eq!(operand("`(.L_x_3)"), Some(Operand::Label(".L_x_3".to_owned())));
        assert_eq!(operand("!UPT").map(|o| matches!(o, Operand::Predicate(p) if p.is_negated)), Some(true));
        assert_eq!(
            [number("-0x1"), number("1.5"), number("-INF")],
            [Some(u32::MAX), Some(1.5_f32.to_bits()), Some(f32::NEG_INFINITY.to_bits())]
        );
        for hostile in
            ["", "R", "R999", "P9", "[", "desc[", "desc[UR4]", "c[0x", "c[0x0]", "`(", "R1.H7", "é", "-"]
        {
            assert_eq!(operand(hostile), None, "{hostile}");
        }
    }
}
