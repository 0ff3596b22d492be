//! Which mutants are run: all, or as many as time allows.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use super::edits::Mutant;

#[derive(Clone, Copy)]
pub(crate) enum Draw {
    All,
    /// This many of all that are not known to survive.
    Sample(usize),
    /// This many of each kernel.
    PerKernel(usize),
}

impl Draw {
    /// The same for the same seed, and hardly others where a few mutants come or go.
    pub(super) fn choose(
        self,
        all: &[Mutant],
        seed: u64,
        is_known: impl Fn(&Mutant) -> bool,
    ) -> Vec<&Mutant> {
        let mut chosen: Vec<&Mutant> = all.iter().collect();
        match self {
            Self::All => {}
            Self::Sample(count) => {
                chosen.retain(|mutant| !is_known(mutant));
                shuffle(&mut chosen, seed);
                chosen.truncate(count);
            }
            Self::PerKernel(count) => {
                shuffle(&mut chosen, seed);
                let mut taken = HashMap::new();
                chosen.retain(|mutant| {
                    let taken: &mut usize = taken.entry((&mutant.file, &mutant.kernel)).or_default();
                    *taken += 1;
                    *taken <= count
                });
            }
        }
        chosen
    }

    /// Whether survivors on the list are counted without being run.
    pub(super) fn believes_the_list(self) -> bool {
        !matches!(self, Self::All)
    }

    pub(super) fn line(self, count: usize, seed: u64) -> String {
        match self {
            Self::All => "all are run".to_owned(),
            Self::Sample(_) => format!("{count} are run, drawn with seed {seed}"),
            Self::PerKernel(most) => {
                format!("{count} are run, at most {most} of each kernel, drawn with seed {seed}")
            }
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
        let draw = |draw: Draw, seed| draw.choose(&all, seed, |mutant| mutant.kernel == "l");
        assert_eq!((all.len(), draw(Draw::All, 1).len()), (100, 100));
        assert_eq!(draw(Draw::Sample(5), 1), draw(Draw::Sample(5), 1));
        assert_ne!(draw(Draw::Sample(5), 1), draw(Draw::Sample(5), 2));
        let known = draw(Draw::Sample(100), 1);
        assert_eq!((known.len(), known.iter().any(|mutant| mutant.kernel == "l")), (50, false));
    }

    #[test]
    fn each_kernel_has_its_share() {
        let all = mutants();
        let drawn = Draw::PerKernel(7).choose(&all, 3, |_| true);
        let of = |kernel: &str| drawn.iter().filter(|mutant| mutant.kernel == kernel).count();
        assert_eq!((of("k"), of("l")), (7, 7));
    }
}
