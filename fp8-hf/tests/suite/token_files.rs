//! Files of tokens: those that llm.c and nanoGPT write, and broken ones.

use fp8_hf::{TokenFile, TokenFormat};
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/train/data")
}

fn json(path: &Path) -> Vec<Value> {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn ids_are_those_that_were_written() {
    for case in json(&data().join("shards.json")) {
        let file = TokenFile::open(&data().join(case["file"].as_str().unwrap())).unwrap();
        let expected: Vec<i64> =
            case["ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        let vocab = 1 + *expected.iter().max().unwrap() as usize;
        let ids: Vec<i64> = file.read(0..file.len(), vocab).unwrap().into_iter().map(i64::from).collect();
        assert_eq!(ids, expected);
        let format = match case["kind"].as_str().unwrap() {
            "gpt2" => TokenFormat::LlmCU16,
            "llama3" => TokenFormat::LlmCU32,
            _ => TokenFormat::RawU16,
        };
        assert_eq!(file.format(), format);
        // Parts, and the largest id beyond a smaller vocabulary.
        let middle = file.len() / 2;
        let part: Vec<i64> = file.read(3..middle, vocab).unwrap().into_iter().map(i64::from).collect();
        assert_eq!(part, expected[3..middle as usize]);
        assert!(file.read(2..2, 0).unwrap().is_empty());
        let error = file.read(0..file.len(), vocab - 1).unwrap_err().to_string();
        assert!(error.contains(&format!("token {} at position", vocab - 1)), "{error}");
        let error = file.read(1..file.len() + 1, vocab).unwrap_err().to_string();
        assert!(error.contains("there are no tokens"), "{error}");
    }
}

#[test]
fn broken_files_are_named_with_what_is_wrong() {
    let folder = data().join("mistakes");
    let mut cases = json(&folder.join("cases.json"));
    cases.retain(|case| case["file"].as_str().unwrap().ends_with(".bin"));
    assert_eq!(cases.len(), 16);
    for case in cases {
        let name = case["file"].as_str().unwrap();
        let read = TokenFile::open(&folder.join(name)).and_then(|file| file.read(0..file.len(), 280));
        let error = read.unwrap_err().to_string();
        for part in case["names"].as_array().unwrap() {
            assert!(error.contains(part.as_str().unwrap()), "{name}: {error}");
        }
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let error = TokenFile::open(&folder.join("nothing.bin")).unwrap_err().to_string();
    assert!(error.contains("not found: expected a file of tokens"), "{error}");
}

proptest! {
    #[test]
    fn any_bytes_are_tokens_or_an_error(
        magic in prop::sample::select(vec![20_240_520i32, 20_240_801, 20_240_522, 7]),
        version in 0..9i32,
        count in -2..40i32,
        bytes in prop::collection::vec(any::<u8>(), 0..80),
        header in 0..260usize,
    ) {
        let mut numbers = vec![0i32; header];
        for (place, value) in numbers.iter_mut().zip([magic, version, count]) {
            *place = value;
        }
        let mut file: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        file.extend(bytes);
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("tokens.bin");
        fs::write(&path, &file).unwrap();
        if let Ok(tokens) = TokenFile::open(&path) {
            prop_assert!(tokens.len() >= 2 && tokens.len() <= file.len() as u64);
            if let Ok(ids) = tokens.read(0..tokens.len(), 1 << 16) {
                prop_assert_eq!(ids.len() as u64, tokens.len());
                prop_assert!(ids.iter().all(|id| (0..1 << 16).contains(id)));
            }
        }
    }
}
