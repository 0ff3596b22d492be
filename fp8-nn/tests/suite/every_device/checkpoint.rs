//! Training resumed from a checkpoint has the bits of training that was never interrupted.

use super::support::{
    ParameterBits, bits, block_options, delayed, device, error, everything, noise, off, recipes, rng, short,
    step, unless_simulated,
};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) struct Job {
    pub(crate) model: TransformerLayer,
    pub(crate) optimizer: AdamW,
    pub(crate) scaling: Scaling,
}

impl Job {
    pub(crate) fn new(seed: u64, params_dtype: DType, options: AdamWOptions) -> Self {
        let layer = TransformerLayerOptions { params_dtype, ..block_options() };
        let model = TransformerLayer::new("block", layer, &device(), &mut rng(seed)).unwrap();
        let scaling = Scaling::new(&model, &device()).unwrap();
        Self { model, optimizer: AdamW::new(options).unwrap(), scaling }
    }

    fn run(
        &mut self,
        recipe: &Recipe,
        options: &AutocastOptions,
        steps: std::ops::Range<u64>,
    ) -> Vec<Vec<u32>> {
        let mut out = Vec::new();
        for i in steps {
            let (x, dy) = (noise([2, 6, 32], i), noise([2, 6, 32], 100 + i));
            let (y, dx) = step(&mut self.scaling, recipe, options, &mut self.model, &x, &dy).unwrap();
            out.extend([bits(&y), bits(&dx)]);
            self.optimizer.step(&mut self.model, 0.01).unwrap();
            fp8_nn::zero_grad(&mut self.model).unwrap();
        }
        out
    }

    fn save(&self, dir: &Path) -> Result<()> {
        let metadata = BTreeMap::from([("note".to_owned(), "ten ≤ steps".to_owned())]);
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &metadata)
    }

    fn load(&mut self, dir: &Path) -> Result<BTreeMap<String, String>> {
        let loaded = checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling);
        loaded.map(|loaded| loaded.metadata)
    }

    fn everything(&self) -> (ParameterBits, ScalingState, u64) {
        let (parameters, state) = everything(&self.model, &self.scaling);
        (parameters, state, self.optimizer.steps())
    }
}

#[test]
fn resuming_is_exact() {
    let options = AutocastOptions::default;
    let bf16 = || AutocastOptions { compute_dtype: Some(DType::BF16), ..options() };
    let one_row: Recipe = DelayedScaling { amax_history_len: 1, ..Default::default() }.into();
    let every_recipe = recipes().into_iter().map(|recipe| (recipe, options(), DType::F32));
    let cases = [
        (DelayedScaling::default().into(), options(), DType::F32),
        (DelayedScaling { interval: 3, ..short() }.into(), options(), DType::F32),
        (short().with_te_rules().into(), options(), DType::F32),
        (one_row, options(), DType::F32),
        (delayed(), off(), DType::F32),
        (delayed(), bf16(), DType::BF16),
        (delayed(), bf16(), DType::F32),
    ];
    for (recipe, options, dtype) in every_recipe.chain(cases) {
        for main_params in unless_simulated(vec![true, false], vec![dtype != DType::BF16]) {
            let adamw = AdamWOptions { main_params, ..Default::default() };
            let dir = tempfile::tempdir().unwrap();
            let mut job = Job::new(1, dtype, adamw.clone());
            let steps = unless_simulated(5, 2);
            job.run(&recipe, &options, 0..steps);
            job.save(dir.path()).unwrap();
            let mut resumed = Job::new(2, dtype, adamw);
            let metadata = resumed.load(dir.path()).unwrap();
            assert_eq!(metadata["note"], "ten ≤ steps");
            assert_eq!(metadata, checkpoint::metadata(dir.path()).unwrap());
            assert!(job.everything() == resumed.everything(), "{recipe:?}: loaded");
            let (went_on, resumed_from) = (
                job.run(&recipe, &options, steps..2 * steps),
                resumed.run(&recipe, &options, steps..2 * steps),
            );
            assert!(went_on == resumed_from, "{recipe:?} {dtype}: outputs");
            assert!(job.everything() == resumed.everything(), "{recipe:?} {dtype}: state");
        }
    }
}

#[test]
fn a_running_job_goes_back_to_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let mut job = Job::new(1, DType::F32, AdamWOptions::default());
    job.run(&delayed(), &AutocastOptions::default(), 0..3);
    job.save(dir.path()).unwrap();
    let first = job.run(&delayed(), &AutocastOptions::default(), 3..6);
    job.load(dir.path()).unwrap();
    assert!(first == job.run(&delayed(), &AutocastOptions::default(), 3..6));
}

/// Saves as versions did that kept no order of updates.
fn without_last_updates(dir: &Path) {
    let path = checkpoint::path(dir);
    let file = std::fs::read(&path).unwrap();
    let (len, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let scaling = &mut header["__metadata__"]["fp8.scaling"];
    let mut arenas: serde_json::Value = serde_json::from_str(scaling.as_str().unwrap()).unwrap();
    for arena in arenas.as_array_mut().unwrap() {
        arena.as_object_mut().unwrap().remove("last_updates").unwrap();
    }
    *scaling = arenas.to_string().into();
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let len = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&len[..], &header, data].concat()).unwrap();
}

#[test]
fn training_goes_on_from_a_checkpoint_with_another_recipe() {
    let margin = |margin| Recipe::from(DelayedScaling { margin, ..short() });
    let options = AutocastOptions::default();
    let dir = tempfile::tempdir().unwrap();
    let mut job = Job::new(1, DType::F32, AdamWOptions::default());
    job.run(&margin(0), &options, 0..3);
    job.save(dir.path()).unwrap();
    let went_on = job.run(&margin(1), &options, 3..5);
    for is_old in [false, true] {
        if is_old {
            without_last_updates(dir.path());
        }
        let mut resumed = Job::new(2, DType::F32, AdamWOptions::default());
        resumed.scaling.prepare(&margin(1), &options).unwrap();
        let Job { model, optimizer, scaling } = &mut resumed;
        let report = checkpoint::load(dir.path(), model, optimizer, scaling).unwrap().scaling;
        assert!(report.taken_over.is_empty() && report.unused.is_empty() && !report.is_plain(), "{report}");
        assert!(
            report.recomputed.iter().any(|slot| &*slot.slot == "block.attention.qkv.input"),
            "{report:?}"
        );
        assert!(report.to_string().contains("(margin=0 → margin=1)"), "{report}");
        assert!(went_on == resumed.run(&margin(1), &options, 3..5), "old file: {is_old}");
    }
    let mut same = Job::new(3, DType::F32, AdamWOptions::default());
    same.scaling.prepare(&margin(0), &options).unwrap();
    let Job { model, optimizer, scaling } = &mut same;
    let report = checkpoint::load(dir.path(), model, optimizer, scaling).unwrap().scaling;
    assert!(report.is_plain() && !report.taken_over.is_empty(), "{report}");
}

#[test]
fn a_loaded_state_that_no_scope_has_used_is_saved_again() {
    let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut job = Job::new(1, DType::F32, AdamWOptions::default());
    job.run(&delayed(), &AutocastOptions::default(), 0..3);
    job.save(first.path()).unwrap();
    let mut other = Job::new(2, DType::F32, AdamWOptions::default());
    other.load(first.path()).unwrap();
    other.save(second.path()).unwrap();
    let mut third = Job::new(3, DType::F32, AdamWOptions::default());
    third.load(second.path()).unwrap();
    assert!(job.everything() == third.everything());
}

#[test]
fn a_checkpoint_before_the_first_step_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut job = Job::new(1, DType::BF16, AdamWOptions::default());
    job.save(&dir.path().join("made/on/the/way")).unwrap();
    let mut resumed = Job::new(2, DType::BF16, AdamWOptions::default());
    resumed.load(&dir.path().join("made/on/the/way")).unwrap();
    let options = AutocastOptions { compute_dtype: Some(DType::BF16), ..Default::default() };
    assert!(job.run(&delayed(), &options, 0..2) == resumed.run(&delayed(), &options, 0..2));
}

#[test]
fn the_optimizer_keeps_its_f32_copies_or_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let options = AutocastOptions { compute_dtype: Some(DType::BF16), ..Default::default() };
    for main_params in [true, false] {
        let mut job = Job::new(1, DType::BF16, AdamWOptions { main_params, ..Default::default() });
        job.run(&delayed(), &options, 0..1);
        job.save(dir.path()).unwrap();
        let mut other =
            Job::new(1, DType::BF16, AdamWOptions { main_params: !main_params, ..Default::default() });
        let refused = error(other.load(dir.path()));
        let (has, wants) = if main_params { ("an", "no") } else { ("no", "an") };
        let expected = format!("has {has} f32 copy in the optimizer, this one wants {wants}");
        assert!(refused.contains(&expected) && refused.contains("main_params"), "{refused}");
    }
}

#[test]
fn parameters_alone_go_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for dtype in [DType::F32, DType::BF16] {
        let job = Job::new(1, dtype, AdamWOptions::default());
        let mut other = Job::new(2, dtype, AdamWOptions::default());
        checkpoint::save_parameters(&path, &job.model).unwrap();
        checkpoint::load_parameters(&path, &mut other.model).unwrap();
        assert!(job.everything() == other.everything());
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        let mut names: Vec<_> = header.tensors().keys().cloned().collect();
        names.sort();
        let mut expected: Vec<_> = parameters(&job.model).iter().map(|p| p.name().to_string()).collect();
        expected.sort();
        assert_eq!(names, expected);
    }
    let mut f32s = Job::new(2, DType::F32, AdamWOptions::default());
    let refused = error(checkpoint::load_parameters(&path, &mut f32s.model));
    assert!(
        refused
            .ends_with("is BF16: expected f32, as in this model; make it with the options it was saved with"),
        "{refused}"
    );
}
