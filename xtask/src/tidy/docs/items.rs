//! The public items of a crate, found in its sources: what rustdoc would give a page of its own.
//!
//! The crate is read as a tree of modules. From its root, public modules and `pub use` lead to the items. Names from other crates
//! are skipped; items behind `#[cfg(test)]` or `#[doc(hidden)]` as well. A `pub use` whose item is made by a macro takes the doc
//! comment before the item's name in the macro's arguments.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Expr, ExprLit, FnArg, ImplItem, Item as Syntax, Lit, Meta, TraitItem, Type, UseTree};

use super::value::Value;
use crate::workspace::Result;

/// A public item.
#[derive(Clone)]
pub(super) struct Item {
    /// The shortest public path, with the crate: `fp8_nn::Linear`.
    pub(super) path: String,
    /// Its own doc comment.
    pub(super) docs: String,
    /// The doc comments of its public methods, fields, variants and trait methods.
    pub(super) inner: Vec<String>,
    /// The public fields of a struct.
    pub(super) fields: Vec<Field>,
    /// The value of each field in `impl Default`, if there is one. A value that is no simple literal is `None`.
    pub(super) default: Option<BTreeMap<String, Option<Value>>>,
    /// Its name and the module that defines it.
    origin: (Vec<String>, String),
}

#[derive(Clone)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) docs: String,
}

/// A module with its items.
struct Module {
    path: Vec<String>,
    items: Vec<Syntax>,
    /// Docs and visibility of its submodules are in `items`.
    children: Vec<(String, Module)>,
}

/// The docs and default values in the `impl` blocks and enums of a crate, by the name of their type.
#[derive(Default)]
struct Impls {
    docs: BTreeMap<String, Vec<String>>,
    /// The values in the struct expression of `impl Default`; fields behind `..` are absent.
    defaults: BTreeMap<String, BTreeMap<String, Option<Value>>>,
    /// The variant under `#[default]` of an enum.
    variants: BTreeMap<String, String>,
}

/// Reads the crate in `folder`, which others call `name`, and lists its public items by path.
pub(super) fn public_items(folder: &Path, name: &str) -> Result<Vec<Item>> {
    let root = folder.join("src/lib.rs");
    let root = Module::read(&root, &folder.join("src"), Vec::new())?;
    Ok(root.public_items(name))
}

impl Module {
    fn read(file: &Path, folder: &Path, path: Vec<String>) -> Result<Self> {
        let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        Self::new(parsed.items, folder, path)
    }

    /// `folder` is where the files of submodules are.
    fn new(mut items: Vec<Syntax>, folder: &Path, path: Vec<String>) -> Result<Self> {
        items.retain(|item| !is_left_out(attributes(item)));
        let mut children = Vec::new();
        for item in &mut items {
            let Syntax::Mod(module) = item else { continue };
            let name = module.ident.to_string();
            let folder = folder.join(&name);
            let path = path.iter().cloned().chain([name.clone()]).collect();
            let child = match module.content.take() {
                Some((_, items)) => Self::new(items, &folder, path)?,
                None => Self::read(&file_of(&folder), &folder, path)?,
            };
            children.push((name, child));
        }
        Ok(Self { path, items, children })
    }

    fn public_items(&self, name: &str) -> Vec<Item> {
        let mut impls = Impls::default();
        self.collect_impls(&mut impls);
        let mut found = Vec::new();
        self.export(self, name, &impls, &mut found);
        for item in self.macros().filter(|item| item.attrs.iter().any(|a| a.path().is_ident("macro_export")))
        {
            let ident = item.ident.as_ref().map(ToString::to_string).unwrap_or_default();
            found.push(Item::new(format!("{name}::{ident}!"), &item.attrs, (Vec::new(), ident)));
        }
        // One page each, at the shortest path.
        found.sort_by_key(|item| (item.path.matches("::").count(), item.path.clone()));
        let mut kept: Vec<Item> = Vec::new();
        for item in found {
            if !kept.iter().any(|other| other.origin == item.origin) {
                kept.push(item);
            }
        }
        kept.sort_by(|a, b| a.path.cmp(&b.path));
        kept
    }

    /// Adds what this module shows to other crates under `prefix`.
    fn export(&self, root: &Self, prefix: &str, impls: &Impls, found: &mut Vec<Item>) {
        for item in &self.items {
            match item {
                Syntax::Mod(module) if is_public(&module.vis) => {
                    if let Some(child) = self.child(&module.ident.to_string()) {
                        child.export(root, &format!("{prefix}::{}", module.ident), impls, found);
                    }
                }
                Syntax::Use(used) if is_public(&used.vis) => {
                    for (path, name) in names(&used.tree) {
                        if let Some(module) = self.module(root, &path) {
                            module.export(root, &format!("{prefix}::{name}"), impls, found);
                        }
                        let items = self.resolve(root, &path, impls, 0);
                        found.extend(items.into_iter().filter_map(|item| {
                            let name = if name == "*" { item.origin.1.clone() } else { name.clone() };
                            (name != "_").then(|| Item { path: format!("{prefix}::{name}"), ..item })
                        }));
                    }
                }
                _ => found.extend(
                    self.item(item, impls)
                        .filter(|_| is_visible(item))
                        .map(|item| Item { path: format!("{prefix}::{}", item.origin.1), ..item }),
                ),
            }
        }
    }

    /// The module at a path as seen from this one; `None` if another crate has it, or if it is imported here.
    fn module<'a>(&'a self, root: &'a Self, path: &[String]) -> Option<&'a Self> {
        path.iter().try_fold(self, |module, step| match step.as_str() {
            "crate" => Some(root),
            "self" => Some(module),
            "super" => root.find(&module.path[..module.path.len().checked_sub(1)?]),
            step => module.child(step),
        })
    }

    /// The items behind the path of a `use`; none if another crate has them.
    fn resolve(&self, root: &Self, path: &[String], impls: &Impls, depth: usize) -> Vec<Item> {
        let (Some((name, modules)), true) = (path.split_last(), depth < 16) else { return Vec::new() };
        let Some(module) = self.module(root, modules) else { return Vec::new() };
        if name == "*" {
            let mut found = Vec::new();
            module.export(root, "", impls, &mut found);
            return found;
        }
        if modules.is_empty() {
            return Vec::new();
        }
        let own = module.items.iter().filter_map(|item| module.item(item, impls));
        let own: Vec<Item> = own.filter(|item| item.origin.1 == *name).collect();
        if !own.is_empty() {
            return own;
        }
        for item in &module.items {
            let Syntax::Use(used) = item else { continue };
            for (path, _) in names(&used.tree).into_iter().filter(|(_, known)| known == name) {
                let found = module.resolve(root, &path, impls, depth + 1);
                if !found.is_empty() {
                    return found;
                }
            }
        }
        module.generated(name, impls).into_iter().collect()
    }

    /// The item that a macro makes of a name in its arguments.
    fn generated(&self, name: &str, impls: &Impls) -> Option<Item> {
        let docs = self.macros().filter(|item| item.ident.is_none());
        let docs = docs.into_iter().find_map(|item| docs_before(item.mac.tokens.clone(), name))?;
        let mut item = Item::new(String::new(), &[], (self.path.clone(), name.to_owned()));
        item.docs = docs;
        item.inner = impls.docs.get(name).cloned().unwrap_or_default();
        Some(item)
    }

    fn item(&self, item: &Syntax, impls: &Impls) -> Option<Item> {
        let (ident, attributes) = match item {
            Syntax::Struct(item) => (&item.ident, &item.attrs),
            Syntax::Enum(item) => (&item.ident, &item.attrs),
            Syntax::Union(item) => (&item.ident, &item.attrs),
            Syntax::Trait(item) => (&item.ident, &item.attrs),
            Syntax::Fn(item) => (&item.sig.ident, &item.attrs),
            _ => return None,
        };
        let name = ident.to_string();
        let mut found = Item::new(String::new(), attributes, (self.path.clone(), name.clone()));
        match item {
            Syntax::Struct(item) => {
                let public = item.fields.iter().filter(|field| is_public(&field.vis));
                let named = public.filter_map(|field| {
                    Some(Field { name: field.ident.as_ref()?.to_string(), docs: docs(&field.attrs) })
                });
                found.fields = named.collect();
                found.inner.extend(found.fields.iter().map(|field| field.docs.clone()));
                found.default = impls.defaults.get(&name).cloned();
                if found.default.is_none() && derives_default(&item.attrs) {
                    let value = |field: &syn::Field| {
                        Some((field.ident.as_ref()?.to_string(), impls.derived(&type_name(&field.ty))))
                    };
                    found.default = Some(item.fields.iter().filter_map(value).collect());
                }
            }
            Syntax::Enum(item) => found.inner.extend(item.variants.iter().map(|one| docs(&one.attrs))),
            Syntax::Trait(item) => found.inner.extend(item.items.iter().filter_map(|item| match item {
                TraitItem::Fn(method) => Some(docs(&method.attrs)),
                _ => None,
            })),
            _ => {}
        }
        found.inner.extend(impls.docs.get(&name).into_iter().flatten().cloned());
        Some(found)
    }

    fn collect_impls(&self, impls: &mut Impls) {
        for item in &self.items {
            if let Syntax::Enum(item) = item {
                let is_default = |one: &&syn::Variant| one.attrs.iter().any(|a| a.path().is_ident("default"));
                if let Some(variant) = item.variants.iter().find(is_default) {
                    impls.variants.insert(item.ident.to_string(), variant.ident.to_string());
                }
            }
            let Syntax::Impl(item) = item else { continue };
            let name = type_name(&item.self_ty);
            let of_trait = item.trait_.as_ref().and_then(|(_, path, _)| path.segments.last());
            for part in &item.items {
                let ImplItem::Fn(method) = part else { continue };
                if (of_trait.is_some() || is_public(&method.vis)) && !is_left_out(&method.attrs) {
                    impls.docs.entry(name.clone()).or_default().push(docs(&method.attrs));
                }
                let takes_nothing =
                    !method.sig.inputs.iter().any(|input| matches!(input, FnArg::Receiver(_)));
                if takes_nothing && of_trait.is_some_and(|of| of.ident == "Default") {
                    impls.defaults.insert(name.clone(), struct_expression(&method.block.stmts));
                }
            }
        }
        for (_, child) in &self.children {
            child.collect_impls(impls);
        }
    }

    /// Macros that are defined or called between this module's items and those below it; only its own where they are called.
    fn macros(&self) -> impl Iterator<Item = &syn::ItemMacro> {
        let own = self.items.iter().filter_map(|item| match item {
            Syntax::Macro(item) => Some(item),
            _ => None,
        });
        let mut below: Vec<&syn::ItemMacro> = own.collect();
        for (_, child) in &self.children {
            below.extend(child.macros().filter(|item| item.ident.is_some()));
        }
        below.into_iter()
    }

    fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|(known, _)| known == name).map(|(_, child)| child)
    }

    fn find(&self, path: &[String]) -> Option<&Self> {
        path.iter().try_fold(self, |module, name| module.child(name))
    }
}

impl Impls {
    /// Returns the value that `derive(Default)` gives a field of this type, if the name of the type is enough to tell.
    fn derived(&self, kind: &str) -> Option<Value> {
        match kind {
            "f32" | "f64" | "i8" | "i16" | "i32" | "i64" | "isize" | "u8" | "u16" | "u32" | "u64"
            | "usize" => Some(Value::Number(0.0)),
            "bool" => Some(Value::Name("false".to_owned())),
            "Option" => Some(Value::Name("None".to_owned())),
            _ => self.variants.get(kind).map(|variant| Value::Name(variant.clone())),
        }
    }
}

impl Item {
    fn new(path: String, attributes: &[Attribute], origin: (Vec<String>, String)) -> Self {
        Self { path, docs: docs(attributes), inner: Vec::new(), fields: Vec::new(), default: None, origin }
    }

    /// The last part of its path.
    pub(super) fn name(&self) -> &str {
        self.path.rsplit("::").next().unwrap_or(&self.path)
    }

    /// Its own doc comment and those of its parts.
    pub(super) fn all_docs(&self) -> impl Iterator<Item = &str> {
        [&self.docs].into_iter().chain(&self.inner).map(String::as_str)
    }
}

fn file_of(folder: &Path) -> PathBuf {
    let own = folder.join("mod.rs");
    if own.is_file() { own } else { folder.with_extension("rs") }
}

fn attributes(item: &Syntax) -> &[Attribute] {
    match item {
        Syntax::Const(item) => &item.attrs,
        Syntax::Enum(item) => &item.attrs,
        Syntax::Fn(item) => &item.attrs,
        Syntax::Impl(item) => &item.attrs,
        Syntax::Macro(item) => &item.attrs,
        Syntax::Mod(item) => &item.attrs,
        Syntax::Static(item) => &item.attrs,
        Syntax::Struct(item) => &item.attrs,
        Syntax::Trait(item) => &item.attrs,
        Syntax::Type(item) => &item.attrs,
        Syntax::Union(item) => &item.attrs,
        Syntax::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn is_public(visibility: &syn::Visibility) -> bool {
    matches!(visibility, syn::Visibility::Public(_))
}

fn is_visible(item: &Syntax) -> bool {
    match item {
        Syntax::Struct(item) => is_public(&item.vis),
        Syntax::Enum(item) => is_public(&item.vis),
        Syntax::Union(item) => is_public(&item.vis),
        Syntax::Trait(item) => is_public(&item.vis),
        Syntax::Fn(item) => is_public(&item.vis),
        _ => false,
    }
}

/// Whether an item is compiled for tests, doc tests or fuzzing alone, or hidden from docs.
fn is_left_out(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else { return false };
        let words: Vec<String> = list.tokens.clone().into_iter().map(|token| token.to_string()).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["test" | "doctest" | "fuzzing"] => list.path.is_ident("cfg"),
            ["hidden"] => list.path.is_ident("doc"),
            _ => false,
        }
    })
}

fn derives_default(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("derive") => {
            list.tokens.clone().into_iter().any(|token| token.to_string() == "Default")
        }
        _ => false,
    })
}

/// The lines of a doc comment, without the space after the slashes.
fn docs(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    });
    lines.map(|line| line.strip_prefix(' ').unwrap_or(&line).to_owned()).collect::<Vec<_>>().join("\n")
}

/// The doc comment that ends right before `name`, anywhere in a macro's arguments.
fn docs_before(tokens: TokenStream, name: &str) -> Option<String> {
    let trees: Vec<TokenTree> = tokens.into_iter().collect();
    for (index, tree) in trees.iter().enumerate() {
        match tree {
            TokenTree::Group(group) => {
                if let Some(docs) = docs_before(group.stream(), name) {
                    return Some(docs);
                }
            }
            TokenTree::Ident(ident) if ident == name => {
                let mut start = index;
                while start >= 2
                    && matches!(&trees[start - 1], TokenTree::Group(_))
                    && matches!(&trees[start - 2], TokenTree::Punct(mark) if mark.as_char() == '#')
                {
                    start -= 2;
                }
                if start < index {
                    let attributes: TokenStream = trees[start..index].iter().cloned().collect();
                    let parsed = syn::parse::Parser::parse2(Attribute::parse_outer, attributes);
                    return parsed.ok().map(|attributes| docs(&attributes));
                }
            }
            _ => {}
        }
    }
    None
}

/// The last name of a type's path.
fn type_name(kind: &Type) -> String {
    match kind {
        Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default(),
        Type::Reference(reference) => type_name(&reference.elem),
        _ => String::new(),
    }
}

/// The fields of a function's result, where that is a struct expression.
fn struct_expression(statements: &[syn::Stmt]) -> BTreeMap<String, Option<Value>> {
    let Some(syn::Stmt::Expr(Expr::Struct(expression), None)) = statements.last() else {
        return BTreeMap::new();
    };
    let pair = |field: &syn::FieldValue| match &field.member {
        syn::Member::Named(name) => Some((name.to_string(), Value::read(&field.expr))),
        syn::Member::Unnamed(_) => None,
    };
    expression.fields.iter().filter_map(pair).collect()
}

/// Every path of a `use`, with the name it gets here.
fn names(tree: &UseTree) -> Vec<(Vec<String>, String)> {
    match tree {
        UseTree::Path(path) => {
            let below = names(&path.tree).into_iter();
            let step = path.ident.to_string();
            below
                .map(|(rest, name)| {
                    // `a::{self}` names the module itself.
                    let name = if rest == ["self"] { step.clone() } else { name };
                    (
                        [step.clone()]
                            .into_iter()
                            .chain(rest.into_iter().filter(|one| one != "self"))
                            .collect(),
                        name,
                    )
                })
                .collect()
        }
        UseTree::Name(name) => vec![(vec![name.ident.to_string()], name.ident.to_string())],
        UseTree::Rename(name) => vec![(vec![name.ident.to_string()], name.rename.to_string())],
        UseTree::Glob(_) => vec![(vec!["*".to_owned()], "*".to_owned())],
        UseTree::Group(group) => group.items.iter().flat_map(names).collect(),
    }
}
