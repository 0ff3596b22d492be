//! The failures that end the program, each with one sentence and an exit code.

use std::fmt;

/// Why the program stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// An option, file or checkpoint cannot be used; found before training starts. Exit code 2.
    Input(String),
    /// Training, or writing its results, failed. Exit code 1.
    Training(String),
    /// Ctrl-C. Exit code 130, as shells expect of SIGINT.
    Interrupted(String),
}

impl Failure {
    pub(crate) fn input(sentence: impl Into<String>) -> Self {
        Self::Input(sentence.into())
    }

    pub(crate) fn training(sentence: impl Into<String>) -> Self {
        Self::Training(sentence.into())
    }

    /// Adds a second clause to the sentence.
    pub(crate) fn with(self, clause: &str) -> Self {
        let add = |sentence: String| format!("{sentence}; {clause}");
        match self {
            Self::Input(sentence) => Self::Input(add(sentence)),
            Self::Training(sentence) => Self::Training(add(sentence)),
            Self::Interrupted(sentence) => Self::Interrupted(add(sentence)),
        }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Training(_) => 1,
            Self::Interrupted(_) => 130,
        }
    }
}

/// One line, even if the cause has several.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prefix, sentence) = match self {
            Self::Input(sentence) | Self::Training(sentence) => ("error: ", sentence),
            Self::Interrupted(sentence) => ("", sentence),
        };
        let words: Vec<&str> = sentence.split_whitespace().collect();
        write!(f, "{prefix}{}", words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::input("first\n  second");
        assert_eq!(failure.to_string(), "error: first second");
        assert_eq!(failure.code(), 2);
        assert_eq!(Failure::training("x").code(), 1);
        assert_eq!(Failure::Interrupted("at step 3".into()).to_string(), "at step 3");
    }
}
