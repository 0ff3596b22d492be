//! The page of `fp8 inspect --report`: the whole, a map by layer, the worst tensors, and all of them.

use crate::page::{document, escape, grouped, percent, section};
use crate::subject::{Subject, row, without_fp8};
use crate::table::{bytes, decibels, printable, shortened};
use fp8_hf::{Inspection, TensorInspection};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// At most this many tensors have bars.
const WORST: usize = 24;
/// At most this many tensors are in the table.
const TABLE: usize = 2000;

const MAP_NOTE: &str = "Signal-to-quantization-noise ratio of each FP8 weight, by layer from left to right. A dark cell lost \
                        most. Point at a cell for its number.";
const WORST_NOTE: &str =
    "The FP8 weights with the smallest SQNR, and the share of their values that became zero.";
const TABLE_NOTE: &str = "SQNR is 10 log₁₀ of the power of the original over that of the error. Saturated values were clamped; \
                          underflowed ones became zero. Without an original, they are those with the largest code and those \
                          that are zero.";

/// Returns the page.
pub(crate) fn html(subject: &Subject, found: &Inspection) -> String {
    let title = format!("FP8: {}", printable(&subject.path));
    let mut body = heading(subject, found);
    body += &numbers(subject, found);
    body += &map(found);
    body += &worst(found);
    body += &all(found);
    document(&title, &body)
}

fn heading(subject: &Subject, found: &Inspection) -> String {
    let only = subject.only_in_original(found);
    let notes = subject.note.iter().chain(&only);
    let notes = notes.map(|note| format!("<p>{}.</p>\n", escape(&printable(note))));
    format!(
        "<header>\n<h1>{}</h1>\n<p>{}.</p>\n{}</header>\n",
        escape(&printable(&subject.path)),
        escape(&subject.summary(found)),
        notes.collect::<String>()
    )
}

fn quantized(found: &Inspection) -> impl Iterator<Item = &TensorInspection> {
    found.tensors.iter().filter(|tensor| tensor.granularity.is_some())
}

fn numbers(subject: &Subject, found: &Inspection) -> String {
    let mut html = String::from("<section>\n");
    match (found.sqnr, &subject.against) {
        (Some(sqnr), Some(against)) => {
            let _ = writeln!(html, "<p class=\"verdict\">{} dB</p>", decibels(Some(sqnr)));
            let _ = writeln!(
                html,
                "<p class=\"note\">SQNR of all FP8 weights against {}.</p>",
                escape(&printable(against))
            );
        }
        (None, Some(against)) => {
            let _ = writeln!(html, "<p class=\"verdict\">{}</p>", bytes(found.bytes));
            let _ = writeln!(html, "<p class=\"note\">{}.</p>", escape(&printable(&without_fp8(against))));
        }
        (_, None) => {
            let _ = writeln!(html, "<p class=\"verdict\">{}</p>", bytes(found.bytes));
            html +=
                "<p class=\"note\">Give the original with --against to measure what quantization lost.</p>\n";
        }
    }
    let fp8: u64 = quantized(found).map(|tensor| tensor.bytes).sum();
    let not_finite: u64 = found.tensors.iter().map(|tensor| tensor.not_finite).sum();
    html += "<table class=\"numbers\">\n<tbody>\n";
    for (name, value) in [
        ("FP8 weights", format!("{} of {} tensors", quantized(found).count(), found.tensors.len())),
        ("bytes of FP8 weights", format!("{} of {}", bytes(fp8), bytes(found.bytes))),
        (
            "scales",
            grouped(
                quantized(found).filter_map(|tensor| tensor.scales).map(|(count, ..)| count as u64).sum(),
            ),
        ),
        ("infinite or NaN", grouped(not_finite)),
    ] {
        let _ = writeln!(html, "<tr><th>{name}</th><td>{value}</td></tr>");
    }
    html + "</tbody>\n</table>\n</section>\n"
}

/// Splits a name at its first number: the kind of the tensor, and its layer.
fn place(name: &str) -> Option<(String, usize)> {
    let parts: Vec<&str> = name.split('.').collect();
    let at = parts.iter().position(|part| part.parse::<usize>().is_ok())?;
    let layer = parts[at].parse().ok()?;
    Some((parts[at + 1..].join(".").trim_end_matches(".weight").to_owned(), layer))
}

/// SQNR by kind and layer; nothing without an original.
fn map(found: &Inspection) -> String {
    let mut kinds = BTreeMap::<String, BTreeMap<usize, f64>>::new();
    for tensor in quantized(found) {
        if let (Some((kind, layer)), Some(sqnr)) = (place(&tensor.name), tensor.sqnr) {
            kinds.entry(kind).or_default().insert(layer, sqnr);
        }
    }
    let all: Vec<f64> =
        kinds.values().flat_map(BTreeMap::values).copied().filter(|sqnr| sqnr.is_finite()).collect();
    let Some(layers) = kinds.values().flat_map(BTreeMap::keys).max().filter(|_| all.len() > 1) else {
        return String::new();
    };
    let least = all.iter().copied().fold(f64::INFINITY, f64::min);
    let most = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut html = format!(
        "<div class=\"grid\" style=\"grid-template-columns:auto repeat({},minmax(6px,1fr))\">\n",
        layers + 1
    );
    for (kind, by_layer) in &kinds {
        let _ = write!(html, "<span>{}</span>", escape(kind));
        for layer in 0..=*layers {
            let Some(&sqnr) = by_layer.get(&layer) else {
                html += "<b class=\"zero\"></b>";
                continue;
            };
            let shade = ((sqnr - least) / (most - least).max(1e-9) * 5.0).round().clamp(0.0, 5.0);
            let class = if shade.is_nan() { "nan".to_owned() } else { format!("s{shade}") };
            let _ = write!(
                html,
                "<b class=\"{class}\" title=\"layer {layer}: {} dB\"></b>",
                decibels(Some(sqnr))
            );
        }
        html.push('\n');
    }
    let _ = write!(html, "<span>layer</span><i>0</i>");
    for layer in 1..=*layers {
        let _ = if layer == *layers { write!(html, "<i>{layer}</i>") } else { write!(html, "<i></i>") };
    }
    html += "\n</div>\n<p class=\"legend shades\">";
    for shade in 0..6 {
        let sqnr = least + (most - least) * f64::from(shade) / 5.0;
        let _ = write!(html, "<span><i class=\"s{shade}\"></i> {sqnr:.2} dB</span>");
    }
    if kinds.values().flat_map(BTreeMap::values).any(|sqnr| sqnr.is_nan()) {
        html += "<span><i class=\"nan\"></i> NaN</span>";
    }
    section("SQNR by layer", MAP_NOTE, &(html + "</p>\n"))
}

fn worst(found: &Inspection) -> String {
    let compared: Vec<&TensorInspection> =
        quantized(found).filter(|tensor| tensor.sqnr.is_some()).take(WORST).collect();
    if compared.is_empty() {
        return String::new();
    }
    let finite =
        |tensor: &TensorInspection| tensor.sqnr.filter(|sqnr| sqnr.is_finite()).unwrap_or(0.0).max(0.0);
    let most_sqnr = compared.iter().map(|tensor| finite(tensor)).fold(1.0, f64::max);
    let lost = |tensor: &TensorInspection| tensor.underflowed.unwrap_or(0.0);
    let most_lost = compared.iter().map(|tensor| lost(tensor)).fold(f64::MIN_POSITIVE, f64::max);
    let mut html =
        String::from("<div class=\"bars\">\n<div class=\"head\"><span>tensor</span><span>SQNR, dB</span>");
    html += "<span>underflowed, % of values</span></div>\n";
    let bar = |share: f64, color: &str, text: &str| {
        let width = 100.0 * share;
        format!(
            "<span class=\"bar\"><i><b style=\"width:{width:.1}%;background:var({color})\"></b></i>{text}</span>"
        )
    };
    for tensor in compared {
        let _ = writeln!(
            html,
            "<div><span>{}</span>{}{}</div>",
            escape(&shortened(&printable(&tensor.name))),
            bar(finite(tensor) / most_sqnr, "--c0", &decibels(tensor.sqnr)),
            bar(lost(tensor) / most_lost, "--c1", &percent(lost(tensor)))
        );
    }
    section("The worst", WORST_NOTE, &(html + "</div>\n"))
}

fn all(found: &Inspection) -> String {
    let mut html = String::from("<div class=\"tensors\"><table>\n<thead><tr>");
    for name in
        ["tensor", "dtype", "shape", "bytes", "scales", "amax", "saturated %", "underflowed %", "SQNR dB"]
    {
        let _ = write!(html, "<th>{name}</th>");
    }
    html += "</tr></thead>\n<tbody>\n";
    for tensor in found.tensors.iter().take(TABLE) {
        let cells = row(tensor);
        let _ = write!(html, "<tr><th>{}</th>", escape(&cells[0]));
        for cell in &cells[1..] {
            let _ = write!(html, "<td>{}</td>", escape(cell));
        }
        html += "</tr>\n";
    }
    html += "</tbody>\n</table></div>\n";
    let title = match found.tensors.len() {
        count if count > TABLE => {
            format!("The {} worst of {} tensors", grouped(TABLE as u64), grouped(count as u64))
        }
        _ => "All tensors".to_owned(),
    };
    section(&title, TABLE_NOTE, &html)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_hf::{Dtype, WeightScales};

    fn tensor(layer: usize, sqnr: Option<f64>) -> TensorInspection {
        TensorInspection {
            name: format!("model.layers.{layer}.mlp.<down>_proj.weight"),
            dtype: Dtype::F8_E4M3,
            shape: vec![4, 4],
            bytes: 16,
            granularity: Some(WeightScales::Channel),
            scales: Some((4, 0.5, 1.0)),
            lost_blocks: None,
            input_scale: None,
            amax: Some(448.0),
            not_finite: 0,
            saturated: Some(0.25),
            underflowed: Some(0.125),
            sqnr,
        }
    }

    fn page(against: bool) -> String {
        let sqnr = |value| against.then_some(value);
        let subject = Subject {
            path: "a <b>".into(),
            family: Some("llama".into()),
            scheme: None,
            note: None,
            against: against.then(|| "original".into()),
        };
        let tensors = vec![tensor(0, sqnr(20.0)), tensor(1, sqnr(30.0))];
        let missing = if against { vec!["<gone>.weight".into()] } else { Vec::new() };
        html(&subject, &Inspection { tensors, missing, files: 1, bytes: 48, sqnr: sqnr(25.0) })
    }

    #[test]
    fn the_page_stands_alone_and_escapes_names() {
        for page in [page(true), page(false)] {
            assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
            assert!(
                !page.contains("<b>\n") && !page.contains("<down>") && page.contains("&lt;down&gt;_proj")
            );
            assert!(!page.contains("http"), "a page that loads something");
        }
    }

    #[test]
    fn with_an_original_there_are_a_map_and_the_worst() {
        let with = page(true);
        assert!(with.contains("25.00 dB") && with.contains("SQNR by layer") && with.contains("The worst"));
        assert!(
            with.contains("class=\"s0\" title=\"layer 0: 20.00 dB\"")
                && with.contains("class=\"s5\" title=\"layer 1")
        );
        assert!(with.contains("<p>only original has &lt;gone&gt;.weight.</p>"));
        let without = page(false);
        assert!(!without.contains("SQNR by layer") && without.contains("--against"));
    }
}
