//! The table of counts, `fp8-kernels/ptx/sass.txt`: how it is written and read back.

use std::fmt::Write;

use super::count::Counts;
#[cfg(test)]
use crate::workspace::Result;

const HEADER: &str = "\
# Counts from the machine code of each kernel for an H100 (sm_90), written by `cargo xtask sass` from the launches in sass-cases.txt.
# reg, shared: registers and bytes of shared memory; warps: warps that a multiprocessor holds; flight: the most KiB of device
# memory on their way to its threads at once. For one element (or tile): instr: instructions of a thread; once: further ones at a
# thread's beginning and end, divided by its elements; bytes: device memory that must be moved; read: those of them that
# are read; hmma, ldm, smem: tensor products, loads of matrices and bytes of shared memory. best: the least instr, most warps and least smem so far. A count more than 5 % worse
# needs a reason, which follows `#`. ptx: hash of the kernel's PTX and of its case.
";

/// A measure of a case, and the best that it has been.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Best {
    pub(super) instructions: f64,
    pub(super) warps: u32,
    pub(super) shared: f64,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) work: String,
    pub(super) dtype: String,
    pub(super) kernel: String,
    /// Threads that share one element.
    pub(super) lanes: u32,
    pub(super) registers: u32,
    pub(super) shared: u32,
    pub(super) warps: u32,
    /// KiB a multiprocessor.
    pub(super) in_flight: u64,
    pub(super) counts: Counts,
    pub(super) bytes: f64,
    /// Bytes of these that are read.
    pub(super) read: f64,
    pub(super) best: Best,
    pub(super) hash: String,
    /// The reason for counts that are worse than they were.
    pub(super) reason: Option<String>,
}

impl Row {
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.work, self.dtype)
    }
}

/// The table, with the versions of the tools that made it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Table {
    pub(super) tools: String,
    pub(super) rows: Vec<Row>,
}

impl Table {
    /// The row of a work and a type.
    pub(super) fn row(&self, work: &str, dtype: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.work == work && row.dtype == dtype)
    }
}

pub(super) fn write(table: &Table) -> String {
    let width = |of: fn(&Row) -> &String, least: usize| {
        table.rows.iter().map(|row| of(row).len()).max().unwrap_or(0).max(least)
    };
    let (work, kernel) = (width(|row| &row.work, 4), width(|row| &row.kernel, 6));
    let mut text = format!("{HEADER}# tools: {}\n", table.tools);
    let heads = format!(
        "{:work$} {:5} {:kernel$} {:>5} |{:>4}{:>7}{:>6}{:>7} |{:>8}{:>7}{:>7}{:>7} |{:>6}{:>5}{:>8} |{:>17} | {:8}",
        "work",
        "type",
        "kernel",
        "lanes",
        "reg",
        "shared",
        "warps",
        "flight",
        "instr",
        "once",
        "bytes",
        "read",
        "hmma",
        "ldm",
        "smem",
        "best",
        "ptx"
    );
    text += heads.trim_end();
    text.push('\n');
    for row in &table.rows {
        let Row { counts, best, .. } = row;
        let best = format!("{} {} {}", number(best.instructions), best.warps, number(best.shared));
        let _ = write!(
            text,
            "{:work$} {:5} {:kernel$} {:>5} |{:>4}{:>7}{:>6}{:>7} |{:>8}{:>7}{:>7}{:>7} |{:>6}{:>5}{:>8} |{best:>17} | {}",
            row.work,
            row.dtype,
            row.kernel,
            row.lanes,
            row.registers,
            row.shared,
            row.warps,
            row.in_flight,
            number(counts.instructions),
            number(counts.once),
            number(row.bytes),
            number(row.read),
            number(counts.hmma),
            number(counts.ldmatrix),
            number(counts.shared),
            row.hash,
        );
        if let Some(reason) = &row.reason {
            let _ = write!(text, " # {reason}");
        }
        text.push('\n');
    }
    text
}

/// At most two decimals, as few as a number needs.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

/// # Errors
/// A line that is none of the table's.
#[cfg(test)]
pub(super) fn read(text: &str) -> Result<Table> {
    match readable(text) {
        (table, None) => Ok(table),
        (_, Some(problem)) => Err(problem.into()),
    }
}

/// The rows that can be read, and the first problem. So rows written before stay when a merge damages others.
pub(super) fn readable(text: &str) -> (Table, Option<String>) {
    let (mut table, mut problem, mut has_head) = (Table::default(), None, false);
    for (line_number, line) in (1..).zip(text.lines()) {
        if let Some(tools) = line.strip_prefix("# tools: ") {
            tools.clone_into(&mut table.tools);
        }
        if line.starts_with('#') || line.trim().is_empty() {
            continue;
        }
        if !has_head {
            has_head = true;
            continue;
        }
        match row(line) {
            Some(row) => table.rows.push(row),
            None => {
                problem.get_or_insert(format!("sass.txt:{line_number}: not a row: run cargo xtask sass"));
            }
        }
    }
    (table, problem)
}

fn row(line: &str) -> Option<Row> {
    let (line, reason) = match line.split_once(" # ") {
        Some((line, reason)) => (line, Some(reason.trim().to_owned())),
        None => (line, None),
    };
    let groups: Vec<Vec<&str>> = line.split('|').map(|group| group.split_whitespace().collect()).collect();
    let [head, resources, costs, matrices, best, hash] = &groups[..] else { return None };
    let [work, dtype, kernel, lanes] = head[..] else { return None };
    let [registers, shared, warps, in_flight] = resources[..] else { return None };
    let [instructions, once, bytes, read] = costs[..] else { return None };
    let [hmma, ldmatrix, shared_bytes] = matrices[..] else { return None };
    let [best_instructions, best_warps, best_shared] = best[..] else { return None };
    let [hash] = hash[..] else { return None };
    let float = |text: &str| text.parse::<f64>().ok().filter(|value| value.is_finite());
    Some(Row {
        work: work.to_owned(),
        dtype: dtype.to_owned(),
        kernel: kernel.to_owned(),
        lanes: lanes.parse().ok()?,
        registers: registers.parse().ok()?,
        shared: shared.parse().ok()?,
        warps: warps.parse().ok()?,
        in_flight: in_flight.parse().ok()?,
        counts: Counts {
            instructions: float(instructions)?,
            once: float(once)?,
            hmma: float(hmma)?,
            ldmatrix: float(ldmatrix)?,
            shared: float(shared_bytes)?,
            written: 0.0,
            in_flight: 0,
        },
        bytes: float(bytes)?,
        read: float(read)?,
        best: Best {
            instructions: float(best_instructions)?,
            warps: best_warps.parse().ok()?,
            shared: float(best_shared)?,
        },
        hash: hash.to_owned(),
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(work: &str) -> Row {
        Row {
            work: work.to_owned(),
            dtype: "bf16".to_owned(),
            kernel: "quantize_tiles".to_owned(),
            lanes: 1,
            registers: 80,
            shared: 10368,
            warps: 24,
            in_flight: 48,
            counts: Counts { instructions: 20.81, once: 1.5, shared: 2.0, ..Counts::default() },
            bytes: 4.0,
            read: 2.0,
            best: Best { instructions: 20.81, warps: 24, shared: 2.0 },
            hash: "0123456789ab".to_owned(),
            reason: None,
        }
    }

    #[test]
    fn a_written_table_reads_back() {
        let reasoned = Row { reason: Some("exact by #2 of the rules".to_owned()), ..sample("cast+T") };
        let table =
            Table { tools: "NVRTC 13".to_owned(), rows: vec![sample("a_long_name_of_a_work"), reasoned] };
        let text = write(&table);
        assert_eq!(read(&text).unwrap(), table, "{text}");
        assert!(text.lines().all(|line| !line.ends_with(' ')), "{text}");
    }

    #[test]
    fn a_damaged_row_is_an_error_with_its_line() {
        let text = write(&Table { tools: String::new(), rows: vec![sample("cast")] });
        let number = text.lines().count();
        for damaged in
            [text.replace("20.81", "NaN"), text.replace(" | 0123", " 0123"), text.replace("10368", "x")]
        {
            let error = read(&damaged).unwrap_err().to_string();
            assert_eq!(error, format!("sass.txt:{number}: not a row: run cargo xtask sass"));
            assert_eq!(readable(&damaged), (Table::default(), Some(error)));
        }
        assert_eq!(read("").unwrap(), Table::default());
    }
}
