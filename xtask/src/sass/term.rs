//! A sum of times, as the plan of a layer writes it: measured rows, estimates and given numbers.

use super::estimate::Estimate;
use super::results::Results;
use super::table::Table;
use crate::workspace::Result;

/// The sources of a sum of times.
pub(super) struct Sources<'a> {
    pub(super) results: &'a Results,
    pub(super) table: &'a Table,
}

/// A sum in µs, and where its parts come from.
#[derive(Debug, PartialEq)]
pub(super) struct Sum {
    pub(super) time: f64,
    /// The sum where each estimate is at least what its loads wait for.
    pub(super) with_latency: f64,
    pub(super) origin: String,
}

impl Sources<'_> {
    /// `2 x row memory/fp8-rs/cast+T 16384x4096 + estimate add bf16 16384*4096 + 3 x given 2.5 a small launch`.
    ///
    /// # Errors
    /// A part that is not understood, a row or a count that does not exist.
    pub(super) fn sum(&self, text: &str) -> Result<Sum> {
        let (mut time, mut with_latency, mut origins) = (0.0, 0.0, Vec::<String>::new());
        for part in text.split(" + ").map(str::trim) {
            // Names of cases contain an x, too.
            let multiple =
                part.split_once(" x ").and_then(|(factor, rest)| Some((factor.parse::<f64>().ok()?, rest)));
            let (factor, rest) = multiple.unwrap_or((1.0, part));
            let unknown = || format!("sass: {part}: [N x] row, estimate or given is wanted");
            if !(factor.is_finite() && factor >= 0.0) {
                return Err(unknown().into());
            }
            let (kind, rest) = rest.split_once(' ').ok_or_else(unknown)?;
            let mut latency = 0.0_f64;
            let (one, origin) = match kind {
                "row" => {
                    let mut names = rest.splitn(3, '/');
                    let (Some(section), Some(by), Some(case)) = (names.next(), names.next(), names.next())
                    else {
                        return Err(format!("sass: {part}: row SECTION/BY/CASE is wanted").into());
                    };
                    (self.results.time(section, case, by)?, format!("measured {case}"))
                }
                "estimate" => {
                    let [work, dtype, elements] = rest.split(' ').collect::<Vec<_>>()[..] else {
                        return Err(format!("sass: {part}: estimate WORK TYPE ELEMENTS is wanted").into());
                    };
                    let estimate = self.estimate(work, dtype, product(elements).ok_or_else(unknown)?)?;
                    latency = estimate.latency;
                    (estimate.time(), format!("estimate {work} ({})", estimate.bound()))
                }
                "given" => {
                    let (time, why) = rest.split_once(' ').ok_or_else(unknown)?;
                    (time.parse().map_err(|_| unknown())?, format!("given: {why}"))
                }
                _ => return Err(unknown().into()),
            };
            time += factor * one;
            with_latency += factor * latency.max(one);
            if !origins.contains(&origin) {
                origins.push(origin);
            }
        }
        Ok(Sum { time, with_latency, origin: origins.join(", ") })
    }

    pub(super) fn estimate(&self, work: &str, dtype: &str, elements: f64) -> Result<Estimate> {
        let row = self.table.row(work, dtype);
        let row =
            row.ok_or_else(|| format!("sass: {work} {dtype} is not in sass.txt: run cargo xtask sass"))?;
        Ok(Estimate::new(row, elements, self.results.copy()?))
    }
}

/// `16384*4096`.
fn product(text: &str) -> Option<f64> {
    text.split('*')
        .map(|factor| factor.parse::<u64>().ok())
        .try_fold(1.0, |all, factor| Some(all * factor? as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sass::count::Counts;
    use crate::sass::table::{Best, Row};

    const RESULTS: &str = "\
## copy
| case | by | µs | least | GB/s | |
| 512 MiB | fp8-rs | 360.5 | 359.9 | 1000 | |
## memory
| case | by | µs | least | GB/s | |
| cast 8 x 8 | fp8-rs | 10 | 9 | 1 | |
";

    fn row() -> Row {
        Row {
            work: "add".to_owned(),
            dtype: "bf16".to_owned(),
            kernel: "add".to_owned(),
            lanes: 1,
            registers: 32,
            shared: 0,
            warps: 64,
            in_flight: 1,
            counts: Counts { instructions: 1.0, ..Counts::default() },
            bytes: 8.8,
            read: 1.0,
            best: Best { instructions: 1.0, warps: 64, shared: 0.0 },
            hash: String::new(),
            reason: None,
        }
    }

    #[test]
    fn rows_estimates_and_given_times_are_added() {
        let (results, table) =
            (Results::read(RESULTS).unwrap(), Table { tools: String::new(), rows: vec![row()] });
        let sources = Sources { results: &results, table: &table };
        let sum = sources
            .sum("2 x row memory/fp8-rs/cast 8 x 8 + estimate add bf16 1000*100 + 3 x given 0.5 small");
        let sum = sum.unwrap();
        // 100,000 elements of 8.8 bytes at 0.88 of 1,000,000 bytes a µs.
        assert!((sum.time - (20.0 + 1.0 + 1.5)).abs() < 1e-9, "{}", sum.time);
        assert_eq!(sum.origin, "measured cast 8 x 8, estimate add (memory), given: small");
    }

    #[test]
    fn a_part_that_is_wrong_says_what_is_wanted() {
        let (results, table) = (Results::read(RESULTS).unwrap(), Table::default());
        let sources = Sources { results: &results, table: &table };
        let error = |text: &str| sources.sum(text).unwrap_err().to_string();
        for text in ["", "cast", "x x row a/b/c", "-1 x given 2 why", "guess 3 so", "given much why"] {
            assert_eq!(error(text), format!("sass: {text}: [N x] row, estimate or given is wanted"));
        }
        assert_eq!(error("row memory/cast"), "sass: row memory/cast: row SECTION/BY/CASE is wanted");
        assert_eq!(
            error("estimate add bf16"),
            "sass: estimate add bf16: estimate WORK TYPE ELEMENTS is wanted"
        );
        assert_eq!(error("estimate add bf16 8"), "sass: add bf16 is not in sass.txt: run cargo xtask sass");
    }
}
