//! The CUDA backend of a build without the `cuda` feature: the same names, no values.
//!
//! The types are empty enums, so a match on one has no arms and code for a GPU needs no `cfg`: the compiler knows that it
//! cannot run.

use crate::deferred::DeferredWork;
use crate::memory::Ledger;
use crate::{DType, Error, MemoryKind, Replayed, Result, TransposePolicy, TunedProducts};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Returns the error of a build that can open no GPU.
pub(crate) fn open(ordinal: usize) -> Result<Gpu> {
    Err(Error::NoCudaFeature { device: format!("cuda:{ordinal}") })
}

/// A GPU, which does not exist here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gpu {}

/// Elements on a GPU.
#[derive(Debug, Clone)]
pub(crate) enum Buffer {}

/// The host's knowledge of the scales in a block on a GPU.
#[derive(Debug)]
pub(crate) enum Known {}

/// A step recorded on a GPU.
#[derive(Debug)]
pub(crate) enum CudaGraph {}

impl fmt::Display for Gpu {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

/// `absent!(Gpu { fn name(&self) -> &str; })`: methods that cannot be called, since there is no value to call them on.
macro_rules! absent {
    ($type:ident { $(fn $name:ident $(<$($generic:ident $(: $bound:path)?),*>)? (&self $(, $argument:ty)*) $(-> $output:ty)?;)* }) => {
        impl $type {
            $(pub(crate) fn $name $(<$($generic $(: $bound)?),*>)? (&self $(, _: $argument)*) $(-> $output)? {
                match *self {}
            })*
        }
    };
}

absent!(Gpu {
    fn name(&self) -> &str;
    fn is_simulated(&self) -> bool;
    fn transpose_policy(&self) -> TransposePolicy;
    fn synchronize(&self) -> Result<()>;
    fn release_kept(&self);
    fn ledger(&self) -> &Ledger;
    fn tuned_products(&self) -> TunedProducts;
    fn use_tuned_products(&self, &TunedProducts) -> Result<usize>;
    fn alloc(&self, DType, usize) -> Result<Buffer>;
    fn zeros(&self, DType, usize) -> Result<Buffer>;
    fn filled_f32(&self, f32, usize) -> Result<Buffer>;
    fn write(&self, u64, &[u8]) -> Result<()>;
    fn download<T: bytemuck::Pod>(&self, u64, &mut [T]) -> Result<()>;
    fn copy(&self, u64, u64, usize) -> Result<()>;
    fn clear_bytes(&self, u64, usize) -> Result<()>;
    fn fill_f32(&self, u64, f32, usize) -> Result<()>;
    fn capture_number(&self) -> Option<u64>;
    fn expect_eager(&self, &str, &'static str) -> Result<()>;
    fn on_replay(&self, Arc<dyn Replayed>);
    fn expect_usable(&self) -> Result<()>;
    fn has_graphs(&self) -> bool;
    fn deferred(&self) -> &DeferredWork;
});

impl Gpu {
    pub(crate) fn capture<T, E>(&self, _: impl FnOnce() -> Result<T, E>) -> Result<(CudaGraph, T), E> {
        match *self {}
    }
}

absent!(Buffer {
    fn ptr(&self) -> u64;
    fn len(&self) -> usize;
    fn bytes(&self) -> usize;
    fn dtype(&self) -> DType;
    fn holders(&self) -> usize;
    fn set_memory_kind(&self, MemoryKind);
});

absent!(Known {
    fn of_copy(&self) -> Result<Self>;
    fn is_set(&self, usize) -> bool;
    fn was_read(&self, usize);
    fn refresh(&self, &Buffer) -> Result<()>;
});

impl Known {
    pub(crate) fn new(gpu: &Gpu, _: usize, _: f32) -> Result<Self> {
        match *gpu {}
    }

    pub(crate) fn written(&self, _: Range<usize>, _: impl Fn(usize) -> f32) {
        match *self {}
    }
}

absent!(CudaGraph {
    fn replay(&self) -> Result<()>;
});

pub(crate) mod ops {
    //! Operations of the backend that [`Cells`](crate::cells) calls by name.

    pub(crate) mod cells {
        use super::super::{Buffer, Gpu};
        use crate::Result;

        pub(crate) fn merge_max(gpu: &Gpu, _: u64, _: &[f32]) -> Result<()> {
            match *gpu {}
        }

        pub(crate) fn merge_cell(gpu: &Gpu, _: u64, _: u64) -> Result<()> {
            match *gpu {}
        }

        pub(crate) fn replace_negative(gpu: &Gpu, _: &Buffer, _: f32) -> Result<()> {
            match *gpu {}
        }
    }
}
