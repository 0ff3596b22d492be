//! The size of the last-level cache, from which on stores past the caches pay.

use std::sync::OnceLock;

/// Where the CPU does not say.
const UNKNOWN: usize = 32 << 20;

/// Bytes of the largest cache that the calling core reaches; asked once.
pub(crate) fn last_level() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| largest().filter(|size| *size >= 1 << 20).unwrap_or(UNKNOWN))
}

/// What the CPU says about itself.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[allow(unused_unsafe, reason = "safe in newer Rust")]
fn cpuid(leaf: u32, part: u32) -> core::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 CPU has this instruction, and it takes any number.
    unsafe { core::arch::x86_64::__cpuid_count(leaf, part) }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn largest() -> Option<usize> {
    // Caches one by one: Intel's leaf, and AMD's of the same form.
    let last = cpuid(0, 0).eax;
    let last_extended = cpuid(0x8000_0000, 0).eax;
    let is_amd = last_extended >= 0x8000_001D && cpuid(0x8000_0001, 0).ecx & (1 << 22) != 0;
    let leaf = if is_amd { 0x8000_001D } else { 4 };
    if !is_amd && last < 4 {
        return None;
    }
    (0..16)
        .map(|index| cpuid(leaf, index))
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
