//! Counts the mutants by outcome, and decides whether enough of them were killed.

use super::edits::Mutant;
use super::listed::{key_of_unreached_by, reason_for};
use super::survivors::Known;
use super::trial::Verdict;
use crate::mutants::percent;
use crate::workspace::Result;

/// Percent of the mutants that the cases must kill, where so many are decided that one does not turn the scale.
const BAR: usize = 95;
const ENOUGH: usize = 40;

/// The counts of the drawn mutants by outcome.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Tally {
    killed: usize,
    /// Survivors on the list that some input would tell from the kernel; a draw takes the list's word for them.
    known: usize,
    /// Those that none would. They are no part of the score: nothing can kill them.
    equal: usize,
    new: usize,
    /// Alive when patience was at its end.
    undecided: usize,
    /// Survivors where no case gets; they say nothing about the cases.
    unreached: usize,
    /// New and undecided ones, those unreached in kernels that are not on the list, lines of the list without a mutant,
    /// cases that fail without a mutation.
    pub(super) problems: usize,
    /// The time that all mutants took together.
    pub(super) seconds: f64,
}

impl Tally {
    /// Those that the score is of: whose end is known, and that a case might kill.
    fn decided(&self) -> usize {
        self.killed + self.known + self.new
    }

    pub(crate) fn line(&self) -> String {
        let Self { killed, known, equal, new, undecided, unreached, problems, seconds } = self;
        let decided = self.decided();
        let with_all = decided + equal + unreached;
        let (share, share_of_all) = (percent(*killed, decided), percent(*killed, with_all));
        format!(
            "{killed} of {decided} mutants killed ({share}), {known} known survivors, {new} new, {undecided} undecided; \
             not counted: {equal} equal to the kernel, {unreached} in code that no case reaches ({share_of_all} of \
             {with_all} with them); {problems} problems; {seconds:.0} s"
        )
    }

    /// The line, as an error if there are problems or too few were killed.
    pub(crate) fn verdict(&self) -> Result<String> {
        match self.shortfall() {
            Some(why) => Err(format!("{why}: {}", self.line()).into()),
            None if self.problems > 0 => Err(self.line().into()),
            None => Ok(self.line()),
        }
    }

    /// Why the score is too low, if it is.
    fn shortfall(&self) -> Option<String> {
        let (killed, decided) = (self.killed, self.decided());
        let is_low = decided >= ENOUGH && killed * 100 < BAR * decided;
        is_low.then(|| {
            format!(
                "fewer than {BAR} % of {decided} decided mutants are killed: {}",
                percent(killed, decided)
            )
        })
    }

    /// Counts a mutant, and says what has to be done about it.
    pub(super) fn count(&mut self, mutant: &Mutant, verdict: Verdict, known: &Known) {
        let key = mutant.key();
        let reason = reason_for(mutant, known);
        match (verdict, reason) {
            (Verdict::Killed, _) => {
                self.killed += 1;
                if reason.is_some() {
                    println!("killed now, its line may go, or name others alone: {key}");
                }
            }
            (Verdict::Survived | Verdict::Unreached, Some(reason)) if reason.is_equal => self.equal += 1,
            (Verdict::Survived | Verdict::Unreached, Some(_)) => self.known += 1,
            (Verdict::Survived, None) => {
                self.new += 1;
                self.problems += 1;
                println!("SURVIVED, now `{}`; kill it, or list it with its reason:", mutant.replacement());
                println!("{key} REASON");
            }
            (Verdict::Undecided, _) => {
                self.undecided += 1;
                self.problems += 1;
                println!("UNDECIDED, now `{}`; give it more --patience: {key}", mutant.replacement());
            }
            (Verdict::Unreached, None) => {
                self.unreached += 1;
                if !known.contains_key(&key_of_unreached_by(mutant)) {
                    self.problems += 1;
                    println!("UNREACHED by any case; add one, or list it with its reason: {key}");
                }
            }
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.killed += other.killed;
        self.known += other.known;
        self.equal += other.equal;
        self.new += other.new;
        self.undecided += other.undecided;
        self.unreached += other.unreached;
        self.problems += other.problems;
        self.seconds += other.seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_the_score_and_what_is_left_out_of_it() {
        let tally = Tally {
            killed: 17,
            known: 1,
            equal: 3,
            new: 2,
            undecided: 1,
            unreached: 5,
            problems: 2,
            seconds: 7.2,
        };
        assert_eq!(
            tally.line(),
            "17 of 20 mutants killed (85.0 %), 1 known survivors, 2 new, 1 undecided; not counted: 3 equal to the kernel, \
             5 in code that no case reaches (60.7 % of 28 with them); 2 problems; 7 s"
        );
        let mut sum = Tally::default();
        sum.add(&tally);
        assert_eq!(sum, tally);
    }

    #[test]
    fn fewer_than_the_bar_fail_where_enough_are_decided() {
        let verdict =
            |killed, known| Tally { killed, known, ..Tally::default() }.verdict().map_err(|e| e.to_string());
        assert!(verdict(38, 2).is_ok(), "95 % of 40");
        let error = verdict(37, 3).unwrap_err();
        assert!(
            error.starts_with("fewer than 95 % of 40 decided mutants are killed: 92.5 %: 37 of 40 "),
            "{error}"
        );
        assert!(verdict(9499, 501).unwrap_err().contains("killed: 94.9 %"));
        assert!(verdict(20, 19).is_ok(), "39 are too few for a score");
    }

    #[test]
    fn what_no_case_can_kill_neither_helps_nor_harms() {
        let tally =
            Tally { killed: 38, known: 2, equal: 500, unreached: 500, undecided: 9, ..Tally::default() };
        assert!(tally.verdict().is_ok());
        let tally = Tally { killed: 37, known: 3, equal: 500, unreached: 500, ..Tally::default() };
        assert!(tally.verdict().is_err());
    }

    #[test]
    fn a_problem_fails_whatever_the_score() {
        assert!(Tally { killed: 100, problems: 1, ..Tally::default() }.verdict().is_err());
    }
}
