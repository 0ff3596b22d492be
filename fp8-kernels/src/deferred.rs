//! Work on a device's memory that is put off until its result is needed.

use crate::Result;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Work that is put off, such as setting a gradient to 0 that the next backward pass may overwrite.
///
/// Pass it to [`Device::defer`](crate::Device::defer). A recorded step runs again and again, but the host's decision to do the work is
/// not part of it. So [`Device::capture`](crate::Device::capture) has all work done before a recording begins, and the work that
/// was put off while recording becomes the end of the recorded step. If a recording fails, nothing of it has run, and work that was
/// done in it is still to be done: [`Replayed::retreat`](crate::Replayed::retreat) tells.
///
/// ```
/// use fp8_kernels::{DType, Deferred, Device, Result, Tensor};
/// use std::sync::{Arc, Mutex};
///
/// /// A sum that is set to 0 when somebody asks for it.
/// #[derive(Debug)]
/// struct Sum(Mutex<(Tensor, bool)>);
///
/// impl Deferred for Sum {
///     fn settle(&self) -> Result<()> {
///         let (sum, is_cleared) = &mut *self.0.lock().unwrap();
///         if std::mem::take(is_cleared) { sum.set_zero("sum") } else { Ok(()) }
///     }
/// }
///
/// let device = Device::cpu();
/// let sum = Arc::new(Sum(Mutex::new((Tensor::full(2.0, [1], DType::F32, &device)?, true))));
/// device.defer(&(sum.clone() as Arc<dyn Deferred>));
/// sum.settle()?;
/// assert_eq!(sum.0.lock().unwrap().0.item()?, 0.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub trait Deferred: Send + Sync + fmt::Debug {
    /// Queues the work if it is still to be done.
    ///
    /// # Errors
    /// The device failed.
    fn settle(&self) -> Result<()>;
}

/// The work that is put off on one device.
#[derive(Debug, Default)]
pub(crate) struct DeferredWork(Mutex<Vec<Weak<dyn Deferred>>>);

impl DeferredWork {
    /// Remembers `work` as long as it exists.
    pub(crate) fn add(&self, work: &Arc<dyn Deferred>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let added = Arc::downgrade(work);
        if all.iter().any(|old| old.ptr_eq(&added)) {
            return;
        }
        // The vector is about to grow: a good time to forget what is gone.
        if all.len() == all.capacity() {
            all.retain(|work| work.strong_count() > 0);
        }
        all.push(added);
    }

    /// Has all work done.
    ///
    /// # Errors
    /// Those of [`Deferred::settle`].
    pub(crate) fn settle(&self) -> Result<()> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        all.iter().filter_map(Weak::upgrade).try_for_each(|work| work.settle())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    #[derive(Debug, Default)]
    struct Count(AtomicUsize);

    impl Deferred for Count {
        fn settle(&self) -> Result<()> {
            self.0.fetch_add(1, Relaxed);
            Ok(())
        }
    }

    #[test]
    fn work_that_is_gone_is_forgotten() {
        let (all, kept) = (DeferredWork::default(), Arc::new(Count::default()));
        all.add(&(kept.clone() as Arc<dyn Deferred>));
        for _ in 0..1000 {
            all.add(&(Arc::new(Count::default()) as Arc<dyn Deferred>));
        }
        assert!(all.0.lock().unwrap().len() < 10);
        all.settle().unwrap();
        assert_eq!(kept.0.load(Relaxed), 1);
        // Work that is added again is done once.
        all.add(&(kept.clone() as Arc<dyn Deferred>));
        all.settle().unwrap();
        assert_eq!(kept.0.load(Relaxed), 2);
    }
}
