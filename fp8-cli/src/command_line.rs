//! Command lines in general: mistakes in one sentence, and help that fits a terminal.

use crate::failure::Failure;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};
use std::error::Error as _;
use std::ffi::OsString;

/// The result of a command line.
#[derive(Debug)]
pub(crate) enum Parsed<T> {
    /// Help, or the version.
    Help(String),
    /// Options, and what they were read from.
    Options(T, ArgMatches),
}

/// Parses a command line, program name included.
pub(crate) fn parse<T: FromArgMatches>(
    command: Command,
    line: impl IntoIterator<Item = OsString>,
) -> Result<Parsed<T>, Failure> {
    let names = command.get_subcommands().map(|command| command.get_name().to_owned());
    let commands: Vec<String> = names.collect();
    let parsed = command.try_get_matches_from(line).and_then(|matches| {
        let options = T::from_arg_matches(&matches)?;
        Ok(Parsed::Options(options, matches))
    });
    parsed.or_else(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Parsed::Help(wrapped(&error.to_string()))),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Failure::input(format!("expected a command: {}; fp8 --help says more", commands.join(", "))))
        }
        _ => Err(Failure::input(sentence(&error, &commands))),
    })
}

/// Makes a negative number a wrong value instead of an unknown option.
pub(crate) fn with_negative_numbers(command: Command) -> Command {
    command.mut_args(|arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    })
}

/// Returns the ids of the options that the command line names, as opposed to defaults.
pub(crate) fn named(matches: &ArgMatches) -> impl Iterator<Item = &str> {
    let is_named = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    matches.ids().filter(is_named).map(|id| id.as_str())
}

/// The columns of a line of help.
const WIDTH: usize = 100;

/// Breaks long lines. What follows is indented as the description of an option is.
fn wrapped(text: &str) -> String {
    let mut all = String::new();
    for line in text.lines() {
        let indent = description(line);
        let mut column = 0;
        for word in line[indent..].split_inclusive(' ') {
            let width = word.trim_end().chars().count();
            if column == 0 {
                all += &line[..indent];
                column = line[..indent].chars().count();
            } else if column + width > WIDTH {
                all.truncate(all.trim_end_matches(' ').len());
                all.push('\n');
                column = line[..indent].chars().count();
                all.extend(std::iter::repeat_n(' ', column));
            }
            all += word;
            column += word.chars().count();
        }
        all.push('\n');
    }
    all
}

/// Returns where the description in a line of help begins: behind the name of an option, or behind the indent.
fn description(line: &str) -> usize {
    let indent = line.len() - line.trim_start().len();
    let behind = |name: &str| {
        indent
            + name.len()
            + (line[indent + name.len()..].len() - line[indent + name.len()..].trim_start().len())
    };
    match line[indent..].split_once("  ") {
        // A sentence that has two spaces is no option.
        Some((name, _)) if indent > 0 && name.len() < WIDTH / 2 => behind(name),
        _ => indent,
    }
}

/// Turns an error of clap into one sentence.
fn sentence(error: &clap::Error, commands: &[String]) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let option = text(ContextKind::InvalidArg).split_whitespace().next().unwrap_or_default();
    let value = text(ContextKind::InvalidValue);
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let command = text(ContextKind::InvalidSubcommand);
            format!("unknown command {command}; the known ones are {}", commands.join(", "))
        }
        ErrorKind::UnknownArgument if !option.starts_with('-') => {
            let argument = text(ContextKind::InvalidArg);
            format!(
                "unexpected argument {argument}: put quotes around text with spaces; --help lists the arguments"
            )
        }
        ErrorKind::UnknownArgument => match text(ContextKind::SuggestedArg) {
            "" => format!("unknown option {option}; --help lists the options"),
            suggested => format!("unknown option {option}; did you mean {suggested}?"),
        },
        ErrorKind::ArgumentConflict => match error.get(ContextKind::PriorArg) {
            Some(ContextValue::String(prior)) => {
                let prior = prior.split_whitespace().next().unwrap_or_default();
                if prior == option {
                    return format!("{option} may be given only once");
                }
                format!("{option} and {prior} exclude each other: give one of them")
            }
            _ => format!("{option} does not go with the other options"),
        },
        ErrorKind::InvalidValue if value.is_empty() => format!("{option} needs a value"),
        ErrorKind::InvalidValue => match error.get(ContextKind::ValidValue) {
            Some(ContextValue::Strings(known)) => {
                format!("{option} {value}: unknown; the known ones are {}", known.join(", "))
            }
            _ => format!("{option} {value}: not a value of this option"),
        },
        ErrorKind::ValueValidation => match error.source() {
            Some(source) => format!("{option} {value}: {source}"),
            None => format!("{option} {value}: not a value of this option"),
        },
        ErrorKind::MissingRequiredArgument => match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(missing)) => {
                let verb = if missing.len() == 1 { "is" } else { "are" };
                format!("{} {verb} missing; --help has an example", missing.join(", "))
            }
            _ => "an argument is missing; --help has an example".into(),
        },
        _ => {
            let text = error.to_string();
            text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_of_help_are_wrapped() {
        let line = format!("      --recipe <NAME>  {}", "How inputs are quantized ".repeat(8));
        let text = wrapped(&line);
        assert!(text.lines().count() > 1, "{text}");
        for (index, line) in text.lines().enumerate() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert!(index == 0 || line.starts_with(&" ".repeat(23)), "{line}");
        }
        assert_eq!(text.split_whitespace().collect::<Vec<_>>(), line.split_whitespace().collect::<Vec<_>>());
    }
}
