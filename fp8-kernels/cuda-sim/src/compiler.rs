//! Programs that NVRTC compiles, answered from snapshots: a program is found by the SHA-256 of its text.
//!
//! The PTX of a snapshot serves every architecture from 8.9 on: its `.target` is set to the one asked for. A kernel file with code for
//! single architectures has a second snapshot, for `a` and `f` targets from sm_100 on. The "CUBIN"
//! is that PTX in an ELF file ([`crate::image`]).

use core::ffi::c_int;
use std::collections::BTreeMap;

use crate::code::{Code, Outcome};
use crate::device::Target;
use crate::image;
use crate::snapshot::{self, Snapshot};

/// Architectures of NVRTC 13.0.
pub(crate) const ARCHS: [c_int; 12] = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

/// Programs that exist, and snapshots that were given at run time.
#[derive(Debug, Default)]
pub(crate) struct Compiler {
    programs: BTreeMap<u64, Program>,
    given: Vec<Snapshot>,
}

#[derive(Debug)]
pub(crate) struct Program {
    name: String,
    source: String,
    /// Headers that came with it: no snapshot has any.
    headers: usize,
    pub(crate) log: String,
    pub(crate) ptx: Option<String>,
    pub(crate) cubin: Option<Vec<u8>>,
}

impl Compiler {
    /// Programs that were not destroyed are nobody's any more.
    pub(crate) fn forget_programs(&mut self) {
        self.programs.clear();
    }

    pub(crate) fn programs(&self) -> usize {
        self.programs.len()
    }

    /// Adds a snapshot beside the built-in ones; it precedes them.
    pub(crate) fn give(&mut self, text: &str) -> Result<(), String> {
        self.given.insert(0, Snapshot::parse("the given text", text)?);
        Ok(())
    }

    pub(crate) fn create(&mut self, handle: u64, name: String, source: String, headers: usize) {
        let program = Program { name, source, headers, log: String::new(), ptx: None, cubin: None };
        self.programs.insert(handle, program);
    }

    pub(crate) fn destroy(&mut self, handle: u64) -> Outcome {
        self.programs.remove(&handle).map(|_| ()).ok_or(Code::NVRTC_INVALID_PROGRAM)
    }

    /// NVRTC, NVRTC_ERROR_INVALID_PROGRAM: the handle is null or destroyed.
    pub(crate) fn program(&mut self, handle: u64) -> Outcome<&mut Program> {
        self.programs.get_mut(&handle).ok_or(Code::NVRTC_INVALID_PROGRAM)
    }

    pub(crate) fn compile(&mut self, replacing: &[Snapshot], handle: u64, options: &[String]) -> Outcome {
        self.program(handle)?;
        let Self { programs, given } = self;
        let program = programs.get_mut(&handle).ok_or(Code::NVRTC_INVALID_PROGRAM)?;
        program.ptx = None;
        program.cubin = None;
        let (outcome, log) = match program.build(given, replacing, options) {
            Ok(()) => (Ok(()), String::new()),
            Err((code, log)) => (Err(code), log),
        };
        program.log = log;
        outcome
    }
}

impl Program {
    /// NVRTC, nvrtcCompileProgram: NVRTC_ERROR_INVALID_OPTION for an option it does not know, NVRTC_ERROR_COMPILATION for a
    /// program that does not compile; the log says why.
    fn build(
        &mut self,
        given: &[Snapshot],
        replacing: &[Snapshot],
        options: &[String],
    ) -> Result<(), (Code, String)> {
        let mut arch = None;
        let mut rest = Vec::new();
        for option in options {
            match option.strip_prefix("--gpu-architecture=").or_else(|| option.strip_prefix("-arch=")) {
                Some(name) => {
                    let invalid =
                        || format!("nvrtc: error: invalid value for --gpu-architecture (-arch): {name}\n");
                    arch = Some(Arch::parse(name).ok_or_else(|| (Code::NVRTC_INVALID_OPTION, invalid()))?);
                }
                None if is_known(option) => rest.push(option.as_str()),
                None => {
                    return Err((
                        Code::NVRTC_INVALID_OPTION,
                        format!("nvrtc: error: unrecognized option {option} found\n"),
                    ));
                }
            }
        }
        let refuse = |log: String| Err((Code::NVRTC_COMPILATION, log));
        // NVRTC's own default architecture.
        let arch = arch.unwrap_or(Arch { target: Target { number: 75, suffix: None }, real: false });
        let name = &self.name;
        let wanted = snapshot::hash(&self.source);
        let Some(found) = snapshot::find(given, replacing, &wanted, arch.target)
            .map_err(|log| (Code::NVRTC_COMPILATION, log))?
        else {
            return refuse(format!(
                "no snapshot of {name} with this text (SHA-256 {wanted}): run `cargo xtask ptx`\n"
            ));
        };
        if self.headers > 0 {
            return refuse(format!("{name}: a program with headers has no snapshot\n"));
        }
        if found.options != rest {
            let (theirs, ours) = (found.options.join(" "), rest.join(" "));
            return refuse(format!(
                "{name}: its snapshot was made with `{theirs}`, not `{ours}`: run `cargo xtask ptx`\n"
            ));
        }
        if arch.target.number < 89 {
            return refuse(format!(
                "{name}: FP8 conversions need sm_89 or later, not sm_{}\n",
                arch.target.number
            ));
        }
        let ptx = found.for_target(arch.target);
        // NVRTC, nvrtcGetCUBIN: there is one "only if a real architecture (sm_…) was specified".
        self.cubin = arch.real.then(|| image::cubin(&ptx, arch.target));
        self.ptx = Some(ptx);
        Ok(())
    }
}

/// `sm_90a` or `compute_90a`.
struct Arch {
    target: Target,
    real: bool,
}

impl Arch {
    fn parse(name: &str) -> Option<Self> {
        let (real, name) = match name.strip_prefix("compute_") {
            Some(rest) => (false, format!("sm_{rest}")),
            None => (true, name.to_owned()),
        };
        let target = Target::parse(&name)?;
        let suffix_exists = match target.suffix {
            None => true,
            Some('a') => target.number >= 90,
            Some(_) => target.number >= 100,
        };
        let exists = ARCHS.contains(&c_int::try_from(target.number).ok()?) && suffix_exists;
        exists.then_some(Self { target, real })
    }
}

/// Options of NVRTC that programs here may use; `--x` and `-x` are the same for all of them but those with one spelling.
fn is_known(option: &str) -> bool {
    const WITH_VALUE: [&str; 14] = [
        "std",
        "fmad",
        "maxrregcount",
        "ftz",
        "prec-sqrt",
        "prec-div",
        "use_fast_math",
        "ptxas-options",
        "Xptxas",
        "D",
        "I",
        "diag-suppress",
        "extra-device-vectorization",
        "define-macro",
    ];
    const ALONE: [&str; 10] = [
        "lineinfo",
        "generate-line-info",
        "device-debug",
        "G",
        "use_fast_math",
        "default-device",
        "dlto",
        "restrict",
        "no-source-include",
        "disable-warnings",
    ];
    let Some(name) = option.strip_prefix("--").or_else(|| option.strip_prefix('-')) else { return false };
    let glued = option.starts_with("-D") || option.starts_with("-I");
    glued || ALONE.contains(&name) || name.split_once('=').is_some_and(|(name, _)| WITH_VALUE.contains(&name))
}
