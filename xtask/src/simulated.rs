//! `cargo xtask simulated`: the runs of the simulated GPU that `cargo xtask test` has no time for.

mod trainings;

use std::process::ExitCode;

use xshell::{Shell, cmd};

use crate::report::Report;
use crate::workspace::{Result, shell};
use crate::{artifact, gpu_test};

pub(crate) fn run() -> Result<ExitCode> {
    if !cfg!(target_os = "linux") {
        return Err("simulated: the simulated GPU is a library of Linux".into());
    }
    let sh = shell()?;
    let mut report = Report::default();
    report.step("kernels, FP8 sums of fewer bits", || fewer_bits(&sh));
    // Whether quantized gathers carry a transposed copy depends on the architecture; `test` runs them on sm_90.
    report.step("NCCL and gathers on sm_89 and sm_100", || gpu_test::simulated(&sh, "fp8-dist", &[89, 100]));
    report.step("training and golden data", || trainings::run(&sh));
    Ok(if report.finish() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// About as many bits as the tensor cores of Ada and Hopper keep.
fn fewer_bits(sh: &Shell) -> Result<String> {
    let program = artifact::conformance(sh)?;
    for cases in ["cuda-sim::gemm_fp8", "cuda-sim::linear"] {
        cmd!(sh, "{program} {cases}").env("FP8_SIM_FP8_SUM_BITS", "13").run()?;
    }
    Ok(String::new())
}
