//! Attacks on quantization: slots of every kind, arenas, and quantizers with a history of their own.

use std::sync::Arc;

use fp8_kernels::ops::{self, AmaxRule, ScaleUpdate};
use fp8_kernels::{
    Arena, ArenaOptions, Cell, Counters, CustomPolicy, DType, Encoding, REST, Scale, ScalePolicy, ScaleRule,
    Slot, Tensor, UNSET,
};
use fp8_recipe::{Direction, Quantizer};

use super::super::case::Case;
use super::super::draw::Kind;
use super::super::outcome::Tolerance;

/// The parts of a slot. They own the cells and counters that the slot borrows.
pub(super) struct Parts {
    encoding: Encoding,
    source: Source,
    cell: Cell,
    rule: ScaleRule,
    keep: bool,
    amax: Option<Cell>,
    counters: Option<Counters>,
    columnwise: bool,
}

#[derive(Clone, Copy)]
enum Source {
    Off,
    Cell,
    Tensor,
    Amax(f32),
}

impl Parts {
    pub(super) fn draw(case: &mut Case<'_>) -> Option<Self> {
        let encoding = case.draw.encoding();
        let source = match case.draw.below(6) {
            0 => Source::Off,
            1 => Source::Tensor,
            2 => Source::Amax(case.draw.option(2.0)),
            _ => Source::Cell,
        };
        let scale = case.draw.pick(&[1.0, 2.0, 448.0, 1e-3, UNSET, UNSET, -128.0, 1e-30, 1e30]);
        let (scale, start) = (case.draw.option(scale), case.draw.pick(&[REST, 0.0, 1.5, f32::INFINITY]));
        let (counts, records) = (case.draw.flip(), !case.draw.once_in(4));
        let is_read = matches!(source, Source::Cell) || counts || records;
        let device = if is_read { case.place() } else { case.device.clone() };
        let cell = case.aside("Cell::new", || Cell::new(scale, &device))?;
        let amax = case.aside("Cell::new", || Cell::new(start, &device))?;
        let counters = case.aside("Counters::new", || Counters::new(&device))?;
        let parts = Self {
            encoding,
            source,
            cell,
            rule: super::drawn::rule(&mut case.draw, encoding),
            keep: case.draw.flip(),
            amax: records.then_some(amax),
            counters: counts.then_some(counters),
            columnwise: case.draw.flip(),
        };
        case.say(|| format!("{:?}", parts.slot()));
        Some(parts)
    }

    pub(super) fn slot(&self) -> Slot<'_> {
        let (cell, first, keep) = (&self.cell, &self.rule, self.keep);
        Slot {
            encoding: self.encoding,
            scale: match self.source {
                Source::Off => Scale::Off,
                Source::Cell => Scale::Cell { cell, first, keep },
                Source::Tensor => Scale::FromTensor(first),
                Source::Amax(amax) => Scale::FromAmax { amax, rule: first },
            },
            amax: self.amax.as_ref(),
            counters: self.counters.as_ref(),
            columnwise: self.columnwise,
        }
    }

    /// Records the scale, the amax and the counters after the operation.
    pub(super) fn record(&self, case: &mut Case<'_>) {
        let cells = [Some(&self.cell), self.amax.as_ref()];
        let mut numbers = Vec::new();
        for cell in cells.into_iter().flatten() {
            match cell.read() {
                Ok(value) => numbers.push(value),
                Err(error) => case.fail(format!("reading a cell: {error}")),
            }
        }
        case.numbers("scale and amax", numbers);
        if let Some(counters) = &self.counters {
            case.text("counters", counters.read());
        }
    }
}

pub(super) fn quantize(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype, kind) = (case.draw.below(5), case.draw.dtype(), case.draw.kind());
    let limit = if case.draw.once_in(100) { 70_000 } else { 4096 };
    let shape = case.draw.extents(rank, limit);
    let x = case.tensor(&shape, dtype, kind)?;
    let device = super::tensors::policy(case);
    let x_there = case.call("to_device", || x.to_device(&device))?;
    let parts = Parts::draw(case)?;
    if case.draw.flip() {
        let y = case.call("quantize", || ops::quantize(&x_there, &parts.slot()))?;
        case.operand("y", &y);
        parts.record(case);
        let back = case.call("dequantize", || y.dequantize(DType::F32))?;
        case.exact("back", &back);
        return Some(());
    }
    let (y, db) = case.call("quantize_dbias", || ops::quantize_dbias(&x_there, &parts.slot()))?;
    case.operand("y", &y);
    let atol = if kind == Kind::Wild { f64::INFINITY } else { x.numel() as f64 * x.size * 1e-6 };
    case.close("db", &db, Tolerance::of(DType::F32, atol));
    parts.record(case);
    Some(())
}

pub(super) fn quantize_many(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let kind = case.draw.kind();
    let mut all = Vec::new();
    for _ in 0..case.draw.below(5) {
        let (rank, dtype) = (case.draw.below(4), case.draw.dtype());
        let shape = case.draw.extents(rank, 1024);
        all.push((case.tensor(&shape, dtype, kind)?, Parts::draw(case)?));
    }
    let pairs: Vec<(&Tensor, Slot<'_>)> = all.iter().map(|(x, parts)| (&x.tensor, parts.slot())).collect();
    let outputs = case.call("quantize_many", || ops::quantize_many(&pairs))?;
    for y in &outputs {
        case.operand("y", y);
    }
    for (_, parts) in &all {
        parts.record(case);
    }
    Some(())
}

/// All of an arena's state, as numbers.
fn state(case: &mut Case<'_>, arena: &Arena) -> Option<()> {
    let read = || -> fp8_kernels::Result<Vec<f32>> {
        let mut all = arena.staged()?;
        all.extend(arena.history()?);
        all.extend(arena.scales()?);
        all.extend(arena.newest_all()?);
        Ok(all)
    };
    let numbers = case.call("read", read)?;
    case.numbers("arena", numbers);
    case.text("updates", arena.updates());
    let counts = case.call("skipped", || arena.skipped_non_finite_all())?;
    case.text("skipped", counts);
    let counts = case.call("counters", || arena.counters_all())?;
    case.text("counters", counts);
    Some(())
}

pub(super) fn update_scales(case: &mut Case<'_>) -> Option<()> {
    let slots = case.draw.pick(&[0, 1, 2, 3, 7, 33, 129]);
    let rows = case.draw.pick(&[1, 2, 3, 5, 17]);
    let (slots, rows) = match case.draw.below(30) {
        0 => (case.draw.huge(), rows),
        1 => (slots, case.draw.huge()),
        2 => (slots, 0),
        _ => (slots, rows),
    };
    let options = ArenaOptions {
        history_len: rows,
        rest: case.draw.pick(&[REST, REST, 0.0]),
        first_scale: case.draw.pick(&[UNSET, UNSET, 1.0]),
    };
    let device = case.device;
    case.say(|| format!("{slots} slots, {options:?}"));
    let mut arena = case.call("Arena::new", || Arena::new(slots, options, device))?;
    if slots > 1000 || rows > 1000 {
        return None;
    }
    let encoding = case.draw.encoding();
    let rule = super::drawn::rule(&mut case.draw, encoding);
    let halve = |window: &[f32]| window.iter().fold(0.0, |sum, amax| sum + amax) / 2.0;
    let amax = match case.draw.below(8) {
        0 => AmaxRule::Custom(&halve),
        1 => AmaxRule::MostRecent,
        2 => AmaxRule::MaxOfLast(case.draw.below(rows + 2)),
        3 => AmaxRule::Average { decay: case.draw.pick(&[0.0, 0.1, 0.5, 0.9, 0.999, 1.0]) },
        _ => AmaxRule::Max,
    };
    let twice = |amax: f32, _: f32, max: f32| max / amax * 2.0;
    let custom = ScalePolicy::Custom(CustomPolicy { name: "twice".into(), function: Arc::new(twice) });
    let rule = if case.draw.once_in(10) {
        ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: custom }
    } else {
        rule
    };
    let interval = case.draw.pick(&[1, 1, 1, 2, 3, u64::MAX]);
    let update = ScaleUpdate { amax, rule: &rule, interval, record_non_finite: case.draw.flip() };
    case.say(|| format!("{update:?}"));
    for _ in 0..1 + case.draw.below(5) {
        match case.draw.below(9) {
            0 => {
                let row = case.draw.floats(Kind::Special, slots);
                case.call("set_scales", || arena.set_scales(&row))?;
            }
            1 => {
                let most = case.draw.below(4) * slots + usize::from(case.draw.once_in(8));
                let values = case.draw.floats(Kind::Tame, most);
                let _ = case.call("set_history", || arena.set_history(&values));
            }
            2 => {
                let (slot, len) = (case.draw.below(slots + 1), case.draw.below(6));
                let values = case.draw.floats(Kind::Tame, len);
                let _ = case.call("set_window", || arena.set_window(slot, &values));
                if let Some(window) = case.call("window", || arena.window(slot)) {
                    case.numbers("window", window);
                }
                if let Some(newest) = case.call("newest", || arena.newest(slot)) {
                    case.numbers("newest", vec![newest]);
                }
            }
            3 => case.call("roll_back", || arena.roll_back())?,
            4 => {
                let count = case.draw.pick(&[0, 1, 5, u64::MAX - 1, u64::MAX]);
                case.run("set_updates", || arena.set_updates(count));
            }
            _ => {}
        }
        let len = if case.draw.once_in(20) { slots + 1 } else { slots };
        let kind = case.draw.kind();
        let row: Vec<f32> = case.draw.floats(kind, len).into_iter().map(f32::abs).collect();
        let _ = case.call("merge_staged", || arena.merge_staged(&row));
        let _ = case.call("check_scales", || ops::check_scales(&arena, &update));
        let _ = case.call("update_scales", || ops::update_scales(&mut arena, &update));
        state(case, &arena)?;
    }
    Some(())
}

pub(super) fn quantizer(case: &mut Case<'_>) -> Option<()> {
    let direction = case.draw.pick(&Direction::ALL);
    let recipe = super::drawn::delayed(&mut case.draw);
    let device = case.device;
    case.say(|| format!("{recipe:?}, {direction}"));
    let mut quantizer = case.call("Quantizer::new", || Quantizer::new(recipe, direction, device))?;
    for _ in 0..1 + case.draw.below(4) {
        let (rank, dtype, kind) = (case.draw.below(3), case.draw.dtype(), case.draw.kind());
        let shape = case.draw.extents(rank, 512);
        let x = case.tensor(&shape, dtype, kind)?;
        if let Some(y) = case.call("Quantizer::quantize", || quantizer.quantize(&x)) {
            case.operand("y", &y);
        }
        let (scale, history) = (quantizer.scale(), quantizer.amax_history());
        case.run("state", || ());
        case.text("scale", scale.map(f32::to_bits));
        case.text(
            "history",
            history.map(|history| history.into_iter().map(f32::to_bits).collect::<Vec<_>>()),
        );
    }
    Some(())
}
