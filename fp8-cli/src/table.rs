//! Numbers and tables as text.

use fp8_hf::{TensorInspection, WeightScales};
use std::path::Path;

/// Writes a number of bytes with a unit of 1024.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    format!("{value:.1} {unit}")
}

/// Writes a shape, `[]` for a scalar.
pub(crate) fn shape(shape: &[usize]) -> String {
    format!("[{}]", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
}

/// Writes what shares a scale; nothing for a tensor without scales.
pub(crate) fn granularity(tensor: &TensorInspection) -> String {
    match tensor.granularity {
        None => String::new(),
        Some(WeightScales::Tensor) => "tensor".into(),
        Some(WeightScales::Channel) => "channel".into(),
        Some(WeightScales::Block([rows, cols])) => format!("block {rows}×{cols}"),
        Some(WeightScales::TensorGroup) => "16 columns".into(),
        Some(_) => "other".into(),
    }
}

/// Writes what shares a scale, how many there are, and their values; nothing for a tensor without scales.
pub(crate) fn scales(tensor: &TensorInspection) -> String {
    let Some((count, least, most)) = tensor.scales else { return String::new() };
    let values = if least == most { short(least) } else { format!("{} to {}", short(least), short(most)) };
    let mut text = granularity(tensor);
    if tensor.granularity != Some(WeightScales::Tensor) {
        text += &format!(", {count}");
    }
    text += &format!(": {values}");
    if let Some(input) = tensor.input_scale {
        text += &format!("; input {}", short(input));
    }
    text
}

/// Writes a number with four digits.
pub(crate) fn short(number: f32) -> String {
    match number {
        0.0 => "0".into(),
        number if (1e-3..1e4).contains(&number) => {
            let digits = 3 - number.log10().floor() as i32;
            format!("{number:.*}", usize::try_from(digits).unwrap_or(0))
        }
        number => format!("{number:.3e}"),
    }
}

/// Writes a count with its noun.
pub(crate) fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Writes an SQNR.
pub(crate) fn decibels(sqnr: Option<f64>) -> String {
    match sqnr {
        None => String::new(),
        Some(sqnr) if sqnr == f64::INFINITY => "exact".into(),
        Some(sqnr) => format!("{sqnr:.2}"),
    }
}

/// Returns whether a character controls a terminal, or changes the direction of the text after it.
pub(crate) fn is_harmful(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// Removes what could control a terminal: names of tensors are what a file says.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if is_harmful(c) { '\u{FFFD}' } else { c }).collect()
}

/// Does as [`printable`], but keeps the ends of lines and tabs.
pub(crate) fn printable_lines(text: &str) -> String {
    let is_harmful = |c: char| is_harmful(c) && c != '\n' && c != '\t';
    text.chars().map(|c| if is_harmful(c) { '\u{FFFD}' } else { c }).collect()
}

/// The most characters of a cell.
const LONGEST: usize = 100;

/// Shortens a long text in its middle, where names of tensors differ least.
pub(crate) fn shortened(text: &str) -> String {
    let length = text.chars().count();
    if length <= LONGEST {
        return text.to_owned();
    }
    let half = (LONGEST - 1) / 2;
    let (begin, end) = (text.chars().take(half), text.chars().skip(length - half));
    begin.chain(['…']).chain(end).collect()
}

/// Writes a path as a shell reads it, with quotes if it needs them.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@%=,~".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Writes rows as columns: the first two to the left, the others to the right. The first row is the heading. Long cells are
/// shortened, and what could control a terminal is removed.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|cell| shortened(&printable(cell))).collect()).collect();
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
            0 | 1 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units_and_columns_align() {
        assert_eq!([0, 1023, 1024, 1 << 32].map(bytes), ["0 B", "1023 B", "1.0 KiB", "4.0 GiB"]);
        let rows = [["a", "bb", "c"], ["aaa", "b", "ccc"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows), "a    bb    c\naaa  b   ccc\n");
        assert_eq!(
            [0.0, 0.907_24, 1.0038, 448.0, 9999.0, 3e38, 1e-9].map(short),
            ["0", "0.9072", "1.004", "448.0", "9999", "3.000e38", "1.000e-9"]
        );
        assert_eq!([count(1, "file"), count(2, "file")], ["1 file", "2 files"]);
        assert_eq!(decibels(Some(f64::INFINITY)), "exact");
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\u{FFFD}[2Jb\u{FFFD}");
        assert_eq!(printable_lines("a\u{1b}[2Jb\n\t\r"), "a\u{FFFD}[2Jb\n\t\u{FFFD}");
        assert_eq!(printable("a\u{202E}b\u{2066}"), "a\u{FFFD}b\u{FFFD}");
        assert_eq!(["a/b", "a b", "it's"].map(|path| quoted(path.as_ref())), ["a/b", "'a b'", r"'it'\''s'"]);
        let long = ["a".repeat(70_000), "b".repeat(70_000)].concat();
        assert_eq!(shortened(&long), format!("{}…{}", "a".repeat(49), "b".repeat(49)));
        let wide = table(&[vec!["tensor".into(), "x".into()], vec![long, "y".into()]]);
        assert!(wide.lines().all(|line| line.chars().count() <= 103), "{wide}");
    }
}
