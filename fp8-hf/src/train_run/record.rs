//! A step as the log has it.

use serde_json::{Value, json};

/// A step of a [`TrainRun`](crate::TrainRun), as `log.jsonl` has it. [`json`](Self::json) has an example.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TrainRecord {
    /// The number of the step, from 1. Default: 0.
    pub step: u64,
    /// The epochs that are done behind it, with a fraction. Default: 0.
    pub epoch: f64,
    /// The mean loss of the learned targets with the weights before the step, in nats. Default: 0.
    pub loss: f64,
    /// The norm of all gradients before clipping. Default: 0.
    pub grad_norm: f32,
    /// The learning rate that was used. Default: 0.
    pub lr: f32,
    /// The tokens of all ranks, without padding. Default: 0.
    pub tokens: u64,
    /// The learned targets of all ranks. Default: 0.
    pub learned: u64,
    /// The time of the step, without evaluation and checkpoint. Default: 0.
    pub seconds: f64,
    /// Whether it changed nothing: no target was learned, or the norm was not finite. Default: false.
    pub skipped: bool,
    /// The bytes of the device's tensors when they were most. Default: 0.
    pub memory_bytes: u64,
    /// The loss over the sequences for validation, if it was measured behind the step. Default: `None`.
    pub validation_loss: Option<f64>,
    /// The share of quantized values that were beyond the largest of their format, if they were counted. Default: `None`.
    pub saturated: Option<f64>,
    /// The tensor whose gradient was not finite first, if there is one. Default: `None`.
    pub non_finite: Option<String>,
    /// The arrangement of the ranks ([`TrainRanks::layout`](crate::TrainRanks::layout)), if there were several. Default: `None`.
    pub layout: Option<String>,
}

impl TrainRecord {
    /// Returns the line of `log.jsonl`. Numbers that are not finite are `null`.
    ///
    /// ```
    /// use fp8_hf::TrainRecord;
    /// let record = TrainRecord { step: 3, loss: 2.5, ..Default::default() };
    /// assert_eq!((record.json()["step"].as_u64(), record.json()["loss"].as_f64()), (Some(3), Some(2.5)));
    /// assert_eq!(TrainRecord::from_json(&record.json()), Some(record));
    /// ```
    #[must_use]
    pub fn json(&self) -> Value {
        let mut line = json!({
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "grad_norm": f64::from(self.grad_norm),
            "lr": f64::from(self.lr),
            "tokens": self.tokens,
            "learned": self.learned,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "memory_bytes": self.memory_bytes,
        });
        if let Some(loss) = self.validation_loss {
            line["validation_loss"] = json!(loss);
        }
        if let Some(share) = self.saturated {
            line["saturated"] = json!(share);
        }
        if let Some(name) = &self.non_finite {
            line["non_finite"] = json!(name);
        }
        if let Some(layout) = &self.layout {
            line["layout"] = json!(layout);
        }
        line
    }

    /// Reads a line of `log.jsonl`; `None` if it is none.
    #[must_use]
    pub fn from_json(line: &Value) -> Option<Self> {
        let number = |key: &str| match line.get(key)? {
            Value::Null => Some(f64::NAN),
            value => value.as_f64(),
        };
        let count = |key: &str| line.get(key)?.as_u64();
        let text = |key: &str| line.get(key).and_then(Value::as_str).map(str::to_owned);
        Some(Self {
            step: count("step")?,
            epoch: number("epoch")?,
            loss: number("loss")?,
            grad_norm: number("grad_norm")? as f32,
            lr: number("lr")? as f32,
            tokens: count("tokens")?,
            learned: count("learned")?,
            seconds: number("seconds")?,
            skipped: line.get("skipped")?.as_bool()?,
            memory_bytes: count("memory_bytes")?,
            validation_loss: number("validation_loss"),
            saturated: number("saturated"),
            non_finite: text("non_finite"),
            layout: text("layout"),
        })
    }
}
