use super::*;
use std::fs;

const EXAMPLE: &str = "/// ```\n/// assert_eq!(1 + 1, 2);\n/// ```\n";

/// The gaps of a crate `fp8-a` with these files below `src`.
fn gaps_of(sources: &[(&str, &str)]) -> Gaps {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in sources {
        let path = folder.path().join("src").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    Gaps::of(&items::public_items(folder.path(), "fp8_a").unwrap(), &[], &mut Vec::new())
}

fn without_example(sources: &[(&str, &str)]) -> Vec<String> {
    gaps_of(sources).examples
}

#[test]
fn every_kind_of_page_needs_an_example() {
    let source = "pub struct S; pub enum E { A } pub trait T {} pub fn f() {} #[macro_export] macro_rules! m { () => {} } \
                  pub type Alias = S; pub const C: u8 = 0; struct Private; pub(crate) fn g() {} #[cfg(test)] pub fn h() {} \
                  #[doc(hidden)] pub fn i() {}";
    let expected = ["fp8_a::E", "fp8_a::S", "fp8_a::T", "fp8_a::f", "fp8_a::m!"];
    assert_eq!(without_example(&[("lib.rs", source)]), expected);
    let with = |item: &str| format!("/// An item.\n///\n{EXAMPLE}{item}\n");
    let items = ["pub struct S;", "pub enum E { A }", "pub trait T {}", "pub fn f() {}"].map(with).concat();
    let macros = with("#[macro_export] macro_rules! m { () => {} }");
    assert_eq!(without_example(&[("lib.rs", &(items + &macros))]), [""; 0]);
}

#[test]
fn an_example_of_a_public_part_is_enough() {
    let clean = |item: &str| without_example(&[("lib.rs", item)]).is_empty();
    assert!(clean(&format!("pub struct S; impl S {{ {EXAMPLE} pub fn new() {{}} }}")));
    assert!(clean(&format!("pub struct S; impl Clone for S {{ {EXAMPLE} fn clone(&self) -> S {{ S }} }}")));
    assert!(clean(&format!("pub struct S {{ {EXAMPLE} pub a: u8 }}")));
    assert!(clean(&format!("pub enum E {{ {EXAMPLE} A }}")));
    assert!(clean(&format!("pub trait T {{ {EXAMPLE} fn f(); }}")));
    assert!(!clean(&format!("pub struct S; impl S {{ {EXAMPLE} fn private() {{}} }}")));
    assert!(!clean(&format!("pub struct S {{ {EXAMPLE} private: u8 }}")));
}

#[test]
fn a_link_to_an_item_whose_example_uses_this_one_is_enough() {
    let source = |docs: &str, used: &str| {
        format!("/// {docs}\npub struct Options;\n/// ```\n/// let o = {used};\n/// ```\npub struct Layer;")
    };
    let gaps = |docs, used| without_example(&[("lib.rs", &source(docs, used))]);
    assert_eq!(gaps("Options of [`Layer::new`].", "Options { a: 1 }"), [""; 0]);
    assert_eq!(gaps("Options of [`Layer`].", "OtherOptions { a: 1 }"), ["fp8_a::Options"]);
    assert_eq!(gaps("Options of a layer.", "Options { a: 1 }"), ["fp8_a::Options"]);
}

#[test]
fn only_blocks_that_run_count() {
    for (info, is_run) in [
        ("", true),
        ("rust", true),
        ("should_panic", true),
        ("edition2024", true),
        ("text", false),
        ("no_run", false),
        (concat!("ign", "ore"), false),
        ("compile_fail", false),
        ("rust,no_run", false),
        ("toml", false),
    ] {
        assert_eq!(
            !code_blocks(&format!("Text.\n\n```{info}\nlet a = 1;\n```\n")).is_empty(),
            is_run,
            "{info}"
        );
    }
    assert_eq!(
        code_blocks("```text\n```\nwords\n```text\nlet a = 1;\n```"),
        [""; 0],
        "a closing fence opens none"
    );
    assert_eq!(code_blocks("~~~\nlet a = 1;\n```\n~~~"), ["let a = 1;\n```\n"]);
}

#[test]
fn items_are_found_through_modules_and_uses() {
    let sources = [
        (
            "lib.rs",
            "mod a; pub mod b; mod c { pub mod open { pub fn deep() {} } } pub use a::{f, inner::g as h}; pub use c::open; \
             pub mod prelude { pub use crate::{b, f}; pub use fp8_b::{self, other}; }",
        ),
        ("a.rs", "pub mod inner; pub fn f() {} pub fn unused() {}"),
        ("a/inner.rs", "pub fn g() {}"),
        ("b/mod.rs", "mod c; pub use c::*; pub use super::a::f as again;"),
        ("b/c.rs", "pub fn starred() {} fn private() {}"),
    ];
    let expected = ["fp8_a::b::starred", "fp8_a::f", "fp8_a::h", "fp8_a::open::deep"];
    assert_eq!(without_example(&sources), expected);
}

#[test]
fn an_item_made_by_a_macro_has_the_comment_before_its_name() {
    let gaps = |docs: &str| {
        let made = format!("make! {{ {docs} made<T>(f32); }}");
        without_example(&[("lib.rs", "mod a; pub use a::made;"), ("a.rs", &made)])
    };
    assert_eq!(gaps(EXAMPLE), [""; 0]);
    assert_eq!(gaps("/// A function.\n"), ["fp8_a::made"]);
}

#[test]
fn options_state_their_defaults_as_they_are() {
    let gaps = |docs: &str, kind: &str, value: &str| {
        let source = format!(
            "{EXAMPLE}pub struct AOptions {{\n/// A rate. {docs}\npub rate: {kind} }}
             impl Default for AOptions {{ fn default() -> Self {{ Self {{ rate: {value} }} }} }}"
        );
        gaps_of(&[("lib.rs", &source)]).defaults
    };
    for (docs, value) in [
        ("Default: 0.95.", "0.95"),
        ("Default: `0.95`, as in the paper.", "0.950"),
        ("Default: 1e-5 (f32).", "0.00001"),
        ("Default: 1024.", "1_024"),
        ("Default: -1.", "-1"),
        ("Default: none.", "None"),
        ("Default: `None`: the group's.", "None"),
        ("Default: [`DType::F32`].", "DType::F32"),
        ("Default: bf16.", "DType::BF16"),
        ("Default: true.", "true"),
        ("Default: (false, false).", "(false, false)"),
        ("Default: `Some(2)`.", "Some(2)"),
        ("Default: that of the norm.", "NormOptions::default()"),
        ("Required.", "0"),
    ] {
        assert_eq!(gaps(docs, "T", value), [""; 0], "{docs} {value}");
    }
    for (docs, value) in [
        ("Default: 0.9.", "0.95"),
        ("Default: true.", "false"),
        ("Default: off.", "false"),
        ("Default: [`DType::F32`].", "DType::BF16"),
        ("Default: none.", "Some(2)"),
        ("Default: 0.95.", "None"),
    ] {
        assert!(gaps(docs, "T", value).concat().contains("states the default"), "{docs} {value}");
    }
    let text = "fp8_a::AOptions::rate states the default `0.9`; `Default` gives `0.95`";
    assert_eq!(gaps("Default: 0.9.", "T", "0.95"), [text]);
    for docs in ["", "The default is 0.95.", "Requiredness."] {
        let text = "fp8_a::AOptions::rate does not state its default: write \"Default: …\" or \"Required.\"";
        assert_eq!(gaps(docs, "T", "0.95"), [text], "{docs}");
    }
}

#[test]
fn a_derived_default_is_compared_by_type() {
    let gaps = |docs: &str, kind: &str| {
        let source = format!(
            "pub enum Kind {{ #[default] First, Second }}
             #[derive(Debug, Default)] pub struct AOptions {{\n/// {docs}\npub rate: {kind} }}"
        );
        gaps_of(&[("lib.rs", &source)]).defaults
    };
    for (docs, kind) in [
        ("Default: 0.", "usize"),
        ("Default: false.", "bool"),
        ("Default: none.", "Option<u8>"),
        ("Default: first.", "Kind"),
    ] {
        assert_eq!(gaps(docs, kind), [""; 0], "{docs}");
    }
    assert_eq!(gaps("Default: 1.", "usize").len(), 1);
    assert_eq!(gaps("Default: `Second`.", "Kind").len(), 1);
}

#[test]
fn options_without_default_are_all_required() {
    let gaps = |docs: &str| {
        gaps_of(&[(
            "lib.rs",
            &format!("pub struct AOptions {{\n/// A rate. {docs}\npub rate: f32, hidden: u8 }}"),
        )])
        .defaults
    };
    assert_eq!(gaps("Required."), [""; 0]);
    let text = "fp8_a::AOptions::rate states a default, but the struct has no `Default`: write \"Required.\"";
    assert_eq!(gaps("Default: 0."), [text]);
}

#[test]
fn references_to_private_text_are_found() {
    let gaps = gaps_of(&[(
        "lib.rs",
        "/// See the\n/// module's text.\npub fn f() {}\n/// A module's own text.\npub fn g() {}",
    )]);
    assert_eq!(gaps.pointers, ["fp8_a::f: \"module's text\""]);
    let line = "docs: fp8_a::f: \"module's text\" points at text that users do not see: say it here";
    assert!(gaps.lines().contains(&line.to_owned()), "{:?}", gaps.lines());
    assert_eq!(gaps.lines()[0], "docs: fp8_a::f has no example that runs");
    assert_eq!(
        gaps.summary(),
        "2 items without an example, 0 options without their default, 1 references to private text"
    );
}

#[test]
fn an_exception_covers_what_its_pattern_names() {
    let item = |source: &str| {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("src")).unwrap();
        fs::write(folder.path().join("src/lib.rs"), source).unwrap();
        items::public_items(folder.path(), "fp8_a").unwrap()
    };
    let exceptions = [("fp8_*Saved", "returned by the layer"), ("fp8_a::Gone", "gone")];
    let mut excepted = Vec::new();
    let gaps = Gaps::of(&item("pub struct LinearSaved; pub struct Saving;"), &exceptions, &mut excepted);
    assert_eq!((gaps.examples, excepted), (vec!["fp8_a::Saving".to_owned()], vec!["fp8_*Saved"]));
}
