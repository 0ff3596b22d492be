//! `fp8 generate`: text from a model.

use crate::failure::Failure;
use crate::interrupt::{self, Phase};
use crate::model::{ModelOptions, peak_memory, with_threads};
use crate::output::print;
use crate::progress::spin;
use crate::table::{bytes, count as counted, printable_lines};
use crate::values::count;
use clap::Args;
use fp8_hf::{TextStream, Tokenizer};
use fp8_nn::prelude::*;
use serde_json::json;
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 generate SmolLM2-135M --prompt \"The capital of France is\"
  fp8 generate SmolLM2-135M --prompt \"Once upon a time\" --temperature 0.8 --top-p 0.95 --seed 1

The text goes to stdout, what it took to stderr. It ends with a token that ends texts, as generation_config.json or config.json \
names them, or with --max-new-tokens.";

/// The most tokens that are added without `--max-new-tokens`.
const MAX_NEW_TOKENS: usize = 128;

#[derive(Debug, Args)]
pub(crate) struct Generate {
    #[command(flatten)]
    model: ModelOptions,
    /// The text that is continued
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    /// The most tokens that are added (default: 128, or as many as the model's longest sequence has room for)
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    max_new_tokens: Option<usize>,
    /// Divides logits by T before a token is drawn; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f32,
    /// With --temperature above 0: draws from the K most likely tokens only (default: all)
    #[arg(long, value_name = "K", value_parser = count, allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// With --temperature above 0: draws from the most likely tokens only whose probabilities sum to at least P (default: 1, all)
    #[arg(long, value_name = "P", value_parser = top_p, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// The seed of the random numbers (default: 0)
    #[arg(long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Prints JSON at the end, instead of the text as it grows
    #[arg(long)]
    json: bool,
}

/// The generated text, and the time that it took.
struct Done {
    text: String,
    prompt_tokens: usize,
    tokens: Vec<i32>,
    /// Whether the text came to its end by itself.
    ended: bool,
    /// Whether a signal such as Ctrl-C ended it.
    interrupted: bool,
    first: Duration,
    rest: Duration,
}

impl Generate {
    /// Refuses options that would have no effect.
    fn expect_drawing(&self) -> Result<(), Failure> {
        let given = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) if self.temperature == 0.0 => {
                Err(Failure::input(format!("{option} has no effect unless --temperature is above 0")))
            }
            _ => Ok(()),
        }
    }

    /// Returns how many tokens are added at most to a prompt of so many.
    fn most_new_tokens(&self, prompt: usize, longest: usize) -> Result<usize, Failure> {
        if prompt > longest {
            return Err(Failure::input(format!(
                "--prompt: it has {prompt} tokens, and the model reads at most {longest}: shorten it"
            )));
        }
        // The last token is not read.
        let room = longest - prompt + 1;
        match self.max_new_tokens {
            Some(asked) if asked > room => Err(Failure::input(format!(
                "--max-new-tokens {asked}: the prompt has {} and the model reads at most {longest}: give at most {room}",
                counted(prompt, "token")
            ))),
            asked => Ok(asked.unwrap_or(MAX_NEW_TOKENS.min(room))),
        }
    }
}

impl Done {
    /// Says how the text ended, behind the number of its tokens.
    fn ending(&self) -> &'static str {
        match (self.interrupted, self.ended) {
            (true, _) => ", interrupted",
            (false, true) => ", to the end of the text",
            (false, false) => "",
        }
    }
}

/// Generates, and returns what is printed at the end.
pub(crate) fn run(options: &Generate) -> Result<String, Failure> {
    options.expect_drawing()?;
    with_threads(options.model.threads, || {
        let opened = spin("opening", || options.model.open())?;
        let config = &opened.folder.config;
        let tokenizer = Tokenizer::open(opened.folder.path(), config.vocab_size)?;
        let prompt = tokenizer.encode(&options.prompt, true)?;
        if prompt.is_empty() {
            return Err(Failure::input("--prompt: it has no tokens: expected a text to continue"));
        }
        let max_new_tokens = options.most_new_tokens(prompt.len(), config.longest_sequence())?;
        let settings = GenerateOptions {
            max_new_tokens,
            temperature: options.temperature,
            top_k: options.top_k,
            top_p: options.top_p.unwrap_or(1.0),
            seed: options.seed.unwrap_or_default(),
            stop_tokens: config.eos_token_ids.iter().filter_map(|&token| token.try_into().ok()).collect(),
        };
        let longest = prompt.len().saturating_add(max_new_tokens);
        let mut loaded = spin("loading the model", || options.model.load(opened, longest))?;
        let done = {
            let mut cx = loaded.scaling.eval(&loaded.recipe).map_err(fp8_nn::Error::from)?;
            // A signal ends the text, not the program.
            interrupt::during(Phase::Note, || {
                generate(options, &loaded.model, &mut cx, &tokenizer, &prompt, &settings)
            })?
        };
        // The first token is that of the prompt: one alone has no speed.
        let speed = match done.tokens.len() {
            0 | 1 => None,
            tokens => Some((tokens - 1) as f64 / done.rest.as_secs_f64()).filter(|speed| speed.is_finite()),
        };
        if options.json {
            let value = json!({
                "model": options.model.model.display().to_string(),
                "arithmetic": options.model.arithmetic(&loaded),
                "prompt": options.prompt,
                "text": done.text,
                "prompt_tokens": done.prompt_tokens,
                "tokens": done.tokens,
                "ended": done.ended,
                "interrupted": done.interrupted,
                "seconds_to_load": loaded.loading.as_secs_f64(),
                "seconds_to_first_token": done.first.as_secs_f64(),
                "tokens_per_second": speed,
                "weight_bytes": loaded.weight_bytes(),
                "peak_memory_bytes": peak_memory(),
            });
            let text = format!("{value:#}\n");
            if done.interrupted {
                print(&text)?;
                return Err(Failure::Ended);
            }
            return Ok(text);
        }
        let mut sentence = format!(
            "\n{} after a prompt of {}{}: {:.2} s to load, {:.2} s to the first token",
            counted(done.tokens.len(), "token"),
            done.prompt_tokens,
            done.ending(),
            loaded.loading.as_secs_f64(),
            done.first.as_secs_f64(),
        );
        if let Some(speed) = speed {
            let _ = write!(sentence, ", then {speed:.1} tokens/s");
        }
        if let Some(peak) = peak_memory() {
            let _ = write!(sentence, ", at most {} of memory", bytes(peak));
        }
        let _ = writeln!(std::io::stderr(), "{sentence} ({})", options.model.arithmetic(&loaded));
        if done.interrupted { Err(Failure::Ended) } else { Ok(String::new()) }
    })
}

fn generate(
    options: &Generate,
    model: &Gpt,
    cx: &mut fp8_nn::fp8_recipe::Forward<'_>,
    tokenizer: &Tokenizer,
    prompt: &[i32],
    settings: &GenerateOptions,
) -> Result<Done, Failure> {
    let is_terminal = std::io::stdout().is_terminal();
    let show = |text: &str| match (options.json, is_terminal) {
        (true, _) => Ok(true),
        (false, true) => print(&printable_lines(text)),
        (false, false) => print(text),
    };
    let start = Instant::now();
    let mut generation = Generation::new(model, cx, &[prompt], settings)?;
    let mut is_read = true;
    let mut stream = TextStream::new(tokenizer, prompt);
    let (mut text, mut tokens, mut first) = (String::new(), Vec::new(), Duration::ZERO);
    let mut interrupted = false;
    while is_read {
        let step = match tokens.is_empty() {
            true => spin("reading the prompt", || Ok(generation.next(cx)?)),
            false => generation.next(cx).map_err(Failure::from),
        };
        let added = match step {
            Ok(Some(added)) => added,
            Ok(None) => break,
            Err(failure) => {
                // The sentence begins a line of its own.
                if !tokens.is_empty() {
                    show("\n")?;
                }
                return Err(failure);
            }
        };
        if tokens.is_empty() {
            first = start.elapsed();
            // Behind the spinner, which takes the line.
            is_read = show(&options.prompt)?;
        }
        for token in added.into_iter().flatten() {
            tokens.push(token);
            let piece = stream.push(token)?;
            is_read = show(&piece)?;
            text += &piece;
        }
        if interrupt::is_requested() {
            interrupted = true;
            break;
        }
    }
    let rest = stream.rest()?;
    text += &rest;
    show(&format!("{rest}\n"))?;
    let ended = tokens.last().is_some_and(|token| settings.stop_tokens.contains(token));
    let rest = start.elapsed().saturating_sub(first);
    Ok(Done { text, prompt_tokens: prompt.len(), tokens, ended, interrupted, first, rest })
}

fn temperature(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value: &f32| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "expected a number of at least 0".to_owned())
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

fn top_p(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value: &f32| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}
