//! The plan of one case: the actions of all ranks, drawn from a seed before the ranks begin.

pub(crate) const SLOTS: usize = 3;
pub(crate) const RECIPES: usize = 3;

/// The options of a recipe that decide its scales.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    pub(crate) margin: i32,
    pub(crate) len: usize,
    pub(crate) interval: u64,
}

impl Policy {
    /// In the order in which a commit takes the recipes.
    pub(crate) fn of(recipe: usize) -> Self {
        [
            Self { margin: 0, len: 4, interval: 1 },
            Self { margin: 1, len: 3, interval: 2 },
            Self { margin: 2, len: 1, interval: 1 },
        ][recipe]
    }
}

/// One scope or nested scope.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Frame {
    Delayed(usize),
    Current,
    Disabled,
}

/// One value that one slot quantizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    pub(crate) slot: usize,
    pub(crate) value: f32,
}

/// A frame, what each rank runs in it, and the frames nested in it.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    pub(crate) frame: Frame,
    /// `[rank]`.
    pub(crate) runs: Vec<Vec<Run>>,
    pub(crate) nested: Vec<Tree>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Ending {
    Commit,
    Discard,
    /// This rank does something else; the others commit.
    Fault(Fault, usize),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// Drops the guard.
    Drops,
    /// A layer fails, and the guard is dropped.
    Fails,
    Panics,
    /// Discards alone.
    Discards,
    /// Comes with another recipe.
    Strays,
    /// Does not come at all.
    Leaves,
}

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Forward {
        tree: Tree,
        ending: Ending,
        snapshot: bool,
    },
    /// Backward of forward scopes before this, by their number among those that were committed.
    Backward {
        of: Vec<usize>,
        /// `[rank]`: whether it runs nothing.
        skips: Vec<bool>,
        ending: Ending,
        /// Runs the first forward again, where it kept its scales.
        recompute: bool,
    },
    /// One rank evaluates.
    Evaluate {
        rank: usize,
        recipe: usize,
        run: Run,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) ranks: usize,
    pub(crate) steps: Vec<Step>,
}

/// xorshift64*.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        let mut draw = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        for _ in 0..4 {
            draw.below(2);
        }
        draw
    }

    pub(crate) fn below(&mut self, below: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % below
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn run(&mut self) -> Run {
        let value = match self.below(16) {
            0 => 0.0,
            1 => f32::INFINITY,
            2 => f32::NAN,
            _ => (self.below(2000) as f32 / 16.0 - 60.0) * f32::powi(4.0, self.below(8) as i32 - 4),
        };
        Run { slot: self.below(SLOTS), value }
    }

    fn frame(&mut self) -> Frame {
        match self.below(8) {
            0 => Frame::Current,
            1 => Frame::Disabled,
            _ => Frame::Delayed(self.below(RECIPES)),
        }
    }

    fn tree(&mut self, ranks: usize, depth: usize) -> Tree {
        let runs = (0..ranks).map(|_| (0..self.below(4)).map(|_| self.run()).collect()).collect();
        let nested = if depth < 2 { self.below(3 - depth) } else { 0 };
        let nested = (0..nested).map(|_| self.tree(ranks, depth + 1)).collect();
        Tree { frame: self.frame(), runs, nested }
    }

    fn ending(&mut self, ranks: usize, is_last: bool) -> Ending {
        let faults =
            [Fault::Drops, Fault::Fails, Fault::Panics, Fault::Discards, Fault::Strays, Fault::Leaves];
        match self.below(10) {
            _ if is_last => Ending::Fault(faults[self.below(faults.len())], self.below(ranks)),
            0 | 1 => Ending::Discard,
            _ => Ending::Commit,
        }
    }

    /// Scopes in any order, at most one fault, at the end.
    pub(crate) fn plan(&mut self) -> Plan {
        let ranks = 2 + self.below(3);
        let count = 2 + self.below(9);
        let has_fault = self.one_in(2);
        let (mut steps, mut committed, mut awaiting, mut is_answered) = (Vec::new(), 0, Vec::new(), false);
        for step in 0..count {
            let is_last = has_fault && step + 1 == count;
            let ending = self.ending(ranks, is_last);
            match self.below(8) {
                0 | 1 if !is_last => {
                    let (rank, recipe, run) = (self.below(ranks), self.below(RECIPES), self.run());
                    steps.push(Step::Evaluate { rank, recipe, run });
                }
                2..=4 if !awaiting.is_empty() => {
                    let of: Vec<usize> = awaiting.iter().copied().filter(|_| self.one_in(2)).collect();
                    let skips = (0..ranks).map(|_| self.one_in(4)).collect();
                    is_answered |= ending == Ending::Commit;
                    steps.push(Step::Backward { of, skips, ending, recompute: self.one_in(2) });
                }
                _ => {
                    let snapshot = self.one_in(2);
                    if ending == Ending::Commit {
                        if std::mem::take(&mut is_answered) {
                            awaiting.clear();
                        }
                        awaiting.push(committed);
                        committed += 1;
                    }
                    steps.push(Step::Forward { tree: self.tree(ranks, 0), ending, snapshot });
                }
            }
        }
        Plan { ranks, steps }
    }
}
