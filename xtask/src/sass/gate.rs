//! Checks of the committed counts that need no compiler: every kernel is counted, counts are of today's PTX, and none is worse than
//! before without a reason.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::cases::{Case, Cases};
use super::table::{Best, Row, Table};

/// Counts may be this much worse than the best so far.
const TOLERANCE: f64 = 1.05;
/// Digits of a hash that the table keeps.
const DIGITS: usize = 12;

/// The PTX of each kernel of a snapshot, without what depends on the kernels before it in the file.
pub(super) fn kernels(snapshot: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for part in snapshot.split(".entry ").skip(1) {
        let Some((name, _)) = part.split_once('(') else { continue };
        let body = part.split_once("\n}").map_or(part, |(body, _)| body);
        // Labels are numbered by kernel: `$L__BB12_3`.
        let mut text = String::with_capacity(body.len());
        for (number, piece) in body.split("$L__BB").enumerate() {
            text += if number == 0 { piece } else { piece.trim_start_matches(|c: char| c.is_ascii_digit()) };
        }
        found.insert(name.trim().to_owned(), text);
    }
    found
}

/// The hash of a kernel and of a case of it.
pub(super) fn hash(ptx: &str, case: &Case) -> String {
    let digest = Sha256::digest(format!("{ptx}\n{}", case.line));
    let text: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    text[..DIGITS].to_owned()
}

/// The measures of a row that are worse than the best so far, each with both numbers.
pub(super) fn worse(row: &Row) -> Vec<String> {
    let Row { counts, best, .. } = row;
    let mut found = Vec::new();
    if counts.instructions > best.instructions * TOLERANCE + 0.005 {
        found.push(format!("{:.2} instructions, {:.2} before", counts.instructions, best.instructions));
    }
    if f64::from(row.warps) * TOLERANCE < f64::from(best.warps) {
        found.push(format!("{} warps, {} before", row.warps, best.warps));
    }
    if counts.shared > best.shared * TOLERANCE + 0.005 {
        found.push(format!("{:.2} bytes of shared memory, {:.2} before", counts.shared, best.shared));
    }
    found
}

/// The better of both, measure by measure.
pub(super) fn better(a: Best, b: Best) -> Best {
    Best {
        instructions: a.instructions.min(b.instructions),
        warps: a.warps.max(b.warps),
        shared: a.shared.min(b.shared),
    }
}

/// Kernels without a case and cases without a kernel.
pub(super) fn unmatched(cases: &Cases, ptx: &BTreeMap<String, String>) -> Vec<String> {
    let mut found = Vec::new();
    for kernel in ptx.keys() {
        let has_case = cases.cases.iter().any(|case| case.kernel == *kernel);
        match (has_case, cases.without.contains_key(kernel)) {
            (false, false) => found.push(format!(
                "{kernel}: no case: add a line to fp8-kernels/ptx/sass-cases.txt, or `- {kernel}: REASON`"
            )),
            (true, true) => found.push(format!("{kernel}: has a case and a reason to have none: remove one")),
            _ => {}
        }
    }
    let named = cases.cases.iter().map(|case| &case.kernel).chain(cases.without.keys());
    let mut gone: Vec<&String> = named.filter(|kernel| !ptx.contains_key(*kernel)).collect();
    gone.dedup();
    found.extend(gone.iter().map(|kernel| {
        format!("{kernel}: no such kernel: remove or rename it in fp8-kernels/ptx/sass-cases.txt")
    }));
    found
}

/// Everything that is wrong with the committed counts.
pub(super) fn problems(table: &Table, cases: &Cases, ptx: &BTreeMap<String, String>) -> Vec<String> {
    let mut found = unmatched(cases, ptx);
    for case in &cases.cases {
        let Some(text) = ptx.get(&case.kernel) else { continue };
        let name = case.name();
        match table.row(&case.work, &case.dtype) {
            None => found.push(format!("{name}: not counted: run cargo xtask sass")),
            Some(row) if row.kernel != case.kernel || row.hash != hash(text, case) => {
                found.push(format!(
                    "{name}: {} or its case has changed since it was counted: run cargo xtask sass",
                    case.kernel
                ));
            }
            Some(row) => {
                if row.reason.is_none() {
                    for measure in worse(row) {
                        found.push(format!("{name}: worse without a reason: {measure}"));
                    }
                }
            }
        }
    }
    for row in &table.rows {
        if !cases.cases.iter().any(|case| case.work == row.work && case.dtype == row.dtype) {
            found.push(format!("{}: counted, but no case: run cargo xtask sass", row.name()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sass::cases;
    use crate::sass::count::Counts;

    const PTX: &str = "\
.visible .entry first(
\t.param .u64 first_param_0
)
{
$L__BB0_1:
\tbra $L__BB0_1;
}
.visible .entry second()
{
$L__BB1_2:
\tret;
}
";

    fn row(case: &Case, ptx: &BTreeMap<String, String>) -> Row {
        Row {
            work: case.work.clone(),
            dtype: case.dtype.clone(),
            kernel: case.kernel.clone(),
            lanes: 1,
            registers: 32,
            shared: 0,
            warps: 24,
            in_flight: 0,
            counts: Counts { instructions: 20.0, shared: 2.0, ..Counts::default() },
            bytes: 4.0,
            read: 2.0,
            best: Best { instructions: 20.0, warps: 24, shared: 2.0 },
            hash: hash(&ptx[&case.kernel], case),
            reason: None,
        }
    }

    #[test]
    fn a_kernel_keeps_its_hash_when_others_come_before_it() {
        let alone = PTX.split_once(".visible .entry second").unwrap().1;
        let alone = format!(".visible .entry second{}", alone.replace("BB1", "BB0"));
        assert_eq!(kernels(PTX)["second"], kernels(&alone)["second"]);
        assert_ne!(kernels(PTX)["first"], kernels(&PTX.replace("bra", "bra.uni"))["first"]);
    }

    #[test]
    fn what_is_missing_stale_or_worse_is_named() {
        let text = "copy bf16 first per=read:x:2 bytes=4\n- second: launched by hand\n";
        let (cases, ptx) = (cases::read(text).unwrap(), kernels(PTX));
        let table = |row: Row| Table { tools: String::new(), rows: vec![row] };
        let good = row(&cases.cases[0], &ptx);
        assert_eq!(problems(&table(good.clone()), &cases, &ptx), [""; 0]);

        let changed = kernels(&PTX.replace("bra", "bra.uni"));
        let stale = ["copy bf16: first or its case has changed since it was counted: run cargo xtask sass"];
        assert_eq!(problems(&table(good.clone()), &cases, &changed), stale);
        let longer = cases::read(&text.replace("bytes=4", "bytes=4 block=3")).unwrap();
        assert_eq!(problems(&table(good.clone()), &longer, &ptx), stale);

        let counts = Counts { instructions: 21.1, shared: 4.0, ..Counts::default() };
        let worse = Row { counts, warps: 16, ..good.clone() };
        let without = "copy bf16: worse without a reason: ";
        assert_eq!(
            problems(&table(worse.clone()), &cases, &ptx),
            [
                format!("{without}21.10 instructions, 20.00 before"),
                format!("{without}16 warps, 24 before"),
                format!("{without}4.00 bytes of shared memory, 2.00 before"),
            ]
        );
        let reasoned = Row { reason: Some("exact".to_owned()), ..worse };
        assert_eq!(problems(&table(reasoned), &cases, &ptx), [""; 0]);
        let counts = Counts { instructions: 20.9, shared: 2.0, ..Counts::default() };
        assert_eq!(problems(&table(Row { counts, ..good.clone() }), &cases, &ptx), [""; 0]);

        let gone = Row { work: "gone".to_owned(), ..good };
        let other = cases::read("copy bf16 third per=read:x:2 bytes=4\n").unwrap();
        assert_eq!(
            problems(&table(gone), &other, &ptx),
            [
                "first: no case: add a line to fp8-kernels/ptx/sass-cases.txt, or `- first: REASON`",
                "second: no case: add a line to fp8-kernels/ptx/sass-cases.txt, or `- second: REASON`",
                "third: no such kernel: remove or rename it in fp8-kernels/ptx/sass-cases.txt",
                "gone bf16: counted, but no case: run cargo xtask sass",
            ]
        );
        assert_eq!(
            problems(&Table::default(), &cases, &ptx),
            ["copy bf16: not counted: run cargo xtask sass"]
        );
    }
}
