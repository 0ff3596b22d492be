//! Options of recipes by name, as files have them.

#![cfg_attr(not(feature = "toml"), allow(dead_code, reason = "without the feature there are no files"))]

use crate::Format;
use std::collections::BTreeMap;
use std::fmt;

/// A value in a file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Text(String),
    Integer(i64),
    Float(f64),
    Flag(bool),
    List(Vec<Self>),
    /// A value of a type that no option has. Contains the name of the type.
    Other(&'static str),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(value) => write!(f, "{value:?}"),
            Self::Integer(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
            Self::Flag(value) => value.fmt(f),
            Self::List(values) => {
                let values: Vec<String> = values.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", values.join(", "))
            }
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// The options of one recipe that a file gives.
///
/// Each kind of recipe reads its options by name; then [`finish`](Self::finish) refuses those that it did not ask for.
#[derive(Debug, Default)]
pub(crate) struct Options {
    given: BTreeMap<String, Value>,
    known: Vec<&'static str>,
}

impl Options {
    pub(crate) fn new(given: BTreeMap<String, Value>) -> Self {
        Self { given, known: Vec::new() }
    }

    /// Replaces `option` by the value that is given under `name`, if one is.
    ///
    /// # Errors
    /// A value that is not of the option's type.
    pub(crate) fn read<T: FromValue>(&mut self, name: &'static str, option: &mut T) -> Result<(), String> {
        self.known.push(name);
        if let Some(value) = self.given.remove(name) {
            *option =
                T::from_value(&value).ok_or_else(|| format!("{name} = {value}: expected {}", T::EXPECTED))?;
        }
        Ok(())
    }

    /// Returns an error for the first option that was given and not read; `recipe` is the recipe's name.
    pub(crate) fn finish(mut self, recipe: &str) -> Result<(), String> {
        let Some((name, _)) = self.given.pop_first() else { return Ok(()) };
        if self.known.is_empty() {
            return Err(format!("unknown key `{name}`: {recipe} has no options"));
        }
        Err(format!("unknown key `{name}`: the options of {recipe} are {}", self.known.join(", ")))
    }
}

/// A type of options.
pub(crate) trait FromValue: Sized {
    /// The valid values, as an error lists them after "expected".
    const EXPECTED: &'static str;

    fn from_value(value: &Value) -> Option<Self>;
}

impl FromValue for bool {
    const EXPECTED: &'static str = "true or false";

    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Flag(value) = value { Some(*value) } else { None }
    }
}

impl FromValue for (bool, bool, bool) {
    const EXPECTED: &'static str =
        "three of true and false, for fprop, dgrad and wgrad: [false, false, true]";

    fn from_value(value: &Value) -> Option<Self> {
        let Value::List(flags) = value else { return None };
        let [Value::Flag(fprop), Value::Flag(dgrad), Value::Flag(wgrad)] = flags[..] else { return None };
        Some((fprop, dgrad, wgrad))
    }
}

impl FromValue for Format {
    const EXPECTED: &'static str = "\"hybrid\" or \"e4m3\"";

    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Text(name) = value { name.parse().ok() } else { None }
    }
}

macro_rules! whole_numbers {
    ($($number:ty),*) => {$(
        impl FromValue for $number {
            const EXPECTED: &'static str = "a whole number";

            fn from_value(value: &Value) -> Option<Self> {
                if let Value::Integer(value) = value { Self::try_from(*value).ok() } else { None }
            }
        }
    )*};
}
whole_numbers!(i32, u64, usize);

impl FromValue for f32 {
    const EXPECTED: &'static str = "a number";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Float(value) => Some(*value as Self),
            Value::Integer(value) => Some(*value as Self),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_by_name_and_the_rest_is_refused() {
        let given = [
            ("a", Value::Integer(3)),
            ("b", Value::List([true, false, true].map(Value::Flag).to_vec())),
            ("c", Value::Integer(2)),
            ("z", Value::Flag(true)),
        ];
        let mut options =
            Options::new(given.into_iter().map(|(name, value)| (name.to_owned(), value)).collect());
        let (mut a, mut b, mut c, mut d) = (0usize, (false, false, false), 0.0f32, 7i32);
        options.read("a", &mut a).unwrap();
        options.read("b", &mut b).unwrap();
        options.read("c", &mut c).unwrap();
        options.read("d", &mut d).unwrap();
        assert_eq!((a, b, c, d), (3, (true, false, true), 2.0, 7));
        assert_eq!(options.finish("x").unwrap_err(), "unknown key `z`: the options of x are a, b, c, d");
    }

    #[test]
    fn values_of_another_type_are_refused() {
        fn refused<T: FromValue + Default>(value: Value) -> String {
            let mut options = Options::new([("a".to_owned(), value)].into());
            options.read("a", &mut T::default()).unwrap_err()
        }
        assert_eq!(refused::<bool>(Value::Integer(1)), "a = 1: expected true or false");
        assert_eq!(refused::<usize>(Value::Integer(-1)), "a = -1: expected a whole number");
        assert_eq!(refused::<i32>(Value::Float(0.5)), "a = 0.5: expected a whole number");
        assert_eq!(refused::<f32>(Value::Text("x".to_owned())), "a = \"x\": expected a number");
        let flags = "three of true and false, for fprop, dgrad and wgrad: [false, false, true]";
        assert_eq!(
            refused::<(bool, bool, bool)>(Value::List(vec![Value::Flag(true)])),
            format!("a = [true]: expected {flags}")
        );
        assert_eq!(refused::<bool>(Value::Other("a table")), "a = a table: expected true or false");
    }
}
