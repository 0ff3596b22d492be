//! What the compiler refuses, with the words it finds for it.

#[test]
fn saved() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
