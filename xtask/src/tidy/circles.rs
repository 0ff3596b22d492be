//! The files of a folder do not import each other in a circle.
//!
//! A file imports another when one of its paths, in a `use` or inline, names an item that the other defines. Paths are
//! followed through imports and re-exports to the file of the definition. Declaring a module is no import, nor is
//! re-exporting an item that the file does not use itself. Code for tests (`#[cfg(test)]`) is left out.

mod graph;
mod names;
mod source;

use std::path::Path;

use crate::workspace::Result;
use graph::Graph;
use names::Names;

/// A folder whose files are checked.
struct Place {
    /// The first file of the crate that the folder belongs to.
    root: &'static str,
    folder: &'static str,
}

const PLACES: [Place; 6] = [
    Place { root: "fp8-kernels/src/lib.rs", folder: "fp8-kernels/src/backend/cuda" },
    Place { root: "fp8-kernels/cuda-sim/src/lib.rs", folder: "fp8-kernels/cuda-sim/src" },
    Place { root: "fp8-kernels/ptx-interp/src/lib.rs", folder: "fp8-kernels/ptx-interp/src" },
    Place { root: "fp8-recipe/src/lib.rs", folder: "fp8-recipe/src" },
    Place { root: "fp8-hf/src/lib.rs", folder: "fp8-hf/src" },
    Place { root: "fp8-cli/src/main.rs", folder: "fp8-cli/src" },
];

/// Finds the circles in the checkout at `root`: a text for each, with its files and one item for each edge.
pub(super) fn circles(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for place in &PLACES {
        let folder = place.folder;
        if !root.join(folder).is_dir() {
            let remedy = "expected a checkout of this workspace, or another list of places";
            return Err(format!("tidy: {} has no folder {folder}: {remedy}", root.display()).into());
        }
        let names = Names::of_crate(&root.join(place.root))?;
        let graph = Graph::of_folder(&names, &root.join(folder));
        found.extend(graph.circles().iter().map(|circle| format!("{folder}: {circle}")));
    }
    Ok(found)
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
        let names = Names::of_crate(&folder.path().join("lib.rs")).unwrap();
        Graph::of_folder(&names, folder.path()).circles()
    }

    const A_B: &str = "2 files import each other:\n    a.rs: b.rs (B)\n    b.rs: a.rs (A)";

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
        assert_eq!(found, ["2 files import each other:\n    a.rs: b.rs (B)\n    b.rs: a.rs (A)"]);
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
            ("b.rs", "use crate::c; pub struct B; pub struct Other(c::C);"),
            ("c.rs", "pub struct C(Box<crate::a::A>);"),
            ("beside.rs", "pub struct X;"),
        ]);
        let expected =
            "3 files import each other:\n    a.rs: b.rs (B)\n    b.rs: c.rs (C)\n    c.rs: a.rs (A)";
        assert_eq!(found, [expected]);
    }

    #[test]
    fn a_child_that_uses_what_its_parent_defines_closes_a_circle_if_the_parent_uses_it() {
        let child = "use super::A; pub struct B(Box<A>);";
        let with = |parent: &str| of(&[("lib.rs", "mod a;"), ("a/mod.rs", parent), ("a/b.rs", child)]);
        assert_eq!(with("mod b; pub use b::B; pub struct A(u8);"), Vec::<String>::new());
        assert_eq!(
            with("mod b; pub use b::B; pub struct A(Option<B>);"),
            ["2 files import each other:\n    a/b.rs: a/mod.rs (A)\n    a/mod.rs: a/b.rs (B)"]
        );
    }

    #[test]
    fn what_a_macro_defines_belongs_to_the_file_of_its_call() {
        let found = of(&[
            ("lib.rs", "mod a; mod b; use a::Made;"),
            ("a.rs", "define! { Made } fn f() { super::b::B::new(); }"),
            ("b.rs", "pub struct B(crate::Made);"),
        ]);
        assert_eq!(found, ["2 files import each other:\n    a.rs: b.rs (B)\n    b.rs: a.rs (Made)"]);
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
    fn files_outside_the_folder_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("in")).unwrap();
        for (name, text) in [
            ("lib.rs", "mod a; #[path = \"in/mod.rs\"] mod named;"),
            ("a.rs", "pub struct A(crate::named::B);"),
            ("in/mod.rs", "mod b; pub use b::B;"),
            ("in/b.rs", "pub struct B(Box<crate::a::A>);"),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let names = Names::of_crate(&folder.path().join("lib.rs")).unwrap();
        assert_eq!(Graph::of_folder(&names, folder.path()).circles().len(), 1);
        assert_eq!(Graph::of_folder(&names, &folder.path().join("in")).circles().len(), 0);
    }

    #[test]
    fn a_module_without_a_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("lib.rs"), "mod a;").unwrap();
        let error = Names::of_crate(&folder.path().join("lib.rs")).err().unwrap().to_string();
        assert!(error.ends_with("mod a: neither a.rs nor a/mod.rs exists"), "{error}");
    }
}
