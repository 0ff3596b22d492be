//! PTX that NVRTC made earlier, with a head that says of what.
//!
//! ```text
//! // fp8-kernels kernel snapshot: quantize.cu
//! // source sha256: <64 hexadecimal digits: the exact text handed to nvrtcCreateProgram>
//! // options: -std=c++17 -fmad=false -lineinfo
//! // nvrtc: 13.0.88
//! ```
//!
//! The PTX names no lines of the CUDA source. A table beside it does, with the same hash in its head and the number of
//! lines of the PTX.

use sha2::{Digest, Sha256};

use crate::device::Target;

include!(concat!(env!("OUT_DIR"), "/snapshots.rs"));

#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    /// The name of its file.
    name: String,
    hash: String,
    /// All options but the architecture, in their order.
    pub(crate) options: Vec<String>,
    target: Target,
    /// The target as it stands in the text.
    target_text: String,
    ptx: String,
}

/// SHA-256 of a program's text in lower-case hexadecimal digits.
pub(crate) fn hash(source: &str) -> String {
    Sha256::digest(source.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether there is a built-in snapshot from a file of this name.
pub(crate) fn is_built_in(name: &str) -> bool {
    EMBEDDED.iter().any(|(known, _)| *known == name)
}

/// The snapshot of the program with this hash, if there is one: that for `target`, else the first that serves it. Those of
/// `replacing` stand for the built-in ones of their kernel files; those `given` precede all.
pub(crate) fn find(
    given: &[Snapshot],
    replacing: &[Snapshot],
    hash: &str,
    target: Target,
) -> Result<Option<Snapshot>, String> {
    let mut found: Vec<Snapshot> =
        given.iter().chain(replacing).filter(|known| known.hash == hash).cloned().collect();
    let stem = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let is_replaced = |name: &str| replacing.iter().any(|snapshot| stem(&snapshot.name) == stem(name));
    // Only those that are meant are read whole.
    let is_meant = |text| head(text).any(|line| line.contains(hash));
    for (name, text) in EMBEDDED.iter().filter(|(name, text)| is_meant(text) && !is_replaced(name)) {
        let snapshot = Snapshot::parse(name, text)?;
        if snapshot.hash == hash {
            found.push(snapshot);
        }
    }
    let exact = found.iter().position(|snapshot| snapshot.target == target);
    let best = exact.or_else(|| found.iter().position(|snapshot| snapshot.target.code_serves(target)));
    Ok(best.map(|best| found.swap_remove(best)))
}

/// The lines before the PTX.
fn head(text: &str) -> impl Iterator<Item = &str> {
    text.lines().take_while(|line| line.starts_with("//") || line.trim().is_empty())
}

/// A field of the head.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    head(text).find_map(|line| line.strip_prefix("// ")?.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
}

/// The table of source lines for PTX that was made from a snapshot, or from one with other instructions in the same lines.
pub(crate) fn lines(ptx: &str) -> Option<&'static str> {
    let (hash, count) = (field(ptx, "source sha256")?, ptx.lines().count().to_string());
    let fits = |table: &str| {
        field(table, "source sha256") == Some(hash) && field(table, "PTX lines") == Some(count.as_str())
    };
    LINES.iter().map(|(_, table)| *table).find(|table| fits(table))
}

impl Snapshot {
    pub(crate) fn parse(name: &str, text: &str) -> Result<Self, String> {
        let need = |key: &str| {
            field(text, key).ok_or_else(|| format!("snapshot {name}: no line `// {key}: …` in its head\n"))
        };
        need("fp8-kernels kernel snapshot")?;
        let hash = need("source sha256")?.to_ascii_lowercase();
        if hash.len() != 64 || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(format!("snapshot {name}: `{hash}` is no SHA-256: expected 64 hexadecimal digits\n"));
        }
        let options = need("options")?.split_whitespace().map(str::to_owned).collect();
        let target_text = text
            .lines()
            .find_map(|line| line.trim_start().strip_prefix(".target"))
            .and_then(|rest| rest.split([',', ' ', '\t', '/']).find(|word| !word.is_empty()));
        let (target_text, target) = target_text
            .and_then(|text| Some((text.to_owned(), Target::parse(text)?)))
            .ok_or_else(|| format!("snapshot {name}: no `.target sm_…`\n"))?;
        Ok(Self { name: name.to_owned(), hash, options, target, target_text, ptx: text.to_owned() })
    }

    /// The PTX with its `.target` set to another.
    pub(crate) fn for_target(&self, target: Target) -> String {
        let suffix = target.suffix.map(String::from).unwrap_or_default();
        let mut text = String::with_capacity(self.ptx.len() + 8);
        let mut open = true;
        for line in self.ptx.split_inclusive('\n') {
            if open && line.trim_start().starts_with(".target") {
                open = false;
                text += &line.replacen(&self.target_text, &format!("sm_{}{suffix}", target.number), 1);
            } else {
                text += line;
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(hash: &str) -> String {
        format!(
            "// fp8-kernels kernel snapshot: x.cu\n// source sha256: {hash}\n// options: -std=c++17 -fmad=false\n\
             // nvrtc: 13.0.88\n.version 9.0\n.target sm_90\n.address_size 64\n"
        )
    }

    #[test]
    fn the_head_is_read_and_the_target_replaced() {
        let hash = hash("source");
        let snapshot = Snapshot::parse("x", &text(&hash)).unwrap();
        assert_eq!(snapshot.options, ["-std=c++17", "-fmad=false"]);
        let target = Target::parse("sm_100a").unwrap();
        assert!(snapshot.for_target(target).contains("\n.target sm_100a\n.address_size"));
        let found = find(&[snapshot], &[], &hash, target).unwrap().unwrap();
        assert_eq!(found.hash, hash);
    }

    #[test]
    fn a_head_without_a_field_is_refused_by_name() {
        let why = Snapshot::parse("x", ".version 9.0\n").unwrap_err();
        assert!(why.contains("kernel snapshot"), "{why}");
        let why = Snapshot::parse("x", &text("123")).unwrap_err();
        assert!(why.contains("64 hexadecimal"), "{why}");
    }

    #[test]
    fn a_replacement_hides_the_built_in_snapshot_of_its_name_alone() {
        let target = Target::parse("sm_90").unwrap();
        let [first, second] =
            [EMBEDDED[0], EMBEDDED[1]].map(|(name, text)| Snapshot::parse(name, text).unwrap());
        let wrong = Snapshot::parse(&first.name, &text(&first.hash)).unwrap();
        let find = |hash| find(&[], std::slice::from_ref(&wrong), hash, target).unwrap();
        assert_eq!(find(&first.hash).unwrap().ptx, wrong.ptx);
        assert_eq!(find(&second.hash).unwrap().ptx, second.ptx);
        let other = Snapshot::parse(&first.name, &text(&hash("another source"))).unwrap();
        assert!(super::find(&[], &[other], &first.hash, target).unwrap().is_none());
    }

    #[test]
    fn code_for_one_architecture_is_for_targets_that_have_it() {
        let (_, text) = EMBEDDED.iter().find(|(name, _)| *name == "nvfp4.ptx").unwrap();
        let hash = field(text, "source sha256").unwrap();
        let converts = |target: &str| {
            let target = Target::parse(target).unwrap();
            let ptx = find(&[], &[], hash, target).unwrap().unwrap().for_target(target);
            ptx_interp::Module::parse(&ptx).unwrap();
            ptx.contains("cvt.rn.satfinite.e2m1x2.f32")
        };
        let targets = ["sm_89", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_120", "sm_120a"];
        assert_eq!(targets.map(converts), [false, false, false, true, true, false, true]);
        // A changed snapshot is what every target runs.
        let changed = Snapshot::parse("nvfp4.ptx", text).unwrap();
        let target = Target::parse("sm_100a").unwrap();
        assert_eq!(find(&[], &[changed], hash, target).unwrap().unwrap().ptx, *text);
    }

    #[test]
    fn every_built_in_snapshot_reads_and_has_its_table_of_lines() {
        assert_eq!(EMBEDDED.len(), LINES.len());
        for (name, text) in EMBEDDED {
            Snapshot::parse(name, text).unwrap();
            let table = lines(text).unwrap_or_else(|| panic!("{name} has no table: run `cargo xtask ptx`"));
            ptx_interp::Module::parse(text).unwrap().set_lines(table).unwrap();
        }
        let longer = format!("{}\n", EMBEDDED[0].1);
        assert_eq!(lines(&longer), None, "a table for other lines");
    }
}
