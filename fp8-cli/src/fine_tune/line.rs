//! The command line of a fine-tuning, together with the file that `--config` names.

use crate::command_line::{self, Parsed, named, with_negative_numbers};
use crate::failure::Failure;
use crate::fine_tune::options::{FREE, FineTune, OF_LAYOUT, OF_NEW_ADAPTERS, OF_PROGRAM, PLACES};
use crate::train::options::Train;
use clap::Args;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

const EXAMPLE: &str = "Example:
  fp8 train SmolLM2-135M-Instruct --data chats.jsonl --lora 16 --out run
  fp8 train SmolLM2-135M --data book.txt --validation 0.05 --out run
  fp8 train --resume run

The learning rate, the data's order and the loss of a step depend on its number alone: a run that was interrupted goes on with --resume, bit for bit. The mean of a step's loss is over all \
learned tokens of all its micro-batches and processes. Encoded texts are kept in .fp8-tokens beside RUN, for later runs.";

/// The file in the folder of a run that has its options.
pub(crate) const CONFIG: &str = "config.toml";
/// The positional argument, under the name that files use.
const MODEL: &str = "model";

/// The copy of the recipe's file in the folder of a run.
pub(crate) const RECIPE: &str = "recipe.toml";

/// The help, or the options of a fine-tuning.
#[derive(Debug)]
pub(crate) enum Line {
    Help(String),
    Options(Box<FineTune>),
}

fn command() -> clap::Command {
    with_negative_numbers(FineTune::augment_args(clap::Command::new("fp8 train").after_help(EXAMPLE)))
}

/// Returns the names of the long options of a command.
fn names(command: &clap::Command) -> Vec<String> {
    command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned)).collect()
}

fn of_small_run() -> Vec<String> {
    names(&Train::augment_args(clap::Command::new("fp8 train")))
}

/// Whether a command line behind `fp8 train` is of a fine-tuning: it names a model, or has an option that only this has, or resumes the
/// run of one.
pub(crate) fn is_meant(words: &[OsString]) -> bool {
    let (own, small) = (names(&command()), of_small_run());
    let is_own = |word: &OsString| {
        let name = word
            .to_str()
            .and_then(|word| word.strip_prefix("--"))
            .map(|word| word.split('=').next().unwrap_or(word));
        name.is_some_and(|name| own.iter().any(|own| own == name) && !small.iter().any(|small| small == name))
    };
    let names_model = words.first().is_some_and(|word| !word.as_encoded_bytes().starts_with(b"-"));
    names_model || words.iter().any(is_own) || resumed(words).is_some_and(|folder| is_run(&folder))
}

/// Returns the folder behind `--resume`.
fn resumed(words: &[OsString]) -> Option<PathBuf> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--resume" {
            return words.next().map(PathBuf::from);
        }
        if let Some(folder) = word.to_str().and_then(|word| word.strip_prefix("--resume=")) {
            return Some(folder.into());
        }
    }
    None
}

/// Whether a folder is that of a run, and not of checkpoints that `--save` wrote.
pub(crate) fn is_run(folder: &Path) -> bool {
    folder.join(CONFIG).is_file()
}

/// The counterparts of options of the small run.
const COUNTERPARTS: [(&str, &str); 13] = [
    ("text", "--data"),
    ("save", "--out"),
    ("report-dir", "--out"),
    ("model", "a folder as the first argument"),
    ("layers", "the layers of the model's folder"),
    ("hidden", "the width of the model's folder"),
    ("heads", "the heads of the model's folder"),
    ("history-len", "--recipe FILE.toml"),
    ("margin", "--recipe FILE.toml"),
    ("format", "--recipe FILE.toml"),
    ("compare", "one run for each recipe"),
    ("seeds", "one run for each --seed"),
    ("sample", "fp8 generate RUN/final"),
];

/// Parses a command line behind `fp8 train`.
pub(crate) fn parse(words: &[OsString]) -> Result<Line, Failure> {
    expect_own(words)?;
    let (options, given) = match parse_words(words)? {
        Line::Help(text) => return Ok(Line::Help(text)),
        Line::Options(options) => {
            let given = given(words)?;
            (options, given)
        }
    };
    let file = match (&options.config, &options.resume) {
        (Some(_), Some(_)) => {
            let text =
                "--config and --resume exclude each other: a run has its options in its own config.toml";
            return Err(Failure::input(text));
        }
        (Some(file), None) => Source { path: file.clone(), is_run: false },
        (None, Some(folder)) => {
            if !is_run(folder) {
                return Err(Failure::input(format!(
                    "--resume {}: expected the folder of a run, with its {CONFIG}",
                    folder.display()
                )));
            }
            Source { path: folder.join(CONFIG), is_run: true }
        }
        (None, None) => return Ok(Line::Options(options)),
    };
    let stored = file.words(&given)?;
    let mut whole = stored;
    whole.extend(words.iter().cloned());
    match parse_words(&whole).map_err(|failure| file.failure(failure))? {
        Line::Options(mut merged) => {
            if merged.base.is_none() {
                merged.base = file.model()?;
            }
            Ok(Line::Options(merged))
        }
        help => Ok(help),
    }
}

/// Refuses an option of the small run by its counterpart.
fn expect_own(words: &[OsString]) -> Result<(), Failure> {
    let (own, small) = (names(&command()), of_small_run());
    for word in words {
        let Some(name) = word.to_str().and_then(|word| word.strip_prefix("--")) else { continue };
        let name = name.split('=').next().unwrap_or(name);
        if own.iter().any(|own| own == name) || !small.iter().any(|small| small == name) {
            continue;
        }
        let counterpart = COUNTERPARTS.iter().find(|(small, _)| *small == name);
        let instead =
            counterpart.map(|(_, instead)| format!("; a fine-tuning has {instead}")).unwrap_or_default();
        return Err(Failure::input(format!(
            "--{name} is an option of the small run, which has no model's folder{instead}"
        )));
    }
    Ok(())
}

fn with_program(words: &[OsString]) -> Vec<OsString> {
    std::iter::once("fp8 train".into()).chain(words.iter().cloned()).collect()
}

fn parse_words(words: &[OsString]) -> Result<Line, Failure> {
    Ok(match command_line::parse::<FineTune>(command(), with_program(words))? {
        Parsed::Help(text) => Line::Help(text),
        Parsed::Options(options, _) => Line::Options(Box::new(options)),
    })
}

/// Returns the names of the options that the command line has.
fn given(words: &[OsString]) -> Result<Vec<String>, Failure> {
    Ok(match command_line::parse::<FineTune>(command(), with_program(words))? {
        Parsed::Help(_) => Vec::new(),
        Parsed::Options(_, matches) => {
            // clap also names the group of all options.
            let known = names(&command());
            let name = |id: &str| if id == "base" { MODEL.to_owned() } else { id.replace('_', "-") };
            named(&matches).map(name).filter(|name| name == MODEL || known.contains(name)).collect()
        }
    })
}

/// A file with options.
struct Source {
    path: PathBuf,
    /// Whether it is that of a run that is resumed.
    is_run: bool,
}

impl Source {
    fn refused(&self, problem: &str) -> Failure {
        let option = if self.is_run { "" } else { "--config " };
        Failure::input(format!("{option}{}: {problem}", self.path.display()))
    }

    fn failure(&self, failure: Failure) -> Failure {
        match failure {
            Failure::Input(sentence) => self.refused(&sentence),
            other => other,
        }
    }

    fn table(&self) -> Result<toml::Table, Failure> {
        if self.path.exists() && !self.path.is_file() {
            return Err(self.refused("not a file: expected options in TOML"));
        }
        let text = fs::read_to_string(&self.path)
            .map_err(|error| self.refused(&format!("{error}: expected options in TOML")))?;
        text.parse::<toml::Table>().map_err(|error| {
            let line =
                error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count()) + 1;
            self.refused(&format!("line {line}: {}", error.message().lines().next().unwrap_or("no TOML")))
        })
    }

    fn model(&self) -> Result<Option<PathBuf>, Failure> {
        let table = self.table()?;
        match table.iter().find(|(key, _)| key.as_str() == MODEL) {
            None => Ok(None),
            Some((_, toml::Value::String(path))) => Ok(Some(path.into())),
            Some(_) => Err(self.refused("model: expected the path of a folder, in quotes")),
        }
    }

    /// Returns the options of the file that the command line does not have, as words of one.
    fn words(&self, given: &[String]) -> Result<Vec<OsString>, Failure> {
        let known: Vec<String> = names(&command())
            .into_iter()
            .filter(|name| !matches!(name.as_str(), "config" | "resume" | "help"))
            .collect();
        let fixed = |name: &&String| {
            !FREE.contains(&name.as_str())
                && !PLACES.contains(&name.as_str())
                && !OF_PROGRAM.contains(&name.as_str())
        };
        if let Some(name) = given.iter().find(fixed).filter(|_| self.is_run) {
            return Err(self.refused(&format!(
                "--{name} decides the results of the run, whose options are there: leave it out to resume"
            )));
        }
        let mut words = Vec::new();
        for (key, value) in self.table()? {
            let name = key.replace('_', "-");
            if name != MODEL && !known.contains(&name) {
                return Err(self.refused(&format!("{key}: unknown option{}", nearest(&name, &known))));
            }
            if given.contains(&name) {
                continue;
            }
            // `--epochs` and `--steps` stand for each other, and so do ways of packing. A layout is given as a whole.
            let alike = [&["epochs", "steps"][..], &["pack", "no-pack"], &["lora", "adapter"], &OF_LAYOUT];
            let is_replaced = alike.iter().any(|alike| {
                alike.contains(&name.as_str())
                    && alike.iter().any(|other| given.iter().any(|given| given == other))
            });
            // Options of new adapters go with `--lora`.
            let is_of_new =
                OF_NEW_ADAPTERS.contains(&name.as_str()) && given.iter().any(|given| given == "adapter");
            if name != MODEL && !is_replaced && !is_of_new {
                self.append(&mut words, &name, &value)?;
            }
        }
        Ok(words)
    }

    fn append(&self, words: &mut Vec<OsString>, name: &str, value: &toml::Value) -> Result<(), Failure> {
        let is_flag = command()
            .get_arguments()
            .any(|arg| arg.get_long() == Some(name) && !arg.get_action().takes_values());
        let one = |value: &toml::Value| match value {
            toml::Value::String(text) => Ok(text.clone()),
            toml::Value::Integer(number) => Ok(number.to_string()),
            toml::Value::Float(number) => Ok(format!("{number:?}")),
            _ => Err(self.refused(&format!("{name}: expected a text, a number, or a list of them"))),
        };
        match value {
            toml::Value::Boolean(true) if is_flag => words.push(format!("--{name}").into()),
            toml::Value::Boolean(false) if is_flag => {}
            _ if is_flag => return Err(self.refused(&format!("{name}: expected true or false"))),
            toml::Value::Array(list) => {
                for value in list {
                    words.push(format!("--{name}={}", one(value)?).into());
                }
            }
            // The copy of a recipe's file is in the run's folder, wherever that is now.
            toml::Value::String(file) if self.is_run && name == "recipe" && file == RECIPE => {
                let folder = self.path.parent().unwrap_or(Path::new("."));
                words.push(concat("--recipe=", &folder.join(file)));
            }
            toml::Value::Table(table) if matches!(name, "rank-pattern" | "alpha-pattern") => {
                for (pattern, value) in table {
                    words.push(format!("--{name}={pattern}={}", one(value)?).into());
                }
            }
            value => words.push(format!("--{name}={}", one(value)?).into()),
        }
        Ok(())
    }
}

/// Joins an option and its path, of whatever bytes.
fn concat(option: &str, path: &Path) -> OsString {
    let mut word = OsString::from(option);
    word.push(path);
    word
}

/// Names the known option that is most like `name`, if one is.
fn nearest(name: &str, known: &[String]) -> String {
    let likeness = |other: &&String| (strsim::jaro_winkler(name, other) * 1e6) as u32;
    match known.iter().max_by_key(likeness).filter(|other| likeness(other) > 700_000) {
        Some(other) => format!("; did you mean {other}?"),
        None => "; fp8 train MODEL --help lists the options".to_owned(),
    }
}
