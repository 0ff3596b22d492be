//! Kernels by their files and names.

use std::marker::PhantomData;

/// A file of kernels.
pub(crate) trait KernelFile {
    /// Its name without the ending: no two files have the same.
    fn stem(&self) -> &'static str;

    /// The whole program.
    fn program(&self) -> String;

    /// PTX of this very program for sm_89, which every later GPU's driver compiles on loading.
    fn snapshot(&self) -> &'static str;
}

/// A kernel file's kernel with the parameters `P`.
pub(crate) struct Entry<P> {
    pub(super) file: &'static dyn KernelFile,
    pub(super) name: &'static str,
    parameters: PhantomData<fn() -> P>,
}

impl<P> Entry<P> {
    pub(crate) const fn new(file: &'static dyn KernelFile, name: &'static str) -> Self {
        Self { file, name, parameters: PhantomData }
    }
}

impl<P> Clone for Entry<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Entry<P> {}
