//! The failures that end the program, each with one sentence and an exit code.

use crate::interrupt;
use crate::table::is_harmful;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

/// Why the program stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// An option, file or folder cannot be used. Exit code 2.
    Input(String),
    /// A file cannot be read or written on the way. Exit code 1.
    Work(String),
    /// A signal such as Ctrl-C, before anything was written. Exit code 130.
    Interrupted,
    /// A signal that ended a generation, whose text has been printed. Exit code 130.
    Ended,
}

impl Failure {
    pub(crate) fn input(sentence: impl Into<String>) -> Self {
        Self::Input(sentence.into())
    }

    /// Puts the option before the sentence whose file it names, and what was expected behind a file that is not there.
    pub(crate) fn of_file(option: &str, expected: &str, error: fp8_nn::Error) -> Self {
        match &error {
            fp8_nn::Error::Checkpoint { problem, .. } if problem == "not found" => {
                Self::Input(format!("{option} {error}: {expected}"))
            }
            _ => match Self::from(error) {
                Self::Input(sentence) => Self::Input(format!("{option} {sentence}")),
                Self::Work(sentence) => Self::Work(format!("{option} {sentence}")),
                ended => ended,
            },
        }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Work(_) => 1,
            Self::Interrupted | Self::Ended => interrupt::CODE,
        }
    }
}

/// The options of the library that an option of the program sets, and whether it has a value.
const OPTIONS: [(&str, &str, bool); 11] = [
    ("ignore", "--ignore", true),
    ("scheme", "--scheme", true),
    ("dtype", "--dtype", true),
    ("input_scales", "--calibrate", false),
    ("static_inputs", "--static-inputs", false),
    ("max_new_tokens", "--max-new-tokens", true),
    ("temperature", "--temperature", true),
    ("top_k", "--top-k", true),
    ("top_p", "--top-p", true),
    ("max_seq_length", "--seq-length", true),
    ("prompt token", "--prompt: token", true),
];

/// Names of the library in its sentences, and what they are in the program.
const WORDS: [(&str, &str); 5] = [
    (
        "run the model under Recipe::off(), which quantizes no inputs",
        "use --recipe off, which quantizes no inputs",
    ),
    ("run the model under Recipe::off()", "use --recipe off"),
    ("use another GPU or Device::cpu()", "use another GPU, or --device cpu"),
    ("use Device::cpu()", "use --device cpu"),
    ("set allow_ragged", "add --allow-ragged"),
];

/// Replaces names of the library by those of the program.
pub(crate) fn in_words_of_the_program(mut text: String) -> String {
    for (library, program) in WORDS {
        text = text.replace(library, program);
    }
    text
}

fn about_option(option: &str, value: &str, remedy: &str) -> Option<String> {
    let (_, name, has_value) = OPTIONS.into_iter().find(|(known, ..)| *known == option)?;
    Some(if has_value { format!("{name} {value}: {remedy}") } else { format!("{name}: {remedy}") })
}

impl From<fp8_nn::Error> for Failure {
    fn from(error: fp8_nn::Error) -> Self {
        use fp8_nn::Error;
        let text = match &error {
            // Something was created at the output's path meanwhile.
            Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists => error.to_string(),
            Error::Io { .. } => return Self::Work(error.to_string()),
            Error::Option { option, value, remedy, .. }
            | Error::Kernels(fp8_nn::fp8_kernels::Error::Option { option, value, remedy, .. }) => {
                about_option(option, value, remedy).unwrap_or_else(|| error.to_string())
            }
            Error::Checkpoint { path, problem }
                if problem == "not found" && path.file_name().is_some_and(|name| name == "config.json") =>
            {
                let folder = path.parent().unwrap_or(Path::new("."));
                format!(
                    "{}: not found: {} is not a Hugging Face folder, which has config.json and safetensors files",
                    path.display(),
                    folder.display()
                )
            }
            _ => error.to_string(),
        };
        Self::Input(in_words_of_the_program(text))
    }
}

/// One line, even if the cause has several.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentence = match self {
            Self::Input(sentence) | Self::Work(sentence) => sentence.trim(),
            Self::Interrupted | Self::Ended => interrupt::SENTENCE,
        };
        // What is in a file, names of tensors included, must not control the terminal. Spaces stay: they may be those of a path.
        let sentence = sentence.replace("\r\n", " ");
        let text = sentence.chars().map(|c| match c {
            '\n' | '\r' | '\t' => ' ',
            c if is_harmful(c) => '\u{FFFD}',
            c => c,
        });
        write!(f, "error: {}", text.collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_options_and_keep_spaces() {
        let error = fp8_nn::Error::Option {
            layer: "quantize".into(),
            option: "ignore",
            value: "\"x\"".into(),
            remedy: "it matches no layer".into(),
        };
        assert_eq!(Failure::from(error), Failure::input("--ignore \"x\": it matches no layer"));
        let shown = |text: &str| Failure::input(text).to_string();
        assert_eq!(shown("a  b/c: not\nfound\u{202e}"), "error: a  b/c: not found\u{FFFD}");
        assert_eq!(in_words_of_the_program("no GPU: use Device::cpu()".into()), "no GPU: use --device cpu");
    }
}
