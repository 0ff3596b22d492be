//! Finds the shared array that an address register points into.
//!
//! Addresses are sums of one array's address and indices. A register's array is known if all its definitions agree;
//! loads and comparisons yield indices. What mixes two arrays is left unchecked, never wrongly accused.

use std::collections::HashMap;

use crate::lanes::Reg;

/// The way in which a result's address bits come from the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// A sum: the one source with an array decides.
    Sum,
    /// One of the sources.
    Either,
    /// An index.
    Plain,
    /// Something that makes no address of an index, and no known address of an address.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    Plain,
    Array(usize),
    Mixed,
}

fn join(a: Option<Base>, b: Option<Base>) -> Option<Base> {
    match (a, b) {
        (None, other) | (other, None) => other,
        (Some(a), Some(b)) => Some(if a == b { a } else { Base::Mixed }),
    }
}

fn sum(a: Option<Base>, b: Option<Base>) -> Option<Base> {
    match (a, b) {
        (None, other) | (other, None) => other,
        (Some(Base::Plain), other) | (other, Some(Base::Plain)) => other,
        _ => Some(Base::Mixed),
    }
}

/// The definitions of a kernel's registers.
#[derive(Debug, Default)]
pub(crate) struct Provenance {
    bases: HashMap<Reg, usize>,
    new: Vec<Reg>,
    notes: Vec<(Reg, Flow, Vec<Reg>)>,
}

impl Provenance {
    /// `reg` holds an address in `array`.
    pub(crate) fn array(&mut self, reg: Reg, array: usize) {
        self.bases.insert(reg, array);
        self.new.push(reg);
    }

    pub(crate) fn take_new(&mut self) -> Vec<Reg> {
        std::mem::take(&mut self.new)
    }

    pub(crate) fn note(&mut self, reg: Reg, flow: Flow, sources: &[Reg]) {
        self.notes.push((reg, flow, sources.to_vec()));
    }

    /// The registers with one known array.
    pub(crate) fn solve(&self) -> HashMap<Reg, usize> {
        let mut known: HashMap<Reg, Base> =
            self.bases.iter().map(|(&reg, &a)| (reg, Base::Array(a))).collect();
        if self.bases.is_empty() {
            return HashMap::new();
        }
        // Registers that nothing defines hold constants and parameters.
        let defined: std::collections::HashSet<Reg> = self.notes.iter().map(|(reg, ..)| *reg).collect();
        let value = |known: &HashMap<Reg, Base>, reg: &Reg| {
            known.get(reg).copied().or((!defined.contains(reg)).then_some(Base::Plain))
        };
        loop {
            let mut changed = false;
            for (reg, flow, sources) in &self.notes {
                let values = sources.iter().map(|source| value(&known, source));
                let result = match flow {
                    Flow::Plain => Some(Base::Plain),
                    Flow::Sum => values.fold(None, sum).or(sources.is_empty().then_some(Base::Plain)),
                    Flow::Either => values.fold(None, join),
                    Flow::Other => {
                        let address = values.flatten().any(|base| base != Base::Plain);
                        Some(if address { Base::Mixed } else { Base::Plain })
                    }
                };
                let before = known.get(reg).copied();
                let after = join(before, result);
                if after != before
                    && let Some(after) = after
                {
                    known.insert(*reg, after);
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        let array =
            |(reg, base): (&Reg, &Base)| if let Base::Array(a) = base { Some((*reg, *a)) } else { None };
        known.iter().filter_map(array).collect()
    }
}
