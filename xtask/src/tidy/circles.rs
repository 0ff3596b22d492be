//! The files of a crate do not refer to each other in a circle.
//!
//! A file imports another when one of its paths, in a `use` or inline, names an item that the other defines. Paths are
//! followed through imports and re-exports to the file of the definition. Declaring a module is no import, nor is
//! re-exporting an item that the file does not use itself.
//!
//! The `impl` blocks of one type make circles of their own: a block refers to another file when it calls `self.f()` or
//! `Self::f()` and only a block in that file defines `f`.
//!
//! Code for tests (`#[cfg(test)]`) is left out.

mod graph;
mod impls;
mod names;
mod source;
mod tokens;

use std::path::Path;

use crate::workspace::{Result, Workspace};
use graph::{Circle, Graph};
use names::Names;

/// Finds the circles in the libraries and programs of the workspace at `root`. Returns a text for each, with its references.
pub(super) fn circles(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for package in Workspace::at(root)?.packages {
        for target in package.crates() {
            let folder = target.parent().unwrap_or(target);
            let shown = folder.strip_prefix(root).unwrap_or(folder).display().to_string().replace('\\', "/");
            let names = Names::of_crate(target)?;
            found.extend(of_crate(&names, folder).into_iter().map(|text| format!("{shown}: {text}")));
        }
    }
    Ok(found)
}

/// Describes the circles of a crate, with its files as seen from `folder`.
fn of_crate(names: &Names, folder: &Path) -> Vec<String> {
    let file = |index: usize| {
        let path = names.files[index].strip_prefix(folder).unwrap_or(&names.files[index]);
        path.display().to_string().replace('\\', "/")
    };
    let text = |circle: Circle, verb: &str| {
        let mut text = format!("{} files {verb}:", circle.files.len());
        for reference in circle.references {
            let (from, to) = (file(reference.from), file(reference.to));
            text += &format!("\n    {from}:{} → {to}: {}", reference.line, reference.name);
        }
        text
    };
    let imports = Graph::of_imports(names).circles();
    let mut texts: Vec<String> =
        imports.into_iter().map(|circle| text(circle, "import each other")).collect();
    for (name, graph) in Graph::of_types(names) {
        let verb = format!("with impl {name} call each other");
        texts.extend(graph.circles().into_iter().map(|circle| text(circle, &verb)));
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The circles of a crate with these files in its `src`.
    fn of(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        of_crate(&Names::of_crate(&folder.path().join("lib.rs")).unwrap(), folder.path())
    }

    const A_B: &str = "2 files import each other:\n    a.rs:1 → b.rs: B\n    b.rs:1 → a.rs: A";

    #[test]
    fn two_files_that_use_each_other() {
        let found = of(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::B; pub struct A(B);"),
            ("b.rs", "use super::a::A; pub struct B(Box<A>);"),
        ]);
        assert_eq!(found, [A_B]);
    }

    #[test]
    fn a_re_export_leads_to_the_file_of_the_definition() {
        let found = of(&[
            ("lib.rs", "mod a; mod b; pub use a::*; pub(crate) use b::B as Renamed;"),
            ("a.rs", "use crate::{Renamed as Again}; pub struct A(Again);"),
            ("b.rs", "use crate::A; pub struct B(Box<A>);"),
        ]);
        assert_eq!(found, [A_B]);
    }

    #[test]
    fn an_inline_path_counts_as_an_import_does() {
        let inline = |a| {
            of(&[("lib.rs", "mod a; mod b;"), ("a.rs", a), ("b.rs", "use crate::a::A; pub fn B(_: A) {}")])
        };
        assert_eq!(inline("pub struct A; impl A { fn f(self) { crate::b::B(self) } }"), [A_B]);
        assert_eq!(inline("use crate::b; pub struct A; impl A { fn f(self) { vec![b::B(self)]; } }"), [A_B]);
        assert_eq!(inline("pub struct A; macro_rules! b { () => { $crate::b::B(A) } }"), [A_B]);
        assert_eq!(inline("pub struct A; fn f() { use crate::b::*; B(A) }"), [A_B]);
        assert_eq!(inline("use crate::b; pub struct A { b: usize }"), Vec::<String>::new());
    }

    #[test]
    fn three_files_in_a_circle_are_one_report() {
        let found = of(&[
            ("lib.rs", "mod a; mod b; mod c; mod beside;"),
            ("a.rs", "use crate::b::{self, B}; pub struct A(b::Other, crate::beside::X);"),
            ("b.rs", "use crate::c; pub struct B;\n pub struct Other(c::C);"),
            ("c.rs", "pub struct C(Box<crate::a::A>);"),
            ("beside.rs", "pub struct X;"),
        ]);
        let expected = "3 files import each other:
    a.rs:1 → b.rs: B
    a.rs:1 → b.rs: Other
    b.rs:2 → c.rs: C
    c.rs:1 → a.rs: A";
        assert_eq!(found, [expected]);
    }

    #[test]
    fn a_child_that_uses_what_its_parent_defines_closes_a_circle_if_the_parent_uses_it() {
        let child = "use super::A; pub struct B(Box<A>);";
        let with = |parent: &str| of(&[("lib.rs", "mod a;"), ("a/mod.rs", parent), ("a/b.rs", child)]);
        assert_eq!(with("mod b; pub use b::B; pub struct A(u8);"), Vec::<String>::new());
        assert_eq!(
            with("mod b; pub use b::B; pub struct A(Option<B>);"),
            ["2 files import each other:\n    a/mod.rs:1 → a/b.rs: B\n    a/b.rs:1 → a/mod.rs: A"]
        );
    }

    #[test]
    fn what_a_macro_defines_belongs_to_the_file_of_its_call() {
        let found = of(&[
            ("lib.rs", "mod a; mod b; use a::Made;"),
            ("a.rs", "define! { Made } fn f() { super::b::B::new(); }"),
            ("b.rs", "pub struct B(crate::Made);"),
        ]);
        assert_eq!(found, ["2 files import each other:\n    a.rs:1 → b.rs: B\n    b.rs:1 → a.rs: Made"]);
    }

    #[test]
    fn tests_documentation_and_other_crates_do_not_count() {
        let found = of(&[
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod tests;"),
            ("a.rs", "use crate::b::B; /// crate::b::B\n pub struct A(B);"),
            (
                "b.rs",
                "use half::a::A as Other; /// Like [`A`](crate::a::A).\n pub struct B;
                 #[cfg(test)] use crate::a::A; #[cfg(test)] fn f<T, U>(_: A) {}
                 #[cfg(all(test, unix))] mod tests { use crate::a::A; }
                 enum E { #[cfg(test)] V(crate::a::A), W }",
            ),
        ]);
        assert_eq!(found, Vec::<String>::new());
        let counts = of(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::B; pub struct A(B);"),
            ("b.rs", "enum E { #[cfg(test)] V, W(crate::a::A) } #[cfg(not(test))] pub struct B;"),
        ]);
        assert_eq!(counts, [A_B]);
    }

    #[test]
    fn a_file_outside_the_folder_counts() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("src")).unwrap();
        for (name, text) in [
            ("src/lib.rs", "#[path = \"../b.rs\"] mod b; pub struct A(Box<b::B>);"),
            ("b.rs", "pub struct B(crate::A);"),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let names = Names::of_crate(&folder.path().join("src/lib.rs")).unwrap();
        assert_eq!(of_crate(&names, &folder.path().join("src")).len(), 1);
    }

    #[test]
    fn blocks_of_one_type_that_call_each_other() {
        let with = |b: &str, c: &str| {
            of(&[
                ("lib.rs", "mod a; mod b; mod c; pub use a::A;"),
                ("a.rs", "pub struct A;\nimpl A {\n fn f(&self) { self.g() }\n fn h() {} }"),
                ("b.rs", &format!("use crate::a; impl a::A {{ {b} }}")),
                ("c.rs", &format!("use crate::A as B; impl<T> Into<T> for B {{ {c} }}")),
            ])
        };
        let direct = "2 files with impl A call each other:\n    a.rs:3 → b.rs: g\n    b.rs:1 → a.rs: h";
        assert_eq!(with("fn g(&self) { Self::h() }", ""), [direct]);
        let through_third = "3 files with impl A call each other:
    a.rs:3 → b.rs: g
    b.rs:1 → c.rs: i
    c.rs:1 → a.rs: f";
        assert_eq!(with("fn g(&self) { self.i() }", "fn i(&self) { map(Self::f) }"), [through_third]);
    }

    #[test]
    fn blocks_of_one_type_that_call_each_other_in_one_direction_only() {
        let with = |b: &str| {
            of(&[
                ("lib.rs", "mod a; mod b;"),
                ("a.rs", "pub struct A;\nimpl A {\n fn f(&self) { self.g() }\n fn h(&self) {} }"),
                ("b.rs", b),
            ])
        };
        assert_eq!(with("impl crate::a::A { fn g(&self) { self.c.h() } }"), Vec::<String>::new());
        assert_eq!(with("struct A; impl A { fn g(&self) { self.h() } }"), Vec::<String>::new());
        assert_eq!(
            with("impl crate::a::A { fn g(&self) {} #[cfg(test)] fn i(&self) { self.h() } }"),
            Vec::<String>::new()
        );
        assert_eq!(
            with("impl crate::a::A { fn g(&self) { self.h() } } impl T for crate::a::A { fn h(&self) {} }"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_module_without_a_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("lib.rs"), "mod a;").unwrap();
        let error = Names::of_crate(&folder.path().join("lib.rs")).err().unwrap().to_string();
        assert!(error.ends_with("mod a: neither a.rs nor a/mod.rs exists"), "{error}");
    }
}
