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
    /// With a scale for each row or block; `Both` writes columnwise results, too.
    QuantizeRow,
    QuantizeRowBoth,
    #[serde(rename = "quantize_1x128")]
    Quantize1x128,
    #[serde(rename = "quantize_1x128_both")]
    Quantize1x128Both,
    #[serde(rename = "quantize_128x128")]
    Quantize128x128,
    #[serde(rename = "quantize_128x128_both")]
    Quantize128x128Both,
    #[serde(rename = "quantize_mx32")]
    QuantizeMx32,
    #[serde(rename = "quantize_mx32_both")]
    QuantizeMx32Both,
    /// To E2M1 in blocks of 16, with a given amax of the tensor or with one that is computed first.
    #[serde(rename = "quantize_nvfp4")]
    QuantizeNvfp4,
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
    E2M1,
    E4M3,
    E5M2,
    #[serde(untagged)]
    None,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) work: Work,
    /// The path of this crate that was measured; none for a peer.
    pub(crate) path: Option<String>,
    pub(crate) source: Source,
    pub(crate) format: Format,
    /// `any` or `power_of_two` of quantization, `ceil` of that to MXFP8; `given` or `computed` amax of NVFP4.
    pub(crate) scale: Option<String>,
    pub(crate) elements: usize,
    /// Rows and columns of a matrix.
    pub(crate) shape: Option<[usize; 2]>,
    pub(crate) threads: usize,
    /// Bytes in and out.
    pub(crate) gb_per_s: f64,
    /// None where no ceiling was measured with the same bytes and threads.
    pub(crate) ceiling_ratio: Option<f64>,
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
            shape: None,
            threads,
            gb_per_s: 0.0,
            ceiling_ratio: None,
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
            Work::QuantizeRow | Work::Quantize1x128 | Work::Quantize128x128 | Work::QuantizeMx32 => {
                wide + 1.0
            }
            Work::QuantizeRowBoth
            | Work::Quantize1x128Both
            | Work::Quantize128x128Both
            | Work::QuantizeMx32Both => wide + 2.0,
            Work::QuantizeNvfp4 => wide + 0.5 + 1.0 / 16.0,
        }
    }

    /// Returns the columns of the table that identify the measurement.
    pub(crate) fn key(&self) -> String {
        let word = |value: serde_json::Value| value.as_str().unwrap_or("").to_owned();
        let [work, source, format] = [
            serde_json::to_value(self.work),
            serde_json::to_value(self.source),
            serde_json::to_value(self.format),
        ]
        .map(|value| word(value.unwrap_or_default()));
        let detail = match (&self.scale, self.shape) {
            (Some(scale), _) => scale.clone(),
            (None, Some([rows, cols])) => format!("{rows}x{cols}"),
            (None, None) => String::new(),
        };
        let elements = match self.elements {
            n if n >= 1 << 20 => format!("{} Mi", n >> 20),
            n => format!("{} Ki", n >> 10),
        };
        let threads = self.threads;
        format!("{work:<18} {source:<4} {format:<4} {detail:<12} {elements:>8} {threads:>2}")
    }

    pub(crate) fn line(&self) -> String {
        let who = self.peer.as_deref().or(self.path.as_deref()).unwrap_or("");
        let ratio = self.ceiling_ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        let gelem = self.gb_per_s / self.bytes();
        let (key, gb_per_s) = (self.key(), self.gb_per_s);
        format!("{key}  {who:<16} {ratio:>6} {gb_per_s:>7.1} GB/s {gelem:>7.2} Gelem/s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_null_in_the_file_and_a_line_has_the_whole_key() {
        let mut row = Row::of(Work::QuantizeTranspose, "avx2", Source::F32, Format::E4M3, None, 2);
        (row.elements, row.shape) = (64 << 20, Some([1 << 20, 64]));
        let value = serde_json::to_value(&row).unwrap();
        assert!(["scale", "ceiling_ratio", "peer"].iter().all(|name| value[name].is_null()), "{value}");
        assert_eq!(row.key(), "quantize_transpose f32  e4m3 1048576x64      64 Mi  2");
        assert!(row.line().starts_with(&(row.key() + "  avx2                  - ")), "{}", row.line());
        let back: Row = serde_json::from_value(value).unwrap();
        assert_eq!(back.line(), row.line());
    }
}
