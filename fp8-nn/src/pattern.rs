//! Patterns of names of modules and parameters.

/// Returns true if a pattern matches a name: as a whole, where `*` stands for any text, or, without `*`, as a part of the name
/// between dots.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    if !pattern.contains('*') {
        let mut starts = std::iter::once(0).chain(name.match_indices('.').map(|(dot, _)| dot + 1));
        let is_part = |rest: &str| rest.is_empty() || rest.starts_with('.');
        return !pattern.is_empty() && starts.any(|at| name[at..].strip_prefix(pattern).is_some_and(is_part));
    }
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names_or_parts_between_dots() {
        let name = "model.layers.1.self_attn.q_proj";
        for pattern in
            ["*", "model.*", "*.q_proj", "*layers.1.*", "q_proj", "layers.1", name, "m*l*1*q_proj*"]
        {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in
            ["", "proj", "layers.11", "model.layers.1*k_proj", "*q_pro", "x*", "*q_proj*q_proj", "layer"]
        {
            assert!(!matches(pattern, name), "{pattern}");
        }
        assert!(matches("a.a", "xa.a.a") && !matches("a.a", "xa.a"));
    }
}
