//! Checks that options, files and checkpoints fit together, before anything is trained.

use std::path::{Path, PathBuf};

use fp8_nn::fp8_recipe::Recipe;

use crate::failure::Failure;
use crate::train::layout::Layout;
use crate::train::options::{DeviceName, Given, Place, RecipeName, Settings, Train};
use crate::train::ranks::Ranks;
use crate::train::text::Corpus;
use crate::train::trainer::{Metadata, Run, Trainer};

/// A job to do. Its parts were checked and fit together.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) settings: Settings,
    pub(crate) place: Place,
    /// The layout of the processes that train together.
    pub(crate) layout: Layout,
    /// This process among them, once it has [joined](Self::join) them.
    pub(crate) ranks: Ranks,
    /// `None`: RAYON_NUM_THREADS, or all cores.
    pub(crate) threads: Option<usize>,
    pub(crate) corpus: Corpus,
    pub(crate) report_dir: PathBuf,
    pub(crate) save: Option<PathBuf>,
    /// Both trainings end after this step: the last one, or that of `--stop-after`.
    pub(crate) stop_at: usize,
    /// A training has diverged when more steps in a row than this have a loss that is not finite.
    pub(crate) skip_non_finite: usize,
    pub(crate) sample: usize,
    pub(crate) quiet: bool,
    /// The validation curve has a point every this many steps; 0: none.
    pub(crate) eval_every: usize,
    /// Every option that has a value, for the report.
    pub(crate) chosen: Vec<Chosen>,
    /// The trainings to do, each with the checkpoint that it resumes from.
    pub(crate) runs: Vec<PlannedRun>,
}

/// A training to do, and the checkpoint that it resumes from.
pub(crate) type PlannedRun = (Run, Option<Checkpoint>);

/// A checkpoint to resume a training from.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoint {
    pub(crate) dir: PathBuf,
    pub(crate) step: usize,
    metadata: Metadata,
}

/// An option of this run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// Its name, without the dashes.
    pub(crate) name: &'static str,
    pub(crate) value: String,
    /// The origin of the value: `default`, `command line` or `checkpoint`.
    pub(crate) source: &'static str,
}

/// More bytes in a step need more memory than any machine has.
const MAX_BATCH_BYTES: usize = 1 << 24;

/// By default, the validation curve of a whole training has about this many points.
const CURVE_POINTS: usize = 20;

impl Config {
    /// Checks everything but the tensors of checkpoints and the report folder.
    pub(crate) fn new<T: Trainer>(mut options: Train, given: &Given) -> Result<Self, Failure> {
        if !options.seeds.is_empty() {
            let sentence = "--seeds goes with --compare: name the recipes with --compare, or give one --seed";
            return Err(Failure::input(sentence));
        }
        read_recipe(&mut options.settings, given)?;
        let (settings, corpus, runs) = match &options.resume {
            None => {
                let corpus = Corpus::load(options.text.as_deref(), options.settings.seq)?;
                let runs = runs(&options.settings.recipe).iter().map(|&run| (run, None)).collect();
                (options.settings.clone(), corpus, runs)
            }
            Some(folder) => resumed::<T>(&options, given, folder)?,
        };
        check_shape(&settings)?;
        if options.graph && options.device == DeviceName::Cpu {
            let sentence = "--graph needs a GPU, which records steps: add --device cuda, or leave it out";
            return Err(Failure::input(sentence.to_owned()));
        }
        check_batch(options.layout.dp(), settings.batch)?;
        if settings.fp8_weights && options.layout.tp() > 1 {
            let sentence = "--fp8-weights stores whole weights in FP8, and --tp gives each process a part of them: leave one of them out";
            return Err(Failure::input(sentence));
        }
        let stop_at = stop_at(&options, settings.steps, &runs)?;
        let save = match (&options.save, options.stop_after) {
            (Some(dir), _) => Some(dir.clone()),
            (None, Some(_)) => Some(options.report_dir.join("checkpoint")),
            (None, None) => None,
        };
        let eval_every = options.eval_every.unwrap_or_else(|| settings.steps.div_ceil(CURVE_POINTS));
        let chosen = chosen(&options, given, &settings, eval_every, &corpus);
        Ok(Self {
            settings,
            eval_every,
            chosen,
            place: Place {
                device: options.device,
                graph: options.graph,
                sqnr: options.sqnr,
                recompute: options.recompute,
            },
            layout: options.layout,
            ranks: Ranks::default(),
            threads: options.threads,
            corpus,
            report_dir: options.report_dir,
            save,
            stop_at,
            skip_non_finite: options.skip_non_finite,
            sample: options.sample,
            quiet: options.quiet,
            runs,
        })
    }

    /// Joins the processes that train together.
    pub(crate) fn join(&mut self) -> Result<(), Failure> {
        self.ranks = Ranks::join(&self.layout, self.place.device)?;
        check_batch(self.ranks.replica()[1], self.settings.batch)?;
        self.check_tokens()?;
        let mut same: Vec<String> =
            self.settings.values().iter().map(|(option, value)| format!("--{option} {value}")).collect();
        same.push(format!("--eval-every {}", self.eval_every));
        same.push(format!("--skip-non-finite {}", self.skip_non_finite));
        same.push(format!("last step {}", self.stop_at));
        same.push(format!("--save or --stop-after: {}", self.save.is_some()));
        same.push(format!("text {}", self.corpus.fingerprint()));
        same.push(format!("recipe {}", self.settings.recipe_toml));
        same.extend(self.runs.iter().map(|(run, from)| {
            format!("{} from step {}", run.title(), from.as_ref().map_or(0, |from| from.step))
        }));
        self.ranks.agree(same)?;
        self.quiet |= !self.ranks.is_first();
        Ok(())
    }

    /// Checks that the ranks that share the tokens of a sequence can do so evenly.
    fn check_tokens(&self) -> Result<(), Failure> {
        let (tp, shares_tokens) = self.ranks.sharing();
        if !shares_tokens {
            return Ok(());
        }
        let seq = self.settings.seq;
        if !seq.is_multiple_of(tp) {
            let better = seq.next_multiple_of(tp);
            return Err(Failure::input(format!(
                "--seq {seq} is not divisible by --tp {tp}, among which --sequence-parallel shares the tokens; --seq {better} would be"
            )));
        }
        let window = seq.min(self.corpus.held_out().len() - 1);
        match window.is_multiple_of(tp) {
            true => Ok(()),
            false => Err(Failure::input(format!(
                "--sequence-parallel: the held-out text has one window of {window} tokens, which is not divisible by --tp {tp}: give a longer \
                 --text, or a --seq of at most {}",
                window / tp * tp
            ))),
        }
    }

    /// Whether the validation curve has a point after `step`. The last step always has one.
    pub(crate) fn evaluates(&self, step: usize) -> bool {
        self.eval_every > 0 && (step.is_multiple_of(self.eval_every) || step == self.stop_at)
    }

    /// Returns the strings that a checkpoint stores besides its tensors.
    pub(crate) fn metadata(&self, run: Run, step: usize) -> Metadata {
        let mut metadata: Metadata =
            self.settings.values().into_iter().map(|(option, value)| (option.to_owned(), value)).collect();
        if !self.settings.recipe_toml.is_empty() {
            metadata.insert(RECIPE_TOML.to_owned(), self.settings.recipe_toml.clone());
        }
        metadata.insert("run".to_owned(), run.name().to_owned());
        metadata.insert("step".to_owned(), step.to_string());
        metadata.insert("text".to_owned(), self.corpus.source().to_owned());
        metadata.insert("text-fingerprint".to_owned(), self.corpus.fingerprint());
        metadata
    }
}

/// The key of the recipe's text in checkpoints.
const RECIPE_TOML: &str = "recipe-toml";

/// Reads the file that `--recipe` names, if it names one.
pub(crate) fn read_recipe(settings: &mut Settings, given: &Given) -> Result<(), Failure> {
    let remedy = match &settings.recipe {
        RecipeName::Delayed | RecipeName::Current | RecipeName::None => return Ok(()),
        RecipeName::Preset(_) => "write both into a file *.toml".to_owned(),
        RecipeName::File(path) => format!("write it into {}", path.display()),
    };
    if let Some(option) =
        ["format", "history-len", "margin"].into_iter().find(|option| given.contains(option))
    {
        return Err(Failure::input(format!("--{option} goes with --recipe delayed or current: {remedy}")));
    }
    let RecipeName::File(path) = &settings.recipe else { return Ok(()) };
    let refused = |problem: &str| Failure::input(format!("--recipe {}: {problem}", path.display()));
    let unreadable = |error: std::io::Error| {
        refused(&format!("{error}; give a TOML file that can be read, or one of the names"))
    };
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    Recipe::from_toml(&text).map_err(|error| refused(&error.to_string()))?;
    settings.recipe_toml = text;
    Ok(())
}

/// Every option of this run that has a value.
fn chosen(
    options: &Train,
    given: &Given,
    settings: &Settings,
    eval_every: usize,
    corpus: &Corpus,
) -> Vec<Chosen> {
    let stored = if options.resume.is_some() { "checkpoint" } else { "default" };
    let entry = |name: &'static str, value: String, otherwise| Chosen {
        name,
        value,
        source: if given.contains(name) { "command line" } else { otherwise },
    };
    let mut chosen = vec![
        entry("device", options.device.to_string(), "default"),
        entry("text", corpus.source().to_owned(), stored),
    ];
    chosen.extend(settings.values().into_iter().map(|(name, value)| entry(name, value, stored)));
    chosen.push(entry("eval-every", eval_every.to_string(), "default"));
    chosen.push(entry("skip-non-finite", options.skip_non_finite.to_string(), "default"));
    chosen.push(entry("sample", options.sample.to_string(), "default"));
    let path = |path: &PathBuf| path.display().to_string();
    let rest = [
        ("sqnr", options.sqnr.then(|| "on".to_owned())),
        ("graph", options.graph.then(|| "on".to_owned())),
        ("dp", options.layout.dp.filter(|&dp| dp > 1).map(|dp| dp.to_string())),
        ("tp", options.layout.tp.filter(|&tp| tp > 1).map(|tp| tp.to_string())),
        ("sequence-parallel", options.layout.sequence_parallel.then(|| "on".to_owned())),
        ("threads", options.threads.map(|threads| threads.to_string())),
        ("stop-after", options.stop_after.map(|step| step.to_string())),
        ("resume", options.resume.as_ref().map(path)),
        ("save", options.save.as_ref().map(path)),
    ];
    chosen.extend(rest.into_iter().filter_map(|(name, value)| Some(entry(name, value?, "default"))));
    chosen
}

fn runs(recipe: &RecipeName) -> &'static [Run] {
    match recipe {
        RecipeName::None => &[Run::HighPrecision],
        _ => &[Run::HighPrecision, Run::Fp8],
    }
}

/// Settings, text and steps from the checkpoints in `folder`.
fn resumed<T: Trainer>(
    options: &Train,
    given: &Given,
    folder: &Path,
) -> Result<(Settings, Corpus, Vec<PlannedRun>), Failure> {
    let first = Checkpoint::read::<T>(folder, Run::HighPrecision)?;
    let settings = first.settings()?;
    for ((option, ours), (_, stored)) in options.settings.values().into_iter().zip(settings.values()) {
        if given.contains(option) && ours != stored {
            return Err(Failure::input(format!(
                "--{option} {ours} differs from the {stored} of the checkpoint {}: leave the option out to resume, \
                 or --resume out to start anew",
                folder.display()
            )));
        }
    }
    if given.contains("recipe") && options.settings.recipe_toml != settings.recipe_toml {
        return Err(Failure::input(format!(
            "--recipe {}: the file has changed since the checkpoint {}: leave the option out to resume with the recipe \
             that is stored there",
            settings.recipe,
            folder.display()
        )));
    }
    let corpus = match &options.text {
        Some(path) => Corpus::load(Some(path), settings.seq)?,
        None => Corpus::reload(&first.get("text")?, settings.seq)?,
    };
    if corpus.fingerprint() != first.get("text-fingerprint")? {
        return Err(Failure::input(format!(
            "the text {} is not the one that the checkpoint {} was trained on",
            corpus.source(),
            folder.display()
        )));
    }
    let mut checkpoints = Vec::new();
    for &run in runs(&settings.recipe) {
        let checkpoint = match run {
            Run::HighPrecision => first.clone(),
            Run::Fp8 => Checkpoint::read::<T>(folder, run)?,
        };
        let same = ["text", "text-fingerprint"]
            .iter()
            .all(|key| checkpoint.metadata.get(*key) == first.metadata.get(*key));
        if !same || checkpoint.settings()? != settings {
            return Err(Failure::input(format!(
                "checkpoint {}: {}/ and {}/ are from different trainings",
                folder.display(),
                Run::HighPrecision.name(),
                run.name()
            )));
        }
        checkpoints.push((run, Some(checkpoint)));
    }
    Ok((settings, corpus, checkpoints))
}

impl Checkpoint {
    fn read<T: Trainer>(folder: &Path, run: Run) -> Result<Self, Failure> {
        let dir = folder.join(run.name());
        if !dir.is_dir() {
            return Err(Failure::input(format!(
                "checkpoint {}: it has no folder {}/; --resume takes a folder that --save wrote, or a run of fp8 train MODEL with its \
                 config.toml",
                folder.display(),
                run.name()
            )));
        }
        let metadata = T::metadata(&dir).map_err(|error| bad(&dir, &error))?;
        let mut checkpoint = Self { dir, step: 0, metadata };
        let step = checkpoint.get("step")?;
        checkpoint.step =
            step.parse().map_err(|_| bad(&checkpoint.dir, &format!("its step is \"{step}\"")))?;
        if checkpoint.get("run")? != run.name() {
            return Err(bad(&checkpoint.dir, "it is of the other training"));
        }
        Ok(checkpoint)
    }

    fn get(&self, key: &str) -> Result<String, Failure> {
        let value = self.metadata.get(key).cloned();
        value.ok_or_else(|| bad(&self.dir, &format!("it has no {key}; was it saved by fp8 train?")))
    }

    fn settings(&self) -> Result<Settings, Failure> {
        let settings = Settings::from_values(|option| self.metadata.get(option).cloned());
        let mut settings = settings.map_err(|failure| match failure {
            Failure::Input(sentence) => bad(&self.dir, &sentence),
            other => other,
        })?;
        if matches!(settings.recipe, RecipeName::File(_)) {
            settings.recipe_toml = self.get(RECIPE_TOML)?;
            Recipe::from_toml(&settings.recipe_toml).map_err(|error| bad(&self.dir, &error.to_string()))?;
        }
        Ok(settings)
    }
}

/// Returns the failure for a checkpoint that cannot be used; `sentence` says why.
pub(crate) fn bad(dir: &Path, sentence: &str) -> Failure {
    Failure::input(format!("checkpoint {}: {sentence}", dir.display()))
}

/// Checks that all replicas have as many rows of a batch.
fn check_batch(dp: usize, batch: usize) -> Result<(), Failure> {
    if batch.is_multiple_of(dp) {
        return Ok(());
    }
    let better = batch.next_multiple_of(dp);
    Err(Failure::input(format!("--batch {batch} is not divisible by --dp {dp}; --batch {better} would be")))
}

fn check_shape(settings: &Settings) -> Result<(), Failure> {
    let Settings { hidden, heads, batch, seq, .. } = *settings;
    if !hidden.is_multiple_of(heads) {
        let better = hidden.next_multiple_of(heads);
        return Err(Failure::input(format!(
            "--hidden {hidden} is not divisible by --heads {heads}; --hidden {better} would be"
        )));
    }
    // Rotary position embedding turns pairs of values.
    if !(hidden / heads).is_multiple_of(2) {
        let better = hidden.next_multiple_of(2 * heads);
        return Err(Failure::input(format!(
            "--hidden {hidden} with --heads {heads} gives heads of {} values, and the number must be even; --hidden \
             {better} would do",
            hidden / heads
        )));
    }
    if batch.saturating_mul(seq) > MAX_BATCH_BYTES {
        return Err(Failure::input(format!(
            "--batch {batch} with --seq {seq} is {} bytes in a step; at most {MAX_BATCH_BYTES} are supported",
            batch.saturating_mul(seq)
        )));
    }
    Ok(())
}

fn stop_at(options: &Train, steps: usize, runs: &[PlannedRun]) -> Result<usize, Failure> {
    let stop_at = options.stop_after.unwrap_or(steps);
    if stop_at > steps {
        return Err(Failure::input(format!("--stop-after {stop_at} is beyond the last step, {steps}")));
    }
    let done = |(_, checkpoint): &PlannedRun| checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step);
    let (least, most) = (runs.iter().map(done).min().unwrap_or(0), runs.iter().map(done).max().unwrap_or(0));
    if most > stop_at || least == stop_at {
        let end = if options.stop_after.is_some() { "--stop-after is" } else { "training ends with step" };
        return Err(Failure::input(format!(
            "nothing is left to train: the checkpoint is at step {most}, and {end} {stop_at}"
        )));
    }
    Ok(stop_at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::fake::Fake;
    use crate::train::options::parse;

    fn config(line: &str) -> Result<Config, Failure> {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, [b'x'; 2000]).unwrap();
        let line = format!("--text {} {line}", text.display());
        let (options, given) = parse(line.split_whitespace()).unwrap();
        Config::new::<Fake>(options, &given)
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        for (line, sentence) in [
            ("--hidden 100 --heads 3", "--hidden 100 is not divisible by --heads 3; --hidden 102 would be"),
            (
                "--hidden 36 --heads 4",
                "--hidden 36 with --heads 4 gives heads of 9 values, and the number must be even; --hidden 40 would do",
            ),
            (
                "--seq 1000 --batch 65536",
                "--batch 65536 with --seq 1000 is 65536000 bytes in a step; at most 16777216 are supported",
            ),
            (
                "--seeds 1,2",
                "--seeds goes with --compare: name the recipes with --compare, or give one --seed",
            ),
            ("--steps 5 --stop-after 6", "--stop-after 6 is beyond the last step, 5"),
        ] {
            assert_eq!(config(line).unwrap_err(), Failure::input(sentence), "{line}");
        }
    }

    #[test]
    fn without_a_recipe_there_is_one_training() {
        assert_eq!(config("--recipe none").unwrap().runs.len(), 1);
        assert_eq!(config("--recipe current").unwrap().runs.len(), 2);
    }

    #[test]
    fn the_example_of_a_recipe_file_is_read() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/train/recipe.toml");
        let config = config(&format!("--recipe {path}")).unwrap();
        assert_eq!(config.runs.len(), 2);
        assert_eq!(config.settings.recipe_toml, include_str!("recipe.toml"));
        assert_eq!(config.metadata(Run::Fp8, 1)[RECIPE_TOML], include_str!("recipe.toml"));
        let recipe = Recipe::from_toml(&config.settings.recipe_toml).unwrap();
        assert_eq!(
            recipe.to_string(),
            "by name (*.mlp.fc2.grad_output: current (power_2_scale=true); *.blocks.0.attention.*: off; default: \
             delayed (margin=1, amax_history_len=64))"
        );
    }

    #[test]
    fn recipe_files_that_cannot_be_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.toml");
        let path = path.display();
        let refused = |options: &str| config(&format!("--recipe {path} {options}")).unwrap_err().to_string();
        assert!(refused("").starts_with(&format!("error: --recipe {path}: No such file")), "{}", refused(""));
        assert!(
            refused("").ends_with("; give a TOML file that can be read, or one of the names"),
            "{}",
            refused("")
        );
        std::fs::write(folder.path().join("r.toml"), "recipe = \"current\"\nmargin = 1").unwrap();
        let sentence = "recipe file: unknown key `margin`: the options of current are ";
        assert!(refused("").starts_with(&format!("error: --recipe {path}: {sentence}")), "{}", refused(""));
        assert_eq!(
            refused("--margin 1"),
            format!("error: --margin goes with --recipe delayed or current: write it into {path}")
        );
    }

    #[test]
    fn stopping_early_saves() {
        assert_eq!(config("").unwrap().save, None);
        let stopped = config("--stop-after 3").unwrap();
        assert_eq!(stopped.save, Some(PathBuf::from("target/train_gpt/checkpoint")));
        assert_eq!(stopped.stop_at, 3);
    }

    #[test]
    fn a_comparison_goes_on_until_both_trainings_are_at_the_last_step() {
        let (options, _) = parse(["--stop-after", "6"]).unwrap();
        let stop = |steps: [usize; 2]| {
            let planned = |(run, step)| {
                (run, Some(Checkpoint { dir: PathBuf::new(), step, metadata: Metadata::default() }))
            };
            let runs: Vec<PlannedRun> =
                [Run::HighPrecision, Run::Fp8].into_iter().zip(steps).map(planned).collect();
            stop_at(&options, 10, &runs).map_err(|failure| failure.to_string())
        };
        assert_eq!((stop([3, 3]), stop([6, 3])), (Ok(6), Ok(6)));
        let nothing = "error: nothing is left to train: the checkpoint is at step";
        assert_eq!(stop([6, 6]), Err(format!("{nothing} 6, and --stop-after is 6")));
        assert_eq!(stop([7, 3]), Err(format!("{nothing} 7, and --stop-after is 6")));
    }
}
