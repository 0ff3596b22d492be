//! Fields of a JSON object, read with a type. Absent and `null` are the same. Errors name the field.

use serde_json::{Map, Value};

/// The largest integer of a configuration. Products of three still fit in 128 bits.
const MAX_SIZE: u64 = 1 << 40;

/// An object, with the path that errors put in front of a field's name.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { map, path }
    }

    pub(crate) fn keys(self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(crate) fn get(self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether the field is there, `null` or not.
    pub(crate) fn has(self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Returns the path for the fields of the object in `key`.
    pub(crate) fn path_of(self, key: &str) -> String {
        format!("{}{key}.", self.path)
    }

    /// Returns the error that this field is not what was expected.
    pub(crate) fn wrong(self, key: &str, expected: &str) -> String {
        let found = self.get(key).map_or("nothing".to_owned(), shortened);
        format!("`{}{key}` is {found}: expected {expected}", self.path)
    }

    pub(crate) fn size(self, key: &str) -> Result<Option<usize>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().filter(|&number| number <= MAX_SIZE);
        let number = number.and_then(|number| usize::try_from(number).ok());
        Ok(Some(number.ok_or_else(|| self.wrong(key, "an integer from 0 to 2⁴⁰"))?))
    }

    /// Returns a size that is present and greater than zero.
    pub(crate) fn required(self, key: &str) -> Result<usize, String> {
        match self.size(key)? {
            Some(0) => Err(self.wrong(key, "at least 1")),
            Some(size) => Ok(size),
            None => Err(format!("`{}{key}` is missing: a model of this family has it", self.path)),
        }
    }

    pub(crate) fn float(self, key: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        Ok(Some(number.ok_or_else(|| self.wrong(key, "a number"))?))
    }

    /// Returns a number that is greater than zero.
    pub(crate) fn positive(self, key: &str) -> Result<Option<f64>, String> {
        match self.float(key)? {
            Some(number) if number <= 0.0 => Err(self.wrong(key, "a number greater than 0")),
            number => Ok(number),
        }
    }

    pub(crate) fn flag(self, key: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        Ok(Some(value.as_bool().ok_or_else(|| self.wrong(key, "true or false"))?))
    }

    pub(crate) fn text(self, key: &str) -> Result<Option<&'a str>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        Ok(Some(value.as_str().ok_or_else(|| self.wrong(key, "a string"))?))
    }

    pub(crate) fn object(self, key: &str) -> Result<Option<&'a Map<String, Value>>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        Ok(Some(value.as_object().ok_or_else(|| self.wrong(key, "an object"))?))
    }

    /// Returns a list of strings; absent is empty.
    pub(crate) fn texts(self, key: &str) -> Result<Vec<String>, String> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let texts = value.as_array().and_then(|list| {
            list.iter().map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<String>>>()
        });
        texts.ok_or_else(|| self.wrong(key, "a list of strings"))
    }

    /// Returns token ids: one integer, or a list of them.
    pub(crate) fn ids(self, key: &str) -> Result<Vec<u32>, String> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(id).collect(),
            Some(value) => id(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.wrong(key, "a token id or a list of them"))
    }
}

/// The JSON of a value; the beginning of a long one.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
