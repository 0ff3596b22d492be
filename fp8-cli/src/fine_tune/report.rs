//! report.html of a run.

use crate::failure::Failure;
use crate::fine_tune::seen::Seen;
use crate::gathers;
use crate::page::{document, escape, grouped, section};
use crate::table::bytes;
use crate::train::plot::{Chart, Color, Events, Scale, Series, Style, smoothed};
use crate::train::report::{advice, nvfp4, pair, slots};
use fp8_hf::{TrainRecord, TrainRun};
use std::path::Path;

const LOSS_NOTE: &str = "The mean loss of the learned tokens of each step (faint), its moving average, and the loss on the validation \
                         data, in nats.";
const RATE_NOTE: &str = "The rate that each step used.";
const NORM_NOTE: &str = "The norm of all gradients, before clipping.";
const SPEED_NOTE: &str = "Tokens in a second, without evaluations and checkpoints.";
const MEMORY_NOTE: &str = "Bytes of the device's tensors when they were most, until each step.";
const SATURATED_NOTE: &str =
    "The share of all quantized values that were beyond the largest of their format.";

/// Returns the page of the run in a folder.
pub(super) fn html(out: &Path, seen: &Seen) -> Result<String, Failure> {
    let records = TrainRun::read_log(out)?;
    let mut page = heading(&records, seen);
    page += &section("Loss", LOSS_NOTE, &loss(&records));
    let chart = |y, scale, name: &str, color, value: &dyn Fn(&TrainRecord) -> Option<f64>| {
        let series =
            Series { name: name.to_owned(), color, points: points(&records, value), style: Style::Normal };
        Chart::new(y, scale, vec![series]).html()
    };
    page += &pair([
        section(
            "Gradient norm",
            NORM_NOTE,
            &chart("norm", Scale::Logarithmic, "norm", Color::Blue, &|record| Some(record.grad_norm.into())),
        ),
        section(
            "Learning rate",
            RATE_NOTE,
            &chart("learning rate", Scale::FromZero, "rate", Color::Green, &|record| Some(record.lr.into())),
        ),
    ]);
    let speed =
        |record: &TrainRecord| Some(record.tokens as f64 / record.seconds).filter(|_| record.seconds > 0.0);
    page += &pair([
        section("Speed", SPEED_NOTE, &chart("tokens/s", Scale::FromZero, "tokens/s", Color::Purple, &speed)),
        section(
            "Memory",
            MEMORY_NOTE,
            &chart("MiB", Scale::FromZero, "peak", Color::Ochre, &|record| {
                Some(record.memory_bytes as f64 / (1 << 20) as f64)
            }),
        ),
    ]);
    if records.iter().any(|record| record.saturated.is_some()) {
        let share = |record: &TrainRecord| record.saturated.map(|share| 100.0 * share);
        page += &section(
            "Saturated values",
            SATURATED_NOTE,
            &chart("% of the values", Scale::FromZero, "saturated", Color::Orange, &share),
        );
        page += &pair(slots::lost(&seen.telemetry));
        page += &pair(slots::ranges(&seen.telemetry));
        page += &nvfp4::table(&seen.telemetry);
        page += &advice(&seen.advice);
        page += &slots::bars(&seen.telemetry);
        page += &slots::nan(&seen.telemetry);
    }
    page += &section("Data and model", "", &format!("<pre>{}</pre>\n", escape(&seen.summary)));
    page += &section("Options", "", &format!("<pre>{}</pre>\n", escape(&seen.config)));
    Ok(document("fp8 train", &page))
}

fn points(records: &[TrainRecord], value: impl Fn(&TrainRecord) -> Option<f64>) -> Vec<(f64, f64)> {
    records.iter().filter_map(|record| Some((record.step as f64, value(record)?))).collect()
}

fn heading(records: &[TrainRecord], seen: &Seen) -> String {
    let last = records.last().cloned().unwrap_or_default();
    let skipped = records.iter().filter(|record| record.skipped).count();
    let mut rows = vec![
        ("steps", grouped(last.step)),
        ("tokens", grouped(records.iter().map(|record| record.tokens).sum())),
        ("loss of the last step", format!("{:.4}", last.loss)),
    ];
    if let Some(loss) = seen.first_validation {
        rows.push(("validation loss before the first step", format!("{loss:.4}")));
    }
    if let Some(loss) = records.iter().rev().find_map(|record| record.validation_loss) {
        rows.push(("validation loss", format!("{loss:.4}")));
    }
    rows.push(("skipped steps", grouped(skipped as u64)));
    rows.extend(last.layout.clone().map(|layout| ("layout of the ranks", layout)));
    rows.extend(gathers::row(&seen.gathered_in_high_precision));
    rows.push(("parameters that are trained", grouped(seen.plan.trained as u64)));
    rows.push(("parameters that are frozen", grouped(seen.plan.frozen as u64)));
    rows.push(("memory at the peak", bytes(last.memory_bytes)));
    rows.push(("memory that was expected", bytes(seen.plan.memory.total() as u64)));
    let rows: String = rows
        .iter()
        .map(|(name, value)| format!("<tr><th>{name}</th><td>{}</td></tr>\n", escape(value)))
        .collect();
    format!(
        "<header>\n<h1>A fine-tuning</h1>\n<p>{} steps on {}.</p>\n</header>\n<section>\n<table class=\"numbers\">\n<tbody>\n{rows}</tbody>\n\
         </table>\n</section>\n",
        grouped(last.step),
        escape(&seen.device)
    )
}

fn loss(records: &[TrainRecord]) -> String {
    let training = points(records, |record| Some(record.loss).filter(|_| !record.skipped));
    let line = |name: &str, color, points, style| Series { name: name.to_owned(), color, points, style };
    let series = vec![
        line("training", Color::Blue, training.clone(), Style::Faint),
        line("training, averaged", Color::Blue, smoothed(&training), Style::Normal),
        line("validation", Color::Orange, points(records, |record| record.validation_loss), Style::Dots),
    ];
    let mut chart = Chart::new("loss (nats per token)", Scale::Linear, series);
    chart.events.push(Events {
        name: "skipped".into(),
        color: Color::Grey,
        steps: records.iter().filter(|record| record.skipped).map(|record| record.step as f64).collect(),
    });
    chart.html()
}
