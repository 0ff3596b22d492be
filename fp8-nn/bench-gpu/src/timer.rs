//! The clock: a graph of launches over rotated buffers, replayed between events; the median counts.
//!
//! Buffers rotate through more memory than three L2 caches hold, results as well as inputs, so that each launch reads from
//! memory and writes to it. Where a step cannot be recorded, and where the host's part is what is measured, launches are
//! queued one by one between the events.

use crate::data::Pool;
use crate::result::Result;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags};
use fp8_nn::fp8_kernels::{Device, Graph, interop};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Launches in a graph, and how often it is replayed, first without a clock.
const LAUNCHES: usize = 20;
const WARM: usize = 3;
const REPLAYS: usize = 15;
/// Seconds that a case's replays may take together.
const PATIENCE: f64 = 5.0;
/// The number of bytes that the copy reads.
const COPY: usize = 512 << 20;

/// The result of a launch, kept until the launch's buffers are used again.
pub(crate) type Kept = Box<dyn Any>;

/// One measurement, of this library or another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) section: String,
    pub(crate) case: String,
    /// The name of the library that was measured: `fp8-rs`, or a peer's.
    pub(crate) by: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) us: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) us_min: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gb_per_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tflops: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ratio_to_copy: Option<f64>,
    /// The way in which the case was measured, or the reason why it was not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) note: String,
}

/// The work of one launch, from which the throughput is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Work {
    Bytes(f64),
    Flops(f64),
    /// Only the time says something.
    Calls,
}

/// The way in which launches reach the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mode {
    /// As a graph; one by one where that is refused.
    Graph,
    /// One by one.
    Queued,
}

/// The things that can be done with each case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Run {
    /// It is timed.
    Timed,
    /// It runs in a small size, to see that it can.
    Dry,
    /// It runs once in its full size, for a profiler.
    Once,
}

/// A device and what was measured on it.
pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) pool: Pool,
    pub(crate) dry: bool,
    /// Whether each case runs once, for a profiler, instead of being timed.
    once: bool,
    stream: Arc<CudaStream>,
    /// Bytes of the L2 cache.
    cache: usize,
    /// Bytes a second.
    copy: f64,
    out: Option<PathBuf>,
    by: String,
    measured: usize,
    failures: usize,
}

impl Bench {
    pub(crate) fn new(
        device: Device,
        stream: Arc<CudaStream>,
        out: Option<PathBuf>,
        run: Run,
        by: &str,
    ) -> Result<Self> {
        let dry = run == Run::Dry;
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        let cache = if dry { 0 } else { usize::try_from(stream.context().attribute(attribute)?)? };
        let pool = Pool::new(if dry { 1 << 12 } else { 1 << 22 });
        let mut bench = Self {
            device,
            pool,
            dry,
            once: run == Run::Once,
            stream,
            cache,
            copy: 0.0,
            out,
            by: by.to_owned(),
            measured: 0,
            failures: 0,
        };
        if !bench.once {
            bench.measure_copy()?;
        }
        Ok(bench)
    }

    pub(crate) fn measured(&self) -> usize {
        self.measured
    }

    pub(crate) fn failures(&self) -> usize {
        self.failures
    }

    /// Runs `cases` on another opening of the device, with `suffix` behind the name under which rows go.
    pub(crate) fn on(
        &mut self,
        device: &Device,
        suffix: &str,
        cases: &mut dyn FnMut(&mut Self) -> Result,
    ) -> Result {
        let by = format!("{}{suffix}", self.by);
        let before = (
            std::mem::replace(&mut self.stream, interop::stream(device)?.clone()),
            std::mem::replace(&mut self.device, device.clone()),
            std::mem::replace(&mut self.by, by),
        );
        let done = cases(self);
        (self.stream, self.device, self.by) = before;
        done
    }

    /// Returns the number of buffer sets for a case whose launches move `bytes` bytes each.
    pub(crate) fn sets(&self, bytes: f64) -> usize {
        let wanted = (3.0 * self.cache as f64 / bytes).ceil();
        if self.once { 1 } else { (wanted as usize).clamp(2, LAUNCHES) }
    }

    /// The ceiling: the driver's copy of random bytes, read and write counted.
    fn measure_copy(&mut self) -> Result {
        let len = if self.dry { 1 << 12 } else { COPY };
        let source = self.stream.clone_htod(&self.pool.bytes(len))?;
        let mut target = self.stream.alloc_zeros::<u8>(len)?;
        let mut times = Vec::new();
        for _ in 0..self.replays() + WARM {
            let start = self.event()?;
            for _ in 0..4 {
                self.stream.memcpy_dtod(&source, &mut target)?;
            }
            let end = self.event()?;
            times.push(f64::from(start.elapsed_ms(&end)?) * 1e3 / 4.0);
        }
        let [us, us_min] = middle(&mut times.split_off(WARM.min(times.len() - 1)));
        self.copy = 2.0 * len as f64 / (us * 1e-6);
        self.record(
            "copy",
            &format!("{} MiB", len >> 20),
            [us, us_min],
            Work::Bytes(2.0 * len as f64),
            "queued",
        )
    }

    /// Measures `launch`, which is told the set of buffers to work on.
    pub(crate) fn time(
        &mut self,
        section: &str,
        case: &str,
        work: Work,
        sets: usize,
        launch: &mut dyn FnMut(usize) -> Result<Kept>,
    ) -> Result {
        self.time_as(Mode::Graph, section, case, work, sets, launch, &mut || Ok(()))
    }

    /// [`time`](Self::time) in a mode, with something to `prepare`, unmeasured, before each replay.
    #[expect(clippy::too_many_arguments, reason = "one call a case")]
    pub(crate) fn time_as(
        &mut self,
        mode: Mode,
        section: &str,
        case: &str,
        work: Work,
        sets: usize,
        launch: &mut dyn FnMut(usize) -> Result<Kept>,
        prepare: &mut dyn FnMut() -> Result,
    ) -> Result {
        match self.replay(mode, sets, launch, prepare) {
            Ok((times, how)) => self.record(section, case, times, work, &how),
            Err(error) => {
                self.fail(&format!("{section} {case}"), &error.to_string());
                let note = format!("failed: {error}");
                self.write(&Row {
                    section: section.into(),
                    case: case.into(),
                    by: self.by.clone(),
                    note,
                    ..Row::default()
                })
            }
        }
    }

    /// Median and least µs of a launch, and how it was launched: where no graph could be recorded, with the reason.
    fn replay(
        &self,
        mode: Mode,
        sets: usize,
        launch: &mut dyn FnMut(usize) -> Result<Kept>,
        prepare: &mut dyn FnMut() -> Result,
    ) -> Result<([f64; 2], String)> {
        let mut kept: Vec<Option<Kept>> = (0..sets).map(|_| None).collect();
        let mut queue = |launches: usize| -> Result {
            for index in 0..launches {
                let set = index % sets;
                kept[set] = None;
                kept[set] = Some(launch(set)?);
            }
            Ok(())
        };
        if self.once {
            prepare()?;
            let kept = launch(0)?;
            self.device.synchronize()?;
            drop(kept);
            return Ok(([f64::NAN; 2], "once".to_owned()));
        }
        // Twice: kernels are compiled and memory is found, then it is known how long it takes.
        prepare()?;
        queue(sets)?;
        self.device.synchronize()?;
        prepare()?;
        let start = Instant::now();
        queue(sets)?;
        self.device.synchronize()?;
        let one = start.elapsed().as_secs_f64() / sets as f64;
        let affordable = PATIENCE / ((self.replays() + WARM) as f64 * one.max(1e-7));
        let launches = if self.dry { 2 } else { (affordable as usize).clamp(1, LAUNCHES) };

        let mut how = "queued".to_owned();
        let graph: Option<Graph> = match mode {
            Mode::Queued => None,
            Mode::Graph => {
                prepare()?;
                let recorded = self.device.capture(|| queue(launches));
                match recorded {
                    Ok((graph, ())) => {
                        how = "graph".to_owned();
                        Some(graph)
                    }
                    // On the device of a dry run everything has to be possible that is meant to be.
                    Err(error) if self.dry => return Err(error),
                    Err(error) => {
                        how = format!("queued: {error}");
                        println!("not recorded: {error}");
                        None
                    }
                }
            }
        };
        let mut times = Vec::new();
        for round in 0..self.replays() + WARM {
            prepare()?;
            // What was prepared must not hide how long it takes to launch a graph.
            self.device.synchronize()?;
            let start = self.event()?;
            match &graph {
                Some(graph) => graph.replay()?,
                None => queue(launches)?,
            }
            let end = self.event()?;
            let us = f64::from(start.elapsed_ms(&end)?) * 1e3 / launches as f64;
            if round >= WARM {
                times.push(us);
            }
        }
        self.device.synchronize()?;
        Ok((middle(&mut times), how))
    }

    fn replays(&self) -> usize {
        if self.dry { 1 } else { REPLAYS }
    }

    fn event(&self) -> Result<cudarc::driver::CudaEvent> {
        Ok(self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?)
    }

    /// A row of this library's.
    pub(crate) fn record(
        &mut self,
        section: &str,
        case: &str,
        us: [f64; 2],
        work: Work,
        note: &str,
    ) -> Result {
        let [us, us_min] = us;
        let mut row = Row {
            section: section.into(),
            case: case.into(),
            by: self.by.clone(),
            us: Some(us),
            us_min: Some(us_min),
            note: note.into(),
            ..Row::default()
        };
        match work {
            Work::Bytes(bytes) => {
                row.gb_per_s = Some(bytes / us * 1e-3);
                row.ratio_to_copy = Some(bytes / (us * 1e-6) / self.copy);
            }
            Work::Flops(flops) => row.tflops = Some(flops / us * 1e-6),
            Work::Calls => {}
        }
        self.measured += 1;
        self.write(&row)
    }

    /// Counts and tells a failure.
    pub(crate) fn fail(&mut self, what: &str, error: &str) {
        self.failures += 1;
        println!("FAILED {what}: {error}");
    }

    fn write(&self, row: &Row) -> Result {
        if self.dry || self.once {
            println!("ran {} {} ({})", row.section, row.case, row.note);
            return Ok(());
        }
        let line = serde_json::to_string(row)?;
        println!("{line}");
        if let Some(out) = &self.out {
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(out)?;
            writeln!(file, "{line}")?;
        }
        Ok(())
    }
}

/// Median and least.
fn middle(times: &mut [f64]) -> [f64; 2] {
    times.sort_by(f64::total_cmp);
    [times.get(times.len() / 2), times.first()].map(|time| time.copied().unwrap_or(f64::NAN))
}
