//! The counts of a data set, which are said before the first step.

use super::options::{DataKind, Pack};
use std::fmt;

/// The counts of one part of a data set, to be shown before the first step. `Display` writes them as sentences; the example of
/// [`Dataset`](super::Dataset) reads some.
///
/// ```
/// use fp8_hf::data::{DataSummary, Sequences};
/// fn announce(part: &Sequences) {
///     let summary: &DataSummary = part.summary();
///     println!("{summary}"); // 9 conversations of 500 tokens, in 5 sequences of 128; 90 tokens are learned.
/// }
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DataSummary {
    /// The kind of the data.
    pub kind: DataKind,
    /// The packing.
    pub pack: Pack,
    /// The tokens of a sequence.
    pub seq: usize,
    /// The sequences.
    pub sequences: usize,
    /// The samples that were read: documents, prompts with completions, or conversations. For files of tokens, the windows.
    pub samples: u64,
    /// The tokens of these samples.
    pub tokens: u64,
    /// The targets that are learned in one pass over the sequences.
    pub learned: u64,
    /// The tokens of padding in all sequences.
    pub padding: u64,
    /// The samples longer than a sequence whose end was left out.
    pub documents_cut: u64,
    /// The tokens that were left out there.
    pub tokens_cut: u64,
    /// The learned tokens among them.
    pub learned_cut: u64,
    /// The samples longer than a sequence that became several pieces.
    pub samples_split: u64,
    /// The samples longer than a sequence that were left out.
    pub samples_dropped: u64,
    /// The learned tokens of these samples.
    pub learned_dropped: u64,
    /// The samples that were left out because no learned token was in them, or none was left after their end was cut off.
    pub samples_unlearned: u64,
    /// The tokens at the end that fill no whole window, and are not read.
    pub tokens_left: u64,
    /// Sentences about something that may be a mistake.
    pub warnings: Vec<String>,
}

impl DataSummary {
    pub(super) fn new(kind: DataKind, pack: Pack, seq: usize) -> Self {
        Self {
            kind,
            pack,
            seq,
            sequences: 0,
            samples: 0,
            tokens: 0,
            learned: 0,
            padding: 0,
            documents_cut: 0,
            tokens_cut: 0,
            learned_cut: 0,
            samples_split: 0,
            samples_dropped: 0,
            learned_dropped: 0,
            samples_unlearned: 0,
            tokens_left: 0,
            warnings: Vec::new(),
        }
    }

    /// Says why nothing is learned.
    pub(super) fn nothing(&self) -> String {
        let mut text = format!("no token is learned: of {} samples", self.samples);
        let longer = [
            (self.samples_dropped, "are longer than"),
            (self.samples_unlearned, "have no learned token within"),
        ];
        let parts: Vec<String> = longer
            .into_iter()
            .filter(|&(count, _)| count > 0)
            .map(|(count, what)| format!("{count} {what} seq = {}", self.seq))
            .collect();
        match parts.is_empty() {
            true => text += ", none has a target",
            false => text = format!("{text}, {}", parts.join(" and ")),
        }
        text + ": use longer sequences, or cut or split the samples"
    }
}

impl fmt::Display for DataSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seq, sequences, samples, tokens, learned, .. } = self;
        let unit = match self.kind {
            DataKind::Text => ("document", "documents"),
            DataKind::Prompts => ("prompt with its completion", "prompts with completions"),
            DataKind::Messages => ("conversation", "conversations"),
            DataKind::Shards => ("window", "windows"),
        };
        let count = |count: u64, one: &str, many: &str| match count {
            1 => format!("1 {one}"),
            _ => format!("{count} {many}"),
        };
        let of = |number: u64| count(number, unit.0, unit.1);
        let all = count(*tokens, "token", "tokens");
        let made = count(*sequences as u64, "sequence", "sequences");
        write!(f, "{} of {all}, in {made} of {seq}; {learned} tokens are learned.", of(*samples))?;
        let used = *sequences as u64 * *seq as u64;
        if self.padding > 0 && used > 0 {
            let share = self.padding as f64 / used as f64 * 100.0;
            write!(f, " Padding takes {share:.1} % of the sequences.")?;
        }
        if self.documents_cut > 0 {
            let (cut, learned) = (self.tokens_cut, self.learned_cut);
            write!(
                f,
                " Cut to {seq} tokens: {}; {cut} tokens are left out, {learned} of them learned ones.",
                of(self.documents_cut)
            )?;
        }
        if self.samples_split > 0 {
            write!(f, " Split into pieces of {seq} tokens: {}.", of(self.samples_split))?;
        }
        if self.samples_dropped > 0 {
            let learned = self.learned_dropped;
            write!(
                f,
                " Left out as longer than {seq} tokens: {}, with {learned} learned tokens.",
                of(self.samples_dropped)
            )?;
        }
        if self.samples_unlearned > 0 {
            write!(f, " Left out as nothing in them is learned: {}.", of(self.samples_unlearned))?;
        }
        if self.tokens_left > 0 {
            write!(f, " Tokens at the end that fill no sequence: {}.", self.tokens_left)?;
        }
        for warning in &self.warnings {
            write!(f, " Warning: {warning}.")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_written_as_sentences() {
        let mut summary = DataSummary::new(DataKind::Messages, Pack::Whole, 64);
        (summary.samples, summary.tokens, summary.sequences, summary.learned) = (9, 500, 5, 90);
        assert_eq!(
            summary.to_string(),
            "9 conversations of 500 tokens, in 5 sequences of 64; 90 tokens are learned."
        );
        summary.padding = 32;
        (summary.documents_cut, summary.tokens_cut, summary.learned_cut) = (1, 30, 7);
        (summary.samples_dropped, summary.learned_dropped) = (2, 80);
        (summary.samples_unlearned, summary.samples_split, summary.tokens_left) = (3, 4, 1);
        summary.warnings.push("it rains".to_owned());
        assert_eq!(
            summary.to_string(),
            "9 conversations of 500 tokens, in 5 sequences of 64; 90 tokens are learned. Padding takes 10.0 % of the sequences. Cut to \
             64 tokens: 1 conversation; 30 tokens are left out, 7 of them learned ones. Split into pieces of 64 tokens: 4 \
             conversations. Left out as longer than 64 tokens: 2 conversations, with 80 learned tokens. Left out as nothing in them \
             is learned: 3 conversations. Tokens at the end that fill no sequence: 1. Warning: it rains."
        );
        assert_eq!(
            summary.nothing(),
            "no token is learned: of 9 samples, 2 are longer than seq = 64 and 3 have no learned token within seq = 64: use longer \
             sequences, or cut or split the samples"
        );
        let summary = DataSummary::new(DataKind::Shards, Pack::Stream, 1);
        assert!(summary.nothing().contains("none has a target"));
    }
}
