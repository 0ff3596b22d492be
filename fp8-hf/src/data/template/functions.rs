//! The functions and filters that transformers offers to chat templates, and Python's way to write values.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

/// The method that stands for `[::-1]`.
pub(super) const REVERSED: &str = "_reversed";
/// Values nested deeper than this are not written as JSON.
const DEPTH: usize = 200;

/// The message of `raise_exception`, by which a template refuses a conversation.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Adds everything to an environment.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    // The time at which the template was read: all texts have the same date.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    environment.add_function("raise_exception", raise);
    environment.add_function("strftime_now", move |format: &str| formatted(format, now));
    environment.add_filter("tojson", to_json);
    environment.set_unknown_method_callback(|state, value, method, args| match method {
        REVERSED => reversed(value),
        // As in Python; pycompat would look for it without end.
        "count" if value.as_str().is_some() && matches!(args, [part] if part.as_str() == Some("")) => {
            Ok(Value::from(value.as_str().unwrap_or_default().chars().count() + 1))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    });
    // Jinja's other filters and functions, such as `truncate` and `joiner`.
    minijinja_contrib::add_to_environment(environment);
    // It would write the state of the program.
    environment.remove_global("debug");
    // Texts are no HTML.
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
}

/// Returns the items of a list, or the characters of a text, from the last to the first.
fn reversed(value: &Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    let mut items: Vec<Value> = value.try_iter()?.collect();
    items.reverse();
    Ok(Value::from(items))
}

fn raise(message: Value) -> Result<Value, Error> {
    let text = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, text.clone()).with_source(Raised(text)))
}

/// Writes a value as Python's `json.dumps(value, ensure_ascii=False)`.
fn to_json(_: &State<'_, '_>, value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = kwargs.get("indent")?;
    let indent = indent.filter(|value| !value.is_none()).map(|value| match value.as_usize() {
        Some(count) => " ".repeat(count.min(80)),
        None => value.to_string(),
    });
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let is_sorted: Option<bool> = kwargs.get("sort_keys")?;
    let is_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let default = if indent.is_some() { [",", ": "] } else { [", ", ": "] };
    let [item, key] = match separators.as_deref() {
        Some([item, key]) => [item.as_str(), key.as_str()],
        _ => default,
    };
    let style =
        Style { indent, item, key, is_sorted: is_sorted == Some(true), is_ascii: is_ascii == Some(true) };
    let mut text = String::new();
    style.write(&mut text, &value, 0)?;
    Ok(Value::from(text))
}

/// The options of `json.dumps`.
struct Style<'a> {
    indent: Option<String>,
    item: &'a str,
    key: &'a str,
    is_sorted: bool,
    is_ascii: bool,
}

impl Style<'_> {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deep"));
        }
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write!(out, "{value}")?,
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.items(out, "[]", items.collect(), depth)?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    items.push((Some(key.to_string()), item));
                }
                if self.is_sorted {
                    items.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.items(out, "{}", items, depth)?;
            }
            kind => {
                return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: a {kind} is no JSON")));
            }
        }
        Ok(())
    }

    fn items(
        &self,
        out: &mut String,
        brackets: &str,
        items: Vec<(Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        let (open, close) = brackets.split_at(1);
        out.push_str(open);
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        let is_empty = items.is_empty();
        for (index, (key, item)) in items.into_iter().enumerate() {
            if index > 0 {
                out.push_str(self.item);
            }
            line(out, depth + 1);
            if let Some(key) = key {
                self.string(out, &key);
                out.push_str(self.key);
            }
            self.write(out, &item, depth + 1)?;
        }
        if !is_empty {
            line(out, depth);
        }
        out.push_str(close);
        Ok(())
    }

    /// Writes a string. The standard's short escapes are Python's, too, except that Python has none for slashes.
    fn string(&self, out: &mut String, text: &str) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.is_ascii {
            // Python writes the character behind the controls as it is, like serde_json.
            return out.push_str(&quoted);
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                out.push(c);
            } else {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
}

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Writes a time in seconds since 1970, in UTC, as Python's `strftime` does in the C locale.
fn formatted(format: &str, seconds: u64) -> Result<String, Error> {
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let weekday = (days + 3) % 7;
    let of_year = days - days_before(year);
    let twelve = (hour + 11) % 12 + 1;
    let name = |names: &[&'static str], index: u64| names.get(index as usize).copied().unwrap_or_default();
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut code = rest.next();
        let is_bare = code == Some('-');
        if is_bare {
            code = rest.next();
        }
        let number = |value: u64, width: usize| {
            if is_bare { value.to_string() } else { format!("{value:0width$}") }
        };
        text += &match code {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') => format!("{day:2}"),
            Some('B') => name(&MONTHS, month - 1).to_owned(),
            Some('b' | 'h') => name(&MONTHS, month - 1).chars().take(3).collect(),
            Some('A') => name(&DAYS, weekday).to_owned(),
            Some('a') => name(&DAYS, weekday).chars().take(3).collect(),
            Some('H') => number(hour, 2),
            Some('I') => number(twelve, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('j') => number(of_year + 1, 3),
            Some('u') => (weekday + 1).to_string(),
            Some('w') => ((weekday + 1) % 7).to_string(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('D') => format!("{month:02}/{day:02}/{:02}", year % 100),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('f') => "000000".to_owned(),
            Some('n') => "\n".to_owned(),
            Some('t') => "\t".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                let text = format!("strftime_now: `%{other}` is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, text));
            }
        };
    }
    Ok(text)
}

/// Returns the days from 1970 to the first day of a year.
fn days_before(year: u64) -> u64 {
    let y = year - 1;
    y * 365 + y / 4 - y / 100 + y / 400 - 719_162
}

/// Returns year, month and day of a number of days since 1970, in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // Counted from 1 March 0000: leap days end the years.
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    fn rendered(template: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        add_to(&mut environment);
        let value = serde_json::json!({"b": [1, -2.5, true, null], "a": {"x": "ü\"\n/"}, "e": [], "f": {}});
        environment.render_str(template, context! { value => Value::from_serialize(value) })
    }

    #[test]
    fn json_is_written_as_python_does() {
        assert_eq!(
            rendered("{{ value | tojson(sort_keys=true) }}").unwrap(),
            r#"{"a": {"x": "ü\"\n/"}, "b": [1, -2.5, true, null], "e": [], "f": {}}"#
        );
        let expected = "{\n  \"a\": {\n    \"x\": \"ü\\\"\\n/\"\n  },\n  \"b\": [\n    1,\n    -2.5,\n    true,\n    null\n  ],\n  \
                        \"e\": [],\n  \"f\": {}\n}";
        assert_eq!(rendered("{{ value | tojson(indent=2, sort_keys=true) }}").unwrap(), expected);
        assert_eq!(
            rendered("{{ ['ü🙂', 1.0] | tojson(ensure_ascii=true, separators=[',', ':']) }}").unwrap(),
            r#"["\u00fc\ud83d\ude42",1.0]"#
        );
        assert_eq!(rendered("{{ true }} {{ none }} {{ nothing }}").unwrap(), "True None ");
        assert!(rendered("{{ 1 | tojson(width=2) }}").is_err());
        assert_eq!(
            rendered("{{ [1, 2]._reversed() }}{{ []._reversed() }}{{ 'ab'._reversed() }}").unwrap(),
            "[2, 1][]ba"
        );
    }

    #[test]
    fn times_are_written_as_python_does() {
        // 2024-02-29 15:04:05, a Thursday.
        let now = 1_709_219_045;
        for (format, text) in [
            ("%d %b %Y", "29 Feb 2024"),
            ("%A, %-d %B %y %I:%M:%S %p", "Thursday, 29 February 24 03:04:05 PM"),
            ("%F %T %j %a %H %u %w %%", "2024-02-29 15:04:05 060 Thu 15 4 4 %"),
            ("%D %e %Z %z %f%n%t%h %-m", "02/29/24 29 UTC +0000 000000\n\tFeb 2"),
        ] {
            assert_eq!(formatted(format, now).unwrap(), text);
        }
        assert_eq!(formatted("%Y-%m-%d %j", 0).unwrap(), "1970-01-01 001");
        assert_eq!(formatted("%Y-%m-%d %I %p", 946_684_799).unwrap(), "1999-12-31 11 PM");
        let error = formatted("%Q", 0).unwrap_err().to_string();
        assert!(error.contains("strftime_now: `%Q` is not supported"), "{error}");
        assert_eq!(rendered("{{ strftime_now('%Y') | length }}").unwrap(), "4");
    }

    #[test]
    fn raised_messages_are_found() {
        let error = rendered("{{ raise_exception('no ' ~ 'way') }}").unwrap_err();
        assert_eq!(error.detail(), Some("no way"));
    }
}
