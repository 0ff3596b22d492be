//! `tokenizer.json`: tokens and texts of Hugging Face's Python library, and streams.

use crate::folders::golden;
use fp8_nn::hf::{TextStream, Tokenizer};
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
