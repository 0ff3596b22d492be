//! `fp8 eval`: how well a model predicts a text.

use crate::destination::Destination;
use crate::failure::Failure;
use crate::ids::{read_ids, read_shard};
use crate::model::{Loaded, ModelOptions, peak_memory, with_threads};
use crate::progress::{Unit, spin, watch};
use crate::table::{bytes, count as counted, quoted};
use crate::text_input::read_text;
use crate::values::count;
use crate::windows::{StartToken, Windows};
use clap::Args;
use fp8_hf::{Folder, Tokenizer};
use fp8_hf::{TokenLosses, token_losses};
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 eval SmolLM2-135M --text book.txt
  fp8 eval SmolLM2-135M-FP8 --text book.txt

The text is encoded as a whole, with the tokens that the tokenizer adds, and cut into windows of --seq-length tokens. The model \
reads each from its start and predicts every token but the first. The loss is the mean of their losses in nats, the perplexity \
exp(loss). Compare models with the same text, tokenizer, --seq-length and --start-token only. An evaluation has no history of \
amaxes: the recipe delayed computes as current scaling does; te-v0, and others with calibrate_first_step = false, with scale 1.";

#[derive(Debug, Args)]
pub(crate) struct Eval {
    #[command(flatten)]
    model: ModelOptions,
    /// A text file (UTF-8), a folder whose files are joined in the order of their paths (hidden ones are
    /// skipped), or - for standard input
    #[arg(long, value_name = "FILE|DIR")]
    text: Option<PathBuf>,
    /// Tokens in place of a text: a safetensors file with `input_ids`, integers [windows, tokens]; or a file *.bin of llm.c or nanoGPT,
    /// which is cut into windows of --seq-length tokens
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    ids: Option<PathBuf>,
    /// Tokens in a window (default: 512, or the longest sequence of the model if that is shorter)
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    seq_length: Option<usize>,
    /// The place of the token that the tokenizer puts in front of a text, if any: first (in front of the text, as
    /// transformers encodes it: later windows begin in the middle of the text), each (in front of each window, which then
    /// has fewer tokens of the text) or none
    #[arg(long, value_name = "first|each|none", default_value = "first", value_parser = StartToken::parse, conflicts_with = "ids")]
    start_token: StartToken,
    /// Stops after N windows (default: the whole text)
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    windows: Option<usize>,
    /// Also writes the loss of each token, as CSV
    #[arg(long, value_name = "FILE.csv")]
    losses: Option<PathBuf>,
    /// Prints JSON instead of sentences
    #[arg(long)]
    json: bool,
}

/// The usual length of a window.
pub(crate) const SEQ_LENGTH: usize = 512;

/// Evaluates, and returns what is printed.
pub(crate) fn run(options: &Eval) -> Result<String, Failure> {
    if options.text.is_none() && options.ids.is_none() {
        let text = "there is nothing to predict: give a text with --text, or tokens with --ids; --help has an example";
        return Err(Failure::input(text));
    }
    let inputs: Vec<&Path> = [
        Some(&options.model.model),
        options.text.as_ref(),
        options.ids.as_ref(),
        options.model.recipe_file(),
    ]
    .into_iter()
    .flatten()
    .map(PathBuf::as_path)
    .collect();
    let open = |path: &PathBuf| Destination::open("--losses", path, "csv", &inputs);
    let file = options.losses.as_ref().map(open).transpose()?;
    with_threads(options.model.threads, || {
        let text = options.text.as_deref().map(|path| read_text("--text", path)).transpose()?;
        let opened = spin("opening", || options.model.open())?;
        let windows = spin("reading the text", || options.read_windows(text.as_deref(), &opened.folder))?;
        let longest = windows.tokens.iter().map(Vec::len).max().unwrap_or_default();
        let mut loaded = spin("loading the model", || options.model.load(opened, longest))?;
        let start = Instant::now();
        let losses = {
            let mut cx = loaded.scaling.eval(&loaded.recipe).map_err(fp8_nn::Error::from)?;
            watch(Unit::Tokens, |monitor| token_losses(&loaded.model, &mut cx, &windows.tokens, monitor))?
        };
        let time = start.elapsed();
        if losses.windows.len() < windows.tokens.len() {
            return Err(Failure::Interrupted);
        }
        let done = Done { options, loaded: &loaded, windows: &windows, losses: &losses, time };
        let result = if options.json { done.json() } else { done.sentences() };
        let is_finite = options.expect_finite(&losses);
        if let Some(file) = file {
            // It shows where losses are not finite.
            file.finish(&csv(&windows.tokens, &losses), if is_finite.is_ok() { &result } else { "" })?;
        }
        is_finite.map(|()| result)
    })
}

impl Eval {
    fn read_windows(&self, text: Option<&str>, folder: &Folder) -> Result<Windows, Failure> {
        let config = &folder.config;
        let longest = config.longest_sequence();
        let mut windows = match (text, &self.ids) {
            (Some(text), _) => {
                let seq = self.window_length(longest)?;
                let tokenizer = Tokenizer::open(folder.path(), config.vocab_size)?;
                Windows::of_text(&tokenizer, text, self.start_token, seq, self.windows)?
            }
            (None, Some(path)) if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("bin")) => {
                let seq = self.window_length(longest)?;
                let tokens = read_shard(path, config, seq, self.windows.unwrap_or(usize::MAX))?;
                Windows { tokens, start: None, sentence: None }
            }
            (None, Some(path)) => {
                if self.seq_length.is_some() {
                    let text = "--seq-length has no effect with windows in a safetensors file: leave it out";
                    return Err(Failure::input(text));
                }
                let tokens = read_ids(path, config, self.windows.unwrap_or(usize::MAX))?;
                Windows { tokens, start: None, sentence: None }
            }
            (None, None) => Windows { tokens: Vec::new(), start: None, sentence: None },
        };
        if windows.tokens.is_empty() {
            let text = "--text: it has fewer than 2 tokens: there is nothing to predict; give a longer text";
            return Err(Failure::input(text));
        }
        windows.tokens.truncate(self.windows.unwrap_or(usize::MAX));
        Ok(windows)
    }

    /// Returns the tokens in a window that is cut from a text or a file of tokens.
    fn window_length(&self, longest: usize) -> Result<usize, Failure> {
        let seq = self.seq_length.unwrap_or(SEQ_LENGTH.min(longest));
        if (2..=longest).contains(&seq) {
            return Ok(seq);
        }
        Err(Failure::input(format!(
            "--seq-length {seq}: expected 2 to {longest}, the longest sequence of the model"
        )))
    }

    /// Refuses losses that are no numbers: a mean over them would say nothing.
    fn expect_finite(&self, losses: &TokenLosses) -> Result<(), Failure> {
        let model = &self.model.model;
        for (window, losses) in losses.windows.iter().enumerate() {
            if let Some(position) = losses.iter().position(|loss| !loss.is_finite()) {
                return Err(Failure::input(format!(
                    "{}: the loss of window {window} at position {} is {}: the model produces infinities or NaN; look for \
                     non-finite weights with fp8 inspect {}{}",
                    model.display(),
                    position + 1,
                    losses[position],
                    quoted(model),
                    if self.model.is_narrow() { ", or try --dtype f32" } else { "" },
                )));
            }
        }
        Ok(())
    }
}

/// Returns the losses as CSV.
fn csv(windows: &[Vec<i32>], losses: &TokenLosses) -> String {
    let mut text = String::from("window,position,token,loss\n");
    for (index, (window, losses)) in windows.iter().zip(&losses.windows).enumerate() {
        for (position, (token, loss)) in window.iter().skip(1).zip(losses).enumerate() {
            let _ = writeln!(text, "{index},{},{token},{loss}", position + 1);
        }
    }
    text
}

/// The results of an evaluation, with the options, model and windows that its report names.
struct Done<'a> {
    options: &'a Eval,
    loaded: &'a Loaded,
    windows: &'a Windows,
    losses: &'a TokenLosses,
    time: Duration,
}

impl Done<'_> {
    fn tokens(&self) -> usize {
        self.windows.tokens.iter().map(Vec::len).sum()
    }

    /// Tokens that the model reads in a second. It does not read the last one of a window, from which nothing is predicted.
    fn speed(&self) -> f64 {
        self.losses.count() as f64 / self.time.as_secs_f64()
    }

    fn json(&self) -> String {
        let value = json!({
            "model": self.options.model.model.display().to_string(),
            "arithmetic": self.options.model.arithmetic(self.loaded),
            "windows": self.windows.tokens.len(),
            "seq_length": self.windows.tokens.first().map(Vec::len),
            "start_token": self.windows.start.map(StartToken::name),
            "tokens": self.tokens(),
            "predicted": self.losses.count(),
            "loss": self.losses.mean(),
            "perplexity": self.losses.perplexity(),
            "seconds": self.time.as_secs_f64(),
            "tokens_per_second": self.speed(),
            "seconds_to_load": self.loaded.loading.as_secs_f64(),
            "weight_bytes": self.loaded.weight_bytes(),
            "peak_memory_bytes": peak_memory(),
        });
        format!("{value:#}\n")
    }

    fn sentences(&self) -> String {
        let (loss, perplexity) = (self.losses.mean(), self.losses.perplexity());
        let mut text = format!(
            "{}: perplexity {perplexity:.4}, loss {loss:.5} ({})\n{} predicted in {} of up to {} tokens, {:.1} tokens/s",
            self.options.model.model.display(),
            self.options.model.arithmetic(self.loaded),
            counted(self.losses.count(), "token"),
            counted(self.windows.tokens.len(), "window"),
            self.windows.tokens.first().map_or(0, Vec::len),
            self.speed(),
        );
        if let Some(peak) = peak_memory() {
            let _ = write!(text, ", at most {} of memory", bytes(peak));
        }
        if let Some(sentence) = &self.windows.sentence {
            let _ = write!(text, "\n{sentence}");
        }
        text + "\n"
    }
}
