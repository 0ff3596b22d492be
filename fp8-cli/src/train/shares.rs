//! The share that each rank had in the trainings: its time, its memory, and what it sent to the others.

use fp8_nn::prelude::*;
use serde::Serialize;

use crate::train::both::Both;
use crate::train::ranks::Ranks;
use crate::train::trainer::Run;
use crate::train::training::Outcome;

/// A rank's line in the report.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Share {
    pub(crate) rank: usize,
    pub(crate) median_step_ms: Both,
    /// Bytes when they were most. Null if the training did not complete.
    pub(crate) peak_memory_bytes: Both,
    /// Bytes of elements, in the mean of all steps.
    pub(crate) bytes_sent_per_step: Both,
}

/// Both trainings have so many numbers of a rank.
const NUMBERS: usize = 6;

impl Share {
    fn own(rank: usize, outcomes: &[Outcome]) -> Self {
        Self {
            rank,
            median_step_ms: Both::new(outcomes, Outcome::median_step_ms),
            peak_memory_bytes: Both::new(outcomes, |outcome| Some(outcome.memory?.total() as f64)),
            bytes_sent_per_step: Both::new(outcomes, |outcome| {
                let steps = outcome.records.len();
                (steps > 0).then(|| outcome.bytes_sent as f64 / steps as f64)
            }),
        }
    }

    /// All numbers; NaN for what there is not.
    fn numbers(&self) -> [f64; NUMBERS] {
        let [ms, memory, sent] = [self.median_step_ms, self.peak_memory_bytes, self.bytes_sent_per_step]
            .map(|both| [both.high_precision, both.fp8].map(|number| number.unwrap_or(f64::NAN)));
        [ms[0], ms[1], memory[0], memory[1], sent[0], sent[1]]
    }

    fn of(rank: usize, numbers: [f64; NUMBERS]) -> Self {
        let number = |index: usize| Some(numbers[index]).filter(|number| !number.is_nan());
        let both = |first| Both { high_precision: number(first), fp8: number(first + 1) };
        Self { rank, median_step_ms: both(0), peak_memory_bytes: both(2), bytes_sent_per_step: both(4) }
    }

    /// Returns the numbers of one of the trainings: milliseconds, bytes of memory, bytes sent.
    pub(crate) fn of_run(&self, run: Run) -> [Option<f64>; 3] {
        [self.median_step_ms, self.peak_memory_bytes, self.bytes_sent_per_step].map(|both| match run {
            Run::HighPrecision => both.high_precision,
            Run::Fp8 => both.fp8,
        })
    }
}

/// Returns the shares of all ranks, on every rank; none for a process that trains alone.
pub(crate) fn gather(ranks: &Ranks, outcomes: &[Outcome]) -> Result<Vec<Share>> {
    let Some(group) = ranks.control() else { return Ok(Vec::new()) };
    let own = Share::own(ranks.rank(), outcomes).numbers();
    let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
    let own = Tensor::from_vec(bytes, [1, NUMBERS * size_of::<f64>()], &Device::cpu())?;
    let all = group.all_gather("shares of ranks", &own)?.to_vec::<u8>()?;
    let (numbers, _) = all.as_chunks::<8>();
    let (rows, _) = numbers.as_chunks::<NUMBERS>();
    Ok(rows.iter().enumerate().map(|(rank, row)| Share::of(rank, row.map(f64::from_le_bytes))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::telemetry::Telemetry;
    use crate::train::training::{End, Record};
    use std::thread;
    use std::time::Duration;

    fn outcome(run: Run, ms: f64, bytes_sent: u64) -> Outcome {
        Outcome {
            run,
            records: vec![Record { ms, ..Record::default() }; 2],
            telemetry: Telemetry::new(0),
            advice: Vec::new(),
            end: End::Complete,
            held_out_loss: None,
            memory: None,
            bytes_sent,
        }
    }

    #[test]
    fn every_rank_gets_the_shares_of_all() {
        assert_eq!(gather(&Ranks::default(), &[]).unwrap(), []);
        thread::scope(|scope| {
            for group in local("dp", 2, Duration::from_secs(60)).unwrap() {
                scope.spawn(move || {
                    let ranks = Ranks::replicas(group);
                    let one = ranks.rank() as f64 + 1.0;
                    let outcomes = [outcome(Run::Fp8, one, ranks.rank() as u64 * 100)];
                    let shares = gather(&ranks, &outcomes).unwrap();
                    let found: Vec<_> =
                        shares.iter().map(|share| (share.rank, share.of_run(Run::Fp8))).collect();
                    let expected = [(0, [Some(1.0), None, Some(0.0)]), (1, [Some(2.0), None, Some(50.0)])];
                    assert_eq!(found, expected);
                    assert!(shares.iter().all(|share| share.of_run(Run::HighPrecision) == [None; 3]));
                });
            }
        });
    }
}
