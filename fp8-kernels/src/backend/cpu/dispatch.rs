//! Code compiled for more CPU features than the target has.
#![expect(unsafe_code, reason = "run-time dispatch by the features of the CPU; see each SAFETY line")]

/// Work that is compiled twice, plainly and for AVX2 and FMA.
///
/// Closures are kernels, but the compiler need not inline a long one where the features are, and then its `mul_add`s are
/// calls: hot loops over `math` are types of their own, with `run` and all below it `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;

    fn run(self) -> Self::Output;
}

impl<R, F: FnOnce() -> R> Kernel for F {
    type Output = R;

    #[inline(always)]
    fn run(self) -> R {
        self()
    }
}

/// Runs `kernel`, compiled with AVX2 and FMA where the CPU has both.
///
/// `mul_add` is one instruction then, and loops become vectors. The bits are the same either way: without the feature
/// `mul_add` calls a correctly rounded function, slowly.
#[inline]
pub(crate) fn vectorized<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the CPU has the two features that `with_fma` is compiled for; they were just detected.
        return unsafe { with_fma(kernel) };
    }
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_fma<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
