//! A process's attempt to meet the others.

use super::hello::Hello;
use super::protocol::PORTS;
use crate::timed::Until;
use crate::{Environment, Error, Failure};
use std::io;
use std::time::Duration;

pub(super) struct Meeting<'a> {
    pub(super) id: &'a str,
    pub(super) environment: &'a Environment,
    pub(super) deadline: Duration,
    pub(super) until: Until,
    pub(super) gives_up: &'a dyn Fn() -> bool,
    pub(super) own: Hello,
}

impl Meeting<'_> {
    /// Whether a rank waits no longer.
    pub(super) fn is_over(&self) -> bool {
        self.until.is_past() || (self.gives_up)()
    }

    pub(super) fn ports(&self) -> impl Iterator<Item = u16> + use<> {
        let first = self.environment.master_port;
        let count = if self.environment.exact_port { 1 } else { PORTS };
        (0..count).filter_map(move |offset| first.checked_add(offset))
    }

    pub(super) fn network(&self, what: String, source: io::Error) -> Error {
        Error::Network { id: self.id.to_owned(), what, source }
    }

    pub(super) fn unknown_host(&self, source: io::Error) -> Error {
        self.network(format!("looking up MASTER_ADDR={}", self.environment.master_addr), source)
    }

    pub(super) fn failed(&self, failure: Failure) -> Error {
        Error::Rendezvous { id: self.id.to_owned(), failure }
    }
}
