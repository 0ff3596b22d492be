//! The sections on the run itself: machine, date, commit and options.

use std::fmt::Write as _;

use crate::page::{escape, grouped, section};
use crate::train::config::Config;
use crate::train::summary::Summary;

/// Machine, date, commit and sizes.
pub(super) fn facts(summary: &Summary) -> String {
    let origin = &summary.origin;
    let commit = origin.commit.clone().unwrap_or_else(|| "not built in a checkout".to_owned());
    let rows = [
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
    let mut html = String::from("<table>\n<tbody>\n");
    for (what, value) in rows {
        let _ = writeln!(html, "<tr><th>{what}</th><td>{}</td></tr>", escape(&value));
    }
    section("Run", "", &(html + "</tbody>\n</table>\n"))
}

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
