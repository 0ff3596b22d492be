//! The size of the last-level cache, from which on stores past the caches pay.

use std::sync::OnceLock;

/// Where the CPU does not say.
const UNKNOWN: usize = 32 << 20;

/// Bytes of the largest cache that the calling core reaches; asked once.
pub(crate) fn last_level() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| largest().filter(|size| *size >= 1 << 20).unwrap_or(UNKNOWN))
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn largest() -> Option<usize> {
    use core::arch::x86_64::{__cpuid, __cpuid_count, __get_cpuid_max};
    // Caches one by one: Intel's leaf, and AMD's of the same form.
    let (last, _) = __get_cpuid_max(0);
    let (last_extended, _) = __get_cpuid_max(0x8000_0000);
    let is_amd = last_extended >= 0x8000_001D && __cpuid(0x8000_0001).ecx & (1 << 22) != 0;
    let leaf = if is_amd { 0x8000_001D } else { 4 };
    if !is_amd && last < 4 {
        return None;
    }
    (0..16)
        .map(|index| __cpuid_count(leaf, index))
        .take_while(|cache| cache.eax & 0x1F != 0)
        .map(|cache| {
            let field = |bits: u32, shift: u32, width: u32| (bits >> shift & ((1 << width) - 1)) as usize + 1;
            let [line, partitions, ways] =
                [(0, 12), (12, 10), (22, 10)].map(|(shift, width)| field(cache.ebx, shift, width));
            line * partitions * ways * (cache.ecx as usize + 1)
        })
        .max()
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn largest() -> Option<usize> {
    None
}
