//! `cargo xtask sass --layer`: the launches of a TransformerLayer, forward and backward, with the time of each: as measured, and as
//! estimated from the kernels of today.
//!
//! `sass-layer.txt` names the works. Its launches must be those that `fp8-nn/tests/layer_launches.txt` records of the layer on the
//! simulated GPU, with a cuDNN whose backward pass of attention is used and with one that has none, so that a layer that launches
//! something else is noticed.

use std::collections::BTreeMap;

use super::results::Results;
use super::table::Table;
use super::term::{Sources, Sum};
use crate::workspace::{Result, root};

const PLAN: &str = "fp8-kernels/ptx/sass-layer.txt";
const RECORD: &str = "fp8-nn/tests/layer_launches.txt";
/// The bars of the plan in µs: "then" with our own backward pass of attention, and with cuDNN's. "now" is within 3 % of what was measured.
const OWN: f64 = 23_300.0;
const CUDNN: f64 = 21_400.0;
const NOW: f64 = 0.03;

/// The column that a line belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    /// As measured.
    Now,
    Then,
    /// "Then", with our own backward pass of attention.
    Own,
    /// "Then", with cuDNN's.
    Cudnn,
}

#[derive(Debug)]
struct Line<'a> {
    column: Column,
    work: &'a str,
    launches: u64,
    /// The launches that the record has of it: kernels and calls of libraries.
    recorded: BTreeMap<&'a str, u64>,
    sum: &'a str,
}

/// Prints the table; returns whether all bars are met.
pub(super) fn print(table: &Table) -> Result<bool> {
    let results = Results::committed()?;
    let plan = std::fs::read_to_string(root().join(PLAN))?;
    let record = std::fs::read_to_string(root().join(RECORD))?;
    let lines = read(&plan)?;
    let sources = Sources { results: &results, table };
    let mut sums = Vec::new();
    for line in &lines {
        sums.push(sources.sum(line.sum)?);
    }
    let is = |column: &[Column]| {
        lines.iter().zip(&sums).filter(|(line, _)| column.contains(&line.column)).collect()
    };
    let columns_of: [(&str, Vec<(&Line<'_>, &Sum)>); 4] = [
        ("now, as measured", is(&[Column::Now])),
        ("then, estimated", is(&[Column::Then])),
        ("then, own backward of attention", is(&[Column::Own])),
        ("then, cuDNN's backward of attention", is(&[Column::Cudnn])),
    ];
    let total = |columns: &[&Vec<(&Line<'_>, &Sum)>]| -> (u64, f64) {
        let all = columns.iter().flat_map(|lines| lines.iter());
        all.fold((0, 0.0), |(launches, time), (line, sum)| (launches + line.launches, time + sum.time))
    };
    println!(
        "TransformerLayer, hidden 4096, ffn 16384, s 2048, b 8, bf16, causal, GELU, LayerNorm, bias; forward + backward."
    );
    println!("Times in µs on an H100. Measured rows are those of {}.", super::results::FILE);
    for (name, lines) in &columns_of {
        println!("\n{name}");
        println!("  {:46} {:>8} {:>9}  from", "work", "launches", "µs");
        for (line, sum) in lines {
            println!(
                "  {:46} {:>8} {:>9.0}  {}",
                line.work,
                line.launches,
                sum.time,
                shortened(&sum.origin, 60)
            );
        }
        let (launches, time) = total(&[lines]);
        println!("  {:46} {launches:>8} {time:>9.0}", "sum");
    }
    let (launches, now) = total(&[&columns_of[0].1]);
    let measured = results.time("layer", "h4096 s2048 b8 fp8 graph", super::results::OURS)?;
    let own = total(&[&columns_of[1].1, &columns_of[2].1]);
    let cudnn = total(&[&columns_of[1].1, &columns_of[3].1]);
    println!("\n{:56} {:>8} {:>9}  {:>18}", "sum", "launches", "µs", "bar");
    let mut all = true;
    let mut judge = |name: &str, (launches, time): (u64, f64), is_met: bool, bar: &str| {
        all &= is_met;
        let verdict = if is_met { "met" } else { "missed" };
        println!("{name:56} {launches:>8} {time:>9.0}  {bar:>18}  {verdict}");
    };
    let bar = format!("{measured:.0} ± {:.0} %", 100.0 * NOW);
    judge("now, beside the measured layer", (launches, now), (now / measured - 1.0).abs() <= NOW, &bar);
    judge("then, with our own backward of attention (estimate)", own, own.1 <= OWN, &format!("{OWN:.0}"));
    judge(
        "then, with cuDNN's backward of attention (estimate)",
        cudnn,
        cudnn.1 <= CUDNN,
        &format!("{CUDNN:.0}"),
    );
    let latency = |columns: [usize; 2]| -> f64 {
        columns.iter().flat_map(|column| &columns_of[*column].1).map(|(_, sum)| sum.with_latency).sum()
    };
    let (own, cudnn) = (latency([1, 2]), latency([1, 3]));
    let name = "then, where loads wait as in 2026-11; with cuDNN's";
    println!("{name:56} {:>8} {own:>9.0}  {cudnn:>18.0}", "");
    let differences = differences(&lines, &recorded(&record)?);
    for difference in &differences {
        println!("error: {difference}");
    }
    Ok(all && differences.is_empty())
}

/// A text that is at most so long; what is cut is marked.
fn shortened(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.to_owned();
    }
    text.chars().take(length - 1).chain(['…']).collect()
}

/// `now | WORK | LAUNCHES | SUM`; for the others `then | WORK | LAUNCHES | KERNEL N, … | SUM`.
fn read(text: &str) -> Result<Vec<Line<'_>>> {
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let problem = |what: &str| format!("{PLAN}:{number}: {what}");
        let column = match cells[0] {
            "now" => Column::Now,
            "then" => Column::Then,
            "own" => Column::Own,
            "cudnn" => Column::Cudnn,
            _ => return Err(problem("now, then, own or cudnn is wanted").into()),
        };
        let (work, launches, kernels, sum) = match (column, &cells[1..]) {
            (Column::Now, [work, launches, sum]) => (work, launches, "", sum),
            (Column::Now, _) | (_, [] | [_] | [_, _] | [_, _, _]) => {
                return Err(problem("a cell is missing, or there is one too many").into());
            }
            (_, [work, launches, kernels, sum]) => (work, launches, *kernels, sum),
            _ => return Err(problem("a cell is missing, or there is one too many").into()),
        };
        let launches = launches.parse().map_err(|_| problem("a number of launches is wanted"))?;
        let mut recorded = BTreeMap::new();
        for part in kernels.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let count = part.split_once(' ').and_then(|(name, count)| Some((name, count.parse().ok()?)));
            let (name, count): (&str, u64) = count.ok_or_else(|| problem("NAME NUMBER is wanted"))?;
            *recorded.entry(name).or_default() += count;
        }
        lines.push(Line { column, work, launches, recorded, sum });
    }
    Ok(lines)
}

/// The launches of a layer, by name.
type Launches<'a> = BTreeMap<&'a str, u64>;

/// The launches of the record, with our own backward pass of attention and with cuDNN's: `NAME COUNT COUNT` lines.
fn recorded(text: &str) -> Result<[Launches<'_>; 2]> {
    let mut both = [Launches::new(), Launches::new()];
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let problem = || format!("{RECORD}: {line}: NAME COUNT COUNT is wanted");
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, own, cudnn] = words[..] else { return Err(problem().into()) };
        for (launches, count) in both.iter_mut().zip([own, cudnn]) {
            launches.insert(name, count.parse().map_err(|_| problem())?);
        }
    }
    Ok(both)
}

/// Names launches of which the plan has another number than the record.
fn differences(lines: &[Line<'_>], [own, cudnn]: &[Launches<'_>; 2]) -> Vec<String> {
    let mut all = differences_of(lines, Column::Own, own);
    for difference in differences_of(lines, Column::Cudnn, cudnn) {
        if !all.contains(&difference) {
            all.push(difference);
        }
    }
    all
}

/// Lines `then` and those of `column` together are a layer.
fn differences_of(lines: &[Line<'_>], column: Column, record: &Launches<'_>) -> Vec<String> {
    let mut planned = Launches::new();
    for line in lines.iter().filter(|line| line.column == Column::Then || line.column == column) {
        for (name, count) in &line.recorded {
            *planned.entry(name).or_default() += count;
        }
    }
    let names: std::collections::BTreeSet<&str> = planned.keys().chain(record.keys()).copied().collect();
    let count = |of: &Launches<'_>, name: &str| of.get(name).copied().unwrap_or(0);
    names
        .into_iter()
        .filter(|name| count(&planned, name) != count(record, name))
        .map(|name| {
            let (planned, recorded) = (count(&planned, name), count(record, name));
            format!("{name}: {planned} in {PLAN}, {recorded} in {RECORD}, which the layer's test writes")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# a comment
now | products | 12 | row gemm/fp8-rs/a
then | norms | 32 | norm_rows 2, norm_tiles 2 | estimate norm bf16 8*8
own | attention | 3 | attention 1 | row attention/fp8-rs/b
cudnn | attention | 1 | execute 1 | given 2300 until measured
";

    #[test]
    fn the_plan_and_the_record_are_compared() {
        let lines = read(TEXT).unwrap();
        assert_eq!(lines.len(), 4);
        let record = "# head\nattention 1 0\nexecute 0 1\nnorm_rows 2 2\nnorm_tiles 2 2\n";
        assert_eq!(differences(&lines, &recorded(record).unwrap()), [""; 0]);
        let other = record.replace("norm_tiles 2 2", "norm_tiles 1 2\nsplit_copy 6 6");
        assert_eq!(
            differences(&lines, &recorded(&other).unwrap()),
            [
                format!("norm_tiles: 2 in {PLAN}, 1 in {RECORD}, which the layer's test writes"),
                format!("split_copy: 0 in {PLAN}, 6 in {RECORD}, which the layer's test writes"),
            ]
        );
    }

    #[test]
    fn a_damaged_plan_or_record_is_an_error() {
        let error = |line: &str| read(line).unwrap_err().to_string();
        assert_eq!(error("later | a | 1 | b"), format!("{PLAN}:1: now, then, own or cudnn is wanted"));
        for line in
            ["now | a | 1", "now | a | 1 | b | c", "then | a | 1 | b", "then | a | 1 | b | c | d", "own"]
        {
            assert_eq!(error(line), format!("{PLAN}:1: a cell is missing, or there is one too many"));
        }
        assert_eq!(error("now | a | one | b"), format!("{PLAN}:1: a number of launches is wanted"));
        assert_eq!(error("then | a | 1 | kernel | b"), format!("{PLAN}:1: NAME NUMBER is wanted"));
        let error = recorded("kernel 1\n").unwrap_err().to_string();
        assert_eq!(error, format!("{RECORD}: kernel 1: NAME COUNT COUNT is wanted"));
    }
}
