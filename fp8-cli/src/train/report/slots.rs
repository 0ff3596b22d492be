//! The quantizer slots of the FP8 training: what the format lost, and the range of some tensors.

use std::fmt::Write as _;

use crate::page::{escape, grouped, percent, section};
use crate::train::plot::{Chart, Color, Scale, Series, Style};
use crate::train::telemetry::{Kind, Loss, SlotState, Telemetry};

/// At most this many slots have bars: those that lose most.
const MAX_BARS: usize = 64;

const SATURATED_NOTE: &str =
    "Values beyond the largest of the format, which are stored as the largest, by kind of tensor.";
const UNDERFLOWED_NOTE: &str =
    "Values below half the smallest of the format, which are stored as zero, by kind of tensor.";
const BARS_NOTE: &str = "Saturated and underflowed values of each tensor over the whole training. Each of the two \
                         columns has a scale of its own.";
const MARK_NOTE: &str =
    " Tensors with * have scales that are not rounded to powers of two, so dequantizing their codes rounds.";
const NAN_NOTE: &str = "Tensors that held NaN when they were quantized. NaN is stored as NaN and changes no scale. It \
                        spreads through every product.";

/// Saturated and underflowed values over time.
pub(crate) fn lost(telemetry: &Telemetry) -> [String; 2] {
    let kinds = telemetry.kinds();
    let chart = |loss| {
        let line = |(kind, color): (&Kind, Color)| Series {
            name: tensors(&kind.name),
            color,
            points: telemetry.lost(kind, loss),
            style: Style::Normal,
        };
        let series = kinds.iter().zip(Color::ALL).map(line).collect();
        Chart::new("share of the values, %", Scale::FromZero, series).html()
    };
    [
        section("Saturation", &(SATURATED_NOTE.to_owned() + &counted(telemetry)), &chart(Loss::Saturated)),
        section("Underflow", &(UNDERFLOWED_NOTE.to_owned() + &counted(telemetry)), &chart(Loss::Underflowed)),
    ]
}

/// Returns the legend's name for a kind of tensor.
pub(super) fn tensors(kind: &str) -> String {
    match kind {
        "input" => "activations (input)".to_owned(),
        "weight" => "weights (weight)".to_owned(),
        "grad_output" => "gradients (grad_output)".to_owned(),
        other => other.to_owned(),
    }
}

fn counted(telemetry: &Telemetry) -> String {
    match telemetry.every() {
        0 | 1 => String::new(),
        every => format!(" Counted every {} steps.", grouped(every as u64)),
    }
}

/// Amax and scale of the chosen slots over time.
pub(crate) fn ranges(telemetry: &Telemetry) -> [String; 2] {
    let chosen = telemetry.chosen();
    let chart = |y, points: &dyn Fn(usize) -> Vec<(f64, f64)>| {
        let series = chosen.iter().zip(Color::ALL).map(|(&slot, color)| Series {
            name: telemetry.slots()[slot].name.clone(),
            color,
            points: points(slot),
            style: Style::Normal,
        });
        Chart::new(y, Scale::Logarithmic, series.collect()).html()
    };
    let why = format!(
        "These {} of {} tensors are the first and the last of each kind: ranges differ most between the two ends of \
         the model.",
        chosen.len(),
        telemetry.slots().len()
    );
    let amax = format!("Amax: the largest absolute value of a tensor in a step. {why}");
    let scale = "Scale: the factor that brings a tensor into the range of its format before the cast. These are the \
                 tensors of the amax plot.";
    [
        section("Amax", &amax, &chart("amax (no unit)", &|slot| telemetry.amaxes(slot))),
        section("Scale", scale, &chart("scale (no unit)", &|slot| telemetry.scales(slot))),
    ]
}

/// Shares of saturated and underflowed values of every slot.
pub(crate) fn bars(telemetry: &Telemetry) -> String {
    let mut slots: Vec<&SlotState> = telemetry.slots().iter().collect();
    let all = slots.len();
    if all == 0 {
        return String::new();
    }
    let mut note = BARS_NOTE.to_owned() + &counted(telemetry);
    if all > MAX_BARS {
        let lost = |slot: &SlotState| slot.saturated_share() + slot.underflowed_share();
        slots.sort_by(|a, b| lost(b).total_cmp(&lost(a)));
        slots.truncate(MAX_BARS);
        let _ = write!(note, " These are the {MAX_BARS} of {all} tensors that lose most.");
    }
    if slots.iter().any(|slot| !slot.has_powers_of_two) {
        note += MARK_NOTE;
    }
    type Share = fn(&SlotState) -> f64;
    let columns: [(&str, Color, Share); 2] = [
        ("saturated, % of values", Color::Orange, SlotState::saturated_share),
        ("underflowed, % of values", Color::Blue, SlotState::underflowed_share),
    ];
    let mut html = String::from("<div class=\"bars\">\n<div class=\"head\"><span>tensor</span>");
    for (title, _, _) in columns {
        let _ = write!(html, "<span>{title}</span>");
    }
    html += "</div>\n";
    let most = columns.map(|(_, _, share)| slots.iter().map(|slot| share(slot)).fold(0.0, f64::max));
    for slot in slots {
        let mark = if slot.has_powers_of_two { "" } else { " *" };
        let _ = write!(html, "<div><span>{}{mark}</span>", escape(&slot.name));
        for ((_, color, share), most) in columns.into_iter().zip(most) {
            let value = share(slot);
            let width = 100.0 * value / most.max(f64::MIN_POSITIVE);
            let (color, text) = (color.css(), percent(value));
            let _ = write!(
                html,
                "<span class=\"bar\"><i><b style=\"width:{width:.1}%;background:{color}\"></b></i>{text}</span>"
            );
        }
        html += "</div>\n";
    }
    section("Saturation and underflow by tensor", &note, &(html + "</div>\n"))
}

/// The tensors that held NaN; nothing if there were none.
pub(crate) fn nan(telemetry: &Telemetry) -> String {
    let mut rows = telemetry.with_nan().peekable();
    if rows.peek().is_none() {
        return String::new();
    }
    let mut html = String::from(
        "<table class=\"numbers\">\n<thead><tr><th>tensor</th><th>NaN</th><th>values</th></tr></thead>\n<tbody>\n",
    );
    for SlotState { name, nan, elements, .. } in rows {
        let (name, nan, elements) = (escape(name), grouped(*nan), grouped(*elements));
        let _ = writeln!(html, "<tr><th>{name}</th><td>{nan}</td><td>{elements}</td></tr>");
    }
    section("NaN", NAN_NOTE, &(html + "</tbody>\n</table>\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(name: &str, nan: u64) -> SlotState {
        SlotState {
            name: name.into(),
            backward: false,
            amax: 1.0,
            scale: 2.0,
            has_powers_of_two: true,
            saturated: 0,
            underflowed: 0,
            elements: 4096,
            nan,
            sqnr: None,
            is_nvfp4: false,
            nvfp4: None,
        }
    }

    fn telemetry(slots: Vec<SlotState>) -> Telemetry {
        let mut telemetry = Telemetry::new(1);
        telemetry.record(1, slots);
        telemetry
    }

    #[test]
    fn tensors_with_nan_are_listed() {
        let found = nan(&telemetry(vec![slot("fc1.input", 0), slot("fc2.input", 1234)]));
        assert!(found.contains("<h2>NaN</h2>"), "{found}");
        assert!(found.contains("<tr><th>fc2.input</th><td>1,234</td><td>4,096</td></tr>"), "{found}");
        assert!(!found.contains("<tr><th>fc1.input"), "{found}");
        assert_eq!(nan(&telemetry(vec![slot("fc1.input", 0)])), "");
    }

    #[test]
    fn tensors_whose_scales_are_not_powers_of_two_are_marked() {
        let rounded = slot("fc1.input", 0);
        let other = SlotState { has_powers_of_two: false, ..slot("fc2.input", 0) };
        assert!(!bars(&telemetry(vec![rounded.clone()])).contains(MARK_NOTE));
        let found = bars(&telemetry(vec![rounded, other]));
        assert!(found.contains("fc1.input</span>") && found.contains("fc2.input *</span>"), "{found}");
        assert!(found.contains(MARK_NOTE), "{found}");
    }

    #[test]
    fn the_plots_say_why_they_show_these_tensors() {
        let names = ["m.0.fc.input", "m.1.fc.input", "m.2.fc.input", "m.0.fc.weight"];
        let [amax, _] = ranges(&telemetry(names.map(|name| slot(name, 0)).into()));
        assert!(amax.contains("These 3 of 4 tensors are the first and the last of each kind"), "{amax}");
        assert!(amax.contains("m.2.fc.input") && !amax.contains("m.1.fc.input"));
    }

    #[test]
    fn a_training_without_an_observed_step_has_no_bars() {
        assert_eq!(bars(&Telemetry::new(5)), "");
        assert!(lost(&Telemetry::new(5))[0].contains("No values were recorded"));
    }
}
