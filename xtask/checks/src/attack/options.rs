//! The options of an attack, and its parts.

use std::path::PathBuf;

/// The value of `--device` for the simulated GPU.
pub(crate) const SIMULATED: &str = "cuda-sim";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Calls of operations
    Operations,
    /// Mutated checkpoints
    Files,
    /// Processes killed while they save
    Kills,
    /// Training that is saved and loaded at random places
    Sequences,
}

impl Part {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Operations => "operations",
            Self::Files => "files",
            Self::Kills => "kills",
            Self::Sequences => "sequences",
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct Attack {
    /// Attacks for this many minutes instead of running the full number of cases
    #[arg(long, value_name = "N")]
    pub(crate) minutes: Option<u64>,
    /// Seed of the random cases
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Runs only this part
    #[arg(long)]
    pub(crate) only: Option<Part>,
    /// Device to attack: cpu, cuda-sim, or cuda:N on a machine with a GPU [default: cpu and cuda-sim]
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// Repeats one case and prints what it does
    #[arg(long, value_name = "NUMBER")]
    pub(crate) at: Option<u64>,
    /// Attacks with a few cases of each part, for a few seconds
    #[arg(long, conflicts_with = "minutes")]
    pub(crate) short: bool,
    /// Time limit for a case [default: 30 on the CPU, 180 on a GPU]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) limit: Option<u64>,
    /// Folder with the simulated GPU's library under the names of NVIDIA's
    #[arg(long, hide = true)]
    pub(crate) libraries: Option<PathBuf>,
    /// This is a process that attacks
    #[arg(long, hide = true)]
    pub(crate) child: bool,
    #[arg(long, hide = true, default_value_t = 0)]
    pub(crate) first: u64,
    #[arg(long, hide = true, default_value_t = 0)]
    pub(crate) last: u64,
    #[arg(long, hide = true, default_value_t = 1)]
    pub(crate) stride: u64,
    /// Folder in which the process writes files until it is killed
    #[arg(long, hide = true)]
    pub(crate) folder: Option<PathBuf>,
}

impl Attack {
    pub(crate) fn part(&self) -> Part {
        self.only.unwrap_or(Part::Operations)
    }

    /// The device as the library names it.
    pub(crate) fn device_name(&self) -> &str {
        match self.device.as_deref() {
            None => "cpu",
            Some(SIMULATED) => "cuda:0",
            Some(name) => name,
        }
    }
}
