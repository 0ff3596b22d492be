//! The environment variables of this crate. No other file reads any.
//!
//! | variable | type | default | what for |
//! |---|---|---|---|
//! | `RANK` | integer | none | this process, from 0 |
//! | `WORLD_SIZE` | integer | none | how many processes |
//! | `LOCAL_RANK` | integer | `RANK` | this process among those of its machine, which selects its GPU |
//! | `MASTER_ADDR` | host name or address | none | where rank 0 runs |
//! | `MASTER_PORT` | 1 to 65535 | none | the first of the ports where rank 0 may listen |
//! | `TORCHELASTIC_RUN_ID` | text | empty | the job: ranks of different jobs do not join each other; `none` is no job |
//! | `SLURM_JOB_ID`, `SLURM_STEP_ID` | text | empty | the job, where the one above names none: `123.0` |
//! | `PMIX_NAMESPACE` | text | empty | the job, where those above name none |
//! | `OMPI_COMM_WORLD_RANK`, `…_SIZE`, `…_LOCAL_RANK`, `…_LOCAL_SIZE` | integer | none | what Open MPI's `mpirun` says instead |
//! | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | integer | none | what `mpiexec` of MPICH and Intel MPI says instead |
//! | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID` | integer | none | what `srun` says instead |
//! | `SLURM_STEP_NODELIST` | list of hosts | none | the machines of `srun`'s processes; rank 0 is on the first |
//! | `FP8_DIST_TOKEN` | text | empty | the secret that a process needs to join |
//! | `FP8_PORT` | 1 to 65535 | none | the port where rank 0 listens, instead of those from `MASTER_PORT` on |
//!
//! White space around a value is ignored, and a value of white space alone counts as empty.

mod launcher;
mod value;

use crate::{Error, Result};
use std::env;
use std::ffi::OsString;
use std::fmt;
use value::{DEFAULT_PORT, INTEGER, PORT, number};

/// The rank of a process and the address of rank 0, which `torchrun` and other launchers pass to each process of a job.
///
/// [`detect`](Self::detect) takes it from the environment. A group of some of the job's processes is formed by
/// [`ProcessGroup::subgroup`](crate::ProcessGroup::subgroup) or [`split`](crate::ProcessGroup::split).
///
/// ```
/// use fp8_dist::Environment;
/// let alone = Environment { rank: 0, world_size: 1, local_rank: 0, ..Environment::on_this_machine(29_500) };
/// assert_eq!(alone.master_addr, "127.0.0.1");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Environment {
    /// The rank of this process: 0 to `world_size - 1`.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// The index of this process among those of its machine, which selects its GPU. [`read`](Self::read) uses the rank if
    /// `LOCAL_RANK` is not set, which is right for a job on one machine; a job on CPUs does not use it.
    pub local_rank: usize,
    /// The host name or address of rank 0.
    pub master_addr: String,
    /// The first port that rank 0 may listen on.
    pub master_port: u16,
    /// If true, rank 0 listens on [`master_port`](Self::master_port) only. If false, it uses the first free one of 16 ports that
    /// begin there: `torchrun` itself may occupy the first, and each group of a job needs one while it forms.
    pub exact_port: bool,
    /// The name of the job; empty if the launcher sets none. Ranks form a group only if this, [`master_port`](Self::master_port) and
    /// [`world_size`](Self::world_size) are equal. An empty name cannot tell two jobs with the same port and size apart: forming a
    /// group then takes a second longer, and a rank of one job may join the other.
    pub run_id: String,
    /// The variable that [`run_id`](Self::run_id) was read from, for error messages.
    pub run_id_variable: &'static str,
    /// A secret that a process needs to join. With an empty token, any process that can reach the port can join the group. The token
    /// is never sent: ranks prove that they know it. It authenticates joining only, not later traffic. [`Debug`](fmt::Debug) hides
    /// it.
    pub token: String,
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            world_size,
            local_rank,
            master_addr,
            master_port,
            exact_port,
            run_id,
            run_id_variable,
            token,
        } = self;
        f.debug_struct("Environment")
            .field("rank", rank)
            .field("world_size", world_size)
            .field("local_rank", local_rank)
            .field("master_addr", master_addr)
            .field("master_port", master_port)
            .field("exact_port", exact_port)
            .field("run_id", run_id)
            .field("run_id_variable", run_id_variable)
            .field("token", &if token.is_empty() { "none" } else { "hidden" })
            .finish()
    }
}

/// The variables that may name the job. The first one that is set counts.
const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
const SLURM_JOB_ID: &str = "SLURM_JOB_ID";
const SLURM_STEP_ID: &str = "SLURM_STEP_ID";
const PMIX_NAMESPACE: &str = "PMIX_NAMESPACE";
const TOKEN: &str = "FP8_DIST_TOKEN";

impl Environment {
    /// Reads the environment variables of this process. `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` (or `FP8_PORT`)
    /// must be set.
    ///
    /// # Errors
    /// A variable is missing or cannot be parsed, or a rank is not less than the world size. The error names the variable, its
    /// value and what is expected.
    pub fn read() -> Result<Self> {
        Self::from_variables(|name| env::var_os(name))
    }

    /// Finds out what has started this process, and reads its variables: torchrun or `fp8 launch` (`RANK`, `WORLD_SIZE`), Open MPI's
    /// `mpirun`, `mpiexec` of MPICH and Intel MPI, or `srun`. Without a launcher this is a job of one process.
    ///
    /// What a launcher does not say, variables may: `MASTER_ADDR`, `MASTER_PORT` and `LOCAL_RANK`. The defaults of `MASTER_ADDR`
    /// are the first host of `SLURM_STEP_NODELIST`, and for MPI 127.0.0.1 if all processes are on one machine. The default of
    /// `MASTER_PORT` is a port that depends on the run id, or 29500 without one.
    ///
    /// ```
    /// use fp8_dist::{Environment, tcp};
    /// use std::time::Duration;
    ///
    /// let environment = Environment::detect()?; // nothing has started this test
    /// assert_eq!((environment.rank, environment.world_size), (0, 1));
    /// let group = tcp("world", &environment, Duration::from_secs(30))?;
    /// group.barrier()?;
    /// # Ok::<(), fp8_dist::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`read`](Self::read); `RANK` or `WORLD_SIZE` that disagree with an MPI launcher or `srun`, unless torchrun has
    /// set them; MPI processes on several machines without `MASTER_ADDR`.
    pub fn detect() -> Result<Self> {
        Self::detect_from(|name| env::var_os(name))
    }

    fn detect_from(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let lookup = |name: &'static str| match trimmed(variable(name)) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
            Some(Err(bytes)) => {
                let value = Some(bytes.to_string_lossy().into_owned());
                Err(Error::Environment { name, value, remedy: "expected UTF-8".to_owned() })
            }
        };
        let by_hand = lookup("RANK")?.is_some() || lookup("WORLD_SIZE")?.is_some();
        // torchrun and `fp8 launch` start the processes themselves, whatever has started them.
        let is_torchrun = variable(RUN_ID).is_some();
        if by_hand && is_torchrun {
            return Self::from_variables(variable);
        }
        let found = launcher::find(&lookup)?;
        if by_hand {
            let environment = Self::from_variables(&variable)?;
            if let Some((launcher, [rank, world_size])) = found {
                environment.expect_equal("RANK", environment.rank, launcher.rank, rank)?;
                environment.expect_equal(
                    "WORLD_SIZE",
                    environment.world_size,
                    launcher.world_size,
                    world_size,
                )?;
            }
            return Ok(environment);
        }
        let alone = Self::on_this_machine(DEFAULT_PORT);
        let Some((launcher, numbers)) = found else { return Ok(alone) };
        let of_launcher = launcher.run.map(lookup).transpose()?.flatten();
        let (run_id_variable, run_id) = match launcher.run.zip(of_launcher) {
            Some(named) => named,
            None => run_id(&|name| Ok(lookup(name)?.unwrap_or_default()))?,
        };
        let launcher::Place { local_rank, master_addr, master_port, exact_port } =
            launcher.place(numbers, &run_id, &lookup)?;
        let [rank, world_size] = numbers;
        let environment = Self {
            rank,
            world_size,
            local_rank,
            master_addr,
            master_port,
            exact_port,
            run_id,
            run_id_variable,
            token: token(&variable)?,
        };
        environment.check()?;
        Ok(environment)
    }

    fn expect_equal(&self, name: &'static str, own: usize, other_name: &str, other: usize) -> Result<()> {
        if own == other {
            return Ok(());
        }
        let remedy = format!(
            "{other_name}={other}: two launchers disagree: unset RANK and WORLD_SIZE, or set them in each process"
        );
        Err(Error::Environment { name, value: Some(own.to_string()), remedy })
    }

    /// Returns the environment of a single process on this machine: rank 0 of 1 at 127.0.0.1, no run id, no token. Change the
    /// fields you need.
    #[must_use]
    pub fn on_this_machine(port: u16) -> Self {
        Self {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            master_addr: "127.0.0.1".to_owned(),
            master_port: port,
            exact_port: false,
            run_id: String::new(),
            run_id_variable: RUN_ID,
            token: String::new(),
        }
    }

    /// Returns true if the run id distinguishes this job from all others that may run at the same time. A Slurm job id without
    /// a step does not, because a script may start several jobs.
    pub(crate) fn names_one_run(&self) -> bool {
        !self.run_id.is_empty() && (self.run_id_variable != SLURM_JOB_ID || self.run_id.contains('.'))
    }

    /// Checks rank, world size and port.
    pub(crate) fn check(&self) -> Result<()> {
        if self.world_size == 0 {
            let remedy = "expected the number of processes, at least 1".to_owned();
            return Err(Error::Environment { name: "WORLD_SIZE", value: Some("0".to_owned()), remedy });
        }
        self.expect_in_world("RANK", self.rank)?;
        if self.master_port == 0 {
            let remedy = PORT.to_owned();
            return Err(Error::Environment { name: "MASTER_PORT", value: Some("0".to_owned()), remedy });
        }
        Ok(())
    }

    fn expect_in_world(&self, name: &'static str, rank: usize) -> Result<()> {
        if rank < self.world_size {
            return Ok(());
        }
        let remedy = format!("WORLD_SIZE={}: expected 0 to {}", self.world_size, self.world_size - 1);
        Err(Error::Environment { name, value: Some(rank.to_string()), remedy })
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let text = |name| {
            let error =
                |value, remedy: &str| Err(Error::Environment { name, value, remedy: remedy.to_owned() });
            match trimmed(variable(name)) {
                None => error(None, "start the processes with torchrun, or set the variable as it does"),
                Some(Ok(text)) if text.is_empty() => error(Some(text), "expected a value"),
                Some(Ok(text)) => Ok(text),
                Some(Err(bytes)) => error(Some(bytes.to_string_lossy().into_owned()), "expected UTF-8"),
            }
        };
        // Empty where it is not set.
        let is_set = |name| trimmed(variable(name)).is_some_and(|value| value != Ok(String::new()));
        let optional = |name| if is_set(name) { text(name) } else { Ok(String::new()) };
        let (run_id_variable, run_id) = run_id(&optional)?;
        let token = token(&variable)?;
        let exact_port = is_set("FP8_PORT");
        let rank = number("RANK", text("RANK")?, INTEGER)?;
        let environment = Self {
            rank,
            world_size: number("WORLD_SIZE", text("WORLD_SIZE")?, INTEGER)?,
            local_rank: match variable("LOCAL_RANK") {
                None => rank,
                Some(_) => number("LOCAL_RANK", text("LOCAL_RANK")?, INTEGER)?,
            },
            master_addr: text("MASTER_ADDR")?,
            master_port: match exact_port {
                true => number("FP8_PORT", text("FP8_PORT")?, PORT)?,
                false => number("MASTER_PORT", text("MASTER_PORT")?, PORT)?,
            },
            exact_port,
            run_id,
            run_id_variable,
            token,
        };
        environment.check()?;
        // Of all processes of the machine: by hand, a group may have fewer.
        environment.expect_in_world("LOCAL_RANK", environment.local_rank)?;
        Ok(environment)
    }
}

fn token(variable: impl Fn(&str) -> Option<OsString>) -> Result<String> {
    trimmed(variable(TOKEN)).unwrap_or(Ok(String::new())).map_err(|_| Error::Environment {
        name: TOKEN,
        value: Some("…".to_owned()), // a secret
        remedy: "expected UTF-8".to_owned(),
    })
}

/// The id of the run and the variable that names it.
fn run_id(optional: &impl Fn(&'static str) -> Result<String>) -> Result<(&'static str, String)> {
    let torch = optional(RUN_ID)?;
    // What torchrun says where it was given no name.
    if !torch.is_empty() && torch != "none" {
        return Ok((RUN_ID, torch));
    }
    let (job, step) = (optional(SLURM_JOB_ID)?, optional(SLURM_STEP_ID)?);
    if !job.is_empty() {
        return Ok((SLURM_JOB_ID, if step.is_empty() { job } else { format!("{job}.{step}") }));
    }
    let namespace = optional(PMIX_NAMESPACE)?;
    Ok(if namespace.is_empty() { (RUN_ID, String::new()) } else { (PMIX_NAMESPACE, namespace) })
}

/// The text of a variable without the white space around it, as launchers and scripts leave it; the bytes if it is not UTF-8.
fn trimmed(value: Option<OsString>) -> Option<std::result::Result<String, OsString>> {
    Some(value?.into_string().map(|text| text.trim().to_owned()))
}

#[cfg(test)]
mod tests;
