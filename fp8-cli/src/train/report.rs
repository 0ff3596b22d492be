//! report.html: one self-contained page.

mod heat;
pub(crate) mod nvfp4;
mod run;
pub(crate) mod slots;

use std::fmt::Write as _;

use crate::page::{document, escape, grouped, section};
use crate::train::config::Config;
use crate::train::options::RecipeName;
use crate::train::plot::{self, Chart, Color, Events, Scale, Series, Style};
use crate::train::sample::{Sample, printable};
use crate::train::summary::Summary;
use crate::train::trainer::{MAX_GRAD_NORM, Run};
use crate::train::training::{CURVE_WINDOWS, End, Outcome, Record};
use crate::train::verdict;

/// The difference of the losses is plotted up to this many percent. A training this far behind has failed.
const MAX_DIFFERENCE: f64 = 25.0;

/// Returns the page for what was trained.
pub(crate) fn html(
    config: &Config,
    summary: &Summary,
    outcomes: &[Outcome],
    sample: Option<&Sample>,
) -> String {
    let mut page = String::new();
    page += &heading(config, summary);
    page += &comparison(config, summary);
    page += &section("Loss", &loss_note(config), &loss_chart(summary, outcomes).html());
    if let Some(difference) = difference_chart(outcomes) {
        page += &section("FP8 against high precision", DIFFERENCE_NOTE, &difference.html());
    }
    page += &pair([
        section("Gradient norm", &norm_note(), &norm_chart(outcomes).html()),
        section("Learning rate", RATE_NOTE, &rate_chart(outcomes).html()),
    ]);
    if let Some(chart) = scale_chart(outcomes) {
        page += &section("Loss scale", SCALE_NOTE, &chart.html());
    }
    if let Some(outcome) = outcomes.iter().find(|outcome| outcome.run == Run::Fp8) {
        page += &pair(slots::lost(&outcome.telemetry));
        page += &pair(slots::ranges(&outcome.telemetry));
        page += &heat::maps(&outcome.telemetry);
        page += &nvfp4::table(&outcome.telemetry);
        page += &advice(&outcome.advice);
        page += &slots::bars(&outcome.telemetry);
        page += &slots::nan(&outcome.telemetry);
    }
    if let Some(sample) = sample {
        let text = format!(
            "<pre><span class=\"prompt\">{}</span>{}</pre>\n",
            escape(&printable(&sample.prompt)),
            escape(&printable(&sample.bytes))
        );
        let note = format!("The grey text is the prompt; the {} model wrote the rest.", sample.run.title());
        page += &section("Sample", &note, &text);
    }
    page += &run::ranks(summary);
    page += &pair([run::facts(summary), run::options(config)]);
    document("fp8 train", &page)
}

const DIFFERENCE_NOTE: &str = "How much higher the loss in FP8 is than the loss in high precision, for the same batch \
                               and the same validation text. Below zero, FP8 is ahead.";
const ADVICE_NOTE: &str = "Tensors that lost values in the observed steps, and what would change that. A recipe by name \
                           (--recipe FILE.toml) gives single tensors another recipe.";
const RATE_NOTE: &str = "A linear warm-up, then a cosine. It is the same for both trainings.";

/// Two cards side by side where there is room.
pub(crate) fn pair(sections: [String; 2]) -> String {
    format!("<div class=\"pair\">\n{}</div>\n", sections.concat())
}

fn heading(config: &Config, summary: &Summary) -> String {
    let settings = &config.settings;
    let (title, how) = match summary.fp8_gemms_per_step {
        Some(gemms) => {
            let gemms = grouped(gemms as u64);
            let recipe = match &settings.recipe {
                RecipeName::File(path) => format!("the recipe {}", path.display()),
                name @ (RecipeName::Delayed | RecipeName::Current) => format!("{name} scaling"),
                name => format!("the recipe {name}"),
            };
            let format = if settings.recipe == RecipeName::Preset("nvfp4") { "NVFP4" } else { "FP8" };
            let mut how = format!("{recipe}, {gemms} {format} matrix products in a step");
            for (emulation, count) in &summary.emulated_gemms_per_step {
                let _ = write!(how, "; {} of them {emulation}", grouped(*count as u64));
            }
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
        escape(&summary.device),
        escape(&how)
    )
}

/// The verdict, the spread of the training test, and the numbers of both trainings.
fn comparison(config: &Config, summary: &Summary) -> String {
    let mut html = String::from("<section>\n");
    let recipe = &config.settings.recipe;
    let class = if summary.verdict.percent().is_some() { "verdict" } else { "verdict stopped" };
    let _ = writeln!(html, "<p class=\"{class}\">{}</p>", escape(&summary.verdict.headline()));
    let _ = writeln!(html, "<p class=\"note\">{}</p>", escape(&summary.verdict.explanation(recipe)));
    if let Some(percent) = summary.verdict.percent() {
        let test = ("training test", Color::Grey, verdict::spread(recipe));
        let mut rows = vec![("this run", Color::Orange, vec![percent])];
        rows.extend((!test.2.is_empty()).then_some(test));
        html += &plot::strip("held-out loss in FP8, % above high precision", &rows);
    }
    html += "<table class=\"numbers\">\n<thead><tr><th></th>";
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

/// Returns the section with advice about tensors that lose values. It is empty if there is no advice.
pub(crate) fn advice(advice: &[String]) -> String {
    if advice.is_empty() {
        return String::new();
    }
    let items: String = advice.iter().map(|line| format!("<li>{}</li>\n", escape(line))).collect();
    section("Advice", ADVICE_NOTE, &format!("<ul class=\"advice\">\n{items}</ul>\n"))
}

/// (step, value) of every record.
fn points(outcome: &Outcome, value: impl Fn(&Record) -> f64) -> Vec<(f64, f64)> {
    outcome.records.iter().map(|record| (record.step as f64, value(record))).collect()
}

/// (step, loss) wherever the validation text was evaluated.
fn validation(outcome: &Outcome) -> Vec<(f64, f64)> {
    let evaluated = |record: &Record| Some((record.step as f64, record.validation_loss?));
    outcome.records.iter().filter_map(evaluated).collect()
}

fn color(run: Run) -> Color {
    match run {
        Run::HighPrecision => Color::Blue,
        Run::Fp8 => Color::Orange,
    }
}

/// Returns the line style of a training. Where the two trainings agree, the wider line shows on both sides of the other.
fn style(run: Run) -> Style {
    match run {
        Run::HighPrecision => Style::Wide,
        Run::Fp8 => Style::Normal,
    }
}

/// The same for points.
fn dots(run: Run) -> Style {
    match run {
        Run::HighPrecision => Style::WideDots,
        Run::Fp8 => Style::Dots,
    }
}

/// The steps at which trainings diverged.
fn divergences(outcomes: &[Outcome]) -> Vec<Events> {
    let diverged = outcomes.iter().filter_map(|outcome| match outcome.end {
        End::Diverged { step, .. } => Some(Events {
            name: format!("{}: the loss is not finite", outcome.run.title()),
            color: color(outcome.run),
            steps: vec![step as f64],
        }),
        End::Complete | End::Interrupted { .. } => None,
    });
    diverged.collect()
}

fn loss_note(config: &Config) -> String {
    let mut note = "Training loss of each step (faint) and its moving average. ".to_owned();
    if config.eval_every > 0 {
        let every = match config.eval_every {
            1 => "after each step".to_owned(),
            steps => format!("every {} steps", grouped(steps as u64)),
        };
        let _ = write!(
            note,
            "Validation loss on at most {CURVE_WINDOWS} sequences of the held-out text, {every}; the table above has \
             the loss on more of them. "
        );
    }
    note + "Both trainings start from the same weights and see the same batches."
}

fn loss_chart(summary: &Summary, outcomes: &[Outcome]) -> Chart {
    let mut series = Vec::new();
    for outcome in outcomes {
        let (color, title) = (color(outcome.run), outcome.run.title());
        let losses = points(outcome, |record| record.loss.into());
        let (smoothed, name) = (plot::smoothed(&losses), format!("{title}, training"));
        series.push(Series { name: name.clone(), color, points: losses, style: Style::Faint });
        series.push(Series { name, color, points: smoothed, style: style(outcome.run) });
        let (points, name) = (validation(outcome), format!("{title}, validation"));
        if !points.is_empty() {
            series.push(Series { name, color, points, style: dots(outcome.run) });
        }
    }
    let steps = || outcomes.iter().flat_map(|outcome| &outcome.records).map(|record| record.step as f64);
    let ends = [steps().fold(f64::INFINITY, f64::min), steps().fold(0.0, f64::max)];
    if ends[0].is_finite() {
        let points = ends.map(|step| (step, summary.bigram_loss)).to_vec();
        let name = "bigrams, held-out text".to_owned();
        series.push(Series { name, color: Color::Grey, points, style: Style::Reference });
    }
    // A training that diverges may reach any loss. The axis leaves out a few such losses; if there are many, it becomes
    // logarithmic.
    let first = outcomes.iter().filter_map(|outcome| outcome.records.first()).map(|record| record.loss);
    let highest =
        first.filter(|loss| loss.is_finite()).fold(summary.bigram_loss, |most, loss| most.max(loss.into()));
    let limits = 0.0..1.5 * highest;
    let losses = || outcomes.iter().flat_map(|outcome| &outcome.records).map(|record| f64::from(record.loss));
    let beyond = losses().filter(|loss| loss.is_finite() && !limits.contains(loss)).count();
    let many = beyond * 20 > losses().count();
    let chart =
        Chart::new("loss, nats per byte", if many { Scale::Logarithmic } else { Scale::Linear }, series);
    let events = divergences(outcomes);
    if many { Chart { events, ..chart } } else { Chart { limits, events, ..chart } }
}

/// `None` unless both trainings did a step that the other did, too.
fn difference_chart(outcomes: &[Outcome]) -> Option<Chart> {
    let [high_precision, fp8] = outcomes else { return None };
    let training = differences(
        &points(high_precision, |record| record.loss.into()),
        &points(fp8, |record| record.loss.into()),
    );
    if training.is_empty() {
        return None;
    }
    let validation = differences(&validation(high_precision), &validation(fp8));
    let zero = [training[0].0, training[training.len() - 1].0].map(|step| (step, 0.0)).to_vec();
    let smoothed = plot::smoothed(&training);
    let name = || "training, moving average".to_owned();
    let mut series = vec![
        Series { name: name(), color: Color::Green, points: training, style: Style::Faint },
        Series { name: name(), color: Color::Green, points: smoothed, style: Style::Normal },
        Series { name: "equal losses".to_owned(), color: Color::Grey, points: zero, style: Style::Reference },
    ];
    if !validation.is_empty() {
        let name = "validation".to_owned();
        series.push(Series { name, color: Color::Purple, points: validation, style: Style::Dots });
    }
    let chart = Chart::new("difference, % of high precision's loss", Scale::Linear, series);
    Some(Chart { limits: -MAX_DIFFERENCE..MAX_DIFFERENCE, ..chart })
}

/// Returns by how many percent FP8's values exceed those of high precision, at steps that have both.
fn differences(high_precision: &[(f64, f64)], fp8: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut others = high_precision.iter().peekable();
    let mut points = Vec::new();
    for &(step, loss) in fp8 {
        while others.next_if(|other| other.0 < step).is_some() {}
        if let Some(other) = others.next_if(|other| other.0 == step) {
            points.push((step, 100.0 * (loss / other.1 - 1.0)));
        }
    }
    points
}

fn norm_note() -> String {
    format!("Norm of all gradients before they are clipped to {MAX_GRAD_NORM}.")
}

fn norm_chart(outcomes: &[Outcome]) -> Chart {
    let (mut series, mut events) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        let (name, color) = (outcome.run.title().to_owned(), color(outcome.run));
        let points = points(outcome, |record| record.grad_norm.into());
        let steps = points.iter().filter(|point| !point.1.is_finite()).map(|point| point.0).collect();
        events.push(Events { name: format!("{name}: not finite, step skipped"), color, steps });
        series.push(Series { name, color, points, style: style(outcome.run) });
    }
    Chart { events, ..Chart::new("gradient norm (no unit)", Scale::Logarithmic, series) }
}

const SCALE_NOTE: &str = "Factor of the loss, so that small gradients do not underflow in f16. It is halved if a gradient \
                          overflows, which skips the step, and doubled after 2000 steps without overflow.";

/// `None` for trainings without a loss scale.
fn scale_chart(outcomes: &[Outcome]) -> Option<Chart> {
    let (mut series, mut events) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        let (name, color) = (outcome.run.title().to_owned(), color(outcome.run));
        let scaled = outcome.records.iter().filter_map(|record| Some((record, record.loss_scale?)));
        let points: Vec<_> = scaled.map(|(record, scale)| (record.step as f64, scale.into())).collect();
        let skipped = outcome.records.iter().filter(|record| record.skipped);
        let steps = skipped.map(|record| record.step as f64).collect();
        events.push(Events { name: format!("{name}: overflow, step skipped"), color, steps });
        series.push(Series { name, color, points, style: style(outcome.run) });
    }
    if series.iter().all(|series| series.points.is_empty()) {
        return None;
    }
    Some(Chart { events, ..Chart::new("loss scale (no unit)", Scale::Logarithmic, series) })
}

fn rate_chart(outcomes: &[Outcome]) -> Chart {
    let longest = outcomes.iter().max_by_key(|outcome| outcome.records.len());
    let points = longest.map(|outcome| points(outcome, |record| record.lr.into())).unwrap_or_default();
    let name = "learning rate".to_owned();
    let line = Series { name, color: Color::Purple, points, style: Style::Normal };
    Chart::new("learning rate (no unit)", Scale::FromZero, vec![line])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::telemetry::Telemetry;
    use crate::train::trainer::Run;
    use crate::train::training::{End, Record};

    #[test]
    fn the_chart_of_differences_has_equal_losses_in_its_middle() {
        let outcome = |run, loss| Outcome {
            run,
            records: vec![Record { step: 1, loss, ..Record::default() }],
            telemetry: Telemetry::new(0),
            advice: Vec::new(),
            end: End::Complete,
            held_out_loss: None,
            memory: None,
            bytes_sent: 0,
        };
        let chart = difference_chart(&[outcome(Run::HighPrecision, 2.0), outcome(Run::Fp8, 1.5)]).unwrap();
        assert_eq!((chart.limits, &*chart.series[0].points), (-25.0..25.0, &[(1.0, -25.0)][..]));
        assert!(difference_chart(&[outcome(Run::HighPrecision, 2.0)]).is_none());
    }
}
