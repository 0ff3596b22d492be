//! The imports among the files of a folder, and the circles among them.

use std::collections::BTreeMap;
use std::path::Path;

use super::names::{Names, Target};

/// Names of files below the folder, each with the files it imports and one item from each.
#[derive(Debug)]
pub(super) struct Graph {
    edges: BTreeMap<String, BTreeMap<String, String>>,
}

impl Graph {
    pub(super) fn of_folder(names: &Names, folder: &Path) -> Self {
        let short = |file: usize| {
            let path = names.files[file].strip_prefix(folder).ok()?;
            Some(path.display().to_string().replace('\\', "/"))
        };
        let mut edges: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for (index, module) in names.modules.iter().enumerate() {
            let Some(from) = short(module.file) else { continue };
            for (file, item) in mentioned(names, index) {
                if file != module.file
                    && let Some(to) = short(file)
                {
                    edges.entry(from.clone()).or_default().entry(to).or_insert(item);
                }
            }
        }
        Self { edges }
    }

    /// The sets of files that reach each other, as a text each.
    pub(super) fn circles(&self) -> Vec<String> {
        let mut circles: Vec<Vec<&String>> = Vec::new();
        for file in self.edges.keys() {
            if circles.iter().any(|circle| circle.contains(&file)) {
                continue;
            }
            let ahead = self.reached(file);
            let circle: Vec<&String> =
                ahead.into_iter().filter(|other| self.reached(other).contains(&file)).collect();
            if !circle.is_empty() {
                circles.push(circle);
            }
        }
        circles.iter_mut().for_each(|circle| circle.sort());
        circles.iter().map(|circle| self.text(circle)).collect()
    }

    /// The files that can be reached from one.
    fn reached(&self, file: &String) -> Vec<&String> {
        let mut reached: Vec<&String> = Vec::new();
        let mut ahead: Vec<&String> = self.edges.get(file).into_iter().flat_map(BTreeMap::keys).collect();
        while let Some(next) = ahead.pop() {
            if !reached.contains(&next) {
                reached.push(next);
                ahead.extend(self.edges.get(next).into_iter().flat_map(BTreeMap::keys));
            }
        }
        reached
    }

    fn text(&self, circle: &[&String]) -> String {
        let mut text = format!("{} files import each other:", circle.len());
        for file in circle {
            let inside = self.edges[*file].iter().filter(|(to, _)| circle.contains(to));
            let inside: Vec<String> = inside.map(|(to, item)| format!("{to} ({item})")).collect();
            text += &format!("\n    {file}: {}", inside.join(", "));
        }
        text
    }
}

/// The items that a module's code mentions, each with the file that defines it.
fn mentioned(names: &Names, index: usize) -> Vec<(usize, String)> {
    let body = &names.modules[index].body;
    let is_used = |name: &Option<String>| name.as_ref().is_some_and(|name| body.words.contains(name));
    let imports = body
        .imports
        .iter()
        .filter(|import| import.name.is_some() && (!import.is_re_export || is_used(&import.name)));
    let mut targets: Vec<Option<Target>> = imports.map(|import| names.resolve(index, &import.path)).collect();
    targets.extend(body.paths.iter().map(|path| names.resolve(index, path)));
    if body.imports.iter().any(|import| import.name.is_none()) {
        targets.extend(body.words.iter().map(|word| names.through_globs(index, word)));
    }
    let item = |target| match target {
        Some(Target::Item { file, name }) => Some((file, name)),
        Some(Target::Module(_)) | None => None,
    };
    targets.into_iter().filter_map(item).collect()
}
