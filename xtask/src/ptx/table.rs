//! The table of what each kernel needs on each architecture: `registers.txt`.
//!
//! A row a kernel, a group of three columns an architecture. Rows of a file that does not compile are taken over from
//! the table before.

use std::fmt::Write as _;

/// Those that the table shows; the first is that of the snapshots.
pub(super) const ARCHITECTURES: [&str; 4] = ["sm_89", "sm_90a", "sm_100", "sm_120"];

/// Those of them for which kernel files with code for single architectures are compiled as `sm_100a` and `sm_120a`; the first is that
/// of their second snapshots.
pub(super) const SPECIFIC_ARCHITECTURES: [&str; 2] = ["sm_100", "sm_120"];

const HEADER: &str = "\
# Registers, bytes of static shared memory and PTX instructions of each kernel, written by `cargo xtask ptx`.
# The compiler unrolls differently for later architectures; a `*` marks PTX that is not sm_89's.
# nvfp4 has code for single architectures: its last columns are those of sm_100a and sm_120a.
# A `!` at the end marks a file that must not stay so: `cargo xtask ptx` says why.
";

/// One kernel: `cells` holds registers, shared memory, instructions and whether the PTX is sm_89's, by architecture.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) file: String,
    pub(crate) kernel: String,
    pub(crate) threads: u32,
    /// Something is wrong with the file.
    pub(crate) is_bad: bool,
    pub(crate) cells: Vec<Cell>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cell {
    pub(crate) registers: u32,
    pub(crate) shared: u32,
    pub(crate) instructions: usize,
    pub(crate) differs: bool,
}

/// The whole file.
pub(crate) fn write(rows: &[Row]) -> String {
    let width = |of: fn(&Row) -> &str| rows.iter().map(|row| of(row).len()).max().unwrap_or(0).max(6);
    let (file, kernel) = (width(|row| &row.file), width(|row| &row.kernel));
    let mut text = format!("{HEADER}{:file$} {:kernel$} {:>7}", "", "", "");
    for arch in ARCHITECTURES {
        let _ = write!(text, " |{arch:>17} ");
    }
    let _ = write!(text, "\n{:file$} {:kernel$} {:>7}", "file", "kernel", "threads");
    for _ in ARCHITECTURES {
        let _ = write!(text, " |{:>4}{:>7}{:>6} ", "reg", "shared", "ptx");
    }
    text = text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n") + "\n";
    for row in rows {
        let mut line = format!("{:file$} {:kernel$} {:>7}", row.file, row.kernel, row.threads);
        for cell in &row.cells {
            let mark = if cell.differs { '*' } else { ' ' };
            let _ = write!(line, " |{:>4}{:>7}{:>6}{mark}", cell.registers, cell.shared, cell.instructions);
        }
        text += line.trim_end();
        text += if row.is_bad { " !\n" } else { "\n" };
    }
    text
}

/// The rows of a file written before; lines that are none are passed over.
pub(crate) fn read(text: &str) -> Vec<Row> {
    text.lines().filter_map(row).collect()
}

fn row(line: &str) -> Option<Row> {
    let is_bad = line.ends_with('!');
    let mut groups = line.trim_end_matches('!').split('|');
    let mut head = groups.next()?.split_whitespace();
    let (file, kernel) = (head.next()?.to_owned(), head.next()?.to_owned());
    let threads = head.next()?.parse().ok()?;
    let cells = groups.map(cell).collect::<Option<Vec<_>>>()?;
    (cells.len() == ARCHITECTURES.len()).then_some(Row { file, kernel, threads, is_bad, cells })
}

fn cell(text: &str) -> Option<Cell> {
    let mut numbers = text.split_whitespace();
    let (registers, shared) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    let instructions = numbers.next()?;
    let differs = instructions.ends_with('*');
    let instructions = instructions.trim_end_matches('*').parse().ok()?;
    Some(Cell { registers, shared, instructions, differs })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_table_reads_back() {
        let cell = |registers, differs| Cell { registers, shared: 4096, instructions: 1234, differs };
        let rows = ["a_long_name_of_a_kernel", "b"].map(|kernel| Row {
            file: "cross_entropy".to_owned(),
            kernel: kernel.to_owned(),
            threads: 1024,
            is_bad: kernel == "b",
            cells: vec![cell(8, false), cell(255, true), cell(30, true), cell(30, false)],
        });
        let text = write(&rows);
        assert_eq!(read(&text), rows, "{text}");
        assert!(text.lines().all(|line| line.len() <= 132 && !line.ends_with(' ')), "{text}");
    }
}
