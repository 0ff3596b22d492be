//! The variables of launchers that do not set torchrun's, as a table.

use super::value::{DEFAULT_PORT, INTEGER, PORT, number};
use crate::{Error, Result};

/// The variables by which a launcher tells each process who it is.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) rank: &'static str,
    pub(super) world_size: &'static str,
    local_rank: &'static str,
    /// The number of processes on this machine.
    local_size: Option<&'static str>,
    /// The machines of all processes, rank 0's first.
    hosts: Option<&'static str>,
    /// The run. What names it elsewhere may differ between processes that daemons on several machines have started.
    pub(super) run: Option<&'static str>,
}

/// The place of a process, and of rank 0.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) local_rank: usize,
    pub(super) master_addr: String,
    pub(super) master_port: u16,
    pub(super) exact_port: bool,
}

/// Launchers of single processes come first: they may have been started by one that starts something on each machine, as `mpirun` and
/// `mpiexec` are by `srun`.
const LAUNCHERS: [Launcher; 3] = [
    // Open MPI's mpirun
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        hosts: None,
        run: Some("PMIX_NAMESPACE"),
    },
    // mpiexec of MPICH and Intel MPI
    Launcher {
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: Some("MPI_LOCALNRANKS"),
        hosts: None,
        run: None,
    },
    // srun
    Launcher {
        rank: "SLURM_PROCID",
        world_size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_size: None,
        hosts: Some("SLURM_STEP_NODELIST"),
        run: None,
    },
];

/// The text of a variable that is set and not empty.
pub(super) type Lookup<'a> = &'a dyn Fn(&'static str) -> Result<Option<String>>;

/// Returns the launcher that has started this process, with rank and world size, if it is one of the table.
pub(super) fn find(lookup: Lookup<'_>) -> Result<Option<(&'static Launcher, [usize; 2])>> {
    let mut found: Option<(&Launcher, [usize; 2])> = None;
    for launcher in &LAUNCHERS {
        let Some(rank) = lookup(launcher.rank)? else { continue };
        let Some(world_size) = lookup(launcher.world_size)? else { continue };
        let numbers =
            [number(launcher.rank, rank, INTEGER)?, number(launcher.world_size, world_size, INTEGER)?];
        found = match found {
            // srun sets the variables of PMI, too, but not those that say where a process is.
            Some((first, known)) if known == numbers && first.rank == "PMI_RANK" => Some((launcher, numbers)),
            Some(first) => Some(first),
            None => Some((launcher, numbers)),
        };
    }
    Ok(found)
}

impl Launcher {
    /// Finds out where this process and rank 0 are.
    pub(super) fn place(
        &self,
        [rank, world_size]: [usize; 2],
        run_id: &str,
        lookup: Lookup<'_>,
    ) -> Result<Place> {
        let local_rank = match lookup(self.local_rank)? {
            Some(text) => number(self.local_rank, text, INTEGER)?,
            None => match lookup("LOCAL_RANK")? {
                Some(text) => number("LOCAL_RANK", text, INTEGER)?,
                None => rank,
            },
        };
        let master_addr = match lookup("MASTER_ADDR")? {
            Some(address) => address,
            None => self.address_of_rank_0(world_size, lookup)?,
        };
        let (master_port, exact_port) = match (lookup("FP8_PORT")?, lookup("MASTER_PORT")?) {
            (Some(text), _) => (number("FP8_PORT", text, PORT)?, true),
            (None, Some(text)) => (number("MASTER_PORT", text, PORT)?, false),
            (None, None) => (port_of(run_id), false),
        };
        Ok(Place { local_rank, master_addr, master_port, exact_port })
    }

    fn address_of_rank_0(&self, world_size: usize, lookup: Lookup<'_>) -> Result<String> {
        if let Some(variable) = self.hosts
            && let Some(hosts) = lookup(variable)?
        {
            return first_host(&hosts).ok_or_else(|| Error::Environment {
                name: variable,
                value: Some(hosts.clone()),
                remedy: "expected a list of hosts; set MASTER_ADDR to the machine of rank 0".to_owned(),
            });
        }
        let local_size = match self.local_size {
            Some(variable) => lookup(variable)?.map(|text| number(variable, text, INTEGER)).transpose()?,
            None => None,
        };
        if world_size == 1 || local_size == Some(world_size) {
            return Ok("127.0.0.1".to_owned());
        }
        let reason = match (self.local_size, local_size) {
            (Some(variable), Some(local)) => {
                format!("{variable}={local} of {world_size} processes are on this machine")
            }
            (Some(variable), None) => format!("{variable} is not set, either"),
            (None, _) => "the launcher does not name rank 0's machine".to_owned(),
        };
        let remedy = format!("{reason}: set it to the machine of rank 0");
        Err(Error::Environment { name: "MASTER_ADDR", value: None, remedy })
    }
}

/// The port where rank 0 listens if no variable says: one of 750 for each run, below those that systems give to clients.
fn port_of(run_id: &str) -> u16 {
    if run_id.is_empty() {
        return DEFAULT_PORT;
    }
    // FNV-1a.
    let hash =
        run_id.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    20_000 + 16 * (hash % 750) as u16
}

/// Returns the first host of a list as Slurm writes it: `node7`, `node[008-010,12]`, `rack[1-2]n[3,4],login`.
fn first_host(hosts: &str) -> Option<String> {
    let (mut host, mut rest) = (String::new(), hosts);
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        rest = &rest[end..];
        let Some(list) = rest.strip_prefix('[') else { break };
        let (list, after) = list.split_once(']')?;
        host.push_str(list.split(['-', ',']).next().filter(|number| !number.is_empty())?);
        rest = after;
    }
    Some(host).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("node7", Some("node7")),
            ("node[008-010,12]", Some("node008")),
            ("node[3,7-9],login", Some("node3")),
            ("rack[1-2]n[3,4].cluster,login", Some("rack1n3.cluster")),
            ("a,b[1-2]", Some("a")),
            ("", None),
            ("[", None),
            ("node[]", None),
            ("node[1", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn runs_have_ports_that_no_client_gets() {
        let ports: std::collections::BTreeSet<u16> =
            (0..300).map(|step| port_of(&format!("7.{step}"))).collect();
        assert!(ports.len() > 200 && ports.iter().all(|&port| (20_000..32_000).contains(&port)));
        assert_eq!(port_of(""), 29_500);
    }
}
