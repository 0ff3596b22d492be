//! Whole jobs, with a trainer that has no model.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::train::fake::{BAD_BATCHES, Fake};
use crate::train::options::parse;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("text"), "fn main() { let x = 1; }\n".repeat(200)).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// Runs with the report in folder `report`; `@` in the options stands for this place.
    fn run_with(&self, report: &str, options: &str, interrupt: bool) -> Result<String, Failure> {
        let at = self.0.path().display().to_string();
        let line = format!("--quiet --report-dir @/{report} {options}").replace('@', &at);
        let (options, given) = parse(line.split_whitespace())?;
        let config = Config::new::<Fake>(options, &given)?;
        let mut out = Vec::new();
        run::<Fake>(&config, &AtomicBool::new(interrupt), &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    fn run(&self, report: &str, options: &str) -> Result<String, Failure> {
        self.run_with(report, &format!("--text @/text {options}"), false)
    }

    /// (run, step, loss) of each line of a steps.csv.
    fn losses(&self, report: &str) -> Vec<String> {
        let csv = fs::read_to_string(self.path(report).join("steps.csv")).unwrap();
        csv.lines().skip(1).map(|line| line.splitn(4, ',').take(3).collect::<Vec<_>>().join(",")).collect()
    }

    fn summary(&self, report: &str) -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(self.path(report).join("summary.json")).unwrap()).unwrap()
    }
}

#[test]
fn a_job_leaves_three_files() {
    let place = Place::new();
    let out = place.run("r", "--steps 40 --sample 30").unwrap();
    assert!(out.contains("held-out loss") && out.contains("The FP8 model continues:"), "{out}");
    let mut files: Vec<String> = fs::read_dir(place.path("r"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, summary::FILES);
    assert_eq!(place.losses("r").len(), 80);
    let summary = place.summary("r");
    assert_eq!(summary["steps"], 40);
    assert_eq!(summary["tokens"], 40 * 12 * 64);
    assert_eq!(summary["fp8_gemms_per_step"], 48);
    assert_eq!(summary["emulated_gemms_per_step"][0][1], 16);
    for field in ["heldout_loss", "median_step_ms", "tokens_per_s"] {
        assert!(summary[field]["high_precision"].is_f64() && summary[field]["fp8"].is_f64(), "{field}");
    }
    let html = fs::read_to_string(place.path("r").join("report.html")).unwrap();
    assert_eq!(html.matches("<svg").count(), 19, "eight charts, a strip of two rows and nine heat maps");
    for title in [
        "Loss",
        "Gradient norm",
        "Learning rate",
        "Saturation",
        "Underflow",
        "Amax",
        "Scale",
        "Saturation by layer and step",
        "Underflow by layer and step",
        "Amax by layer and step",
        "Run",
        "Options",
    ] {
        assert!(html.contains(&format!("<h2>{title}</h2>")), "{title}");
    }
    assert!(html.contains("% held-out loss in FP8") && html.contains("−0.14 % and +0.18 %"));
    assert!(html.contains("high precision, validation"));
    let origin = crate::train::machine::Origin::here();
    assert!(html.contains(&origin.date[..10]) && html.contains(&crate::page::escape(&origin.cpu)));
    assert!(html.contains("<tr><th>--steps</th><td>40</td><td>command line</td></tr>"));
    assert!(html.contains("<tr><th>--layers</th><td>4</td><td>default</td></tr>"));
    assert!(!html.contains("http") && !html.contains("src="), "the page needs nothing else");
}

#[test]
fn a_sample_of_any_length_fits_any_context() {
    let place = Place::new();
    for seq in [1, 2, 3, 64] {
        for sample in [1, 2, 33, 34, 200] {
            let options = format!("--steps 2 --recipe none --seq {seq} --sample {sample}");
            let out = place.run("r", &options).unwrap();
            let html = fs::read_to_string(place.path("r").join("report.html")).unwrap();
            assert!(out.contains("model continues:") && html.contains("grey text"), "{seq}, {sample}: {out}");
        }
    }
}

#[test]
fn without_a_recipe_the_fields_of_fp8_are_null() {
    let place = Place::new();
    place.run("r", "--steps 4 --recipe none --sample 0").unwrap();
    let summary = place.summary("r");
    assert_eq!(summary["recipe"], "none");
    assert!(summary["fp8_gemms_per_step"].is_null());
    assert!(summary["heldout_loss"]["fp8"].is_null() && summary["heldout_loss"]["high_precision"].is_f64());
    assert!(place.losses("r").iter().all(|line| line.starts_with("high_precision,")));
}

#[test]
fn a_resumed_job_goes_on_as_if_never_stopped() {
    let place = Place::new();
    let shape = "--steps 12 --layers 2 --batch 4 --seed 5 --lr 1e-2 --sample 0";
    place.run("whole", shape).unwrap();
    place.run("first", &format!("{shape} --stop-after 5 --save @/ck")).unwrap();
    place.run_with("second", "--resume @/ck --sample 0 --lr 0.01", false).unwrap();
    let mut parts = [place.losses("first"), place.losses("second")].concat();
    let mut whole = place.losses("whole");
    parts.sort();
    whole.sort();
    assert_eq!(parts, whole);
    assert_eq!(place.summary("first")["steps"], 5);
    assert_eq!(place.summary("first")["total_steps"], 12);
    assert_eq!(place.summary("second")["heldout_loss"], place.summary("whole")["heldout_loss"]);
}

#[test]
fn a_resumed_job_has_the_recipe_of_its_checkpoint() {
    let place = Place::new();
    let file = |text: &str| fs::write(place.path("r.toml"), text).unwrap();
    file("recipe = \"current\"");
    let shape = "--steps 6 --sample 0 --recipe @/r.toml";
    place.run("first", &format!("{shape} --stop-after 3 --save @/ck")).unwrap();
    assert_eq!(place.summary("first")["recipe_toml"], "recipe = \"current\"");
    let html = fs::read_to_string(place.path("first/report.html")).unwrap();
    assert!(html.contains("r.toml, 48 FP8 matrix products in a step"), "the recipe's file is named");
    assert!(html.contains("in a step; 16 of them emulated: in another way."), "emulated products are named");
    assert!(html.contains("The training test has no trainings with this recipe"));
    file("recipe = \"delayed\"");
    let refused = place.run("second", "--resume @/ck --sample 0 --recipe @/r.toml").unwrap_err().to_string();
    assert!(refused.contains("r.toml: the file has changed since the checkpoint"), "{refused}");
    fs::remove_file(place.path("r.toml")).unwrap();
    place.run("second", "--resume @/ck --sample 0").unwrap();
    assert_eq!(place.summary("second")["recipe_toml"], "recipe = \"current\"");
}

#[test]
fn an_interrupted_job_can_be_resumed() {
    let place = Place::new();
    let shape = "--text @/text --steps 6 --sample 0";
    place.run_with("whole", shape, false).unwrap();
    let failure = place.run_with("cut", &format!("{shape} --save @/ck"), true).unwrap_err();
    assert_eq!(failure.code(), 130);
    assert!(failure.to_string().contains("after step 1 of the high precision training"), "{failure}");
    assert_eq!(place.losses("cut").len(), 1);
    assert!(failure.to_string().contains("report.html shows the steps until then"), "{failure}");
    let html = fs::read_to_string(place.path("cut/report.html")).unwrap();
    assert!(html.contains("Interrupted after step 1 of the high precision training"));
    assert_eq!(place.summary("cut")["steps"], 1);
    place.run_with("rest", "--resume @/ck --sample 0", false).unwrap();
    let whole: Vec<String> =
        place.losses("whole").into_iter().filter(|line| line != &place.losses("whole")[0]).collect();
    assert_eq!(place.losses("rest"), whole);
    let failure = place.run_with("cut", shape, true).unwrap_err();
    assert!(failure.to_string().contains("nothing is saved"), "{failure}");
}

#[test]
fn a_training_that_diverges_leaves_a_readable_report() {
    let place = Place::new();
    let failure = place.run("d", "--steps 40 --lr 1e5 --eval-every 1").unwrap_err();
    assert_eq!(failure.code(), 1);
    let text = failure.to_string();
    assert!(text.contains("of the high precision training: the loss is"), "{text}");
    assert!(text.ends_with("report.html shows the steps until then"), "{text}");
    let records = place.losses("d").len();
    assert!((2..40).contains(&records), "{records}");
    let html = fs::read_to_string(place.path("d/report.html")).unwrap();
    assert!(html.contains(&format!("High precision diverged at step {records}")));
    assert!(html.contains("the loss is not finite"));
    for wrong in ["=\"NaN", "NaN%", "inf%", "LNaN", "L-inf", "Linf"] {
        assert!(!html.contains(wrong), "{wrong}");
    }
    let summary = place.summary("d");
    assert_eq!(summary["result"], format!("High precision diverged at step {records}"));
    assert!(summary["fp8_heldout_loss_percent"].is_null() && summary["heldout_loss"]["fp8"].is_null());
}

#[test]
fn bad_batches_are_skipped_up_to_a_number_in_a_row() {
    let place = Place::new();
    let line = format!("--steps 12 --eval-every 1 --seed {BAD_BATCHES}");
    place.run("a", &line).unwrap();
    assert_eq!(place.losses("a").len(), 2 * 12);
    let summary = place.summary("a");
    assert_eq!(summary["skipped_steps"]["high_precision"], 2.0);
    assert_eq!(summary["skipped_steps"]["fp8"], 2.0);
    for (most, step) in [(1, 7), (0, 6)] {
        let failure = place.run("b", &format!("{line} --skip-non-finite {most}")).unwrap_err().to_string();
        let expected = format!("step {step} of the high precision training: the loss is NaN");
        assert!(failure.contains(&expected), "{failure}");
    }
    place.run("c", &format!("{line} --skip-non-finite 2")).unwrap();
}

#[test]
fn the_validation_loss_is_evaluated_as_often_as_asked() {
    let place = Place::new();
    let evaluated = |report: &str, options: &str| -> Vec<usize> {
        place.run(report, &format!("--steps 10 --recipe none --sample 0 {options}")).unwrap();
        let csv = fs::read_to_string(place.path(report).join("steps.csv")).unwrap();
        let steps = csv.lines().skip(1).filter(|line| !line.ends_with(','));
        steps.map(|line| line.split(',').nth(1).unwrap().parse().unwrap()).collect()
    };
    assert_eq!(evaluated("a", "--eval-every 4"), [4, 8, 10]);
    assert_eq!(evaluated("b", "--eval-every 0"), [] as [usize; 0]);
    assert_eq!(evaluated("c", ""), (1..=10).collect::<Vec<_>>());
    assert_eq!(evaluated("e", "--eval-every 99"), [10]);
    assert_eq!(place.losses("a"), place.losses("b"));
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let place = Place::new();
    place.run("first", "--steps 8 --stop-after 4 --save @/ck --sample 0").unwrap();
    fs::write(place.path("other"), "y".repeat(3000)).unwrap();
    let refused = |options: &str| {
        let failure = place.run_with("refused", options, false).unwrap_err();
        assert_eq!(failure.code(), 2, "{failure}");
        assert!(!place.path("refused").exists(), "{options}: nothing is left behind");
        failure.to_string()
    };
    for option in
        ["--hidden 64", "--layers 2", "--heads 8", "--seed 2", "--steps 16", "--recipe current", "--lr 0.5"]
    {
        assert!(
            refused(&format!("--resume @/ck {option}")).contains(&format!("{option} differs from")),
            "{option}"
        );
    }
    assert!(refused("--resume @/ck --text @/other").contains("is not the one"));
    assert!(refused("--resume @/none").contains("no folder high_precision/"));
    assert!(refused("--resume @/ck --stop-after 4").contains("nothing is left to train"));

    fs::write(place.path("ck/fp8/state"), "garbage").unwrap();
    assert!(refused("--resume @/ck").contains("state is corrupt"));
    fs::write(place.path("ck/fp8/metadata.json"), "{").unwrap();
    assert!(refused("--resume @/ck").contains("fp8"));
    place.run("second", "--steps 8 --stop-after 4 --save @/ck2 --seed 3 --sample 0").unwrap();
    copy(&place.path("ck2/fp8"), &place.path("ck/fp8"));
    assert!(refused("--resume @/ck").contains("from different trainings"));
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn bad_input_leaves_nothing_behind() {
    let place = Place::new();
    fs::write(place.path("file"), "x").unwrap();
    for options in ["--device cuda:0", "--seq 60000", "--text @/missing", "--save @/file"] {
        let failure = place.run_with(
            "r",
            &format!("--text @/text {options}").replace("--text @/text --text", "--text"),
            false,
        );
        assert_eq!(failure.unwrap_err().code(), 2, "{options}");
        assert!(
            !place.path("r").exists() || fs::read_dir(place.path("r")).unwrap().count() == 0,
            "{options}"
        );
    }
    assert_eq!(place.run("file", "").unwrap_err().code(), 2);
}
