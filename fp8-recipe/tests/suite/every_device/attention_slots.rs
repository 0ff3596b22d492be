//! The slots of attention: used by recipes that run attention in FP8, and by no others.

use super::support::{device, tensor};
use fp8_recipe::fp8_kernels::ops;
use fp8_recipe::{DelayedScaling, Recipe, Scaling, SlotName, SlotRole, SlotUse, Slots};

/// A slot for each use.
struct Attention(Vec<SlotName>);

impl Slots for Attention {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.iter().for_each(f);
    }
}

const USES: [(&str, SlotUse); 4] = [
    ("dpa", SlotUse::Dpa),
    ("always", SlotUse::Always),
    ("either", SlotUse::DpaOrMha),
    ("mha", SlotUse::Mha),
];

#[test]
fn only_the_recipes_that_ask_for_them_use_and_report_them() {
    let attention =
        Attention(USES.map(|(name, of)| SlotName::of_attention(name, SlotRole::Input, of)).into());
    for ((fp8_dpa, fp8_mha), expected) in [
        ((false, false), vec!["always"]),
        ((true, false), vec!["always", "dpa", "either"]),
        ((false, true), vec!["always", "either", "mha"]),
        ((true, true), vec!["always", "either", "mha"]),
    ] {
        let recipe = Recipe::from(DelayedScaling { fp8_dpa, fp8_mha, ..Default::default() });
        let mut scaling = Scaling::new(&attention, &device()).unwrap();
        let mut cx = scaling.autocast(&recipe).unwrap();
        let mut used = Vec::new();
        for name in &attention.0 {
            let slot = cx.slot(name).unwrap();
            if !slot.is_off() {
                ops::quantize(&tensor(&[1.0, 2.0]), &slot).unwrap();
                used.push(name.layer().to_string());
            }
        }
        cx.commit().unwrap();
        used.sort();
        assert_eq!(used, expected, "{recipe}");
        let reports = scaling.slot_reports().unwrap();
        let mut reported: Vec<String> = reports
            .iter()
            .map(|report| report.name.to_string().trim_end_matches(".input").to_owned())
            .collect();
        reported.sort();
        reported.dedup();
        assert_eq!(reported, expected, "{recipe}");
    }
}
