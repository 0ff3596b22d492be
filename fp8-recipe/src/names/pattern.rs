//! Patterns of names: of slots, modules and parameters.

use std::sync::Arc;

/// Returns whether a pattern matches the name of a module or parameter: as a whole, where `*` stands for any text, or, without `*`,
/// as a part of the name between dots.
///
/// ```
/// use fp8_recipe::matches_name;
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
        return matches_glob(pattern, name);
    }
    let mut starts = std::iter::once(0).chain(name.match_indices('.').map(|(dot, _)| dot + 1));
    let is_part = |rest: &str| rest.is_empty() || rest.starts_with('.');
    !pattern.is_empty() && starts.any(|at| name[at..].strip_prefix(pattern).is_some_and(is_part))
}

/// Returns whether `pattern` matches the whole of `name`. `*` stands for any characters, dots included, or none.
pub(crate) fn matches_glob(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    // Where to go on if the rest does not match: after the last `*`, which then takes one byte more.
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match (pattern.get(p), retry) {
            (Some(b'*'), _) => {
                retry = Some((p + 1, n));
                p += 1;
            }
            (Some(byte), _) if *byte == name[n] => {
                p += 1;
                n += 1;
            }
            (_, Some((after, taken))) => {
                retry = Some((after, taken + 1));
                p = after;
                n = taken + 1;
            }
            (_, None) => return false,
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

/// Returns up to three of `names`, those that need the fewest edits to match `pattern`, the nearest first.
pub(crate) fn nearest(pattern: &str, names: impl IntoIterator<Item = Arc<str>>) -> Vec<Arc<str>> {
    let pattern: Vec<char> = pattern.chars().collect();
    let mut all: Vec<(usize, Arc<str>)> =
        names.into_iter().map(|name| (edits(&pattern, &name), name)).collect();
    all.sort();
    all.dedup();
    all.into_iter().take(3).map(|(_, name)| name).collect()
}

/// The number of characters to insert, remove or replace in `pattern` so that it matches `name`.
fn edits(pattern: &[char], name: &str) -> usize {
    let name: Vec<char> = name.chars().collect();
    // costs[n]: the edits for the pattern so far to match the first n characters.
    let mut costs: Vec<usize> = (0..=name.len()).collect();
    for &c in pattern {
        let mut diagonal = costs[0];
        if c != '*' {
            costs[0] += 1;
        }
        for n in 1..costs.len() {
            let above = costs[n];
            costs[n] = if c == '*' {
                above.min(costs[n - 1])
            } else {
                (diagonal + usize::from(c != name[n - 1])).min(above + 1).min(costs[n - 1] + 1)
            };
            diagonal = above;
        }
    }
    costs[name.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_takes_any_characters() {
        for (pattern, name, expected) in [
            ("", "", true),
            ("", "a", false),
            ("a", "a", true),
            ("a", "ab", false),
            ("b", "ab", false),
            ("*", "", true),
            ("*", "a.b", true),
            ("**", "a", true),
            ("a*", "a", true),
            ("*a", "ba", true),
            ("*a", "ab", false),
            ("a*b", "ab", true),
            ("a*b", "a.x.b.b", true),
            ("a*b", "a.b.c", false),
            ("*ab*", "aab", true),
            ("*ab*ab", "abab", true),
            ("*ab*ab", "ab", false),
            ("a.c", "abc", false),
            ("blocks.*.fc2.grad_output", "blocks.3.mlp.fc2.grad_output", true),
            ("blocks.*.fc2.grad_output", "blocks.3.mlp.fc2.input", false),
            ("blocks.1.*", "blocks.11.fc.input", false),
            ("é*", "éa", true),
        ] {
            assert_eq!(matches_glob(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn many_stars_take_no_exponential_time() {
        let (pattern, name) = ("*a".repeat(40) + "b", "a".repeat(4000));
        assert!(!matches_glob(&pattern, &name));
    }

    /// Tries every way to split `name` at a star.
    fn matches_slowly(pattern: &str, name: &str) -> bool {
        match pattern.chars().next() {
            None => name.is_empty(),
            Some('*') => (0..=name.len()).any(|taken| matches_slowly(&pattern[1..], &name[taken..])),
            Some(c) => name.starts_with(c) && matches_slowly(&pattern[1..], &name[1..]),
        }
    }

    #[test]
    fn all_short_patterns_agree_with_the_definition() {
        let words = |letters: &[char]| {
            let mut all = vec![String::new()];
            for len in 0..5 {
                let longest: Vec<String> = all.iter().filter(|word| word.len() == len).cloned().collect();
                all.extend(longest.iter().flat_map(|word| letters.iter().map(move |c| format!("{word}{c}"))));
            }
            all
        };
        let names = words(&['a', '.']);
        for pattern in words(&['a', '.', '*']) {
            for name in &names {
                let expected = matches_slowly(&pattern, name);
                assert_eq!(matches_glob(&pattern, name), expected, "{pattern:?} {name:?}");
                let pattern: Vec<char> = pattern.chars().collect();
                assert_eq!(edits(&pattern, name) == 0, expected, "{pattern:?} {name:?}");
            }
        }
    }

    #[test]
    fn edits_are_counted() {
        let count = |pattern: &str, name| edits(&pattern.chars().collect::<Vec<_>>(), name);
        assert_eq!(count("kitten", "sitting"), 3);
        assert_eq!(count("blocks.*.fc3.input", "blocks.0.mlp.fc1.input"), 1);
        assert_eq!(count("block.*", "blocks.0"), 1);
        assert_eq!(count("", "abc"), 3);
        assert_eq!(count("abc", ""), 3);
        let names = ["fc1.input", "fc2.input", "head.weight", "fc1.weight"].map(Arc::from);
        assert_eq!(
            nearest("fc1.imput", names).iter().map(|name| &**name).collect::<Vec<_>>(),
            ["fc1.input", "fc2.input", "fc1.weight"]
        );
    }

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
