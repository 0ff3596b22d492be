//! The text of a JSON object, in which one field is replaced and all others keep their bytes.

use crate::json::end_of_string;
use serde_json::Value;
use std::ops::Range;

/// The place of a field in the text.
struct Field {
    key: String,
    /// The byte offset at which the key begins, quotes included.
    start: usize,
    value: Range<usize>,
}

/// Returns the fields of the object that `text` holds, in their order. The text must be valid JSON.
fn fields(text: &str) -> Vec<Field> {
    let bytes = text.as_bytes();
    let skip = |mut at: usize, skipped: &[u8]| {
        while bytes.get(at).is_some_and(|byte| byte.is_ascii_whitespace() || skipped.contains(byte)) {
            at += 1;
        }
        at
    };
    let (mut found, mut at) = (Vec::new(), skip(0, b"{"));
    while bytes.get(at) == Some(&b'"') {
        let start = at;
        at = end_of_string(bytes, at);
        let key = serde_json::from_str(&text[start..at]).unwrap_or_default();
        at = skip(at, b":");
        let value = at..end_of_value(bytes, at);
        at = skip(value.end, b",");
        found.push(Field { key, start, value });
    }
    found
}

/// Returns the name of each field of the object that `text` holds, with the text of its value, in their order. The text must be
/// valid JSON.
#[cfg(feature = "tokenizer")]
pub(crate) fn in_order(text: &str) -> impl Iterator<Item = (String, &str)> {
    fields(text).into_iter().map(|field| (field.key, &text[field.value]))
}

/// Returns the index behind the value that begins at `at`.
fn end_of_value(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0usize;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => {
                at = end_of_string(bytes, at);
                if depth == 0 {
                    return at;
                }
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth <= 1 => return if depth == 1 { at + 1 } else { at },
            b'}' | b']' => depth -= 1,
            b',' if depth == 0 => return at,
            byte if byte.is_ascii_whitespace() && depth == 0 => return at,
            _ => {}
        }
        at += 1;
    }
    at
}

/// Returns the text with `value` in the field `key`, which is removed if there is no value. A new field is inserted in front
/// of the first one with a greater key.
pub(super) fn with_field(text: &str, key: &str, value: Option<&Value>) -> String {
    let all = fields(text);
    let at = all.iter().position(|field| field.key == key);
    let pretty = value.map(|value| format!("{value:#}").replace('\n', "\n  "));
    let (range, new) = match (at, pretty) {
        (Some(at), Some(value)) => (all[at].value.clone(), value),
        (Some(at), None) => match (all.get(at + 1), at.checked_sub(1)) {
            (Some(next), _) => (all[at].start..next.start, String::new()),
            (None, Some(before)) => (all[before].value.end..all[at].value.end, String::new()),
            (None, None) => (all[at].start..all[at].value.end, String::new()),
        },
        (None, None) => return text.to_owned(),
        (None, Some(value)) => {
            let quoted = Value::from(key);
            match (all.iter().find(|field| field.key.as_str() > key), all.last()) {
                (Some(next), _) => (next.start..next.start, format!("{quoted}: {value},\n  ")),
                (None, Some(last)) => (last.value.end..last.value.end, format!(",\n  {quoted}: {value}")),
                (None, None) => return format!("{{\n  {quoted}: {value}\n}}\n"),
            }
        }
    };
    [&text[..range.start], &new, &text[range.end..]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TEXT: &str = "{\n  \"a\": 1e-05,\n  \"b\\\"}\": [1, {\"c\": \"},\\\"\"}],\n  \"z\": \"x\"\n}\n";

    #[test]
    fn other_fields_keep_their_bytes() {
        let with = with_field(TEXT, "m", Some(&json!({"x": [1, 2]})));
        assert!(
            with.starts_with("{\n  \"a\": 1e-05,\n  \"b\\\"}\": [1, {\"c\": \"},\\\"\"}],\n  \"m\": {"),
            "{with}"
        );
        let expected = json!({"a": 1e-5, "b\"}": [1, {"c": "},\""}], "m": {"x": [1, 2]}, "z": "x"});
        assert_eq!(serde_json::from_str::<Value>(&with).unwrap(), expected);
        assert_eq!(with_field(&with, "m", None), TEXT);
        assert_eq!(with_field(TEXT, "z", Some(&json!("y"))), TEXT.replace("\"x\"", "\"y\""));
    }

    #[test]
    fn the_first_and_the_last_field_can_be_removed_and_added() {
        for key in ["a", "z"] {
            let without = with_field(TEXT, key, None);
            let value: Value = serde_json::from_str(&without).unwrap();
            assert_eq!(value.as_object().unwrap().len(), 2, "{without}");
            assert!(value.get(key).is_none());
        }
        for text in ["{}", "{ }", "{\"b\":2}"] {
            for key in ["a", "c"] {
                let with: Value = serde_json::from_str(&with_field(text, key, Some(&json!(3)))).unwrap();
                assert_eq!(with[key], 3);
            }
        }
        assert_eq!(with_field("{\"b\":2}", "b", None), "{}");
    }
}
