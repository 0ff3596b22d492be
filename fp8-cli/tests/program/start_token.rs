//! `fp8 eval --start-token`: which tokens the windows have.

use super::{place, run};
use crate::folders::{change, golden};
use fp8_hf::Tokenizer;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Makes the tokenizer of `model` surround each text with these tokens, which are all token 0.
fn surround(place: &Path, start: usize, end: usize) {
    let special = json!({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}});
    let mut single = vec![special.clone(); start];
    single.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
    single.extend(vec![special; end]);
    let names = json!({"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}});
    let post = json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": names});
    change(&place.join("model/tokenizer.json"), &json!({ "post_processor": post }));
}

/// The report, and the tokens that were predicted in each window.
fn eval(place: &Path, options: &str) -> (Value, Vec<Vec<i32>>) {
    let line = format!("eval model --text text.txt --json --losses out.csv {options}");
    let (code, out, error) = run(place, line.split_whitespace());
    assert_eq!((code, error.as_str()), (0, ""), "{line}");
    let csv = fs::read_to_string(place.join("out.csv")).unwrap();
    fs::remove_file(place.join("out.csv")).unwrap();
    let mut windows: Vec<Vec<i32>> = Vec::new();
    for line in csv.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let [window, position, token] = [0, 1, 2].map(|at| cells[at].parse::<usize>().unwrap());
        windows.resize(window + 1, Vec::new());
        assert_eq!(windows[window].len() + 1, position);
        windows[window].push(token as i32);
    }
    (serde_json::from_str(&out).unwrap(), windows)
}

/// Returns the tokens that are predicted in each window: all but the first.
fn predicted<'a>(windows: impl Iterator<Item = &'a [i32]>) -> Vec<Vec<i32>> {
    windows.filter(|window| window.len() > 1).map(|window| window[1..].to_vec()).collect()
}

#[test]
fn the_start_token_begins_the_text_or_each_window() {
    let place = place();
    let text = fs::read_to_string(place.path().join("text.txt")).unwrap();
    let plain = Tokenizer::open(&golden().join("llama_bf16"), 264).unwrap().encode(&text, false).unwrap();
    surround(place.path(), 1, 1);
    // As transformers' perplexity page does: the text is encoded once, with what the tokenizer adds.
    let whole = [&[0], &plain[..], &[0]].concat();
    let (value, found) = eval(place.path(), "--seq-length 100");
    assert_eq!((found, &value["start_token"]), (predicted(whole.chunks(100)), &json!("first")));
    assert_eq!(value["tokens"].as_u64(), Some(whole.len() as u64));

    let (value, found) = eval(place.path(), "--seq-length 100 --start-token each");
    let behind = [&plain[..], &[0]].concat();
    let each: Vec<Vec<i32>> = behind.chunks(99).map(<[i32]>::to_vec).collect();
    assert_eq!((found, &value["start_token"]), (each.clone(), &json!("each")));
    assert_eq!(value["predicted"].as_u64(), Some(behind.len() as u64));

    let (value, found) = eval(place.path(), "--seq-length 100 --start-token none");
    assert_eq!((found, &value["start_token"]), (predicted(plain.chunks(100)), &json!("none")));

    // A limit on the windows takes the start of the same.
    let (_, found) = eval(place.path(), "--seq-length 100 --windows 2");
    assert_eq!(found, predicted(whole.chunks(100))[..2]);
    let (_, found) = eval(place.path(), "--seq-length 100 --windows 2 --start-token each");
    assert_eq!(found, each[..2]);
    let (_, found) = eval(place.path(), "--seq-length 100 --windows 1000");
    assert_eq!(found, predicted(whole.chunks(100)));
    let (_, found) = eval(place.path(), "--seq-length 2 --windows 3 --start-token each");
    assert_eq!(found, behind.chunks(1).take(3).collect::<Vec<_>>());
}

#[test]
fn a_line_says_what_became_of_the_start_token() {
    let place = place();
    let line = |options: &str| {
        let line = format!("eval model --text text.txt --windows 1 {options}");
        super::printed(place.path(), &line).lines().last().unwrap().to_owned()
    };
    for options in ["", "--start-token first", "--start-token each"] {
        assert_eq!(line(options), "start token: none, as the tokenizer adds none");
    }
    assert_eq!(line("--start-token none"), "start token: none, as --start-token says");
    surround(place.path(), 1, 0);
    assert_eq!(line(""), "start token: \"<|endoftext|>\" in front of the text");
    assert_eq!(line("--start-token each"), "start token: \"<|endoftext|>\" in front of each window");
    assert_eq!(line("--start-token none"), "start token: none, as --start-token says");
    surround(place.path(), 2, 1);
    let behind = "; \"<|endoftext|>\" behind the text";
    assert_eq!(line(""), format!("start token: \"<|endoftext|><|endoftext|>\" in front of the text{behind}"));
    surround(place.path(), 0, 1);
    assert_eq!(line("--start-token each"), format!("start token: none, as the tokenizer adds none{behind}"));

    // Tokens that are given have no start token of their own.
    let ids = super::printed(place.path(), "eval model --ids model/expected.safetensors");
    assert!(!ids.contains("start token"), "{ids}");
}

#[test]
fn mistakes_with_the_start_token_get_a_sentence() {
    let place = place();
    surround(place.path(), 2, 0);
    for (options, expected) in [
        (
            "--text text.txt --start-token last",
            "--start-token last: unknown; the known ones are first, each and none",
        ),
        (
            "--text text.txt --start-token each --seq-length 2",
            "--seq-length 2: each window begins with 2 start tokens: expected at least 3",
        ),
        ("--ids model/expected.safetensors --start-token each", "exclude each other: give one of them"),
    ] {
        let (code, out, error) = run(place.path(), format!("eval model {options}").split_whitespace());
        assert_eq!((code, out.as_str()), (2, ""), "{options}");
        assert!(error.contains(expected), "{options}: {error}");
    }
}
