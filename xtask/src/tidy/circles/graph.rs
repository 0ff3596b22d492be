//! References among the files of a crate, and the circles among them.

use std::collections::{BTreeMap, BTreeSet};

use super::impls::Impl;
use super::names::{Names, Target};

/// The files of a crate, each with the files that it refers to: there the names, each with the line of its first mention.
#[derive(Debug, Default)]
pub(super) struct Graph {
    edges: BTreeMap<usize, BTreeMap<usize, BTreeMap<String, usize>>>,
}

/// Files that reach each other.
#[derive(Debug)]
pub(super) struct Circle {
    pub(super) files: BTreeSet<usize>,
    pub(super) references: Vec<Reference>,
}

#[derive(Debug)]
pub(super) struct Reference {
    pub(super) from: usize,
    pub(super) line: usize,
    pub(super) to: usize,
    pub(super) name: String,
}

impl Graph {
    /// The imports of a crate.
    pub(super) fn of_imports(names: &Names) -> Self {
        let mut graph = Self::default();
        for (index, module) in names.modules.iter().enumerate() {
            for (to, name, line) in mentioned(names, index) {
                graph.add(module.file, to, name, line);
            }
        }
        graph
    }

    /// For each type with `impl` blocks in several files: its name, and the uses that the blocks make of each other.
    pub(super) fn of_types(names: &Names) -> Vec<(String, Self)> {
        let mut types: BTreeMap<(usize, String), Vec<(usize, &Impl)>> = BTreeMap::new();
        for (index, module) in names.modules.iter().enumerate() {
            for block in &module.body.impls {
                if let Some(Target::Item { file, name }) = names.resolve(index, &block.of) {
                    types.entry((file, name)).or_default().push((module.file, block));
                }
            }
        }
        let graph = |((_, name), blocks): ((usize, String), Vec<(usize, &Impl)>)| {
            let mut graph = Self::default();
            for (from, user) in &blocks {
                for (used, line) in &user.uses {
                    let files = blocks.iter().filter(|(_, block)| block.defines.contains(used));
                    let files: BTreeSet<usize> = files.map(|(file, _)| *file).collect();
                    // A function of the same name in the user's own file comes first.
                    for to in files.iter().filter(|_| !files.contains(from)) {
                        graph.add(*from, *to, used.clone(), *line);
                    }
                }
            }
            (name, graph)
        };
        types.into_iter().map(graph).collect()
    }

    fn add(&mut self, from: usize, to: usize, name: String, line: usize) {
        if from != to {
            let lines = self.edges.entry(from).or_default().entry(to).or_default();
            lines.entry(name).and_modify(|first| *first = line.min(*first)).or_insert(line);
        }
    }

    /// The largest sets of files that reach each other.
    pub(super) fn circles(&self) -> Vec<Circle> {
        let mut circles: Vec<Circle> = Vec::new();
        for file in self.edges.keys() {
            if circles.iter().any(|circle| circle.files.contains(file)) {
                continue;
            }
            let ahead = self.reached(*file);
            let files: BTreeSet<usize> =
                ahead.into_iter().filter(|other| self.reached(*other).contains(file)).collect();
            if !files.is_empty() {
                let references = self.references(&files);
                circles.push(Circle { files, references });
            }
        }
        circles
    }

    /// The files that can be reached from one.
    fn reached(&self, file: usize) -> BTreeSet<usize> {
        let mut reached = BTreeSet::new();
        let next = |file: usize| self.edges.get(&file).into_iter().flat_map(BTreeMap::keys).copied();
        let mut ahead: Vec<usize> = next(file).collect();
        while let Some(file) = ahead.pop() {
            if reached.insert(file) {
                ahead.extend(next(file));
            }
        }
        reached
    }

    /// The references among these files.
    fn references(&self, files: &BTreeSet<usize>) -> Vec<Reference> {
        let mut found = Vec::new();
        for from in files {
            for (to, names) in self.edges[from].iter().filter(|(to, _)| files.contains(to)) {
                found.extend(names.iter().map(|(name, line)| Reference {
                    from: *from,
                    line: *line,
                    to: *to,
                    name: name.clone(),
                }));
            }
        }
        found
    }
}

/// The items that a module's code mentions, each with the file that defines it and the line of the mention.
fn mentioned(names: &Names, index: usize) -> Vec<(usize, String, usize)> {
    let body = &names.modules[index].body;
    let is_used = |name: &Option<String>| name.as_ref().is_some_and(|name| body.words.contains_key(name));
    let imports = body
        .imports
        .iter()
        .filter(|import| import.name.is_some() && (!import.is_re_export || is_used(&import.name)));
    let mut targets: Vec<(Option<Target>, usize)> =
        imports.map(|import| (names.resolve(index, &import.path), import.line)).collect();
    targets.extend(body.paths.iter().map(|(path, line)| (names.resolve(index, path), *line)));
    if body.imports.iter().any(|import| import.name.is_none()) {
        targets.extend(body.words.iter().map(|(word, line)| (names.through_globs(index, word), *line)));
    }
    let item = |(target, line)| match target {
        Some(Target::Item { file, name }) => Some((file, name, line)),
        Some(Target::Module(_)) | None => None,
    };
    targets.into_iter().filter_map(item).collect()
}
