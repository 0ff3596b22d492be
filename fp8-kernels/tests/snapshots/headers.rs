//! The whole program of a kernel file: the prelude, the headers it begins with, its own text.

use std::path::Path;
use std::{fs, io};

/// The parts of the prelude, in their order.
const PRELUDE: [&str; 15] = [
    "types",
    "float16",
    "elements",
    "fp8",
    "math",
    "reductions",
    "scale",
    "codes",
    "tiles",
    "streams",
    "fault",
    "sums",
    "row_tiles",
    "pairs",
    "column_sums",
];

/// Returns the text in front of every kernel file of a folder.
pub(crate) fn prelude(kernels: &Path) -> io::Result<String> {
    PRELUDE.iter().map(|part| fs::read_to_string(kernels.join(format!("prelude/{part}.cuh")))).collect()
}

/// Reads a header of a folder, or of the folder of attention in it.
pub(crate) fn read(kernels: &Path, name: &str) -> io::Result<String> {
    let path = kernels.join(name);
    fs::read_to_string(if path.exists() { path } else { kernels.join("attention").join(name) })
}

/// Lines `#include "name"` at the start of `text` are replaced by what `read` gives.
pub(crate) fn expand(
    prelude: &str,
    file: &str,
    text: &str,
    read: impl Fn(&str) -> io::Result<String>,
) -> io::Result<String> {
    let (mut program, mut text, mut line) = (format!("{prelude}\n"), text, 1);
    while let Some((name, rest)) = text.strip_prefix("#include \"").and_then(|rest| rest.split_once("\"\n")) {
        program += &format!("#line 1 \"{name}\"\n{}\n", read(name)?);
        (text, line) = (rest, line + 1);
    }
    Ok(format!("{program}#line {line} \"{file}\"\n{text}"))
}
