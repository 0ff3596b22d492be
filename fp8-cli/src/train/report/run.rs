//! The sections on the run itself: machine, date, commit and options.

use std::fmt::Write as _;

use crate::gathers;
use crate::page::{escape, grouped, section};
use crate::train::config::Config;
use crate::train::summary::Summary;
use crate::train::trainer::Run;

/// Machine, date, commit and sizes.
pub(super) fn facts(summary: &Summary) -> String {
    let origin = &summary.origin;
    let commit = origin.commit.clone().unwrap_or_else(|| "not built in a checkout".to_owned());
    let mut rows = vec![
        ("date", origin.date.clone()),
        ("processor", format!("{}, {} cores", origin.cpu, origin.cores)),
        ("device", format!("{}, {} CPU threads", summary.device, summary.threads)),
        ("system", origin.system.clone()),
        ("version", format!("fp8-nn {}", origin.version)),
        ("commit of the checkout", commit),
        ("parameters", grouped(summary.params as u64)),
        ("steps", format!("{} of {}", grouped(summary.steps as u64), grouped(summary.total_steps as u64))),
        ("bytes trained on", grouped(summary.tokens)),
        ("text", format!("{}, {} bytes", summary.text, grouped(summary.text_bytes as u64))),
    ];
    rows.extend(summary.layout.clone().map(|layout| ("layout of the ranks", layout)));
    rows.extend(gathers::row(&summary.gathered_in_high_precision));
    let mut html = String::from("<table>\n<tbody>\n");
    for (what, value) in rows {
        let _ = writeln!(html, "<tr><th>{what}</th><td>{}</td></tr>", escape(&value));
    }
    section("Run", "", &(html + "</tbody>\n</table>\n"))
}

/// The share of each rank, if there were several.
pub(super) fn ranks(summary: &Summary) -> String {
    if summary.ranks.is_empty() {
        return String::new();
    }
    let of_run = |run| summary.ranks.iter().any(|share| share.of_run(run)[0].is_some());
    let runs: Vec<Run> = [Run::HighPrecision, Run::Fp8].into_iter().filter(|&run| of_run(run)).collect();
    let mut html = String::from("<table class=\"numbers\">\n<thead><tr><th></th>");
    for column in ["median step, ms", "memory at the peak, MiB", "sent in a step, MiB"] {
        let _ = write!(html, "<th colspan=\"{}\">{column}</th>", runs.len());
    }
    html += "</tr>\n<tr><th>rank</th>";
    for run in (0..3).flat_map(|_| &runs) {
        let _ = write!(html, "<th>{}</th>", run.title());
    }
    html += "</tr></thead>\n<tbody>\n";
    for share in &summary.ranks {
        let _ = write!(html, "<tr><th>{}</th>", share.rank);
        for (column, unit) in [1.0, f64::from(1 << 20), f64::from(1 << 20)].into_iter().enumerate() {
            for &run in &runs {
                let number = share.of_run(run).get(column).copied().flatten();
                let text = number.map_or_else(|| "–".to_owned(), |number| format!("{:.2}", number / unit));
                let _ = write!(html, "<td>{text}</td>");
            }
        }
        html += "</tr>\n";
    }
    section("Ranks", RANKS_NOTE, &(html + "</tbody>\n</table>\n"))
}

const RANKS_NOTE: &str = "Each replica trains on its rows of every batch and sends gradients and amaxes to the others; the ranks that share \
                          its layers send each other activations, too. A step takes as long as the slowest rank.";

/// Every option that has a value, and where the value came from.
pub(super) fn options(config: &Config) -> String {
    let mut html = String::from("<table class=\"options\">\n<tbody>\n");
    for option in &config.chosen {
        let _ = writeln!(
            html,
            "<tr><th>--{}</th><td>{}</td><td>{}</td></tr>",
            option.name,
            escape(&option.value),
            option.source
        );
    }
    section("Options", "", &(html + "</tbody>\n</table>\n"))
}
