//! A data set: the sequences to train on, and those to measure the loss on.

use super::digest;
use super::load::{Loaded, Store, load};
use super::options::{DataOptions, Pack, Validation, refused};
use super::order::order;
use super::plan::Plan;
use super::sequences::{Layout, Sequences, count_windows};
use super::sources::{Parts, Sources};
use super::summary::DataSummary;
use super::tokens::unwritable;
use crate::{Folder, Result, Tokenizer};
use fp8_kernels::AtomicFile;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Training data: text, JSON lines, or files of tokens, as sequences for a model. Needs the feature `tokenizer`.
///
/// | files | a sample is |
/// |---|---|
/// | text, in UTF-8 | a file |
/// | `.jsonl` with `text` | a line |
/// | `.jsonl` with `prompt` and `completion` | a line |
/// | `.jsonl` with `messages`: objects with `role` and `content` | a line, as the [`ChatTemplate`](super::ChatTemplate) renders it |
/// | `.bin`: a [`TokenFile`](crate::TokenFile) | a document between tokens that end a text |
///
/// All files are of one kind. A text is encoded with what the tokenizer adds, and ends with the tokenizer's `eos_token`. Prompt and
/// completion are encoded as one text. A rendered conversation is encoded as it is.
///
/// In files of tokens, the `eos_token` separates documents. llm.c writes it in front of a document; it is learned as the end of the
/// document before it. nanoGPT writes it behind. No window crosses the end of a file.
///
/// Samples in a sequence do not read each other, unless [`DataOptions::cross_documents`] says so. Tokens are made once and kept in a
/// file; files of tokens are read in place.
///
/// ```
/// use fp8_hf::data::{DataOptions, Dataset, IGNORED, Pack, Sequences};
/// use fp8_hf::{Folder, Tokenizer};
/// # use fp8_hf::{self as hf, TensorSpec};
/// # use fp8_nn::prelude::*;
/// # let place = std::env::temp_dir().join(format!("fp8-dataset-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let model = place.join("model");
/// # let config = hf::Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2, "rms_norm_eps": 1e-5}"#,
/// # )?;
/// # let ones = |spec: &TensorSpec| {
/// #     let ones = vec![1.0_f32; spec.shape.iter().product()];
/// #     Ok::<_, Error>((spec.name.clone(), Tensor::from_vec(ones, spec.shape, &Device::cpu())?))
/// # };
/// # hf::save(&model, &config, &config.tensors().iter().map(ones).collect::<Result<_>>()?)?;
/// # std::fs::write(model.join("tokenizer_config.json"), r#"{"eos_token": "</s>"}"#)?;
/// # std::fs::write(model.join("tokenizer.json"), r#"{"model": {"type": "WordLevel", "unk_token": "?",
/// #     "vocab": {"</s>": 0, "?": 1, "the": 2, "sea": 3, "is": 4, "blue": 5}}, "pre_tokenizer": {"type": "Whitespace"}}"#)?;
/// let data = place.join("data.jsonl");
/// std::fs::write(&data, r#"{"prompt": "the sea is", "completion": " blue"}"#)?;
/// let folder = Folder::open(&model)?;
/// let tokenizer = Tokenizer::open(&model, folder.config.vocab_size)?; // "the" is 2, "sea" 3, "is" 4, "blue" 5, "</s>" 0
/// let options = DataOptions { seq: 6, ..Default::default() };
/// let data = Dataset::open(&[data], &tokenizer, &folder, &options)?;
/// let train: &Sequences = &data.train;
/// let sequence = train.read(0)?;
/// assert_eq!(sequence.ids, [2, 3, 4, 5, 0, 0]);
/// assert_eq!(sequence.targets, [IGNORED, IGNORED, 5, 0, IGNORED, IGNORED]); // the answer and its end
/// assert_eq!(sequence.lengths, [5]); // and one token of padding
/// assert_eq!((train.len(), train.summary().learned, train.summary().pack), (1, 2, Pack::Whole));
/// assert_eq!(train.sample()?.learned, [3..5]);
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Dataset {
    /// The sequences that the model is trained on.
    pub train: Sequences,
    /// The sequences that the loss is measured on.
    pub validation: Option<Sequences>,
}

/// The samples or windows of a part.
enum Part<'a> {
    All,
    These(&'a [u32]),
}

impl Dataset {
    /// Opens files, or all files of folders, in the order of their paths. A single folder with `train.jsonl` and `valid.jsonl` has both
    /// parts. The chat template and the token that ends a text are those of the tokenizer's folder.
    ///
    /// Tokens are made and kept in [`DataOptions::cache`] where they are not found there. Several processes may open the same data:
    /// one makes the tokens, and the others wait for it.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for options that do not belong together. [`Error::File`](crate::Error::File), which
    /// names file and line: files of several kinds, a line that is no sample, a conversation that the chat template refuses or in
    /// which its answers cannot be found, a token outside the vocabulary, a data set in which nothing is learned or fills no sequence,
    /// and a file that cannot be read or written.
    pub fn open(
        paths: &[PathBuf],
        tokenizer: &Tokenizer,
        folder: &Folder,
        options: &DataOptions,
    ) -> Result<Self> {
        options.check()?;
        let parts = Parts::find(paths)?;
        let valid = match (parts.valid, &options.validation) {
            (valid, Validation::None) => valid,
            (None, Validation::Files(files)) => Some(Sources::find(files)?),
            (None, Validation::Fraction(_)) => None,
            (Some(valid), _) => {
                let problem = "it is in the folder with train.jsonl, so it is the validation data: expected no other ones \
                               (Validation::None), or train.jsonl as a file";
                return Err(valid.problem(problem));
            }
        };
        let of = |sources: &Sources| load(sources, tokenizer, &folder.config, options);
        let train = of(&parts.train)?;
        if let Some(sources) = valid {
            let loaded = of(&sources)?;
            let validation = all(loaded, &sources, options, "validation")?;
            let train = all(train, &parts.train, options, "train")?;
            return Ok(Self { train, validation: Some(validation) });
        }
        let Validation::Fraction(share) = options.validation else {
            return Ok(Self { train: all(train, &parts.train, options, "train")?, validation: None });
        };
        let count = train.count();
        let drawn = draw(share, count, options.seed)?;
        let [rest, drawn] = drawn;
        let how = format!("{share} {}", options.seed);
        split(train, &parts.train, options, &how, [&rest, &drawn])
    }
}

/// Draws the validation data. Returns the numbers of the training data, and those.
fn draw(share: f64, count: u64, seed: u64) -> Result<[Vec<u32>; 2]> {
    let most = u64::from(u32::MAX);
    if count < 2 || count > most {
        let remedy = format!("expected a share of 2 to {most} samples or windows, and there are {count}");
        return Err(refused("validation", share, &remedy));
    }
    let drawn = (share * count as f64).round().clamp(1.0, (count - 1) as f64) as usize;
    // Epochs are counted from 0, so that no epoch has this order.
    let mut order = order(seed, u64::MAX, count as usize);
    let mut rest = order.split_off(drawn);
    order.sort_unstable();
    rest.sort_unstable();
    Ok([rest, order])
}

impl Loaded {
    fn windows(&self) -> u64 {
        match &self.store {
            Store::Kept { tokens, .. } => tokens.len().saturating_sub(1) / self.options.seq as u64,
            Store::Shards(shards) => shards.windows(),
        }
    }

    /// Returns the number of samples or windows.
    fn count(&self) -> u64 {
        match &self.store {
            Store::Kept { tokens, .. } if self.options.pack != Pack::Stream => tokens.samples() as u64,
            _ => self.windows(),
        }
    }

    /// Returns the digest of a part.
    fn digest(&self, content: &[u8; 32], part: &str) -> [u8; 32] {
        digest::of_parts(&[content, format!("{:?} {}", self.options, self.pad).as_bytes(), part.as_bytes()])
    }

    /// Returns the sequences of a part and its counts, but for the learned targets of windows.
    fn lay_out(&self, part: &Part<'_>) -> Result<(Layout, DataSummary)> {
        let options = &self.options;
        let mut summary = DataSummary::new(options.kind, options.pack, options.seq);
        summary.warnings.clone_from(&self.warnings);
        let windows = self.windows();
        let (samples, len, left) = match &self.store {
            Store::Kept { tokens, .. } if options.pack != Pack::Stream => {
                let all = (0..u32::MAX).take(tokens.samples());
                let plan = match part {
                    Part::All => Plan::new(tokens, options, all, &mut summary)?,
                    Part::These(these) => Plan::new(tokens, options, these.iter().copied(), &mut summary)?,
                };
                if matches!(part, Part::All) {
                    summary.samples += tokens.notes.empty;
                    summary.samples_unlearned += tokens.notes.empty;
                }
                return Ok((Layout::Plan(plan), summary));
            }
            Store::Kept { tokens, .. } => {
                let left = tokens.len() - (windows * options.seq as u64 + 1).min(tokens.len());
                (tokens.samples() as u64 + tokens.notes.empty, tokens.len(), left)
            }
            Store::Shards(shards) => (windows, shards.len(), shards.left()),
        };
        if let (Part::All, Store::Kept { tokens, .. }) = (part, &self.store) {
            summary.samples_unlearned = tokens.notes.empty;
        }
        let selected = match part {
            Part::All => {
                (summary.samples, summary.tokens, summary.tokens_left) = (samples, len, left);
                None
            }
            Part::These(these) => {
                summary.samples = these.len() as u64;
                summary.tokens = these.len() as u64 * options.seq as u64;
                Some(these.to_vec())
            }
        };
        summary.sequences = selected.as_ref().map_or(windows as usize, Vec::len);
        Ok((Layout::Windows(selected), summary))
    }
}

/// Makes the sequences of all samples.
fn all(loaded: Loaded, sources: &Sources, options: &DataOptions, name: &str) -> Result<Sequences> {
    let parts = made(loaded, sources, options, [(name, Part::All)])?;
    let mut parts = parts.into_iter();
    parts.next().ok_or_else(|| sources.problem("there is nothing to learn"))
}

/// Makes the sequences of two parts.
fn split(
    loaded: Loaded,
    sources: &Sources,
    options: &DataOptions,
    how: &str,
    numbers: [&[u32]; 2],
) -> Result<Dataset> {
    let [train, validation] = numbers.map(Part::These);
    let names = ["train", "validation"].map(|name| format!("{name} {how}"));
    let parts = [(names[0].as_str(), train), (names[1].as_str(), validation)];
    let mut made = made(loaded, sources, options, parts)?.into_iter();
    let train = made.next().ok_or_else(|| sources.problem("there is nothing to learn"))?;
    Ok(Dataset { train, validation: made.next() })
}

/// Makes the sequences of parts that share their tokens.
fn made<const N: usize>(
    loaded: Loaded,
    sources: &Sources,
    options: &DataOptions,
    parts: [(&str, Part<'_>); N],
) -> Result<Vec<Sequences>> {
    let resolved = loaded.options;
    if resolved.pack == Pack::Stream && loaded.windows() == 0 {
        let len = match &loaded.store {
            Store::Kept { tokens, .. } => tokens.len(),
            Store::Shards(shards) => {
                shards.check()?;
                shards.len()
            }
        };
        return Err(sources.problem(&format!(
            "{len} tokens fill no sequence: seq = {} takes {}, as each token needs a target; use a shorter sequence",
            resolved.seq,
            resolved.seq + 1
        )));
    }
    let mut found = Vec::new();
    for (name, part) in &parts {
        let (layout, summary) = loaded.lay_out(part)?;
        let digest = digest::hex(&loaded.digest(&loaded.content, name));
        found.push((layout, summary, digest));
    }
    if resolved.pack == Pack::Stream {
        let keys: Vec<[u8; 32]> =
            parts.iter().map(|(name, _)| loaded.digest(&loaded.changed, name)).collect();
        let place = options.cache.as_ref().and_then(|cache| {
            let name = digest::hex(&digest::of_parts(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>()));
            matches!(loaded.store, Store::Shards(_)).then(|| cache.join(format!("{}.counts", &name[..32])))
        });
        let counts = count(&loaded, place.as_deref(), &parts)?;
        for ((_, summary, _), learned) in found.iter_mut().zip(counts) {
            summary.learned = learned;
        }
    }
    let store = Arc::new(loaded.store);
    let sequences = |(layout, summary, digest): (Layout, DataSummary, String)| match summary.learned {
        0 => Err(sources.problem(&summary.nothing())),
        _ => {
            let store = Arc::clone(&store);
            Ok(Sequences { store, layout, options: resolved, pad: loaded.pad, summary, digest })
        }
    };
    let sequences = found.into_iter().map(sequences).collect::<Result<Vec<_>>>()?;
    if let Some(made) = loaded.made {
        made.keep();
    }
    Ok(sequences)
}

/// Counts the learned targets of the windows of each part. The counts of files of tokens, all of which have to be read for it, are kept.
fn count(loaded: &Loaded, kept: Option<&Path>, parts: &[(&str, Part<'_>)]) -> Result<Vec<u64>> {
    if let Some(path) = kept {
        let read = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<Vec<u64>>(&bytes).ok());
        if let Some(counts) = read.filter(|counts| counts.len() == parts.len()) {
            return Ok(counts);
        }
    }
    let mut counts = vec![0; parts.len()];
    let mut places = vec![0; parts.len()];
    let mut window = 0;
    count_windows(&loaded.store, &loaded.options, loaded.windows(), |learned| {
        for ((part, place), count) in parts.iter().zip(&mut places).zip(&mut counts) {
            // Numbers are in order.
            let is_in = match &part.1 {
                Part::All => true,
                Part::These(these) => these.get(*place).is_some_and(|&number| u64::from(number) == window),
            };
            if is_in {
                *place += 1;
                *count += learned;
            }
        }
        window += 1;
    })?;
    if let Some(path) = kept {
        let write = || {
            let mut file = AtomicFile::create(path)?;
            file.write_all(&serde_json::to_vec(&counts)?)?;
            file.commit()
        };
        write().map_err(|error| unwritable(path, &error))?;
    }
    Ok(counts)
}
