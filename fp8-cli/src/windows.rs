//! The windows of tokens that `fp8 eval` reads of a text, with the tokens that the tokenizer adds.

use crate::failure::Failure;
use crate::table::count;
use fp8_hf::Tokenizer;
use std::fmt::Write as _;

/// The place of the start token, which the tokenizer puts in front of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartToken {
    /// In front of the text, which is then cut into windows.
    First,
    /// In front of each window.
    Each,
    /// Nowhere.
    None,
}

impl StartToken {
    const ALL: [Self; 3] = [Self::First, Self::Each, Self::None];

    /// Parses `--start-token`.
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|start| start.name() == name);
        named.ok_or_else(|| "unknown; the known ones are first, each and none".to_owned())
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Each => "each",
            Self::None => "none",
        }
    }
}

/// The windows of tokens that are evaluated.
#[derive(Debug)]
pub(crate) struct Windows {
    pub(crate) tokens: Vec<Vec<i32>>,
    /// The place of a text's start token; `None` if there is none. Windows of `--ids` are read as they are.
    pub(crate) start: Option<StartToken>,
    /// The same in a sentence.
    pub(crate) sentence: Option<String>,
}

impl Windows {
    /// Cuts a text into windows of `seq` tokens, at most `most` of them. The text is encoded as a whole. Tokens that the tokenizer
    /// puts behind it follow its last token.
    pub(crate) fn of_text(
        tokenizer: &Tokenizer,
        text: &str,
        start: StartToken,
        seq: usize,
        most: Option<usize>,
    ) -> Result<Self, Failure> {
        let [begin, end] = match start {
            StartToken::None => [Vec::new(), Vec::new()],
            _ => tokenizer.surround()?,
        };
        // Each window or the whole text begins with the start token.
        let (prefix, mut all) = match start {
            StartToken::Each => (begin.clone(), Vec::new()),
            _ => (Vec::new(), begin.clone()),
        };
        let room = seq.checked_sub(prefix.len()).filter(|&room| room > 0).ok_or_else(|| {
            Failure::input(format!(
                "--seq-length {seq}: each window begins with {}: expected at least {}",
                count(prefix.len(), "start token"),
                prefix.len() + 1
            ))
        })?;
        match most.map(|most| most.saturating_mul(room).saturating_sub(all.len())) {
            Some(wanted) => {
                let tokens = tokenizer.encode_start(text, wanted)?;
                let is_whole = tokens.len() < wanted;
                all.extend(tokens);
                all.extend(end.iter().filter(|_| is_whole));
            }
            None => {
                all.extend(tokenizer.encode(text, false)?);
                all.extend(&end);
            }
        }
        let window = |tokens: &[i32]| [&prefix, tokens].concat();
        let tokens = all.chunks(room).map(window).filter(|window| window.len() > 1).collect();
        let is_added = !(begin.is_empty() && end.is_empty());
        let sentence = Some(sentence(tokenizer, start, &begin, &end)?);
        Ok(Self { tokens, start: Some(if is_added { start } else { StartToken::None }), sentence })
    }
}

/// Says which tokens were added, and where.
fn sentence(tokenizer: &Tokenizer, start: StartToken, begin: &[i32], end: &[i32]) -> Result<String, Failure> {
    let named = |tokens: &[i32]| tokenizer.decode_all(tokens).map(|text| format!("{text:?}"));
    let mut text = "start token: ".to_owned();
    text += &match (start, begin) {
        (StartToken::None, _) => "none, as --start-token says".to_owned(),
        (_, []) => "none, as the tokenizer adds none".to_owned(),
        (StartToken::First, begin) => format!("{} in front of the text", named(begin)?),
        (StartToken::Each, begin) => format!("{} in front of each window", named(begin)?),
    };
    if !end.is_empty() {
        let _ = write!(text, "; {} behind the text", named(end)?);
    }
    Ok(text)
}
