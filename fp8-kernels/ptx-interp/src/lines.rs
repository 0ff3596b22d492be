//! Lines of the CUDA source beside PTX instead of in it.
//!
//! The directives `.loc` are two fifths of what NVRTC writes, and only reports need them. [`without_lines`] leaves them
//! out, [`lines_of`] writes what they say as a table, and [`Module::set_lines`] reads it. Numbers count from 0:
//!
//! ```text
//! file cast.cu
//! function _Z11grid_threadv
//! loc 0 12            a file and a line in it
//! loc 0 518 0 0 13    the same of an inlined function: it, and the file and line where it was inlined
//! 33 0                from line 33 of the PTX on: the first location
//! 57 -                from line 57 on: none
//! ```

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::Hash;
use std::sync::Arc;

use crate::module::Module;
use crate::report::{LoadError, SourceLine};

/// Whether a line of PTX only says where the next ones come from.
fn is_left_out(line: &str) -> bool {
    let line = line.trim_start();
    [".loc", ".file"]
        .iter()
        .any(|name| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['\t', ' '])))
}

/// The lines that stay, each with its number in the whole text. Debug sections end what NVRTC writes.
fn kept(ptx: &str) -> impl Iterator<Item = (u32, &str)> {
    let code = ptx.lines().take_while(|line| !line.trim_start().starts_with(".section"));
    (1..).zip(code).filter(|(_, line)| !is_left_out(line))
}

/// PTX without `.loc`, `.file` and debug sections. What remains has the same instructions.
pub fn without_lines(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    for (_, line) in kept(ptx) {
        text += line;
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// Returns the contents of the `.loc` directives of `ptx` as a table for [`without_lines`] of the same text.
///
/// # Errors
/// As [`Module::parse`].
pub fn lines_of(ptx: &str) -> Result<String, LoadError> {
    let module = Module::parse(ptx)?;
    let places: HashMap<u32, u32> = kept(ptx).map(|(line, _)| line).zip(1..).collect();
    let (mut files, mut functions, mut locations) = (Index::default(), Index::default(), Index::default());
    let (mut runs, mut before) = (String::new(), None);
    for inst_line in module.kernels.iter().flat_map(|kernel| {
        kernel.code.iter().map(|inst| (inst.line, inst.loc.and_then(|loc| kernel.lines.get(loc as usize))))
    }) {
        let (line, source) = inst_line;
        let location = source.map(|source| {
            let (mut text, file) = (String::new(), files.of(source.file.clone()));
            // Writing to a string cannot fail.
            let _ = write!(text, "loc {file} {}", source.line);
            if let (Some(function), Some((file, line))) = (&source.function, &source.inlined_at) {
                let _ = write!(text, " {} {} {line}", functions.of(function.clone()), files.of(file.clone()));
            }
            locations.of(text)
        });
        if location != before
            && let Some(place) = places.get(&line)
        {
            let name = location.map_or_else(|| "-".to_owned(), |location| location.to_string());
            let _ = writeln!(runs, "{place} {name}");
            before = location;
        }
    }
    let mut text = String::new();
    files.known.iter().for_each(|file| text += &format!("file {file}\n"));
    functions.known.iter().for_each(|function| text += &format!("function {function}\n"));
    locations.known.iter().for_each(|location| text += &format!("{location}\n"));
    Ok(text + &runs)
}

/// Values by number, in the order in which they came.
struct Index<T> {
    known: Vec<T>,
    numbers: HashMap<T, usize>,
}

impl<T> Default for Index<T> {
    fn default() -> Self {
        Self { known: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + Hash> Index<T> {
    fn of(&mut self, value: T) -> usize {
        if let Some(number) = self.numbers.get(&value) {
            return *number;
        }
        self.known.push(value.clone());
        self.numbers.insert(value, self.known.len() - 1);
        self.known.len() - 1
    }
}

/// A table as it is read.
#[derive(Default)]
struct Table {
    files: Vec<String>,
    functions: Vec<String>,
    locations: Vec<SourceLine>,
    /// First lines of PTX, rising, each with its location.
    runs: Vec<(u32, Option<u32>)>,
}

impl Table {
    fn read(&mut self, line: &str) -> Option<()> {
        let (first, rest) = line.split_once(' ')?;
        match first {
            "//" => {}
            "file" => self.files.push(rest.to_owned()),
            "function" => self.functions.push(rest.to_owned()),
            "loc" => {
                let numbers: Vec<u32> = rest.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
                let file = |number: u32| self.files.get(number as usize).cloned();
                let location = match *numbers.as_slice() {
                    [at, line] => SourceLine { file: file(at)?, line, function: None, inlined_at: None },
                    [at, line, function, inlined_in, inlined_at] => SourceLine {
                        file: file(at)?,
                        line,
                        function: Some(self.functions.get(function as usize)?.clone()),
                        inlined_at: Some((file(inlined_in)?, inlined_at)),
                    },
                    _ => return None,
                };
                self.locations.push(location);
            }
            line => {
                let location = if rest == "-" { None } else { Some(rest.parse().ok()?) };
                let is_known =
                    location.is_none_or(|location: u32| (location as usize) < self.locations.len());
                let line = line.parse().ok()?;
                let rises = self.runs.last().is_none_or(|(last, _)| *last < line);
                (is_known && rises).then(|| self.runs.push((line, location)))?;
            }
        }
        Some(())
    }
}

impl Module {
    /// Takes the lines of the CUDA source from a table that [`lines_of`] wrote, in place of those that the PTX names.
    ///
    /// # Errors
    /// For a line of the table that is not one of its forms.
    pub fn set_lines(&mut self, text: &str) -> Result<(), LoadError> {
        let mut table = Table::default();
        for (number, line) in (1..).zip(text.lines()) {
            table
                .read(line)
                .ok_or_else(|| LoadError::new(number, format!("{line}: no line of a table of lines")))?;
        }
        let lines: Arc<[SourceLine]> = table.locations.into();
        for kernel in &mut self.kernels {
            kernel.lines = Arc::clone(&lines);
            for inst in &mut kernel.code {
                let after = table.runs.partition_point(|(first, _)| *first <= inst.line);
                inst.loc = after.checked_sub(1).and_then(|run| table.runs[run].1);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the source line that reports name at each instruction of each kernel.
    fn named(module: &Module) -> Vec<(&str, Vec<Option<&SourceLine>>)> {
        module
            .kernels
            .iter()
            .map(|kernel| {
                let line = |loc: Option<u32>| loc.and_then(|loc| kernel.lines.get(loc as usize));
                (kernel.name.as_str(), kernel.code.iter().map(|inst| line(inst.loc)).collect())
            })
            .collect()
    }

    #[test]
    fn a_table_says_what_the_directives_said() {
        let mut inlined = 0;
        for ptx in [
            include_str!("../tests/planted/tiles.ptx"),
            include_str!("../tests/planted/rows.ptx"),
            include_str!("../tests/planted/product.ptx"),
        ] {
            let short = without_lines(ptx);
            assert!(short.len() < ptx.len() * 9 / 10, "{} of {}", short.len(), ptx.len());
            assert!(![".loc", ".file", ".section"].iter().any(|name| short.contains(name)), "{short}");
            let (whole, mut rest) = (Module::parse(ptx).unwrap(), Module::parse(&short).unwrap());
            assert!(named(&rest).iter().all(|(_, lines)| lines.iter().all(Option::is_none)));
            rest.set_lines(&lines_of(ptx).unwrap()).unwrap();
            assert_eq!(named(&rest), named(&whole));
            let lines = named(&whole).into_iter().flat_map(|(_, lines)| lines).flatten();
            inlined += lines.filter(|line| line.inlined_at.is_some()).count();
        }
        assert!(inlined > 0, "no example of an inlined function");
    }

    #[test]
    fn a_damaged_table_is_refused_with_its_line() {
        let mut module = Module::parse(&without_lines(include_str!("../tests/planted/rows.ptx"))).unwrap();
        let mut error = |text: &str| module.set_lines(text).unwrap_err();
        for bad in ["loc 0 1", "5 0", "x -", "file", "loc 1", ""] {
            assert_eq!(error(&format!("// a comment\n{bad}\n")).line, 2, "{bad}");
        }
        assert_eq!(error("9 -\n9 -\n").line, 2);
    }
}
