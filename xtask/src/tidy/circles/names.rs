//! The modules of a crate, and which file defines what a path names.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::source::{Body, Child, read};
use crate::workspace::Result;

/// All modules of a crate but those for tests.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) files: Vec<PathBuf>,
    pub(super) modules: Vec<Module>,
    /// Results of [`Self::lookup`]; that of a lookup that has not ended is `None`, which ends circles of `use`.
    known: RefCell<BTreeMap<(usize, String, bool), Found>>,
}

/// The meaning of a name in a module: `None` if nothing there has it, `Some(None)` if it belongs to another crate.
type Found = Option<Option<Target>>;

#[derive(Debug)]
pub(super) struct Module {
    pub(super) file: usize,
    pub(super) body: Body,
    parent: usize,
    children: Vec<(String, usize)>,
}

/// The module or the item that a path names.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Target {
    Module(usize),
    Item { file: usize, name: String },
}

impl Names {
    /// Reads the crate whose first file is `root`.
    pub(super) fn of_crate(root: &Path) -> Result<Self> {
        let mut names = Self { files: Vec::new(), modules: Vec::new(), known: RefCell::default() };
        let folder = root.parent().unwrap_or(root);
        names.file(root.to_path_buf(), folder, 0)?;
        Ok(names)
    }

    /// Reads a module's file; its children's are in `folder`.
    fn file(&mut self, path: PathBuf, folder: &Path, parent: usize) -> Result<usize> {
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let body = read(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        self.files.push(path);
        self.module(self.files.len() - 1, body, folder, parent)
    }

    fn module(&mut self, file: usize, mut body: Body, folder: &Path, parent: usize) -> Result<usize> {
        let children = std::mem::take(&mut body.modules);
        let index = self.modules.len();
        self.modules.push(Module { file, body, parent, children: Vec::new() });
        for Child { name, path, body } in children {
            let inside = folder.join(&name);
            let child = match (body, path) {
                (Some(body), _) => self.module(file, body, &inside, index)?,
                (None, Some(path)) => {
                    let beside = self.files[file].parent().unwrap_or(folder).join(path);
                    let folder = beside.parent().unwrap_or(folder).to_path_buf();
                    self.file(beside, &folder, index)?
                }
                (None, None) => {
                    let paths = [inside.with_extension("rs"), inside.join("mod.rs")];
                    let Some(path) = paths.into_iter().find(|path| path.is_file()) else {
                        let file = self.files[file].display();
                        return Err(format!(
                            "{file}: mod {name}: neither {name}.rs nor {name}/mod.rs exists"
                        )
                        .into());
                    };
                    self.file(path, &inside, index)?
                }
            };
            self.modules[index].children.push((name, child));
        }
        Ok(index)
    }

    /// Returns what a path means in a module; `None` if it belongs to another crate.
    pub(super) fn resolve(&self, module: usize, path: &[String]) -> Option<Target> {
        self.follow(module, path)
    }

    /// Returns what a single word means in a module, if the module has it only from an import of all names of another.
    pub(super) fn through_globs(&self, module: usize, word: &str) -> Option<Target> {
        let Module { body, children, .. } = &self.modules[module];
        let is_own = body.items.contains(word)
            || children.iter().any(|(name, _)| name == word)
            || body.imports.iter().any(|import| import.name.as_deref() == Some(word));
        if is_own { None } else { self.lookup(module, word, true)? }
    }

    fn follow(&self, module: usize, path: &[String]) -> Option<Target> {
        let (mut current, mut rest) = (module, path);
        let mut is_absolute = true;
        match path.first()?.as_str() {
            "crate" => (current, rest) = (0, &path[1..]),
            "self" => rest = &path[1..],
            "super" => {}
            _ => is_absolute = false,
        }
        while let Some((_, after)) = rest.split_first().filter(|(first, _)| *first == "super") {
            (current, rest) = (self.modules[current].parent, after);
        }
        while let Some((first, after)) = rest.split_first() {
            let found = match self.lookup(current, first, after.is_empty()) {
                // What a macro made.
                None if is_absolute => Some(self.item(current, first)),
                found => found.flatten(),
            };
            match found? {
                Target::Module(child) => (current, rest) = (child, after),
                item => return Some(item),
            }
            is_absolute = true;
        }
        Some(Target::Module(current))
    }

    /// Looks up a name in a module. At the end of a path an item takes precedence over a module of the same name;
    /// elsewhere the module does.
    fn lookup(&self, module: usize, name: &str, is_last: bool) -> Found {
        let key = (module, name.to_owned(), is_last);
        if let Some(found) = self.known.borrow().get(&key) {
            return found.clone();
        }
        self.known.borrow_mut().insert(key.clone(), None);
        let found = self.search(module, name, is_last);
        self.known.borrow_mut().insert(key, found.clone());
        found
    }

    fn search(&self, module: usize, name: &str, is_last: bool) -> Found {
        let Module { body, children, .. } = &self.modules[module];
        let item = body.items.contains(name).then(|| self.item(module, name));
        let child = children.iter().find(|(child, _)| child == name).map(|(_, child)| Target::Module(*child));
        let own = if is_last { item.or(child) } else { child.or(item) };
        if own.is_some() {
            return Some(own);
        }
        let mut is_bound = false;
        for import in body.imports.iter().filter(|import| import.name.as_deref() == Some(name)) {
            is_bound = true;
            if let Some(target) = self.follow(module, &import.path) {
                return Some(Some(target));
            }
        }
        if is_bound {
            return Some(None);
        }
        for glob in body.imports.iter().filter(|import| import.name.is_none()) {
            if let Some(Target::Module(other)) = self.follow(module, &glob.path)
                && let Some(Some(target)) = self.lookup(other, name, is_last)
            {
                return Some(Some(target));
            }
        }
        None
    }

    fn item(&self, module: usize, name: &str) -> Target {
        Target::Item { file: self.modules[module].file, name: name.to_owned() }
    }
}
