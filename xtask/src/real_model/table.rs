//! The table that is printed.

use std::fmt::Write as _;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// A line of the table.
#[derive(Debug, Default)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) perplexity: Option<f64>,
    /// Seconds to load the model.
    pub(super) load: Option<f64>,
    /// Tokens per second.
    pub(super) speed: Option<f64>,
    /// The largest memory, in bytes.
    pub(super) memory: Option<u64>,
    /// The values with which the row is compared, and how it compares.
    pub(super) note: String,
    /// Whether the bar is met; `None` if there is none.
    pub(super) passed: Option<bool>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Row>,
}

impl Table {
    pub(super) fn push(&mut self, row: Row) {
        println!("{}", cells(&row).join("  "));
        self.rows.push(row);
    }

    pub(super) fn failures(&self) -> usize {
        self.rows.iter().filter(|row| row.passed == Some(false)).count()
    }

    /// Writes the table with date, machine and command.
    pub(super) fn markdown(&self, is_complete: bool) -> String {
        let mut text =
            format!("SmolLM2-135M-Instruct, {} on {}: `cargo xtask real-model`", date(), machine());
        if !is_complete {
            text += ", with fewer windows: no result";
        }
        text += "\n\n| | perplexity | to load | tokens/s | memory | compared with | |\n|---|---|---|---|---|---|---|\n";
        for row in &self.rows {
            let _ = writeln!(text, "| {} |", cells(row).join(" | "));
        }
        text
    }
}

fn cells(row: &Row) -> Vec<String> {
    let number =
        |value: Option<f64>, digits: usize| value.map_or(String::new(), |value| format!("{value:.digits$}"));
    let passed = match row.passed {
        None => "",
        Some(true) => "ok",
        Some(false) => "**missed**",
    };
    vec![
        row.name.clone(),
        number(row.perplexity, 4),
        row.load.map_or(String::new(), |load| format!("{load:.2} s")),
        number(row.speed, 1),
        row.memory.map_or(String::new(), |bytes| format!("{} MiB", bytes >> 20)),
        row.note.clone(),
        passed.to_owned(),
    ]
}

fn machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{} ({cores} cores)", model.unwrap_or(std::env::consts::ARCH))
}

/// Today's date in UTC, from the days since 1970.
fn date() -> String {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() / 86_400);
    civil(days)
}

/// The date of a day, by the civil calendar: eras of 400 years that begin on 1 March.
fn civil(days: u64) -> String {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        for (days, date) in
            [(0, "1970-01-01"), (11_016, "2000-02-29"), (19_782, "2024-02-29"), (20_454, "2026-01-01")]
        {
            assert_eq!(civil(days), date);
        }
    }

    #[test]
    fn a_missed_bar_is_counted_and_shown() {
        let mut table = Table::default();
        table.push(Row { name: "a".into(), perplexity: Some(16.868), passed: Some(true), ..Row::default() });
        table.push(Row { name: "b".into(), note: "n".into(), passed: Some(false), ..Row::default() });
        assert_eq!(table.failures(), 1);
        let text = table.markdown(true);
        assert!(text.contains("| a | 16.8680 |  |  |  |  | ok |\n"), "{text}");
        assert!(text.ends_with("| b |  |  |  |  | n | **missed** |\n"), "{text}");
        assert!(table.markdown(false).contains("no result"));
    }
}
