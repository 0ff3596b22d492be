//! A table of rows, ours beside the peers', with the marks that ours are to reach.

use crate::result::Result;
use crate::timer::Row;
use std::fmt::Write;
use std::path::PathBuf;

/// The name under which this library's rows go; in other settings names begin with it.
pub(crate) const OURS: &str = "fp8-rs";
/// The share of the copy's speed that casts and the optimizer are to reach. `TRANSPOSING` is the share for casts that also
/// write a transpose.
const CAST: f64 = 0.85;
const TRANSPOSING: f64 = 0.80;
/// The share of the fastest peer's speed that FP8 products are to reach.
const PRODUCT: f64 = 0.98;
/// A case that moves fewer bytes waits for its launch, too, and has no mark against a copy.
const LEAST_BYTES: f64 = 64e6;
/// The start of the note of a case whose launches could not be recorded as a graph.
const NOT_RECORDED: &str = "queued: ";
/// µs for 640 slots.
const SCALES: f64 = 6.0;
/// The layer of width 4096 in FP8 as a graph: µs, and times as fast as ours in bf16.
const LAYER_US: f64 = 20_500.0;
const LAYER: f64 = 1.5;
/// The layer of width 1024: times as fast as the peers that run eagerly.
const SMALL_LAYER: f64 = 3.0;

/// The rows of files with one a line.
pub(crate) fn read(files: &[PathBuf]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        for (line, number) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            let row = serde_json::from_str(line);
            rows.push(row.map_err(|error| format!("{}:{number}: {error}", file.display()))?);
        }
    }
    Ok(rows)
}

/// A mark, and whether it is reached.
#[derive(Debug, PartialEq)]
struct Mark {
    text: String,
    reached: bool,
}

pub(crate) fn markdown(rows: &[Row]) -> String {
    let mut text = String::new();
    let mut sections: Vec<&str> = Vec::new();
    for row in rows {
        if !sections.contains(&&*row.section) {
            sections.push(&row.section);
        }
    }
    let (mut reached, mut missed) = (0, 0);
    for section in sections {
        let _ = writeln!(text, "\n## {section}\n");
        text.push_str("| case | by | µs | least | GB/s | TFLOP/s | of copy | ours : this | mark | |\n");
        text.push_str("|---|---|---|---|---|---|---|---|---|---|\n");
        for row in in_order(rows, section) {
            let mark = is_ours(row).then(|| mark(row, rows)).flatten();
            match &mark {
                Some(mark) if mark.reached => reached += 1,
                Some(_) => missed += 1,
                None => {}
            }
            line(&mut text, row, rows, mark);
        }
    }
    let _ =
        writeln!(text, "\n{reached} marks reached, {missed} missed. *ours : this* above 1: ours is faster.");
    text
}

/// The rows of a section, those of a case together, ours first.
fn in_order<'a>(rows: &'a [Row], section: &str) -> Vec<&'a Row> {
    let of_section: Vec<&Row> = rows.iter().filter(|row| row.section == section).collect();
    let first = |case: &str| of_section.iter().position(|row| row.case == case);
    let mut ordered = of_section.clone();
    ordered.sort_by_key(|row| (first(&row.case), !is_ours(row)));
    ordered
}

fn line(text: &mut String, row: &Row, rows: &[Row], mark: Option<Mark>) {
    let number = |value: Option<f64>, digits: usize| value.map_or(String::new(), |v| format!("{v:.digits$}"));
    let ours = rows.iter().filter(|of| is_ours(of) && of.section == row.section && of.case == row.case);
    let ours = ours
        .filter(|of| of.us.is_some())
        .min_by(|a, b| f64::total_cmp(&a.us.unwrap_or(0.0), &b.us.unwrap_or(0.0)));
    let ratio = ours.filter(|_| !is_ours(row)).and_then(|ours| Some(row.us? / ours.us?));
    let (mark, verdict) = match mark {
        Some(Mark { text, reached }) => (text, if reached { "reached" } else { "missed" }),
        None => (String::new(), ""),
    };
    let note = if row.note == "graph" { verdict.to_owned() } else { format!("{verdict} {}", row.note) };
    let _ = writeln!(
        text,
        "| {} | {} | {} | {} | {} | {} | {} | {} | {mark} | {} |",
        row.case.replace('|', "/"),
        row.by,
        number(row.us, 1),
        number(row.us_min, 1),
        number(row.gb_per_s, 0),
        number(row.tflops, 0),
        number(row.ratio_to_copy, 2),
        number(ratio, 2),
        note.trim().replace(['|', '\n'], "/"),
    );
}

fn is_ours(row: &Row) -> bool {
    row.by.starts_with(OURS)
}

/// Returns the mark that a row of ours is to reach, or `None` if it has none. Where a case also has a tuned row, only that
/// one has a mark.
fn mark(row: &Row, rows: &[Row]) -> Option<Mark> {
    let us = row.us.filter(|_| !row.note.starts_with(NOT_RECORDED))?;
    let is_better =
        |of: &&Row| is_ours(of) && of.by != OURS && of.section == row.section && of.case == row.case;
    if row.by == OURS && rows.iter().any(|of| is_better(&of) && of.us.is_some()) {
        return None;
    }
    let at_least = |ratio: f64, wanted: f64, of: &str| {
        Some(Mark { text: format!("{ratio:.2}, at least {wanted:.2} {of}"), reached: ratio >= wanted })
    };
    // Of the peers that do the same by one product, and as a graph.
    let fastest = || {
        let peers = rows.iter().filter(|of| of.section == row.section && of.case == row.case && !is_ours(of));
        let alike = peers.filter(|of| !of.by.ends_with("+ add") && !of.note.starts_with(NOT_RECORDED));
        alike.filter_map(|of| of.us).min_by(f64::total_cmp)
    };
    match &*row.section {
        "memory" => {
            let ratio = row.ratio_to_copy?;
            // GB/s times µs are kilobytes.
            if row.gb_per_s.is_some_and(|speed| speed * us * 1e3 < LEAST_BYTES) {
                return None;
            }
            let what = row.case.split_once(' ')?.0;
            match what {
                "cast" => at_least(ratio, CAST, "of the copy"),
                "cast+T" | "cast+T+dbias" => at_least(ratio, TRANSPOSING, "of the copy"),
                _ => None,
            }
        }
        "adamw" => at_least(row.ratio_to_copy?, CAST, "of the copy"),
        "scales" if row.case.starts_with("640 ") => {
            Some(Mark { text: format!("at most {SCALES} µs"), reached: us <= SCALES })
        }
        "gemm" if row.case.ends_with("fp8") => at_least(fastest()? / us, PRODUCT, "of the fastest"),
        "layer" if row.case.ends_with("fp8 graph") && row.case.starts_with("h4096 ") => {
            let stem = row.case.trim_end_matches("fp8 graph");
            let bf16 = |how| format!("{stem}bf16 {how}");
            let of_ours = rows.iter().filter(|of| of.by == row.by && of.section == row.section);
            let bf16 = of_ours.filter(|of| of.case == bf16("eager") || of.case == bf16("graph"));
            let ratio = bf16.filter_map(|of| of.us).min_by(f64::total_cmp)? / us;
            Some(Mark {
                text: format!("{ratio:.2}, at least {LAYER} x bf16; at most {:.1} ms", LAYER_US / 1e3),
                reached: ratio >= LAYER && us <= LAYER_US,
            })
        }
        "layer" if row.case.ends_with("fp8 graph") && row.case.starts_with("h1024 ") => {
            let eager = rows.iter().filter(|of| {
                let is_alike = of.section == row.section && of.case.starts_with("h1024 ");
                is_alike && of.case.ends_with(" eager") && !is_ours(of)
            });
            let eager = eager.filter_map(|of| of.us).min_by(f64::total_cmp)?;
            at_least(eager / us, SMALL_LAYER, "x eager peers")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(section: &str, case: &str, by: &str, us: f64) -> Row {
        Row { section: section.into(), case: case.into(), by: by.into(), us: Some(us), ..Row::default() }
    }

    fn marked(row: &Row, rows: &[Row]) -> Option<bool> {
        mark(row, rows).map(|mark| mark.reached)
    }

    #[test]
    fn casts_are_measured_against_the_copy_and_transposes_have_a_lower_mark() {
        let cast = |case: &str, ratio| Row { ratio_to_copy: Some(ratio), ..row("memory", case, OURS, 50.0) };
        assert_eq!(marked(&cast("cast 8192x8192", 0.86), &[]), Some(true));
        assert_eq!(marked(&cast("cast f32 8192x8192", 0.84), &[]), Some(false));
        assert_eq!(marked(&cast("cast+T 8192x8192", 0.84), &[]), Some(true));
        assert_eq!(marked(&cast("dequantize 8192x8192", 0.5), &[]), None);
    }

    #[test]
    fn what_waits_for_its_launch_has_no_mark_against_the_copy() {
        let cast = |gb_per_s| Row {
            ratio_to_copy: Some(0.7),
            gb_per_s: Some(gb_per_s),
            ..row("memory", "cast 2048x2048", OURS, 10.0)
        };
        assert_eq!(marked(&cast(1260.0), &[]), None);
        assert_eq!(marked(&cast(6500.0), &[]), Some(false));
    }

    #[test]
    fn rows_that_no_graph_was_recorded_of_have_no_mark_give_none_and_say_why() {
        let ours = row("gemm", "c fp8", OURS, 20.0);
        let slow = Row { note: "queued: no memory".into(), ..row("gemm", "c fp8", "a", 90.0) };
        let sum = row("gemm", "c fp8", "torch._scaled_mm + add", 30.0);
        assert_eq!(marked(&ours, &[slow.clone(), sum.clone()]), None);
        assert_eq!(marked(&ours, &[slow.clone(), sum, row("gemm", "c fp8", "b", 21.0)]), Some(true));
        let refused = Row { note: "queued: refused".into(), ..ours };
        assert_eq!(marked(&refused, &[row("gemm", "c fp8", "b", 21.0)]), None);
        let text = markdown(&[refused, slow]);
        assert!(text.contains("queued: refused") && text.contains("queued: no memory"), "{text}");
    }

    #[test]
    fn the_small_layer_has_to_beat_every_eager_peer() {
        let rows = [
            row("layer", "h1024 s2048 b1 fp8 graph", OURS, 1000.0),
            row("layer", "h1024 s2048 b1 fp8 eager", OURS, 1500.0),
            row("layer", "h1024 s2048 b1 bf16 eager", "torch eager", 4000.0),
            row("layer", "h1024 s2048 b1 fp8 eager", "Transformer Engine", 2900.0),
        ];
        assert_eq!(marked(&rows[0], &rows), Some(false));
        assert_eq!(marked(&rows[0], &rows[..3]), Some(true));
    }

    #[test]
    fn a_product_is_measured_against_the_fastest_peer_and_has_no_mark_without_one() {
        let ours = row("gemm", "cube 1024 fp8", OURS, 100.0);
        assert_eq!(marked(&ours, std::slice::from_ref(&ours)), None);
        let peers = [row("gemm", "cube 1024 fp8", "a", 99.0), row("gemm", "cube 1024 fp8", "b", 120.0)];
        assert_eq!(marked(&ours, &peers), Some(true));
        assert_eq!(marked(&ours, &[row("gemm", "cube 1024 fp8", "a", 97.0)]), Some(false));
    }

    #[test]
    fn of_two_rows_of_ours_the_tuned_one_has_the_mark_and_is_no_peer() {
        let rows = [
            row("gemm", "c fp8", OURS, 100.0),
            row("gemm", "c fp8", "fp8-rs tuned", 90.0),
            row("gemm", "c fp8", "peer", 90.0),
        ];
        assert_eq!([0, 1].map(|i| marked(&rows[i], &rows)), [None, Some(true)]);
        assert!(
            markdown(&rows).contains("| c fp8 | peer | 90.0 |  |  |  |  | 1.00 |"),
            "{}",
            markdown(&rows)
        );
    }

    #[test]
    fn the_layer_has_to_beat_our_own_bf16_in_time() {
        let rows = [
            row("layer", "h4096 s2048 b8 bf16 eager", OURS, 33_000.0),
            row("layer", "h4096 s2048 b8 bf16 graph", OURS, 31_000.0),
            row("layer", "h4096 s2048 b8 fp8 graph", OURS, 20_000.0),
        ];
        assert_eq!(marked(&rows[2], &rows), Some(true));
        assert_eq!(marked(&row("layer", "h4096 s2048 b8 fp8 graph", OURS, 20_600.0), &rows), Some(false));
    }

    #[test]
    fn a_table_puts_ours_first_and_says_how_much_faster_it_is() {
        let rows = [row("gemm", "c fp8", "peer", 30.0), row("gemm", "c fp8", OURS, 20.0)];
        let text = markdown(&rows);
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("| c ")).collect();
        assert!(lines[0].contains(OURS) && lines[0].contains("1.50, at least 0.98"), "{text}");
        assert!(lines[1].contains("| 1.50 |"), "{text}");
        assert!(text.contains("1 marks reached, 0 missed"), "{text}");
    }
}
