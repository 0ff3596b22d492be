//! Events: what a subscriber receives when libraries are found, kernel files loaded and products planned.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::Rig;
use fp8_kernels::{CudaOptions, DType, Device, GemmTuning, Tensor, ops};
use ops::Layout;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, Once};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// An event: its level, its target, and its fields with the message among them.
#[derive(Clone, Debug)]
struct Seen {
    level: Level,
    target: String,
    fields: BTreeMap<&'static str, String>,
}

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

/// Records the events of this crate.
struct Recorder;

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("fp8_kernels")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let (level, target) = (*event.metadata().level(), event.metadata().target().to_owned());
        SEEN.lock().unwrap().push(Seen { level, target, fields: fields.0 });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

/// Takes the driver for one test, with all events recorded: libraries are found once per process.
fn rig() -> Rig {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| tracing::subscriber::set_global_default(Recorder).unwrap());
    Rig::new()
}

/// The number of events so far.
fn count() -> usize {
    SEEN.lock().unwrap().len()
}

/// The events with this message, after the first `from` events. All are debug events of `target`.
fn seen(from: usize, target: &str, message: &str) -> Vec<BTreeMap<&'static str, String>> {
    let events: Vec<Seen> = SEEN.lock().unwrap()[from..].to_vec();
    let events = events.into_iter().filter(|seen| seen.fields["message"] == message);
    let fields = events.map(|seen| {
        assert_eq!((seen.level, &*seen.target), (Level::DEBUG, target));
        seen.fields
    });
    fields.collect()
}

fn planned(from: usize) -> Vec<BTreeMap<&'static str, String>> {
    seen(from, "fp8_kernels::backend::cuda::runtime::matmul", "product planned")
}

fn product(device: &Device) {
    let x = Tensor::zeros([64, 32], DType::F32, device).unwrap();
    let w = Tensor::zeros([16, 32], DType::F32, device).unwrap();
    ops::gemm(&x, &w, Layout::Nt, None, DType::F32).unwrap();
}

#[test]
fn each_library_has_an_event_with_its_path() {
    let rig = rig();
    let device = rig.open();
    product(&device); // opens cuBLASLt
    drop(device);
    let found = seen(0, "fp8_kernels::backend::cuda::runtime::loader", "library found");
    let path = cuda::library().display().to_string();
    let libraries: Vec<&str> = found.iter().map(|fields| &*fields["library"]).collect();
    assert_eq!(libraries, ["libcuda.so.1", "libnvrtc", "libcublasLt"]);
    assert!(found.iter().all(|fields| fields["path"] == path), "{found:?}");
    rig.finish();
}

#[test]
fn a_kernel_file_is_compiled_once_and_then_read_from_the_cache() {
    let rig = rig();
    let load = |device: &Device| {
        let from = count();
        for _ in 0..2 {
            let x = Tensor::full(2.0, [64], DType::F32, device).unwrap();
            ops::amax(&x).unwrap();
        }
        let loaded = seen(from, "fp8_kernels::backend::cuda::runtime::module", "kernel file loaded");
        let loaded: Vec<_> = loaded.into_iter().filter(|fields| fields["kernel_file"] == "amax").collect();
        assert_eq!(loaded.len(), 1, "{loaded:?}");
        let milliseconds: f64 = loaded[0]["milliseconds"].parse().unwrap();
        assert!(milliseconds > 0.0, "{loaded:?}");
        loaded[0]["origin"].clone()
    };
    assert_eq!(load(&rig.open()), "compiler");
    assert_eq!(load(&rig.open()), "cache");
    rig.finish();
}

#[test]
fn a_product_is_planned_once_by_heuristic_timing_or_file() {
    let rig = rig();
    let plan = |candidates: usize| {
        let tuning = GemmTuning { candidates, file: Some(rig.cache().join("gemm.json")) };
        let options = CudaOptions { gemm_tuning: Some(tuning), ..rig.options() };
        let device = Device::cuda_with_options(&options).unwrap();
        let from = count();
        product(&device);
        product(&device);
        let planned = planned(from);
        assert_eq!(planned.len(), 1, "{planned:?}");
        planned[0].clone()
    };
    let heuristic = plan(1);
    assert_eq!(heuristic["product"], "[64, 32] · [32, 16], f32 × f32 → f32");
    assert_eq!((&*heuristic["op"], &*heuristic["choice"]), ("gemm", "heuristic"));
    assert!(heuristic["workspace"].parse::<usize>().is_ok(), "{heuristic:?}");
    // Of the simulated library's three kernels the second is the fastest.
    rig.control.set("product_times", "5000,4000,9000;0").unwrap();
    let tuned = plan(3);
    assert_eq!((&*tuned["choice"], tuned["algo"].ends_with("00000001")), ("tuned", true), "{tuned:?}");
    let stored = plan(3);
    assert_eq!((&*stored["choice"], &stored["algo"]), ("stored", &tuned["algo"]));
    rig.finish();
}
