//! The hello by which a rank introduces itself, and the check that two ranks belong to one group.

use super::protocol::MAX_TEXT;
use crate::{Environment, Failure};

/// The longest hello: four texts and five numbers.
pub(super) const MAX_HELLO: usize = 4 * (MAX_TEXT + 4) + 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) id: String,
    pub(super) world_size: u64,
    pub(super) rank: u64,
    /// `MASTER_PORT`.
    pub(super) port: u16,
    pub(super) run_id: String,
    /// The variable that `run_id` was read from.
    pub(super) run_id_variable: String,
    /// Identifies one attempt of one process to join.
    pub(super) attempt: [u8; 16],
}

impl Hello {
    pub(super) fn new(id: &str, environment: &Environment, attempt: [u8; 16]) -> Self {
        Self {
            id: id.to_owned(),
            world_size: environment.world_size as u64,
            rank: environment.rank as u64,
            port: environment.master_port,
            run_id: environment.run_id.clone(),
            run_id_variable: environment.run_id_variable.to_owned(),
            attempt,
        }
    }

    /// Returns true if `other` is rank 0 of another job with the same settings. Called by rank 0.
    pub(super) fn is_twin(&self, other: &Self) -> bool {
        other.rank == 0 && other.attempt != self.attempt && self.difference(other).is_none()
    }

    /// Returns why `guest` does not belong to the group of this rank 0.
    pub(super) fn difference(&self, guest: &Self) -> Option<Failure> {
        let rank = usize::try_from(guest.rank).unwrap_or(usize::MAX);
        let unequal = |property: &str, value: &dyn ToString, other: &dyn ToString| {
            (value.to_string() != other.to_string()).then(|| differ(property, rank, value, other))
        };
        unequal("the group's id", &guest.id, &self.id)
            .or_else(|| unequal("the port of the job", &guest.port, &self.port))
            .or_else(|| self.another_run(guest, rank))
            .or_else(|| unequal("the world size", &guest.world_size, &self.world_size))
    }

    /// Names the variables that the run ids were read from.
    fn another_run(&self, guest: &Self, rank: usize) -> Option<Failure> {
        if guest.run_id == self.run_id {
            return None;
        }
        let named: Vec<&Self> = [guest, self].into_iter().filter(|hello| !hello.run_id.is_empty()).collect();
        Some(match named.as_slice() {
            [one, other] if one.run_id_variable != other.run_id_variable => {
                let show = |hello: &Self| format!("{:?} ({})", hello.run_id, hello.run_id_variable);
                differ("the run id", rank, &show(guest), &show(self))
            }
            named => {
                let variable = named.first().map_or("the run id", |hello| &hello.run_id_variable);
                differ(variable, rank, &format!("{:?}", guest.run_id), &format!("{:?}", self.run_id))
            }
        })
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
        [
            text(&self.id),
            self.world_size.to_le_bytes().to_vec(),
            self.rank.to_le_bytes().to_vec(),
            self.port.to_le_bytes().to_vec(),
            text(&self.run_id),
            text(&self.run_id_variable),
            self.attempt.to_vec(),
        ]
        .concat()
    }

    /// Parses a hello; `None` if the bytes are not one.
    pub(super) fn parse(mut bytes: &[u8]) -> Option<Self> {
        let bytes = &mut bytes;
        let hello = Self {
            id: text(bytes)?,
            world_size: u64::from_le_bytes(array(bytes)?),
            rank: u64::from_le_bytes(array(bytes)?),
            port: u16::from_le_bytes(array(bytes)?),
            run_id: text(bytes)?,
            run_id_variable: text(bytes)?,
            attempt: array(bytes)?,
        };
        bytes.is_empty().then_some(hello)
    }
}

/// Splits off the next bytes.
pub(crate) fn array<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*taken)
}

fn text(bytes: &mut &[u8]) -> Option<String> {
    let len = u32::from_le_bytes(array(bytes)?) as usize;
    let (text, rest) = bytes.split_at_checked(len).filter(|(text, _)| text.len() <= MAX_TEXT)?;
    *bytes = rest;
    String::from_utf8(text.to_vec()).ok()
}

pub(super) fn differ(
    property: &str,
    rank: usize,
    value: &dyn ToString,
    other_value: &dyn ToString,
) -> Failure {
    let (value, other_value) = (value.to_string(), other_value.to_string());
    Failure::Settings { property: property.to_owned(), rank, value, other: 0, other_value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello(rank: usize, run_id: &str, variable: &'static str) -> Hello {
        let environment = Environment {
            rank,
            world_size: 3,
            run_id: run_id.to_owned(),
            run_id_variable: variable,
            ..Environment::on_this_machine(29_500)
        };
        Hello::new("dp", &environment, [rank as u8; 16])
    }

    #[test]
    fn a_hello_comes_back() {
        let sent = hello(2, "night 7", "PMIX_NAMESPACE");
        assert_eq!(Hello::parse(&sent.bytes()), Some(sent.clone()));
        for len in 0..sent.bytes().len() {
            assert_eq!(Hello::parse(&sent.bytes()[..len]), None);
        }
        assert_eq!(Hello::parse(&[sent.bytes(), vec![0]].concat()), None);
    }

    #[test]
    fn a_difference_of_run_ids_names_the_variables() {
        let shown = |own: &Hello, guest: &Hello| own.difference(guest).map(|failure| failure.to_string());
        let [slurm, torch] = ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"];
        let all = "start all ranks of a group with the same settings";
        assert_eq!(
            shown(&hello(0, "8.0", slurm), &hello(1, "9.0", slurm)),
            Some(format!("SLURM_JOB_ID is \"9.0\" on rank 1 and \"8.0\" on rank 0: {all}"))
        );
        assert_eq!(
            shown(&hello(0, "", torch), &hello(1, "9.0", slurm)),
            Some(format!("SLURM_JOB_ID is \"9.0\" on rank 1 and \"\" on rank 0: {all}"))
        );
        assert_eq!(
            shown(&hello(0, "night 7", torch), &hello(1, "9.0", slurm)),
            Some(format!(
                "the run id is \"9.0\" (SLURM_JOB_ID) on rank 1 and \"night 7\" (TORCHELASTIC_RUN_ID) on rank 0: {all}"
            ))
        );
        assert_eq!(shown(&hello(0, "9.0", torch), &hello(1, "9.0", slurm)), None);
    }

    #[test]
    fn a_twin_is_another_rank_0_with_the_same_settings() {
        let own = hello(0, "", "TORCHELASTIC_RUN_ID");
        let twin = Hello { attempt: [9; 16], ..own.clone() };
        assert!(own.is_twin(&twin) && twin.is_twin(&own));
        assert!(!own.is_twin(&own), "its own connection");
        assert!(!own.is_twin(&Hello { rank: 1, ..twin.clone() }));
        assert!(!own.is_twin(&Hello { run_id: "7".to_owned(), ..twin }));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_bytes_are_a_hello_or_none(bytes in prop::collection::vec(any::<u8>(), 0..96)) {
            if let Some(hello) = Hello::parse(&bytes) {
                prop_assert_eq!(hello.bytes(), bytes);
            }
        }
    }
}
