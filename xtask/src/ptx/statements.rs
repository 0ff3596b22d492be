//! The statements of a PTX file, each with its kernel and its place in the text.
//!
//! Enough of the grammar to count and to edit what NVRTC writes: comments, `.loc` lines, labels, nested scopes and
//! vector operands in braces.

use std::ops::Range;

/// A statement inside a kernel: an instruction, or a directive that ends with a semicolon.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Statement<'a> {
    pub(crate) kernel: &'a str,
    /// Without label and semicolon.
    pub(crate) text: &'a str,
    /// The position of `text` in the PTX, in bytes.
    pub(crate) range: Range<usize>,
}

impl Statement<'_> {
    pub(crate) fn is_instruction(&self) -> bool {
        !self.text.starts_with('.')
    }
}

/// All statements in their order.
pub(crate) fn statements(ptx: &str) -> Vec<Statement<'_>> {
    let mut found = Vec::new();
    // The kernel whose head was read, and how many scopes are open: 0 outside of bodies.
    let (mut kernel, mut depth) = ("", 0_usize);
    // Where the statement began, once its first character was seen, and whether a vector is open in it.
    let (mut start, mut in_vector) = (None::<usize>, false);
    let mut at = 0;
    while let Some(c) = ptx[at..].chars().next() {
        let rest = &ptx[at..];
        let line = rest.len().min(rest.find('\n').unwrap_or(rest.len()));
        if rest.starts_with("//") || (start.is_none() && rest.starts_with(".loc")) {
            at += line;
            continue;
        }
        if depth == 0 {
            if let Some(head) = rest.strip_prefix(".entry") {
                kernel = head.trim_start().split(['(', ' ', '\n', '{']).next().unwrap_or_default();
            } else if rest.starts_with(".section") {
                break;
            } else if c == '{' && !kernel.is_empty() {
                depth = 1;
            }
            at += c.len_utf8();
            continue;
        }
        match (c, start) {
            ('{', None) => depth += 1,
            ('}', None) => depth -= 1,
            ('{', Some(_)) => in_vector = true,
            ('}', Some(_)) => in_vector = false,
            (':', Some(first)) if !in_vector && is_name(&ptx[first..at]) => start = None,
            (';', Some(first)) => {
                let text = ptx[first..at].trim_end();
                found.push(Statement { kernel, text, range: first..first + text.len() });
                start = None;
            }
            (c, None) if !c.is_whitespace() && c != ';' => start = Some(at),
            _ => {}
        }
        at += c.len_utf8();
    }
    found
}

fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "$_%".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "\
.version 9.0
// a comment; with a semicolon
.visible .entry first(
\t.param .u64 first_param_0
)
.maxntid 128, 1, 1
{
\t.reg .f32 \t%f<3>;
\t.loc\t1 4 5
\tld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1]; // tail
$L__BB0_2:
\t{ .reg .b16 h; cvt.u16.u32 h, %r28; cvt.f32.f16 %f44, h; }
\t@%p1 bra \t$L__BB0_2;
\tret;

}
.visible .entry second()
{
\tret;
}
\t.section\t.debug_str
\t{
$L__info_string0:
.b8 95,0
\t}
";

    #[test]
    fn statements_are_found_in_scopes_and_behind_labels_and_not_in_comments() {
        let texts: Vec<_> = statements(PTX).iter().map(|s| (s.kernel, s.text)).collect();
        let expected = [
            ("first", ".reg .f32 \t%f<3>"),
            ("first", "ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1]"),
            ("first", ".reg .b16 h"),
            ("first", "cvt.u16.u32 h, %r28"),
            ("first", "cvt.f32.f16 %f44, h"),
            ("first", "@%p1 bra \t$L__BB0_2"),
            ("first", "ret"),
            ("second", "ret"),
        ];
        assert_eq!(texts, expected);
        assert_eq!(statements(PTX).iter().filter(|s| s.is_instruction()).count(), 6);
        for statement in statements(PTX) {
            assert_eq!(&PTX[statement.range.clone()], statement.text);
        }
    }
}
