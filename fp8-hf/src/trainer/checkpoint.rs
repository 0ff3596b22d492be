//! The state of a training in a file.

use super::trained::Trained;
use super::{TrainRanks, Trainer};

use crate::{Error, Folder, Result};
use fp8_nn::checkpoint::{self, Loaded, load_on, save_on};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The keys of what a checkpoint says of the model that it belongs to.
const BASE: &str = "base";
const BASE_DIGEST: &str = "base-digest";
/// The bytes at the beginning of each tensor that a digest reads.
const SAMPLED: u64 = 1 << 16;

impl Trainer {
    /// Writes all that the next step depends on to the folder `dir`, atomically, with the caller's metadata: parameters, moments and
    /// scaling state. With an adapter, the parameters are those of the adapter alone, and the path and a digest of the model's files
    /// stand for the others. All ranks call it, the first one writes one file with whole tensors, and any layout of ranks reads it.
    ///
    /// ```
    /// # use fp8_hf::data::Sequence;
    /// # use fp8_hf::{self as hf, Config, Folder, Trainer, TrainerOptions};
    /// # use fp8_nn::prelude::*;
    /// # let place = std::env::temp_dir().join(format!("fp8-trainer-checkpoint-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let config = Config::from_json(
    /// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
    /// # )?;
    /// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// # hf::save_model(&place.join("model"), &config, &model, None)?;
    /// let options = TrainerOptions { seq: 4, ..Default::default() };
    /// let new = || Trainer::new(Folder::open(&place.join("model"))?, None, &options, &Device::cpu(), None);
    /// let sequence = Sequence { ids: vec![1, 2, 3, 4], targets: vec![2, 3, 4, 5], lengths: vec![4] };
    /// let mut trainer = new()?;
    /// trainer.step(1, &mut |_| Ok(sequence.clone()), 1e-2)?;
    /// trainer.save_checkpoint(&place.join("step-1"), &[("position".to_owned(), "1".to_owned())].into())?;
    ///
    /// let mut resumed = new()?;
    /// let loaded = resumed.load_checkpoint(&place.join("step-1"))?;
    /// assert_eq!(loaded.metadata["position"], "1");
    /// let next = [&mut trainer, &mut resumed].map(|trainer| trainer.step(1, &mut |_| Ok(sequence.clone()), 1e-2));
    /// let [one, other] = next.map(|step| step.map(|step| step.loss.to_bits()));
    /// assert_eq!(one?, other?); // bit for bit
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A value that is not finite; a file that cannot be read or written; a rank that left or failed. An old checkpoint is untouched then.
    pub fn save_checkpoint(&mut self, dir: &Path, metadata: &BTreeMap<String, String>) -> Result<()> {
        self.expect_finite()?;
        let mut metadata = metadata.clone();
        metadata.insert(BASE.to_owned(), self.folder.path().display().to_string());
        metadata.insert(BASE_DIGEST.to_owned(), self.folder.digest()?);
        let (optimizer, scaling) = (&self.optimizer, &self.scaling);
        let saved = match (self.exchange.ranks(), self.has_adapter) {
            (None, true) => checkpoint::save(dir, &Trained(&mut self.model), optimizer, scaling, &metadata),
            (None, false) => checkpoint::save(dir, &self.model, optimizer, scaling, &metadata),
            (Some(TrainRanks { mesh, .. }), true) => {
                save_on(mesh, dir, &Trained(&mut self.model), optimizer, scaling, &metadata)
            }
            (Some(TrainRanks { mesh, .. }), false) => {
                save_on(mesh, dir, &self.model, optimizer, scaling, &metadata)
            }
        };
        self.exchange.all_of("writing a checkpoint", saved.map_err(Error::from))
    }

    /// Reads the checkpoint in `dir` into a trainer that was made with the same options, and returns the caller's metadata and a report
    /// of the scaling state. All ranks call it, in any layout. The example of [`save_checkpoint`](Self::save_checkpoint) resumes.
    ///
    /// # Errors
    /// A file that cannot be read, or is none of this training's: of another model, another adapter or other options, with the first
    /// difference. Nothing has changed then.
    pub fn load_checkpoint(&mut self, dir: &Path) -> Result<Loaded> {
        self.exchange.all_of("reading a checkpoint", self.expect_base(dir))?;
        // Slots of recipes that were saved exist before their state is loaded.
        self.scaling.prepare(&self.options.recipe, &self.autocast)?;
        let (optimizer, scaling) = (&mut self.optimizer, &mut self.scaling);
        let loaded = match (self.exchange.ranks(), self.has_adapter) {
            (None, true) => checkpoint::load(dir, &mut Trained(&mut self.model), optimizer, scaling),
            (None, false) => checkpoint::load(dir, &mut self.model, optimizer, scaling),
            (Some(TrainRanks { mesh, .. }), true) => {
                load_on(mesh, dir, &mut Trained(&mut self.model), optimizer, scaling)
            }
            (Some(TrainRanks { mesh, .. }), false) => load_on(mesh, dir, &mut self.model, optimizer, scaling),
        };
        let mut loaded = self.exchange.all_of("reading a checkpoint", loaded.map_err(Error::from))?;
        loaded.metadata.remove(BASE);
        loaded.metadata.remove(BASE_DIGEST);
        Ok(loaded)
    }

    /// Refuses the checkpoint of an adapter of another model.
    fn expect_base(&self, dir: &Path) -> Result<()> {
        let metadata = checkpoint::metadata(dir)?;
        if !self.has_adapter || metadata.get(BASE_DIGEST) == Some(&self.folder.digest()?) {
            return Ok(());
        }
        let base = metadata.get(BASE).map_or("another model", String::as_str);
        Err(Error::File {
            path: checkpoint::path(dir),
            problem: format!(
                "it was trained beside {base}, whose files {} does not have: expected the same ones",
                self.folder.path().display()
            ),
        })
    }

    /// Returns the path of the model that a checkpoint was trained from.
    ///
    /// # Errors
    /// A file that cannot be read, or is no checkpoint of a [`Trainer`].
    pub fn base_of(dir: &Path) -> Result<PathBuf> {
        let metadata = checkpoint::metadata(dir)?;
        metadata.get(BASE).map(PathBuf::from).ok_or_else(|| Error::File {
            path: checkpoint::path(dir),
            problem: "it is no checkpoint of a fine-tuning: it names no model".to_owned(),
        })
    }

    pub(super) fn expect_finite(&mut self) -> Result<()> {
        let optimizer = &self.optimizer;
        let expected = match self.has_adapter {
            true => checkpoint::expect_finite(&Trained(&mut self.model), optimizer),
            false => checkpoint::expect_finite(&self.model, optimizer),
        };
        self.exchange.all_of("looking for values that are not finite", expected.map_err(Error::from))
    }
}

impl Folder {
    /// Returns a digest of the tensors: their names, dtypes and shapes, and the first 64 KiB of each.
    fn digest(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let mut buffer = Vec::new();
        for name in self.weights.names() {
            let Some(info) = self.weights.info(name) else { continue };
            hash.update(format!("{name} {:?} {:?}\n", info.dtype, info.shape));
            buffer.resize(info.bytes.min(SAMPLED) as usize, 0);
            self.weights.read(name, 0, &mut buffer)?;
            hash.update(&buffer);
        }
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
