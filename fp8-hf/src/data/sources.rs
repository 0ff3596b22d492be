//! The files of a data set, by their kind.

use super::options::refused;
use crate::{Error, Result, text};
use std::path::{Path, PathBuf};

const PARTS: [&str; 2] = ["train.jsonl", "valid.jsonl"];

/// The ways in which files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// Each file is a document.
    Text,
    /// Each line is a sample.
    Lines,
    /// Files of tokens.
    Shards,
}

/// Files of one format.
#[derive(Debug, PartialEq)]
pub(super) struct Sources {
    pub(super) format: Format,
    pub(super) files: Vec<PathBuf>,
}

/// The parts of a data set.
#[derive(Debug, PartialEq)]
pub(super) struct Parts {
    pub(super) train: Sources,
    /// That of a folder with both parts.
    pub(super) valid: Option<Sources>,
}

impl Parts {
    /// Finds the files of paths. A single folder may hold both parts.
    pub(super) fn find(paths: &[PathBuf]) -> Result<Self> {
        if let [folder] = paths {
            let [train, valid] = PARTS.map(|name| folder.join(name));
            if train.is_file() && valid.is_file() {
                let of = |path| Sources { format: Format::Lines, files: vec![path] };
                return Ok(Self { train: of(train), valid: Some(of(valid)) });
            }
        }
        Ok(Self { train: Sources::find(paths)?, valid: None })
    }
}

impl Sources {
    /// Finds the files of paths, in their order; those of a folder are sorted.
    pub(super) fn find(paths: &[PathBuf]) -> Result<Self> {
        if paths.is_empty() {
            return Err(refused("data", paths, "expected files or folders"));
        }
        let mut files = Vec::new();
        for path in paths {
            let expected = "expected a file of text, JSON lines or tokens, or a folder of them";
            let found = text::files(path).map_err(|error| match error {
                Error::Io { path, source } if source.kind() == std::io::ErrorKind::NotFound => {
                    Error::NotFound { path }.expecting(expected)
                }
                error => error,
            })?;
            if found.is_empty() {
                let problem = format!("the folder has no file: {expected}");
                return Err(Error::File { path: path.clone(), problem });
            }
            expect_one_part(path, &found)?;
            // A folder of documents may have some of JSON. Where there is nothing else, they are no documents.
            let is_json = |file: &PathBuf| file.extension().is_some_and(|end| end == "json");
            if let Some(file) = found.first().filter(|_| found.iter().all(is_json)) {
                return Err(Format::unknown(file, "json"));
            }
            files.extend(found);
        }
        let mut first: Option<(&Path, Format)> = None;
        for file in &files {
            let format = Format::of(file)?;
            match first {
                Some((other, expected)) if expected != format => {
                    let problem = format!(
                        "it is {}, and {} is {}: expected files of one kind",
                        format.name(),
                        other.display(),
                        expected.name()
                    );
                    return Err(Error::File { path: file.clone(), problem });
                }
                Some(_) => {}
                None => first = Some((file, format)),
            }
        }
        let format = first.map_or(Format::Text, |(_, format)| format);
        Ok(Self { format, files })
    }

    /// Names the files in an error about all of them.
    pub(super) fn problem(&self, problem: &str) -> Error {
        let path = self.files.first().cloned().unwrap_or_default();
        let problem = match self.files.len() {
            0 | 1 => problem.to_owned(),
            count => format!("{problem} (this is the first of {count} files)"),
        };
        Error::File { path, problem }
    }
}

/// Names of files that are not for training.
const HELD_OUT: [&str; 6] = ["val", "valid", "validation", "test", "dev", "eval"];

/// Refuses a folder that has a file for training and one to measure with, which would be trained on, too.
fn expect_one_part(folder: &Path, files: &[PathBuf]) -> Result<()> {
    let has = |file: &Path, names: &[&str]| {
        let name = file.file_stem().map(|stem| stem.to_string_lossy().to_lowercase()).unwrap_or_default();
        name.split(|c: char| !c.is_alphabetic()).any(|word| names.contains(&word))
    };
    let has_train = files.iter().any(|file| has(file, &["train"]));
    match files.iter().find(|file| has(file, &HELD_OUT)).filter(|_| has_train && files.len() > 1) {
        None => Ok(()),
        Some(other) => Err(Error::File {
            path: folder.to_owned(),
            problem: format!(
                "it has files for training and {}, which would be trained on, too: name the files, and give that one for validation (a \
                 folder has both parts as {} and {})",
                other.display(),
                PARTS[0],
                PARTS[1]
            ),
        }),
    }
}

impl Format {
    fn of(path: &Path) -> Result<Self> {
        let end = path.extension().map(|end| end.to_string_lossy().to_lowercase()).unwrap_or_default();
        match end.as_str() {
            "jsonl" | "ndjson" => Ok(Self::Lines),
            "bin" => Ok(Self::Shards),
            "parquet" | "arrow" | "gz" | "zst" | "zip" | "npy" | "csv" | "tsv" | "jl" | "jsonlines"
            | "xlsx" | "pdf" => Err(Self::unknown(path, &end)),
            _ => Ok(Self::Text),
        }
    }

    fn unknown(path: &Path, end: &str) -> Error {
        let problem = format!(
            "files that end in .{end} are not read: expected text, JSON lines (.jsonl, one object a line), or tokens (.bin)"
        );
        Error::File { path: path.to_owned(), problem }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Lines => "JSON lines",
            Self::Shards => "a file of tokens",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn files_of_a_folder_are_sorted_and_of_one_kind() {
        let place = tempfile::tempdir().unwrap();
        let folder = [place.path().to_owned()];
        let error = Sources::find(&folder).unwrap_err().to_string();
        assert!(error.contains("the folder has no file"), "{error}");
        for name in ["b.jsonl", "a.JSONL"] {
            fs::write(place.path().join(name), "x").unwrap();
        }
        let found = Sources::find(&folder).unwrap();
        assert_eq!(found.files, ["a.JSONL", "b.jsonl"].map(|name| place.path().join(name)));
        assert_eq!(found.format, Format::Lines);
        fs::write(place.path().join("c.txt"), "x").unwrap();
        let error = Parts::find(&folder).unwrap_err().to_string();
        assert!(
            error.contains("c.txt: it is text, and ") && error.contains("expected files of one kind"),
            "{error}"
        );
        fs::remove_file(place.path().join("c.txt")).unwrap();
        for name in PARTS {
            fs::write(place.path().join(name), "x").unwrap();
        }
        let parts = Parts::find(&folder).unwrap();
        assert_eq!(parts.train.files, [place.path().join("train.jsonl")]);
        assert_eq!(parts.valid.unwrap().files, [place.path().join("valid.jsonl")]);
        // Any other pair would train on what is held out.
        for (train, other) in
            [("train.jsonl", "test.jsonl"), ("x_train_000.bin", "x_val_000.bin"), ("train.txt", "dev.txt")]
        {
            let place = tempfile::tempdir().unwrap();
            for name in [train, other] {
                fs::write(place.path().join(name), "x").unwrap();
            }
            let error = Parts::find(&[place.path().to_owned()]).unwrap_err().to_string();
            assert!(error.contains("it has files for training and ") && error.contains(other), "{error}");
            assert!(Parts::find(&[place.path().join(train)]).is_ok());
        }
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("data.json");
        fs::write(&path, "[]").unwrap();
        let error = Sources::find(&[path]).unwrap_err().to_string();
        assert!(error.contains("data.json: files that end in .json are not read"), "{error}");
        let path = place.path().join("data.CSV");
        fs::write(&path, "a,b").unwrap();
        let error = Sources::find(&[path]).unwrap_err().to_string();
        assert!(error.contains("data.CSV: files that end in .csv are not read"), "{error}");
        let error = Sources::find(&[place.path().join("no.txt")]).unwrap_err().to_string();
        assert!(error.contains("no.txt: not found: expected a file of text"), "{error}");
        let error = Sources::find(&[]).unwrap_err().to_string();
        assert_eq!(error, "training data: data = []: expected files or folders");
        let several = Sources { format: Format::Text, files: vec!["a".into(), "b".into()] };
        assert_eq!(several.problem("too short").to_string(), "a: too short (this is the first of 2 files)");
    }
}
