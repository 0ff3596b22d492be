//! A measurement, as the table and the file have it.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    Convert,
    Quantize,
    Decode,
    Amax,
    Transpose,
    QuantizeTranspose,
}

/// The wide type: what is read, or for decoding what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Source {
    F32,
    F16,
    BF16,
    #[serde(untagged)]
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    E4M3,
    E5M2,
    #[serde(untagged)]
    None,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) work: Work,
    /// Of this crate; none of a peer.
    pub(crate) path: Option<String>,
    pub(crate) source: Source,
    pub(crate) format: Format,
    /// `any` or `power_of_two`, where there is a scale.
    pub(crate) scale: Option<String>,
    pub(crate) elements: usize,
    pub(crate) threads: usize,
    /// Bytes in and out.
    pub(crate) gb_per_s: f64,
    pub(crate) ceiling_ratio: f64,
    /// The other library; none for this crate.
    pub(crate) peer: Option<String>,
}

impl Row {
    pub(crate) fn of(
        work: Work,
        path: &str,
        source: Source,
        format: Format,
        scale: Option<&str>,
        threads: usize,
    ) -> Self {
        Self {
            work,
            path: (!path.is_empty()).then(|| path.to_owned()),
            source,
            format,
            scale: scale.map(str::to_owned),
            elements: 0,
            threads,
            gb_per_s: 0.0,
            ceiling_ratio: 0.0,
            peer: None,
        }
    }

    /// Bytes of an element, in and out.
    pub(crate) fn bytes(&self) -> f64 {
        let wide = if self.source == Source::F32 { 4.0 } else { 2.0 };
        match self.work {
            Work::Convert | Work::Quantize | Work::Decode => wide + 1.0,
            Work::Amax => wide,
            Work::Transpose => 2.0,
            Work::QuantizeTranspose => wide + 2.0,
        }
    }

    pub(crate) fn line(&self) -> String {
        let word = |value: serde_json::Value| value.as_str().unwrap_or("").to_owned();
        let [work, source, format] = [
            serde_json::to_value(self.work),
            serde_json::to_value(self.source),
            serde_json::to_value(self.format),
        ]
        .map(|value| word(value.unwrap_or_default()));
        let who = self.peer.as_deref().or(self.path.as_deref()).unwrap_or("");
        let scale = self.scale.as_deref().unwrap_or("");
        let elements = match self.elements {
            n if n >= 1 << 20 => format!("{} Mi", n >> 20),
            n => format!("{} Ki", n >> 10),
        };
        let gelem = self.gb_per_s / self.bytes();
        let Self { threads, gb_per_s, ceiling_ratio, .. } = self;
        format!(
            "{work:<18} {source:<4} {format:<4} {scale:<12} {elements:>6} {threads:>2}  {who:<16} {ceiling_ratio:>6.2} {gb_per_s:>7.1} GB/s {gelem:>7.2} Gelem/s"
        )
    }
}
