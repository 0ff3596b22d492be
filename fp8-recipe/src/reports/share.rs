//! Shares in the sentences of advice.

/// Writes a share of 0 to 1 in percent.
pub(crate) fn percent(share: f64) -> String {
    if share < 0.001 { format!("{:.3} %", 100.0 * share) } else { format!("{:.1} %", 100.0 * share) }
}
