//! Samples as tokens, with those that are learned.
//!
//! | sample | tokens | learned |
//! |---|---|---|
//! | document | the text, with what the tokenizer adds, and the token that ends a text | all |
//! | prompt and completion | both as one text, likewise | those with a byte of the completion, and what follows |
//! | conversation | what the chat template renders, and nothing else | those with a byte of an answer |
//!
//! The token that ends a text is not added to a text that ends with it.

use super::options::LossOn;
use super::row::Row;
use super::special::{CONFIG, SpecialTokens};
use super::template::{ChatTemplate, Refusal};
use super::tokens::LEARNED;
use crate::{Config, Error, Result, Tokenizer};
use minijinja::Value;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The reason why a line gives no sample.
#[derive(Debug)]
pub(super) enum Failure {
    /// A mistake in this line.
    Line(String),
    /// Another one.
    Other(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Turns samples into tokens.
#[derive(Debug)]
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: Option<ChatTemplate>,
    /// The tokens that the tokenizer adds in front of a text and behind it.
    start: Vec<i32>,
    end: Vec<i32>,
    /// The token that ends a text.
    pub(super) eos: Option<i32>,
    /// The token that fills sequences.
    pub(super) pad: i32,
    /// The conversations whose text does not begin as the tokenizer's texts do.
    without_start: AtomicU64,
}

/// The tokens of a sample, those that are learned with [`LEARNED`].
pub(super) type Ids = Vec<u32>;

impl<'a> Encoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, config: &Config, needs_template: bool) -> Result<Self> {
        let folder = tokenizer.folder();
        let special = SpecialTokens::read(folder)?;
        let [start, end] = tokenizer.surround()?;
        let named = |name: &str| special.named.get(name);
        let eos = match named("eos_token") {
            Some(token) => Some(tokenizer.id(token).ok_or_else(|| {
                let problem =
                    format!("`eos_token` is `{token}`, which is no token of the model's vocabulary");
                Error::File { path: folder.join(CONFIG), problem }
            })?),
            None => config.eos_token_ids.first().and_then(|&id| i32::try_from(id).ok()),
        };
        let pad = named("pad_token").and_then(|token| tokenizer.id(token)).or(eos).unwrap_or(0);
        let template = if needs_template {
            let found = ChatTemplate::open(folder)?;
            Some(found.ok_or_else(|| Error::File {
                path: folder.to_owned(),
                problem: "it has no chat template, which turns `messages` into text: expected chat_template.jinja, or \
                          chat_template in tokenizer_config.json, as models for conversations have it"
                    .to_owned(),
            })?)
        } else {
            None
        };
        Ok(Self { tokenizer, template, start, end, eos, pad, without_start: AtomicU64::new(0) })
    }

    /// Returns the tokens in front of a document.
    pub(super) fn start(&self) -> Ids {
        self.start.iter().map(|&id| marked(id, true)).collect()
    }

    /// Returns the tokens behind a text whose last token is this one.
    pub(super) fn end(&self, last: Option<u32>) -> Ids {
        let mut ids: Ids = self.end.iter().map(|&id| marked(id, true)).collect();
        let last = ids.last().copied().or(last);
        if let Some(eos) =
            self.eos.map(|id| marked(id, true)).filter(|&eos| last.map(|id| id | LEARNED) != Some(eos))
        {
            ids.push(eos);
        }
        ids
    }

    /// Returns a sentence about conversations that lack a token at their start.
    pub(super) fn warnings(&self) -> Vec<String> {
        let count = self.without_start.load(Relaxed);
        let text = format!(
            "{count} conversations begin without the token that the tokenizer puts in front of a text: the chat template does not \
             write it, and it was not added"
        );
        if count > 0 { vec![text] } else { Vec::new() }
    }

    /// Returns the samples of a line. It is one, unless a conversation is split into its answers.
    pub(super) fn encode(&self, row: &Row, loss: LossOn, splits: bool) -> Result<Vec<Ids>, Failure> {
        match row {
            Row::Text(text) => {
                let mut ids = self.start();
                ids.extend(self.tokenizer.encode(text, false)?.into_iter().map(|id| marked(id, true)));
                ids.extend(self.end(ids.last().copied()));
                Ok(vec![ids])
            }
            Row::Prompt(prompt, completion) => {
                let learned = if loss == LossOn::All { 0 } else { prompt.len() };
                let mut ids: Ids = self.start.iter().map(|&id| marked(id, loss == LossOn::All)).collect();
                let spans = self.tokenizer.encode_spans(&format!("{prompt}{completion}"))?;
                let is_learned = |span: &Range<usize>| span.end > learned || span.start >= learned;
                ids.extend(spans.into_iter().map(|(id, span)| marked(id, is_learned(&span))));
                let last = ids.last().copied();
                // A text that ends with the token has it once, and it is learned.
                let end = self.end(last);
                if let Some(last) = ids.last_mut().filter(|_| end.is_empty()) {
                    *last |= LEARNED;
                }
                ids.extend(end);
                Ok(vec![ids])
            }
            Row::Messages(messages) => self.conversation(messages, loss, splits),
        }
    }

    fn conversation(&self, messages: &[Value], loss: LossOn, splits: bool) -> Result<Vec<Ids>, Failure> {
        let Some(template) = &self.template else {
            return Err(Failure::Line("there is no chat template".to_owned()));
        };
        if loss == LossOn::All {
            let text = template.whole_of(messages).map_err(Failure::Line)?;
            let all = 0..text.len();
            return Ok(vec![self.rendered(&text, &[all])?]);
        }
        let is_answer =
            |message: &Value| message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"));
        if !messages.iter().any(is_answer) {
            let text = "no message has the role `assistant`, so there is nothing to learn: expected an answer, or a loss on all tokens";
            return Err(Failure::Line(text.to_owned()));
        }
        match template.answers_of(messages) {
            Ok((text, answers)) => Ok(vec![self.rendered(&text, &answers)?]),
            Err(Refusal::Changes) if splits => {
                let samples = template.each_answer_of(messages).map_err(Failure::Line)?;
                if samples.is_empty() {
                    let text = "the chat template gives no answer whose prompt is the start of its text, so there is nothing to learn";
                    return Err(Failure::Line(text.to_owned()));
                }
                samples.iter().map(|(text, answers)| Ok(self.rendered(text, answers)?)).collect()
            }
            Err(Refusal::Changes) => Err(Failure::Line(format!(
                "{}: split samples that are too long, which makes a sample for each answer here, or use another template",
                Refusal::Changes.text()
            ))),
            Err(Refusal::Other(text)) => Err(Failure::Line(text)),
        }
    }

    /// Returns the tokens of a rendered text.
    fn rendered(&self, text: &str, learned: &[Range<usize>]) -> Result<Ids> {
        let spans = self.tokenizer.encode_spans(text)?;
        let begins = spans.iter().map(|(id, _)| id).zip(&self.start).filter(|(a, b)| a == b).count();
        if begins < self.start.len() {
            self.without_start.fetch_add(1, Relaxed);
        }
        // Both are in order, so that each range is looked at once.
        let mut ranges = learned.iter().peekable();
        let mut mark = |(id, span): (i32, Range<usize>)| {
            while ranges.peek().is_some_and(|range| range.end <= span.start) {
                ranges.next();
            }
            marked(id, ranges.peek().is_some_and(|range| range.start < span.end && span.start < range.end))
        };
        Ok(spans.into_iter().map(&mut mark).collect())
    }
}

/// Returns the id with its mark.
pub(super) fn marked(id: i32, is_learned: bool) -> u32 {
    // Ids of a vocabulary are not negative.
    id.unsigned_abs() | if is_learned { LEARNED } else { 0 }
}
