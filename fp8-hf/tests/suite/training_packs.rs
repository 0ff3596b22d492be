//! Sequences of any samples: nothing is lost, nothing occurs twice, and only what should be is learned.

use super::training_data::{Reader, all, data, one_a_sequence};
use fp8_hf::data::{DataKind, DataOptions, IGNORED, LossOn, Pack, Sequence, TooLong, Validation};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static READER: LazyLock<Reader> = LazyLock::new(|| Reader::new("model"));

/// A sample by its definition: its ids, and whether each is learned.
type Tokens = Vec<(i32, bool)>;

fn by_definition(prompt: &str, completion: &str) -> Tokens {
    // Letters are tokens of one byte, and nothing merges.
    let of = |text: &str, is_learned| {
        let ids = READER.tokenizer.encode(text, false).unwrap();
        assert_eq!(ids.len(), text.len());
        ids.into_iter().map(|id| (id, is_learned)).collect::<Tokens>()
    };
    [of(prompt, false), of(completion, true), vec![(0, true)]].concat()
}

fn written(place: &Path, samples: &[(String, String)]) -> PathBuf {
    let path = place.join("data.jsonl");
    let line = |(prompt, completion): &(String, String)| {
        json!({"prompt": prompt, "completion": completion}).to_string()
    };
    fs::write(&path, samples.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn samples() -> impl Strategy<Value = Vec<(String, String)>> {
    prop::collection::vec(("[x-z]{0,12}", "[x-z]{1,12}"), 1..30)
}

/// The pieces of a sequence, with the targets of each.
fn pieces(sequence: &Sequence) -> Vec<(Vec<i32>, Vec<i32>)> {
    let mut start = 0;
    let piece = sequence.lengths.iter().map(|&length| {
        start += length;
        (sequence.ids[start - length..start].to_vec(), sequence.targets[start - length..start].to_vec())
    });
    piece.collect()
}

/// A piece as it should be; `next` is the token behind it, if it may be learned.
fn expected(tokens: &[(i32, bool)], next: Option<(i32, bool)>) -> (Vec<i32>, Vec<i32>) {
    let followers = tokens.iter().skip(1).copied().map(Some).chain([next]);
    let target = |next: Option<(i32, bool)>| next.filter(|next| next.1).map_or(IGNORED, |next| next.0);
    (tokens.iter().map(|token| token.0).collect(), followers.map(target).collect())
}

fn check_padding(sequence: &Sequence, seq: usize) {
    let used: usize = sequence.lengths.iter().sum();
    assert!(sequence.ids.len() == seq && sequence.targets.len() == seq && used <= seq);
    assert!(sequence.targets[used..].iter().all(|&target| target == IGNORED));
    assert!(sequence.ids[used..].iter().all(|&id| id == 266), "the tokenizer's padding");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn whole_samples_are_each_in_one_sequence(samples in samples(), seq in 2usize..40, way in 0..3, too_long in 0..3) {
        let place = tempfile::tempdir().unwrap();
        let path = written(place.path(), &samples);
        let pack = [Pack::Whole, Pack::BestFit, Pack::None][way as usize];
        let too_long = [TooLong::Drop, TooLong::Cut, TooLong::Split][too_long as usize];
        let options = DataOptions { seq, pack: Some(pack), too_long: Some(too_long), ..Default::default() };
        let mut wanted = Vec::new();
        let (mut dropped, mut cut, mut unlearned) = (0, 0, 0);
        for (prompt, completion) in &samples {
            let tokens = by_definition(prompt, completion);
            let is_learned = |piece: &(Vec<i32>, Vec<i32>)| piece.1.iter().any(|&target| target != IGNORED);
            if tokens.len() <= seq {
                wanted.push(expected(&tokens, None));
            } else if too_long == TooLong::Cut {
                let piece = expected(&tokens[..seq], None);
                (cut, unlearned) = if is_learned(&piece) { (cut + 1, unlearned) } else { (cut, unlearned + 1) };
                wanted.extend(Some(piece).filter(is_learned));
            } else if too_long == TooLong::Split {
                let piece = |start: usize| {
                    let end = (start + seq).min(tokens.len());
                    expected(&tokens[start..end], tokens.get(end).copied())
                };
                wanted.extend((0..tokens.len()).step_by(seq).map(piece).filter(is_learned));
            } else {
                dropped += 1;
            }
        }
        let opened = READER.open(&path, &options);
        if wanted.is_empty() {
            let error = opened.unwrap_err().to_string();
            prop_assert!(error.contains("no token is learned: of "), "{}", error);
            return Ok(());
        }
        let opened = opened.unwrap().train;
        let sequences = all(&opened);
        let mut found = Vec::new();
        for sequence in &sequences {
            check_padding(sequence, seq);
            let of = pieces(sequence);
            prop_assert!(!of.is_empty() && (pack != Pack::None || of.len() == 1));
            found.extend(of);
        }
        let summary = opened.summary();
        prop_assert_eq!(summary.learned, sequences.iter().map(|sequence| sequence.learned() as u64).sum::<u64>());
        let padding = |sequence: &Sequence| (seq - sequence.lengths.iter().sum::<usize>()) as u64;
        prop_assert_eq!(summary.padding, sequences.iter().map(padding).sum::<u64>());
        prop_assert_eq!((summary.samples, summary.samples_dropped), (samples.len() as u64, dropped));
        prop_assert_eq!((summary.documents_cut, summary.samples_unlearned), (cut, unlearned));
        if pack == Pack::BestFit {
            found.sort();
            wanted.sort();
        }
        prop_assert_eq!(found, wanted);
        prop_assert_eq!(summary.kind, DataKind::Prompts);
    }

    #[test]
    fn windows_join_all_samples(samples in samples(), seq in 1usize..20, cross in any::<bool>(), answers in any::<bool>()) {
        let place = tempfile::tempdir().unwrap();
        let path = written(place.path(), &samples);
        let loss = if answers { LossOn::Answers } else { LossOn::All };
        let options =
            DataOptions { seq, pack: Some(Pack::Stream), loss: Some(loss), cross_documents: cross, ..Default::default() };
        let mut stream: Vec<(i32, bool, bool)> = Vec::new();
        for (prompt, completion) in &samples {
            let tokens = by_definition(prompt, completion);
            stream.extend(tokens.iter().enumerate().map(|(at, &(id, is_learned))| (id, is_learned || !answers, at == 0)));
        }
        let windows = (stream.len() - 1) / seq;
        let target = |at: usize| {
            let (id, is_learned, is_first) = stream[at + 1];
            if is_learned && (cross || !is_first) { id } else { IGNORED }
        };
        let all_targets: Vec<i32> = (0..windows * seq).map(target).collect();
        let opened = READER.open(&path, &options);
        if windows == 0 || all_targets.iter().all(|&target| target == IGNORED) {
            prop_assert!(opened.is_err());
            return Ok(());
        }
        let opened = opened.unwrap().train;
        let sequences = all(&opened);
        prop_assert_eq!(sequences.len(), windows);
        let ids: Vec<i32> = sequences.iter().flat_map(|sequence| sequence.ids.clone()).collect();
        prop_assert_eq!(ids, stream[..windows * seq].iter().map(|token| token.0).collect::<Vec<_>>());
        let targets: Vec<i32> = sequences.iter().flat_map(|sequence| sequence.targets.clone()).collect();
        prop_assert_eq!(targets, all_targets);
        for (window, sequence) in sequences.iter().enumerate() {
            let is_start = |at: &usize| *at == 0 || (!cross && stream[window * seq + at].2);
            let starts: Vec<usize> = (0..seq).filter(is_start).chain([seq]).collect();
            let lengths: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            prop_assert_eq!(&sequence.lengths, &lengths);
        }
        let summary = opened.summary();
        prop_assert_eq!(summary.learned, sequences.iter().map(|sequence| sequence.learned() as u64).sum::<u64>());
        prop_assert_eq!(summary.tokens_left, (stream.len() - windows * seq - 1) as u64);
    }

    #[test]
    fn any_bytes_are_data_or_one_sentence(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        line in r#"(\{"(text|prompt|messages|a\\n)": ("[^"]{0,9}"|\[\{"role": "[a-z]{0,9}"\}\]|[0-9\[{]{1,5}),?\}?){1,2}"#,
    ) {
        let place = tempfile::tempdir().unwrap();
        for (name, contents) in
            [("a.jsonl", &bytes[..]), ("b.jsonl", line.as_bytes()), ("c.txt", &bytes[..]), ("d.bin", &bytes[..])]
        {
            let path = place.path().join(name);
            fs::write(&path, contents).unwrap();
            let pack = if name == "d.bin" { Pack::Stream } else { Pack::None };
            match READER.open(&path, &DataOptions { seq: 8, pack: Some(pack), ..Default::default() }) {
                Ok(opened) => drop(all(&opened.train)),
                Err(error) => {
                    let error = error.to_string();
                    prop_assert!(error.contains(name) && error.lines().count() == 1, "{}", error);
                }
            }
        }
    }

    #[test]
    fn a_drawn_share_is_apart(samples in samples(), share in 0.05f64..0.95, seed in any::<u64>(), stream in any::<bool>()) {
        let place = tempfile::tempdir().unwrap();
        let path = written(place.path(), &samples);
        let pack = if stream { Pack::Stream } else { Pack::None };
        let seq = if stream { 4 } else { 64 };
        let loss = Some(LossOn::All);
        let options = DataOptions { seq, pack: Some(pack), loss, ..Default::default() };
        let whole = all(&READER.open(&path, &options).unwrap().train);
        let options = DataOptions { validation: Validation::Fraction(share), seed, ..options };
        let opened = READER.open(&path, &options);
        if whole.len() < 2 {
            prop_assert!(opened.unwrap_err().to_string().contains("expected a share of 2 to"));
            return Ok(());
        }
        let opened = opened.unwrap();
        let (train, validation) = (all(&opened.train), all(opened.validation.as_ref().unwrap()));
        let drawn = (share * whole.len() as f64).round().clamp(1.0, (whole.len() - 1) as f64) as usize;
        prop_assert_eq!((train.len(), validation.len()), (whole.len() - drawn, drawn));
        for (part, sequences) in [(&opened.train, &train), (opened.validation.as_ref().unwrap(), &validation)] {
            let learned = sequences.iter().map(|sequence| sequence.learned() as u64).sum::<u64>();
            prop_assert_eq!(part.summary().learned, learned);
            prop_assert_eq!(part.summary().samples, sequences.len() as u64);
        }
        let key = |sequence: &Sequence| (sequence.ids.clone(), sequence.targets.clone());
        let mut both: Vec<_> = train.iter().chain(&validation).map(key).collect();
        let mut expected: Vec<_> = whole.iter().map(key).collect();
        both.sort();
        expected.sort();
        prop_assert_eq!(both, expected);
        let again = READER.open(&path, &options).unwrap();
        prop_assert_eq!(all(&again.validation.unwrap()), validation);
    }
}

#[test]
fn windows_of_files_of_tokens_are_read_in_place() {
    let cases: Vec<Value> =
        serde_json::from_str(&fs::read_to_string(data().join("shards.json")).unwrap()).unwrap();
    let mut compared = 0;
    for case in cases.iter().filter(|case| case.get("windows").is_some()) {
        let ids: Vec<i32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let path = data().join(case["file"].as_str().unwrap());
        let is_leading = case["kind"] != "nanogpt";
        for seq in [1, 7, 48, ids.len() - 1] {
            for cross_documents in [false, true] {
                let options = DataOptions { seq, cross_documents, ..Default::default() };
                let opened = READER.open(&path, &options).unwrap().train;
                assert_eq!(opened.len(), (ids.len() - 1) / seq);
                let is_first = |at: usize| if is_leading { ids[at] == 0 } else { at > 0 && ids[at - 1] == 0 };
                let mut learned = 0;
                for (window, sequence) in all(&opened).iter().enumerate() {
                    let start = window * seq;
                    assert_eq!(sequence.ids, ids[start..start + seq]);
                    // Files of llm.c have the token that ends a text in front of the next one: it is learned.
                    let target = |at: usize| match cross_documents || is_leading || !is_first(at) {
                        true => ids[at],
                        false => IGNORED,
                    };
                    let targets: Vec<i32> = (start + 1..start + seq + 1).map(target).collect();
                    assert_eq!(sequence.targets, targets);
                    let is_start = |at: &usize| *at == start || (!cross_documents && is_first(*at));
                    let starts: Vec<usize> =
                        (start..start + seq).filter(is_start).chain([start + seq]).collect();
                    let lengths: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
                    assert_eq!(sequence.lengths, lengths);
                    learned += sequence.learned() as u64;
                }
                let summary = opened.summary();
                assert_eq!((summary.learned, summary.kind), (learned, DataKind::Shards));
                assert_eq!(summary.tokens_left, ((ids.len() - 1) % seq) as u64);
                compared += 1;
            }
        }
        // Two files, and a share of their windows.
        let options = DataOptions { seq: 7, validation: Validation::Fraction(0.3), ..Default::default() };
        let paths = [path.clone(), path.clone()];
        let opened =
            fp8_hf::data::Dataset::open(&paths, &READER.tokenizer, &READER.folder, &options).unwrap();
        let validation = opened.validation.unwrap();
        assert_eq!(opened.train.len() + validation.len(), 2 * ((ids.len() - 1) / 7));
        for part in [&opened.train, &validation] {
            let learned = all(part).iter().map(|sequence| sequence.learned() as u64).sum::<u64>();
            assert_eq!(part.summary().learned, learned);
        }
        assert_eq!(validation.sample().unwrap().learned.first(), Some(&(0..8)));
    }
    assert_eq!(compared, 3 * 4 * 2);
}

#[test]
fn options_that_do_not_belong_together_are_refused() {
    let default = DataOptions::default;
    let (text, prompts) = (data().join("text.jsonl"), data().join("prompt_completion.jsonl"));
    let shard = data().join("shards/gpt2_small_ids.bin");
    for (path, options, problem) in [
        (
            &text,
            DataOptions { seq: 0, ..default() },
            "training data: seq = 0: expected the tokens of a sequence, at least 1",
        ),
        (
            &text,
            DataOptions { validation: Validation::Fraction(1.0), ..default() },
            "training data: validation = 1.0: expected a share above 0 and below 1, such as 0.05, or files",
        ),
        (
            &text,
            DataOptions { loss: Some(LossOn::Answers), ..default() },
            "training data: loss = Answers: the data are text, which have no answers: use a loss on all tokens, or JSON lines with \
             prompt and completion, or messages",
        ),
        (
            &shard,
            DataOptions { pack: Some(Pack::Whole), ..default() },
            "training data: pack = Whole: the data are files of tokens, in which windows are read: expected Stream",
        ),
        (
            &prompts,
            DataOptions { cross_documents: true, ..default() },
            "training data: cross_documents = true: only the packing Stream lets documents read each other, and it is Whole",
        ),
        (
            &prompts,
            DataOptions { seq: 3, ..default() },
            "no token is learned: of 6 samples, 6 are longer than seq = 3: use longer sequences, or cut or split the samples",
        ),
    ] {
        let error = READER.error(path, &options);
        assert!(error.ends_with(problem), "{error}");
    }
    let opened = READER.open(&text, &one_a_sequence(64)).unwrap().train;
    let error = opened.read(opened.len()).unwrap_err().to_string();
    assert_eq!(error, "training data: index = 7: expected a sequence below 7");
}

#[test]
fn long_documents_have_the_tokens_of_the_whole_text() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("long.txt");
    let text = "the scale of the values in these tests, Brücke 🙂\r\n".repeat(80_000);
    fs::write(&path, format!("\u{FEFF}{text}")).unwrap();
    let options = DataOptions { seq: 1 << 16, ..Default::default() };
    let opened = READER.open(&path, &options).unwrap().train;
    let mut expected = READER.tokenizer.encode(&text, false).unwrap();
    expected.push(0);
    assert_eq!(opened.summary().tokens, expected.len() as u64);
    for (index, sequence) in all(&opened).iter().enumerate() {
        assert_eq!(sequence.ids, expected[index << 16..(index + 1) << 16]);
    }
    assert!(opened.len() > 20);
}

#[test]
fn sequences_are_read_by_several_threads() {
    fn shared<T: Send + Sync>(value: T) -> T {
        value
    }
    let opened = shared(READER.open(&data().join("text.jsonl"), &one_a_sequence(64)).unwrap().train);
    let expected = all(&opened);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert_eq!(all(&opened), expected));
        }
    });
}
