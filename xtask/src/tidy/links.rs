//! Links in Markdown files lead to files and headings that exist.
//!
//! A link to another file of the repository must name one that is there, and its anchor, if it has one, a heading of that file
//! as GitHub spells anchors. Links to web pages are not followed. Code, in blocks and in lines, contains no links.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::workspace::{Result, files};

/// One line for each link that leads nowhere.
pub(super) fn broken(root: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    for path in files(root)? {
        if path.extension().is_some_and(|end| end == "md") {
            pages.insert(path.clone(), Page::of(&fs::read_to_string(&path)?));
        }
    }
    let mut broken = Vec::new();
    for (path, page) in &pages {
        let name = path.strip_prefix(root)?.display();
        for (number, link) in &page.links {
            if let Some(problem) = problem(root, path, link, &pages) {
                broken.push(format!("{name}:{number}: link to {link}: {problem}"));
            }
        }
    }
    Ok(broken)
}

fn problem(root: &Path, from: &Path, link: &str, pages: &BTreeMap<PathBuf, Page>) -> Option<String> {
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let file = match path {
        "" => from.to_path_buf(),
        _ => match from.parent()?.join(path).canonicalize() {
            Ok(file) => file,
            Err(_) => return Some("no such file".to_owned()),
        },
    };
    // Anchors of other files, such as lines of a source, are the host's.
    let page = pages.get(&file).filter(|_| !anchor.is_empty())?;
    (!page.anchors.contains(anchor)).then(|| {
        let name = file.strip_prefix(root).unwrap_or(&file).display();
        format!("no heading of {name} has this anchor")
    })
}

/// The links and anchors of one file.
#[derive(Debug, Default, PartialEq)]
struct Page {
    /// Targets within the repository, with their lines.
    links: Vec<(usize, String)>,
    anchors: BTreeSet<String>,
}

impl Page {
    fn of(text: &str) -> Self {
        let mut page = Self::default();
        let mut fence = None;
        for (number, line) in (1..).zip(text.lines()) {
            let trimmed = line.trim_start();
            let mark = ["```", "~~~"].into_iter().find(|mark| trimmed.starts_with(mark));
            match (fence, mark) {
                (None, Some(mark)) => fence = Some(mark),
                (Some(open), Some(mark)) if open == mark => fence = None,
                (None, None) => page.read(number, line),
                _ => {}
            }
        }
        page
    }

    fn read(&mut self, number: usize, line: &str) {
        let heading = line.trim_start_matches('#');
        if heading.len() < line.len() && heading.starts_with(' ') {
            let anchor = anchor(heading.trim());
            let taken = (1..).map(|count| format!("{anchor}-{count}"));
            let all = std::iter::once(anchor.clone()).chain(taken);
            self.anchors.extend(all.into_iter().find(|name| !self.anchors.contains(name)));
        }
        // Every other part between backticks is code.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let inline = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        let definition =
            prose.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, to)| to.trim());
        for link in inline.chain(definition) {
            let is_web = link.contains("://") || link.starts_with("mailto:");
            if !is_web && !link.is_empty() {
                self.links.push((number, link.trim_matches(['<', '>']).to_owned()));
            }
        }
    }
}

/// The anchor of a heading: its letters in lower case, spaces as hyphens, and no other punctuation than hyphens and underscores.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_spelled_as_github_spells_them() {
        assert_eq!(anchor("A subcommand of `fp8`"), "a-subcommand-of-fp8");
        assert_eq!(anchor("What, why? NVRTC's E4M3/E5M2"), "what-why-nvrtcs-e4m3e5m2");
    }

    #[test]
    fn code_has_no_links_and_headings_that_repeat_are_counted() {
        let text =
            "# A\n## A\n`[x](y)` [a](b.md#c) [w](https://a.b) <!-- -->\n```\n# no\n[x](z)\n```\n[d]: e.md\n";
        let page = Page::of(text);
        assert_eq!(page.links, [(3, "b.md#c".to_owned()), (8, "e.md".to_owned())]);
        assert_eq!(page.anchors.iter().map(String::as_str).collect::<Vec<_>>(), ["a", "a-1"]);
    }

    #[test]
    fn links_to_missing_files_and_headings_are_named_with_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir(root.join("docs")).unwrap();
        fs::write(root.join("a.rs"), "").unwrap();
        fs::write(root.join("README.md"), "[x](docs/b.md#here) [y](a.rs#L3) [z](docs) [own](#none)\n")
            .unwrap();
        fs::write(root.join("docs/b.md"), "# Here\n[up](../README.md)\n[gone](c.md) [x](../README.md#top)\n")
            .unwrap();
        let broken = broken(&root).unwrap();
        assert_eq!(broken.len(), 3, "{broken:?}");
        assert!(
            broken[0].starts_with("README.md:1: link to #none: no heading of README.md has"),
            "{}",
            broken[0]
        );
        assert_eq!(broken[1], "docs/b.md:3: link to c.md: no such file");
        assert!(
            broken[2].starts_with("docs/b.md:3: link to ../README.md#top: no heading of "),
            "{}",
            broken[2]
        );
    }
}
