//! Training files: the tokens of their samples, the sequences that they become, and mistakes in them.

use super::super::hf::check::{Check, close, text};
use super::super::tally::Tally;
use crate::result::Result as TaskResult;
use fp8_hf::data::{ChatTemplate, DataOptions, Dataset, IGNORED, Pack, Sequence, Sequences, TooLong};
use fp8_hf::{Folder, LoadOptions, Tokenizer, token_losses};
use fp8_nn::prelude::*;
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The model's folder and, in the files, the name of its tokenizer.
const MODEL: &str = "model";
/// The tokens of a sequence for which a case of a mistake names no number.
const SEQ: usize = 32;
/// A sequence that takes any sample.
const LONG: usize = 1 << 20;

/// A line or a document, and what becomes of it.
#[derive(Deserialize)]
struct Line {
    file: String,
    line: Option<usize>,
    document: Option<String>,
    tokenizer: String,
    #[serde(default)]
    ids: Vec<i32>,
    train: Option<Vec<[usize; 2]>>,
    text: Option<String>,
    prompt: Option<String>,
    split: Option<Vec<Split>>,
    error: Option<String>,
    loss_sum: Option<f64>,
    tokens: Option<usize>,
}

/// The sample of an answer.
#[derive(Deserialize)]
struct Split {
    ids: Vec<i32>,
    train: Option<Vec<[usize; 2]>>,
}

/// A sequence, or all sequences of `best_fit`.
#[derive(Deserialize)]
struct Row {
    file: String,
    way: String,
    length: usize,
    sequence: Option<usize>,
    input_ids: Option<Vec<i32>>,
    targets: Option<Vec<i32>>,
    positions: Option<Vec<i32>>,
    lengths: Option<Vec<usize>>,
    learned: Option<Vec<[usize; 2]>>,
    documents_cut: Option<u64>,
    documents: Option<Vec<Vec<usize>>>,
    crossing: Option<Losses>,
    not_crossing: Option<Losses>,
}

#[derive(Deserialize, Clone, Copy)]
struct Losses {
    loss_sum: f64,
    tokens: usize,
}

#[derive(Deserialize)]
struct Mistake {
    file: String,
    tokenizer: Option<String>,
    names: Vec<String>,
    seq: Option<usize>,
}

/// The folder of the files, with its model.
struct Data<'a> {
    place: &'a Path,
    folder: Folder,
    model: Gpt,
    device: &'a Device,
}

pub(super) fn run(place: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    let files = ["expected.json", "packing.json", "mistakes/cases.json"];
    let present: Vec<&str> = files.into_iter().filter(|file| place.join(file).is_file()).collect();
    if present.is_empty() {
        return Ok(());
    }
    if !place.join(MODEL).is_dir() {
        tally.leave_out("training files without a model", present.len());
        return Ok(());
    }
    let folder = Folder::open(&place.join(MODEL)).map_err(text)?;
    let model = folder.load(&LoadOptions::default(), device).map_err(text)?;
    let data = Data { place, folder, model, device };
    for (number, value) in data.list("expected.json")?.into_iter().enumerate() {
        let line: Line = serde_json::from_value(value)?;
        let document = line.document.clone().or_else(|| line.line.map(|line| line.to_string()));
        let name = format!("{} {} {}", line.file, document.unwrap_or_default(), line.tokenizer);
        tally.record(&format!("train/data/expected.json[{number}] {name}"), data.line(&line));
    }
    for (number, value) in data.list("packing.json")?.into_iter().enumerate() {
        let row: Row = serde_json::from_value(value)?;
        let name = format!("train/data/packing.json[{number}] {} {}", row.file, row.way);
        match row.way.as_str() {
            "stream" => tally.record(&name, data.row(&row, Pack::Stream)),
            "whole" => tally.record(&name, data.row(&row, Pack::Whole)),
            "best_fit" => tally.record(&name, data.row(&row, Pack::BestFit)),
            _ => tally.leave_out("packings of other ways", 1),
        }
    }
    for value in data.list("mistakes/cases.json")? {
        let mistake: Mistake = serde_json::from_value(value)?;
        tally.record(&format!("train/data/mistakes/{}", mistake.file), data.mistake(&mistake));
    }
    Ok(())
}

fn ranges(pairs: &[[usize; 2]]) -> Vec<Range<usize>> {
    pairs.iter().map(|&[start, end]| start..end).collect()
}

/// Says which of two lists differ where.
fn equal<T: PartialEq + std::fmt::Debug>(what: &str, expected: &[T], found: &[T]) -> Check {
    let at = (0..expected.len().max(found.len())).find(|&at| expected.get(at) != found.get(at));
    match at {
        None => Ok(()),
        Some(at) => Err(format!("{what}[{at}] is {:?}, expected {:?}", found.get(at), expected.get(at))),
    }
}

fn whole(sequences: &Sequences) -> Check<Vec<Sequence>> {
    (0..sequences.len()).map(|index| sequences.read(index).map_err(text)).collect()
}

impl Data<'_> {
    /// The cases of a file; none if it is missing.
    fn list(&self, file: &str) -> TaskResult<Vec<Value>> {
        let path = self.place.join(file);
        if path.is_file() { Ok(serde_json::from_str(&fs::read_to_string(path)?)?) } else { Ok(Vec::new()) }
    }

    fn tokenizer_folder(&self, name: &str) -> PathBuf {
        let template = self.place.join("templates").join(name);
        if name != MODEL && template.is_dir() { template } else { self.place.join(name) }
    }

    fn open(&self, tokenizer: &str, path: &Path, options: &DataOptions) -> Check<Dataset> {
        let folder = self.tokenizer_folder(tokenizer);
        let tokenizer = Tokenizer::open(&folder, self.folder.config.vocab_size).map_err(text)?;
        Dataset::open(&[path.to_owned()], &tokenizer, &self.folder, options).map_err(text)
    }

    fn line(&self, line: &Line) -> Check {
        let file = self.place.join(&line.file);
        let place = tempfile::tempdir().map_err(text)?;
        let path = match (&line.document, line.line) {
            (Some(document), _) => file.join(document),
            (None, Some(number)) => {
                let bytes = fs::read(&file).map_err(text)?;
                let all = bytes.split(|&byte| byte == b'\n').nth(number.saturating_sub(1));
                let path = place.path().join(file.file_name().unwrap_or_default());
                fs::write(&path, all.unwrap_or_default()).map_err(text)?;
                path
            }
            (None, None) => file,
        };
        if line.text.is_some() || line.prompt.is_some() {
            self.rendered(line, &path)?;
        }
        let options = DataOptions { seq: LONG, pack: Some(Pack::None), ..Default::default() };
        let opened = self.open(&line.tokenizer, &path, &options);
        if let Some(reason) = &line.error {
            return match opened {
                Ok(_) => Err(format!("it was read; expected the error {reason}")),
                Err(error) if error.contains(reason) && error.contains("line 1") => Ok(()),
                Err(error) => Err(format!("the error is {error}; expected {reason}, with the line")),
            };
        }
        if let Some(learned) = &line.train {
            let sequences = whole(&opened?.train)?;
            let [sequence] = &sequences[..] else { return Err(format!("{} samples", sequences.len())) };
            self.sample(sequence, &line.ids, learned)?;
            return match (line.loss_sum, line.tokens) {
                (Some(loss_sum), Some(tokens)) => self.loss(sequence, &Losses { loss_sum, tokens }),
                _ => Ok(()),
            };
        }
        match opened {
            Ok(_) => return Err("it was read as one sample".to_owned()),
            Err(error) if error.contains("line 1") => {}
            Err(error) => return Err(format!("the error does not name the line: {error}")),
        }
        let options = DataOptions { too_long: Some(TooLong::Split), ..options };
        let parts: Vec<&Split> = line.split.iter().flatten().filter(|part| part.train.is_some()).collect();
        if parts.is_empty() {
            return Ok(());
        }
        let sequences = whole(&self.open(&line.tokenizer, &path, &options)?.train)?;
        if sequences.len() != parts.len() {
            return Err(format!("{} answers, expected {}", sequences.len(), parts.len()));
        }
        let learned = |part: &Split| part.train.clone().unwrap_or_default();
        sequences
            .iter()
            .zip(parts)
            .try_for_each(|(sequence, part)| self.sample(sequence, &part.ids, &learned(part)))
    }

    /// Compares the text of a conversation, and that with the start of an answer.
    fn rendered(&self, line: &Line, path: &Path) -> Check {
        #[derive(Deserialize)]
        struct Conversation {
            messages: Vec<Value>,
        }
        let read: Conversation =
            serde_json::from_str(&fs::read_to_string(path).map_err(text)?).map_err(text)?;
        let template = ChatTemplate::open(&self.tokenizer_folder(&line.tokenizer)).map_err(text)?;
        let template = template.ok_or("there is no chat template")?;
        for (expected, prompts) in [(&line.text, false), (&line.prompt, true)] {
            let found = template.render(&read.messages, prompts).map_err(text)?;
            if let Some(expected) = expected.as_ref().filter(|expected| **expected != found) {
                return Err(format!("the text is {found:?}, expected {expected:?}"));
            }
        }
        Ok(())
    }

    fn sample(&self, sequence: &Sequence, ids: &[i32], learned: &[[usize; 2]]) -> Check {
        equal("lengths", &[ids.len()], &sequence.lengths)?;
        equal("ids", ids, &sequence.ids[..ids.len()])?;
        let learned = ranges(learned);
        let is_learned = |at: &usize| *at > 0 && learned.iter().any(|range| range.contains(at));
        let expected: Vec<usize> = (0..ids.len()).filter(is_learned).collect();
        let found = sequence.targets.iter().enumerate().filter(|&(_, &target)| target != IGNORED);
        equal("learned", &expected, &found.map(|(at, _)| at + 1).collect::<Vec<_>>())
    }

    /// Compares the sum of the losses of a sequence, each piece read alone.
    fn loss(&self, sequence: &Sequence, expected: &Losses) -> Check {
        if sequence.learned() != expected.tokens {
            return Err(format!("{} tokens are learned, expected {}", sequence.learned(), expected.tokens));
        }
        let mut windows = Vec::new();
        let mut targets = Vec::new();
        let mut start = 0;
        for &length in &sequence.lengths {
            let place = start..start + length;
            start += length;
            let own = &sequence.targets[place.clone()];
            let mut window = sequence.ids[place].to_vec();
            window.push(own.last().copied().filter(|&target| target != IGNORED).unwrap_or(0));
            windows.push(window);
            targets.push(own);
        }
        let mut scaling = Scaling::new(&self.model, self.device).map_err(text)?;
        let mut cx = scaling.eval(&Recipe::off()).map_err(text)?;
        let losses =
            token_losses(&self.model, &mut cx, &windows, &fp8_hf::Monitor::default()).map_err(text)?;
        let mut sum = 0.0;
        for (losses, targets) in losses.windows.iter().zip(targets) {
            let counted = losses.iter().zip(targets).filter(|&(_, &target)| target != IGNORED);
            sum += counted.map(|(&loss, _)| f64::from(loss)).sum::<f64>();
        }
        close("loss_sum", &[expected.loss_sum as f32], &[sum as f32], 1e-5)
    }

    fn row(&self, row: &Row, pack: Pack) -> Check {
        let file = self.place.join(&row.file);
        let options = DataOptions { seq: row.length, pack: Some(pack), ..Default::default() };
        let too_long = if pack == Pack::Stream { None } else { Some(TooLong::Cut) };
        let options = DataOptions { too_long, ..options };
        if let Some(groups) = &row.documents {
            return self.groups(&file, groups, &options);
        }
        let index = row.sequence.ok_or("there is no `sequence`")?;
        let learned = ranges(row.learned.as_deref().unwrap_or_default());
        for (cross_documents, losses) in [(false, row.not_crossing), (true, row.crossing)] {
            let Some(losses) = losses else { continue };
            let options = DataOptions { cross_documents, ..options.clone() };
            let opened = self.open(MODEL, &file, &options)?.train;
            let sequence = opened.read(index).map_err(text)?;
            let used: usize = sequence.lengths.iter().sum();
            if let Some(ids) = &row.input_ids {
                equal("input_ids", &ids[..used.min(ids.len())], &sequence.ids[..used])?;
            }
            if let Some(targets) = &row.targets {
                let is_learned =
                    |at: usize| cross_documents || learned.iter().any(|range| range.contains(&at));
                let of = |(at, &target): (usize, &i32)| if is_learned(at) { target } else { IGNORED };
                let expected: Vec<i32> = targets.iter().enumerate().map(of).collect();
                equal("targets", &expected, &sequence.targets)?;
            }
            if let (Some(lengths), false) = (&row.lengths, cross_documents) {
                equal("lengths", lengths, &sequence.lengths)?;
            }
            let counted: Vec<i32> = (0..).take(row.length).collect();
            let positions = if cross_documents { Some(&counted) } else { row.positions.as_ref() };
            if let Some(positions) = positions {
                equal("positions", &positions[..used.min(positions.len())], &sequence.positions()[..used])?;
            }
            if let Some(cut) = row.documents_cut {
                equal("documents_cut", &[cut], &[opened.summary().documents_cut])?;
            }
            self.loss(&sequence, &losses)?;
        }
        Ok(())
    }

    /// Compares the documents of each sequence.
    fn groups(&self, file: &Path, groups: &[Vec<usize>], options: &DataOptions) -> Check {
        let alone = DataOptions { seq: LONG, pack: Some(Pack::None), ..options.clone() };
        let pieces = |sequence: &Sequence| {
            let mut start = 0;
            let piece = sequence.lengths.iter().map(|&length| {
                start += length;
                sequence.ids[start - length..start].to_vec()
            });
            piece.collect::<Vec<_>>()
        };
        let documents: Vec<Vec<i32>> =
            whole(&self.open(MODEL, file, &alone)?.train)?.iter().flat_map(pieces).collect();
        let cut = |&index: &usize| documents.get(index).map(|ids| ids[..ids.len().min(options.seq)].to_vec());
        let expected: Option<Vec<Vec<Vec<i32>>>> =
            groups.iter().map(|group| group.iter().map(cut).collect()).collect();
        let expected = expected.ok_or("a document does not exist")?;
        let found: Vec<Vec<Vec<i32>>> =
            whole(&self.open(MODEL, file, options)?.train)?.iter().map(pieces).collect();
        equal("documents", &expected, &found)
    }

    fn mistake(&self, mistake: &Mistake) -> Check {
        let path = self.place.join("mistakes").join(&mistake.file);
        let place = tempfile::tempdir().map_err(text)?;
        let cache = place.path().join("cache");
        let seq = mistake.seq.unwrap_or(SEQ);
        let options = DataOptions { seq, cache: Some(cache.clone()), ..Default::default() };
        let error = match self.open(mistake.tokenizer.as_deref().unwrap_or(MODEL), &path, &options) {
            Ok(_) => return Err("it was read".to_owned()),
            Err(error) => error,
        };
        if error.lines().count() != 1 {
            return Err(format!("the error has several lines: {error}"));
        }
        if cache.exists() {
            return Err("something was written".to_owned());
        }
        match mistake.names.iter().find(|name| !error.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(format!("the error does not say {name}: {error}")),
        }
    }
}
