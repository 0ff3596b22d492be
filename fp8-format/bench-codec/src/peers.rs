//! The same work by other libraries, in a process of Python.

use crate::row::{Row, Work};
use std::error::Error;
use std::path::Path;
use std::process::Command;

/// Casts, by numbers of threads.
const SCRIPT: &str = include_str!("peers.py");
/// Scales for blocks, on one thread.
const BLOCKS: &str = include_str!("peers_blocks.py");

/// Returns what the scripts measure, the casts with so many threads, with ratios to the ceilings that were measured here with the
/// same bytes.
pub(crate) fn measure(python: &Path, threads: &[usize], ours: &[Row]) -> Result<Vec<Row>, Box<dyn Error>> {
    let threads: Vec<String> = threads.iter().map(usize::to_string).collect();
    let mut rows = Vec::new();
    for (script, arguments) in [(SCRIPT, threads), (BLOCKS, Vec::new())] {
        let done = Command::new(python).args(["-c", script]).args(arguments).output()?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            return Err(format!("{}: {}: {said}", python.display(), done.status).into());
        }
        for line in String::from_utf8_lossy(&done.stdout).lines() {
            let mut row: Row = serde_json::from_str(line)?;
            row.ceiling_ratio = ceiling(&row, ours).map(|ceiling| row.gb_per_s / ceiling);
            rows.push(row);
        }
    }
    Ok(rows)
}

/// The ceiling that was measured with the same bytes and threads.
fn ceiling(row: &Row, ours: &[Row]) -> Option<f64> {
    let same = |other: &&Row| {
        other.bytes() == row.bytes()
            && (other.elements, other.threads, other.work) == (row.elements, row.threads, row.work)
    };
    let ours = ours.iter().find(same)?;
    Some(ours.gb_per_s / ours.ceiling_ratio?)
}

/// For each work, the fastest path against the fastest peer.
pub(crate) fn comparison(rows: &[Row]) -> Vec<String> {
    let fastest = |row: &Row, is_peer: bool, path: Option<&str>| {
        rows.iter()
            .filter(|other| {
                other.peer.is_some() == is_peer
                    && (other.work, other.source, other.format) == (row.work, row.source, row.format)
                    && (other.elements, other.threads) == (row.elements, row.threads)
                    && other.shape == row.shape
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
            lines.push(format!("{}: {best:.1} times {name}{scalar}", row.key()));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::{Format, Source};

    fn row(path: &str, peer: Option<&str>, threads: usize, gb_per_s: f64) -> Row {
        let row = Row::of(Work::Convert, path, Source::F32, Format::E5M2, None, threads);
        Row { elements: 1 << 20, gb_per_s, peer: peer.map(str::to_owned), ..row }
    }

    #[test]
    fn peers_are_compared_by_all_that_is_measured() {
        let mut ours = [row("scalar", None, 1, 5.0), row("avx2", None, 1, 20.0), row("avx2", None, 2, 30.0)];
        ours[0].ceiling_ratio = Some(0.25);
        let theirs = [1, 2, 16].map(|threads| row("", Some("torch"), threads, 10.0));
        assert_eq!(theirs.each_ref().map(|row| ceiling(row, &ours)), [Some(20.0), None, None]);
        let all: Vec<Row> = ours.into_iter().chain(theirs).collect();
        assert_eq!(
            comparison(&all),
            [
                "convert            f32  e5m2                  1 Mi  1: 2.0 times torch, the scalar path 0.5 times",
                "convert            f32  e5m2                  1 Mi  2: 3.0 times torch",
            ]
        );
    }
}
