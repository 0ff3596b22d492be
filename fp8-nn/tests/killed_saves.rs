//! Programs that are killed while they save: the checkpoint is whole, and the next save removes what they left.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fp8_nn::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const FOLDER: &str = "FP8_TEST_SAVE_FOLDER";
/// Enough for a save to take a while.
const FEATURES: usize = 1024;
const KILLS: u64 = 6;

struct Job {
    model: Linear,
    optimizer: AdamW,
    scaling: Scaling,
}

impl Job {
    fn new(seed: u64) -> Self {
        let options = LinearOptions { in_features: FEATURES, out_features: FEATURES, ..Default::default() };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let model = Linear::new("fc", options, &Device::cpu(), &mut rng).unwrap();
        let scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        Self { model, optimizer: AdamW::new(AdamWOptions::default()).unwrap(), scaling }
    }

    fn save(&self, dir: &Path) {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new()).unwrap();
    }
}

/// Saves again and again, where it was started to do so.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let job = Job::new(1);
    loop {
        job.save(Path::new(&folder));
        writeln!(std::io::stderr(), "saved").unwrap();
    }
}

#[test]
fn a_save_removes_what_killed_saves_left() {
    let folder = tempfile::tempdir().unwrap();
    let mut left = 0;
    for kill in 0..KILLS {
        let mut saver = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(saver.stderr.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "saved"));
        std::thread::sleep(Duration::from_millis(3 + 7 * kill));
        saver.kill().unwrap();
        saver.wait().unwrap();
        left += std::fs::read_dir(folder.path()).unwrap().count() - 1;
        let mut job = Job::new(2);
        checkpoint::load(folder.path(), &mut job.model, &mut job.optimizer, &mut job.scaling).unwrap();
    }
    assert!(left > 0, "no kill fell into a save");
    Job::new(3).save(folder.path());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "files of killed saves are left");
}
