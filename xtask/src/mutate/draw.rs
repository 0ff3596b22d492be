//! Draws the mutants that are run: all, or as many as time allows.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use super::edits::Mutant;

#[derive(Clone, Copy)]
pub(crate) enum Draw {
    All,
    /// This many of all.
    Sample(usize),
    /// This many of each kernel file.
    PerFile(usize),
    /// This many of each kernel.
    PerKernel(usize),
}

impl Draw {
    /// The same for the same seed, and hardly others where a few mutants come or go. Those on the list that are drawn on
    /// the way come along beyond the number, so that the score is that of all.
    pub(super) fn choose(
        self,
        all: &[Mutant],
        seed: u64,
        is_known: impl Fn(&Mutant) -> bool,
    ) -> Vec<&Mutant> {
        let mut chosen: Vec<&Mutant> = all.iter().collect();
        let (most, part): (usize, fn(&Mutant) -> [&str; 2]) = match self {
            Self::All => return chosen,
            Self::Sample(most) => (most, |_| ["", ""]),
            Self::PerFile(most) => (most, |mutant| [&mutant.file, ""]),
            Self::PerKernel(most) => (most, |mutant| [&mutant.file, &mutant.kernel]),
        };
        shuffle(&mut chosen, seed);
        let mut taken = HashMap::new();
        chosen.retain(|mutant| {
            let taken: &mut usize = taken.entry(part(mutant)).or_default();
            let is_wanted = *taken < most;
            *taken += usize::from(!is_known(mutant));
            is_wanted
        });
        chosen
    }

    /// Whether survivors on the list are counted without being run.
    pub(super) fn believes_the_list(self) -> bool {
        !matches!(self, Self::All)
    }

    /// The options that make this draw.
    pub(super) fn options(self, seed: u64) -> String {
        match self {
            Self::All => String::new(),
            Self::Sample(count) => format!(" --sample {count} --seed {seed}"),
            Self::PerFile(count) => format!(" --per-file {count} --seed {seed}"),
            Self::PerKernel(count) => format!(" --per-kernel {count} --seed {seed}"),
        }
    }
}

fn shuffle(mutants: &mut [&Mutant], seed: u64) {
    mutants.sort_by_cached_key(|mutant| Sha256::digest(format!("{seed} {}", mutant.key())));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutate::edits;

    fn mutants() -> Vec<Mutant> {
        let body: String = (0..50).map(|k| format!("\tadd.s32 %r1, %r2, {k};\n")).collect();
        let kernel = |name: &str| format!(".visible .entry {name}(\n)\n{{\n{body}}}\n");
        edits::mutants("f", &(kernel("k") + &kernel("l")))
    }

    #[test]
    fn a_draw_is_the_seeds_and_differs_between_seeds() {
        let all = mutants();
        let draw = |draw: Draw, seed| draw.choose(&all, seed, |_| false);
        assert_eq!((all.len(), draw(Draw::All, 1).len()), (100, 100));
        assert_eq!(draw(Draw::Sample(5), 1).len(), 5);
        assert_eq!(draw(Draw::Sample(5), 1), draw(Draw::Sample(5), 1));
        assert_ne!(draw(Draw::Sample(5), 1), draw(Draw::Sample(5), 2));
    }

    #[test]
    fn what_is_listed_comes_along_and_takes_no_others_place() {
        let all = mutants();
        let is_known = |mutant: &Mutant| mutant.kernel == "l";
        let drawn = Draw::Sample(20).choose(&all, 1, is_known);
        let known = drawn.iter().filter(|mutant| is_known(mutant)).count();
        assert_eq!(drawn.len() - known, 20);
        assert!((8..=40).contains(&known), "about as many as of the others: {known}");
        assert_eq!(Draw::Sample(100).choose(&all, 1, is_known).len(), 100);
    }

    #[test]
    fn each_file_and_each_kernel_has_its_share() {
        let all = mutants();
        let of = |draw: Draw, kernel: &str| {
            draw.choose(&all, 3, |_| false).iter().filter(|mutant| mutant.kernel == kernel).count()
        };
        assert_eq!((of(Draw::PerKernel(7), "k"), of(Draw::PerKernel(7), "l")), (7, 7));
        assert_eq!(of(Draw::PerFile(7), "k") + of(Draw::PerFile(7), "l"), 7);
    }

    #[test]
    fn a_draw_tells_the_options_that_repeat_it() {
        assert_eq!(Draw::PerFile(2).options(7), " --per-file 2 --seed 7");
        assert_eq!(Draw::All.options(7), "");
    }
}
