//! Objects of strings in JSON.

use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// The most characters of a value that an error shows, because a file's values may have any length.
const SHOWN: usize = 100;

/// Deserializes an object of strings, in which a name that occurs twice is an error: parsers differ in the one that they take.
///
/// ```
/// use std::collections::BTreeMap;
///
/// #[derive(serde::Deserialize)]
/// struct Index(#[serde(deserialize_with = "fp8_nn::checkpoint::stream::distinct_strings")] BTreeMap<String, String>);
///
/// let index: Index = serde_json::from_str(r#"{"a": "1", "b": "2"}"#)?;
/// assert_eq!(index.0["b"], "2");
/// assert!(serde_json::from_str::<Index>(r#"{"a": "1", "a": "2"}"#).is_err());
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// # Errors
/// Anything but an object of strings; a name that occurs twice, with both values.
pub fn distinct_strings<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    deserializer.deserialize_map(Strings)
}

struct Strings;

impl<'de> Visitor<'de> for Strings {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("strings by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut strings = BTreeMap::new();
        while let Some((name, value)) = map.next_entry::<String, String>()? {
            if let Some(other) = strings.get(&name) {
                let [name, other, value] =
                    [&name, other, &value].map(|text| text.chars().take(SHOWN).collect::<String>());
                return Err(A::Error::custom(format!(
                    "`{name}` occurs twice, as \"{other}\" and \"{value}\""
                )));
            }
            strings.insert(name, value);
        }
        Ok(strings)
    }
}

#[cfg(test)]
mod tests {
    use super::distinct_strings;

    #[test]
    fn a_name_that_occurs_twice_is_an_error_that_shortens_what_it_quotes() {
        let read = |text: &str| distinct_strings(&mut serde_json::Deserializer::from_str(text));
        assert_eq!(read(r#"{"a": "1", "b": "1"}"#).unwrap().len(), 2);
        let long = format!(r#"{{"a": "{0}", "a": "{0}"}}"#, "x".repeat(100_000));
        let error = read(&long).unwrap_err().to_string();
        assert!(error.starts_with("`a` occurs twice, as \"xxx") && error.len() < 300, "{error}");
    }
}
