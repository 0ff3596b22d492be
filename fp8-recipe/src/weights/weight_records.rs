//! The records of the weights that a scope has quantized first: the scales that their copies are made with from now on.

use crate::Result;
use crate::arenas::domain::Domain;
use crate::weights::weight_cache::{Added, Record};
use fp8_kernels::{Cell, KeptScales};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The records that the commit of a scope makes, grouped by domain.
#[derive(Debug, Default)]
pub(crate) struct WeightRecords {
    by_domain: BTreeMap<usize, Pending>,
}

#[derive(Debug)]
struct Pending {
    /// Allocated before the update, so that an error changes nothing.
    kept: KeptScales,
    /// All scales that the scope has quantized with, under Transformer Engine's rules.
    step_scales: Option<Vec<Cell>>,
}

impl WeightRecords {
    /// Allocates the records of the weights that a scope has added, before its commit updates the scales.
    pub(crate) fn before_update(domains: &[Domain], added: &[Added]) -> Result<Self> {
        let mut by_domain = BTreeMap::new();
        for &Added { domain, .. } in added {
            let of = &domains[domain];
            let (Some(state), Some(arenas)) = (of.policy.state(), &of.arenas) else { continue };
            if let Entry::Vacant(entry) = by_domain.entry(domain) {
                let arena = arenas.forward.own();
                let step_scales = state.keeps_first_copies().then(|| arena.copy_scales()).transpose()?;
                entry.insert(Pending { kept: arena.kept_scales()?, step_scales });
            }
        }
        Ok(Self { by_domain })
    }

    /// Returns the record of each weight, after the update.
    pub(crate) fn after_update<'a>(
        self,
        domains: &[Domain],
        added: &'a [Added],
    ) -> Result<Vec<(&'a Added, Record)>> {
        let mut records = Vec::new();
        for (domain, Pending { kept, step_scales }) in self.by_domain {
            let Some(arenas) = &domains[domain].arenas else { continue };
            let arena = &arenas.forward;
            let of_domain = added.iter().filter(|added| added.domain == domain);
            let (added, slots): (Vec<&Added>, Vec<usize>) =
                of_domain.filter_map(|added| Some((added, arena.index(added.slot)?))).unzip();
            let scales = kept.fill(arena.own(), &slots)?;
            for ((added, slot), scale) in added.into_iter().zip(slots).zip(scales) {
                let step_scale = step_scales.as_ref().and_then(|scales| scales.get(slot)).cloned();
                records.push((added, Record { scale, step_scale }));
            }
        }
        Ok(records)
    }
}
