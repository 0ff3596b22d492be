//! `cargo xtask sass --peers`: estimates beside what `torch.compile` takes for the same work.
//!
//! `sass-peers.txt` names the works, what each consists of, and the least ratio that is wanted.

use super::results::{OURS, Results};
use super::table::Table;
use super::term::Sources;
use crate::workspace::{Result, root};

const FILE: &str = "fp8-kernels/ptx/sass-peers.txt";
const PEER: &str = "torch.compile";
const SECTION: &str = "memory";
const SIZES: [&str; 2] = ["8192x8192", "16384x4096"];

struct Work<'a> {
    name: &'a str,
    bar: f64,
    /// A sum in which `N` stands for the number of elements.
    sum: &'a str,
}

/// Prints the table; returns whether every ratio reaches its bar.
pub(super) fn print(table: &Table) -> Result<bool> {
    let results = Results::committed()?;
    let text = std::fs::read_to_string(root().join(FILE))?;
    let works = read(&text)?;
    let sources = Sources { results: &results, table };
    println!("µs on an H100: estimates from the counts of today, and rows of {}.", super::results::FILE);
    println!(
        "{:22} {:>12} {:>9} {:>8} {:>9} {PEER:>14} {:>6} {:>5}  {:8} from",
        "work", "shape", "estimate", "latency", "measured", "ratio", "bar", ""
    );
    let mut all = true;
    for size in SIZES {
        for work in &works {
            let sum = sources.sum(&work.sum.replace(" N", &format!(" {}", size.replace('x', "*"))))?;
            let case = format!("{} {size}", work.name);
            let peer = results.time(SECTION, &case, PEER)?;
            let measured = results.time(SECTION, &case, OURS)?;
            let ratio = peer / sum.time;
            let is_met = ratio >= work.bar;
            all &= is_met;
            println!(
                "{:22} {size:>12} {:>9.1} {:>8} {measured:>9.1} {peer:>14.1} {ratio:>6.2} {:>5.1}  {:8} {}",
                work.name,
                sum.time,
                if sum.with_latency > sum.time { format!("{:.1}", sum.with_latency) } else { String::new() },
                work.bar,
                if is_met { "met" } else { "missed" },
                sum.origin
            );
        }
    }
    println!(
        "latency: what the loads wait for, where that is more than the estimate; it is then the likelier time."
    );
    Ok(all)
}

/// `WORK | BAR | SUM`.
fn read(text: &str) -> Result<Vec<Work<'_>>> {
    let mut works = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [name, bar, sum] = cells[..] else {
            return Err(format!("{FILE}:{number}: WORK | BAR | SUM is wanted").into());
        };
        let bar = bar.parse().ok().filter(|bar: &f64| bar.is_finite());
        let bar = bar.ok_or_else(|| format!("{FILE}:{number}: the bar is no number"))?;
        works.push(Work { name, bar, sum });
    }
    Ok(works)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn works_are_read_and_damaged_lines_named() {
        let works = read("# head\ncast | 1.0 | estimate cast bf16 N\n").unwrap();
        assert_eq!((works[0].name, works[0].bar, works[0].sum), ("cast", 1.0, "estimate cast bf16 N"));
        let error = |line: &str| read(line).err().unwrap().to_string();
        assert_eq!(error("cast | 1.0"), format!("{FILE}:1: WORK | BAR | SUM is wanted"));
        assert_eq!(error("cast | NaN | x"), format!("{FILE}:1: the bar is no number"));
    }
}
