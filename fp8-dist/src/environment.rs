//! Every environment variable this crate reads, read here and nowhere else.
//!
//! | variable | type | default | what for |
//! |---|---|---|---|
//! | `RANK` | integer | none | this process, from 0 |
//! | `WORLD_SIZE` | integer | none | how many processes |
//! | `LOCAL_RANK` | integer | none | this process among those of its machine: the GPU it takes |
//! | `MASTER_ADDR` | host name or address | none | where rank 0 runs |
//! | `MASTER_PORT` | 1 to 65535 | none | the first of the ports where rank 0 may listen |
//! | `TORCHELASTIC_RUN_ID` | text | empty | the job: ranks of different jobs do not join each other |
//! | `FP8_PORT` | 1 to 65535 | none | the port where rank 0 listens, instead of those from `MASTER_PORT` on |

use crate::{Error, Result};
use std::env;
use std::ffi::OsString;

/// What a launcher tells each process of a job: the variables that `torchrun` sets. All fields may also be given by hand,
/// for a group of some of the job's processes: with their ranks in the group, its size, and where its rank 0 is.
///
/// ```
/// use fp8_dist::Environment;
/// let alone = Environment { rank: 0, world_size: 1, local_rank: 0, ..Environment::on_this_machine(29_500) };
/// assert_eq!(alone.master_addr, "127.0.0.1");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// This process, from 0.
    pub rank: usize,
    /// How many processes.
    pub world_size: usize,
    /// This process among those of its machine: which GPU it takes.
    pub local_rank: usize,
    /// Host name or address of rank 0.
    pub master_addr: String,
    /// The first port where rank 0 may listen.
    pub master_port: u16,
    /// Whether rank 0 listens at [`master_port`](Self::master_port) and nowhere else. If not, it takes the first free port
    /// of the 16 that begin there: `torchrun` itself may hold the first, and each group of a job needs one while it forms.
    pub exact_port: bool,
    /// The job, if its launcher names it. Ranks join only where this, [`master_port`](Self::master_port) and
    /// [`world_size`](Self::world_size) are the same.
    pub run_id: String,
}

impl Environment {
    /// From this process's variables.
    ///
    /// # Errors
    /// A variable that is missing or cannot be read, a rank that is none of the world's: the variable, its value and what
    /// would be right.
    pub fn read() -> Result<Self> {
        Self::from_variables(|name| env::var_os(name))
    }

    /// One process, rank 0 of 1, on this machine's loopback: to fill in.
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
        }
    }

    /// A rank and a size that fit each other.
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
            match variable(name).map(OsString::into_string) {
                None => error(None, "start the processes with torchrun, or set the variable as it does"),
                Some(Ok(text)) if text.is_empty() => error(Some(text), "expected a value"),
                Some(Ok(text)) => Ok(text),
                Some(Err(bytes)) => error(Some(bytes.to_string_lossy().into_owned()), "expected UTF-8"),
            }
        };
        let exact_port = variable("FP8_PORT").is_some_and(|port| !port.is_empty());
        let environment = Self {
            rank: number("RANK", text("RANK")?, INTEGER)?,
            world_size: number("WORLD_SIZE", text("WORLD_SIZE")?, INTEGER)?,
            local_rank: number("LOCAL_RANK", text("LOCAL_RANK")?, INTEGER)?,
            master_addr: text("MASTER_ADDR")?,
            master_port: match exact_port {
                true => number("FP8_PORT", text("FP8_PORT")?, PORT)?,
                false => number("MASTER_PORT", text("MASTER_PORT")?, PORT)?,
            },
            exact_port,
            run_id: match variable("TORCHELASTIC_RUN_ID").is_some_and(|id| !id.is_empty()) {
                true => text("TORCHELASTIC_RUN_ID")?,
                false => String::new(),
            },
        };
        environment.check()?;
        // Of all processes of the machine: by hand, a group may have fewer.
        environment.expect_in_world("LOCAL_RANK", environment.local_rank)?;
        Ok(environment)
    }
}

const INTEGER: &str = "expected an integer from 0 on";
const PORT: &str = "expected a port from 1 to 65535";

fn number<T: std::str::FromStr>(name: &'static str, text: String, remedy: &str) -> Result<T> {
    let wrong = |_| Error::Environment { name, value: Some(text.clone()), remedy: remedy.to_owned() };
    text.trim().parse().map_err(wrong)
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
        };
        assert_eq!(environment, expected);
        for id in ["", "night 7"] {
            assert_eq!(read(&[("TORCHELASTIC_RUN_ID", Some(id))]).unwrap().run_id, id);
        }
        let environment = read(&[("FP8_PORT", Some("4000"))]).unwrap();
        assert_eq!((environment.master_port, environment.exact_port), (4000, true));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |name, value| read(&[(name, value)]).unwrap_err().to_string();
        for (name, _) in TORCHRUN {
            let expected = format!(
                "{name} is not set: start the processes with torchrun, or set the variable as it does"
            );
            assert_eq!(error(name, None), expected);
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
