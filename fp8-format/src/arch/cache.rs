//! Decisions that depend on the caches of the CPU: the size from which results bypass them, and whether sources are
//! prefetched.

use std::sync::OnceLock;

/// The size that is assumed where the CPU reports none, or one below 1 MiB.
const UNKNOWN: usize = 32 << 20;

/// Bytes of the largest cache that the calling core reaches; asked once.
pub(crate) fn last_level() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| largest().filter(|size| *size >= 1 << 20).unwrap_or(UNKNOWN))
}

/// Returns true if plain arithmetic loops whose results bypass the caches should prefetch their sources into the nearest cache by
/// software. The CPU is queried once.
///
/// Intel's hardware prefetchers stop at the end of a 4 KiB page, and the arithmetic of a block fills the window in which the
/// core itself would find the loads of the next page. Prefetching two pages ahead hides that; it was measured on Ice Lake. The
/// prefetchers of AMD's Zen 4 keep up by themselves: there the additional requests made conversion of f32 3 to 15 percent
/// slower. Every other CPU is treated like AMD's.
///
/// Loops that branch on their data, and loops that write more than they read, prefetch on every CPU: a mispredicted branch
/// discards the loads behind it, and a prefetcher sees only one line for several lines written.
#[cfg(target_arch = "x86_64")]
pub(crate) fn needs_prefetch() -> bool {
    static NEEDS: OnceLock<bool> = OnceLock::new();
    *NEEDS.get_or_init(|| vendor() == *b"GenuineIntel")
}

/// Returns the twelve letters by which the CPU names its vendor.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn vendor() -> [u8; 12] {
    let id = cpuid(0, 0);
    let [[a, b, c, d], [e, f, g, h], [i, j, k, l]] = [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes);
    [a, b, c, d, e, f, g, h, i, j, k, l]
}

#[cfg(all(target_arch = "x86_64", miri))]
fn vendor() -> [u8; 12] {
    [0; 12]
}

/// Returns what the CPU says about itself in a leaf of its identification.
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
