//! Draws the mutants that are run: all, or as many as time allows.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use super::edits::Mutant;
use crate::mutants::shuffle;

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
    /// Chooses mutants at random. `seed` returns the seed of a kernel file. Equal seeds choose the same mutants, and mostly the
    /// same where a few mutants are added or removed. Listed mutants that are drawn do not count towards the number.
    pub(super) fn choose(
        self,
        all: &[Mutant],
        seed: impl Fn(&str) -> u64,
        is_known: impl Fn(&Mutant) -> bool,
    ) -> Vec<&Mutant> {
        let mut chosen: Vec<&Mutant> = all.iter().collect();
        let (most, part): (usize, fn(&Mutant) -> [&str; 2]) = match self {
            Self::All => return chosen,
            Self::Sample(most) => (most, |_| ["", ""]),
            Self::PerFile(most) => (most, |mutant| [&mutant.file, ""]),
            Self::PerKernel(most) => (most, |mutant| [&mutant.file, &mutant.kernel]),
        };
        shuffle(&mut chosen, |mutant| format!("{} {}", seed(&mutant.file), mutant.key()));
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
    pub(super) fn options(self, seed: Option<u64>) -> String {
        let seed = seed.map(|seed| format!(" --seed {seed}")).unwrap_or_default();
        match self {
            Self::All => String::new(),
            Self::Sample(count) => format!(" --sample {count}{seed}"),
            Self::PerFile(count) => format!(" --per-file {count}{seed}"),
            Self::PerKernel(count) => format!(" --per-kernel {count}{seed}"),
        }
    }
}

/// Returns the seed of a kernel file that has this text, of which comments do not count: one of them is the hash of the source.
pub(super) fn seed(text: &str) -> u64 {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut hash = Sha256::new();
    code.for_each(|line| hash.update(line));
    hash.finalize().iter().take(4).fold(0, |seed, byte| seed << 8 | u64::from(*byte))
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
    fn the_seed_is_that_of_the_instructions() {
        let of = |header: &str, code: &str| seed(&format!("// source sha256: {header}\n{code}\n"));
        assert_eq!(of("1", "ret;"), of("2", "ret;"));
        assert_ne!(of("1", "ret;"), of("1", "exit;"));
    }

    #[test]
    fn a_draw_is_the_seeds_and_differs_between_seeds() {
        let all = mutants();
        let draw = |draw: Draw, seed| draw.choose(&all, |_| seed, |_| false);
        assert_eq!((all.len(), draw(Draw::All, 1).len()), (100, 100));
        assert_eq!(draw(Draw::Sample(5), 1).len(), 5);
        assert_eq!(draw(Draw::Sample(5), 1), draw(Draw::Sample(5), 1));
        assert_ne!(draw(Draw::Sample(5), 1), draw(Draw::Sample(5), 2));
    }

    #[test]
    fn what_is_listed_comes_along_and_takes_no_others_place() {
        let all = mutants();
        let is_known = |mutant: &Mutant| mutant.kernel == "l";
        let drawn = Draw::Sample(20).choose(&all, |_| 1, is_known);
        let known = drawn.iter().filter(|mutant| is_known(mutant)).count();
        assert_eq!(drawn.len() - known, 20);
        assert!((8..=40).contains(&known), "about as many as of the others: {known}");
        assert_eq!(Draw::Sample(100).choose(&all, |_| 1, is_known).len(), 100);
    }

    #[test]
    fn each_file_and_each_kernel_has_its_share() {
        let all = mutants();
        let of = |draw: Draw, kernel: &str| {
            draw.choose(&all, |_| 3, |_| false).iter().filter(|mutant| mutant.kernel == kernel).count()
        };
        assert_eq!((of(Draw::PerKernel(7), "k"), of(Draw::PerKernel(7), "l")), (7, 7));
        assert_eq!(of(Draw::PerFile(7), "k") + of(Draw::PerFile(7), "l"), 7);
    }

    #[test]
    fn a_draw_tells_the_options_that_repeat_it() {
        assert_eq!(Draw::PerFile(2).options(Some(7)), " --per-file 2 --seed 7");
        assert_eq!(Draw::PerFile(2).options(None), " --per-file 2");
        assert_eq!(Draw::All.options(Some(7)), "");
    }

    #[test]
    fn another_text_of_one_file_draws_no_other_mutants_of_the_rest() {
        let body: String = (0..50).map(|k| format!("\tadd.s32 %r1, %r2, {k};\n")).collect();
        let text = format!(".visible .entry k(\n)\n{{\n{body}}}\n");
        let all = [edits::mutants("a", &text), edits::mutants("b", &text)].concat();
        let drawn = |a: &str| {
            let of = |file: &str| seed(if file == "a" { a } else { &text });
            let drawn = Draw::PerFile(5).choose(&all, of, |_| false);
            ["a", "b"]
                .map(|file| drawn.iter().filter(|mutant| mutant.file == file).copied().collect::<Vec<_>>())
        };
        let [before, after] = [drawn(&text), drawn("another text")];
        assert_ne!(before[0], after[0]);
        assert_eq!(before[1], after[1]);
    }
}
