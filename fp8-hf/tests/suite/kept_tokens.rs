//! Tokens that are kept: found again, made anew where they are damaged, and shared by processes.

use super::training_data::{Reader, all, data, one_a_sequence};
use fp8_hf::data::{DataOptions, Pack, Validation};
use std::fs;
use std::path::{Path, PathBuf};

fn kept(cache: &Path) -> PathBuf {
    let mut files: Vec<PathBuf> = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

fn options(cache: &Path) -> DataOptions {
    DataOptions { cache: Some(cache.to_owned()), ..one_a_sequence(256) }
}

#[test]
fn damaged_files_are_made_anew() {
    let reader = Reader::new("model");
    let place = tempfile::tempdir().unwrap();
    let cache = place.path().join("deep/cache");
    let options = options(&cache);
    let path = data().join("prompt_completion.jsonl");
    let expected = all(&reader.open(&path, &options).unwrap().train);
    let file = kept(&cache);
    let bytes = fs::read(&file).unwrap();
    let written = || fs::metadata(&file).unwrap().modified().unwrap();
    let time = written();
    assert_eq!(all(&reader.open(&path, &options).unwrap().train), expected);
    assert_eq!(written(), time, "it was written although it was there");
    let mut damaged: Vec<Vec<u8>> = [0, 1, 7, 40, bytes.len() / 2, bytes.len() - 1]
        .into_iter()
        .map(|length| bytes[..length].to_vec())
        .collect();
    for at in (0..bytes.len()).step_by(97).chain([bytes.len() - 1, bytes.len() - 70]) {
        let mut changed = bytes.clone();
        changed[at] ^= 4;
        damaged.push(changed);
    }
    damaged.push([&bytes[..], b"x"].concat());
    for changed in damaged {
        fs::write(&file, &changed).unwrap();
        assert_eq!(all(&reader.open(&path, &options).unwrap().train), expected);
        assert_eq!(fs::read(&file).unwrap(), bytes);
    }
}

#[test]
fn an_open_data_set_notices_damage() {
    let reader = Reader::new("model");
    let cache = tempfile::tempdir().unwrap();
    let path = data().join("text.jsonl");
    let opened = reader.open(&path, &options(cache.path())).unwrap();
    let file = kept(cache.path());
    let mut bytes = fs::read(&file).unwrap();
    bytes[5] ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = opened.train.read(0).unwrap_err().to_string();
    assert!(error.contains("the kept tokens are damaged: remove the file and start again"), "{error}");
}

#[test]
fn other_contents_have_other_digests() {
    let reader = Reader::new("model");
    let place = tempfile::tempdir().unwrap();
    let cache = place.path().join("cache");
    let path = place.path().join("data.jsonl");
    fs::write(&path, "{\"text\": \"one\"}\n{\"text\": \"two\"}\n{\"text\": \"three\"}\n").unwrap();
    let options = options(&cache);
    let open = |options: &DataOptions| reader.open(&path, options).unwrap().train;
    let first = open(&options);
    assert!(first.digest().len() == 64 && first.digest().bytes().all(|byte| byte.is_ascii_hexdigit()));
    let copy = place.path().join("copy.jsonl");
    fs::copy(&path, &copy).unwrap();
    assert_eq!(reader.open(&copy, &options).unwrap().train.digest(), first.digest());
    let seq = open(&DataOptions { seq: 9, ..options.clone() });
    let pack = open(&DataOptions { pack: Some(Pack::Whole), ..options.clone() });
    let half = |seed| DataOptions { validation: Validation::Fraction(0.5), seed, ..options.clone() };
    let (half, other) = (open(&half(1)), open(&half(2)));
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 1, "the tokens are the same");
    fs::write(&path, "{\"text\": \"one\"}\n{\"text\": \"two\"}\n{\"text\": \"seven\"}\n").unwrap();
    let text = open(&options);
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 2);
    let header = Reader::new("header_bos").open(&path, &options).unwrap().train;
    let mut digests: Vec<&str> =
        [&first, &seq, &pack, &half, &other, &text, &header].into_iter().map(|part| part.digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 7);
}

#[test]
fn several_threads_make_the_same_tokens_at_once() {
    let reader = Reader::new("model");
    let place = tempfile::tempdir().unwrap();
    let cache = place.path().join("cache");
    let path = data().join("chat.jsonl");
    let reader = Reader { ..reader };
    let options = DataOptions { loss: Some(fp8_hf::data::LossOn::All), ..options(&cache) };
    let found: Vec<_> = std::thread::scope(|scope| {
        let open = || all(&reader.open(&path, &options).unwrap().train);
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(found.iter().all(|one| *one == found[0]) && found[0].len() == 11);
    kept(&cache);
}

#[test]
fn places_that_cannot_be_written_are_named() {
    let reader = Reader::new("model");
    let place = tempfile::tempdir().unwrap();
    let path = data().join("text.jsonl");
    let cache = place.path().join("file");
    fs::write(&cache, "x").unwrap();
    let error = reader.error(&path, &options(&cache));
    assert!(error.contains("/file: tokens cannot be kept here: "), "{error}");
    assert!(error.ends_with("expected a folder that can be written to"), "{error}");
    // A folder in place of the file.
    let cache = place.path().join("cache");
    drop(reader.open(&path, &options(&cache)).unwrap());
    let file = kept(&cache);
    fs::remove_file(&file).unwrap();
    fs::create_dir_all(file.join("below")).unwrap();
    let error = reader.error(&path, &options(&cache));
    assert!(error.contains("tokens cannot be kept here: it exists and is not a file"), "{error}");
    assert_eq!(kept(&cache), file);
}

#[test]
fn a_mistake_leaves_nothing_behind() {
    let reader = Reader::new("model");
    let place = tempfile::tempdir().unwrap();
    let cache = place.path().join("deep/cache");
    let options = options(&cache);
    for (name, stream) in [("not_json.jsonl", false), ("too_short.txt", true), ("beyond_vocab.bin", true)] {
        let pack = if stream { Some(Pack::Stream) } else { None };
        reader.error(&data().join("mistakes").join(name), &DataOptions { pack, ..options.clone() });
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "{name}");
    }
}

#[test]
fn counts_of_files_of_tokens_are_kept() {
    let reader = Reader::new("model");
    let cache = tempfile::tempdir().unwrap();
    let options = DataOptions { pack: None, seq: 16, ..options(cache.path()) };
    let path = data().join("shards/gpt2_small_ids.bin");
    let first = reader.open(&path, &options).unwrap().train;
    let file = kept(cache.path());
    assert_eq!(reader.open(&path, &options).unwrap().train.summary(), first.summary());
    fs::write(&file, "nonsense").unwrap();
    assert_eq!(reader.open(&path, &options).unwrap().train.summary(), first.summary());
    assert_eq!(first.digest(), reader.open(&path, &options).unwrap().train.digest());
}
