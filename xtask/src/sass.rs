//! `cargo xtask sass`: counts what the machine code of each kernel costs, and estimates times from the counts.
//!
//! NVRTC compiles each kernel file for sm_90a, as `cargo xtask ptx` does; `nvdisasm` lists the machine code, and one thread of each
//! case of `sass-cases.txt` is executed with the case's arguments. `cargo xtask test` checks the committed table without a compiler.

mod access;
mod cases;
mod count;
mod estimate;
mod execute;
mod float;
mod float16;
mod gate;
mod integer;
mod lanes;
mod layer;
mod listing;
mod memory;
mod occupancy;
mod operand;
mod packed;
mod peers;
mod results;
mod run;
mod signatures;
mod table;
mod term;
mod thread;
mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::process;
use crate::ptx;
use crate::workspace::{Result, root, shell};
use cases::{Case, Cases};
use table::{Best, Row, Table};
use tools::Nvdisasm;

/// The architecture that is counted: an H100's, as the table of registers names it.
const ARCHITECTURE: &str = "sm_90a";

#[derive(clap::Args)]
pub(crate) struct Sass {
    /// Counts only these works: cast+T, gelu+cast, …; default: those whose kernel or case has changed
    works: Vec<String>,
    /// Counts every case anew
    #[arg(long)]
    all: bool,
    /// Writes counts that are more than 5 % worse, with this reason beside them
    #[arg(long, value_name = "REASON")]
    accept: Option<String>,
    /// Only checks the committed counts, as `cargo xtask test` does; needs no compiler
    #[arg(long, conflicts_with_all = ["works", "all", "accept"])]
    check: bool,
    /// Adds up the launches of a TransformerLayer from the committed counts and results; counts nothing
    #[arg(long, conflicts_with_all = ["works", "all", "accept"])]
    layer: bool,
    /// Compares estimates with the measured rows of torch.compile; counts nothing
    #[arg(long, conflicts_with_all = ["works", "all", "accept"])]
    peers: bool,
    /// The folder of nvdisasm, or of a CUDA toolkit
    #[arg(long, value_name = "DIR")]
    cuda: Option<PathBuf>,
}

/// The committed files that counts depend on.
struct Committed {
    cases: Cases,
    table: Table,
    /// The PTX of each kernel.
    ptx: BTreeMap<String, String>,
    /// The kernel file of each kernel.
    files: BTreeMap<String, String>,
    /// A line of the table that cannot be read.
    damage: Option<String>,
}

impl Committed {
    fn read() -> Result<Self> {
        let folder = ptx::folder();
        let (mut ptx, mut files) = (BTreeMap::new(), BTreeMap::new());
        for path in crate::workspace::files(&folder)? {
            if path.extension().is_some_and(|end| end == "ptx") {
                let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let kernels = gate::kernels(&fs::read_to_string(&path)?);
                files.extend(kernels.keys().map(|kernel| (kernel.clone(), stem.clone())));
                ptx.extend(kernels);
            }
        }
        let table = fs::read_to_string(folder.join("sass.txt")).unwrap_or_default();
        let cases = fs::read_to_string(folder.join("sass-cases.txt"))?;
        let (table, damage) = table::readable(&table);
        Ok(Self { cases: cases::read(&cases)?, table, ptx, files, damage })
    }
}

pub(crate) fn run(options: &Sass) -> Result<ExitCode> {
    if options.check {
        println!("{}", check()?);
        return Ok(ExitCode::SUCCESS);
    }
    let committed = Committed::read()?;
    committed.cases.expect(&options.works)?;
    if options.layer || options.peers {
        let peers = !options.peers || peers::print(&committed.table)?;
        let layer = !options.layer || layer::print(&committed.table)?;
        return Ok(if peers && layer { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let unmatched = gate::unmatched(&committed.cases, &committed.ptx);
    let stale: Vec<&Case> =
        committed.cases.cases.iter().filter(|case| is_asked(options, case, &committed)).collect();
    let (counted, mut failures) = count(options, &committed, &stale)?;
    let mut table = Table { tools: tools(), rows: Vec::new() };
    let mut refused = 0;
    for case in &committed.cases.cases {
        let old = committed.table.row(&case.work, &case.dtype);
        let Some(mut row) = counted.iter().find(|row| row.name() == case.name()).cloned() else {
            table.rows.extend(old.cloned());
            continue;
        };
        if let Some(old) = old {
            row.best = gate::better(row.best, old.best);
            row.reason.clone_from(&old.reason);
        }
        let worse = gate::worse(&row);
        if worse.is_empty() {
            row.reason = None;
        } else if let Some(reason) = &options.accept {
            row.reason = Some(reason.clone());
        } else if row.reason.is_none() {
            refused += 1;
            println!("error: {}: worse: {}", row.name(), worse.join("; "));
            table.rows.extend(old.cloned());
            continue;
        }
        table.rows.push(row);
    }
    table.rows.sort_by(|a, b| (&a.work, &a.dtype).cmp(&(&b.work, &b.dtype)));
    fs::write(ptx::folder().join("sass.txt"), table::write(&table))?;
    for row in counted.iter().filter_map(|row| table.row(&row.work, &row.dtype)) {
        let counts = &row.counts;
        println!(
            "{:34} {:5} {:3} registers {:2} warps {:8.2} instructions + {:.2}",
            row.work, row.dtype, row.registers, row.warps, counts.instructions, counts.once
        );
    }
    for problem in &unmatched {
        println!("error: {problem}");
    }
    failures += unmatched.len() + refused;
    if refused > 0 {
        println!(
            "error: {refused} counts are worse and were not written: improve them, or give --accept REASON"
        );
    }
    println!("{} cases, {} counted, {failures} failures", committed.cases.cases.len(), counted.len());
    Ok(if failures > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The check of the committed counts, which needs no compiler.
///
/// # Errors
/// Whatever is wrong with them.
pub(crate) fn check() -> Result<String> {
    let committed = Committed::read()?;
    let mut problems = gate::problems(&committed.table, &committed.cases, &committed.ptx);
    problems.extend(committed.damage);
    if problems.is_empty() {
        return Ok(format!("{} cases", committed.table.rows.len()));
    }
    Err(format!("{} problems:\n{}", problems.len(), problems.join("\n")).into())
}

fn tools() -> String {
    let options = ptx::OPTIONS.join(" ");
    format!("NVRTC {} -arch={ARCHITECTURE} {options}, nvdisasm {}", ptx::nvrtc::VERSION, tools::VERSION)
}

fn is_asked(options: &Sass, case: &Case, committed: &Committed) -> bool {
    let Some(ptx) = committed.ptx.get(&case.kernel) else { return false };
    let is_fresh = || {
        let row = committed.table.row(&case.work, &case.dtype);
        row.is_some_and(|row| row.kernel == case.kernel && row.hash == gate::hash(ptx, case))
            && committed.table.tools == tools()
    };
    if options.works.is_empty() { options.all || !is_fresh() } else { options.works.contains(&case.work) }
}

/// Compiles the files of these cases and counts each; returns the rows and the number of cases that failed.
fn count(options: &Sass, committed: &Committed, cases: &[&Case]) -> Result<(Vec<Row>, usize)> {
    if cases.is_empty() {
        return Ok((Vec::new(), 0));
    }
    let sh = shell()?;
    let nvdisasm = Nvdisasm::find(&sh, options.cuda.as_deref())?;
    let nvrtc = ptx::nvrtc::Nvrtc::load(&sh)?;
    let kernels_file = root().join("fp8-kernels/src/backend/cuda/ops/kernels.rs");
    let signatures = signatures::read(&fs::read_to_string(kernels_file)?)?;
    let resources = ptx::resources_on(ARCHITECTURE)?;
    let stems: BTreeSet<&String> =
        cases.iter().filter_map(|case| committed.files.get(&case.kernel)).collect();
    let stems: Vec<&String> = stems.into_iter().collect();
    let compiled = process::each(&stems, 2, |_, stem| {
        let cubin = ptx::machine_code(&nvrtc, stem, ARCHITECTURE).map_err(|error| error.to_string())?;
        let sh = shell().map_err(|error| error.to_string())?;
        let listing = nvdisasm.listing(&sh, &cubin).map_err(|error| error.to_string())?;
        listing::kernels(&listing).map_err(|error| error.to_string())
    });
    let mut listings = BTreeMap::new();
    for kernels in compiled {
        listings.extend(kernels?);
    }
    let (mut rows, mut failures) = (Vec::new(), 0);
    for case in cases {
        let row = || -> Result<Row> {
            let kernel = &case.kernel;
            let missing = |what: &str| format!("sass: {}: {kernel} has no {what}", case.name());
            let listing = listings.get(kernel).ok_or_else(|| missing("machine code"))?;
            let signature = signatures.get(kernel).ok_or_else(|| missing("signature"))?;
            let resources = resources.get(kernel).ok_or_else(|| missing("row in registers.txt"))?;
            let threads = case.threads.unwrap_or(resources.threads);
            let counts = count::count(case, listing, signature, threads)?;
            let shared = resources.shared + case.shared;
            let warps = occupancy::warps(threads, resources.registers, shared);
            Ok(Row {
                work: case.work.clone(),
                dtype: case.dtype.clone(),
                kernel: kernel.clone(),
                lanes: case.lanes,
                registers: resources.registers,
                shared,
                warps,
                in_flight: counts.in_flight * u64::from(warps) * 32 / 1024,
                counts,
                bytes: case.bytes,
                read: (case.bytes - counts.written).max(0.0),
                best: Best { instructions: counts.instructions, warps, shared: counts.shared },
                hash: gate::hash(&committed.ptx[kernel], case),
                reason: None,
            })
        };
        match row() {
            Ok(row) => rows.push(row),
            Err(error) => {
                failures += 1;
                println!("error: {error}");
            }
        }
    }
    Ok((rows, failures))
}
