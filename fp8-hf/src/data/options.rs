//! The options of [`Dataset::open`](super::Dataset::open).

use crate::{Error, Result};
use std::fmt;
use std::path::PathBuf;

/// The kind of a data set, found by the names of its files and the keys of its lines.
///
/// ```
/// use fp8_hf::data::DataKind;
/// assert_eq!(DataKind::Prompts.to_string(), "prompts with completions");
/// assert!(DataKind::Messages.has_answers() && !DataKind::Shards.has_answers());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DataKind {
    /// Documents: files of text, or JSON lines with `text`.
    Text,
    /// JSON lines with `prompt` and `completion`.
    Prompts,
    /// JSON lines with `messages`, which the model's chat template renders.
    Messages,
    /// Files of tokens, see [`TokenFile`](crate::TokenFile).
    Shards,
}

impl DataKind {
    /// Returns true for data whose samples consist of questions and answers.
    #[must_use]
    pub const fn has_answers(self) -> bool {
        matches!(self, Self::Prompts | Self::Messages)
    }
}

impl fmt::Display for DataKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Text => "text",
            Self::Prompts => "prompts with completions",
            Self::Messages => "conversations",
            Self::Shards => "files of tokens",
        })
    }
}

/// The tokens that the model learns. [`DataOptions`] has an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossOn {
    /// All tokens, except the first of each sample, which nothing predicts.
    All,
    /// Completions, and the messages of the assistant.
    Answers,
}

/// The way in which samples become sequences. [`DataOptions`] has an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pack {
    /// Whole samples in their order; a new sequence begins where the next sample does not fit.
    Whole,
    /// Windows over the samples joined: each takes up where the last one ended. The rest at the end is left out.
    Stream,
    /// Whole samples, the longest first, each into the sequence with the least room that is enough.
    BestFit,
    /// One sample in each sequence.
    None,
}

/// The treatment of a sample that is longer than a sequence, where samples are kept whole. [`DataOptions`] has an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TooLong {
    /// It is left out.
    Drop,
    /// Its end is left out.
    Cut,
    /// It becomes several pieces of the length of a sequence, which do not read each other. The first token of a piece is the last
    /// target of the piece before. A conversation whose template renders earlier answers differently once later messages follow
    /// becomes one sample for each answer; without this option it is an error.
    Split,
}

/// The data that are set aside to measure the loss on. [`DataOptions`] has an example.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Validation {
    /// None, unless the data are a folder with `train.jsonl` and `valid.jsonl`.
    #[default]
    None,
    /// This share of the samples, or of the windows of [`Pack::Stream`], drawn by the seed: above 0, below 1. At least one is drawn,
    /// and at least one is left.
    Fraction(f64),
    /// Files or folders of their own.
    Files(Vec<PathBuf>),
}

/// The options of [`Dataset::open`](super::Dataset::open).
///
/// ```
/// use fp8_hf::data::{DataOptions, LossOn, Pack, TooLong, Validation};
/// let options = DataOptions {
///     seq: 512,
///     loss: Some(LossOn::Answers),
///     pack: Some(Pack::BestFit),
///     too_long: Some(TooLong::Cut),
///     validation: Validation::Fraction(0.05),
///     ..DataOptions::default()
/// };
/// assert!(!options.cross_documents && options.cache.is_none());
/// ```
#[derive(Debug, Clone)]
pub struct DataOptions {
    /// The tokens of a sequence, targets included: at least 1. Default: 2048.
    pub seq: usize,
    /// The tokens that are learned; `None`: the answers where there are answers, otherwise all. Default: `None`.
    pub loss: Option<LossOn>,
    /// The packing; `None`: `Stream` for text and files of tokens, otherwise `Whole`. Default: `None`.
    pub pack: Option<Pack>,
    /// Whether the documents in a sequence of [`Pack::Stream`] read each other; positions then run on, and the first token of a
    /// document is learned from the one before. Default: false.
    pub cross_documents: bool,
    /// The treatment of samples longer than `seq`; `None`: `Drop` where there are answers, otherwise `Cut`. [`Pack::Stream`] joins
    /// samples of any length. Default: `None`.
    pub too_long: Option<TooLong>,
    /// The data that are set aside. Default: `Validation::None`.
    pub validation: Validation,
    /// The seed that draws [`Validation::Fraction`]. Default: 1337.
    pub seed: u64,
    /// The folder in which the tokens are kept, so that the next start need not make them again; `None`: a temporary folder, which is
    /// removed with the data set. Default: `None`.
    pub cache: Option<PathBuf>,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self {
            seq: 2048,
            loss: None,
            pack: None,
            cross_documents: false,
            too_long: None,
            validation: Validation::None,
            seed: 1337,
            cache: None,
        }
    }
}

/// The options with the defaults of a kind of data filled in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Resolved {
    pub(super) kind: DataKind,
    pub(super) seq: usize,
    pub(super) loss: LossOn,
    pub(super) pack: Pack,
    pub(super) cross: bool,
    pub(super) too_long: TooLong,
}

/// Returns the error about an option.
pub(super) fn refused(option: &'static str, value: impl fmt::Debug, remedy: &str) -> Error {
    Error::Option {
        part: "training data".to_owned(),
        option,
        value: format!("{value:?}"),
        remedy: remedy.to_owned(),
    }
}

impl DataOptions {
    /// Checks what needs no file to be read.
    pub(super) fn check(&self) -> Result<()> {
        if self.seq == 0 || u32::try_from(self.seq).is_err() {
            return Err(refused("seq", self.seq, "expected the tokens of a sequence, at least 1"));
        }
        match self.validation {
            Validation::Fraction(share) if !(share > 0.0 && share < 1.0) => Err(refused(
                "validation",
                share,
                "expected a share above 0 and below 1, such as 0.05, or files",
            )),
            _ => Ok(()),
        }
    }

    /// Fills in the defaults for a kind of data, and refuses options that do not belong together.
    pub(super) fn resolve(&self, kind: DataKind) -> Result<Resolved> {
        let has_answers = kind.has_answers();
        let loss = self.loss.unwrap_or(if has_answers { LossOn::Answers } else { LossOn::All });
        if loss == LossOn::Answers && !has_answers {
            let remedy = format!(
                "the data are {kind}, which have no answers: use a loss on all tokens, or JSON lines with prompt and completion, or \
                 messages"
            );
            return Err(refused("loss", loss, &remedy));
        }
        let pack = self.pack.unwrap_or(if has_answers { Pack::Whole } else { Pack::Stream });
        if pack != Pack::Stream && kind == DataKind::Shards {
            let remedy = "the data are files of tokens, in which windows are read: expected Stream";
            return Err(refused("pack", pack, remedy));
        }
        if pack != Pack::Stream && self.cross_documents {
            let remedy =
                format!("only the packing Stream lets documents read each other, and it is {pack:?}");
            return Err(refused("cross_documents", true, &remedy));
        }
        if pack == Pack::Stream
            && let Some(too_long @ (TooLong::Drop | TooLong::Cut)) = self.too_long
        {
            let remedy = "samples that are joined and cut into windows are never too long: leave it out, or choose another packing";
            return Err(refused("too_long", too_long, remedy));
        }
        let too_long = self.too_long.unwrap_or(if has_answers { TooLong::Drop } else { TooLong::Cut });
        Ok(Resolved { kind, seq: self.seq, loss, pack, cross: self.cross_documents, too_long })
    }
}
