//! How the program ends when it does not succeed: one sentence and an exit code.

use std::fmt;

/// Why the program stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// An option, file or folder cannot be used. Exit code 2.
    Input(String),
    /// A file cannot be read or written on the way. Exit code 1.
    Work(String),
    /// Ctrl-C. Exit code 130, as shells expect of SIGINT.
    Interrupted,
}

impl Failure {
    pub(crate) fn input(sentence: impl Into<String>) -> Self {
        Self::Input(sentence.into())
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Work(_) => 1,
            Self::Interrupted => 130,
        }
    }
}

impl From<fp8_nn::Error> for Failure {
    fn from(error: fp8_nn::Error) -> Self {
        match error {
            fp8_nn::Error::Io { .. } => Self::Work(error.to_string()),
            _ => Self::Input(error.to_string()),
        }
    }
}

/// One line, even if the cause has several.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentence = match self {
            Self::Input(sentence) | Self::Work(sentence) => sentence,
            Self::Interrupted => "interrupted; nothing was written",
        };
        let words: Vec<&str> = sentence.split_whitespace().collect();
        // What is in a file, names of tensors included, must not control the terminal.
        let text: String =
            words.join(" ").chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect();
        write!(f, "error: {text}")
    }
}
