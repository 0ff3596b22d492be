//! Patterns of names of modules and parameters.

/// Returns whether a pattern matches the name of a module or parameter: as a whole, where `*` stands for any text, or, without `*`,
/// as a part of the name between dots.
///
/// ```
/// use fp8_nn::matches_name;
///
/// let name = "gpt.blocks.1.attention.qkv.weight";
/// for pattern in ["qkv", "blocks.1", "gpt.*", "*.weight", name] {
///     assert!(matches_name(pattern, name));
/// }
/// assert!(!matches_name("qk", name) && !matches_name("blocks.1*bias", name));
/// ```
#[must_use]
pub fn matches_name(pattern: &str, name: &str) -> bool {
    if pattern.contains('*') {
        return fp8_recipe::matches_glob(pattern, name);
    }
    let mut starts = std::iter::once(0).chain(name.match_indices('.').map(|(dot, _)| dot + 1));
    let is_part = |rest: &str| rest.is_empty() || rest.starts_with('.');
    !pattern.is_empty() && starts.any(|at| name[at..].strip_prefix(pattern).is_some_and(is_part))
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
            assert!(matches_name(pattern, name), "{pattern}");
        }
        for pattern in
            ["", "proj", "layers.11", "model.layers.1*k_proj", "*q_pro", "x*", "*q_proj*q_proj", "layer"]
        {
            assert!(!matches_name(pattern, name), "{pattern}");
        }
        assert!(matches_name("a.a", "xa.a.a") && !matches_name("a.a", "xa.a"));
    }
}
