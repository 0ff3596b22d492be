//! Heat maps of the quantizer slots: a row for each layer, a column for each observed step.

use std::fmt::Write as _;

use crate::page::{escape, section};
use crate::train::plot::{Map, Shades};
use crate::train::telemetry::{Kind, Loss, Telemetry};

const SATURATED_NOTE: &str = "Share of the values of a tensor beyond the largest of its format.";
const UNDERFLOWED_NOTE: &str = "Share of the values of a tensor that became zero.";
const AMAX_NOTE: &str = "Largest absolute value of a tensor.";
const SQNR_NOTE: &str = "Signal-to-quantization-noise ratio: how much larger the values of a tensor are than the errors of \
                         their codes. E4M3 has about 31 dB and E5M2 25 dB if no value saturates or underflows; NVFP4 has 17 to 20.";

/// Smaller differences of an SQNR do not get all shades.
const LEAST_DECIBELS: f64 = 6.0;

/// Boundaries of the shades of shares.
const SHARES: [f64; 5] = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1];

/// Returns a section for each quantity that was recorded.
pub(super) fn maps(telemetry: &Telemetry) -> String {
    let kinds = telemetry.kinds();
    if kinds.is_empty() {
        return String::new();
    }
    let note = |what: &str| {
        format!(
            "{what} A row is a layer, from the first at the top to the last; a column is an observed step."
        )
    };
    let shares = Shades::shares(&SHARES);
    let lost = |loss| {
        let map = |kind: &Kind| map(telemetry, kind, &shares, |slot| telemetry.lost_by(slot, loss));
        shares.legend() + &side_by_side(&kinds, map)
    };
    let mut html = section("Saturation by layer and step", &note(SATURATED_NOTE), &lost(Loss::Saturated));
    html += &section("Underflow by layer and step", &note(UNDERFLOWED_NOTE), &lost(Loss::Underflowed));
    // Kinds of tensors differ so much that each has shades of its own.
    let of = |kind: &Kind, values: fn(&Telemetry, usize) -> Vec<Option<f64>>| {
        kind.slots.iter().flat_map(move |&slot| values(telemetry, slot)).flatten().collect::<Vec<_>>()
    };
    if kinds.iter().any(|kind| !of(kind, Telemetry::amaxes_of).is_empty()) {
        let amaxes = side_by_side(&kinds, |kind| {
            let shades = Shades::logarithmic(of(kind, Telemetry::amaxes_of).into_iter());
            own(telemetry, kind, shades, Telemetry::amaxes_of)
        });
        html += &section("Amax by layer and step", &note(AMAX_NOTE), &amaxes);
    }
    if kinds.iter().any(|kind| !of(kind, Telemetry::sqnrs_of).is_empty()) {
        let sqnrs = side_by_side(&kinds, |kind| {
            let shades = Shades::linear(of(kind, Telemetry::sqnrs_of).into_iter(), LEAST_DECIBELS, " dB");
            own(telemetry, kind, shades, Telemetry::sqnrs_of)
        });
        html += &section("SQNR by layer and step", &note(SQNR_NOTE), &sqnrs);
    }
    html
}

/// A map for each kind of tensor, under its name.
fn side_by_side(kinds: &[Kind], map: impl Fn(&Kind) -> String) -> String {
    let mut html = String::from("<div class=\"maps\">\n");
    for kind in kinds {
        let name = escape(&super::slots::tensors(&kind.name));
        let _ = write!(html, "<div><h3>{name}</h3>\n{}</div>\n", map(kind));
    }
    html + "</div>\n"
}

/// A map with a legend of its own; nothing if it has no value.
fn own(
    telemetry: &Telemetry,
    kind: &Kind,
    shades: Option<Shades>,
    values: fn(&Telemetry, usize) -> Vec<Option<f64>>,
) -> String {
    let Some(shades) = shades else { return String::new() };
    map(telemetry, kind, &shades, |slot| values(telemetry, slot)) + &shades.legend()
}

fn map(
    telemetry: &Telemetry,
    kind: &Kind,
    shades: &Shades,
    values: impl Fn(usize) -> Vec<Option<f64>>,
) -> String {
    let row = |&slot: &usize| (layer(&telemetry.slots()[slot].name, &kind.name), values(slot));
    Map { rows: kind.slots.iter().map(row).collect(), steps: telemetry.steps() }.html(shades)
}

/// The name of a slot's layer, without what all names of a model begin with.
fn layer(slot: &str, kind: &str) -> String {
    let layer = slot.strip_suffix(kind).unwrap_or(slot).trim_end_matches(['.', '/']);
    match layer.split_once("blocks.") {
        Some((_, rest)) => rest.to_owned(),
        None => layer.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::telemetry::SlotState;

    fn telemetry(sqnr: Option<f64>) -> Telemetry {
        let mut telemetry = Telemetry::new(3);
        for step in 1..=3 {
            let slot = |layer: usize, kind: &str| SlotState {
                name: format!("gpt.blocks.{layer}.mlp.fc1.{kind}"),
                backward: kind == "grad_output",
                amax: (1 + layer) as f32,
                scale: 1.0,
                has_powers_of_two: false,
                saturated: 10 * step as u64,
                underflowed: 0,
                elements: 1000 * step as u64,
                nan: 0,
                sqnr,
                is_nvfp4: false,
                nvfp4: None,
            };
            let kinds = ["input", "grad_output"];
            telemetry.record(step, kinds.iter().flat_map(|kind| (0..2).map(|l| slot(l, kind))).collect());
        }
        telemetry
    }

    #[test]
    fn there_is_a_map_for_each_quantity_and_kind_of_tensor() {
        let html = maps(&telemetry(None));
        assert_eq!(html.matches("<h2>").count(), 3, "saturation, underflow, amax");
        assert_eq!(html.matches("class=\"map\"").count(), 6);
        assert!(html.contains("activations (input)") && html.contains("gradients (grad_output)"));
        assert!(html.contains(">0.mlp.fc1<") && html.contains(">1.mlp.fc1<"), "{html}");
        let html = maps(&telemetry(Some(30.0)));
        assert!(html.contains("<h2>SQNR by layer and step</h2>") && html.contains("from 29 dB"), "{html}");
        assert_eq!(maps(&Telemetry::new(3)), "");
    }
}
