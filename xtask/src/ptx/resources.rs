//! Reads the assembler's report about each kernel, and its complaints.
//!
//! Kernels are compiled with `-v`, so that one log holds both: the lines of the report are known, and every other line is
//! a complaint (spills, local memory, doubles, warnings of the compiler).

/// The resources that one kernel needs on one architecture.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Resources {
    pub(crate) kernel: String,
    pub(crate) registers: u32,
    /// Static shared memory in bytes.
    pub(crate) shared: u32,
}

/// The report, and all other lines.
pub(crate) fn read(log: &str) -> (Vec<Resources>, String) {
    let mut found: Vec<Resources> = Vec::new();
    let mut complaints = String::new();
    for line in log.lines().map(str::trim_end) {
        let Some(info) = line.strip_prefix("ptxas info    : ") else {
            if is_complaint(line) {
                complaints += line;
                complaints.push('\n');
            }
            continue;
        };
        if let Some(rest) = info.strip_prefix("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            found.push(Resources { kernel, ..Resources::default() });
        } else if let (Some(used), Some(last)) = (info.strip_prefix("Used "), found.last_mut()) {
            last.registers = number_before(used, " registers");
            last.shared = number_before(used, " bytes smem");
        }
    }
    found.sort_by(|a, b| a.kernel.cmp(&b.kernel));
    (found, complaints)
}

/// Also reads the line on stack and spills, so that they count where a warning is missing.
fn is_complaint(line: &str) -> bool {
    const CLEAN: &str = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    match line.strip_prefix("ptxas         .") {
        Some(rest) => rest.trim_start() != CLEAN,
        None => !line.is_empty(),
    }
}

/// The number in front of the first `unit`, 0 where there is none.
fn number_before(text: &str, unit: &str) -> u32 {
    let before = text.find(unit).map_or("", |end| &text[..end]);
    before.rsplit([' ', ',']).next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'toy_quantize' for 'sm_120'
ptxas info    : Function properties for toy_quantize
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 33.050 ms
ptxas info    : Compiling entry function 'toy_b' for 'sm_120'
ptxas info    : Function properties for toy_b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 15 registers, used 0 barriers, 376 bytes cmem[0]
ptxas info    : Compile time = 11.226 ms
";

    #[test]
    fn registers_and_shared_memory_are_read_and_a_clean_log_has_no_complaint() {
        let (found, complaints) = read(LOG);
        let row =
            |kernel: &str, registers, shared| Resources { kernel: kernel.to_owned(), registers, shared };
        assert_eq!(found, [row("toy_b", 15, 0), row("toy_quantize", 20, 128)]);
        assert_eq!(complaints, "");
    }

    #[test]
    fn warnings_of_compiler_and_assembler_and_spills_are_complaints() {
        let warning = "bad.cu(1): warning #177-D: variable \"unused\" was declared but never referenced";
        let spill = "ptxas warning : Registers are spilled to local memory in function 'sp', 508 bytes";
        let frame = "ptxas         .     1024 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
        let (_, complaints) = read(&format!("{warning}\n{LOG}\n{spill}\n{frame}\n"));
        assert_eq!(complaints, format!("{warning}\n{spill}\n{frame}\n"));
    }
}
