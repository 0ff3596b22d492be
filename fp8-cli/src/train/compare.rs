//! `--compare`: each recipe beside high precision, for one or more seeds.

use std::fmt::Write as _;
use std::io::Write;
use std::sync::atomic::AtomicBool;

use crate::failure::Failure;
use crate::page::signed;
use crate::train::config::{self, Config};
use crate::train::options::{Compared, Given, RecipeName, Train};
use crate::train::summary::ReportDir;
use crate::train::trainer::{Run, Trainer};
use crate::train::training::{self, End, Journey};

/// The name of the table in the report folder.
const FILE: &str = "compare.csv";

/// Trainings to compare. Every part was checked.
#[derive(Debug)]
pub(crate) struct Comparison {
    config: Config,
    recipes: Vec<Entry>,
    seeds: Vec<u64>,
}

/// A recipe, with the text of its file if it has one.
#[derive(Debug)]
struct Entry {
    recipe: RecipeName,
    toml: String,
}

/// The result of one training.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    seed: u64,
    /// Its recipe; `none` for high precision.
    recipe: RecipeName,
    end: End,
    held_out_loss: Option<f64>,
    median_step_ms: Option<f64>,
}

impl Comparison {
    /// Checks the options of a comparison, and reads the files of its recipes.
    pub(crate) fn new<T: Trainer>(mut options: Train, given: &Given) -> Result<Self, Failure> {
        for option in [
            "dp",
            "tp",
            "sequence-parallel",
            "recipe",
            "resume",
            "save",
            "stop-after",
            "sample",
            "eval-every",
        ] {
            if given.contains(option) {
                return Err(Failure::input(format!(
                    "--{option} cannot be used with --compare: leave it out"
                )));
            }
        }
        let mut recipes = Vec::new();
        let Compared(compared) = options.compare.take().unwrap_or_default();
        for recipe in compared {
            options.settings.recipe = recipe.clone();
            config::read_recipe(&mut options.settings, given)?;
            recipes.push(Entry { recipe, toml: std::mem::take(&mut options.settings.recipe_toml) });
        }
        options.settings.recipe = RecipeName::None;
        let mut seeds = std::mem::take(&mut options.seeds);
        if seeds.is_empty() {
            seeds.push(options.settings.seed);
        }
        let mut config = Config::new::<T>(options, given)?;
        config.eval_every = 0;
        Ok(Self { config, recipes, seeds })
    }

    /// Returns the number of CPU threads that the options ask for.
    pub(crate) fn threads(&self) -> Option<usize> {
        self.config.threads
    }

    /// Trains in high precision and with every recipe for each seed, prints a table and writes it to the report folder.
    pub(crate) fn run<T: Trainer>(
        mut self,
        interrupt: &AtomicBool,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        // A recipe that does not fit the model is refused before hours of training.
        for recipe in &self.recipes {
            recipe.write_to(&mut self.config);
            let _fits = T::start(&self.config.settings, self.config.place, &self.config.ranks, Run::Fp8)
                .map_err(Failure::input)?;
        }
        let folder = ReportDir::open(&self.config.report_dir)?;
        let high_precision = Entry { recipe: RecipeName::None, toml: String::new() };
        let mut rows = Vec::new();
        for &seed in &self.seeds {
            self.config.settings.seed = seed;
            for entry in std::iter::once(&high_precision).chain(&self.recipes) {
                entry.write_to(&mut self.config);
                if !self.config.quiet {
                    // Training continues even if stderr is closed.
                    let _ = writeln!(std::io::stderr(), "seed {seed}, {}", title(&entry.recipe));
                }
                let run = entry.run();
                let trainer = T::start(&self.config.settings, self.config.place, &self.config.ranks, run);
                let mut journey = Journey { run, trainer: trainer.map_err(Failure::input)?, step: 0 };
                let outcome = training::train(&self.config, &mut journey, interrupt)?;
                rows.push(Row {
                    seed,
                    recipe: entry.recipe.clone(),
                    end: outcome.end,
                    held_out_loss: outcome.held_out_loss,
                    median_step_ms: outcome.median_step_ms(),
                });
                // Written after each training, so that an interrupted comparison leaves what it has found.
                folder.write(FILE, &csv(&rows))?;
                if let End::Interrupted { step } = outcome.end {
                    let path = folder.path().join(FILE);
                    return Err(Failure::Stopped(format!(
                        "interrupted after step {step} of seed {seed}, {}; {} has the trainings until then",
                        title(&entry.recipe),
                        path.display()
                    )));
                }
            }
        }
        let text = format!("{}\n{}\n", table(&rows), folder.path().join(FILE).display());
        // If stdout is closed, the file is written all the same.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        Ok(())
    }
}

impl Entry {
    fn run(&self) -> Run {
        if self.recipe == RecipeName::None { Run::HighPrecision } else { Run::Fp8 }
    }

    fn write_to(&self, config: &mut Config) {
        config.settings.recipe = self.recipe.clone();
        config.settings.recipe_toml.clone_from(&self.toml);
    }
}

fn title(recipe: &RecipeName) -> String {
    match recipe {
        RecipeName::None => "high precision".to_owned(),
        recipe => recipe.to_string(),
    }
}

impl Row {
    /// Returns by how many percent its loss is higher than that of the training in high precision with the same seed.
    /// `None` for high precision itself, and if a loss is missing.
    fn percent(&self, rows: &[Self]) -> Option<f64> {
        let reference = rows.iter().find(|row| row.seed == self.seed && row.recipe == RecipeName::None)?;
        (self.recipe != RecipeName::None).then_some(())?;
        Some(100.0 * (self.held_out_loss? / reference.held_out_loss? - 1.0))
    }
}

/// Returns compare.csv: a line for each training. Fields without a value are empty.
fn csv(rows: &[Row]) -> String {
    let mut csv = "seed,recipe,held_out_loss,percent,median_step_ms\n".to_owned();
    let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    for row in rows {
        let percent = row.percent(rows).map(|percent| format!("{percent:.4}")).unwrap_or_default();
        let ms = row.median_step_ms.map(|ms| format!("{ms:.3}")).unwrap_or_default();
        let _ = writeln!(csv, "{},{},{},{percent},{ms}", row.seed, row.recipe, number(row.held_out_loss));
    }
    csv
}

/// Returns the table for a terminal, which is also Markdown: a row for each recipe, a column for each seed.
fn table(rows: &[Row]) -> String {
    let mut seeds: Vec<u64> = Vec::new();
    let mut recipes: Vec<&RecipeName> = Vec::new();
    for row in rows {
        if !seeds.contains(&row.seed) {
            seeds.push(row.seed);
        }
        if !recipes.contains(&&row.recipe) {
            recipes.push(&row.recipe);
        }
    }
    let width = recipes.iter().map(|recipe| title(recipe).len()).max().unwrap_or(0);
    let mut text = "Held-out loss in nats per byte; with a recipe, also how much higher it is than in high precision.\n\n"
        .to_owned();
    let columns: String = seeds.iter().map(|seed| format!(" {:>18} |", format!("seed {seed}"))).collect();
    let _ = writeln!(text, "| {:width$} |{columns}", "recipe");
    let _ = writeln!(text, "|{:-<1$}|{2}", "", width + 2, "-------------------:|".repeat(seeds.len()));
    for recipe in recipes {
        let _ = write!(text, "| {:width$} |", title(recipe));
        for seed in &seeds {
            let row = rows.iter().find(|row| row.seed == *seed && row.recipe == *recipe);
            let _ = write!(text, " {:>18} |", row.map(|row| row.cell(rows)).unwrap_or_default());
        }
        text.push('\n');
    }
    text
}

impl Row {
    fn cell(&self, rows: &[Self]) -> String {
        match (self.held_out_loss, self.percent(rows), self.end) {
            (Some(loss), Some(percent), _) => format!("{loss:.4} {:>8}", signed(percent) + " %"),
            (Some(loss), None, _) => format!("{loss:.4}"),
            (None, _, End::Diverged { step, .. }) => format!("diverged at {step}"),
            (None, _, _) => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::fake::Fake;
    use crate::train::options::parse;
    use std::fs;

    fn compare(line: &str, interrupt: bool) -> (tempfile::TempDir, Result<String, Failure>) {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("text"), "fn main() { let x = 1; }\n".repeat(200)).unwrap();
        let at = folder.path().display().to_string();
        let line = format!("--quiet --text @/text --report-dir @/r {line}").replace('@', &at);
        let run = || {
            let (options, given) = parse(line.split_whitespace())?;
            let mut out = Vec::new();
            Comparison::new::<Fake>(options, &given)?.run::<Fake>(&AtomicBool::new(interrupt), &mut out)?;
            Ok(String::from_utf8(out).unwrap())
        };
        let result = run();
        (folder, result)
    }

    #[test]
    fn every_recipe_is_compared_for_every_seed() {
        let (folder, out) = compare("--steps 30 --compare delayed,mxfp8 --seeds 7,8", false);
        let out = out.unwrap();
        let csv = fs::read_to_string(folder.path().join("r/compare.csv")).unwrap();
        let fields: Vec<Vec<&str>> = csv.lines().skip(1).map(|line| line.split(',').collect()).collect();
        let trained: Vec<[&str; 2]> = fields.iter().map(|fields| [fields[0], fields[1]]).collect();
        let expected =
            [7, 8].map(|seed| ["none", "delayed", "mxfp8"].map(|recipe| (seed.to_string(), recipe)));
        let expected: Vec<_> = expected.into_iter().flatten().collect();
        assert_eq!(trained, expected.iter().map(|(seed, recipe)| [&**seed, recipe]).collect::<Vec<_>>());
        // The percentage refers to the loss in high precision of the same seed, which has none.
        for line in &fields {
            let loss = |line: &Vec<&str>| line[2].parse::<f64>().unwrap();
            let reference = fields.iter().find(|other| other[0] == line[0] && other[1] == "none").unwrap();
            let percent = 100.0 * (loss(line) / loss(reference) - 1.0);
            assert_eq!(line[3].is_empty(), line[1] == "none");
            assert!(line[3].is_empty() || (line[3].parse::<f64>().unwrap() - percent).abs() < 1e-4, "{csv}");
        }
        assert!(out.contains("| recipe         |             seed 7 |             seed 8 |\n"), "{out}");
        assert_eq!(out.lines().filter(|line| line.starts_with('|')).count(), 5, "{out}");
        let widths: Vec<usize> =
            out.lines().filter(|line| line.starts_with('|')).map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{out}");
    }

    #[test]
    fn all_means_every_recipe_with_a_name() {
        let (_folder, out) = compare("--steps 2 --compare all", false);
        let out = out.unwrap();
        for name in fp8_nn::fp8_recipe::Recipe::NAMES {
            assert!(out.contains(&format!("\n| {name} ")), "{name}: {out}");
        }
        assert!(out.contains(" seed 1337 |"), "{out}");
    }

    #[test]
    fn an_interrupted_comparison_leaves_its_table() {
        let (folder, out) = compare("--steps 9 --compare current --seeds 3", true);
        let sentence = out.unwrap_err().to_string();
        assert!(sentence.starts_with("interrupted after step 1 of seed 3, high precision; "), "{sentence}");
        assert!(sentence.ends_with("compare.csv has the trainings until then"), "{sentence}");
        assert_eq!(fs::read_to_string(folder.path().join("r/compare.csv")).unwrap().lines().count(), 2);
    }

    #[test]
    fn options_that_do_not_fit_are_refused() {
        let refused = |line: &str| compare(line, false).1.unwrap_err().to_string();
        assert_eq!(
            refused("--compare current --save @/c"),
            "error: --save cannot be used with --compare: leave it out"
        );
        assert_eq!(
            refused("--compare block,mxfp8 --margin 1"),
            "error: --margin goes with --recipe delayed or current: write both into a file *.toml"
        );
        assert!(refused("--compare a.toml").starts_with("error: --recipe a.toml: "));
    }

    #[test]
    fn a_training_that_diverged_has_no_percentage() {
        let row =
            |recipe, end, held_out_loss| Row { seed: 1, recipe, end, held_out_loss, median_step_ms: None };
        let diverged = End::Diverged { step: 12, loss: f64::NAN };
        let rows = [
            row(RecipeName::None, End::Complete, Some(2.0)),
            row(RecipeName::Current, diverged, None),
            row(RecipeName::Delayed, End::Complete, Some(1.99)),
        ];
        let cells = rows.each_ref().map(|row| row.cell(&rows));
        assert_eq!(cells, ["2.0000", "diverged at 12", "1.9900  −0.50 %"]);
        assert_eq!(csv(&rows).lines().nth(2), Some("1,current,,,"));
    }
}
