//! Rank 0's search for another rank 0 with the same settings, on the other ports of its range.

use super::call::{Answer, Call};
use super::hello::Hello;
use crate::timed::Until;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// The time after which a silent listener is considered something else, such as torchrun's store.
const SILENCE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Search {
    calls: Vec<Call>,
    silence: Until,
}

impl Search {
    /// Calls `ports` at the address of the own listener, because the rank 0 of another job would listen there too.
    pub(super) fn new(own: IpAddr, ports: impl Iterator<Item = u16>, until: Until) -> Self {
        let addresses = match own.is_unspecified() {
            true => vec![IpAddr::from(Ipv6Addr::LOCALHOST), IpAddr::from(Ipv4Addr::LOCALHOST)],
            false => vec![own],
        };
        let each = ports.flat_map(|port| addresses.iter().map(move |&ip| SocketAddr::new(ip, port)));
        let calls = each.filter_map(|address| Call::new(address, until).ok()).collect();
        Self { calls, silence: until.within(SILENCE) }
    }

    pub(super) const fn is_over(&self) -> bool {
        self.calls.is_empty()
    }

    /// Advances without blocking. Returns true if another rank 0 with the same settings has answered.
    pub(super) fn finds_twin(&mut self, own: &Hello, token: &str) -> bool {
        let (mut found, is_late) = (false, self.silence.is_past());
        self.calls.retain_mut(|call| match call.advance(own, token) {
            Ok(Answer::None) => call.is_answered() || !is_late,
            Ok(Answer::Rank0(hello, _)) => {
                found |= own.is_twin(&hello);
                false
            }
            Ok(Answer::Version(_) | Answer::Token | Answer::Seated) | Err(_) => false,
        });
        found
    }
}
