//! A case: a function that every backend must pass.

use fp8_kernels::Device;
use libtest_mimic::Failed;

/// `?` works on every error and string in a case.
pub(crate) type Outcome = Result<(), Failed>;

pub(crate) struct Case {
    pub(crate) module: &'static str,
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Device) -> Outcome,
}

impl Case {
    /// `operation::case`.
    pub(crate) fn path(&self) -> String {
        let operation = self.module.rsplit("::").next().unwrap_or_default();
        format!("{operation}::{}", self.name)
    }
}

/// `cases![first, second]`: the table of a file's cases, named after their functions.
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        pub(crate) const CASES: &[$crate::cases::case::Case] = &[$(
            $crate::cases::case::Case { module: module_path!(), name: stringify!($name), run: $name },
        )*];
    };
}
pub(crate) use cases;
