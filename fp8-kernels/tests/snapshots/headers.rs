//! The whole program of a kernel file: the prelude, the headers it begins with, its own text.

use std::io;

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
