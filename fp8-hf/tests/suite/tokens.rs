//! `tokenizer.json`: tokens and texts of Hugging Face's Python library, and streams.

use crate::folders::golden;
use fp8_hf::{TextStream, Tokenizer};
use serde_json::Value;
use std::fs;

#[test]
fn texts_have_the_tokens_of_the_python_library() {
    let tokenizer = Tokenizer::open(&golden().join("llama_bf16"), 264).unwrap();
    let cases = cases();
    assert_eq!(cases.len(), 30);
    for (text, ids, decoded, without_special) in &cases {
        assert_eq!(tokenizer.encode(text, false).unwrap(), *ids, "{text:?}");
        assert_eq!(tokenizer.decode_all(ids).unwrap(), *decoded, "{text:?}");
        assert_eq!(tokenizer.decode(ids).unwrap(), *without_special, "{text:?}");
    }
}

/// A tokenizer that begins each text with a space has no place for a cut; one that merges over spaces has few.
#[test]
fn a_long_text_has_the_tokens_that_the_crate_gives_for_the_whole() {
    let texts: Vec<String> = cases().into_iter().map(|(text, ..)| text).collect();
    let book = texts.join(" ");
    let book = book.repeat((9 << 18) / book.len());
    let merges = r#"{"model": {"type": "BPE", "vocab": {"t": 0, " ": 1, "h": 2, "e": 3, "t ": 4, "he": 5, "?": 6, " h": 7},
        "merges": [["t", " "], ["h", "e"], [" ", "h"]], "unk_token": "?"}}"#;
    let prepend = r#"{"model": {"type": "WordLevel", "vocab": {"_": 0, "the": 1, "?": 2}, "unk_token": "?"},
        "normalizer": {"type": "Prepend", "prepend": "_ "}, "pre_tokenizer": {"type": "Whitespace"}}"#;
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("tokenizer.json");
    let golden = fs::read_to_string(golden().join("llama_bf16/tokenizer.json")).unwrap();
    for (text, json) in [
        (&book, golden.as_str()),
        (&"the het  th ".repeat(200_000), merges),
        (&"the sea ".repeat(280_000), prepend),
    ] {
        fs::write(&file, json).unwrap();
        let whole =
            tokenizers::Tokenizer::from_file(&file).unwrap().encode_fast(text.as_str(), false).unwrap();
        let found = Tokenizer::open(place.path(), 264).unwrap().encode(text, false).unwrap();
        assert!(found.iter().map(|&id| id as u32).eq(whole.get_ids().iter().copied()));
    }
}

#[test]
fn the_start_of_a_text_has_the_first_tokens_of_the_whole() {
    let tokenizer = Tokenizer::open(&golden().join("llama_bf16"), 264).unwrap();
    let texts: Vec<String> = cases().into_iter().map(|(text, ..)| text).collect();
    let book = texts.join(" ").repeat(60);
    let whole = tokenizer.encode(&book, false).unwrap();
    assert!(whole.len() > 20_000);
    for count in [0, 1, 2, 100, 511, 512, 5000, whole.len() - 1, whole.len(), whole.len() + 1] {
        let start = tokenizer.encode_start(&book, count).unwrap();
        assert!(start == whole[..count.min(whole.len())], "{count}");
    }
    assert!(tokenizer.encode_start("", 5).unwrap().is_empty());
}

#[test]
fn a_stream_returns_the_whole_text_and_no_half_characters() {
    let tokenizer = Tokenizer::open(&golden().join("llama_bf16"), 264).unwrap();
    for (text, ids, _, without_special) in cases() {
        for prompt in 0..=ids.len() {
            let mut streamed = tokenizer.decode(&ids[..prompt]).unwrap();
            if !without_special.starts_with(&streamed) {
                continue; // a prompt that ends within a character
            }
            let mut stream = TextStream::new(&tokenizer, &ids[..prompt]);
            for &id in &ids[prompt..] {
                let piece = stream.push(id).unwrap();
                assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{text:?}: {piece:?}");
                streamed += &piece;
            }
            streamed += &stream.rest().unwrap();
            assert_eq!(streamed, without_special, "{text:?} behind {prompt}");
        }
    }
}

/// A tokenizer with bytes as in Llama 2: those that are no character become U+FFFD, each of them.
#[test]
fn a_stream_loses_no_text_behind_bytes_that_are_no_character() {
    let place = tempfile::tempdir().unwrap();
    let text = r#"{
        "model": {"type": "BPE", "byte_fallback": true, "merges": [], "vocab": {"a": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    }"#;
    fs::write(place.path().join("tokenizer.json"), text).unwrap();
    let tokenizer = Tokenizer::open(place.path(), 4).unwrap();
    assert_eq!(tokenizer.decode(&[1, 2, 3, 0]).unwrap(), "你a");
    for prompt in [&[0][..], &[1, 2, 3], &[0, 1]] {
        let mut stream = TextStream::new(&tokenizer, prompt);
        let mut streamed = String::new();
        for token in [1, 2, 3, 1, 0, 0, 1, 2, 3, 0] {
            streamed += &stream.push(token).unwrap();
        }
        streamed += &stream.rest().unwrap();
        assert!(streamed.ends_with("aa你a"), "{prompt:?}: {streamed}");
    }
}

#[test]
fn texts_are_encoded_whole_whatever_the_file_asks_for() {
    let place = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(golden().join("llama_bf16/tokenizer.json")).unwrap();
    let mut value: Value = serde_json::from_str(&text).unwrap();
    value["truncation"] = serde_json::json!(
        {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    );
    value["padding"] = serde_json::json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>"
    });
    fs::write(place.path().join("tokenizer.json"), value.to_string()).unwrap();
    let [plain, padded] =
        [&golden().join("llama_bf16"), place.path()].map(|folder| Tokenizer::open(folder, 264).unwrap());
    let text = "The sea is wide, and the ship is small.";
    assert_eq!(padded.encode(text, true).unwrap(), plain.encode(text, true).unwrap());
}

#[test]
fn a_tokenizer_that_does_not_fit_gets_a_sentence() {
    let place = tempfile::tempdir().unwrap();
    let error = |text: Option<&str>| {
        if let Some(text) = text {
            fs::write(place.path().join("tokenizer.json"), text).unwrap();
        }
        Tokenizer::open(place.path(), 10).unwrap_err().to_string()
    };
    assert!(error(None).contains("tokenizer.json: not found: expected the tokenizer of the model"));
    for text in ["", "{}", "[1, 2]", r#"{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}"#] {
        let error = error(Some(text));
        assert!(error.contains("not a tokenizer that can be read: "), "{text}: {error}");
    }
    let other = Tokenizer::open(&golden().join("llama_bf16"), 100).unwrap().encode("The sea is wide.", false);
    let error = other.unwrap_err().to_string();
    assert!(
        error.ends_with("but the vocabulary of the model has 100: it belongs to another model"),
        "{error}"
    );
}

#[test]
fn a_panic_of_the_tokenizer_is_an_error() {
    let place = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(golden().join("llama_bf16/tokenizer.json")).unwrap();
    let mut value: Value = serde_json::from_str(&text).unwrap();
    value["normalizer"] = serde_json::json!({"type": "Replace", "pattern": {"String": ""}, "content": "xx"});
    fs::write(place.path().join("tokenizer.json"), value.to_string()).unwrap();
    let error = Tokenizer::open(place.path(), 264).unwrap().encode("a b", true).unwrap_err().to_string();
    assert!(error.contains("it contradicts itself: the tokenizer stopped (index out of bounds"), "{error}");
}

fn cases() -> Vec<(String, Vec<i32>, String, String)> {
    let text = fs::read_to_string(golden().join("llama_bf16/expected_tokens.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    let string = |case: &Value, name: &str| case[name].as_str().unwrap().to_owned();
    let ids =
        |case: &Value| case["ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect();
    let read = |case: &Value| {
        (string(case, "text"), ids(case), string(case, "decoded"), string(case, "decoded_without_special"))
    };
    cases.iter().map(read).collect()
}

/// Replaces one value in a JSON document by another one that was somewhere in it, or by a hostile one.
pub(crate) fn damaged(value: &Value, draw: &mut impl FnMut(usize) -> usize) -> Value {
    fn count(value: &Value) -> usize {
        1 + match value {
            Value::Array(items) => items.iter().map(count).sum::<usize>(),
            Value::Object(fields) => fields.values().map(count).sum(),
            _ => 0,
        }
    }
    fn replace(value: &mut Value, at: &mut usize, new: &Value) {
        if *at == 0 {
            *value = new.clone();
        }
        *at = at.wrapping_sub(1);
        match value {
            _ if *at > usize::MAX / 2 => {}
            Value::Array(items) => items.iter_mut().for_each(|item| replace(item, at, new)),
            Value::Object(fields) => fields.values_mut().for_each(|field| replace(field, at, new)),
            _ => {}
        }
    }
    let hostile = [
        Value::Null,
        Value::from(-1),
        Value::from(u64::MAX),
        Value::from(4_294_967_295_u64),
        Value::from(""),
        Value::from("(a+)+$"),
        Value::from("("),
        Value::from("Ġ"),
        serde_json::json!([]),
        serde_json::json!({}),
        serde_json::json!({"type": "Split", "pattern": {"Regex": "(?=(a))\\1"}, "behavior": "Isolated", "invert": false}),
        serde_json::json!({"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": []}),
        serde_json::json!({"type": "Replace", "pattern": {"String": ""}, "content": "xx"}),
        Value::from(true),
    ];
    let mut damaged = value.clone();
    replace(&mut damaged, &mut draw(count(value)), &hostile[draw(hostile.len())]);
    damaged
}

#[test]
fn damaged_tokenizers_never_panic() {
    let place = tempfile::tempdir().unwrap();
    let whole = fs::read_to_string(golden().join("llama_bf16/tokenizer.json")).unwrap();
    let mut whole: Value = serde_json::from_str(&whole).unwrap();
    // Most of the file is the vocabulary: keep enough of it that other fields are hit, too.
    let mut state = 1_u64;
    let mut draw = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let vocabulary = whole["model"]["vocab"].as_object().unwrap().clone();
    let kept = vocabulary.into_iter().filter(|(token, _)| token.chars().count() == 1).take(12);
    whole["model"]["vocab"] = Value::Object(kept.collect());
    whole["model"]["merges"] = serde_json::json!([]);
    let mut opened = 0;
    for round in 0..400 {
        let mut value = damaged(&whole, &mut draw);
        if round % 3 == 0 {
            value = damaged(&value, &mut draw);
        }
        fs::write(place.path().join("tokenizer.json"), value.to_string()).unwrap();
        let Ok(tokenizer) = Tokenizer::open(place.path(), 264) else { continue };
        opened += 1;
        if let Ok(ids) = tokenizer.encode("a b <|endoftext|> äé\u{1F600}", true) {
            let _ = tokenizer.decode(&ids);
        }
        let _ = tokenizer.decode_all(&[0, 5, 263, i32::MAX, -1]);
    }
    assert!(opened > 10, "{opened}");
}
