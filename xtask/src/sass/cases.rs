//! The launches that are counted: `fp8-kernels/ptx/sass-cases.txt`, whose header describes a line.

use std::collections::{BTreeMap, BTreeSet};

use super::memory::{Content, Memory};
use super::signatures::{Kind, Parameters};
use super::thread::Place;
use crate::workspace::Result;

/// The thread of a block, and the block, that run unless a case names others: neither is the first or the last.
const THREAD: u32 = 37;
const BLOCK: u32 = 5;

/// The way in which a case counts elements: by the bytes that the thread reads from a parameter's buffer or writes to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub(super) parameter: String,
    pub(super) is_read: bool,
    /// Bytes an element.
    pub(super) bytes: u64,
}

/// One launch of one kernel.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// `cast+T`.
    pub(super) work: String,
    pub(super) dtype: String,
    pub(super) kernel: String,
    pub(super) unit: Unit,
    /// Threads that share one element: 1, or those of a block where the unit is a tile.
    pub(super) lanes: u32,
    /// Bytes of device memory that an element must move.
    pub(super) bytes: f64,
    /// Dynamic shared memory of a block.
    pub(super) shared: u32,
    /// Buffers that caches hold: loads from them do not count as on their way from memory.
    small: Vec<String>,
    /// Threads whose run comes first, for what they leave in shared memory.
    pub(super) before: u32,
    pub(super) threads: Option<u32>,
    grid: u32,
    block: u32,
    thread: u32,
    arguments: BTreeMap<String, String>,
    /// Arguments of a second, longer run; the difference is what an element costs.
    longer: BTreeMap<String, String>,
    /// The line, by which a change is noticed.
    pub(super) line: String,
}

/// All cases, and the kernels that have none with the reason.
#[derive(Debug, Default)]
pub(super) struct Cases {
    pub(super) cases: Vec<Case>,
    pub(super) without: BTreeMap<String, String>,
}

impl Cases {
    /// Refuses works that no case has.
    pub(super) fn expect(&self, works: &[String]) -> Result {
        let Some(work) = works.iter().find(|work| self.cases.iter().all(|case| case.work != **work)) else {
            return Ok(());
        };
        let known: BTreeSet<&str> = self.cases.iter().map(|case| &*case.work).collect();
        let known = Vec::from_iter(known).join(", ");
        Err(format!("sass: no case of {work} in fp8-kernels/ptx/sass-cases.txt; there are {known}").into())
    }
}

/// # Errors
/// A line that is not understood, with its number.
pub(super) fn read(text: &str) -> Result<Cases> {
    let mut found = Cases::default();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let problem = |what: &str| format!("sass-cases.txt:{number}: {what}");
        if let Some(rest) = line.strip_prefix("- ") {
            let (kernel, reason) = rest.split_once(": ").ok_or_else(|| problem("a reason is missing"))?;
            found.without.insert(kernel.to_owned(), reason.to_owned());
            continue;
        }
        let case = case(line).map_err(|what| problem(&what))?;
        let is_same = |other: &&Case| (&other.work, &other.dtype) == (&case.work, &case.dtype);
        if found.cases.iter().any(|other| is_same(&other)) {
            return Err(problem(&format!("{} {} a second time", case.work, case.dtype)).into());
        }
        found.cases.push(case);
    }
    Ok(found)
}

fn case(line: &str) -> std::result::Result<Case, String> {
    let mut words = line.split_whitespace();
    let mut word = |what| words.next().map(str::to_owned).ok_or(format!("{what} is missing"));
    let (work, dtype, kernel) = (word("the work")?, word("the dtype")?, word("the kernel")?);
    let mut arguments = BTreeMap::new();
    for word in words {
        let (name, value) = word.split_once('=').ok_or(format!("{word}: name=value is wanted"))?;
        arguments.insert(name.to_owned(), value.to_owned());
    }
    let mut take = |name: &str| arguments.remove(name);
    let unit = take("per").ok_or("per= is missing")?;
    let parts: Vec<&str> = unit.split(':').collect();
    let [way @ ("read" | "written"), parameter, bytes] = parts[..] else {
        return Err(format!("per={unit}: read:PARAMETER:BYTES or written:PARAMETER:BYTES is wanted"));
    };
    let number = |name: &str, text: Option<String>, default: u32| match text {
        None => Ok(default),
        Some(text) => text.parse().map_err(|_| format!("{name}={text}: a number is wanted")),
    };
    let bytes_of_unit = bytes.parse().ok().filter(|bytes| *bytes > 0);
    let unit = Unit {
        parameter: parameter.to_owned(),
        is_read: way == "read",
        bytes: bytes_of_unit.ok_or(format!("per={unit}: bytes from 1 on are wanted"))?,
    };
    let bytes = take("bytes").ok_or("bytes= is missing")?;
    let bytes = bytes.parse().ok().filter(|bytes: &f64| bytes.is_finite() && *bytes >= 0.0);
    let longer = take("longer").unwrap_or_default();
    let longer = longer.split(',').filter(|part| !part.is_empty()).map(|part| {
        let (name, value) = part.split_once(':').ok_or(format!("longer={part}: NAME:VALUE is wanted"))?;
        Ok((name.to_owned(), value.to_owned()))
    });
    let longer = longer.collect::<std::result::Result<_, String>>()?;
    Ok(Case {
        work,
        dtype,
        kernel,
        unit,
        lanes: number("lanes", take("lanes"), 1)?.max(1),
        bytes: bytes.ok_or("bytes=: a number from 0 on is wanted")?,
        shared: number("shared", take("shared"), 0)?,
        small: take("small").map_or_else(Vec::new, |names| names.split(',').map(str::to_owned).collect()),
        before: number("before", take("before"), 0)?,
        threads: take("threads").map(|text| number("threads", Some(text), 0)).transpose()?,
        grid: number("grid", take("grid"), 1)?,
        block: number("block", take("block"), BLOCK)?,
        thread: number("thread", take("thread"), THREAD)?,
        longer,
        line: line.split_whitespace().collect::<Vec<_>>().join(" "),
        arguments,
    })
}

/// A case's parameters as a launch passes them.
pub(super) struct Launch {
    pub(super) place: Place,
    pub(super) parameters: Vec<u8>,
    pub(super) memory: Memory,
    /// The address of the buffer by which elements are counted.
    pub(super) counted: u64,
}

impl Case {
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.work, self.dtype)
    }

    /// The parameter by whose buffer elements are counted, and the word of it that names another buffer instead.
    fn counted(&self) -> (&str, Option<usize>) {
        let parts = self.unit.parameter.split_once('.');
        match parts.and_then(|(name, word)| Some((name, word.parse().ok()?))) {
            Some((name, word)) => (name, Some(word)),
            None => (&self.unit.parameter, None),
        }
    }

    pub(super) fn is_longer(&self) -> bool {
        !self.longer.is_empty()
    }

    /// The launch of the case, or of its longer form.
    ///
    /// # Errors
    /// An argument that is missing, superfluous or not understood.
    pub(super) fn launch(&self, signature: &Parameters, threads: u32, longer: bool) -> Result<Launch> {
        let problem = |what: String| format!("sass-cases.txt: {}: {what}", self.name());
        let mut arguments = self.arguments.clone();
        let mut place = Place { grid: self.grid, threads, block: self.block, thread: self.thread };
        for (name, value) in self.longer.iter().filter(|_| longer) {
            let number = value.parse();
            match (name.as_str(), number) {
                ("block", Ok(block)) => place.block = block,
                ("grid", Ok(grid)) => place.grid = grid,
                _ => drop(arguments.insert(name.clone(), value.clone())),
            }
        }
        if place.thread >= threads {
            place.thread = threads / 2;
        }
        place.block = place.block.min(place.grid.saturating_sub(1));
        let (mut memory, mut parameters, mut counted) = (Memory::default(), Vec::new(), None);
        for (name, kind) in signature {
            let given = arguments.remove(name);
            let bytes = match kind {
                Kind::Pointer(pointee) => {
                    let address = self.pointer(pointee, given.as_deref(), &mut memory).map_err(problem)?;
                    if self.small.contains(name) {
                        memory.mark_small(address);
                    }
                    // `records.2` is the buffer whose address is the third word of `records`.
                    let (buffer, word) = self.counted();
                    if *name == buffer {
                        counted = match word {
                            None => Some(address),
                            Some(word) => memory.word(address, word),
                        };
                    }
                    address.to_le_bytes().to_vec()
                }
                Kind::Scalar(scalar) => {
                    let missing = || format!("{} takes {name}, which the case does not give", self.kernel);
                    let text = given.ok_or_else(missing).map_err(problem)?;
                    let wrong = || problem(format!("{name}={text} is no {scalar}"));
                    scalar_bytes(scalar, &text).ok_or_else(wrong)?
                }
            };
            parameters.resize(parameters.len().next_multiple_of(kind.size()), 0);
            parameters.extend(bytes);
        }
        if let Some((name, _)) = arguments.first_key_value() {
            return Err(problem(format!("{} takes no {name}", self.kernel)).into());
        }
        let counted = counted.filter(|address| *address != 0).ok_or_else(|| {
            problem(format!("per={}: {} has no such buffer", self.unit.parameter, self.kernel))
        })?;
        Ok(Launch { place, parameters, memory, counted })
    }

    /// The address of a new buffer with the content that the case gives, or that the type suggests; 0 if it gives 0.
    fn pointer(
        &self,
        pointee: &str,
        given: Option<&str>,
        memory: &mut Memory,
    ) -> std::result::Result<u64, String> {
        let content = match given {
            Some("0") => return Ok(0),
            Some(text) => content(text, memory).ok_or(format!("{text}: no content of a buffer"))?,
            None => match pointee {
                "f32" => Content::Ones,
                "u8" => Content::Codes(0x38),
                "Void" | "u16" => {
                    content(&self.dtype, memory).ok_or(format!("{}: no type of the elements", self.dtype))?
                }
                _ => Content::Integers(1),
            },
        };
        Ok(memory.add(content))
    }
}

/// `bf16`, `integers:5`, `words:7,@f32,…`, where `@` stands for the address of a new buffer.
fn content(text: &str, memory: &mut Memory) -> Option<Content> {
    Some(match text.split_once(':') {
        None => match text {
            "bf16" => Content::Bf16,
            "f16" => Content::F16,
            "f32" => Content::F32,
            "ones" => Content::Ones,
            "codes" | "e4m3" | "e5m2" => Content::Codes(0x38),
            _ => return None,
        },
        Some(("integers", value)) => Content::Integers(value.parse().ok()?),
        Some(("codes", value)) => Content::Codes(value.parse().ok()?),
        Some(("words", words)) => {
            let word = |word: &str| match word.strip_prefix('@') {
                Some(inner) => {
                    let inner = content(inner, memory)?;
                    Some(memory.add(inner))
                }
                None => integer(word),
            };
            Content::Words(words.split(',').map(word).collect::<Option<_>>()?)
        }
        Some(_) => return None,
    })
}

fn integer(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn scalar_bytes(kind: &str, text: &str) -> Option<Vec<u8>> {
    if kind == "f32" {
        return Some(text.parse::<f32>().ok()?.to_le_bytes().to_vec());
    }
    // The numbers by which kernels know types and formats.
    let value = match text {
        "f32" | "e4m3" => 0,
        "bf16" | "e5m2" => 1,
        "f16" => 2,
        "max" => u64::MAX,
        _ => integer(text)?,
    };
    let size = Kind::Scalar(kind.to_owned()).size();
    Some(value.to_le_bytes()[..size].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        "cast+T bf16 tiles per=written:codes:1 bytes=4 longer=run:8 dtype=bf16 run=4 eps=0.5 sums=0";

    fn signature() -> Parameters {
        let pointer = |name: &str, to: &str| (name.to_owned(), Kind::Pointer(to.to_owned()));
        let scalar = |name: &str, kind: &str| (name.to_owned(), Kind::Scalar(kind.to_owned()));
        vec![
            pointer("x", "Void"),
            scalar("dtype", "i32"),
            scalar("run", "u64"),
            pointer("codes", "u8"),
            scalar("eps", "f32"),
            pointer("sums", "f32"),
        ]
    }

    #[test]
    fn a_line_becomes_the_parameters_of_a_launch() {
        let cases = read(&format!("# a comment\n\n{LINE}\n- helper: never launched alone\n")).unwrap();
        assert_eq!(cases.without["helper"], "never launched alone");
        let launch = cases.cases[0].launch(&signature(), 256, false).unwrap();
        let word = |at: usize| u64::from_le_bytes(launch.parameters[at..at + 8].try_into().unwrap());
        assert_eq!((word(8) as u32, word(16), word(24)), (1, 4, launch.counted));
        assert_eq!((word(32) as u32, word(40)), (0.5_f32.to_bits(), 0));
        let longer = cases.cases[0].launch(&signature(), 256, true).unwrap();
        assert_eq!(longer.parameters[16], 8);
    }

    #[test]
    fn works_that_no_case_has_are_refused() {
        let cases = read(&format!("{LINE}\n{}\n", LINE.replace("cast+T", "cast"))).unwrap();
        let ask =
            |works: &[&str]| cases.expect(&works.iter().map(|work| (*work).to_owned()).collect::<Vec<_>>());
        assert!(ask(&[]).is_ok() && ask(&["cast", "cast+T"]).is_ok());
        let error = ask(&["cast", "cast+t"]).unwrap_err().to_string();
        assert_eq!(
            error,
            "sass: no case of cast+t in fp8-kernels/ptx/sass-cases.txt; there are cast, cast+T"
        );
    }

    #[test]
    fn lines_that_are_wrong_say_what_would_be_right() {
        let error = |line: &str| read(line).unwrap_err().to_string();
        assert_eq!(error("cast bf16"), "sass-cases.txt:1: the kernel is missing");
        assert_eq!(error("cast bf16 k x"), "sass-cases.txt:1: x: name=value is wanted");
        assert_eq!(error("cast bf16 k bytes=3"), "sass-cases.txt:1: per= is missing");
        assert_eq!(
            error("cast bf16 k per=codes bytes=3"),
            "sass-cases.txt:1: per=codes: read:PARAMETER:BYTES or written:PARAMETER:BYTES is wanted"
        );
        assert_eq!(
            error("cast bf16 k per=read:x:0 bytes=3"),
            "sass-cases.txt:1: per=read:x:0: bytes from 1 on are wanted"
        );
        assert_eq!(
            error("cast bf16 k per=read:x:2 bytes=nan"),
            "sass-cases.txt:1: bytes=: a number from 0 on is wanted"
        );
        assert_eq!(error("- k"), "sass-cases.txt:1: a reason is missing");
        assert_eq!(error(&format!("{LINE}\n{LINE}")), "sass-cases.txt:2: cast+T bf16 a second time");
        let launch = |from: &str, to: &str| {
            let cases = read(&LINE.replace(from, to)).unwrap();
            cases.cases[0].launch(&signature(), 256, false).err().map(|error| error.to_string())
        };
        assert_eq!(launch("", ""), None);
        let head = "sass-cases.txt: cast+T bf16: ";
        let says = |text: &str| Some(format!("{head}{text}"));
        assert_eq!(launch("run=4 ", ""), says("tiles takes run, which the case does not give"));
        assert_eq!(launch("run=4", "run=four"), says("run=four is no u64"));
        assert_eq!(launch("sums=0", "sums=0 more=1"), says("tiles takes no more"));
        assert_eq!(launch("sums=0", "sums=f99"), says("f99: no content of a buffer"));
        assert_eq!(launch("written:codes", "written:sums"), says("per=sums: tiles has no such buffer"));
    }
}
