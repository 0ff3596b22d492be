//! `fp8 eval`: how well a model predicts a text.

use crate::failure::Failure;
use crate::model::{Loaded, ModelOptions, peak_memory, with_threads};
use crate::options::count;
use crate::progress::{Unit, watch};
use crate::table::{bytes, count as counted};
use clap::Args;
use fp8_nn::fp8_kernels::AtomicFile;
use fp8_nn::hf::{Dtype, Folder, Tokenizer, Weights};
use fp8_nn::{TokenLosses, token_losses};
use serde_json::json;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 eval SmolLM2-135M --text book.txt
  fp8 eval SmolLM2-135M-FP8 --text book.txt

The text is cut into windows of --seq-length tokens. The model reads each from its start and predicts every token but the first.
The loss is the mean of their losses in nats, the perplexity exp(loss). No special tokens are added. Compare models with the same
text, tokenizer and --seq-length only.";

#[derive(Debug, Args)]
pub(crate) struct Eval {
    #[command(flatten)]
    model: ModelOptions,
    /// A text file (UTF-8), or a folder whose files are joined in the order of their paths
    #[arg(long, value_name = "FILE|DIR", required_unless_present = "ids")]
    text: Option<PathBuf>,
    /// Tokens in place of a text: a safetensors file with `input_ids`, integers [windows, tokens]
    #[arg(long, value_name = "FILE.safetensors", conflicts_with_all = ["text", "seq_length"])]
    ids: Option<PathBuf>,
    /// Tokens in a window (default: 512, or the longest sequence of the model if that is shorter)
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    seq_length: Option<usize>,
    /// Stops after so many windows (default: the whole text)
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
    if let Some(path) = &options.losses {
        crate::inspect::expect_writable("--losses", path)?;
    }
    with_threads(options.model.threads, || {
        let text = options.text.as_deref().map(|path| read_text("--text", path)).transpose()?;
        let opened = options.model.open()?;
        let windows = options.read_windows(text.as_deref(), &opened.folder)?;
        let mut loaded = options.model.load(opened)?;
        let start = Instant::now();
        let losses = {
            let mut cx = loaded.scaling.eval(&loaded.recipe).map_err(fp8_nn::Error::from)?;
            watch(Unit::Tokens, |monitor| token_losses(&loaded.model, &mut cx, &windows, monitor))?
        };
        let time = start.elapsed();
        if losses.windows.len() < windows.len() {
            return Err(Failure::Interrupted);
        }
        if let Some(path) = &options.losses {
            write_losses(path, &windows, &losses)?;
        }
        let done = Done { options, loaded: &loaded, windows: &windows, losses: &losses, time };
        Ok(if options.json { done.json() } else { done.sentences() })
    })
}

/// Reads the text that an option names, as UTF-8.
pub(crate) fn read_text(option: &str, path: &Path) -> Result<String, Failure> {
    let refused = |problem: String| Failure::input(format!("{option} {problem}"));
    let unreadable = |error| refused(format!("{error}: expected a text file, or a folder of text files"));
    let (mut bytes, mut ends) = (Vec::new(), Vec::new());
    for file in fp8_nn::text::files(path).map_err(unreadable)? {
        bytes.extend(fp8_nn::text::read(&file).map_err(unreadable)?);
        ends.push((bytes.len(), file));
    }
    // Joined first: a text that was split may be cut within a character.
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let file = ends.partition_point(|&(end, _)| end <= at);
        let start = file.checked_sub(1).map_or(0, |before| ends[before].0);
        let file = ends.get(file).map_or(path, |(_, file)| file);
        let expected = "expected text, or a folder of text files";
        refused(format!("{}: no UTF-8 text at byte {}: {expected}", file.display(), at - start))
    })?;
    match text.is_empty() {
        true => Err(refused(format!("{}: it is empty: expected a text", path.display()))),
        false => Ok(text),
    }
}

impl Eval {
    fn read_windows(&self, text: Option<&str>, folder: &Folder) -> Result<Vec<Vec<i32>>, Failure> {
        let config = &folder.config;
        let longest = config.max_position_embeddings;
        let mut windows = match (text, &self.ids) {
            (Some(text), _) => {
                let seq = self.seq_length.unwrap_or(SEQ_LENGTH.min(longest));
                if seq < 2 || seq > longest {
                    return Err(Failure::input(format!(
                        "--seq-length {seq}: expected 2 to {longest}, the longest sequence of the model"
                    )));
                }
                let tokenizer = Tokenizer::open(folder.path(), config.vocab_size)?;
                let tokens = tokenizer.encode(text, false)?;
                tokens.chunks(seq).filter(|window| window.len() > 1).map(<[i32]>::to_vec).collect()
            }
            (None, Some(path)) => read_ids(path, longest)?,
            (None, None) => Vec::new(),
        };
        if windows.is_empty() {
            return Err(Failure::input("the text has fewer than 2 tokens: there is nothing to predict"));
        }
        windows.truncate(self.windows.unwrap_or(usize::MAX));
        Ok(windows)
    }
}

/// Reads windows of tokens.
fn read_ids(path: &Path, longest: usize) -> Result<Vec<Vec<i32>>, Failure> {
    const NAME: &str = "input_ids";
    let refused = |problem: String| Failure::input(format!("--ids {}: {problem}", path.display()));
    let weights = Weights::open(path)?;
    let info = weights.info(NAME).ok_or_else(|| refused(format!("there is no `{NAME}`")))?;
    let (&[_, seq], Dtype::I32 | Dtype::I64) = (&info.shape[..], info.dtype) else {
        return Err(refused(format!(
            "`{NAME}` is {:?} {:?}: expected [windows, tokens] in I32 or I64",
            info.dtype, info.shape
        )));
    };
    if seq < 2 || seq > longest {
        return Err(refused(format!(
            "windows of {seq} tokens: expected 2 to {longest}, the longest of the model"
        )));
    }
    let mut bytes = vec![0; usize::try_from(info.bytes).map_err(|error| refused(error.to_string()))?];
    weights.read(NAME, 0, &mut bytes)?;
    let ids: Option<Vec<i32>> = match info.dtype {
        Dtype::I32 => Some(bytes.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect()),
        _ => bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes).try_into().ok()).collect(),
    };
    let ids = ids.ok_or_else(|| refused(format!("`{NAME}` has numbers that are no tokens")))?;
    Ok(ids.chunks(seq).map(<[i32]>::to_vec).collect())
}

fn write_losses(path: &Path, windows: &[Vec<i32>], losses: &TokenLosses) -> Result<(), Failure> {
    let mut text = String::from("window,position,token,loss\n");
    for (index, (window, losses)) in windows.iter().zip(&losses.windows).enumerate() {
        for (position, (token, loss)) in window.iter().skip(1).zip(losses).enumerate() {
            let _ = writeln!(text, "{index},{},{token},{loss}", position + 1);
        }
    }
    let written = AtomicFile::create(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.commit()
    });
    written.map_err(|error| Failure::Work(format!("{}: {error}", path.display())))
}

/// What is reported.
struct Done<'a> {
    options: &'a Eval,
    loaded: &'a Loaded,
    windows: &'a [Vec<i32>],
    losses: &'a TokenLosses,
    time: Duration,
}

impl Done<'_> {
    fn tokens(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    fn speed(&self) -> f64 {
        self.tokens() as f64 / self.time.as_secs_f64()
    }

    fn json(&self) -> String {
        let value = json!({
            "model": self.options.model.model.display().to_string(),
            "arithmetic": self.options.model.arithmetic(self.loaded),
            "windows": self.windows.len(),
            "seq_length": self.windows.first().map(Vec::len),
            "tokens": self.tokens(),
            "predicted": self.losses.count(),
            "loss": self.losses.mean(),
            "perplexity": self.losses.perplexity(),
            "seconds": self.time.as_secs_f64(),
            "tokens_per_second": self.speed(),
            "seconds_to_load": self.loaded.loading.as_secs_f64(),
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
            counted(self.windows.len(), "window"),
            self.windows.first().map_or(0, Vec::len),
            self.speed(),
        );
        if let Some(peak) = peak_memory() {
            let _ = write!(text, ", at most {} of memory", bytes(peak));
        }
        text + "\n"
    }
}
