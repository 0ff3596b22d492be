//! report.html: one page that needs nothing else.

use std::fmt::Write as _;

use crate::config::Config;
use crate::plot::{self, Chart, PALETTE, Series, Weight, escape};
use crate::sample::{Sample, printable};
use crate::summary::Summary;
use crate::telemetry::{SlotState, Telemetry};
use crate::train::Outcome;
use crate::trainer::Run;

/// At most this many slots have bars: those that lose most.
const MAX_BARS: usize = 64;

const STYLE: &str = include_str!("report.css");

/// The page for what was trained.
pub(crate) fn html(
    config: &Config,
    summary: &Summary,
    outcomes: &[Outcome],
    sample: Option<&Sample>,
) -> Result<String, String> {
    let mut page = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    page += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
    page += "<meta name=\"color-scheme\" content=\"light dark\">\n<title>train_gpt</title>\n";
    let _ = write!(page, "<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n");
    page += &heading(config, summary);
    page += &comparison(summary);
    section(&mut page, "Loss", LOSS_NOTE, &loss_chart(summary, outcomes).html()?);
    if let Some(difference) = difference_chart(outcomes) {
        section(&mut page, "Difference", DIFFERENCE_NOTE, &difference.html()?);
    }
    if let Some(outcome) = outcomes.iter().find(|outcome| outcome.run == Run::Fp8) {
        page += &slots(&outcome.telemetry)?;
    }
    if let Some(sample) = sample {
        let text = format!(
            "<pre><span class=\"prompt\">{}</span>{}</pre>\n",
            escape(&printable(&sample.prompt)),
            escape(&printable(&sample.bytes))
        );
        let note = format!("The {} model goes on from the greyed bytes of the text.", sample.run.title());
        section(&mut page, "Sample", &note, &text);
    }
    section(&mut page, "Configuration", "", &configuration(summary));
    page += "</main>\n</body>\n</html>\n";
    Ok(page)
}

const LOSS_NOTE: &str = "Training loss of each step (faint) and its moving average. Both trainings started from the \
                         same weights and saw the same batches.";
const DIFFERENCE_NOTE: &str = "FP8 minus high precision, on the same batch: above zero, FP8 is behind.";
const AMAX_NOTE: &str = "Largest absolute value of a tensor at each step, for some of the slots.";
const SCALE_NOTE: &str =
    "The factor that brings these tensors into the range of their format before the cast.";
const BARS_NOTE: &str = "Values beyond the largest of the format were set to it; values below half its smallest \
                         became zero. Each column has its own scale.";

const NAN_NOTE: &str = "Tensors that held NaN when they were quantized. NaN is stored as NaN and changes no scale; it spreads \
                        through every product.";

fn section(page: &mut String, title: &str, note: &str, body: &str) {
    let _ = writeln!(page, "<section>\n<h2>{title}</h2>");
    if !note.is_empty() {
        let _ = writeln!(page, "<p class=\"note\">{note}</p>");
    }
    let _ = writeln!(page, "{body}</section>");
}

fn heading(config: &Config, summary: &Summary) -> String {
    let settings = &config.settings;
    let (title, how) = match summary.fp8_gemms_per_step {
        Some(gemms) => {
            let how =
                format!("{} scaling, {} FP8 matrix products a step", summary.recipe, grouped(gemms as u64));
            ("A GPT trained in high precision and in FP8", how)
        }
        None => ("A GPT trained in high precision", "without FP8".to_owned()),
    };
    format!(
        "<header>\n<h1>{title}</h1>\n<p>{} parameters in {} layers, {} steps of {} bytes on {}, {}.</p>\n\
         </header>\n",
        grouped(summary.params as u64),
        settings.layers,
        grouped(summary.steps as u64),
        grouped((settings.batch * settings.seq) as u64),
        summary.device,
        escape(&how)
    )
}

fn comparison(summary: &Summary) -> String {
    let mut html = String::from("<section>\n<table class=\"numbers\">\n<thead><tr><th></th>");
    for run in [Run::HighPrecision, Run::Fp8] {
        let _ = write!(html, "<th>{}</th>", run.title());
    }
    html += "</tr></thead>\n<tbody>\n";
    for [what, high_precision, fp8] in summary.rows() {
        let _ = writeln!(html, "<tr><th>{what}</th><td>{high_precision}</td><td>{fp8}</td></tr>");
    }
    let _ = writeln!(
        html,
        "<tr><th>held-out loss of bigrams, for comparison</th><td colspan=\"2\">{:.4}</td></tr>",
        summary.bigram_loss
    );
    html + "</tbody>\n</table>\n</section>\n"
}

fn losses(outcome: &Outcome) -> Vec<(f64, f64)> {
    outcome.records.iter().map(|record| (record.step as f64, f64::from(record.loss))).collect()
}

fn loss_chart(summary: &Summary, outcomes: &[Outcome]) -> Chart {
    let mut series = Vec::new();
    for (outcome, color) in outcomes.iter().zip(PALETTE) {
        let points = losses(outcome);
        let smoothed = plot::smoothed(&points);
        let name = outcome.run.title().to_owned();
        // Where the two agree, the wider line shows on both sides of the other.
        let weight = if outcome.run == Run::HighPrecision { Weight::Wide } else { Weight::Normal };
        series.push(Series { name: name.clone(), color, points, weight: Weight::Faint });
        series.push(Series { name, color, points: smoothed, weight });
    }
    let steps = || outcomes.iter().flat_map(|outcome| &outcome.records).map(|record| record.step as f64);
    let ends = [steps().fold(f64::INFINITY, f64::min), steps().fold(0.0, f64::max)];
    if ends[0].is_finite() {
        let points = ends.map(|step| (step, summary.bigram_loss)).to_vec();
        series.push(Series {
            name: "bigrams, held-out text".to_owned(),
            color: PALETTE[5],
            points,
            weight: Weight::Normal,
        });
    }
    // Lines drawn last lie on top.
    series.sort_by_key(|series| series.weight);
    Chart { y: "loss, nats per byte", logarithmic: false, series }
}

/// None unless both trainings did a step that the other did too.
fn difference_chart(outcomes: &[Outcome]) -> Option<Chart> {
    let [high_precision, fp8] = outcomes else { return None };
    let mut points = Vec::new();
    let mut others = high_precision.records.iter().peekable();
    for record in &fp8.records {
        while others.next_if(|other| other.step < record.step).is_some() {}
        if let Some(other) = others.next_if(|other| other.step == record.step) {
            points.push((record.step as f64, f64::from(record.loss) - f64::from(other.loss)));
        }
    }
    if points.is_empty() {
        return None;
    }
    let name = "moving average".to_owned();
    let line = Series { name, color: PALETTE[2], points: plot::smoothed(&points), weight: Weight::Normal };
    let faint = Series { name: String::new(), color: PALETTE[2], points, weight: Weight::Faint };
    Some(Chart { y: "difference, nats per byte", logarithmic: false, series: vec![faint, line] })
}

fn slots(telemetry: &Telemetry) -> Result<String, String> {
    let chart = |y, points: &dyn Fn(usize) -> Vec<(f64, f64)>| {
        let series = telemetry.chosen().into_iter().zip(PALETTE).map(|(slot, color)| Series {
            name: telemetry.slots()[slot].name.clone(),
            color,
            points: points(slot),
            weight: Weight::Normal,
        });
        Chart { y, logarithmic: true, series: series.collect() }
    };
    let mut html = String::new();
    section(&mut html, "Amax", AMAX_NOTE, &chart("amax", &|slot| telemetry.amaxes(slot)).html()?);
    section(&mut html, "Scale", SCALE_NOTE, &chart("scale", &|slot| telemetry.scales(slot)).html()?);

    let mut slots: Vec<&SlotState> = telemetry.slots().iter().collect();
    let all = slots.len();
    let mut note = BARS_NOTE.to_owned();
    if telemetry.every() > 1 {
        let _ = write!(note, " Counted every {} steps.", telemetry.every());
    }
    if all > MAX_BARS {
        let lost = |slot: &SlotState| slot.saturated_share() + slot.underflowed_share();
        slots.sort_by(|a, b| lost(b).total_cmp(&lost(a)));
        slots.truncate(MAX_BARS);
        let _ = write!(note, " The {MAX_BARS} slots of {all} that lose most.");
    }
    section(&mut html, "Saturation and underflow", &note, &plot::bars(&slots));
    if let Some(table) = nan_table(telemetry) {
        section(&mut html, "NaN", NAN_NOTE, &table);
    }
    Ok(html)
}

/// None unless a tensor held NaN.
fn nan_table(telemetry: &Telemetry) -> Option<String> {
    let mut rows = telemetry.with_nan().peekable();
    rows.peek()?;
    let mut html = String::from(
        "<table class=\"numbers\">\n<thead><tr><th>tensor</th><th>NaN</th><th>values</th></tr></thead>\n<tbody>\n",
    );
    for SlotState { name, nan, elements, .. } in rows {
        let (name, nan, elements) = (escape(name), grouped(*nan), grouped(*elements));
        let _ = writeln!(html, "<tr><th>{name}</th><td>{nan}</td><td>{elements}</td></tr>");
    }
    Some(html + "</tbody>\n</table>\n")
}

fn configuration(summary: &Summary) -> String {
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "–".to_owned());
    let rows = [
        ("parameters", grouped(summary.params as u64)),
        ("layers, hidden, heads", format!("{}, {}, {}", summary.layers, summary.hidden, summary.heads)),
        ("sequence, batch", format!("{}, {}", summary.seq, summary.batch)),
        ("steps", format!("{} of {}", summary.steps, summary.total_steps)),
        ("tokens", grouped(summary.tokens)),
        ("highest learning rate", summary.lr.to_string()),
        ("seed", summary.seed.to_string()),
        ("device, threads", format!("{}, {}", summary.device, summary.threads)),
        ("dtype", summary.dtype.clone()),
        ("recipe", summary.recipe.clone()),
        ("format", or_none(summary.fp8_format.clone())),
        ("amax history", or_none(summary.fp8_history_len.map(|len| len.to_string()))),
        ("margin", or_none(summary.fp8_margin.map(|margin| margin.to_string()))),
        ("text", format!("{}, {} bytes", summary.text, grouped(summary.text_bytes as u64))),
    ];
    let mut html = String::from("<table>\n<tbody>\n");
    for (what, value) in rows {
        let _ = writeln!(html, "<tr><th>{what}</th><td>{}</td></tr>", escape(&value));
    }
    html + "</tbody>\n</table>\n"
}

/// 1234567 as 1,234,567.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_with_nan_are_listed() {
        let slot = |name: &str, nan| SlotState {
            name: name.into(),
            backward: false,
            amax: 1.0,
            scale: 2.0,
            saturated: 0,
            underflowed: 0,
            elements: 4096,
            nan,
        };
        let page = |slots| {
            let mut telemetry = Telemetry::new(1);
            telemetry.record(1, slots);
            super::slots(&telemetry).unwrap()
        };
        let found = page(vec![slot("fc1.input", 0), slot("fc2.input", 1234)]);
        assert!(found.contains("<h2>NaN</h2>"), "{found}");
        assert!(found.contains("<tr><th>fc2.input</th><td>1,234</td><td>4,096</td></tr>"), "{found}");
        assert!(!found.contains("<tr><th>fc1.input"), "{found}");
        assert!(!page(vec![slot("fc1.input", 0)]).contains("NaN"));
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
