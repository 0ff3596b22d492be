//! Steps of a task: each is run and timed, none stops the others, a table closes the run.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::workspace::Result;

/// Returns the exit code of the program, after printing the error if there is one.
pub(crate) fn exit_code(done: Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

#[derive(Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

struct Row {
    name: String,
    time: Duration,
    /// A remark on success, the error otherwise.
    outcome: std::result::Result<String, String>,
}

impl Report {
    /// Runs a step; its `Ok` is a remark for the table, mostly empty.
    pub(crate) fn step(&mut self, name: &str, run: impl FnOnce() -> Result<String>) {
        println!("\n── {name}");
        let start = Instant::now();
        let outcome = run().map_err(|error| error.to_string());
        if let Err(error) = &outcome {
            println!("{name}: {error}");
        }
        self.rows.push(Row { name: name.to_owned(), time: start.elapsed(), outcome });
    }

    /// Prints the table and says whether all steps passed.
    pub(crate) fn finish(&self) -> bool {
        print!("\n{}", self.table());
        self.failed() == 0
    }

    fn failed(&self) -> usize {
        self.rows.iter().filter(|row| row.outcome.is_err()).count()
    }

    fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).max("step".len());
        let mut table = format!("{:width$}  {:>7}  result\n", "step", "seconds");
        for row in &self.rows {
            let outcome = match &row.outcome {
                Ok(remark) if remark.is_empty() => "ok".to_owned(),
                Ok(remark) => format!("ok, {remark}"),
                Err(error) => format!("FAILED: {}", error.lines().next().unwrap_or_default()),
            };
            table += &format!("{:width$}  {:>7.1}  {outcome}\n", row.name, row.time.as_secs_f64());
        }
        let total: Duration = self.rows.iter().map(|row| row.time).sum();
        let verdict = match self.failed() {
            0 => "all passed".to_owned(),
            failed => format!("{failed} of {} failed", self.rows.len()),
        };
        table + &format!("{:width$}  {:>7.1}  {verdict}\n", "total", total.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_does_not_stop_the_next_and_is_named_in_the_table() {
        let mut report = Report::default();
        report.step("lints", || Err("two\nlines".into()));
        report.step("tests", || Ok("7 run".to_owned()));
        assert!(!report.finish());
        let table = report.table();
        assert!(table.contains("lints      0.0  FAILED: two\n"), "{table}");
        assert!(table.contains("tests      0.0  ok, 7 run\n"), "{table}");
        assert!(table.ends_with("1 of 2 failed\n"), "{table}");
    }
}
