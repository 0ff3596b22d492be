//! `cargo xtask ptx`: compiles every kernel file with NVRTC, keeps its PTX as a snapshot and what it needs in a table.
//!
//! Snapshots are PTX of sm_89, the oldest architecture with FP8 conversions; they are shipped, simulated devices run
//! them, and tests read them. A file with code for single architectures has a second snapshot, for sm_100a, which is not
//! shipped. Snapshots have no `.loc`: which line of the source an instruction comes from is in a table that only the simulated
//! device has. All shipped architectures are assembled as well, and a spill, local memory, a double, a warning, or an
//! operation that may differ in its bits fails the task. A file that does not compile keeps its old snapshot.

pub(crate) mod nvrtc;
mod resources;
pub(crate) mod statements;
mod table;

#[path = "../../fp8-kernels/tests/snapshots/headers.rs"]
mod headers;
#[path = "../../fp8-kernels/tests/snapshots/rules.rs"]
mod rules;
#[path = "../../fp8-kernels/tests/snapshots/signatures.rs"]
mod signatures;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use ptx_interp::{lines_of, without_lines};
use sha2::{Digest, Sha256};

use crate::process;
use crate::workspace::{Result, root, shell};
use nvrtc::Nvrtc;
use table::{ARCHITECTURES, Cell, Row, SPECIFIC_ARCHITECTURES};

/// The options of every compilation besides the architecture, as the headers of snapshots name them.
pub(crate) const OPTIONS: [&str; 3] = ["-std=c++17", "-fmad=false", "-lineinfo"];
const GATES: [&str; 4] =
    ["warn-on-spills", "warn-on-local-memory-usage", "warn-on-double-precision-use", "-v"];
/// The macro that programs with code for single architectures contain, and no others: the loader looks for it, too.
const SPECIFIC: &str = "__CUDA_ARCH_FAMILY_SPECIFIC__";
/// NVRTC uses two threads well; more only take turns.
const THREADS: usize = 2;
/// Breaches of the rules that are printed for a file and an architecture.
const SHOWN: usize = 5;

#[derive(clap::Args)]
pub(crate) struct Ptx {
    /// Compiles only these kernel files: quantize, norm, …
    pub(crate) files: Vec<String>,
    /// Writes nothing; fails if a snapshot or the table would change
    #[arg(long)]
    pub(crate) check: bool,
    /// Also compiles files whose snapshots are up to date
    #[arg(long)]
    pub(crate) all: bool,
}

/// A kernel file, as the compiler gets it.
struct Source {
    /// `quantize.cu`.
    file: String,
    program: String,
}

impl Source {
    fn stem(&self) -> &str {
        self.file.trim_end_matches(".cu")
    }

    fn snapshot(&self) -> PathBuf {
        folder().join(format!("{}.ptx", self.stem()))
    }

    fn table_of_lines(&self) -> PathBuf {
        folder_of_lines().join(format!("{}.txt", self.stem()))
    }

    /// Whether GPUs from sm_100 on run code for their architecture alone.
    fn is_specific(&self) -> bool {
        self.program.contains(SPECIFIC)
    }

    /// The target that stands for an architecture.
    fn target(&self, arch: &str) -> String {
        let is_specific = self.is_specific() && SPECIFIC_ARCHITECTURES.contains(&arch);
        format!("{arch}{}", if is_specific { "a" } else { "" })
    }

    /// The architectures whose PTX is kept: their places among [`ARCHITECTURES`], and where the PTX and its table of lines are.
    fn kept(&self) -> Vec<(usize, PathBuf, PathBuf)> {
        let mut kept = vec![(0, self.snapshot(), self.table_of_lines())];
        let specific = ARCHITECTURES.iter().position(|arch| *arch == SPECIFIC_ARCHITECTURES[0]);
        if let Some(at) = specific.filter(|_| self.is_specific()) {
            let name = format!("{}.{}", self.stem(), self.target(ARCHITECTURES[at]));
            let ptx = folder_of_specific().join(format!("{name}.ptx"));
            kept.push((at, ptx, folder_of_lines().join(format!("{name}.txt"))));
        }
        kept
    }

    fn hash(&self) -> String {
        Sha256::digest(&self.program).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn header(&self) -> String {
        let (file, hash, options, version) = (&self.file, self.hash(), OPTIONS.join(" "), nvrtc::VERSION);
        format!(
            "// fp8-kernels kernel snapshot: {file}\n// source sha256: {hash}\n// options: {options}\n\
             // nvrtc: {version}\n"
        )
    }

    /// The head of the table of lines, but for the number of lines of the PTX.
    fn header_of_lines(&self) -> String {
        format!("// lines of the kernel snapshot: {}\n// source sha256: {}\n", self.file, self.hash())
    }

    /// The compiler gives the same output for the same program: one that was compiled without complaint stays so.
    fn is_fresh(&self, rows: &[Row]) -> bool {
        let mut rows = rows.iter().filter(|row| row.file == self.stem()).peekable();
        let is_good = rows.peek().is_some() && rows.all(|row| !row.is_bad);
        let starts = |path: PathBuf, header: String| {
            fs::read_to_string(path).is_ok_and(|text| text.starts_with(&header))
        };
        let is_kept = |(_, ptx, lines)| starts(ptx, self.header()) && starts(lines, self.header_of_lines());
        is_good && self.kept().into_iter().all(is_kept)
    }
}

/// The output of one compilation.
struct Output {
    /// Below the header of the snapshot, without `.loc`.
    ptx: String,
    /// The table of lines, made from the `.loc` directives.
    lines: String,
    resources: Vec<resources::Resources>,
    complaints: String,
}

pub(crate) fn run(options: &Ptx) -> Result<ExitCode> {
    let sources = sources()?;
    let before = table::read(&fs::read_to_string(folder().join("registers.txt")).unwrap_or_default());
    let stale: Vec<&Source> = asked(&sources, &options.files)?
        .into_iter()
        .filter(|source| options.all || options.check || !source.is_fresh(&before))
        .collect();
    let outputs = if stale.is_empty() { Vec::new() } else { compile(&Nvrtc::load(&shell()?)?, &stale) };

    let mut rows: Vec<Row> = before;
    rows.retain(|row| sources.iter().any(|source| source.stem() == row.file));
    let (mut files, mut failures) = (Vec::new(), 0);
    for (source, outputs) in stale.iter().zip(outputs) {
        match outputs.into_iter().collect::<Result<Vec<Output>>>() {
            Ok(outputs) => {
                let complaints = complain(source, &outputs);
                failures += complaints;
                for (at, path, path_of_lines) in source.kept() {
                    let Output { ptx, lines, .. } = &outputs[at];
                    files.push((path, Some(ptx.clone())));
                    files.push((path_of_lines, Some(lines.clone())));
                }
                rows.retain(|row| row.file != source.stem());
                rows.extend(rows_of(source.stem(), &outputs, complaints > 0));
            }
            Err(error) => {
                failures += 1;
                println!("error: {}: does not compile:\n{error}", source.file);
            }
        }
    }
    rows.sort_by(|a, b| (&a.file, &a.kernel).cmp(&(&b.file, &b.kernel)));
    for orphan in orphans(&sources)? {
        files.push((orphan, None));
    }
    let table = table::write(&rows);
    println!("{}", table.trim_end());
    files.push((folder().join("registers.txt"), Some(table)));

    let programs = sources.iter().map(|source| (source.stem(), source.program.as_str()));
    files.push((signatures_file(), Some(signatures::generate(programs)?)));

    let changed = write(&files, options.check)?;
    let counts = [sources.len(), stale.len(), rows.len(), changed, failures];
    let [all, compiled, kernels, changed, failures] = counts;
    println!("{all} files, {compiled} compiled, {kernels} kernels, {changed} changed, {failures} failures");
    let differs = options.check && changed > 0;
    if differs {
        println!("error: snapshots are stale: run cargo xtask ptx");
    }
    Ok(if failures > 0 || differs { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The sources with these names, or all; a name of none is an error.
fn asked<'a>(sources: &'a [Source], names: &[String]) -> Result<Vec<&'a Source>> {
    let names: Vec<&str> = names.iter().map(|name| name.trim_end_matches(".cu")).collect();
    if let Some(name) = names.iter().find(|name| sources.iter().all(|source| source.stem() != **name)) {
        let known = sources.iter().map(Source::stem).collect::<Vec<_>>().join(", ");
        return Err(format!("ptx: no kernel file {name}.cu: expected one of {known}").into());
    }
    Ok(sources.iter().filter(|source| names.is_empty() || names.contains(&source.stem())).collect())
}

/// The folder of the snapshots.
pub(crate) fn folder() -> PathBuf {
    root().join("fp8-kernels/ptx")
}

/// The folder of the snapshots for single architectures, which only simulated devices run.
fn folder_of_specific() -> PathBuf {
    root().join("fp8-kernels/cuda-sim/ptx")
}

/// The folder of the tables of lines, which are not shipped.
fn folder_of_lines() -> PathBuf {
    root().join("fp8-kernels/cuda-sim/lines")
}

/// The kernels' signatures in Rust.
fn signatures_file() -> PathBuf {
    root().join("fp8-kernels/src/backend/cuda/ops/kernels.rs")
}

fn sources() -> Result<Vec<Source>> {
    let kernels = root().join("fp8-kernels/src/backend/cuda/ops");
    let prelude = headers::prelude(&kernels)?;
    let mut sources = Vec::new();
    for path in crate::workspace::files(&kernels)? {
        if path.extension().is_some_and(|end| end == "cu") {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let text = fs::read_to_string(&path)?;
            let program = headers::expand(&prelude, &file, &text, |name| headers::read(&kernels, name))?;
            sources.push(Source { file, program });
        }
    }
    Ok(sources)
}

/// Compiles one kernel file to machine code, with the options of every compilation.
pub(crate) fn machine_code(nvrtc: &Nvrtc, stem: &str, arch: &str) -> Result<Vec<u8>> {
    let sources = sources()?;
    let source = sources.iter().find(|source| source.stem() == stem);
    let source = source.ok_or_else(|| format!("ptx: no kernel file {stem}.cu"))?;
    let mut options = vec![format!("-arch={arch}")];
    options.extend(OPTIONS.map(str::to_owned));
    let compiled = nvrtc.compile(&source.file, &source.program, &options)?;
    Ok(compiled.cubin.ok_or(compiled.log)?)
}

/// The resources of a kernel on one architecture, and its threads, as the committed table has them.
pub(crate) struct Resources {
    pub(crate) threads: u32,
    pub(crate) registers: u32,
    pub(crate) shared: u32,
}

/// The resources of all kernels on an architecture.
pub(crate) fn resources_on(arch: &str) -> Result<BTreeMap<String, Resources>> {
    let column = ARCHITECTURES.iter().position(|name| *name == arch);
    let column = column.ok_or_else(|| format!("ptx: {arch} is not in registers.txt"))?;
    let rows = table::read(&fs::read_to_string(folder().join("registers.txt"))?);
    let resources = rows.into_iter().filter_map(|row| {
        let Cell { registers, shared, .. } = *row.cells.get(column)?;
        Some((row.kernel, Resources { threads: row.threads, registers, shared }))
    });
    Ok(resources.collect())
}

/// Compiles all files for all architectures: an outer entry a file, an inner one an architecture.
fn compile(nvrtc: &Nvrtc, sources: &[&Source]) -> Vec<Vec<Result<Output>>> {
    let jobs: Vec<(&Source, String)> =
        sources.iter().flat_map(|&source| ARCHITECTURES.map(|arch| (source, source.target(arch)))).collect();
    // Errors cross threads as text.
    let done = process::each(&jobs, THREADS, |_, (source, arch)| {
        compile_one(nvrtc, source, arch).map_err(|error| error.to_string())
    });
    let mut outputs = done.into_iter().map(|output| output.map_err(Into::into));
    sources.iter().map(|_| outputs.by_ref().take(ARCHITECTURES.len()).collect()).collect()
}

/// PTX and machine code in one go: a real architecture gives both.
fn compile_one(nvrtc: &Nvrtc, source: &Source, arch: &str) -> Result<Output> {
    let mut options = vec![format!("-arch={arch}")];
    options.extend(OPTIONS.map(str::to_owned));
    options
        .extend(GATES.map(|gate| format!("--ptxas-options={}{gate}", if gate == "-v" { "" } else { "--" })));
    let compiled = nvrtc.compile(&source.file, &source.program, &options)?;
    let ptx = compiled.ptx.ok_or(compiled.log.as_str())?;
    let ptx = source.header() + &without_folders(&ptx);
    let short = without_lines(&ptx);
    let lines = lines_of(&ptx)?;
    let lines = format!("{}// PTX lines: {}\n{lines}", source.header_of_lines(), short.lines().count());
    let (resources, complaints) = resources::read(&compiled.log);
    Ok(Output { ptx: short, lines, resources, complaints })
}

/// `.file` lines name the program in the current folder of this process: only the name is kept.
fn without_folders(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    for line in ptx.lines() {
        match line.rsplit_once('/') {
            Some((head, name)) if line.trim_start().starts_with(".file") => {
                text += head.split('"').next().unwrap_or_default();
                text.push('"');
                text += name;
            }
            _ => text += line.trim_end(),
        }
        text.push('\n');
    }
    text
}

/// Prints what is wrong with a file on any architecture; returns how many complaints there are.
fn complain(source: &Source, outputs: &[Output]) -> usize {
    let mut count = 0;
    for (arch, output) in ARCHITECTURES.iter().zip(outputs) {
        if !output.complaints.is_empty() {
            count += 1;
            println!("error: {}: {arch}:\n{}", source.file, output.complaints);
        }
        let breaches = rules::breaches(source.stem(), &output.ptx);
        count += breaches.len();
        for breach in breaches.iter().take(SHOWN) {
            println!("error: {}: {arch}: PTX line {breach}", source.file);
        }
        if breaches.len() > SHOWN {
            println!("error: {}: {arch}: {} more like these", source.file, breaches.len() - SHOWN);
        }
    }
    count
}

fn rows_of(stem: &str, outputs: &[Output], is_bad: bool) -> Vec<Row> {
    let row = |first: &resources::Resources| {
        let cells = outputs.iter().map(|output| {
            let of_kernel = |ptx| {
                let all: Vec<_> = statements::statements(ptx);
                let of = all.into_iter().filter(|statement| statement.kernel == first.kernel);
                of.filter(statements::Statement::is_instruction).map(|s| s.text).collect::<Vec<_>>()
            };
            let (mine, reference) = (of_kernel(&output.ptx), of_kernel(&outputs[0].ptx));
            let resources = output.resources.iter().find(|row| row.kernel == first.kernel);
            let (registers, shared) = resources.map_or((0, 0), |row| (row.registers, row.shared));
            Cell { registers, shared, instructions: mine.len(), differs: mine != reference }
        });
        let cells = cells.collect();
        let threads = threads(&outputs[0].ptx, &first.kernel);
        Row { file: stem.to_owned(), kernel: first.kernel.clone(), threads, is_bad, cells }
    };
    outputs[0].resources.iter().map(row).collect()
}

/// The product of `.maxntid`, 0 where it is missing.
fn threads(ptx: &str, kernel: &str) -> u32 {
    let head = ptx.split_once(&format!(".entry {kernel}(")).map_or("", |(_, rest)| rest);
    let head = head.split('{').next().unwrap_or_default();
    let sizes = head.split_once(".maxntid").map_or("0", |(_, rest)| rest.lines().next().unwrap_or_default());
    sizes.split(',').map(|size| size.trim().parse().unwrap_or(1)).product()
}

/// Snapshots and tables of lines whose kernel file was removed.
fn orphans(sources: &[Source]) -> Result<Vec<PathBuf>> {
    let kept: Vec<PathBuf> =
        sources.iter().flat_map(Source::kept).flat_map(|(_, ptx, lines)| [ptx, lines]).collect();
    let mut found = Vec::new();
    for (folder, ending) in [(folder(), "ptx"), (folder_of_specific(), "ptx"), (folder_of_lines(), "txt")] {
        fs::create_dir_all(&folder)?;
        let mut files = crate::workspace::files(&folder)?;
        files.retain(|path| path.extension().is_some_and(|end| end == ending) && !kept.contains(path));
        found.extend(files);
    }
    Ok(found)
}

/// Writes, or removes where there is no text; returns how many files changed or would.
fn write(files: &[(PathBuf, Option<String>)], check: bool) -> Result<usize> {
    let mut changed = 0;
    for (path, text) in files {
        let name = path.strip_prefix(root()).unwrap_or(path).display();
        if fs::read_to_string(path).ok() == *text {
            continue;
        }
        changed += 1;
        match text {
            _ if check => println!("differs: {name}"),
            Some(text) => {
                // Whole or not at all: tests that run meanwhile read these files.
                let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
                fs::write(&temporary, text)?;
                fs::rename(temporary, path)?;
                println!("written: {name}");
            }
            None => {
                fs::remove_file(path)?;
                println!("removed: {name}");
            }
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_asked_for_by_name() {
        let sources =
            ["cast.cu", "norm.cu"].map(|file| Source { file: file.to_owned(), program: String::new() });
        let names = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let found = asked(&sources, &names).map_err(|error| error.to_string());
            found.map(|found| found.iter().map(|source| source.stem()).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).unwrap(), ["cast", "norm"]);
        assert_eq!(names(&["norm.cu", "norm"]).unwrap(), ["norm"]);
        assert!(names(&["cats"]).unwrap_err().contains("no kernel file cats.cu: expected one of cast, norm"));
    }

    #[test]
    fn file_lines_keep_the_name_alone() {
        let ptx = "\t.file\t1 \"/home/someone/cast.cu\"\n\tret;\n";
        assert_eq!(without_folders(ptx), "\t.file\t1 \"cast.cu\"\n\tret;\n");
        assert_eq!(without_folders("\t.file\t1 \"cast.cu\"\n"), "\t.file\t1 \"cast.cu\"\n");
    }

    #[test]
    fn threads_are_the_product_of_maxntid() {
        let ptx = ".visible .entry a(\n)\n.maxntid 32, 8, 1\n{\n}\n.visible .entry b(\n)\n{\n}\n";
        assert_eq!(threads(ptx, "a"), 256);
        assert_eq!(threads(ptx, "b"), 0);
    }
}
