//! The machine that a result belongs to.

use std::fs;

use fp8_nn::fp8_kernels::CpuPath;
use serde::Serialize;

use crate::load::Load;

/// CPU features that decide which matrix kernels a library can run.
const FEATURES: [&str; 16] = [
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
];

/// A machine is quiet if other processes use less of its CPU time.
const QUIET: f64 = 0.02;

/// The machine, as results show it.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    cpu: String,
    features: Vec<String>,
    cores: usize,
    /// The instructions that our CPU backend uses.
    path: String,
    /// Names and versions of what was measured.
    libraries: Vec<String>,
    /// The share of the CPU time that other processes used during the measurements, if it is known.
    #[serde(rename = "cpu_share_of_other_processes")]
    others: Option<f64>,
    /// Clock ticks of other processes, and all.
    #[serde(skip)]
    ticks: [f64; 2],
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self::of(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
    }

    /// Reads Linux's `/proc/cpuinfo`.
    fn of(info: &str) -> Self {
        let field = |name: &str| {
            let line = info.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim())
        };
        let flags: Vec<&str> = field("flags").or(field("Features")).unwrap_or("").split(' ').collect();
        let features = FEATURES.into_iter().filter(|feature| flags.contains(feature));
        let model = ["cpu family", "model\t", "stepping"].map(|name| field(name).unwrap_or("?"));
        let [family, model, stepping] = model;
        let cpu = match field("model name") {
            Some(name) => format!("{name} (family {family}, model {model}, stepping {stepping})"),
            None => std::env::consts::ARCH.to_owned(),
        };
        Self {
            cpu,
            features: features.map(str::to_owned).collect(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            path: CpuPath::current().map_or_else(|error| error.to_string(), |path| path.to_string()),
            libraries: Vec::new(),
            others: None,
            ticks: [0.0; 2],
        }
    }

    /// Adds the libraries that a worker names.
    pub(crate) fn add(&mut self, library: &str) {
        if !self.libraries.iter().any(|known| known == library) {
            self.libraries.push(library.to_owned());
        }
    }

    /// Adds the share of the CPU time that other processes used between two moments of a measurement.
    pub(crate) fn add_load(&mut self, [before, after]: [Option<Load>; 2]) {
        if let (Some(before), Some(after)) = (before, after) {
            let [others, all] = after.others_since(&before);
            self.ticks = [self.ticks[0] + others, self.ticks[1] + all];
            self.others = Some(self.ticks[0] / self.ticks[1].max(1.0));
        }
    }

    /// Describes the machine, and warns if it was not quiet.
    pub(crate) fn line(&self) -> String {
        let Self { cpu, features, cores, path, libraries, others, .. } = self;
        let features = if features.is_empty() { "unknown".to_owned() } else { features.join(" ") };
        let libraries = libraries.join(", ");
        let warning = match others {
            Some(share) if *share > QUIET => format!(
                "\n\nOther processes used {:.0} % of the CPU time: repeat this on a quiet machine.",
                share * 100.0
            ),
            _ => String::new(),
        };
        format!("{cpu}, {cores} cores; features: {features}; our path: {path}; {libraries}{warning}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_of_both_architectures_are_described() {
        let x86 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\nflags\t\t: \
            fpu fma avx2 avx512f avx512_bf16 rdpid\n";
        let machine = Machine::of(x86);
        assert_eq!(machine.cpu, "AMD EPYC (family 25, model 17, stepping 1)");
        assert_eq!(machine.features, ["avx2", "fma", "avx512f", "avx512_bf16"]);
        let arm = Machine::of("processor\t: 0\nFeatures\t: fp asimd bf16 sve\n");
        assert_eq!(arm.features, ["asimd", "bf16", "sve"]);
        assert!(Machine::of("").line().contains("features: unknown"));
        let mut busy = arm;
        assert!(!busy.line().contains("Other processes"));
        busy.others = Some(0.31);
        assert!(
            busy.line()
                .ends_with("Other processes used 31 % of the CPU time: repeat this on a quiet machine.")
        );
    }
}
