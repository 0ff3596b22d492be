//! The parameters of each kernel, from the signatures that `cargo xtask ptx` writes for the library.

use std::collections::BTreeMap;

use crate::workspace::Result;

/// A parameter's type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The address of values of this type.
    Pointer(String),
    /// `u64`, `i32`, `f32`, …
    Scalar(String),
}

impl Kind {
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Pointer(_) => 8,
            Self::Scalar(name) => match name.as_str() {
                "u64" | "i64" => 8,
                "u16" => 2,
                "u8" => 1,
                _ => 4,
            },
        }
    }
}

/// The parameters of a kernel, in their order.
pub(super) type Parameters = Vec<(String, Kind)>;

/// The parameters of all kernels.
///
/// # Errors
/// A text that is not such a file.
pub(super) fn read(text: &str) -> Result<BTreeMap<String, Parameters>> {
    let mut groups: BTreeMap<&str, Parameters> = BTreeMap::new();
    let mut kernels = BTreeMap::new();
    let body = text.split_once("signatures! {").ok_or("sass: kernels.rs: no signatures")?.1;
    for item in body.split("\n    group ").skip(1) {
        let (name, rest) = item.split_once(' ').ok_or("sass: kernels.rs: a group without a name")?;
        let rest = rest.split('}').next().unwrap_or_default();
        let list = fields(rest, &groups);
        groups.insert(name, list);
    }
    let mut parts = body.split("\n    kernel ");
    parts.next();
    for part in parts {
        let (fields_text, constants) =
            part.split_once('}').ok_or("sass: kernels.rs: a kernel without parameters")?;
        let list = fields(fields_text.split_once('{').map_or("", |(_, list)| list), &groups);
        let constants = constants.split(';').next().unwrap_or_default();
        for name in constants.split('"').skip(1).step_by(2) {
            kernels.insert(name.to_owned(), list.clone());
        }
    }
    Ok(kernels)
}

/// `{ x: In<Void>, n: u64, block: BlockParams, }`; groups become their fields.
fn fields(text: &str, groups: &BTreeMap<&str, Parameters>) -> Parameters {
    let mut list = Vec::new();
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '{' || c == '}');
    for field in text.split(',').map(str::trim).filter(|field| !field.is_empty()) {
        let Some((name, kind)) = field.split_once(": ") else { continue };
        match (groups.get(kind), kind.strip_prefix("In<").or_else(|| kind.strip_prefix("Out<"))) {
            (Some(group), _) => list.extend(group.iter().cloned()),
            (None, Some(pointee)) => {
                list.push((name.to_owned(), Kind::Pointer(pointee.trim_end_matches('>').to_owned())));
            }
            (None, None) => list.push((name.to_owned(), Kind::Scalar(kind.to_owned()))),
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_and_groups_are_read() {
        let text = "//! Head.\nsignatures! {\n    pointees Row row;\n\n    group Call {\n        lengths: In<i32>, scale: f32, }\n\n    \
                    kernel Attention {\n        q: In<u16>, n: u64,\n        call: Call, }\n    ATTENTION_64 = Attention \"attention_64\",\n    \
                    ATTENTION_128 = Attention \"attention_128\";\n}\n";
        let found = read(text).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["attention_128", "attention_64"]);
        let names: Vec<_> =
            found["attention_64"].iter().map(|(name, kind)| (name.as_str(), kind.size())).collect();
        assert_eq!(names, [("q", 8), ("n", 8), ("lengths", 8), ("scale", 4)]);
        assert_eq!(read("fn main() {}").unwrap_err().to_string(), "sass: kernels.rs: no signatures");
    }

    #[test]
    fn the_parameters_of_the_library_are_read() {
        let path = crate::workspace::root().join("fp8-kernels/src/backend/cuda/ops/kernels.rs");
        let found = read(&std::fs::read_to_string(path).unwrap()).unwrap();
        let blocks: Vec<_> = found["quantize_blocks"].iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(blocks[..6], ["x", "dtype", "rows", "cols", "blocks", "rule"]);
        assert!(found.len() > 100, "{}", found.len());
    }
}
