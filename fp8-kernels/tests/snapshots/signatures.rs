//! The signatures of all kernels as Rust, made from the kernel files: a struct for each list of parameters, with a field
//! for each parameter, and a constant for each kernel.
//!
//! Macros that stand for parameters become structs of their own, so that kernels share them as the files do.

use std::collections::BTreeMap;

/// Ends of the names of macros that stand for parameters.
const GROUP_ENDS: [&str; 2] = ["_PARAMETERS", "_PARAMS"];

const HEAD: &str =
    "//! The kernels and their parameters. Written by `cargo xtask ptx` from the kernel files: do not edit.

use super::source::Source;
use super::{In, Out, Void, signatures};

";

/// A macro: its parameters if it takes any, and its text.
struct Macro<'a> {
    takes: Option<Vec<&'a str>>,
    body: String,
}

/// One program's macros by name, as they stand at its end.
type Macros<'a> = BTreeMap<&'a str, Macro<'a>>;

/// A name and a Rust type.
type Field = (String, String);

/// A list of parameters, and the file and the name of each kernel that has it.
type ListOfKernels = (Vec<Field>, Vec<(String, String)>);

/// The lists of parameters of all programs, and the kernels that have each.
#[derive(Default)]
struct Signatures {
    groups: BTreeMap<String, Vec<Field>>,
    /// Types that kernel files define.
    pointees: Vec<String>,
    lists: Vec<ListOfKernels>,
}

/// Returns the file of signatures for these programs: the stem of each kernel file, with its text behind its headers'.
pub(crate) fn generate<'a>(programs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<String, String> {
    let mut all = Signatures::default();
    for (stem, program) in programs {
        let program = without_comments(program);
        let (macros, code) = preprocess(&program);
        all.take(stem, &macros, &code).map_err(|problem| format!("{stem}.cu: {problem}"))?;
    }
    all.write()
}

fn without_comments(program: &str) -> String {
    program.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Divides a program into its macros and the code besides them.
fn preprocess(program: &str) -> (Macros<'_>, String) {
    let (mut macros, mut code) = (Macros::new(), String::new());
    let mut lines = program.lines();
    while let Some(line) = lines.next() {
        let Some(definition) = line.trim_start().strip_prefix("#define ") else {
            if !line.trim_start().starts_with('#') {
                code += line;
                code.push('\n');
            }
            continue;
        };
        let end = definition.find(|c: char| !is_word(c)).unwrap_or(definition.len());
        let (name, mut rest) = definition.split_at(end);
        let takes = rest.strip_prefix('(').and_then(|rest| rest.split_once(')')).map(|(takes, body)| {
            rest = body;
            takes.split(',').map(str::trim).collect()
        });
        let mut body = String::new();
        let mut line = rest;
        while let Some(start) = line.trim_end().strip_suffix('\\') {
            body += start;
            body.push('\n');
            line = lines.next().unwrap_or_default();
        }
        body += line;
        macros.insert(name, Macro { takes, body });
    }
    (macros, code)
}

const fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The kernels defined in a text: the name and the text of the parameters of each.
fn definitions(text: &str) -> Result<Vec<(&str, &str)>, String> {
    let heads = text.split("extern \"C\" __global__").skip(1);
    let definition = |head: &'_ str| -> Option<(usize, usize, usize)> {
        let bounds = head.find("__launch_bounds__(")? + "__launch_bounds__(".len();
        let after = bounds + closing(&head[bounds..])? + 1;
        let open = after + head[after..].find('(')?;
        Some((after, open, open + 1 + closing(&head[open + 1..])?))
    };
    heads
        .map(|head| {
            let (after, open, close) =
                definition(head).ok_or("a kernel without __launch_bounds__ or parameters")?;
            Ok((head[after..open].trim(), &head[open + 1..close]))
        })
        .collect()
}

/// The place of the parenthesis that closes what was opened before `text`.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.char_indices().find_map(|(at, c)| {
        match c {
            '(' => depth += 1,
            ')' if depth == 0 => return Some(at),
            ')' => depth -= 1,
            _ => {}
        }
        None
    })
}

impl Signatures {
    fn take(&mut self, stem: &str, macros: &Macros<'_>, code: &str) -> Result<(), String> {
        for (name, parameters) in definitions(code)? {
            self.kernel(stem, name, parameters, macros)?;
        }
        for line in code.lines() {
            let Some((called, rest)) = line.split_once('(') else { continue };
            let Some(Macro { takes: Some(takes), body }) = macros.get(called) else { continue };
            let given: Vec<&str> = rest.split(',').map(|text| text.trim().trim_end_matches(')')).collect();
            for (name, parameters) in definitions(body)? {
                let at = takes.iter().position(|taken| *taken == name);
                let name =
                    at.and_then(|at| given.get(at)).ok_or_else(|| format!("{called}: no name for {name}"))?;
                self.kernel(stem, name, parameters, macros)?;
            }
        }
        Ok(())
    }

    fn kernel(&mut self, stem: &str, name: &str, text: &str, macros: &Macros<'_>) -> Result<(), String> {
        let fields = self.fields(text, macros).map_err(|problem| format!("{name}: {problem}"))?;
        let kernel = (stem.to_owned(), name.to_owned());
        let word = |name: &str| name.split('_').next().map(str::to_owned);
        let alike = |(other, kernels): &&mut (Vec<Field>, Vec<(String, String)>)| {
            *other == fields && kernels.first().is_some_and(|(_, first)| word(first) == word(name))
        };
        match self.lists.iter_mut().find(alike) {
            Some((_, kernels)) => kernels.push(kernel),
            None => self.lists.push((fields, vec![kernel])),
        }
        Ok(())
    }

    /// The fields of a list of parameters. A macro's parameters become one field.
    fn fields(&mut self, text: &str, macros: &Macros<'_>) -> Result<Vec<Field>, String> {
        let mut fields = Vec::new();
        for part in text.split(',') {
            // A macro whose text ends with a comma stands before the next parameter without one.
            let mut words: Vec<&str> = part.split_whitespace().collect();
            while let Some(group) =
                words.first().filter(|word| GROUP_ENDS.iter().any(|end| word.ends_with(end)))
            {
                fields.extend(self.group(group, macros)?);
                words.remove(0);
            }
            if !words.is_empty() {
                fields.push(self.field(&words.join(" "))?);
            }
        }
        Ok(fields)
    }

    fn group(&mut self, name: &str, macros: &Macros<'_>) -> Result<Option<Field>, String> {
        let body = macros.get(name).ok_or_else(|| format!("no macro {name}"))?.body.trim();
        if body.is_empty() {
            return Ok(None);
        }
        if macros.contains_key(body) {
            return self.group(body, macros);
        }
        let fields = self.fields(body, macros)?;
        let known = self.groups.entry(camel(&name.to_lowercase())).or_insert_with(|| fields.clone());
        if *known != fields {
            return Err(format!("{name} stands for other parameters elsewhere"));
        }
        let stem = GROUP_ENDS.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        Ok(Some((stem.to_lowercase(), camel(&name.to_lowercase()))))
    }

    /// The field of `const float* scale`.
    fn field(&mut self, parameter: &str) -> Result<Field, String> {
        let spaced = parameter.replace('*', " * ").replace("__restrict__", " ");
        let words: Vec<&str> = spaced.split_whitespace().collect();
        let (name, words) = words.split_last().ok_or("a parameter without a name")?;
        let kind = match *words {
            ["const", pointee, "*"] => format!("In<{}>", self.pointee(pointee)),
            [pointee, "*"] => format!("Out<{}>", self.pointee(pointee)),
            ["const", pointee, "*", "const", "*"] => format!("In<In<{}>>", self.pointee(pointee)),
            [scalar] => {
                scalar_type(scalar).ok_or_else(|| format!("{parameter}: an unknown type"))?.to_owned()
            }
            _ => return Err(format!("{parameter}: an unknown type")),
        };
        Ok(((*name).to_owned(), kind))
    }

    fn pointee(&mut self, name: &str) -> String {
        match (name, scalar_type(name)) {
            ("void", _) => "Void".to_owned(),
            (_, Some(scalar)) => scalar.to_owned(),
            _ => {
                if !self.pointees.iter().any(|known| known == name) {
                    self.pointees.push(name.to_owned());
                }
                name.to_owned()
            }
        }
    }

    fn write(mut self) -> Result<String, String> {
        let mut text = HEAD.to_owned();
        self.pointees.sort();
        let pointees = self.pointees.iter().map(|name| format!("{name} {}", snake(name)));
        text += &format!("signatures! {{\n    pointees {};\n", pointees.collect::<Vec<_>>().join(", "));
        for (name, fields) in &self.groups {
            text += &format!("\n    group {name} {}\n", list(fields));
        }
        let mut names: Vec<String> = Vec::new();
        for (fields, kernels) in &self.lists {
            let name = camel(&common(kernels));
            if names.contains(&name) || self.groups.contains_key(&name) || self.pointees.contains(&name) {
                return Err(format!("two lists of parameters would be called {name}: rename a kernel"));
            }
            text += &format!("\n    kernel {name} {}\n", list(fields));
            let constants = kernels
                .iter()
                .map(|(stem, kernel)| format!("    {} = {} {kernel:?}", kernel.to_uppercase(), source(stem)));
            text += &format!("{};\n", constants.collect::<Vec<_>>().join(",\n"));
            names.push(name);
        }
        text += "}\n";
        Ok(text)
    }
}

/// `{ x: In<Void>, n: u64 }`, in lines of at most 118 characters.
fn list(fields: &[Field]) -> String {
    let mut text = "{".to_owned();
    let mut width = 0;
    for (name, kind) in fields {
        let field = format!("{name}: {kind},");
        if width == 0 || width + field.len() > 106 {
            text += "\n       ";
            width = 0;
        }
        width += field.len() + 1;
        text += &format!(" {field}");
    }
    text + " }"
}

fn scalar_type(name: &str) -> Option<&'static str> {
    let types = [
        ("float", "f32"),
        ("int", "i32"),
        ("u8", "u8"),
        ("u16", "u16"),
        ("u32", "u32"),
        ("u64", "u64"),
        ("i64", "i64"),
    ];
    types.iter().find(|(cuda, _)| *cuda == name).map(|(_, rust)| *rust)
}

/// The words that all names begin with, or the name of the only one.
fn common(kernels: &[(String, String)]) -> String {
    let names: Vec<Vec<&str>> = kernels.iter().map(|(_, name)| name.split('_').collect()).collect();
    let Some(first) = names.first() else { return String::new() };
    let shared = |&(at, word): &(usize, &&str)| names.iter().all(|name| name.get(at) == Some(word));
    let words: Vec<&str> = first.iter().enumerate().take_while(shared).map(|(_, word)| *word).collect();
    words.join("_")
}

fn camel(name: &str) -> String {
    let capital =
        |word: &str| word.chars().take(1).flat_map(char::to_uppercase).chain(word.chars().skip(1)).collect();
    name.split('_').map(capital).collect::<Vec<String>>().concat()
}

fn snake(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}

/// The variant of a kernel file: `AttentionFp8`.
fn source(stem: &str) -> String {
    if stem == "adamw" { "AdamW".to_owned() } else { camel(stem) }
}
