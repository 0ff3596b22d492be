//! The same work by other libraries, in a process of Python.

use crate::row::{Row, Work};
use std::error::Error;
use std::path::Path;
use std::process::Command;

const SCRIPT: &str = include_str!("peers.py");

/// What the script measures, with ratios to the ceilings that were measured here with the same bytes.
pub(crate) fn measure(python: &Path, ours: &[Row]) -> Result<Vec<Row>, Box<dyn Error>> {
    let done = Command::new(python).args(["-c", SCRIPT]).output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(format!("{}: {}: {said}", python.display(), done.status).into());
    }
    let mut rows = Vec::new();
    for line in String::from_utf8_lossy(&done.stdout).lines() {
        let mut row: Row = serde_json::from_str(line)?;
        let same = |other: &&Row| {
            other.bytes() == row.bytes()
                && (other.elements, other.threads, other.work) == (row.elements, row.threads, row.work)
        };
        let ceiling = ours.iter().find(same).map(|row| row.gb_per_s / row.ceiling_ratio);
        row.ceiling_ratio = ceiling.map_or(0.0, |ceiling| row.gb_per_s / ceiling);
        rows.push(row);
    }
    Ok(rows)
}

/// For each work, the fastest path against the fastest peer.
pub(crate) fn comparison(rows: &[Row]) -> Vec<String> {
    let fastest = |row: &Row, is_peer: bool, path: Option<&str>| {
        rows.iter()
            .filter(|other| {
                other.peer.is_some() == is_peer
                    && (other.work, other.source, other.format) == (row.work, row.source, row.format)
                    && (other.elements, other.threads) == (row.elements, row.threads)
                    && (path.is_none() || other.path.as_deref() == path)
                    && (row.work != Work::Quantize || other.scale.as_deref() == Some("any"))
            })
            .max_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s))
    };
    let mut lines = Vec::new();
    for row in rows.iter().filter(|row| row.peer.is_some()) {
        let name = row.peer.as_deref().unwrap_or_default();
        let of = |path: Option<&str>| fastest(row, false, path).map(|ours| ours.gb_per_s / row.gb_per_s);
        if let (Some(best), scalar) = (of(None), of(Some("scalar"))) {
            let scalar =
                scalar.map_or(String::new(), |scalar| format!(", the scalar path {scalar:.1} times"));
            lines.push(format!(
                "{}: {best:.1} times {name}{scalar}",
                row.line().split("  ").next().unwrap_or("")
            ));
        }
    }
    lines
}
