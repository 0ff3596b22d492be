//! Tables in Markdown, and the file of all results.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::result::Result;
use crate::statistics::Ratio;

/// A table whose columns are as wide as their widest cell.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(header: impl IntoIterator<Item = String>) -> Self {
        Self { rows: vec![header.into_iter().collect()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Returns the lines. The first column is aligned to the left, the others to the right.
    pub(crate) fn markdown(&self) -> String {
        let columns = self.rows.first().map_or(0, Vec::len);
        let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
        let width = |column: usize| {
            let widths = self.rows.iter().map(|row| cell(row, column).chars().count());
            widths.max().unwrap_or(0).max(3)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            for (column, width) in widths.iter().copied().enumerate() {
                let cell = cell(row, column);
                text += &if column == 0 { format!("| {cell:width$} ") } else { format!("| {cell:>width$} ") };
            }
            text += "|\n";
            if index == 0 {
                for (column, width) in widths.iter().copied().enumerate() {
                    let line = "-".repeat(width + 1);
                    text += &if column == 0 { format!("|{line}-") } else { format!("|{line}:") };
                }
                text += "|\n";
            }
        }
        text
    }
}

/// Writes a ratio as `0.80 (0.78 … 0.83)`: the median, and the extremes of the rounds.
pub(crate) fn ratio(ratio: Option<Ratio>) -> String {
    ratio.map_or_else(
        || "-".to_owned(),
        |Ratio { median, lowest, highest }| format!("{median:.2} ({lowest:.2} … {highest:.2})"),
    )
}

/// A file of results that appears whole.
pub(crate) struct Results {
    file: PathBuf,
    part: PathBuf,
}

impl Results {
    /// Checks that the file can be written, before anything is measured for it.
    pub(crate) fn prepare(file: Option<&Path>) -> Result<Option<Self>> {
        let Some(file) = file else { return Ok(None) };
        let part = file.with_extension("json.part");
        fs::write(&part, "").map_err(|error| {
            format!("--json: cannot write {}: {error}; name a file in a folder that exists", part.display())
        })?;
        Ok(Some(Self { file: file.to_owned(), part }))
    }

    pub(crate) fn write(&self, results: &impl Serialize) -> Result {
        fs::write(&self.part, serde_json::to_vec_pretty(results)?)?;
        Ok(fs::rename(&self.part, &self.file)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned_and_complete() {
        let mut table = Table::new(["size".to_owned(), "f32".to_owned()]);
        table.row(["4/128".to_owned(), "12.50".to_owned()]);
        table.row(["6".to_owned()]);
        let expected = "\
            | size  |   f32 |\n\
            |-------|------:|\n\
            | 4/128 | 12.50 |\n\
            | 6     |       |\n";
        assert_eq!(table.markdown(), expected);
    }

    #[test]
    fn ratios_show_their_spread() {
        assert_eq!(ratio(None), "-");
        let spread = Ratio { median: 0.8, lowest: 0.776, highest: 0.9 };
        assert_eq!(ratio(Some(spread)), "0.80 (0.78 … 0.90)");
    }

    #[test]
    fn a_file_that_cannot_be_written_is_refused_before_the_measurement() {
        let folder = tempfile::tempdir().unwrap();
        let refused = Results::prepare(Some(&folder.path().join("none/a.json"))).err().unwrap().to_string();
        assert!(
            refused.starts_with("--json: cannot write ") && refused.ends_with("folder that exists"),
            "{refused}"
        );
        let file = folder.path().join("a.json");
        let results = Results::prepare(Some(&file)).unwrap().unwrap();
        results.write(&[1, 2]).unwrap();
        assert_eq!(serde_json::from_slice::<Vec<u8>>(&fs::read(&file).unwrap()).unwrap(), [1, 2]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(Results::prepare(None).unwrap().is_none());
    }
}
