//! The blocks and errors that reports show of slots in NVFP4, against counts by formulas of their own.

use super::support::{device, grad, input, scaling, weight};
use fp8_recipe::fp8_kernels::{Nvfp4Rule, Scale, Slot, Tensor, ops};
use fp8_recipe::{
    CurrentScaling, Encoding, Mxfp8, Nvfp4, Nvfp4Report, Recipe, Scaling, SlotName, SlotReport, SlotTrace,
};

const ROWS: usize = 96;
const COLS: usize = 70; // the last block of a row has 6 values

/// Random numbers in [0, 1).
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.next()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.next()).cos()
    }
}

fn normal(rows: usize, cols: usize) -> Vec<f32> {
    let mut random = Uniform(3);
    (0..rows * cols).map(|_| random.normal() as f32).collect()
}

/// Values whose blocks of `height` × 16 have magnitudes over 50 binades, up to 2²⁵.
fn binades(height: usize) -> Vec<f32> {
    let mut random = Uniform(5);
    let across = COLS.div_ceil(16);
    let bases: Vec<f64> =
        (0..ROWS.div_ceil(height) * across).map(|_| (50.0 * random.next() - 25.0).exp2()).collect();
    let value = |i: usize| {
        let (row, col) = (i / COLS, i % COLS);
        (bases[row / height * across + col / 16] * (2.0 * random.next() - 1.0)) as f32
    };
    (0..ROWS * COLS).map(value).collect()
}

/// The blocks that lose all values, and those that saturate. In units of the smallest scale, 2⁻⁹, the exact scale of a block is
/// r = 448 · 512 · amax / amax of the tensor. It is rounded to 0 up to r = 0.5. The largest code is 6 · r / round(r), which reaches 7 only
/// for r from 7/6 to 1.5, rounded to 1, and from 7/3 to 2.5, rounded to 2.
fn expected(values: &[f32], height: usize) -> (u64, u64, u64) {
    let amax_of = |values: &[f32]| values.iter().fold(0.0f64, |amax, value| amax.max(f64::from(value.abs())));
    let amax = amax_of(values);
    let (mut blocks, mut lost, mut saturated) = (0, 0, 0);
    for row in (0..ROWS).step_by(height) {
        for col in (0..COLS).step_by(16) {
            let rows = row..(row + height).min(ROWS);
            let block: Vec<f32> = rows
                .flat_map(|row| (col..(col + 16).min(COLS)).map(move |col| row * COLS + col))
                .map(|at| values[at])
                .collect();
            let r = 448.0 * 512.0 * amax_of(&block) / amax;
            for edge in [0.5, 7.0 / 6.0, 1.5, 7.0 / 3.0, 2.5] {
                assert!((r / edge - 1.0).abs() > 1e-6, "{r} is too near to {edge}");
            }
            blocks += 1;
            lost += u64::from(r < 0.5);
            saturated += u64::from((7.0 / 6.0..1.5).contains(&r) || (7.0 / 3.0..2.5).contains(&r));
        }
    }
    (blocks, lost, saturated)
}

/// Quantizes and measures a tensor in a slot of `a`.
fn measure(scaling: &mut Scaling, recipe: &Recipe, slot: &SlotName, values: &[f32], cols: usize) {
    let x = Tensor::from_vec(values.to_vec(), [values.len() / cols, cols], &device()).unwrap();
    let mut cx = scaling.autocast(recipe).unwrap();
    if *slot == grad("a") {
        let origin = cx.origin(&input("a"));
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        let dy = ops::quantize(&x, &cx.slot(&origin, slot).unwrap()).unwrap();
        cx.measure_sqnr(&origin, slot, &x, &dy).unwrap();
        cx.commit().unwrap();
    } else {
        let operand = ops::quantize(&x, &cx.slot(slot).unwrap()).unwrap();
        cx.measure_sqnr(slot, &x, &operand).unwrap();
        cx.commit().unwrap();
    }
}

fn report(recipe: impl Into<Recipe>, slot: &SlotName, values: &[f32], cols: usize) -> SlotReport {
    let mut scaling = scaling(&["a"]);
    scaling.set_counting(true);
    scaling.set_measuring_sqnr(true);
    measure(&mut scaling, &recipe.into(), slot, values, cols);
    scaling.slot_reports().unwrap().into_iter().find(|report| report.name == *slot.name()).unwrap()
}

#[test]
fn blocks_over_fifty_binades_are_counted_exactly() {
    for (slot, height) in [(input("a"), 1), (grad("a"), 1), (weight("a"), 16)] {
        let values = binades(height);
        let found = report(Nvfp4::default(), &slot, &values, COLS);
        let (blocks, lost, saturated) = expected(&values, height);
        let nvfp4 = found.nvfp4.unwrap();
        assert_eq!((nvfp4.blocks, nvfp4.lost, nvfp4.saturated), (blocks, lost, saturated), "{found}");
        assert_eq!((nvfp4.nan, nvfp4.infinite), (0, 0));
        assert!(lost > 0 && (height > 1 || saturated > 0), "{found}");
        assert_eq!(found.encoding, Encoding::E2M1);
        // The counters of values, which the device keeps.
        assert_eq!((found.elements, found.saturated > 0), ((ROWS * COLS) as u64, saturated > 0), "{found}");
    }
}

#[test]
fn an_infinity_makes_small_blocks_vanish_and_shows() {
    let block = |first: f32, value: f32| [vec![first], vec![value; 15]].concat();
    let values =
        [block(f32::INFINITY, 1.0), block(0.005, 0.005), block(0.007, 0.007), block(0.0, 0.0)].concat();
    let found = report(Nvfp4::default(), &input("a"), &values, 64);
    let Nvfp4Report { blocks, lost, saturated, nan, infinite, .. } = found.nvfp4.unwrap();
    assert_eq!((blocks, lost, saturated, nan, infinite), (4, 1, 0, 0, 1), "{found}");
    let line = found.to_string();
    assert!(line.contains(", 4 blocks, 1 lost, 1 with infinities, SQNR "), "{line}");
    assert!(line.contains("1 amaxes not finite"), "{line}");
}

#[test]
fn a_nan_makes_a_block_nan_and_the_sqnr_is_that_of_the_others() {
    let values = [vec![f32::NAN], vec![3.0; 15], vec![6.0; 16]].concat();
    let found = report(Nvfp4::default(), &input("a"), &values, 32);
    let Nvfp4Report { blocks, lost, saturated, nan, infinite, .. } = found.nvfp4.unwrap();
    assert_eq!((blocks, lost, saturated, nan, infinite), (2, 0, 0, 1, 0), "{found}");
    // 6 has a code, so that the other block is exact but for the factor of the tensor.
    assert!(found.sqnr.is_some_and(|sqnr| sqnr > 100.0) && found.nan == 1, "{found}");
}

#[test]
fn an_amax_that_is_too_small_saturates_blocks() {
    let device = device();
    let x = Tensor::from_vec([vec![8.0f32; 16], vec![1.0; 16]].concat(), [1, 32], &device).unwrap();
    let amax = Tensor::from_vec(vec![1.0f32, 1.0], [2], &device).unwrap();
    let rule = Nvfp4Rule { amax: Some(&amax), ..Nvfp4Rule::default() };
    let slot = Slot { scale: Scale::Nvfp4(rule), ..Slot::off(Encoding::E2M1) };
    let mut scaling = scaling(&["a"]);
    scaling.set_counting(true);
    scaling.set_measuring_sqnr(true);
    let mut cx = scaling.autocast(&Nvfp4::default().into()).unwrap();
    cx.slot(&input("a")).unwrap();
    cx.measure_sqnr(&input("a"), &x, &ops::quantize(&x, &slot).unwrap()).unwrap();
    cx.commit().unwrap();
    let report = &scaling.slot_reports().unwrap()[0];
    let Nvfp4Report { blocks, lost, saturated, .. } = report.nvfp4.unwrap();
    assert_eq!((blocks, lost, saturated), (2, 0, 1), "{report}");
}

#[test]
fn normal_data_has_the_errors_of_its_formats() {
    let values = normal(128, 128);
    let near = |sqnr: Option<f64>, expected: f64| (sqnr.unwrap() - expected).abs() < 1.0;
    for (slot, own, fp8) in [(input("a"), 20.5, 31.5), (weight("a"), 18.5, 31.5), (grad("a"), 17.5, 25.5)] {
        let found = report(Nvfp4::default(), &slot, &values, 128);
        let nvfp4 = found.nvfp4.unwrap();
        assert!(
            near(found.sqnr, own) && near(nvfp4.mxfp8_sqnr, 31.5) && near(nvfp4.fp8_sqnr, fp8),
            "{found}"
        );
        assert_eq!((nvfp4.lost, nvfp4.saturated), (0, 0), "{found}");
        // The recipes themselves say the same.
        let of = |recipe: Recipe| report(recipe, &slot, &values, 128).sqnr;
        assert_eq!(nvfp4.mxfp8_sqnr, of(Mxfp8::default().into()));
        assert_eq!(nvfp4.fp8_sqnr, of(CurrentScaling::default().into()));
    }
}

#[test]
fn blocks_are_reported_only_for_nvfp4_and_only_where_they_were_measured() {
    let values = normal(4, 32);
    let fp8 = report(Mxfp8::default(), &input("a"), &values, 32);
    assert!(fp8.nvfp4.is_none() && !fp8.to_string().contains("blocks") && fp8.encoding == Encoding::E4M3);
    let (mut scaling, mut trace) = (scaling(&["a"]), SlotTrace::new(9));
    scaling.set_counting(true);
    for (step, measuring) in [(0, true), (1, false)] {
        scaling.set_measuring_sqnr(measuring);
        measure(&mut scaling, &Nvfp4::default().into(), &input("a"), &values, 32);
        trace.record(step, &scaling).unwrap();
        assert_eq!(scaling.slot_reports().unwrap()[0].nvfp4.is_some(), measuring);
    }
    let csv = trace.to_csv();
    let lines: Vec<&str> = csv.lines().collect();
    let columns = "blocks,lost_blocks,saturated_blocks,nan_blocks,infinite_blocks,mxfp8_sqnr,fp8_sqnr";
    assert!(lines[0].ends_with(&format!(",nan,sqnr,{columns}")), "{csv}");
    assert!(lines[1].contains(",8,0,0,0,0,3") && lines[2].ends_with(",0,,,,,,,,"), "{csv}");
    let json: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
    assert_eq!(json[0]["blocks"], serde_json::json!([8, null]));
    assert!(json[0]["mxfp8_sqnr"][0].as_f64().is_some_and(|sqnr| sqnr > 28.0), "{json}");
}

/// Advice for `a.input` after three measured steps.
fn advice(values: &[f32], cols: usize) -> Vec<String> {
    let (mut scaling, mut trace) = (scaling(&["a"]), SlotTrace::new(9));
    scaling.set_counting(true);
    scaling.set_measuring_sqnr(true);
    for step in 0..3 {
        measure(&mut scaling, &Nvfp4::default().into(), &input("a"), values, cols);
        trace.record(step, &scaling).unwrap();
    }
    trace.advice().iter().map(ToString::to_string).collect()
}

#[test]
fn advice_names_what_was_lost_and_the_recipes_that_help() {
    assert_eq!(advice(&normal(64, 64), 64), Vec::<String>::new());
    let instead = "leave its layer in high precision, or use MXFP8 for it, by name (pattern `a.*`)";
    // A token that is a million times larger than the others.
    let outlier: Vec<f32> =
        normal(16, 32).iter().enumerate().map(|(i, x)| if i < 32 { 1e6 * x } else { *x }).collect();
    assert_eq!(
        advice(&outlier, 32),
        [format!(
            "a.input (under nvfp4) lost 93.8 % of its blocks in 3 measured steps, because all of their values are below 1/458,752 \
             of the tensor's amax and became 0: {instead}"
        )]
    );
    // r is 1.3 in the second block.
    let subnormal = [vec![448.0 * 512.0 / 1.3; 16], vec![1.0; 16]].concat();
    assert_eq!(
        advice(&subnormal, 32),
        [format!(
            "a.input (under nvfp4) saturated values in 50.0 % of its blocks in 3 measured steps, because their values are below \
             1/28,672 of the tensor's amax, for which the scales of blocks are inexact: {instead}"
        )]
    );
    let infinite = [vec![f32::INFINITY; 16], vec![0.005; 16]].concat();
    assert_eq!(
        advice(&infinite, 32),
        [
            "a.input (under nvfp4) had infinite values in 3 of 3 measured steps, which make the factor of the tensor 1, and lost 50.0 % of \
          its blocks: no recipe helps; find the operation before it that makes them"
        ]
    );
    // One large value in each block.
    let spiky: Vec<f32> = (0..256).map(|i| if i % 16 == 0 { 1000.0 } else { 1.0 }).collect();
    assert_eq!(
        advice(&spiky, 64),
        [format!(
            "a.input (under nvfp4) underflowed 93.8 % of its values in the last 3 steps: values that share a scale span more than E2M1 \
             can hold; {instead}"
        )]
    );
    let nan = advice(&[f32::NAN; 16], 16);
    assert!(nan[0].contains("had NaN values in 3 of the last 3 steps: no recipe helps"), "{nan:?}");
}

#[test]
fn an_explanation_says_that_inputs_are_quantized_after_the_norm() {
    let scaling = scaling(&["a", "b"]);
    let recipe = Recipe::by_name([("b.*", Mxfp8::default().into())], Nvfp4::default());
    let explanation = scaling.explain(&recipe).unwrap();
    let after = "quantized from high precision, in which a norm or activation before it writes its output";
    let text = explanation.to_string();
    let lines = text.lines().filter(|line| !line.contains("is emulated")).map(|line| line.to_owned() + "\n");
    assert_eq!(
        lines.collect::<String>(),
        format!(
            "a: fprop, dgrad and wgrad run in NVFP4\n  input: nvfp4 (default): {after}\n  weight: nvfp4 (default)\n  \
             grad_output: nvfp4 (default): {after}\n\
             b: fprop, dgrad and wgrad run in FP8\n  input: mxfp8 (pattern `b.*`)\n  weight: mxfp8 (pattern `b.*`)\n  \
             grad_output: mxfp8 (pattern `b.*`)\n"
        )
    );
    assert_eq!(explanation.layers[0].slots[0].encoding, Some(Encoding::E2M1));
}
