//! Checks the SQNR of the codes of every layer's tensors, as the scope measures it.

use super::support::{bits, block, delayed, is_nvfp4, noise, parameter_bits, recipes};
use fp8_nn::fp8_recipe::Encoding;
use fp8_nn::prelude::*;

#[test]
fn every_slot_is_measured_under_every_recipe_and_no_bit_changes() {
    let (x, dy) = (noise([4, 16, 32], 2), noise([4, 16, 32], 3));
    let override_linear_precision = (false, true, false);
    let mixed = DelayedScaling { override_linear_precision, ..Default::default() };
    for recipe in recipes().into_iter().chain([mixed.into()]) {
        let run = |measuring| {
            let mut model = block("block", 1);
            let mut scaling = Scaling::new(&model, x.device()).unwrap();
            scaling.set_counting(true);
            scaling.set_measuring_sqnr(measuring);
            let mut cx = scaling.autocast(&recipe).unwrap();
            let (y, saved) = model.forward(&mut cx, &x).unwrap();
            cx.commit().unwrap();
            let mut cx = scaling.backward().unwrap();
            let dx = model.backward(&mut cx, saved, &dy).unwrap();
            cx.commit().unwrap();
            let reports = scaling.slot_reports().unwrap();
            (bits(&y), bits(&dx), parameter_bits(&model), reports)
        };
        let (measured, plain) = (run(true), run(false));
        assert!(plain.3.iter().all(|report| report.sqnr.is_none()));
        assert!((measured.0, measured.1, measured.2) == (plain.0, plain.1, plain.2), "{recipe:?}");
        let mut slots = 0;
        for report in measured.3.iter().filter(|report| report.elements > 0) {
            let sqnr = report.sqnr.unwrap_or_else(|| panic!("{recipe:?}: {report} was not measured"));
            let least = if is_nvfp4(&recipe) { 14.0 } else { 23.0 };
            assert!((least..40.0).contains(&sqnr), "{recipe:?}: {report}");
            assert_eq!(report.nvfp4.is_some(), report.encoding == Encoding::E2M1, "{recipe:?}: {report}");
            slots += 1;
        }
        assert!(slots >= 10, "{recipe:?}: {slots}"); // four Linears of three tensors; by_name leaves some out
    }
}

#[test]
fn an_sqnr_is_that_of_the_values_and_their_codes() {
    // 1.0625 is halfway between 1 and 1.125 and becomes 1; 448 has no error. The scale is 1.
    let x: Vec<f32> = (0..64).map(|i| if i == 0 { 448.0 } else { 1.0625 }).collect();
    let x = Tensor::from_vec(x, [2, 32], &super::support::device()).unwrap();
    let fc = super::support::linear("fc", 32, 16, 1);
    let mut scaling = Scaling::new(&fc, x.device()).unwrap();
    scaling.set_measuring_sqnr(true);
    let mut cx = scaling.autocast(&delayed()).unwrap();
    fc.forward(&mut cx, &x).unwrap();
    cx.commit().unwrap();
    let reports = scaling.slot_reports().unwrap();
    let input = reports.iter().find(|report| &*report.name == "fc.input").unwrap();
    let (signal, noise) = (448.0f64.powi(2) + 63.0 * 1.0625f64.powi(2), 63.0 * 0.0625f64.powi(2));
    assert!((input.sqnr.unwrap() - 10.0 * (signal / noise).log10()).abs() < 1e-9, "{input}");
}
