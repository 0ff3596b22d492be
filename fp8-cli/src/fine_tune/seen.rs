//! The parts of a run that its report shows, besides the log.

use crate::table::quoted;
use crate::train::telemetry::Telemetry;
use fp8_hf::TrainPlan;
use std::path::Path;

/// Plan, data and telemetry of a run.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) plan: TrainPlan,
    pub(super) first_validation: Option<f64>,
    pub(super) telemetry: Telemetry,
    pub(super) advice: Vec<String>,
    /// The tensors that ranks have gathered in high precision, although the recipe quantizes them.
    pub(super) gathered_in_high_precision: Vec<String>,
    pub(super) config: String,
    pub(super) summary: String,
    pub(super) device: String,
}

impl Seen {
    /// The path of the model, as a shell reads it.
    pub(super) fn base(&self) -> String {
        let table = self.config.parse::<toml::Table>().unwrap_or_default();
        let model = table.get("model").and_then(toml::Value::as_str).unwrap_or("MODEL").to_owned();
        quoted(Path::new(&model))
    }
}
