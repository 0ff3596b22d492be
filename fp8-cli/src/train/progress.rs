//! Progress on stderr: a bar on a terminal, a line every tenth of the way elsewhere, nothing when asked to be quiet.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use crate::train::config::Config;
use crate::train::trainer::Run;

/// The progress of one training.
#[derive(Debug)]
pub(crate) struct Progress {
    output: Output,
    run: Run,
    first: usize,
    last: usize,
    tokens_per_step: usize,
    start: Instant,
}

#[derive(Debug)]
enum Output {
    Bar(ProgressBar),
    Lines,
    Nothing,
}

impl Progress {
    /// Starts to show progress after step `done`.
    pub(crate) fn new(config: &Config, run: Run, done: usize) -> Self {
        let output = match (config.quiet, std::io::stderr().is_terminal()) {
            (true, _) => Output::Nothing,
            (false, true) => Output::Bar(bar(run, done, config.stop_at)),
            (false, false) => Output::Lines,
        };
        let tokens_per_step = config.settings.batch * config.settings.seq;
        Self { output, run, first: done, last: config.stop_at, tokens_per_step, start: Instant::now() }
    }

    /// Shows that `step` is done.
    pub(crate) fn step(&self, step: usize, loss: f32, loss_scale: Option<f32>) {
        let message = |progress: &Self| {
            let tokens = ((step - progress.first) * progress.tokens_per_step) as f64;
            let scale = loss_scale.map(|scale| format!("  loss scale {scale}")).unwrap_or_default();
            let speed = tokens / progress.start.elapsed().as_secs_f64();
            format!("loss {loss:.4}{scale}  {speed:.0} tokens/s")
        };
        match &self.output {
            Output::Bar(bar) => {
                bar.set_position(step as u64);
                bar.set_message(message(self));
            }
            Output::Lines if self.is_tenth(step) => {
                let title = self.run.title();
                // Training continues even if stderr is closed.
                let _ =
                    writeln!(std::io::stderr(), "{title:>14}  step {step}/{}  {}", self.last, message(self));
            }
            Output::Lines | Output::Nothing => {}
        }
    }

    /// Ends the progress of this training.
    pub(crate) fn finish(&self) {
        if let Output::Bar(bar) = &self.output {
            bar.abandon();
        }
    }

    /// Whether another tenth of the way ends with this step.
    fn is_tenth(&self, step: usize) -> bool {
        let tenth = |step: usize| (step - self.first) * 10 / (self.last - self.first).max(1);
        step > self.first && tenth(step) > tenth(step - 1)
    }
}

fn bar(run: Run, done: usize, last: usize) -> ProgressBar {
    let bar = ProgressBar::new(last as u64).with_position(done as u64).with_prefix(run.title());
    let style =
        ProgressStyle::with_template("{prefix:>14} {wide_bar:.cyan/blue} {pos}/{len}  {msg}  {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─"));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_lines_whatever_the_number_of_steps() {
        let progress = |first, last| Progress {
            output: Output::Nothing,
            run: Run::Fp8,
            first,
            last,
            tokens_per_step: 1,
            start: Instant::now(),
        };
        let lines = |first, last| {
            (first + 1..=last).filter(|&step| progress(first, last).is_tenth(step)).collect::<Vec<usize>>()
        };
        assert_eq!(lines(0, 400).len(), 10);
        assert_eq!(lines(7, 40).len(), 10);
        assert_eq!(lines(7, 40).last(), Some(&40));
        assert_eq!(lines(0, 3), [1, 2, 3]);
    }
}
