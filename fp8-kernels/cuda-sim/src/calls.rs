//! How often each entry point was called, which kernels were launched, and which call is to fail.

use std::collections::{BTreeMap, BTreeSet};

use crate::code::Code;

/// Counters and planned faults of every entry point.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    counts: BTreeMap<&'static str, u64>,
    kernels: BTreeSet<String>,
    faults: Vec<Fault>,
}

/// The `remaining`-th call of `name` returns `code` and does nothing.
#[derive(Debug)]
struct Fault {
    name: String,
    remaining: u64,
    code: Code,
}

impl Calls {
    pub(crate) fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    pub(crate) fn launched(&mut self, kernel: &str) {
        if !self.kernels.contains(kernel) {
            self.kernels.insert(kernel.to_owned());
        }
    }

    /// A line for each kernel that was launched.
    pub(crate) fn kernels(&self) -> String {
        self.kernels.iter().map(|name| format!("{name}\n")).collect()
    }

    /// The planned failure of this call, if there is one. Of two for the same call the first planned wins.
    pub(crate) fn injected(&mut self, name: &str) -> Option<Code> {
        let mut found = None;
        self.faults.retain_mut(|fault| {
            if fault.name != name {
                return true;
            }
            fault.remaining -= 1;
            if fault.remaining == 0 {
                found.get_or_insert(fault.code);
            }
            fault.remaining > 0
        });
        found
    }

    /// Plans `name:count:code` faults, several separated by commas. Either all are taken or none.
    pub(crate) fn plan(&mut self, text: &str) -> Result<(), String> {
        let mut planned = Vec::new();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let mut parts = item.split(':');
            let (Some(name), Some(count), Some(code), None) =
                (parts.next(), parts.next(), parts.next(), parts.next())
            else {
                return Err(format!(
                    "fail: {item}: expected function:count:code, for example cuMemAllocAsync:3:2"
                ));
            };
            if !crate::names().any(|known| known == name) {
                return Err(format!("fail: {name}: no entry point of that name"));
            }
            let remaining = count.parse().ok().filter(|count| *count > 0);
            let (Some(remaining), Ok(code)) = (remaining, code.parse()) else {
                return Err(format!("fail: {item}: count starts at 1, code is an integer"));
            };
            planned.push(Fault { name: name.to_owned(), remaining, code: Code(code) });
        }
        self.faults.append(&mut planned);
        Ok(())
    }

    pub(crate) fn clear_faults(&mut self) {
        self.faults.clear();
    }

    pub(crate) fn reset_counts(&mut self) {
        self.kernels.clear();
        self.counts.clear();
    }

    /// One line `name count` for every entry point called so far, by name.
    pub(crate) fn text(&self) -> String {
        self.counts.iter().map(|(name, count)| format!("{name} {count}\n")).collect()
    }
}
