//! Training data: ids, learned tokens and sequences as transformers and the usual packings give them.

use fp8_hf::data::{
    DataKind, DataOptions, Dataset, IGNORED, LossOn, Pack, Sample, Sequence, Sequences, TooLong, Validation,
};
use fp8_hf::{Folder, Tokenizer};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub(crate) fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/train/data")
}

fn json(name: &str) -> Vec<Value> {
    serde_json::from_str(&fs::read_to_string(data().join(name)).unwrap()).unwrap()
}

/// The model and a tokenizer by its name in the cases.
pub(crate) struct Reader {
    pub(crate) folder: Folder,
    pub(crate) tokenizer: Tokenizer,
}

impl Reader {
    pub(crate) fn new(tokenizer: &str) -> Self {
        let folder = Folder::open(&data().join("model")).unwrap();
        let places = [data().join("templates").join(tokenizer), data().join(tokenizer)];
        let place = places.iter().find(|place| place.is_dir()).unwrap();
        let tokenizer = Tokenizer::open(place, folder.config.vocab_size).unwrap();
        Self { folder, tokenizer }
    }

    pub(crate) fn open(&self, path: &Path, options: &DataOptions) -> fp8_hf::Result<Dataset> {
        Dataset::open(&[path.to_owned()], &self.tokenizer, &self.folder, options)
    }

    pub(crate) fn error(&self, path: &Path, options: &DataOptions) -> String {
        let error = self.open(path, options).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    }
}

pub(crate) fn one_a_sequence(seq: usize) -> DataOptions {
    DataOptions { seq, pack: Some(Pack::None), ..Default::default() }
}

fn numbers(value: &Value) -> Vec<i32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn ranges(value: &Value) -> Vec<Range<usize>> {
    let pairs: Vec<[usize; 2]> = serde_json::from_value(value.clone()).unwrap();
    pairs.into_iter().map(|[start, end]| start..end).collect()
}

pub(crate) fn all(sequences: &Sequences) -> Vec<Sequence> {
    (0..sequences.len()).map(|index| sequences.read(index).unwrap()).collect()
}

/// Checks that a sequence is one sample with these ids and learned tokens.
fn check_sample(sequence: &Sequence, ids: &[i32], learned: &[Range<usize>], case: &str) {
    assert_eq!(sequence.lengths, [ids.len()], "{case}");
    assert_eq!(sequence.ids[..ids.len()], *ids, "{case}");
    for (at, &target) in sequence.targets.iter().enumerate() {
        let is_learned = learned.iter().any(|range| range.contains(&(at + 1)));
        assert_eq!(target, if is_learned { ids[at + 1] } else { IGNORED }, "{case}: {at}");
    }
}

#[test]
fn samples_are_tokenized_and_learned_as_transformers_does() {
    let place = tempfile::tempdir().unwrap();
    let (mut samples, mut refused, mut split) = (0, 0, 0);
    for case in json("expected.json") {
        let file = data().join(case["file"].as_str().unwrap());
        let reader = Reader::new(case["tokenizer"].as_str().unwrap());
        let options = one_a_sequence(512);
        let name = case["document"].as_str().map(str::to_owned).unwrap_or(case["line"].to_string());
        let at = format!("{} {name} {}", file.display(), case["tokenizer"]);
        // One line alone, or one document.
        let path = if file.is_dir() {
            file.join(&name)
        } else {
            let text = fs::read_to_string(&file).unwrap();
            let line = text.lines().nth(case["line"].as_u64().unwrap() as usize - 1).unwrap();
            let path = place.path().join("line.jsonl");
            fs::write(&path, line).unwrap();
            path
        };
        if let Some(reason) = case.get("error") {
            let error = reader.error(&path, &options);
            assert!(error.contains("line.jsonl: line 1: the chat template refuses it: "), "{at}: {error}");
            assert!(error.contains(reason.as_str().unwrap()), "{at}: {error}");
            refused += 1;
            continue;
        }
        if case["train"].is_null() {
            let error = reader.error(&path, &options);
            assert!(
                error.contains("line 1: the chat template renders earlier messages differently"),
                "{at}: {error}"
            );
            let options = DataOptions { too_long: Some(TooLong::Split), ..options };
            let sequences = all(&reader.open(&path, &options).unwrap().train);
            let expected = case["split"].as_array().unwrap().iter().filter(|part| !part["train"].is_null());
            let expected: Vec<&Value> = expected.collect();
            assert_eq!(sequences.len(), expected.len(), "{at}");
            for (sequence, part) in sequences.iter().zip(expected) {
                check_sample(sequence, &numbers(&part["ids"]), &ranges(&part["train"]), &at);
            }
            split += 1;
            continue;
        }
        let opened = reader.open(&path, &options).unwrap();
        assert_eq!(opened.train.len(), 1, "{at}");
        let (ids, learned) = (numbers(&case["ids"]), ranges(&case["train"]));
        check_sample(&opened.train.read(0).unwrap(), &ids, &learned, &at);
        assert_eq!(opened.train.sample().unwrap(), Sample { ids, learned }, "{at}");
        assert_eq!(opened.train.summary().learned, case["tokens"].as_u64().unwrap(), "{at}");
        samples += 1;
    }
    assert_eq!((samples, refused, split), (93, 4, 9));
}

#[test]
fn sequences_are_packed_as_expected() {
    let reader = Reader::new("model");
    let documents = |file: &str| -> Vec<Vec<i32>> {
        let of_file = |case: &Value| case["file"] == file && case["tokenizer"] == "model";
        json("expected.json").iter().filter(|case| of_file(case)).map(|case| numbers(&case["ids"])).collect()
    };
    let mut rows = 0;
    for row in json("packing.json") {
        let file = row["file"].as_str().unwrap();
        let length = row["length"].as_u64().unwrap() as usize;
        let way = row["way"].as_str().unwrap();
        let pack = match way {
            "stream" => Pack::Stream,
            "whole" => Pack::Whole,
            _ => Pack::BestFit,
        };
        for cross_documents in [false, true] {
            if row.get(if cross_documents { "crossing" } else { "not_crossing" }).is_none()
                && way != "best_fit"
            {
                continue;
            }
            let options = DataOptions {
                seq: length,
                pack: Some(pack),
                cross_documents: cross_documents && pack == Pack::Stream,
                loss: Some(if file.starts_with("text") { LossOn::All } else { LossOn::Answers }),
                ..Default::default()
            };
            let opened = reader.open(&data().join(file), &options).unwrap().train;
            let at = format!("{file} {way} {}", row["sequence"]);
            if let Some(groups) = row.get("documents") {
                let groups: Vec<Vec<usize>> = serde_json::from_value(groups.clone()).unwrap();
                let all_documents = documents(file);
                let cut =
                    |index: &usize| all_documents[*index].iter().copied().take(length).collect::<Vec<_>>();
                let expected: Vec<Vec<Vec<i32>>> =
                    groups.iter().map(|group| group.iter().map(cut).collect()).collect();
                let found: Vec<Vec<Vec<i32>>> = all(&opened).iter().map(pieces).collect();
                assert_eq!(found, expected, "{at}");
                rows += 1;
                continue;
            }
            let index = row["sequence"].as_u64().unwrap() as usize;
            let sequence = opened.read(index).unwrap();
            let used: usize = sequence.lengths.iter().sum();
            assert_eq!(sequence.ids, numbers(&row["input_ids"]), "{at}");
            let targets = numbers(&row["targets"]);
            let learned = ranges(&row["learned"]);
            for (place, &target) in sequence.targets.iter().enumerate() {
                let is_learned = cross_documents || learned.iter().any(|range| range.contains(&place));
                assert_eq!(target, if is_learned { targets[place] } else { IGNORED }, "{at} {place}");
            }
            if cross_documents {
                assert_eq!(sequence.lengths, [length], "{at}");
                assert_eq!(sequence.positions(), (0..length as i32).collect::<Vec<_>>(), "{at}");
            } else {
                assert_eq!(serde_json::json!(sequence.lengths), row["lengths"], "{at}");
                assert_eq!(sequence.positions(), numbers(&row["positions"]), "{at}");
            }
            assert!(used <= length);
            if let Some(cut) = row.get("documents_cut") {
                assert_eq!(opened.summary().documents_cut, cut.as_u64().unwrap(), "{at}");
            }
            let part = if cross_documents { "crossing" } else { "not_crossing" };
            assert_eq!(sequence.learned() as u64, row[part]["tokens"].as_u64().unwrap(), "{at}");
            rows += 1;
        }
    }
    assert_eq!(rows, 12 * 2 + 7 + 4 + 2 * 2);
}

fn pieces(sequence: &Sequence) -> Vec<Vec<i32>> {
    let mut rest = &sequence.ids[..];
    let mut piece = |&length: &usize| {
        let (piece, behind) = rest.split_at(length);
        rest = behind;
        piece.to_vec()
    };
    sequence.lengths.iter().map(&mut piece).collect()
}

#[test]
fn files_that_are_odd_but_right_are_read() {
    let reader = Reader::new("model");
    let mut files = 0;
    for entry in fs::read_dir(data().join("odd_but_right")).unwrap() {
        let opened = reader.open(&entry.unwrap().path(), &one_a_sequence(32)).unwrap();
        let text =
            |sequence: &Sequence| reader.tokenizer.decode(&sequence.ids[..sequence.lengths[0]]).unwrap();
        assert_eq!(all(&opened.train).iter().map(text).collect::<Vec<_>>(), ["first", "zwei ü"]);
        assert_eq!(opened.train.summary().kind, DataKind::Text);
        files += 1;
    }
    assert_eq!(files, 7);
}

#[test]
fn mistakes_are_told_in_one_sentence() {
    let mut cases = 0;
    for case in json("mistakes/cases.json") {
        let name = case["file"].as_str().unwrap();
        let reader = Reader::new(case["tokenizer"].as_str().unwrap());
        let seq = case.get("seq").map_or(32, |seq| seq.as_u64().unwrap() as usize);
        let options = DataOptions { seq, ..Default::default() };
        let error = reader.error(&data().join("mistakes").join(name), &options);
        for part in case["names"].as_array().unwrap() {
            assert!(error.contains(part.as_str().unwrap()), "{name}: {part}: {error}");
        }
        cases += 1;
    }
    assert_eq!(cases, 48);
}

#[test]
fn a_folder_with_both_parts_is_both() {
    let reader = Reader::new("model");
    let place = tempfile::tempdir().unwrap();
    for name in ["train.jsonl", "valid.jsonl"] {
        fs::write(place.path().join(name), format!("{{\"text\": \"the text of {name}\"}}")).unwrap();
    }
    let opened = reader.open(place.path(), &one_a_sequence(64)).unwrap();
    let validation = opened.validation.unwrap();
    let text = |part: &Sequences| reader.tokenizer.decode(&part.sample().unwrap().ids).unwrap();
    assert_eq!((text(&opened.train), text(&validation)).0, "the text of train.jsonl");
    assert_eq!(text(&validation), "the text of valid.jsonl");
    let options = DataOptions { validation: Validation::Fraction(0.5), ..one_a_sequence(64) };
    let error = reader.error(place.path(), &options);
    assert!(error.contains("valid.jsonl: it is in the folder with train.jsonl"), "{error}");
    // A folder without the second part is all its files.
    fs::rename(place.path().join("valid.jsonl"), place.path().join("more.jsonl")).unwrap();
    let opened = reader.open(place.path(), &one_a_sequence(64)).unwrap();
    assert!(opened.validation.is_none() && opened.train.len() == 2);
    let options =
        DataOptions { validation: Validation::Files(vec![data().join("text.jsonl")]), ..one_a_sequence(64) };
    assert_eq!(reader.open(place.path(), &options).unwrap().validation.unwrap().summary().samples, 7);
}

#[test]
fn files_of_tokens_whose_documents_cannot_be_told_apart_are_warned_of() {
    let place = tempfile::tempdir().unwrap();
    let reader = Reader::new("model");
    let summary = |tokens: &[u16], options: &DataOptions| {
        let path = place.path().join("tokens.bin");
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        fs::write(&path, bytes).unwrap();
        reader.open(&path, options).unwrap().train.summary().warnings.clone()
    };
    let plain = DataOptions { seq: 4, ..Default::default() };
    let without: Vec<u16> = (1..60).collect();
    let with: Vec<u16> = (0..60).collect(); // 0 is the model's eos_token
    assert!(summary(&with, &plain).is_empty());
    let warnings = summary(&without, &plain);
    assert!(
        warnings[0].contains("eos_token is not among the first million tokens of a file"),
        "{warnings:?}"
    );
    assert!(summary(&without, &DataOptions { cross_documents: true, ..plain }).is_empty());
}

#[test]
fn windows_are_never_too_long() {
    let options = DataOptions { seq: 8, too_long: Some(TooLong::Drop), ..Default::default() };
    let error = Reader::new("model").error(&data().join("text.jsonl"), &options);
    assert!(error.contains("samples that are joined and cut into windows are never too long"), "{error}");
}
