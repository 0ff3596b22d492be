//! Values that both a doc comment and `impl Default` can state: numbers, names, strings, `Some(…)` and tuples of them.

use std::fmt;

use syn::{Expr, Lit, UnOp};

#[derive(Clone, Debug)]
pub(super) enum Value {
    Number(f64),
    /// `true`, `None`, or the last name of a path such as `DType::F32`.
    Name(String),
    Text(String),
    Some(Box<Value>),
    Tuple(Vec<Value>),
}

impl Value {
    /// The value of an expression, if it is simple.
    pub(super) fn read(expression: &Expr) -> Option<Self> {
        match expression {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Int(number) => number.base10_parse().ok().map(Self::Number),
                Lit::Float(number) => number.base10_parse().ok().map(Self::Number),
                Lit::Bool(flag) => Some(Self::Name(flag.value.to_string())),
                Lit::Str(text) => Some(Self::Text(text.value())),
                _ => None,
            },
            Expr::Unary(unary) => match (&unary.op, Self::read(&unary.expr)?) {
                (UnOp::Neg(_), Self::Number(number)) => Some(Self::Number(-number)),
                _ => None,
            },
            Expr::Paren(inner) => Self::read(&inner.expr),
            Expr::Path(path) => path.path.segments.last().map(|last| Self::Name(last.ident.to_string())),
            Expr::Tuple(tuple) => tuple.elems.iter().map(Self::read).collect::<Option<_>>().map(Self::Tuple),
            Expr::Call(call) => match (Self::read(&call.func)?, call.args.first(), call.args.len()) {
                (Self::Name(name), Some(value), 1) if name == "Some" => {
                    Self::read(value).map(|value| Self::Some(Box::new(value)))
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// The value that a text spells as Rust does, with names in any case.
    pub(super) fn parse(text: &str) -> Option<Self> {
        Self::read(&syn::parse_str(text).ok()?)
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Number(a), Self::Number(b)) => a == b,
            (Self::Name(a), Self::Name(b)) => a.eq_ignore_ascii_case(b),
            (Self::Text(a), Self::Text(b)) => a == b,
            (Self::Some(a), Self::Some(b)) => a == b,
            (Self::Tuple(a), Self::Tuple(b)) => a == b,
            _ => false,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => f.write_str(name),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Some(value) => write!(f, "Some({value})"),
            Self::Tuple(values) => {
                let values: Vec<String> = values.iter().map(ToString::to_string).collect();
                write!(f, "({})", values.join(", "))
            }
        }
    }
}
