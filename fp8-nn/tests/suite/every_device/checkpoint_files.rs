//! Files that are no checkpoint of this model: an error, no panic, and nothing changed.

use super::support::{bits, delayed, device, error, linear, noise, step, unless_simulated};
use fp8_nn::prelude::*;
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

struct Job {
    model: Linear,
    optimizer: AdamW,
    scaling: Scaling,
}

impl Job {
    fn new(seed: u64) -> Self {
        let mut model = linear("fc", 2, 3, seed);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let (x, dy) = (noise([4, 2], seed), noise([4, 3], seed + 1));
        step(&mut scaling, &delayed(), &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
        optimizer.step(&mut model, 0.1).unwrap();
        Self { model, optimizer, scaling }
    }

    fn save(&self, dir: &Path) -> Result<()> {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new())
    }

    fn load(&mut self, dir: &Path) -> Result<()> {
        checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling).map(drop)
    }

    /// Parameters, then what the optimizer holds as its next update shows, then the scaling state.
    fn fingerprint(&self) -> String {
        let dir = tempfile::tempdir().unwrap();
        self.save(dir.path()).unwrap();
        let bytes = std::fs::read(checkpoint::path(dir.path())).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut all: Vec<_> =
            tensors.iter().map(|(name, view)| format!("{name} {:?}", view.data())).collect();
        all.sort();
        format!("{all:?} {:?} {}", self.scaling.state().unwrap(), self.optimizer.steps())
    }

    /// Loads `bytes`, which must be refused and leave no trace.
    fn refuses(&mut self, dir: &Path, bytes: &[u8]) -> String {
        std::fs::write(checkpoint::path(dir), bytes).unwrap();
        let before =
            (bits(self.model.weight().tensor()), self.scaling.state().unwrap(), self.optimizer.steps());
        let refused = error(self.load(dir));
        assert!(
            before
                == (
                    bits(self.model.weight().tensor()),
                    self.scaling.state().unwrap(),
                    self.optimizer.steps()
                )
        );
        refused
    }
}

fn saved() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    Job::new(1).save(dir.path()).unwrap();
    std::fs::read(checkpoint::path(dir.path())).unwrap()
}

type Parts = (BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>, HashMap<String, String>);

/// The file with some of its parts changed.
fn edited(bytes: &[u8], edit: impl FnOnce(&mut Parts)) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let tensors =
        tensors.iter().map(|(name, v)| (name.to_owned(), (v.dtype(), v.shape().to_vec(), v.data().to_vec())));
    let mut parts = (tensors.collect(), header.metadata().clone().unwrap());
    edit(&mut parts);
    let views = parts
        .0
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize(views, Some(parts.1.clone())).unwrap()
}

#[test]
fn every_truncation_is_refused() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    let before = job.fingerprint();
    for len in 0..bytes.len() {
        let refused = job.refuses(dir.path(), &bytes[..len]);
        assert!(
            refused.contains("checkpoint.safetensors: not a readable safetensors file"),
            "{len}: {refused}"
        );
        assert!(checkpoint::metadata(dir.path()).is_err());
    }
    assert_eq!(before, job.fingerprint());
    std::fs::write(checkpoint::path(dir.path()), &bytes).unwrap();
    job.load(dir.path()).unwrap();
}

#[test]
fn no_flipped_byte_of_the_header_makes_a_panic_or_half_a_load() {
    let (bytes, dir) = (saved(), tempfile::tempdir().unwrap());
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let flips = unless_simulated(vec![0x01, 0x10, 0x80], vec![0x10]);
    let mut refused = 0;
    let mut job = Job::new(2);
    for at in 0..header {
        for flip in &flips {
            let mut bad = bytes.clone();
            bad[at] ^= flip;
            std::fs::write(checkpoint::path(dir.path()), &bad).unwrap();
            let before =
                (bits(job.model.weight().tensor()), job.scaling.state().unwrap(), job.optimizer.steps());
            // Some flips make another valid file: of another optimizer step, for example.
            if job.load(dir.path()).is_err() {
                refused += 1;
                let after =
                    (bits(job.model.weight().tensor()), job.scaling.state().unwrap(), job.optimizer.steps());
                assert!(before == after, "byte {at}");
            }
        }
    }
    let all = header * flips.len();
    assert!(refused > all * 8 / 10, "{refused} of {all}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: unless_simulated(256, 48), failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_file_makes_a_panic(noise in prop::collection::vec(any::<u8>(), 0..400), at in 0usize..4000, cut in 0usize..5000) {
        let (mut bytes, dir) = (saved(), tempfile::tempdir().unwrap());
        let at = at % bytes.len();
        bytes.splice(at..(at + noise.len() / 2).min(bytes.len()), noise.iter().copied());
        bytes.truncate(cut.max(9));
        for bytes in [&bytes, &noise] {
            std::fs::write(checkpoint::path(dir.path()), bytes).unwrap();
            let _ = Job::new(2).load(dir.path());
            let _ = checkpoint::metadata(dir.path());
            let _ = checkpoint::load_parameters(&checkpoint::path(dir.path()), &mut linear("fc", 2, 3, 1));
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    let before = job.fingerprint();
    let mut refuses = |edit: fn(&mut Parts), expected: &str| {
        let refused = job.refuses(dir.path(), &edited(&bytes, edit));
        assert!(refused.contains(expected), "{refused}");
    };
    let reshape = |parts: &mut Parts| parts.0.get_mut("model.fc.weight").unwrap().1 = vec![2, 3];
    refuses(
        reshape,
        "`model.fc.weight` has shape [2, 3]: expected [3, 2], as in this model; make it with the options it was saved with",
    );
    let retype = |parts: &mut Parts| parts.0.get_mut("model.fc.bias").unwrap().0 = Dtype::I32;
    refuses(
        retype,
        "`model.fc.bias` is I32: expected f32, as in this model; make it with the options it was saved with",
    );
    refuses(|parts| drop(parts.0.remove("model.fc.bias")), "it has no tensor `model.fc.bias`");
    refuses(|parts| drop(parts.0.remove("scaling.0.scale")), "tensor `scaling.0.scale` is missing");
    refuses(
        |parts| drop(parts.0.remove("optimizer.fc.bias.exp_avg")),
        "only one of `fc.bias`'s two moments is there",
    );
    let stranger = |parts: &mut Parts| drop(parts.0.insert("x".into(), (Dtype::U8, vec![1], vec![0])));
    refuses(stranger, "tensor `x` has no place in this model");
    let history = |parts: &mut Parts| parts.0.get_mut("scaling.1.amax_history").unwrap().1 = vec![1, 3];
    refuses(history, "scaling.1: shapes [1, 3] and [1] for 1 slots");
    let scale = |parts: &mut Parts| {
        let data = &mut parts.0.get_mut("scaling.0.scale").unwrap().2;
        data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    };
    refuses(scale, "scale: NaN for `fc.input`: expected -1 (not calibrated)");
    let version = |parts: &mut Parts| drop(parts.1.insert("fp8.version".into(), "2".into()));
    refuses(version, "layout version 2; this library reads version 1");
    refuses(|parts| drop(parts.1.remove("fp8.version")), "a safetensors file, but not a training checkpoint");
    refuses(|parts| drop(parts.1.remove("fp8.scaling")), "metadata `fp8.scaling` is missing");
    refuses(
        |parts| drop(parts.1.insert("fp8.dropout".into(), "1 2 3".into())),
        "metadata `fp8.dropout`: \"1 2 3\": expected the seed and the number of scopes, two integers",
    );
    refuses(|parts| drop(parts.1.insert("fp8.dropout".into(), "-1 2".into())), "\"-1 2\": expected the seed");
    refuses(
        |parts| drop(parts.1.insert("fp8.scaling".into(), "[{}]".into())),
        "metadata `fp8.scaling`: missing field",
    );
    refuses(
        |parts| drop(parts.1.insert("fp8.optimizer.step".into(), "-1".into())),
        "metadata `fp8.optimizer.step` is -1: expected a number up to 9007199254740992",
    );
    let direction = |parts: &mut Parts| {
        let scaling = parts.1["fp8.scaling"].replace("backward", "sideways");
        parts.1.insert("fp8.scaling".into(), scaling);
    };
    refuses(direction, "unknown direction `sideways`");
    let slots = |parts: &mut Parts| {
        let scaling = parts.1["fp8.scaling"].replace("fc.input", "fd.input");
        parts.1.insert("fp8.scaling".into(), scaling);
    };
    refuses(slots, "slots: it has `fd.input` where this model has `fc.input`");
    assert_eq!(before, job.fingerprint());
}

#[test]
fn a_parameter_without_moments_is_refused_after_the_first_step() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    let refused = job.refuses(
        dir.path(),
        &edited(&bytes, |parts| parts.0.retain(|name, _| !name.starts_with("optimizer.fc.weight"))),
    );
    let expected = "the optimizer has taken 1 step, but `fc.weight` has no moments";
    assert!(refused.contains(expected), "{refused}");
    // Before the first step there are none.
    let fresh = edited(&bytes, |parts| {
        parts.0.retain(|name, _| !name.starts_with("optimizer."));
        parts.1.insert("fp8.optimizer.step".into(), "0".into());
    });
    std::fs::write(checkpoint::path(dir.path()), fresh).unwrap();
    job.load(dir.path()).unwrap();
    assert_eq!(job.optimizer.steps(), 0);
}

#[test]
fn only_parameters_that_the_file_lists_may_lack_moments() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    let listed = |list: &str| {
        edited(&bytes, |parts| {
            parts.0.retain(|name, _| !name.starts_with("optimizer.fc.weight"));
            parts.1.insert("fp8.optimizer.without_moments".into(), list.into());
        })
    };
    let refused = job.refuses(dir.path(), &listed(r#"["fc.bias","other"]"#));
    assert!(refused.contains("`fc.weight` has no moments"), "{refused}");
    for list in ["", "fc.weight", "{}", "[1]"] {
        let refused = job.refuses(dir.path(), &listed(list));
        let expected =
            format!("metadata `fp8.optimizer.without_moments` is {list}: expected a JSON list of names");
        assert!(refused.ends_with(&expected), "{refused}");
    }
    std::fs::write(checkpoint::path(dir.path()), listed(r#"["fc.weight"]"#)).unwrap();
    job.load(dir.path()).unwrap();
    job.optimizer.step(&mut job.model, 0.1).unwrap();
    assert_eq!(job.optimizer.steps(), 2);
}

#[test]
fn a_damaged_list_of_gradients_that_were_left_out_is_refused() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    for list in ["", "fc.weight", "{}", "[1]"] {
        let damaged =
            edited(&bytes, |parts| drop(parts.1.insert("fp8.without_gradients".into(), list.into())));
        let refused = job.refuses(dir.path(), &damaged);
        let expected = format!("metadata `fp8.without_gradients` is {list}: expected a JSON list of names");
        assert!(refused.ends_with(&expected), "{refused}");
    }
}

#[test]
fn step_counts_that_would_overflow_are_refused() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    for steps in ["18446744073709551615", "9223372036854775808", "9007199254740993"] {
        let refused = job.refuses(
            dir.path(),
            &edited(&bytes, |parts| drop(parts.1.insert("fp8.optimizer.step".into(), steps.into()))),
        );
        assert!(refused.contains(&format!("`fp8.optimizer.step` is {steps}")), "{refused}");
    }
}

#[test]
fn more_skipped_steps_than_steps_are_refused() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    let with = |skipped: &str| {
        edited(&bytes, |parts| drop(parts.1.insert("fp8.optimizer.skipped".into(), skipped.into())))
    };
    let refused = job.refuses(dir.path(), &with("2"));
    assert!(refused.contains("`fp8.optimizer.skipped` is 2: expected a number up to 1"), "{refused}");
    // Files of before have no such count.
    let without = edited(&bytes, |parts| drop(parts.1.remove("fp8.optimizer.skipped")));
    for (file, skipped) in [(with("1"), 1), (without, 0)] {
        std::fs::write(checkpoint::path(dir.path()), file).unwrap();
        job.load(dir.path()).unwrap();
        assert_eq!(job.optimizer.skipped_steps().unwrap(), skipped);
    }
}

#[test]
fn a_save_refuses_what_load_would_refuse() {
    let dir = tempfile::tempdir().unwrap();
    let mut job = Job::new(1);
    job.save(dir.path()).unwrap();
    let bytes = std::fs::read(checkpoint::path(dir.path())).unwrap();
    // One layer was trained, and two are saved.
    let two = Stack(vec![Box::new(linear("fc", 2, 3, 1)), Box::new(linear("head", 3, 2, 2))]);
    let refused = error(checkpoint::save(dir.path(), &two, &job.optimizer, &job.scaling, &BTreeMap::new()));
    assert!(refused.contains("taken 1 step, but `head.weight` has no moments"), "{refused}");
    let other = linear("other", 2, 3, 1);
    job.optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let refused =
        error(checkpoint::save(dir.path(), &other, &Job::new(1).optimizer, &job.scaling, &BTreeMap::new()));
    assert!(refused.contains("`other.weight` has no moments"), "{refused}");
    assert_eq!(bytes, std::fs::read(checkpoint::path(dir.path())).unwrap());
}

#[test]
fn a_file_is_laid_out_as_the_safetensors_library_does() {
    let bytes = saved();
    let (len, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let theirs = safetensors::serialize(tensors.iter(), header.metadata().clone()).unwrap();
    let (their_len, theirs_header) = SafeTensors::read_metadata(&theirs).unwrap();
    assert_eq!(header.offset_keys(), theirs_header.offset_keys());
    assert_eq!(bytes[8 + len..], theirs[8 + their_len..]);
    // Equal contents are equal bytes.
    assert_eq!(bytes, saved());
}

/// A file whose data are a hole: reading them would take minutes, or memory that is not there.
#[test]
fn metadata_are_read_without_the_data() {
    let (dir, huge) = (tempfile::tempdir().unwrap(), 1u64 << 40);
    let json = format!(
        "{{\"__metadata__\":{{\"fp8.version\":\"1\",\"user.note\":\"kept\"}},\
         \"x\":{{\"dtype\":\"U8\",\"shape\":[{huge}],\"data_offsets\":[0,{huge}]}}}}"
    );
    let file = std::fs::File::create(checkpoint::path(dir.path())).unwrap();
    let header = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    std::io::Write::write_all(&mut &file, &header).unwrap();
    if file.set_len(header.len() as u64 + huge).is_err() {
        file.set_len(header.len() as u64).unwrap(); // a file system without holes
        assert!(checkpoint::metadata(dir.path()).is_err());
        return;
    }
    assert_eq!(checkpoint::metadata(dir.path()).unwrap()["note"], "kept");
    let mut job = Job::new(1);
    assert!(error(job.load(dir.path())).contains("it has no tensor `model.fc.weight`"));
}

#[test]
fn headers_beyond_the_limit_are_refused() {
    let (dir, mut job) = (tempfile::tempdir().unwrap(), Job::new(2));
    let path = checkpoint::path(dir.path());
    for len in [100_000_001u64, 1 << 40, u64::MAX] {
        let file = std::fs::File::create(&path).unwrap();
        std::io::Write::write_all(&mut &file, &len.to_le_bytes()).unwrap();
        file.set_len(200_000_000).unwrap();
        let refused = error(job.load(dir.path()));
        assert!(refused.contains(&format!("a header of {len} bytes: at most 100000000 fit")), "{refused}");
    }
}

#[test]
fn a_name_that_occurs_twice_is_refused() {
    let (bytes, dir, mut job) = (saved(), tempfile::tempdir().unwrap(), Job::new(2));
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + len]).unwrap().trim_end();
    let bias = header.find("\"model.fc.bias\":").unwrap();
    let entry = &header[bias..=bias + header[bias..].find('}').unwrap()];
    for twice in [entry, "\"__metadata__\":{\"fp8.version\":\"1\"}"] {
        let header = format!("{{{twice},{}", &header[1..]);
        let bad = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + len..]].concat();
        let refused = job.refuses(dir.path(), &bad);
        assert!(refused.contains("not a readable safetensors file"), "{refused}");
    }
}

#[test]
fn files_that_are_not_there_are_named() {
    let (dir, mut job) = (tempfile::tempdir().unwrap(), Job::new(1));
    let missing = dir.path().join("nowhere");
    let refused = error(job.load(&missing));
    assert!(refused.starts_with(&format!("{}: ", checkpoint::path(&missing).display())), "{refused}");
    assert!(error(checkpoint::metadata(&missing)).contains("checkpoint.safetensors"));
    assert!(checkpoint::load_parameters(dir.path(), &mut job.model).is_err()); // a directory
}

#[test]
fn a_save_that_fails_leaves_the_old_file_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (Job::new(1), Job::new(2));
    // Where the directory should be stands a file.
    let file = dir.path().join("file");
    std::fs::write(&file, b"not a directory").unwrap();
    assert!(error(new.save(&file)).contains("checkpoint.safetensors: "));
    assert_eq!(std::fs::read(&file).unwrap(), b"not a directory");
    // Where the file should be stands a directory.
    let taken = dir.path().join("taken");
    std::fs::create_dir_all(checkpoint::path(&taken)).unwrap();
    assert!(new.save(&taken).is_err());
    assert_eq!(std::fs::read_dir(&taken).unwrap().count(), 1, "a temporary file is left");

    // A model that cannot be saved: nothing is written over the old one.
    let good = dir.path().join("good");
    old.save(&good).unwrap();
    let bytes = std::fs::read(checkpoint::path(&good)).unwrap();
    let twice = Stack(vec![Box::new(linear("a", 2, 2, 1)), Box::new(linear("a", 2, 2, 2))]);
    let refused = error(checkpoint::save(&good, &twice, &new.optimizer, &new.scaling, &BTreeMap::new()));
    assert_eq!(refused, "parameter `model.a.weight` occurs twice: give the two layers different paths");
    assert_eq!(bytes, std::fs::read(checkpoint::path(&good)).unwrap());
    new.save(&good).unwrap();
    assert_ne!(bytes, std::fs::read(checkpoint::path(&good)).unwrap());
    assert_eq!(std::fs::read_dir(&good).unwrap().count(), 1, "a temporary file is left");
}

#[cfg(unix)]
#[test]
fn a_checkpoint_has_the_permissions_of_other_files() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    Job::new(1).save(dir.path()).unwrap();
    let other = dir.path().join("other");
    std::fs::write(&other, b"").unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&checkpoint::path(dir.path())), mode(&other));
}

#[test]
fn an_optimizer_of_other_shapes_begins_anew_with_a_checkpoint_of_no_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = linear("fc", 4, 3, 1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut fresh = AdamW::new(AdamWOptions::default()).unwrap();
    checkpoint::save(dir.path(), &model, &fresh, &scaling, &BTreeMap::new()).unwrap();
    // It has trained parameters of these names, whose moments have other shapes.
    let mut used = Job::new(2).optimizer;
    checkpoint::load(dir.path(), &mut model, &mut used, &mut scaling).unwrap();
    assert_eq!(used.steps(), 0);
    used.step(&mut model, 0.1).unwrap();
    let mut other = linear("fc", 4, 3, 1);
    fresh.step(&mut other, 0.1).unwrap();
    assert_eq!(bits(model.weight().tensor()), bits(other.weight().tensor()));
}
