//! The order in which the ranks of a group make calls that they have compared before.
//!
//! Such calls involve no host, so ranks that make them in different orders would mix up their tensors without a word. Each rank
//! therefore tells rank 0 from time to time which calls it has made, and rank 0 compares.

use crate::Failure;
use std::collections::{HashMap, VecDeque};

/// The most calls of a rank that wait for those of others: no group makes so many within a deadline.
const MOST: usize = 1 << 22;

/// The calls of all ranks that have not been compared.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// The names of calls that rank 0 knows.
    names: HashMap<u64, String>,
    waiting: Vec<VecDeque<u64>>,
}

impl Calls {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { names: HashMap::new(), waiting: vec![VecDeque::new(); ranks] }
    }

    /// Names a call.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn name(&mut self, number: u64, name: &str) {
        self.names.entry(number).or_insert_with(|| name.to_owned());
    }

    /// Adds calls that `rank` has made, and compares what can be. Returns the first difference.
    pub(crate) fn add(&mut self, rank: usize, numbers: &[u64]) -> Option<Failure> {
        let waiting = self.waiting.get_mut(rank)?;
        if waiting.len() + numbers.len() > MOST {
            let reason = "it has made more calls than any group makes".to_owned();
            return Some(Failure::Lost { rank, reason });
        }
        waiting.extend(numbers);
        while self.waiting.iter().all(|waiting| !waiting.is_empty()) {
            let heads: Vec<u64> = self.waiting.iter_mut().filter_map(VecDeque::pop_front).collect();
            let (first, others) = heads.split_first()?;
            if let Some((rank, number)) = (1..).zip(others).find(|(_, number)| *number != first) {
                let [value, other_value] = [number, first].map(|number| self.name_of(*number));
                return Some(Failure::Disagree { property: "the call", rank, value, other: 0, other_value });
            }
        }
        None
    }

    fn name_of(&self, number: u64) -> String {
        let unknown = || "one that rank 0 has not made".to_owned();
        self.names.get(&number).cloned().unwrap_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> Calls {
        let mut calls = Calls::new(3);
        calls.name(7, "a");
        calls.name(8, "b");
        calls
    }

    #[test]
    fn equal_calls_are_forgotten_however_they_arrive() {
        let mut calls = calls();
        for (rank, numbers) in
            [(0, vec![7, 8, 7]), (1, vec![7]), (2, vec![7, 8]), (1, vec![8, 7, 7]), (2, vec![7])]
        {
            assert_eq!(calls.add(rank, &numbers), None);
        }
        assert_eq!(calls.waiting.iter().map(VecDeque::len).collect::<Vec<_>>(), [0, 1, 0]);
    }

    #[test]
    fn the_first_difference_is_named() {
        let mut calls = calls();
        assert_eq!(calls.add(0, &[7, 7, 8]), None);
        assert_eq!(calls.add(2, &[7, 8, 7]), None);
        let found = calls.add(1, &[7, 7]).unwrap();
        let sentence = found.to_string();
        assert!(sentence.starts_with("the call is b on rank 2 and a on rank 0"), "{sentence}");
        let mut calls = self::calls();
        assert_eq!((calls.add(0, &[7]), calls.add(2, &[9])), (None, None));
        let sentence = calls.add(1, &[7]).unwrap().to_string();
        assert!(sentence.starts_with("the call is one that rank 0 has not made on rank 2"), "{sentence}");
    }

    #[test]
    fn a_rank_that_floods_is_lost() {
        let mut calls = calls();
        let many = vec![7; MOST / 2];
        assert_eq!((calls.add(1, &many), calls.add(1, &many)), (None, None));
        assert!(matches!(calls.add(1, &[7]), Some(Failure::Lost { rank: 1, .. })));
        assert_eq!(calls.add(9, &[7]), None);
    }
}
