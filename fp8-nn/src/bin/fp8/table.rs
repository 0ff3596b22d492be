//! Numbers and tables as text.

use fp8_nn::hf::{TensorInspection, WeightScales};

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

/// Writes what shares a scale and how many there are; nothing for a tensor without scales.
pub(crate) fn scales(tensor: &TensorInspection) -> String {
    let count = tensor.scales.map_or(0, |(count, _, _)| count);
    match tensor.granularity {
        None => String::new(),
        Some(WeightScales::Tensor) => "tensor".into(),
        Some(WeightScales::Channel) => format!("channel, {count}"),
        Some(WeightScales::Block([rows, cols])) => format!("block {rows}×{cols}, {count}"),
        Some(_) => format!("{count}"),
    }
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

/// Removes what could control a terminal: names of tensors are what a file says.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect()
}

/// Does as [`printable`], but keeps the ends of lines and tabs.
pub(crate) fn printable_lines(text: &str) -> String {
    let is_harmful = |c: char| c.is_control() && c != '\n' && c != '\t';
    text.chars().map(|c| if is_harmful(c) { '\u{FFFD}' } else { c }).collect()
}

/// Writes rows as columns: the first two to the left, the others to the right. The first row is the heading.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
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
    }
}
