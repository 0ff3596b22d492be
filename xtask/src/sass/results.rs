//! Measured rows of a results file, such as `fp8-nn/benches/results/2026-11-22-h100.md`.

use crate::workspace::Result;

/// The results that estimates are calibrated on.
pub(super) const FILE: &str = "fp8-nn/benches/results/2026-11-22-h100.md";
/// Our rows.
pub(super) const OURS: &str = "fp8-rs";

#[derive(Debug, PartialEq)]
struct Measured {
    section: String,
    case: String,
    by: String,
    time: f64,
    bandwidth: Option<f64>,
}

pub(super) struct Results(Vec<Measured>);

impl Results {
    /// The committed file.
    pub(super) fn committed() -> Result<Self> {
        let path = crate::workspace::root().join(FILE);
        Self::read(&std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?)
    }

    /// # Errors
    /// A text without measured rows.
    pub(super) fn read(text: &str) -> Result<Self> {
        let (mut rows, mut section, mut is_measured) = (Vec::new(), "", false);
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("## ") {
                (section, is_measured) = (name.trim(), false);
            } else if line.starts_with("| case | by | µs |") {
                is_measured = true;
            } else if let Some(cells) = line.strip_prefix("| ").filter(|_| is_measured) {
                let cells: Vec<&str> = cells.split(" | ").map(str::trim).collect();
                let [case, by, time, _, bandwidth, ..] = cells[..] else { continue };
                let Ok(time) = time.parse() else { continue };
                let (section, case, by) = (section.to_owned(), case.to_owned(), by.to_owned());
                rows.push(Measured { section, case, by, time, bandwidth: bandwidth.parse().ok() });
            }
        }
        if rows.is_empty() {
            return Err(format!("sass: {FILE}: no measured rows").into());
        }
        Ok(Self(rows))
    }

    fn find(&self, section: &str, case: &str, by: &str) -> Option<&Measured> {
        self.0.iter().find(|row| row.section == section && row.case == case && row.by == by)
    }

    /// The µs of the first row of a section, case and library.
    ///
    /// # Errors
    /// No such row.
    pub(super) fn time(&self, section: &str, case: &str, by: &str) -> Result<f64> {
        let row = self.find(section, case, by);
        Ok(row.ok_or_else(|| format!("sass: {FILE}: section {section} has no row {case} by {by}"))?.time)
    }

    /// Bytes a µs that the copy reached, the first time it was measured.
    pub(super) fn copy(&self) -> Result<f64> {
        let row = self.find("copy", "512 MiB", OURS).and_then(|row| row.bandwidth);
        Ok(row.ok_or_else(|| format!("sass: {FILE}: no row of the copy"))? * 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_section_case_and_library() {
        let text = "\
## Tests
| suite | step | status |
| smoke | device | 3 | 4 | 5 |
## copy

| case | by | µs | least | GB/s | TFLOP/s | |
|---|---|---|---|---|---|---|
| 512 MiB | fp8-rs | 360.5 | 359.9 | 2979 |  | 1.00 |
## memory
| case | by | µs | least | GB/s | TFLOP/s | |
|---|---|---|---|---|---|---|
| cast 8192x8192 | fp8-rs | 73.8 | 73.6 | 2728 |  | 0.92 |
| cast 8192x8192 | torch.compile | 120.8 | 120.6 | 1666 |  | 0.56 |
| cut | torch
";
        let results = Results::read(text).unwrap();
        assert_eq!(results.0.len(), 3);
        assert_eq!(results.time("memory", "cast 8192x8192", "torch.compile").unwrap(), 120.8);
        assert_eq!(results.copy().unwrap(), 2_979_000.0);
        let error = results.time("memory", "cast", OURS).unwrap_err().to_string();
        assert_eq!(error, format!("sass: {FILE}: section memory has no row cast by fp8-rs"));
        let error = Results::read("## copy\n").err().unwrap().to_string();
        assert_eq!(error, format!("sass: {FILE}: no measured rows"));
        let text = text.replace("2979", "");
        let error = Results::read(&text).unwrap().copy().unwrap_err().to_string();
        assert_eq!(error, format!("sass: {FILE}: no row of the copy"));
    }
}
