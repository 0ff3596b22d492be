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

use crate::{Error, Result};
use std::env;
use std::ffi::OsString;
use std::fmt;

/// The rank of a process and the address of rank 0, which `torchrun` and other launchers pass to each process of a job.
///
/// [`read`](Self::read) takes it from the environment. For a group of some of the job's processes, set the fields yourself: the
/// rank within that group, its size, and the address of its rank 0.
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
        let (run_id_variable, run_id) = run_id(&|name| Ok(lookup(name)?.unwrap_or_default()))?;
        let token = token(&variable)?;
        launcher.fill(numbers, Self { run_id, run_id_variable, token, ..alone }, &lookup)
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

/// torchrun's default.
const DEFAULT_PORT: u16 = 29_500;
const INTEGER: &str = "expected an integer from 0 on";
const PORT: &str = "expected a port from 1 to 65535";

fn number<T: std::str::FromStr>(name: &'static str, text: String, remedy: &str) -> Result<T> {
    let wrong = |_| Error::Environment { name, value: Some(text.clone()), remedy: remedy.to_owned() };
    text.parse().map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-0"),
        ("MASTER_PORT", "29500"),
    ];

    fn read(changes: &[(&str, Option<&str>)]) -> Result<Environment> {
        Environment::from_variables(|name| {
            let changed = changes.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            let usual = || TORCHRUN.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            changed.unwrap_or_else(usual).map(OsString::from)
        })
    }

    #[test]
    fn torchruns_variables() {
        let environment = read(&[]).unwrap();
        let expected = Environment {
            rank: 3,
            world_size: 4,
            local_rank: 1,
            master_addr: "node-0".into(),
            master_port: 29_500,
            exact_port: false,
            run_id: String::new(),
            run_id_variable: "TORCHELASTIC_RUN_ID",
            token: String::new(),
        };
        assert_eq!(environment, expected);
        for id in ["", "night 7"] {
            assert_eq!(read(&[("TORCHELASTIC_RUN_ID", Some(id))]).unwrap().run_id, id);
        }
        let environment = read(&[("FP8_PORT", Some("4000"))]).unwrap();
        assert_eq!((environment.master_port, environment.exact_port), (4000, true));
    }

    fn detect(variables: &[(&str, &str)]) -> Result<Environment> {
        Environment::detect_from(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(*value))
        })
    }

    const MPIRUN: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_NAMESPACE", "prterun-node-7"),
    ];
    const MPIEXEC: [(&str, &str); 4] =
        [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "4")];
    const SRUN: [(&str, &str); 6] = [
        ("SLURM_PROCID", "2"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_NODELIST", "node[07-08]"),
        ("SLURM_JOB_ID", "123"),
        ("SLURM_STEP_ID", "5"),
    ];

    #[test]
    fn launchers_are_told_apart() {
        let shown = |variables: &[(&str, &str)]| {
            let found = detect(variables).unwrap();
            (found.rank, found.world_size, found.local_rank, found.master_addr, found.run_id)
        };
        let here = "127.0.0.1".to_owned();
        assert_eq!(shown(&[]), (0, 1, 0, here.clone(), String::new()));
        assert_eq!(shown(&TORCHRUN), (3, 4, 1, "node-0".to_owned(), String::new()));
        assert_eq!(shown(&MPIRUN), (1, 4, 1, here.clone(), "prterun-node-7".to_owned()));
        assert_eq!(shown(&MPIEXEC), (3, 4, 3, here.clone(), String::new()));
        assert_eq!(shown(&SRUN), (2, 4, 0, "node07".to_owned(), "123.5".to_owned()));
        // A batch script of Slurm's, which no srun has started.
        assert_eq!(shown(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), (0, 1, 0, here, String::new()));
        // mpirun starts its daemons with srun.
        assert_eq!(shown(&[&MPIRUN[..], &SRUN].concat()).0, 1);
        // torchrun on every machine, by srun or mpirun.
        let torchrun = [&TORCHRUN[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(shown(&[&torchrun[..], &SRUN].concat()).0, 3);
        assert_eq!(shown(&[&torchrun[..], &MPIRUN].concat()).0, 3);
        // By hand, where both say the same.
        let by_hand = [("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node07"), ("MASTER_PORT", "1")];
        assert_eq!(shown(&[&by_hand[..], &SRUN].concat()).0, 2);
    }

    #[test]
    fn variables_say_what_a_launcher_does_not() {
        let more = [("MASTER_ADDR", "10.0.0.7"), ("MASTER_PORT", "4000"), ("FP8_DIST_TOKEN", "hunter2")];
        let found = detect(&[&MPIRUN[..], &more].concat()).unwrap();
        assert_eq!((&*found.master_addr, found.master_port, found.exact_port), ("10.0.0.7", 4000, false));
        assert_eq!(found.token, "hunter2");
        let exact = detect(&[&SRUN[..], &[("FP8_PORT", "4001")]].concat()).unwrap();
        assert_eq!((exact.master_port, exact.exact_port), (4001, true));
        // All ranks of a run compute the same port.
        let port = |rank| detect(&[&[("SLURM_PROCID", rank)], &SRUN[1..]].concat()).unwrap().master_port;
        assert_eq!(port("0"), port("3"));
        assert_eq!(detect(&MPIEXEC).unwrap().master_port, 29_500);
        let local = detect(&[("PMI_RANK", "3"), ("PMI_SIZE", "4"), more[0], ("LOCAL_RANK", "1")]).unwrap();
        assert_eq!(local.local_rank, 1);
    }

    #[test]
    fn variables_that_disagree_or_are_missing_are_named() {
        let error = |variables: &[(&str, &str)]| detect(variables).unwrap_err().to_string();
        let disagree = "two launchers disagree: unset RANK and WORLD_SIZE, or set them in each process";
        assert_eq!(
            error(&[&TORCHRUN[..], &MPIRUN].concat()),
            format!("RANK=3: OMPI_COMM_WORLD_RANK=1: {disagree}")
        );
        let by_hand = [("RANK", "2"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "node07"), ("MASTER_PORT", "1")];
        assert_eq!(
            error(&[&by_hand[..], &SRUN].concat()),
            format!("WORLD_SIZE=8: SLURM_STEP_NUM_TASKS=4: {disagree}")
        );
        let two_machines = [&[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")], &MPIRUN[..3]].concat();
        assert_eq!(
            error(&two_machines),
            "MASTER_ADDR is not set: OMPI_COMM_WORLD_LOCAL_SIZE=2 of 4 processes are on this machine: set it to the machine \
             of rank 0"
        );
        assert_eq!(
            error(&MPIEXEC[..2]),
            "MASTER_ADDR is not set: MPI_LOCALNRANKS is not set, either: set it to the machine of rank 0"
        );
        assert_eq!(error(&[("PMI_RANK", "x"), MPIEXEC[1]]), "PMI_RANK=x: expected an integer from 0 on");
        assert_eq!(
            error(&[("PMI_RANK", "4"), MPIEXEC[1], MPIEXEC[3]]),
            "RANK=4: WORLD_SIZE=4: expected 0 to 3"
        );
        assert_eq!(
            error(&[("RANK", "0")]),
            "WORLD_SIZE is not set: start the processes with torchrun, or set the variable as it does"
        );
        assert_eq!(
            error(&[&[("SLURM_STEP_NODELIST", "node[")], &SRUN[..3]].concat()),
            "SLURM_STEP_NODELIST=node[: expected a list of hosts; set MASTER_ADDR to the machine of rank 0"
        );
    }

    #[test]
    fn white_space_around_every_value_is_ignored() {
        let names = [
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "FP8_PORT",
            "TORCHELASTIC_RUN_ID",
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "PMIX_NAMESPACE",
            "FP8_DIST_TOKEN",
        ];
        let value = |name: &str| match TORCHRUN.iter().find(|(known, _)| *known == name) {
            Some((_, value)) => (*value).to_owned(),
            None => "12".to_owned(),
        };
        let of = |padded: &[&str]| {
            let padded: Vec<&str> = padded.to_vec();
            Environment::from_variables(move |name| {
                let value = names.contains(&name).then(|| value(name))?;
                let value = if padded.contains(&name) { format!("\t {value} \r\n") } else { value };
                Some(OsString::from(value))
            })
        };
        let expected = of(&[]).unwrap();
        assert_eq!((&*expected.master_addr, expected.master_port, &*expected.token), ("node-0", 12, "12"));
        for name in names {
            assert_eq!(of(&[name]).unwrap(), expected, "{name}");
        }
        let blank = [" FP8_PORT", " TORCHELASTIC_RUN_ID", " FP8_DIST_TOKEN"];
        let blank: Vec<_> = blank.iter().map(|name| (name.trim(), Some(" \n"))).collect();
        assert_eq!(read(&blank).unwrap(), read(&[]).unwrap());
        let error = read(&[("MASTER_ADDR", Some("  "))]).unwrap_err();
        assert_eq!(error.to_string(), "MASTER_ADDR=: expected a value");
    }

    #[test]
    fn without_a_local_rank_it_is_the_rank() {
        assert_eq!(read(&[("LOCAL_RANK", None)]).unwrap().local_rank, 3);
        assert_eq!(read(&[("LOCAL_RANK", Some("0"))]).unwrap().local_rank, 0);
    }

    #[test]
    fn none_is_no_run_id_and_slurm_or_pmix_may_name_the_job() {
        let torch = |id| ("TORCHELASTIC_RUN_ID", Some(id));
        let slurm = |job, step| [("SLURM_JOB_ID", Some(job)), ("SLURM_STEP_ID", step)];
        let pmix = ("PMIX_NAMESPACE", Some("prterun-7"));
        type Variables<'a> = Vec<(&'a str, Option<&'a str>)>;
        let cases: [(Variables<'_>, &str, &str, bool); 8] = [
            (vec![torch("none")], "TORCHELASTIC_RUN_ID", "", false),
            (vec![torch("none"), pmix], "PMIX_NAMESPACE", "prterun-7", true),
            (vec![torch(""), pmix], "PMIX_NAMESPACE", "prterun-7", true),
            (
                [vec![torch("none"), pmix], slurm("123", Some("0")).into()].concat(),
                "SLURM_JOB_ID",
                "123.0",
                true,
            ),
            // Several may run in one job of Slurm's.
            ([vec![pmix], slurm("123", None).into()].concat(), "SLURM_JOB_ID", "123", false),
            (slurm("123", Some("")).into(), "SLURM_JOB_ID", "123", false),
            (
                [vec![torch("night 7")], slurm("123", Some("0")).into()].concat(),
                "TORCHELASTIC_RUN_ID",
                "night 7",
                true,
            ),
            (vec![("SLURM_STEP_ID", Some("0"))], "TORCHELASTIC_RUN_ID", "", false),
        ];
        for (variables, variable, id, names_one_run) in cases {
            let environment = read(&variables).unwrap();
            assert_eq!((environment.run_id_variable, &*environment.run_id), (variable, id), "{variables:?}");
            assert_eq!(environment.names_one_run(), names_one_run, "{variables:?}");
        }
    }

    #[test]
    fn the_token_is_never_shown() {
        let environment = read(&[("FP8_DIST_TOKEN", Some("hunter2"))]).unwrap();
        assert_eq!(environment.token, "hunter2");
        let shown = format!("{environment:?}{environment:#?}");
        assert!(shown.contains("token: \"hidden\"") && !shown.contains("hunter2"), "{shown}");
        assert!(format!("{:?}", read(&[]).unwrap()).contains("token: \"none\""));
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStringExt;
            let bytes = |name: &str| match name {
                "FP8_DIST_TOKEN" => Some(OsString::from_vec(b"hunter2\xFF".to_vec())),
                _ => TORCHRUN.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()),
            };
            let error = Environment::from_variables(bytes).unwrap_err();
            assert_eq!(error.to_string(), "FP8_DIST_TOKEN=…: expected UTF-8");
            assert!(!format!("{error:?}").contains("hunter2"));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |name, value| read(&[(name, value)]).unwrap_err().to_string();
        for (name, _) in TORCHRUN {
            let expected = format!(
                "{name} is not set: start the processes with torchrun, or set the variable as it does"
            );
            if name != "LOCAL_RANK" {
                assert_eq!(error(name, None), expected);
            }
            assert_eq!(error(name, Some("")), format!("{name}=: expected a value"));
        }
        assert_eq!(error("RANK", Some("first")), "RANK=first: expected an integer from 0 on");
        assert_eq!(error("RANK", Some("-1")), "RANK=-1: expected an integer from 0 on");
        assert_eq!(error("RANK", Some("4")), "RANK=4: WORLD_SIZE=4: expected 0 to 3");
        assert_eq!(error("LOCAL_RANK", Some("9")), "LOCAL_RANK=9: WORLD_SIZE=4: expected 0 to 3");
        // By hand, for a group of some of a machine's processes.
        let pair = Environment { rank: 1, world_size: 2, local_rank: 7, ..Environment::on_this_machine(1) };
        pair.check().unwrap();
        assert_eq!(
            error("WORLD_SIZE", Some("0")),
            "WORLD_SIZE=0: expected the number of processes, at least 1"
        );
        assert_eq!(error("MASTER_PORT", Some("70000")), "MASTER_PORT=70000: expected a port from 1 to 65535");
        assert_eq!(error("MASTER_PORT", Some("0")), "MASTER_PORT=0: expected a port from 1 to 65535");
        assert_eq!(error("FP8_PORT", Some("http")), "FP8_PORT=http: expected a port from 1 to 65535");
    }
}
