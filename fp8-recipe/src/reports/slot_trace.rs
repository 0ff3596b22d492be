//! The amaxes, scales and counts of each slot over the last steps.

use crate::{Direction, Encoding, Nvfp4Report, RecipeLabel, Result, ScaleSource, Scaling, SlotReport};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

/// The amaxes, scales and counts of each slot in the last steps: a ring for each slot.
///
/// Call [`record`](Self::record) after each step, with [`Scaling::set_counting`] on. Nothing is read in steps without the
/// call, so a trace that is not used costs nothing. [`advice`](Self::advice) says what to change. With
/// [`Scaling::set_measuring_sqnr`] on, points also tell how exact the codes were.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling, SlotSeries, SlotTrace, TracePoint};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// scaling.set_counting(true);
/// let mut trace = SlotTrace::new(100);
/// for (step, amax) in [3.5f32, 7.0, 3.5].into_iter().enumerate() {
///     let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
///     ops::quantize(&Tensor::from_vec(vec![amax, 0.5], [1, 2], &device)?, &cx.slot(&fc.input)?)?;
///     cx.commit()?;
///     trace.record(step as u64, &scaling)?;
/// }
/// let SlotSeries { name, points, .. } = &trace.series()[0];
/// assert_eq!((&**name, points.len()), ("fc.input", 3));
/// let TracePoint { step, amax, scale, saturated, .. } = points[1];
/// assert_eq!((step, amax, scale, saturated), (1, 7.0, Some(64.0), 1)); // 7 · 128 exceeds 448
/// assert!(trace.to_csv().ends_with("2,fc.input,forward,delayed,3.5,64,2,0,0,0,\n"));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SlotTrace {
    capacity: usize,
    series: Vec<SlotSeries>,
    /// The number of times that the counters had been reset at the last call of `record`.
    resets: u64,
}

/// One slot under one recipe in the last steps, as recorded by a [`SlotTrace`].
#[derive(Debug, Clone)]
pub struct SlotSeries {
    /// The slot's name.
    pub name: Arc<str>,
    /// The pass it belongs to.
    pub direction: Direction,
    /// The recipe and group that it ran under.
    pub recipe: RecipeLabel,
    /// The largest finite value of its format.
    pub fp8_max: f32,
    /// The source of its scales.
    pub scales: ScaleSource,
    /// The steps in which it ran, oldest first.
    pub points: VecDeque<TracePoint>,
    /// The counts of the last report, from which those of the next step are told apart.
    seen: Counts,
}

/// One slot in one step, as recorded by a [`SlotTrace`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TracePoint {
    /// The step.
    pub step: u64,
    /// The amax of the step; 0 under a history of length 1, which keeps none.
    pub amax: f32,
    /// The scale after the step. `None` if each row or block of the tensor has a scale of its own.
    pub scale: Option<f32>,
    /// The number of values that were counted.
    pub elements: u64,
    /// The number of finite values that rounded beyond the format's largest value.
    pub saturated: u64,
    /// The number of values other than 0 that became 0.
    pub underflowed: u64,
    /// The number of NaN values.
    pub nan: u64,
    /// The signal-to-quantization-noise ratio in decibels, if it was measured: see [`SlotReport::sqnr`].
    pub sqnr: Option<f64>,
    /// The blocks in NVFP4, if they were measured: see [`SlotReport::nvfp4`].
    pub nvfp4: Option<Nvfp4Report>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    elements: u64,
    saturated: u64,
    underflowed: u64,
    nan: u64,
}

impl Counts {
    fn of(report: &SlotReport) -> Self {
        let SlotReport { elements, saturated, underflowed, nan, .. } = *report;
        Self { elements, saturated, underflowed, nan }
    }

    /// Returns what was counted since `earlier`.
    const fn since(self, earlier: Self) -> Self {
        Self {
            elements: self.elements.saturating_sub(earlier.elements),
            saturated: self.saturated.saturating_sub(earlier.saturated),
            underflowed: self.underflowed.saturating_sub(earlier.underflowed),
            nan: self.nan.saturating_sub(earlier.nan),
        }
    }
}

impl SlotTrace {
    /// Creates a trace that keeps the last `steps` steps of each slot.
    pub const fn new(steps: usize) -> Self {
        Self { capacity: steps, series: Vec::new(), resets: 0 }
    }

    /// Records the slots that have run since the last call, as `step`. It reads all slots, so on a GPU it waits for the step.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn record(&mut self, step: u64, scaling: &Scaling) -> Result<()> {
        let reports = scaling.slot_reports()?;
        if self.resets != scaling.counting().resets() {
            self.resets = scaling.counting().resets();
            self.series.iter_mut().for_each(|series| series.seen = Counts::default());
        }
        for report in reports {
            let SlotReport { name, direction, recipe, .. } = &report;
            let known =
                self.series.iter().position(|series| (&series.name, &series.recipe) == (name, recipe));
            let series = match known {
                Some(position) => &mut self.series[position],
                None if report.elements == 0 => continue,
                None => {
                    self.series.push(SlotSeries {
                        name: name.clone(),
                        direction: *direction,
                        recipe: recipe.clone(),
                        fp8_max: scaling.fp8_max(recipe, *direction),
                        scales: scaling.scale_source(&report),
                        points: VecDeque::new(),
                        seen: Counts::default(),
                    });
                    let last = self.series.len() - 1;
                    &mut self.series[last]
                }
            };
            let counts = Counts::of(&report);
            let Counts { elements, saturated, underflowed, nan } = counts.since(series.seen);
            series.seen = counts;
            if elements == 0 || self.capacity == 0 {
                continue;
            }
            if series.points.len() == self.capacity {
                series.points.pop_front();
            }
            let scale = (series.scales != ScaleSource::RowsOrBlocks).then_some(report.scale);
            let SlotReport { amax, sqnr, nvfp4, .. } = report;
            series.points.push_back(TracePoint {
                step,
                amax,
                scale,
                elements,
                saturated,
                underflowed,
                nan,
                sqnr,
                nvfp4,
            });
        }
        Ok(())
    }

    /// Returns the slots that have run, in the order of the reports.
    pub fn series(&self) -> &[SlotSeries] {
        &self.series
    }

    /// Returns all points as CSV, with a line of column names: `step`, `slot`, `direction`, `recipe`, `amax`, `scale`,
    /// `elements`, `saturated`, `underflowed`, `nan`, `sqnr`. If a slot ran in NVFP4, `blocks`, `lost_blocks`, `saturated_blocks`,
    /// `nan_blocks`, `infinite_blocks`, `mxfp8_sqnr` and `fp8_sqnr` follow. Names with commas or quotes are quoted. A number that there is
    /// none of leaves its field empty.
    pub fn to_csv(&self) -> String {
        let has_nvfp4 = self.series.iter().any(SlotSeries::is_nvfp4);
        let mut csv =
            String::from("step,slot,direction,recipe,amax,scale,elements,saturated,underflowed,nan,sqnr");
        if has_nvfp4 {
            NVFP4_COLUMNS.iter().for_each(|(name, _)| csv.extend([",", name]));
        }
        csv.push('\n');
        for SlotSeries { name, direction, recipe, points, .. } in &self.series {
            let [name, recipe] = [name.to_string(), recipe.to_string()].map(csv_field);
            for point in points {
                let TracePoint { step, amax, elements, saturated, underflowed, nan, .. } = point;
                let scale = point.scale.map(|scale| scale.to_string()).unwrap_or_default();
                let sqnr = point.sqnr.map(|sqnr| format!("{sqnr:.3}")).unwrap_or_default();
                let counts = format!("{elements},{saturated},{underflowed},{nan}");
                let _ = write!(csv, "{step},{name},{direction},{recipe},{amax},{scale},{counts},{sqnr}");
                for (_, column) in NVFP4_COLUMNS.iter().filter(|_| has_nvfp4) {
                    let number = point.nvfp4.as_ref().and_then(column).map(|number| match number.fract() {
                        0.0 => number.to_string(),
                        _ => format!("{number:.3}"),
                    });
                    csv.extend([",", &number.unwrap_or_default()]);
                }
                csv.push('\n');
            }
        }
        csv
    }

    /// Returns all points as JSON: a list of slots, each with its `slot`, `direction`, `recipe`, and one list for each column.
    /// Slots in NVFP4 have the columns that [`to_csv`](Self::to_csv) lists last, too. Numbers that are not finite are `null`, and so is
    /// a number that there is none of.
    pub fn to_json(&self) -> String {
        let slots = self.series.iter().map(|series| {
            let column = |name: &str, value: &dyn Fn(&TracePoint) -> String| {
                let values: Vec<String> = series.points.iter().map(value).collect();
                format!("\"{name}\":[{}]", values.join(","))
            };
            let number = |value: f64| if value.is_finite() { value.to_string() } else { "null".to_owned() };
            // An f32 as it is, with the digits that it needs.
            let short = |value: f32| if value.is_finite() { value.to_string() } else { "null".to_owned() };
            let null = || "null".to_owned();
            let mut columns = vec![
                column("step", &|point| point.step.to_string()),
                column("amax", &|point| short(point.amax)),
                column("scale", &|point| point.scale.map_or_else(null, short)),
                column("elements", &|point| point.elements.to_string()),
                column("saturated", &|point| point.saturated.to_string()),
                column("underflowed", &|point| point.underflowed.to_string()),
                column("nan", &|point| point.nan.to_string()),
                column("sqnr", &|point| point.sqnr.map_or_else(null, number)),
            ];
            for (name, of) in NVFP4_COLUMNS.iter().filter(|_| series.is_nvfp4()) {
                columns
                    .push(column(name, &|point| point.nvfp4.as_ref().and_then(of).map_or_else(null, number)));
            }
            format!(
                "{{\"slot\":{},\"direction\":\"{}\",\"recipe\":{},{}}}",
                json_text(&series.name),
                series.direction,
                json_text(&series.recipe.to_string()),
                columns.join(",")
            )
        });
        format!("[{}]", slots.collect::<Vec<_>>().join(","))
    }
}

impl SlotSeries {
    /// Returns whether its codes have 4 bits.
    pub(crate) fn is_nvfp4(&self) -> bool {
        self.fp8_max == Encoding::E2M1.max()
    }
}

/// The columns of slots in NVFP4: the name of each, and its number.
#[expect(clippy::type_complexity, reason = "a name and a function")]
const NVFP4_COLUMNS: [(&str, fn(&Nvfp4Report) -> Option<f64>); 7] = [
    ("blocks", |report| Some(report.blocks as f64)),
    ("lost_blocks", |report| Some(report.lost as f64)),
    ("saturated_blocks", |report| Some(report.saturated as f64)),
    ("nan_blocks", |report| Some(report.nan as f64)),
    ("infinite_blocks", |report| Some(report.infinite as f64)),
    ("mxfp8_sqnr", |report| report.mxfp8_sqnr),
    ("fp8_sqnr", |report| report.fp8_sqnr),
];

#[cfg(test)]
impl SlotTrace {
    /// A trace of one slot with these points.
    pub(crate) fn of_points(
        name: &str,
        recipe: &str,
        fp8_max: f32,
        scales: ScaleSource,
        points: Vec<TracePoint>,
    ) -> Self {
        let series = SlotSeries {
            name: name.into(),
            direction: Direction::Forward,
            recipe: RecipeLabel::new(recipe, None),
            fp8_max,
            scales,
            points: points.into(),
            seen: Counts::default(),
        };
        Self { capacity: 100, series: vec![series], resets: 0 }
    }
}

impl Scaling {
    /// Returns the largest value of the slots of a pass under a recipe that has been used.
    fn fp8_max(&self, recipe: &RecipeLabel, direction: Direction) -> f32 {
        let domain = self.domains().iter().find(|domain| domain.label() == *recipe);
        domain.map_or(f32::NAN, |domain| domain.encodings[direction].max())
    }

    /// Returns where the scales of a slot come from.
    fn scale_source(&self, report: &SlotReport) -> ScaleSource {
        let mut domains = self.domains().iter().filter(|domain| domain.label() == report.recipe);
        domains.next().map_or(ScaleSource::Past, |domain| domain.scale_source(report.role))
    }
}

fn csv_field(text: String) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

fn json_text(text: &str) -> String {
    let mut json = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(json, "\\u{:04x}", u32::from(c));
            }
            c => json.push(c),
        }
    }
    json + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_numbers_that_are_not_finite_are_null() {
        let point = TracePoint {
            step: 3,
            amax: f32::INFINITY,
            scale: Some(0.5),
            elements: 9,
            saturated: 1,
            underflowed: 2,
            nan: 4,
            sqnr: Some(31.25),
            nvfp4: None,
        };
        let blocks = TracePoint { step: 4, amax: 2.0, scale: None, sqnr: None, ..point };
        let points = vec![point, blocks];
        let trace = SlotTrace::of_points("a\"b\\c\nd", "x(,y", 448.0, ScaleSource::Past, points);
        assert_eq!(
            trace.to_csv().lines().skip(1).collect::<Vec<_>>().join("|"),
            "3,\"a\"\"b\\c|d\",forward,\"x(,y\",inf,0.5,9,1,2,4,31.250|4,\"a\"\"b\\c|d\",forward,\"x(,y\",2,,9,1,2,4,"
        );
        assert_eq!(
            trace.to_json(),
            "[{\"slot\":\"a\\\"b\\\\c\\u000ad\",\"direction\":\"forward\",\"recipe\":\"x(,y\",\"step\":[3,4],\"amax\":[null,2],\
             \"scale\":[0.5,null],\"elements\":[9,9],\"saturated\":[1,1],\"underflowed\":[2,2],\"nan\":[4,4],\
             \"sqnr\":[31.25,null]}]"
        );
    }
}
