//! The places of samples in sequences, where samples are kept whole.

use super::options::{Pack, Resolved, TooLong};
use super::summary::DataSummary;
use super::tokens::{LEARNED, Tokens};
use crate::Result;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A piece of a sample: the sample's number, and that of the piece of it.
pub(super) type Piece = (u32, u32);

/// The pieces in sequences.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pieces: Vec<Piece>,
    /// For each sequence the number of pieces up to its end.
    ends: Vec<u32>,
}

impl Plan {
    /// Returns the pieces of a sequence.
    pub(super) fn pieces(&self, sequence: usize) -> &[Piece] {
        let before = sequence.checked_sub(1).and_then(|before| self.ends.get(before));
        let start = before.copied().unwrap_or(0) as usize;
        let end = self.ends.get(sequence).map_or(start, |&end| end as usize);
        self.pieces.get(start..end).unwrap_or_default()
    }

    /// Plans the sequences of some samples, and counts what is left out.
    pub(super) fn new(
        tokens: &Tokens,
        options: &Resolved,
        samples: impl Iterator<Item = u32>,
        summary: &mut DataSummary,
    ) -> Result<Self> {
        let mut pieces = Vec::new();
        for sample in samples {
            choose(tokens, options, sample, summary, &mut pieces)?;
        }
        let lengths: Vec<u32> = pieces.iter().map(|&piece| length(tokens, options, piece) as u32).collect();
        let seq = options.seq as u32;
        let groups = match options.pack {
            Pack::Whole => in_order(&lengths, seq),
            Pack::BestFit => best_fit(&lengths, seq),
            _ => Groups::each(lengths.len()),
        };
        let used: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
        summary.sequences = groups.ends.len();
        summary.padding = groups.ends.len() as u64 * options.seq as u64 - used;
        let ordered = match groups.order {
            None => pieces,
            Some(order) => {
                order.into_iter().filter_map(|index| pieces.get(index as usize).copied()).collect()
            }
        };
        Ok(Self { pieces: ordered, ends: groups.ends })
    }
}

/// Returns the tokens of a piece.
pub(super) fn length(tokens: &Tokens, options: &Resolved, (sample, part): Piece) -> usize {
    let place = tokens.sample(sample as usize);
    let rest = (place.end - place.start).saturating_sub(u64::from(part) * options.seq as u64);
    usize::try_from(rest).unwrap_or(usize::MAX).min(options.seq)
}

/// Decides what becomes of a sample.
fn choose(
    tokens: &Tokens,
    options: &Resolved,
    sample: u32,
    summary: &mut DataSummary,
    pieces: &mut Vec<Piece>,
) -> Result<()> {
    let (seq, index) = (options.seq as u64, sample as usize);
    let place = tokens.sample(index);
    let (len, learned) = (place.end - place.start, tokens.learned(index));
    summary.samples += 1;
    summary.tokens += len;
    if learned == 0 {
        summary.samples_unlearned += 1;
        return Ok(());
    }
    if len <= seq {
        summary.learned += learned;
        pieces.push((sample, 0));
        return Ok(());
    }
    // The learned tokens among those that stand at these places of the sample.
    let count = |from: u64, to: u64| -> Result<u64> {
        if learned + 1 == len {
            return Ok(to - from);
        }
        let read = tokens.read(place.start + from..place.start + to)?;
        Ok(read.iter().filter(|&&token| token & LEARNED != 0).count() as u64)
    };
    match options.too_long {
        TooLong::Drop => {
            summary.samples_dropped += 1;
            summary.learned_dropped += learned;
        }
        TooLong::Cut => {
            let kept = count(1, seq)?;
            summary.learned_cut += learned - kept;
            summary.learned += kept;
            if kept == 0 {
                summary.samples_unlearned += 1;
            } else {
                summary.documents_cut += 1;
                summary.tokens_cut += len - seq;
                pieces.push((sample, 0));
            }
        }
        TooLong::Split => {
            summary.samples_split += 1;
            for (part, start) in (0..).zip((0..len).step_by(options.seq)) {
                // The last target of a piece is the first token of the next one.
                let kept = count(start + 1, (start + seq + 1).min(len).max(start + 1))?;
                summary.learned += kept;
                if kept > 0 {
                    pieces.push((sample, part));
                }
            }
        }
    }
    Ok(())
}

/// Pieces in sequences, by their numbers.
struct Groups {
    /// `None`: as they come.
    order: Option<Vec<u32>>,
    ends: Vec<u32>,
}

impl Groups {
    fn each(count: usize) -> Self {
        Self { order: None, ends: (1..).take(count).collect() }
    }
}

/// A new sequence begins where the next piece does not fit.
fn in_order(lengths: &[u32], seq: u32) -> Groups {
    let (mut ends, mut room) = (Vec::new(), 0);
    for (end, &length) in (1..).zip(lengths) {
        match ends.last_mut() {
            Some(last) if length <= room => *last = end,
            _ => {
                ends.push(end);
                room = seq;
            }
        }
        room -= length.min(room);
    }
    Groups { order: None, ends }
}

/// The longest first, each into the sequence with the least room that is enough; the first of several.
fn best_fit(lengths: &[u32], seq: u32) -> Groups {
    let mut by_length: Vec<u32> = (0..).take(lengths.len()).collect();
    let length = |index: u32| lengths.get(index as usize).copied().unwrap_or(0);
    by_length.sort_by_key(|&index| Reverse(length(index)));
    // The sequences by their room.
    let mut open: BTreeMap<u32, BinaryHeap<Reverse<u32>>> = BTreeMap::new();
    let mut chosen: Vec<(u32, u32)> = Vec::with_capacity(lengths.len());
    let mut count = 0;
    for index in by_length {
        let length = length(index);
        let found = open.range_mut(length..).next().and_then(|(&room, sequences)| {
            let Reverse(sequence) = sequences.pop()?;
            Some((sequence, room, sequences.is_empty()))
        });
        if let Some((_, room, true)) = found {
            open.remove(&room);
        }
        let (sequence, room, _) = found.unwrap_or_else(|| {
            count += 1;
            (count - 1, seq, false)
        });
        chosen.push((sequence, index));
        let left = room - length.min(room);
        if left > 0 {
            open.entry(left).or_default().push(Reverse(sequence));
        }
    }
    // Stable: in each sequence the longest stays first.
    chosen.sort_by_key(|&(sequence, _)| sequence);
    let mut ends: Vec<u32> = Vec::new();
    for (end, &(sequence, _)) in (1..).zip(&chosen) {
        match ends.get_mut(sequence as usize) {
            Some(last) => *last = end,
            None => ends.push(end),
        }
    }
    Groups { order: Some(chosen.into_iter().map(|(_, index)| index).collect()), ends }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn groups(of: &Groups, count: usize) -> Vec<Vec<u32>> {
        let order = of.order.clone().unwrap_or_else(|| (0..count as u32).collect());
        let starts = [0].into_iter().chain(of.ends.iter().copied());
        starts.zip(&of.ends).map(|(start, &end)| order[start as usize..end as usize].to_vec()).collect()
    }

    #[test]
    fn pieces_are_packed_as_they_should() {
        let lengths = [5, 3, 8, 1, 4, 3];
        let found = in_order(&lengths, 8);
        assert_eq!(groups(&found, 6), [vec![0, 1], vec![2], vec![3, 4, 5]]);
        let found = best_fit(&lengths, 8);
        assert_eq!(groups(&found, 6), [vec![2], vec![0, 1], vec![4, 5, 3]]);
        assert!(groups(&in_order(&[], 8), 0).is_empty() && groups(&best_fit(&[], 8), 0).is_empty());
    }

    proptest! {
        #[test]
        fn every_piece_is_in_one_sequence_that_it_fits(
            lengths in prop::collection::vec(1u32..33, 0..200),
            seq in 32u32..64,
        ) {
            for found in [in_order(&lengths, seq), best_fit(&lengths, seq), Groups::each(lengths.len())] {
                let groups = groups(&found, lengths.len());
                let mut all: Vec<u32> = groups.concat();
                all.sort_unstable();
                prop_assert_eq!(all, (0..lengths.len() as u32).collect::<Vec<_>>());
                for group in &groups {
                    let used: u32 = group.iter().map(|&index| lengths[index as usize]).sum();
                    prop_assert!(!group.is_empty() && used <= seq);
                }
            }
            // The same by its definition.
            let mut order: Vec<usize> = (0..lengths.len()).collect();
            order.sort_by_key(|&index| Reverse(lengths[index]));
            let mut expected: Vec<(u32, Vec<u32>)> = Vec::new();
            for index in order {
                let fitting = expected.iter_mut().filter(|(room, _)| *room >= lengths[index]);
                match fitting.min_by_key(|(room, _)| *room) {
                    Some((room, group)) => {
                        *room -= lengths[index];
                        group.push(index as u32);
                    }
                    None => expected.push((seq - lengths[index], vec![index as u32])),
                }
            }
            let expected: Vec<Vec<u32>> = expected.into_iter().map(|(_, group)| group).collect();
            prop_assert_eq!(groups(&best_fit(&lengths, seq), lengths.len()), expected);
        }
    }
}
