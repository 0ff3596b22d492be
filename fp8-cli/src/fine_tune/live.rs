//! Progress on stderr: a bar on a terminal, a line every tenth of the way elsewhere, nothing when asked to be quiet.

use crate::page::percent;
use crate::table::bytes;
use fp8_hf::TrainRecord;
use fp8_nn::fp8_kernels::MemoryUse;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::time::Instant;

/// The progress of a run.
#[derive(Debug)]
pub(super) struct Live {
    output: Output,
    first: u64,
    last: u64,
    start: Instant,
    tokens: u64,
    saturated: Option<f64>,
}

#[derive(Debug)]
enum Output {
    Bar(ProgressBar),
    Lines,
    Nothing,
}

impl Live {
    /// Starts to show progress behind step `done`.
    pub(super) fn new(is_quiet: bool, done: u64, last: u64) -> Self {
        let output = match (is_quiet, std::io::stderr().is_terminal()) {
            (true, _) => Output::Nothing,
            (false, true) => Output::Bar(bar(done, last)),
            (false, false) => Output::Lines,
        };
        Self { output, first: done, last, start: Instant::now(), tokens: 0, saturated: None }
    }

    /// Shows that a step is done.
    pub(super) fn step(&mut self, record: &TrainRecord) {
        self.tokens += record.tokens;
        self.saturated = record.saturated.or(self.saturated);
        let message = self.message(record);
        match &self.output {
            Output::Bar(bar) => {
                bar.set_position(record.step);
                bar.set_message(message);
            }
            Output::Lines if self.is_tenth(record.step) || record.skipped => {
                // Training goes on even if stderr is closed.
                let _ = writeln!(std::io::stderr(), "step {}/{}  {message}", record.step, self.last);
            }
            Output::Lines | Output::Nothing => {}
        }
    }

    fn message(&self, record: &TrainRecord) -> String {
        let seconds = self.start.elapsed().as_secs_f64();
        let steps = (record.step - self.first).max(1) as f64;
        let mut text = match (record.skipped, record.learned) {
            (true, 0) => "skipped: no learned token".to_owned(),
            (true, _) => {
                format!("skipped: {} is not finite", record.non_finite.as_deref().unwrap_or("a gradient"))
            }
            (false, _) => format!("loss {:.4}  norm {:.3}", record.loss, record.grad_norm),
        };
        let _ = write!(text, "  {:.0} tokens/s", self.tokens as f64 / seconds.max(1e-9));
        if let Some(loss) = record.validation_loss {
            let _ = write!(text, "  validation {loss:.4}");
        }
        if let Some(share) = self.saturated {
            let _ = write!(text, "  saturated {} %", percent(share));
        }
        // Evaluations and checkpoints are part of the time so far.
        let left = seconds / steps * (self.last - record.step) as f64;
        let _ = write!(text, "  {}  {} left", bytes(record.memory_bytes), duration(left));
        text
    }

    /// Says something beside the progress.
    pub(super) fn say(&self, text: &str) {
        match &self.output {
            Output::Bar(bar) => bar.suspend(|| {
                let _ = write!(std::io::stderr(), "{text}");
            }),
            Output::Lines => {
                let _ = write!(std::io::stderr(), "{text}");
            }
            Output::Nothing => {}
        }
    }

    /// Ends the progress.
    pub(super) fn finish(&self) {
        if let Output::Bar(bar) = &self.output {
            bar.abandon();
        }
    }

    /// Whether another tenth of the way ends with this step.
    fn is_tenth(&self, step: u64) -> bool {
        let tenth = |step: u64| step.saturating_sub(self.first) * 10 / (self.last - self.first).max(1);
        step > self.first && tenth(step) > tenth(step - 1)
    }
}

fn bar(done: u64, last: u64) -> ProgressBar {
    let bar = ProgressBar::new(last).with_position(done);
    let style = ProgressStyle::with_template("{wide_bar:.cyan/blue} {pos}/{len}  {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─"));
    bar
}

/// Writes a time in its two largest units.
pub(super) fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let (days, hours, minutes, seconds) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60, whole % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {seconds} s"),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// Writes the sum of bytes, and its parts.
pub(super) fn memory_of(memory: &MemoryUse) -> String {
    format!("{} ({})", bytes(memory.total() as u64), parts(memory))
}

/// Writes bytes by their use.
fn parts(memory: &MemoryUse) -> String {
    let named = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("kept for backward", memory.saved),
        ("temporary", memory.temporary),
    ];
    let parts: Vec<String> =
        named.iter().map(|(name, size)| format!("{name} {}", bytes(*size as u64))).collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units() {
        assert_eq!(
            [0.4, 59.6, 61.0, 3725.0, 90_000.0].map(duration),
            ["0 s", "1 min 0 s", "1 min 1 s", "1 h 2 min", "1 d 1 h"]
        );
    }

    #[test]
    fn a_line_says_how_the_step_went() {
        let mut live = Live::new(true, 0, 10);
        let record =
            TrainRecord { step: 1, loss: 2.5, grad_norm: 1.0, tokens: 8, learned: 8, ..Default::default() };
        live.step(&record);
        let text = live.message(&record);
        assert!(text.starts_with("loss 2.5000  norm 1.000  ") && text.ends_with(" left"), "{text}");
        let skipped =
            TrainRecord { skipped: true, non_finite: Some("lm_head.weight".into()), ..record.clone() };
        assert!(live.message(&skipped).starts_with("skipped: lm_head.weight is not finite"));
        let empty = TrainRecord { skipped: true, learned: 0, saturated: Some(0.01), ..record };
        assert!(live.message(&empty).starts_with("skipped: no learned token"));
        live.step(&empty);
        assert!(live.message(&empty).contains("saturated 1.00 %"));
        assert_eq!((1..=10).filter(|&step| live.is_tenth(step)).count(), 10);
    }
}
