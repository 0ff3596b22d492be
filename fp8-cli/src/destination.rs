//! A file that an option names for a part of the result, such as `--report`.

use crate::failure::Failure;
use crate::{interrupt, output};
use fp8_nn::fp8_kernels::AtomicFile;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The extension of pages, which no command reads.
pub(crate) const PAGE: &str = "html";

/// A file that is open before the work begins, so that a place where it cannot be written costs no work, and that appears at
/// [`finish`](Self::finish).
#[derive(Debug)]
pub(crate) struct Destination {
    path: PathBuf,
    file: AtomicFile,
}

impl Destination {
    /// Opens the file that `option` names. It must not be one of `inputs`, and an existing file is replaced only if its name ends
    /// in `extension`, as that of no input does.
    pub(crate) fn open(
        option: &str,
        path: &Path,
        extension: &str,
        inputs: &[&Path],
    ) -> Result<Self, Failure> {
        let refused = |problem: String| Failure::input(format!("{option} {}: {problem}", path.display()));
        if path.is_dir() || path.file_name().is_none() {
            return Err(refused("expected the name of a file".into()));
        }
        AtomicFile::check(path).map_err(|error| refused(error.to_string()))?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if !folder.is_none_or(Path::is_dir) {
            return Err(refused("its folder does not exist: create it first".into()));
        }
        let place = real(path);
        for input in inputs {
            let input_place = real(input);
            if place == input_place {
                return Err(refused("this file is also an input: choose another name".into()));
            }
            // A folder of texts may have such files.
            let is_inside = input_place.is_dir() && place.starts_with(&input_place);
            if is_inside && place.exists() && extension != PAGE {
                let input = input.display();
                return Err(refused(format!(
                    "it is inside {input}, which is an input: choose a place outside it"
                )));
            }
        }
        let has_extension = place.extension().is_some_and(|end| end.eq_ignore_ascii_case(extension));
        if place.exists() && !has_extension {
            return Err(refused(format!(
                "it already exists, and only files *.{extension} are overwritten: remove it, or choose another name"
            )));
        }
        interrupt::note_output(&place);
        let file = AtomicFile::create(path).map_err(|error| {
            refused(format!("a file cannot be created there ({error}): choose another place"))
        })?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes the file. If that fails, prints the result all the same, so that it is not lost.
    pub(crate) fn finish(self, content: &str, result: &str) -> Result<(), Failure> {
        let Self { path, mut file } = self;
        let written = file.write_all(content.as_bytes()).and_then(|()| file.commit());
        if written.is_ok() {
            interrupt::note_written(&real(&path));
        }
        written.or_else(|error| {
            output::print(result)?;
            Err(Failure::Work(format!("{}: {error}", path.display())))
        })
    }
}

/// Returns the path without links and dots, of a file that may not exist yet.
fn real(path: &Path) -> PathBuf {
    let whole = std::fs::canonicalize(path);
    whole.unwrap_or_else(|_| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = std::fs::canonicalize(folder.unwrap_or(Path::new("."))).unwrap_or_default();
        folder.join(path.file_name().unwrap_or_default())
    })
}
