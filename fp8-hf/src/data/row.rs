//! One line of a file of JSON lines: its kind, and what is wrong with it.

use super::options::DataKind;
use crate::json;
use minijinja::Value;
use serde_json::Map;

type Object = Map<String, serde_json::Value>;

/// The sample of a line.
#[derive(Debug)]
pub(super) enum Row {
    /// A document.
    Text(String),
    /// A prompt and its completion.
    Prompt(String, String),
    /// A conversation, with the fields of each message in the order of the file.
    Messages(Vec<Value>),
}

impl Row {
    pub(super) fn kind(&self) -> DataKind {
        match self {
            Self::Text(_) => DataKind::Text,
            Self::Prompt(..) => DataKind::Prompts,
            Self::Messages(_) => DataKind::Messages,
        }
    }

    /// Returns true for a sample without any text.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Prompt(prompt, completion) => prompt.is_empty() && completion.is_empty(),
            Self::Messages(messages) => messages.is_empty(),
        }
    }

    /// Reads a line that is not blank; `expected` is the kind of the lines before it. The error is a sentence without file and line.
    pub(super) fn parse(line: &[u8], expected: Option<DataKind>) -> Result<Self, String> {
        let line = str::from_utf8(line).map_err(|error| {
            format!("byte {} of the line is not UTF-8: save the file as UTF-8", error.valid_up_to() + 1)
        })?;
        let object = object(line)?;
        let kind = match (kind(&object), expected) {
            (Some(found), Some(expected)) if found != expected && !has(&object, expected) => {
                return Err(format!(
                    "the line has {}, and the lines before it have {}: expected one kind of lines in all files",
                    fields(found),
                    fields(expected)
                ));
            }
            (Some(_), Some(expected)) => expected,
            (Some(found), None) => found,
            (None, _) => return Err(no_field(&object)),
        };
        match kind {
            DataKind::Prompts => {
                let of = |name| text(&object, name, "prompt and completion");
                Ok(Self::Prompt(of("prompt")?, of("completion")?))
            }
            DataKind::Messages => {
                check_messages(&object)?;
                messages(line).map(Self::Messages)
            }
            _ => Ok(Self::Text(text(&object, "text", "text")?)),
        }
    }
}

/// Reads the object of a line.
fn object(line: &str) -> Result<Object, String> {
    let start = line.trim_start();
    let hint = if start.starts_with('[') {
        Some("it begins an array: expected one object a line, without brackets and commas around them")
    } else if start.starts_with("{'") {
        Some("it is a Python dictionary with single quotes, not JSON: write lines with json.dumps")
    } else {
        None
    };
    if let Some(hint) = hint {
        return Err(hint.to_owned());
    }
    let read = |text: &str| serde_json::from_str::<serde_json::Value>(text);
    let value = match read(line) {
        Err(error) => read(&json::standard(line)).map_err(|_| error),
        read => read,
    };
    match value {
        Ok(serde_json::Value::Object(object)) => Ok(object),
        Ok(other) => {
            let text =
                format!("the line is {}: expected a JSON object, such as {{\"text\": \"…\"}}", named(&other));
            Err(text)
        }
        Err(error) => {
            let text = error.to_string();
            let text = text.split(" at line 1 ").next().unwrap_or(&text);
            let column = error.column();
            Err(match text {
                "trailing characters" => format!(
                    "more text follows the JSON value, from column {column} on: expected one JSON object a line"
                ),
                text if text.contains("hex escape") || text.contains("surrogate") => format!(
                    "half a surrogate pair at column {column} ({text}), which UTF-8 cannot hold: expected whole characters"
                ),
                _ => format!("not JSON: {text} at column {column}: expected one JSON object a line"),
            })
        }
    }
}

/// Returns the kind that the keys show.
fn kind(object: &Object) -> Option<DataKind> {
    let kinds = [DataKind::Messages, DataKind::Prompts, DataKind::Text];
    let whole = kinds.into_iter().find(|&kind| has(object, kind));
    let is_half = object.contains_key("prompt") || object.contains_key("completion");
    whole.or(is_half.then_some(DataKind::Prompts))
}

/// Returns true for a line with all keys of a kind.
fn has(object: &Object, kind: DataKind) -> bool {
    match kind {
        DataKind::Messages => object.contains_key("messages"),
        DataKind::Prompts => object.contains_key("prompt") && object.contains_key("completion"),
        _ => object.contains_key("text"),
    }
}

fn fields(kind: DataKind) -> &'static str {
    match kind {
        DataKind::Messages => "`messages`",
        DataKind::Prompts => "`prompt` and `completion`",
        _ => "`text`",
    }
}

fn no_field(object: &Object) -> String {
    let expected = "expected `text`, or `prompt` and `completion`, or `messages`";
    let has = |names: &[&str]| names.iter().all(|&name| object.contains_key(name));
    if has(&["instruction", "output"]) {
        return format!("the line has Alpaca's `instruction` and `output`: {expected}; name them so");
    }
    if has(&["conversations"]) {
        return format!(
            "the line has ShareGPT's `conversations`: {expected}; name them `messages`, `from` `role` and `value` `content`, \
             human `user` and gpt `assistant`"
        );
    }
    // In one line, and not too long.
    let shown = |name: &String| format!("`{}`", name.chars().take(40).collect::<String>().escape_debug());
    let names: Vec<String> = object.keys().take(5).map(shown).collect();
    match names.is_empty() {
        true => format!("the line is an empty object: {expected}"),
        false => format!("the line has {}: {expected}", names.join(", ")),
    }
}

/// Returns the string in a field.
fn text(object: &Object, name: &str, what: &str) -> Result<String, String> {
    match object.get(name) {
        Some(serde_json::Value::String(text)) => Ok(text.clone()),
        None => Err(format!("`{name}` is missing: expected {what} as strings")),
        Some(serde_json::Value::Array(_)) if name != "text" => Err(format!(
            "`{name}` is a list: expected a string; put all messages of a conversation into `messages`"
        )),
        Some(other) => Err(format!("`{name}` is {}: expected a string", named(other))),
    }
}

fn check_messages(object: &Object) -> Result<(), String> {
    let expected = "expected a list of objects with `role` and `content`";
    if let Some(tools) = object.get("tools") {
        let is_nothing = tools.is_null() || tools.as_array().is_some_and(Vec::is_empty);
        if !is_nothing {
            return Err(
                "`tools` is not supported: expected conversations without tool descriptions".to_owned()
            );
        }
    }
    let messages = match object.get("messages") {
        Some(serde_json::Value::Array(messages)) => messages,
        Some(other) => return Err(format!("`messages` is {}: {expected}", named(other))),
        None => return Err(format!("`messages` is missing: {expected}")),
    };
    if messages.is_empty() {
        return Err(format!("`messages` is empty: {expected}"));
    }
    for (number, message) in (1..).zip(messages) {
        let Some(message) = message.as_object() else {
            return Err(format!("message {number} of `messages` is {}: {expected}", named(message)));
        };
        let field = |name: &str| match message.get(name) {
            Some(serde_json::Value::String(_)) => Ok(()),
            None => Err(format!("message {number} of `messages` has no `{name}`: expected a string")),
            Some(serde_json::Value::Array(_)) if name == "content" => Err(format!(
                "`content` of message {number} is a list of parts: expected a string, as models of text read it"
            )),
            Some(other) => {
                Err(format!("`{name}` of message {number} is {}: expected a string", named(other)))
            }
        };
        field("role")?;
        field("content")?;
    }
    Ok(())
}

/// Reads the messages again, as values that keep the order of their fields.
fn messages(line: &str) -> Result<Vec<Value>, String> {
    #[derive(serde::Deserialize)]
    struct Line {
        messages: Vec<Value>,
    }
    let read = |text: &str| serde_json::from_str::<Line>(text).map(|line| line.messages);
    read(line).or_else(|_| read(&json::standard(line))).map_err(|error| format!("not JSON: {error}"))
}

fn named(value: &serde_json::Value) -> &'static str {
    match value {
        serde_json::Value::Null => "null",
        serde_json::Value::Bool(_) => "true or false",
        serde_json::Value::Number(_) => "a number",
        serde_json::Value::String(_) => "a string",
        serde_json::Value::Array(_) => "a list",
        serde_json::Value::Object(_) => "an object",
    }
}
