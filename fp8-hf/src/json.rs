//! JSON in which no name occurs twice. Parsers differ in the one that they take. Files of Hugging Face folders may have the numbers
//! that Python's json writes, but no standard knows.

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

/// The numbers that Python's json reads and writes beyond the standard, the longest first.
const PYTHON: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Reads an object of a Hugging Face folder, in which no name occurs twice. `Infinity`, `-Infinity` and `NaN`, which Python's json
/// writes, become strings: a field that is used refuses them by name, and the others do not matter.
pub(crate) fn object(text: &str) -> Result<Map<String, Value>, String> {
    let text = standard(text);
    let map = serde_json::from_str(&text).map_err(|error| format!("not a JSON object: {error}"))?;
    expect_distinct(&text)?;
    Ok(map)
}

/// Returns the text with quotes around Python's numbers that are none of JSON. Strings keep their bytes.
pub(crate) fn standard(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let (mut quoted, mut copied, mut at) = (String::new(), 0, 0);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => at = end_of_string(bytes, at),
            b'-' | b'I' | b'N' => match PYTHON.iter().find(|name| bytes[at..].starts_with(name.as_bytes())) {
                // The name of a field stays wrong.
                Some(name) if !bytes[at + name.len()..].trim_ascii_start().starts_with(b":") => {
                    quoted = quoted + &text[copied..at] + "\"" + name + "\"";
                    at += name.len();
                    copied = at;
                }
                _ => at += 1,
            },
            _ => at += 1,
        }
    }
    if copied == 0 { Cow::Borrowed(text) } else { Cow::Owned(quoted + &text[copied..]) }
}

/// Returns the index behind the string that begins at `at`.
pub(crate) fn end_of_string(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while let Some(&byte) = bytes.get(at) {
        at += match byte {
            b'"' => return at + 1,
            b'\\' => 2,
            _ => 1,
        };
    }
    bytes.len()
}

/// Checks that no name occurs twice in an object of `text`, however deep. The error names it with its path.
pub(crate) fn expect_distinct(text: &str) -> Result<(), String> {
    let mut parser = serde_json::Deserializer::from_str(text);
    let mut twice = None;
    let read = Names { path: String::new(), twice: &mut twice }.deserialize(&mut parser);
    match (twice, read) {
        (Some(path), _) => Err(format!("`{path}` occurs twice")),
        (None, Err(error)) => Err(format!("not a JSON object: {error}")),
        (None, Ok(())) => Ok(()),
    }
}

/// Reads a value for the names in it.
struct Names<'a> {
    /// The path of the value.
    path: String,
    /// The path of the first name that occurs twice.
    twice: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Names<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Names<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            let path = if self.path.is_empty() { name.clone() } else { format!("{}.{name}", self.path) };
            if !names.insert(name) {
                *self.twice = Some(path);
                return Err(A::Error::custom("a name occurs twice"));
            }
            map.next_value_seed(Names { path, twice: self.twice })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Names { path: self.path.clone(), twice: self.twice })?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_are_read_outside_of_strings_alone() {
        let text = r#"{"a": Infinity, "b": [-Infinity, NaN, -1, 2], "Infinity": "NaN, -Infinity \" Infinity", "c": {"d": NaN}}"#;
        let expected = r#"{"a": "Infinity", "b": ["-Infinity", "NaN", -1, 2], "Infinity": "NaN, -Infinity \" Infinity", "c": {"d": "NaN"}}"#;
        assert_eq!(standard(text), expected);
        assert_eq!(object(text).unwrap()["b"], serde_json::json!(["-Infinity", "NaN", -1, 2]));
        for same in ["", "{}", "-", "\"NaN", "\"\\", "{\"ü\": \"Infinity\"}", "[-1, \"é\"]"] {
            assert!(matches!(standard(same), Cow::Borrowed(text) if text == same), "{same}");
        }
        // What Python refuses is refused.
        for text in [
            r#"{"a": NaN1}"#,
            r#"{"a": Infinit}"#,
            r#"{"a": +Infinity}"#,
            r#"{"a": --Infinity}"#,
            r#"{NaN: 1}"#,
            r#"{"a": nan}"#,
            r#"{"a" Infinity}"#,
            r#"{"a": 1Infinity}"#,
        ] {
            let error = object(text);
            assert!(
                error.as_ref().is_err_and(|error| error.starts_with("not a JSON object: ")),
                "{text}: {error:?}"
            );
        }
        assert_eq!(object(r#"{"a": NaN, "b": 1, "a": NaN}"#).unwrap_err(), "`a` occurs twice");
    }

    #[test]
    fn a_name_that_occurs_twice_is_found_at_any_depth() {
        for (text, twice) in [
            (r#"{"a": 1, "b": {"a": 2}, "a": 3}"#, "a"),
            (r#"{"a": {"b": {"c": 1, "d": null, "c": 2}}}"#, "a.b.c"),
            (r#"{"a": [{"b": 1}, {"b": 1.5, "\u0062": true}]}"#, "a.b"),
        ] {
            assert_eq!(expect_distinct(text), Err(format!("`{twice}` occurs twice")));
        }
        assert_eq!(expect_distinct(r#"{"a": [{"b": -1}, {"b": "x"}], "b": {}}"#), Ok(()));
        assert!(expect_distinct("{").unwrap_err().starts_with("not a JSON object: "));
    }
}
