//! A case: a function that every backend must pass, once or for each of the types that it is given.

use super::data::{ENCODINGS, FLOATS};
use fp8_kernels::ops::Activation;
use fp8_kernels::{DType, Device, Encoding};
use libtest_mimic::Failed;
use std::sync::atomic::AtomicBool;

/// Whether attention runs by cuDNN, which rounds probabilities to the tensors' type: its error has the size of the tensor, not of
/// each element.
pub(crate) static BY_CUDNN: AtomicBool = AtomicBool::new(false);

/// `?` works on every error and string in a case.
pub(crate) type Outcome = Result<(), Failed>;

/// The function of a case, by the arguments that it is run for besides the device.
pub(crate) enum Run {
    Once(fn(&Device) -> Outcome),
    Dtypes(fn(&Device, DType) -> Outcome),
    Formats(fn(&Device, Encoding) -> Outcome),
    DtypesAndFormats(fn(&Device, DType, Encoding) -> Outcome),
    Activations(fn(&Device, Activation) -> Outcome),
    ActivationsAndDtypes(fn(&Device, Activation, DType) -> Outcome),
}

pub(crate) struct Case {
    pub(crate) module: &'static str,
    pub(crate) name: &'static str,
    pub(crate) run: Run,
}

/// A case for one choice of types.
pub(crate) type Single = Box<dyn Fn(&Device) -> Outcome + Send>;

impl Case {
    /// The operation: the file it stands in.
    pub(crate) fn operation(&self) -> &'static str {
        self.module.rsplit("::").next().unwrap_or_default()
    }

    /// `operation::case`, and behind it the types.
    pub(crate) fn singles(&self) -> Vec<(String, Single)> {
        let path = format!("{}::{}", self.operation(), self.name);
        let single = |types: String, run: Single| (format!("{path}::{}", types.to_lowercase()), run);
        match self.run {
            Run::Once(run) => vec![(path, Box::new(run))],
            Run::Dtypes(run) => {
                let of = |d: DType| single(d.to_string(), Box::new(move |device| run(device, d)));
                FLOATS.into_iter().map(of).collect()
            }
            Run::Formats(run) => {
                let of = |e: Encoding| single(e.to_string(), Box::new(move |device| run(device, e)));
                ENCODINGS.into_iter().map(of).collect()
            }
            Run::DtypesAndFormats(run) => {
                let of = |(d, e): (DType, Encoding)| {
                    single(format!("{d}_{e}"), Box::new(move |device| run(device, d, e)))
                };
                FLOATS.into_iter().flat_map(|d| ENCODINGS.map(|e| (d, e))).map(of).collect()
            }
            Run::Activations(run) => {
                let of = |a: Activation| single(a.to_string(), Box::new(move |device| run(device, a)));
                Activation::ALL.into_iter().map(of).collect()
            }
            Run::ActivationsAndDtypes(run) => {
                let of = |(a, d): (Activation, DType)| {
                    single(format!("{a}_{d}"), Box::new(move |device| run(device, a, d)))
                };
                Activation::ALL.into_iter().flat_map(|a| FLOATS.map(|d| (a, d))).map(of).collect()
            }
        }
    }
}

/// `cases![first, second: Dtypes]`: the table of a file's cases, named after their functions; behind a colon what they are
/// run for, one of [`Run`].
macro_rules! cases {
    (@run $name:ident) => { $crate::cases::case::Run::Once($name) };
    (@run $name:ident $run:ident) => { $crate::cases::case::Run::$run($name) };
    ($($name:ident $(: $run:ident)?),* $(,)?) => {
        pub(crate) const CASES: &[$crate::cases::case::Case] = &[$(
            $crate::cases::case::Case {
                module: module_path!(),
                name: stringify!($name),
                run: $crate::cases::case::cases!(@run $name $($run)?),
            },
        )*];
    };
}
pub(crate) use cases;
