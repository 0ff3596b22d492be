//! Mutated checkpoints. One that is refused has changed nothing; one that is taken leaves a model that trains.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use fp8_nn::rand::rngs::StdRng;

use super::caught::{Done, caught};
use super::draw::{Draw, Kind};
use super::mutation;
use super::options::{Attack, Part};
use crate::result::Result as TaskResult;

/// A model with f32 and bf16 parameters, and all that a checkpoint holds.
struct Job {
    model: Stack,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
}

impl Job {
    fn new(seed: u64) -> Result<Self> {
        let (device, mut rng) = (Device::cpu(), StdRng::seed_from_u64(seed));
        let mlp = LayerNormMlpOptions {
            hidden_size: 6,
            ffn_hidden_size: 5,
            init: InitOptions { init_std: 0.3, ..Default::default() },
            ..Default::default()
        };
        let fc = LinearOptions {
            in_features: 6,
            out_features: 3,
            params_dtype: DType::BF16,
            init_std: 0.3,
            ..Default::default()
        };
        let model = Stack(vec![
            Box::new(LayerNormMlp::new("mlp", mlp, &device, &mut rng)?),
            Box::new(Linear::new("fc", fc, &device, &mut rng)?),
        ]);
        let scaling = Scaling::new(&model, &device)?;
        let optimizer = AdamW::new(AdamWOptions::default())?;
        let recipe = DelayedScaling { amax_history_len: 3, ..Default::default() }.into();
        let mut job = Self { model, optimizer, scaling, recipe };
        for step in 0..3 {
            job.step(seed + step)?;
        }
        Ok(job)
    }

    fn step(&mut self, seed: u64) -> Result<()> {
        let (device, mut draw) = (Device::cpu(), Draw::new(seed, 9, 9));
        let x = Tensor::from_vec(draw.floats(Kind::Noise, 24), [4, 6], &device)?;
        let dy = Tensor::from_vec(draw.floats(Kind::Noise, 12), [4, 3], &device)?;
        let options = AutocastOptions { compute_dtype: Some(DType::BF16), ..Default::default() };
        let Self { model, optimizer, scaling, recipe } = self;
        zero_grad(model)?;
        let mut cx = scaling.scope(recipe, &options)?;
        let (_, saved) = model.forward(&mut cx, &x)?;
        cx.commit()?;
        scaling.in_backward(|cx| model.backward(cx, saved, &dy))?;
        optimizer.step(model, 1e-2)
    }

    fn save(&self, dir: &Path) -> Result<()> {
        let metadata = BTreeMap::from([("note".to_owned(), "of the caller".to_owned())]);
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &metadata)
    }

    fn load(&mut self, dir: &Path) -> Result<()> {
        checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling).map(drop)
    }
}

pub(super) struct Files {
    seed: u64,
    talks: bool,
    job: Job,
    /// The checkpoint of another job. The attack loads mutations of it.
    checkpoint: Vec<u8>,
    parameters: Vec<u8>,
    /// This job's own, whole.
    own: Vec<u8>,
    folder: tempfile::TempDir,
}

/// In memory where there is such a place: every save waits for its disk.
fn folder() -> std::io::Result<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir())
    } else {
        tempfile::tempdir()
    }
}

impl Files {
    pub(super) fn new(options: &Attack) -> TaskResult<Self> {
        let folder = folder()?;
        let (job, other) = (Job::new(1)?, Job::new(100)?);
        other.save(folder.path())?;
        let checkpoint = fs::read(checkpoint::path(folder.path()))?;
        let parameters = folder.path().join("parameters.safetensors");
        checkpoint::save_parameters(&parameters, &other.model)?;
        let parameters = fs::read(parameters)?;
        let (seed, talks) = (options.seed, options.at.is_some());
        let mut files = Self { seed, talks, job, checkpoint, parameters, own: Vec::new(), folder };
        files.own = files.state()?;
        Ok(files)
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// All that lasts: equal states are equal files.
    fn state(&self) -> TaskResult<Vec<u8>> {
        let dir = self.dir("state");
        self.job.save(&dir)?;
        Ok(fs::read(checkpoint::path(&dir))?)
    }

    pub(super) fn attack(&mut self, number: u64) -> Done {
        let mut draw = Draw::new(self.seed, Part::Files as u64, number);
        let mut done =
            Done { family: "file", accepted: 0, refused: 0, failures: Vec::new(), is_broken: false };
        match caught(|| self.once(&mut draw, &mut done)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => done.failures.push(error.to_string()),
            Err(panic) => done.failures.push(panic),
        }
        if self.talks {
            let text = done.failures.join("\n  ");
            eprintln!("case {number}: {}, {} taken\n  {text}", done.family, done.accepted);
        }
        if !done.failures.is_empty() {
            // Whatever went wrong, the next case starts from a job that is as it should be.
            match Self::fresh(&self.own) {
                Ok(job) => self.job = job,
                Err(_) => done.is_broken = true,
            }
        }
        done
    }

    fn fresh(own: &[u8]) -> TaskResult<Job> {
        let (folder, mut job) = (folder()?, Job::new(1)?);
        fs::write(checkpoint::path(folder.path()), own)?;
        job.load(folder.path())?;
        Ok(job)
    }

    fn once(&mut self, draw: &mut Draw, done: &mut Done) -> TaskResult {
        let dir = self.dir("mutated");
        fs::create_dir_all(&dir)?;
        let path = checkpoint::path(&dir);
        if draw.once_in(5) {
            return self.parameters(draw, done, &path);
        }
        let (kind, bytes) = mutation::mutate(draw, &self.checkpoint);
        done.family = kind;
        fs::write(&path, &bytes)?;
        if draw.once_in(200) {
            // Holes cost no disk, but would cost memory.
            fs::File::options().write(true).open(&path)?.set_len(1 << 36)?;
        }
        let read = checkpoint::metadata(&dir);
        let loaded = self.job.load(&dir);
        self.say(&loaded);
        match loaded {
            Err(_) => {
                done.refused += 1;
                if self.state()? != self.own {
                    return Err("a refused checkpoint has changed something".into());
                }
                return Ok(());
            }
            Ok(()) => done.accepted += 1,
        }
        read.map_err(|error| format!("metadata refuses a checkpoint that load accepts: {error}"))?;
        let first = self.state()?;
        self.job
            .load(&self.dir("state"))
            .map_err(|error| format!("a saved checkpoint is refused: {error}"))?;
        if self.state()? != first {
            return Err("saving, loading and saving again gives another file".into());
        }
        self.job.step(7).map_err(|error| format!("a loaded checkpoint does not train: {error}"))?;
        self.restore()
    }

    /// The parameters alone.
    fn parameters(&mut self, draw: &mut Draw, done: &mut Done, path: &Path) -> TaskResult {
        let (kind, bytes) = mutation::mutate(draw, &self.parameters);
        done.family = kind;
        fs::write(path, &bytes)?;
        let loaded = checkpoint::load_parameters(path, &mut self.job.model);
        self.say(&loaded);
        if loaded.is_err() {
            done.refused += 1;
            if self.state()? != self.own {
                return Err("refused parameters have changed something".into());
            }
            return Ok(());
        }
        done.accepted += 1;
        self.job.step(7).map_err(|error| format!("a loaded checkpoint does not train: {error}"))?;
        self.restore()
    }

    fn restore(&mut self) -> TaskResult {
        let dir = self.dir("own");
        fs::create_dir_all(&dir)?;
        fs::write(checkpoint::path(&dir), &self.own)?;
        self.job.load(&dir).map_err(|error| format!("the job's own checkpoint is refused: {error}"))?;
        if self.state()? != self.own {
            return Err("the job's own checkpoint does not restore its state".into());
        }
        Ok(())
    }

    fn say(&self, loaded: &Result<()>) {
        if self.talks {
            eprintln!("  {loaded:?}");
        }
    }
}
