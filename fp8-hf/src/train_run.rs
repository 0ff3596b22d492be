//! A training from its first step to its result, in a folder.

mod checkpoints;
mod lock;
mod log;
mod options;
mod record;
mod source;

use crate::data::order;
use crate::{Error, Result, TrainEvaluation, Trainer};
use checkpoints::{Checkpoints, Found};
use fp8_kernels::DType;
use fp8_nn::Schedule;
use lock::Lock;
use log::Log;
use options::Steps;
pub use options::{ScheduleKind, TrainRunOptions, Warmup};
pub use record::TrainRecord;
pub use source::SequenceSource;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

const LOG: &str = "log.jsonl";
const CHECKPOINTS: &str = "checkpoints";
const FINAL: &str = "final";

/// The training of a model over data, in a folder of its own: order, learning rate, evaluations, checkpoints and a log.
///
/// | in the folder | |
/// |---|---|
/// | `log.jsonl` | a line for each step, [`TrainRecord::json`], written when the step is done |
/// | `checkpoints/step-N/` | the newest checkpoints, and the one with the lowest validation loss |
/// | `final/` | the result: an adapter as peft stores it, or a folder as the model's |
///
/// A step, its sequences and its learning rate depend on its number alone, so that a resumed run goes on bit for bit, also with another
/// number of threads. On another number or [layout](crate::TrainRanks) of ranks it sees the same sequences, and sums round differently.
///
/// ```
/// use fp8_hf::data::Sequence;
/// use fp8_hf::{self as hf, Config, Folder, TrainRun, TrainRunOptions, Trainer, TrainerOptions};
/// use fp8_nn::prelude::*;
///
/// # let place = std::env::temp_dir().join(format!("fp8-train-run-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let config = Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
/// # )?;
/// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// # hf::save_model(&place.join("model"), &config, &model, None)?;
/// let sequence = |first| Sequence { ids: vec![first, 2, 3, 4], targets: vec![2, 3, 4, 5], lengths: vec![4] };
/// let data: Vec<Sequence> = (0..6).map(sequence).collect(); // or the parts of a `data::Dataset`
/// let options = TrainerOptions { seq: 4, ..Default::default() };
/// let trainer = Trainer::new(Folder::open(&place.join("model"))?, None, &options, &Device::cpu(), None)?;
///
/// let options = TrainRunOptions { batch: 2, epochs: 2, lr: 1e-2, ..Default::default() };
/// let mut run = TrainRun::start(&place.join("run"), trainer, Box::new(data), None, &options)?;
/// let mut losses = Vec::new();
/// while let Some(record) = run.step()? {
///     losses.push(record.loss);
/// }
/// assert_eq!(losses.len(), 6);
/// let tuned = run.finish(None)?;
/// assert_eq!(tuned, place.join("run/final"));
/// assert!(Folder::open(&tuned).is_ok());
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TrainRun {
    out: PathBuf,
    trainer: Trainer,
    data: Box<dyn SequenceSource>,
    validation: Option<Box<dyn SequenceSource>>,
    options: TrainRunOptions,
    steps: Steps,
    schedule: Schedule,
    /// The steps that are done.
    done: u64,
    /// Those in a row without a finite norm.
    lost: u64,
    /// The step with the lowest validation loss, and that.
    best: Option<(u64, f64)>,
    epoch: Option<(u64, Vec<u32>)>,
    log: Option<Log>,
    /// Held as long as the run goes on, on the first rank.
    lock: Option<Lock>,
    checkpoints: Checkpoints,
    /// The step and the time of the last checkpoint.
    saved: (u64, Instant),
    resume_note: Option<String>,
    /// Saturated values, and all that were counted, behind the last step that counted.
    counted: [u64; 2],
}

impl fmt::Debug for TrainRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainRun")
            .field("out", &self.out)
            .field("trainer", &self.trainer)
            .field("done", &self.done)
            .field("steps", &self.steps.total)
            .finish_non_exhaustive()
    }
}

impl TrainRun {
    /// Starts a run in the new folder `out`, which the first rank creates.
    ///
    /// # Errors
    /// An option out of its range; no sequence; something exists at `out`, or it cannot be created.
    pub fn start(
        out: &Path,
        trainer: Trainer,
        data: Box<dyn SequenceSource>,
        validation: Option<Box<dyn SequenceSource>>,
        options: &TrainRunOptions,
    ) -> Result<Self> {
        let mut run = Self::new(out, trainer, data, validation, options)?;
        run.lock("creating the folder of the run", || create(out))?;
        run.open_log()?;
        Ok(run)
    }

    /// Goes on with the run in the folder `out`, behind its newest checkpoint. Trainer, data and options are made as for
    /// [`start`](Self::start); a run without a checkpoint begins anew. What the log has behind the checkpoint is removed.
    ///
    /// ```
    /// # use fp8_hf::data::Sequence;
    /// # use fp8_hf::{self as hf, Config, Folder, TrainRun, TrainRunOptions, Trainer, TrainerOptions};
    /// # use fp8_nn::prelude::*;
    /// # let place = std::env::temp_dir().join(format!("fp8-train-resume-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let config = Config::from_json(
    /// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
    /// # )?;
    /// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// # hf::save_model(&place.join("model"), &config, &model, None)?;
    /// # let sequence = |first| Sequence { ids: vec![first, 2, 3, 4], targets: vec![2, 3, 4, 5], lengths: vec![4] };
    /// # let data = || Box::new((0..6).map(sequence).collect::<Vec<_>>());
    /// # let options = TrainerOptions { seq: 4, ..Default::default() };
    /// # let trainer = || Trainer::new(Folder::open(&place.join("model"))?, None, &options, &Device::cpu(), None);
    /// # let options = TrainRunOptions { batch: 2, epochs: 2, lr: 1e-2, ..Default::default() };
    /// let mut run = TrainRun::start(&place.join("run"), trainer()?, data(), None, &options)?;
    /// run.step()?;
    /// run.save_checkpoint()?;
    /// let next = run.step()?.map(|record| record.loss);
    /// drop(run); // as if the process had ended
    ///
    /// let mut run = TrainRun::resume(&place.join("run"), trainer()?, data(), None, &options)?;
    /// assert_eq!(run.done(), 1);
    /// assert_eq!(run.step()?.map(|record| record.loss), next);
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`start`](Self::start); a folder that is not there; a checkpoint that cannot be read, or is of other data or options, which the
    /// error names.
    pub fn resume(
        out: &Path,
        trainer: Trainer,
        data: Box<dyn SequenceSource>,
        validation: Option<Box<dyn SequenceSource>>,
        options: &TrainRunOptions,
    ) -> Result<Self> {
        let mut run = Self::new(out, trainer, data, validation, options)?;
        run.lock("opening the run", || Ok(()))?;
        match run.checkpoints.newest()? {
            (Some(found), damaged) => {
                run.load(found)?;
                if !damaged.is_empty() {
                    run.note(format!(
                        "{} cannot be read, so that the run goes on from an older one",
                        damaged.join(", ")
                    ));
                }
            }
            (None, _) if log::read(&out.join(LOG)).is_ok_and(|log| !log.is_empty()) => {
                run.note("there is no checkpoint that can be read, so that the run begins anew".to_owned());
            }
            (None, _) => {}
        }
        let cleaned = match run.trainer.is_first() {
            true => run
                .checkpoints
                .remove_behind(run.done)
                .and_then(|()| run.checkpoints.prune(options.keep, run.best.map(|(step, _)| step))),
            false => Ok(()),
        };
        run.trainer.all_of("opening the run", cleaned)?;
        run.open_log()?;
        Ok(run)
    }

    fn new(
        out: &Path,
        trainer: Trainer,
        data: Box<dyn SequenceSource>,
        validation: Option<Box<dyn SequenceSource>>,
        options: &TrainRunOptions,
    ) -> Result<Self> {
        let steps = options.steps_of(data.len())?;
        Ok(Self {
            schedule: options.schedule(steps.total)?,
            checkpoints: Checkpoints::new(out.join(CHECKPOINTS)),
            out: out.to_owned(),
            trainer,
            data,
            validation,
            options: options.clone(),
            steps,
            done: 0,
            lost: 0,
            best: None,
            epoch: None,
            log: None,
            lock: None,
            counted: [0; 2],
            saved: (0, Instant::now()),
            resume_note: None,
        })
    }

    /// Locks the folder on the first rank, behind `create`.
    fn lock(&mut self, work: &str, create: impl FnOnce() -> Result<()>) -> Result<()> {
        let locked = match self.trainer.is_first() {
            true => create().and_then(|()| Lock::new(&self.out)).map(|lock| self.lock = Some(lock)),
            false => Ok(()),
        };
        self.trainer.all_of(work, locked)
    }

    fn note(&mut self, sentence: String) {
        self.resume_note = Some(match self.resume_note.take() {
            Some(other) => format!("{other}; {sentence}"),
            None => sentence,
        });
    }

    fn open_log(&mut self) -> Result<()> {
        let opened = match self.trainer.is_first() {
            true => Log::open(self.out.join(LOG), self.done).map(|log| self.log = Some(log)),
            false => Ok(()),
        };
        self.trainer.all_of("opening the log", opened)
    }

    /// The strings that a checkpoint has besides the trainer's state.
    fn metadata(&self) -> BTreeMap<String, String> {
        let TrainRunOptions { lr, schedule, warmup, min_ratio, seed, batch, .. } = &self.options;
        let mut all: BTreeMap<String, String> = [
            ("step", self.done.to_string()),
            ("steps", self.steps.total.to_string()),
            ("lost", self.lost.to_string()),
            ("data", self.data.digest()),
            ("validation", self.validation.as_ref().map_or_else(String::new, |data| data.digest())),
            ("order", format!("{} sequences, {batch} in a step, seed {seed}", self.data.len())),
            ("schedule", format!("{schedule:?} from {lr}, {warmup:?}, to {min_ratio}")),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
        if let Some((step, loss)) = self.best {
            all.insert("best".to_owned(), format!("{step} {loss}"));
        }
        all
    }

    fn load(&mut self, found: Found) -> Result<()> {
        let Found { step, dir, metadata } = found;
        let problem = |problem: String| Error::File { path: dir.clone(), problem };
        let own = self.metadata();
        let differs = |key: &str| metadata.get(key) != own.get(key);
        if differs("validation") {
            return Err(problem(
                "the validation data differ from those that it was measured with: resume with the same data and options".to_owned(),
            ));
        }
        if differs("data") {
            return Err(problem(
                "the data differ from those that it was trained on: resume with the same data and options"
                    .to_owned(),
            ));
        }
        for (key, what) in
            [("order", "sequences"), ("schedule", "learning rates"), ("steps", "numbers of steps")]
        {
            if differs(key) {
                let [saved, own] =
                    [metadata.get(key), own.get(key)].map(|text| text.map_or("nothing", String::as_str));
                return Err(problem(format!(
                    "the {what} differ: it was saved with {saved}, and this run has {own}: resume with the same data and options"
                )));
            }
        }
        let number = |key: &str| {
            let text = metadata.get(key).map_or("", String::as_str);
            text.parse::<u64>().map_err(|_| problem(format!("its `{key}` is \"{text}\": expected a number")))
        };
        let (done, lost) = (number("step")?, number("lost")?);
        if done != step || done > self.steps.total {
            return Err(problem(format!("it is of step {done}: expected {step}, as its folder says")));
        }
        let loaded = self.trainer.load_checkpoint(&dir)?;
        if !loaded.scaling.is_plain() {
            self.note(loaded.scaling.to_string());
        }
        let best = metadata.get("best").and_then(|text| text.split_once(' '));
        self.best = best.and_then(|(step, loss)| Some((step.parse().ok()?, loss.parse().ok()?)));
        (self.done, self.lost, self.saved) = (done, lost, (done, Instant::now()));
        Ok(())
    }

    /// Takes the next step; `None` if all are done. Behind it, validation loss and checkpoint, if it is their turn.
    ///
    /// # Errors
    /// A sequence that cannot be read; a device that failed; so many steps in a row without a finite norm of gradients as
    /// [`most_non_finite`](TrainRunOptions::most_non_finite) says, with the name of the tensor; a file that cannot be written; a rank that
    /// left or failed.
    pub fn step(&mut self) -> Result<Option<TrainRecord>> {
        if self.done >= self.steps.total {
            return Ok(None);
        }
        let (index, number) = (self.done, self.done + 1);
        let (epoch, places) = self.steps.place(index);
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.epoch = Some((epoch, order(self.options.seed, epoch, self.data.len())));
        }
        let order = self.epoch.as_ref().map_or(&[][..], |(_, order)| &order[places]);
        let observed = self.options.observes(number, self.steps.total);
        self.trainer.set_counting(observed);
        let (data, lr) = (&self.data, self.schedule.lr(index));
        let start = Instant::now();
        let step = self.trainer.step(order.len(), &mut |place| data.read(order[place] as usize), lr)?;
        let seconds = start.elapsed().as_secs_f64();
        self.done = number;
        let mut record = TrainRecord {
            layout: self.trainer.layout(),
            step: number,
            epoch: number as f64 / self.steps.of_epoch() as f64,
            loss: step.loss,
            grad_norm: step.grad_norm,
            lr,
            tokens: step.tokens,
            learned: step.learned,
            seconds,
            skipped: step.skipped,
            memory_bytes: self.trainer.peak_memory().total() as u64,
            validation_loss: None,
            saturated: if observed { self.saturated()? } else { None },
            non_finite: step.non_finite,
        };
        // A step without a learned target says nothing of the model.
        let is_lost = step.learned > 0 && step.skipped;
        self.lost = if is_lost { self.lost + 1 } else { self.lost };
        if step.learned > 0 && !step.skipped {
            self.lost = 0;
        }
        if self.lost >= self.options.most_non_finite {
            self.write(&record)?;
            return Err(self.diverged(&record));
        }
        if self.options.evaluates(number, self.steps.total)
            && let Some(TrainEvaluation { loss, .. }) = self.evaluate()?
        {
            record.validation_loss = Some(loss).filter(|loss| loss.is_finite());
        }
        self.write(&record)?;
        self.save_if_due(record.validation_loss)?;
        Ok(Some(record))
    }

    /// The share of the values that were quantized since the last step that counted.
    fn saturated(&mut self) -> Result<Option<f64>> {
        let [saturated, elements] = self.trainer.saturated()?;
        let [before, all] = std::mem::replace(&mut self.counted, [saturated, elements]);
        let counted = elements.saturating_sub(all);
        Ok((counted > 0).then(|| saturated.saturating_sub(before) as f64 / counted as f64))
    }

    fn diverged(&self, record: &TrainRecord) -> Error {
        let name = record.non_finite.as_deref().unwrap_or("the loss");
        let remedy = match self.saved.0 {
            0 => "there is no checkpoint from before".to_owned(),
            step => format!("the checkpoint of step {step} is from before"),
        };
        let problem = format!(
            "step {}: {} steps in a row had gradients that are not finite, last of {name}; a lower learning rate may help, and {remedy}",
            record.step, self.lost
        );
        Error::File { path: self.out.clone(), problem }
    }

    fn write(&mut self, record: &TrainRecord) -> Result<()> {
        let written = self.log.as_mut().map_or(Ok(()), |log| log.write(record));
        self.trainer.all_of("writing the log", written)
    }

    /// Returns the loss over the sequences for validation, of at most [`eval_sequences`](TrainRunOptions::eval_sequences); `None` without
    /// any.
    ///
    /// # Errors
    /// A sequence that cannot be read; a device that failed; a rank that left or failed.
    pub fn evaluate(&mut self) -> Result<Option<TrainEvaluation>> {
        let Some(data) = &self.validation else { return Ok(None) };
        let count = data.len().min(self.options.eval_sequences);
        self.trainer.evaluate(count, &mut |index| data.read(index)).map(Some)
    }

    fn save_if_due(&mut self, validation_loss: Option<f64>) -> Result<()> {
        let is_best = validation_loss.is_some_and(|loss| self.best.is_none_or(|(_, best)| loss < best));
        if let Some(loss) = validation_loss.filter(|_| is_best) {
            self.best = Some((self.done, loss));
        }
        let every = self.options.checkpoint_every;
        let is_turn = every > 0 && self.done.is_multiple_of(every);
        // The first rank's clock decides.
        let is_time = self.trainer.is_first() && self.saved.1.elapsed() >= self.options.checkpoint_after;
        // What may be diverging takes no place of a good one.
        if (self.trainer.any(is_time)? || is_turn || is_best) && self.lost == 0 {
            self.save_checkpoint()?;
        }
        Ok(())
    }

    /// Writes a checkpoint, from which [`resume`](Self::resume) goes on, and removes those that are not to be kept.
    ///
    /// # Errors
    /// A value that is not finite; a file that cannot be written; a rank that left or failed. Older checkpoints are there then.
    pub fn save_checkpoint(&mut self) -> Result<()> {
        let dir = self.checkpoints.dir(self.done);
        let metadata = self.metadata();
        self.trainer.save_checkpoint(&dir, &metadata)?;
        let pruned = match self.trainer.is_first() {
            true => self.checkpoints.prune(self.options.keep, self.best.map(|(step, _)| step)),
            false => Ok(()),
        };
        self.trainer.all_of("removing old checkpoints", pruned)?;
        self.saved = (self.done, Instant::now());
        Ok(())
    }

    /// Writes the result to `final` in the run's folder, and returns its path: see [`Trainer::save_result`]. A result that is there
    /// already is kept.
    ///
    /// # Errors
    /// As [`Trainer::save_result`]; a rank that left or failed.
    pub fn finish(&mut self, dtype: Option<DType>) -> Result<PathBuf> {
        self.finish_with(&mut |trainer, out| trainer.save_result(out, dtype))
    }

    /// Does as [`finish`](Self::finish), with a result that `write` writes to the path that it is given. All ranks call it, so that it can
    /// call [`Trainer::save_result`]; what else it does is for the first ([`Trainer::is_first`]).
    ///
    /// # Errors
    /// Those of `write`; a rank that left or failed.
    pub fn finish_with(
        &mut self,
        write: &mut dyn FnMut(&mut Trainer, &Path) -> Result<()>,
    ) -> Result<PathBuf> {
        if self.saved.0 != self.done || self.done == 0 {
            self.save_checkpoint()?;
        }
        let out = self.out.join(FINAL);
        let has_files = fs::read_dir(&out).is_ok_and(|mut entries| entries.next().is_some());
        let is_first = self.trainer.is_first();
        let written = match self.trainer.any(is_first && has_files)? {
            true if is_first => self.trainer.expect_result(&out),
            true => Ok(()),
            false => write(&mut self.trainer, &out),
        };
        self.trainer.all_of("writing the result", written)?;
        Ok(out)
    }

    /// Returns the number of steps that are done.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Returns the number of steps in all.
    pub fn total(&self) -> u64 {
        self.steps.total
    }

    /// Returns the trainer.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// Returns a sentence about scales that could not be restored exactly as they were saved, if there are some.
    pub fn resume_note(&self) -> Option<&str> {
        self.resume_note.as_deref()
    }

    /// Returns whether any rank says so, on all of them: for a signal that has come to one.
    ///
    /// # Errors
    /// A rank that left or failed.
    pub fn any(&self, says: bool) -> Result<bool> {
        self.trainer.any(says)
    }

    /// Reads the log of the run in the folder `out`.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read_log(out: &Path) -> Result<Vec<TrainRecord>> {
        log::read(&out.join(LOG))
    }
}

/// Creates the folder of a run.
fn create(out: &Path) -> Result<()> {
    let problem = |problem: &str| Error::File { path: out.to_owned(), problem: problem.to_owned() };
    if out.exists() && !out.is_dir() {
        return Err(problem("it is a file: expected the path of a new folder"));
    }
    let io = |source| Error::Io { path: out.to_owned(), source };
    fs::create_dir_all(out).map_err(io)?;
    if out.join(LOG).exists() || out.join(CHECKPOINTS).exists() || out.join(FINAL).exists() {
        return Err(problem("a run is there already: name a new folder, or resume this one"));
    }
    Ok(())
}
