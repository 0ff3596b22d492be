//! The origin of a report: processor, date, version and commit.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// The folder that this program was built in.
const BUILT_IN: &str = env!("CARGO_MANIFEST_DIR");

/// The machine, date, version and commit that a report was made with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Origin {
    /// Model of the CPU, or its architecture if the system does not tell the model.
    pub(crate) cpu: String,
    /// Number of CPU cores that this process may use.
    pub(crate) cores: usize,
    pub(crate) system: String,
    /// The time in UTC at which the report was made: `2026-11-22 23:15 UTC`.
    pub(crate) date: String,
    /// Version of fp8-nn.
    pub(crate) version: String,
    /// Commit that the checkout is at; `None` if the program was not built in a checkout.
    pub(crate) commit: Option<String>,
}

impl Origin {
    pub(crate) fn here() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self {
            cpu: cpu().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            date: date(seconds),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: Path::new(BUILT_IN).parent().and_then(commit),
        }
    }
}

/// The model of the CPU, from Linux's `/proc/cpuinfo` or the variable that Windows sets.
fn cpu() -> Option<String> {
    let model = |text: String| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let linux = fs::read_to_string("/proc/cpuinfo").ok().and_then(model);
    linux.or_else(|| std::env::var("PROCESSOR_IDENTIFIER").ok()).filter(|name| !name.is_empty())
}

/// Date and time of day in UTC, by the civil calendar.
fn date(unix_seconds: u64) -> String {
    let (mut days, minutes) = (unix_seconds / 86_400, unix_seconds / 60 % 1440);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02} {:02}:{:02} UTC", days + 1, minutes / 60, minutes % 60)
}

/// The commit that the checkout at `root` is at, read from git's files.
fn commit(root: &Path) -> Option<String> {
    let git = root.join(".git");
    // A worktree and a submodule have a file here, which names the folder.
    let folder = match fs::read_to_string(&git) {
        Ok(text) => root.join(text.strip_prefix("gitdir:")?.trim()),
        Err(_) => git,
    };
    let head = fs::read_to_string(folder.join("HEAD")).ok()?;
    let Some(name) = head.trim().strip_prefix("ref: ") else { return hash(&head) };
    // Branches of a worktree are stored with the main checkout.
    let shared = fs::read_to_string(folder.join("commondir")).ok();
    let shared: PathBuf = shared.map_or_else(|| folder.clone(), |path| folder.join(path.trim()));
    for place in [&folder, &shared] {
        if let Some(found) = fs::read_to_string(place.join(name)).ok().and_then(|text| hash(&text)) {
            return Some(found);
        }
    }
    let packed = fs::read_to_string(shared.join("packed-refs")).ok()?;
    let line = packed.lines().find(|line| line.split_once(' ').is_some_and(|(_, found)| found == name))?;
    hash(line.split_once(' ')?.0)
}

fn hash(text: &str) -> Option<String> {
    let text = text.trim();
    (text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59 UTC"),
            (1_709_251_200, "2024-03-01 00:00 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
            (1_767_225_599, "2025-12-31 23:59 UTC"),
        ] {
            assert_eq!(date(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn commits_are_read_from_every_kind_of_checkout() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(commit(root), None);
        let write = |name: &str, text: &str| {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let (a, b, c) = ("a".repeat(40), "b".repeat(40), "c".repeat(40));
        write(".git/HEAD", &format!("{a}\n"));
        assert_eq!(commit(root), Some(a));
        write(".git/HEAD", "ref: refs/heads/main\n");
        assert_eq!(commit(root), None);
        write(
            ".git/packed-refs",
            &format!("# pack-refs with: peeled\n{c} refs/heads/mai\n{b} refs/heads/main\n"),
        );
        assert_eq!(commit(root), Some(b.clone()));
        write(".git/refs/heads/main", &format!("{c}\n"));
        assert_eq!(commit(root), Some(c));
        // A worktree.
        write("tree/.git", "gitdir: ../.git/worktrees/tree\n");
        write(".git/worktrees/tree/HEAD", "ref: refs/heads/side\n");
        write(".git/worktrees/tree/commondir", "../..\n");
        write(".git/refs/heads/side", &b);
        assert_eq!(commit(&root.join("tree")), Some(b));
    }

    #[test]
    fn this_machine_is_described() {
        let origin = Origin::here();
        assert!(!origin.cpu.is_empty() && origin.cores > 0);
        assert!(origin.date.starts_with("20") && origin.date.ends_with(" UTC"), "{}", origin.date);
    }
}
