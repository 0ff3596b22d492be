//! The policy for freed device memory.

/// The policy for freed device memory: [`CudaOptions::allocator`](crate::CudaOptions::allocator).
///
/// See [`CudaOptions`](crate::CudaOptions) for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CudaAllocator {
    /// It is kept for later tensors of about the same size, so a training loop soon makes no driver calls for memory.
    #[default]
    Caching,
    /// It is returned to the driver at once. Each tensor is a separate allocation, so memory checkers see every access
    /// beyond its end.
    Exact,
}
