//! The answers of the real library when it was asked to plan a graph: `answers.txt`, written by `cargo xtask cudnn-check`.
//!
//! A line is `version architecture kind choice subject outcome # comment`. The subject is `structure HASH`, or `head TYPE SIZE`
//! for the head sizes of a kind of graph. The outcome is `plans WORKSPACE` or `refused STATUS`.

use super::graph::{Graph, Operation};
use crate::code::Code;

const ANSWERS: &str = include_str!("answers.txt");

/// Bytes of workspace that a plan asks for here, whatever the real one needs: its contents are filled with garbage.
pub(super) const WORKSPACE: u64 = 256;

/// The kernels that a configuration chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Heuristics,
    Engine { number: i64, knobs: Vec<(i32, i64)> },
}

impl Choice {
    /// As the answers write it: `heuristics`, or `engine-6-40=2-41=1-…`, knobs in the order of their types.
    fn name(&self) -> String {
        match self {
            Self::Heuristics => "heuristics".to_owned(),
            Self::Engine { number, knobs } => {
                let mut knobs = knobs.clone();
                knobs.sort_unstable();
                knobs
                    .iter()
                    .fold(format!("engine-{number}"), |name, (kind, value)| format!("{name}-{kind}={value}"))
            }
        }
    }
}

/// Whether the library has a kernel for a graph, by its structure and by the first product's type and depth.
pub(super) fn plan(version: usize, arch: u32, graph: &Graph, choice: &Choice) -> Result<(), Refusal> {
    let refused = |status: i32, why: String| Err(Refusal { code: Code(status), why });
    let start = format!("{}.{}.{} sm_{arch} ", version / 10_000, version / 100 % 100, version % 100);
    let of_version = || ANSWERS.lines().filter_map(|line| line.strip_prefix(&start)).map(Line::parse);
    let (choice, structure) = (choice.name(), format!("structure {:016x}", graph.structure()));
    let found = of_version().find(|line| line.choice == choice && line.subject == structure);
    let Some(found) = found else {
        return refused(3001, format!("no answer for {start}{choice} {structure}"));
    };
    if let Some(status) = found.refusal {
        return refused(status, format!("{start}{choice} {structure}"));
    }
    let product = graph.operations.iter().find_map(|operation| match operation {
        Operation::Matmul { a, .. } => Some(a),
        _ => None,
    });
    let Some(a) = product else { return refused(3001, "no product".to_owned()) };
    let head = format!("head {} {}", a.kind.name(), a.extents[3]);
    let of_kind = |line: &Line<'_>| (line.kind, line.choice) == (found.kind, choice.as_str());
    match of_version().find(|line| of_kind(line) && line.subject == head) {
        None => refused(3002, format!("no answer for {start}{} {choice} {head}", found.kind)),
        Some(Line { refusal: Some(status), .. }) => refused(status, format!("{start}{} {head}", found.kind)),
        Some(_) => Ok(()),
    }
}

/// The status with which the real library refused, and which line says so.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) code: Code,
    pub(super) why: String,
}

struct Line<'a> {
    kind: &'a str,
    choice: &'a str,
    subject: String,
    refusal: Option<i32>,
}

impl<'a> Line<'a> {
    /// Reads a line behind its version and architecture. One that cannot be read refuses everything.
    fn parse(text: &'a str) -> Self {
        let text = text.split('#').next().unwrap_or_default();
        let mut words = text.split_whitespace();
        let mut word = || words.next().unwrap_or_default();
        let (kind, choice, subject) = (word(), word(), word());
        let mut subject = format!("{subject} {}", word());
        if subject.starts_with("head ") {
            subject = format!("{subject} {}", word());
        }
        let refusal = match word() {
            "plans" => None,
            _ => Some(word().parse().unwrap_or(3000)),
        };
        Self { kind, choice, subject, refusal }
    }
}
