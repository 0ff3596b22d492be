//! Tokenizer folders: tokens that stand outside `tokenizer.json`, and what the tokenizer adds to a text, as in transformers.

use fp8_hf::Tokenizer;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// More than the vocabulary and all added tokens.
const MODEL: usize = 400;

static GOLDEN: LazyLock<Value> = LazyLock::new(|| read(&golden().join("folders.json")));

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers")
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Writes a folder: the shared `tokenizer.json` with these fields, and the other files.
fn write(place: &Path, tokenizer: &Value, files: &Value) {
    let mut whole = GOLDEN["base"].clone();
    whole.as_object_mut().unwrap().extend(tokenizer.as_object().unwrap().clone());
    let mut files = files.as_object().unwrap().clone();
    files.insert("tokenizer.json".into(), whole);
    for (name, content) in files {
        fs::write(place.join(name), content.to_string()).unwrap();
    }
}

fn compare(golden: &Value) -> usize {
    let texts: Vec<&str> =
        golden["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    let folders = golden["folders"].as_array().unwrap();
    for folder in folders {
        let place = tempfile::tempdir().unwrap();
        write(place.path(), &folder["tokenizer"], &folder["files"]);
        let tokenizer = Tokenizer::open(place.path(), MODEL).unwrap();
        let expected: Vec<Vec<i32>> = serde_json::from_value(folder["ids"].clone()).unwrap();
        assert_eq!(expected.len(), texts.len());
        let [start, end] = tokenizer.surround().unwrap();
        for (text, expected) in texts.iter().zip(&expected) {
            let found = tokenizer.encode(text, true).unwrap();
            assert_eq!(found, *expected, "{}: {text:?}: {folder}", folder["name"]);
            let inner = &found[start.len()..found.len() - end.len()];
            assert_eq!(tokenizer.encode(text, false).unwrap(), inner, "{}: {text:?}", folder["name"]);
        }
    }
    folders.len()
}

#[test]
fn sixty_folders_have_the_tokens_of_transformers() {
    assert_eq!(compare(&GOLDEN), 60);
    if let Some(more) = std::env::var_os("FP8_TEST_GOLDEN_TOKENIZERS") {
        assert!(compare(&read(Path::new(&more))) > 0);
    }
}

/// A folder with the shared `tokenizer.json` and one file more.
fn opened(file: &str, content: &str) -> Result<Tokenizer, String> {
    let place = tempfile::tempdir().unwrap();
    write(place.path(), &json!({}), &json!({}));
    fs::write(place.path().join(file), content).unwrap();
    Tokenizer::open(place.path(), MODEL)
        .map_err(|error| error.to_string().replace(&format!("{}/", place.path().display()), ""))
}

/// `"content"` with this id among `added_tokens_decoder`.
fn decoder(tokens: &[(&str, &str)]) -> String {
    let tokens: Map<String, Value> =
        tokens.iter().map(|&(id, content)| (id.to_owned(), json!({"content": content}))).collect();
    json!({ "added_tokens_decoder": tokens }).to_string()
}

#[test]
fn a_prompt_with_tokens_of_the_configuration_is_not_split() {
    let config = decoder(&[("264", "<|im_end|>"), ("265", "<think>")]);
    let tokens =
        opened("tokenizer_config.json", &config).unwrap().encode("a<|im_end|>b<think>c", false).unwrap();
    assert_eq!((tokens.len(), tokens[1], tokens[3]), (5, 264, 265));
}

/// New tokens get the ids that transformers 5.24.0 gives them: `tokenizer_config.json` first has the fields that end in
/// `_token`, then the named list.
#[test]
fn new_tokens_get_ids_in_the_order_of_the_file() {
    let config = r#"{"z_token": "<z>", "extra_special_tokens": {"y": "<y>", "b": "<b>"}, "a_token": "<a>"}"#;
    let map = r#"{"z_token": "<z>", "y_token": "<y>", "b_token": "<b>", "a_token": "<a>"}"#;
    for (file, content, expected) in [
        ("tokenizer_config.json", config, [265, 267, 266, 264]),
        ("special_tokens_map.json", map, [267, 266, 265, 264]),
    ] {
        let found = opened(file, content).unwrap().encode("<a><b><y><z>", false).unwrap();
        assert_eq!(found, expected, "{file}");
    }
}

#[test]
fn a_contradiction_names_the_file_and_the_token() {
    let other = "which is that of \"ab\" in the tokenizer: an id has one token";
    let gap = "a token has one id, and new ones follow the vocabulary without a gap";
    let ab = GOLDEN["base"]["model"]["vocab"]["ab"].as_u64().unwrap();
    for (file, content, expected) in [
        ("added_tokens.json", json!({"<x>": ab}).to_string(), format!("token \"<x>\" has id {ab}, {other}")),
        (
            "tokenizer_config.json",
            decoder(&[("264", "<x>"), ("265", "<x>")]),
            format!("token \"<x>\" has id 265, but it is 264 in the tokenizer: {gap}"),
        ),
        (
            "added_tokens.json",
            json!({"<x>": 264, "<y>": 264}).to_string(),
            "token \"<x>\" has id 264, which is that of \"<y>\" in the tokenizer: an id has one token".into(),
        ),
        (
            "tokenizer_config.json",
            decoder(&[("300", "ab")]),
            format!("token \"ab\" has id 300, but it is {ab} in the tokenizer: {gap}"),
        ),
        (
            "added_tokens.json",
            json!({"<x>": 300}).to_string(),
            format!("token \"<x>\" has id 300, but it is 264 in the tokenizer: {gap}"),
        ),
        (
            "added_tokens.json",
            json!({"<x>": u32::MAX}).to_string(),
            format!("token \"<x>\" has id 4294967295, but it is 264 in the tokenizer: {gap}"),
        ),
        ("added_tokens.json", r#"{"<x>": 264, "<x>": 265}"#.into(), "`<x>` occurs twice".into()),
        (
            "tokenizer_config.json",
            decoder(&[("264", "<x>"), (" 264", "<y>")]),
            "`added_tokens_decoder.264` is the second token with this id: the first is \"<y>\"".into(),
        ),
    ] {
        let error = opened(file, &content).unwrap_err();
        assert_eq!(error, format!("{file}: {expected}"), "{content}");
    }
    // A file that transformers does not read because of another one contradicts it all the same.
    let place = tempfile::tempdir().unwrap();
    let config: Value = serde_json::from_str(&decoder(&[("264", "<x>")])).unwrap();
    let files = json!({"tokenizer_config.json": config, "added_tokens.json": {"<y>": 264}});
    write(place.path(), &json!({}), &files);
    let error = Tokenizer::open(place.path(), MODEL).unwrap_err().to_string();
    assert!(
        error.contains("added_tokens.json: token \"<y>\" has id 264, which is that of \"<x>\""),
        "{error}"
    );
}

#[test]
fn a_file_of_tokens_that_is_none_gets_a_sentence() {
    for (file, content, expected) in [
        ("tokenizer_config.json", "[1]", "not a JSON object: "),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": 5}"#,
            "`added_tokens_decoder` is 5: expected an object",
        ),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"x": {"content": "a"}}}"#,
            "`added_tokens_decoder.x`: expected a token id, from 0 to 4294967295",
        ),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"4294967296": {"content": "a"}}}"#,
            "`added_tokens_decoder.4294967296`: expected a token id, from 0 to 4294967295",
        ),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"5": "a"}}"#,
            "`added_tokens_decoder.5` is \"a\": expected a token as an object",
        ),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"5": {"lstrip": true}}}"#,
            "`added_tokens_decoder.5.content` is missing",
        ),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"5": {"content": "a", "lstrip": 1}}}"#,
            "`added_tokens_decoder.5.lstrip` is 1: expected true or false",
        ),
        ("tokenizer_config.json", r#"{"bos_token": 5}"#, "`bos_token` is 5: expected a token"),
        ("special_tokens_map.json", r#"{"eos_token": ["a"]}"#, "`eos_token` is [\"a\"]: expected a token"),
        (
            "tokenizer_config.json",
            r#"{"additional_special_tokens": "a"}"#,
            "`additional_special_tokens` is \"a\": expected a list of tokens",
        ),
        (
            "special_tokens_map.json",
            r#"{"extra_special_tokens": ["a", 5]}"#,
            "`extra_special_tokens.1` is 5: expected a token",
        ),
        ("added_tokens.json", r#"{"a": "5"}"#, "`a` is \"5\": expected a token id, from 0 to 4294967295"),
        ("added_tokens.json", r#"{"a": -1}"#, "`a` is -1: expected a token id, from 0 to 4294967295"),
        ("added_tokens.json", r#"{"a": NaN}"#, "`a` is \"NaN\": expected a token id, from 0 to 4294967295"),
        (
            "tokenizer_config.json",
            r#"{"split_special_tokens": 1}"#,
            "`split_special_tokens` is 1: expected true or false",
        ),
    ] {
        let error = opened(file, content).unwrap_err();
        assert!(error.starts_with(&format!("{file}: {expected}")), "{content}: {error}");
    }
    // Empty tokens are skipped, as in transformers, and so are numbers of Python.
    for (file, content) in [
        ("added_tokens.json", r#"{"": 7}"#),
        ("tokenizer_config.json", r#"{"added_tokens_decoder": {"264": {"content": ""}}, "pad_token": ""}"#),
        (
            "tokenizer_config.json",
            r#"{"model_max_length": Infinity, "x": [-Infinity, NaN], "pad_token": null}"#,
        ),
    ] {
        assert_eq!(opened(file, content).unwrap().encode("ab", true).unwrap().len(), 1, "{content}");
    }
}

#[test]
fn a_token_outside_the_model_is_an_error_where_it_occurs() {
    let place = tempfile::tempdir().unwrap();
    write(place.path(), &json!({}), &json!({"tokenizer_config.json": {"pad_token": "<pad>"}}));
    let tokenizer = Tokenizer::open(place.path(), 264).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap().len(), 1);
    let error = tokenizer.encode("ab<pad>", true).unwrap_err().to_string();
    assert!(error.contains("it gives token 264, but the vocabulary of the model has 264"), "{error}");
}

#[test]
fn a_post_processor_that_repeats_a_text_has_no_start() {
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let post =
        json!({"type": "TemplateProcessing", "single": [text, text], "pair": [], "special_tokens": {}});
    let place = tempfile::tempdir().unwrap();
    write(place.path(), &json!({"post_processor": post}), &json!({}));
    let tokenizer = Tokenizer::open(place.path(), MODEL).unwrap();
    let error = tokenizer.surround().unwrap_err().to_string();
    assert!(
        error.ends_with("its post-processor repeats the text or leaves it out: expected it once"),
        "{error}"
    );
    assert_eq!(tokenizer.encode("ab", true).unwrap().len(), 2);
}

#[test]
fn damaged_files_of_tokens_never_panic() {
    let place = tempfile::tempdir().unwrap();
    let folders = GOLDEN["folders"].as_array().unwrap();
    let mut state = 3_u64;
    let mut draw = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    write(place.path(), &json!({}), &json!({}));
    let names = ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"];
    let mut opened = 0;
    for round in 0..300 {
        let files = &folders[54 + round % 6]["files"];
        for name in names {
            let _ = fs::remove_file(place.path().join(name));
            if let Some(file) = files.get(name) {
                let mut file = crate::tokens::damaged(file, &mut draw);
                if round % 2 == 0 {
                    file = crate::tokens::damaged(&file, &mut draw);
                }
                fs::write(place.path().join(name), file.to_string()).unwrap();
            }
        }
        if let Ok(tokenizer) = Tokenizer::open(place.path(), MODEL) {
            let _ = tokenizer.encode("a<|im_end|>b<think>c <s>", true);
            opened += 1;
        }
    }
    assert!(opened > 15, "{opened}");
}
