//! Events: what a subscriber receives when checkpoints are written and loaded, scopes dropped and amaxes left out.

#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use fp8_nn::prelude::*;
use fp8_nn::rand::{SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;
use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps each event as one line: its level, its target and its fields in the order of the call.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<String>>>);

impl Subscriber for Recorder {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut line = Line(format!("{} {}", metadata.level(), metadata.target()));
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        write!(self.0, " {field}={value}").unwrap();
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

/// The events of `run`.
fn events(run: impl FnOnce() -> Result<()>) -> Vec<String> {
    let recorder = Recorder::default();
    tracing::subscriber::with_default(recorder.clone(), run).unwrap();
    let lines = recorder.0.lock().unwrap();
    lines.clone()
}

fn layer() -> Result<(Linear, Scaling)> {
    let options = LinearOptions { in_features: 16, out_features: 16, ..Default::default() };
    let fc = Linear::new("fc", options, &Device::cpu(), &mut StdRng::seed_from_u64(1))?;
    let scaling = Scaling::new(&fc, &Device::cpu())?;
    Ok((fc, scaling))
}

fn delayed() -> Recipe {
    DelayedScaling::default().into()
}

#[test]
fn a_checkpoint_that_is_written_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = checkpoint::path(folder.path()).display().to_string();
    let lines = events(|| {
        let ((mut fc, mut scaling), mut optimizer) = (layer()?, AdamW::new(AdamWOptions::default())?);
        optimizer.step(&mut fc, 1e-3)?;
        checkpoint::save(folder.path(), &fc, &optimizer, &scaling, &BTreeMap::new())?;
        checkpoint::load(folder.path(), &mut fc, &mut optimizer, &mut scaling).map(drop)
    });
    let line = |what| format!("INFO fp8_nn::checkpoint message=checkpoint {what} path={path} step=1");
    assert_eq!(lines, [line("written"), line("loaded")]);
}

#[test]
fn a_scope_that_is_dropped_without_commit() {
    let lines = events(|| {
        let (fc, mut scaling) = layer()?;
        let x = Tensor::full(1.0, [2, 16], DType::F32, &Device::cpu())?;
        let mut cx = scaling.autocast(&delayed())?;
        fc.forward(&mut cx, &x)?;
        drop(cx);
        let mut cx = scaling.autocast(&delayed())?;
        fc.forward(&mut cx, &x)?;
        Ok(cx.commit()?)
    });
    let expected = "WARN fp8_recipe::scaling message=a scope was dropped without commit; scales are unchanged \
                    direction=forward reason=left a forward scope without commit";
    assert_eq!(lines, [expected]);
}

#[test]
fn amaxes_that_are_left_out_of_a_history() {
    let lines = events(|| {
        let (fc, mut scaling) = layer()?;
        let step = |scaling: &mut Scaling, value| {
            let x = Tensor::full(value, [2, 16], DType::F32, &Device::cpu())?;
            scaling.in_autocast(&delayed(), |cx| fc.forward(cx, &x)).map(drop)
        };
        step(&mut scaling, 1.0)?;
        scaling.slot_reports()?; // nothing was left out yet
        step(&mut scaling, f32::INFINITY)?;
        Ok(scaling.slot_reports().map(drop)?)
    });
    let expected = "WARN fp8_recipe::report message=amaxes that are not finite were left out of the history slots=1 \
                    amaxes=1 first=fc.input";
    assert_eq!(lines, [expected]);
}
