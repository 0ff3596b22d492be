//! Device memory of one simulated GPU, as the host sees it.
//!
//! Allocations lie at multiples of 256 from `0x7000_0000_0000`, never at an address used before, with at least 256 bytes
//! between them that belong to nobody. Fresh bytes read 0xAA and count as unwritten: reading them back is an error.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::region::Region;

const FIRST: u64 = 0x7000_0000_0000;
const ALIGN: u64 = 256;
/// Freed allocations remembered for reports.
const REMEMBERED: usize = 65_536;
/// Bytes of race shadow kept from launch to launch.
const KEPT_SHADOW: usize = 256 << 20;

/// A host access to device memory that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The range does not lie in one live allocation.
    #[error("{op}: {bytes} bytes at {address:#x}: {place}")]
    OutOfBounds {
        /// The operation.
        op: &'static str,
        /// First byte.
        address: u64,
        /// Length.
        bytes: usize,
        /// The position relative to the nearest allocation, in words.
        place: String,
    },
    /// The host reads a byte that nobody wrote.
    #[error("{op}: {bytes} bytes at {address:#x}: byte {offset} of '{label}' was never written")]
    Uninitialised {
        /// The operation.
        op: &'static str,
        /// First byte.
        address: u64,
        /// Length.
        bytes: usize,
        /// Offset of the first unwritten byte in its allocation.
        offset: usize,
        /// The allocation.
        label: String,
    },
    /// An address that does not start a live allocation.
    #[error("free: {address:#x}: {place}")]
    NotAllocated {
        /// The address.
        address: u64,
        /// The position relative to the nearest allocation, in words.
        place: String,
    },
    /// A fill with a pattern that is not 1, 2 or 4 bytes long.
    #[error("fill: a pattern of {bytes} bytes: 1, 2 or 4 are possible")]
    Pattern {
        /// The pattern's length.
        bytes: usize,
    },
}

/// A live allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: usize,
    /// The name given when it was made.
    pub label: String,
}

/// An allocation that is not live: no more, or not yet.
#[derive(Clone, Debug)]
struct Absent {
    bytes: u64,
    label: String,
}

#[derive(Debug)]
pub(crate) struct Space {
    /// Live allocations by rising address.
    pub(crate) live: Vec<Region>,
    /// By first address; addresses rise, so that the first is the longest gone.
    freed: BTreeMap<u64, Absent>,
    /// By first address, what was reserved and is not open.
    reserved: BTreeMap<u64, Absent>,
    next: u64,
    /// The last phase any launch used.
    pub(crate) phase: u32,
}

/// The position of an address relative to the allocations.
pub(crate) struct Place {
    pub(crate) text: String,
    pub(crate) label: Option<String>,
    pub(crate) freed: bool,
}

impl Space {
    /// The live allocation that holds `address`, or would if it were longer.
    pub(crate) fn find(&self, address: u64) -> Option<usize> {
        self.live.partition_point(|region| region.base <= address).checked_sub(1)
    }

    fn range(&self, op: &'static str, address: u64, bytes: usize) -> Result<(usize, usize), MemoryError> {
        self.find(address)
            .and_then(|index| Some((index, self.live.get(index)?.offset(address, bytes)?)))
            .ok_or_else(|| MemoryError::OutOfBounds { op, address, bytes, place: self.place(address).text })
    }

    /// Says where `address` is.
    pub(crate) fn place(&self, address: u64) -> Place {
        for (absent, why, freed) in
            [(&self.freed, "was freed", true), (&self.reserved, "is not allocated yet", false)]
        {
            let below = absent.range(..=address).next_back();
            if let Some((base, Absent { bytes, label })) =
                below.filter(|(base, absent)| address < **base + absent.bytes.max(1))
            {
                let text = format!("byte {} of '{label}' ({bytes} bytes), which {why}", address - base);
                return Place { text, label: Some(label.clone()), freed };
            }
        }
        let below = self.find(address).and_then(|i| self.live.get(i));
        let above = self.live.get(self.live.partition_point(|region| region.base <= address));
        let from_below = below.map(|r| (address.saturating_sub(r.end()), r));
        let from_above = above.map(|r| (r.base - address, r));
        let (text, region) = match (from_below, from_above) {
            (Some((0, r)), _) if address < r.end() => {
                (format!("byte {} of '{}' ({} bytes)", address - r.base, r.label, r.data.len()), r)
            }
            (Some((gap, r)), above) if above.is_none_or(|(other, _)| gap <= other) => {
                (format!("{gap} bytes past the end of '{}' ({} bytes)", r.label, r.data.len()), r)
            }
            (_, Some((gap, r))) => (format!("{gap} bytes before '{}' ({} bytes)", r.label, r.data.len()), r),
            _ => return Place { text: "nothing is allocated".to_owned(), label: None, freed: false },
        };
        Place { text, label: Some(region.label.clone()), freed: false }
    }

    /// Numbers for the phases of a launch: never used before.
    pub(crate) fn start_launch(&mut self) -> u32 {
        if self.phase > u32::MAX / 2 {
            self.live.iter_mut().for_each(|region| region.shadow.clear());
            self.phase = 0;
        }
        self.phase += 1;
        self.phase
    }

    /// Keeps the shadows small.
    pub(crate) fn end_launch(&mut self, phase: u32) {
        self.phase = phase;
        if self.live.iter().map(|region| region.shadow.bytes()).sum::<usize>() > KEPT_SHADOW {
            self.live.iter_mut().for_each(|region| region.shadow.clear());
        }
    }
}

/// Device memory of one simulated GPU.
///
/// ```
/// use ptx_interp::Memory;
/// let memory = Memory::new();
/// let x = memory.allocate(8, "x");
/// memory.write(x, &[1, 2, 3, 4])?;
/// let mut out = [0; 4];
/// memory.read(x, &mut out)?;
/// assert_eq!(out, [1, 2, 3, 4]);
/// let error = memory.read(x + 2, &mut out).unwrap_err();
/// assert!(error.to_string().contains("byte 4 of 'x' was never written"));
/// # Ok::<(), ptx_interp::MemoryError>(())
/// ```
#[derive(Debug)]
pub struct Memory {
    space: Mutex<Space>,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl Memory {
    /// Memory without any allocation.
    #[must_use]
    pub fn new() -> Self {
        let space = Space {
            live: Vec::new(),
            freed: BTreeMap::new(),
            reserved: BTreeMap::new(),
            next: FIRST,
            phase: 0,
        };
        Self { space: Mutex::new(space) }
    }

    /// Locked for as long as a launch runs; a panic of another holder leaves nothing half-written that matters here.
    pub(crate) fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an allocation named `label` in reports and returns its address, a multiple of 256 not used before.
    pub fn allocate(&self, bytes: usize, label: &str) -> u64 {
        let address = self.reserve(bytes, label);
        self.open(address);
        address
    }

    /// As `allocate`, for memory that is not there before `open`: until then accesses to it are reported.
    pub fn reserve(&self, bytes: usize, label: &str) -> u64 {
        let mut space = self.space();
        let base = space.next;
        space.next = (base + bytes as u64).next_multiple_of(ALIGN) + ALIGN;
        space.reserved.insert(base, Absent { bytes: bytes as u64, label: label.to_owned() });
        base
    }

    /// Makes what was reserved at `address` live; does nothing to what is live or was freed.
    pub fn open(&self, address: u64) {
        let mut space = self.space();
        if let Some(Absent { bytes, label }) = space.reserved.remove(&address) {
            let at = space.live.partition_point(|region| region.base < address);
            space.live.insert(at, Region::new(address, bytes as usize, &label));
        }
    }

    /// Frees the allocation that starts at `address`; later accesses to it are reported as such.
    ///
    /// # Errors
    /// If no live allocation starts there.
    pub fn free(&self, address: u64) -> Result<(), MemoryError> {
        let mut space = self.space();
        let index = space.find(address).filter(|&i| space.live.get(i).is_some_and(|r| r.base == address));
        let Some(index) = index else {
            return Err(MemoryError::NotAllocated { address, place: space.place(address).text });
        };
        let region = space.live.remove(index);
        let freed = Absent { bytes: region.data.len() as u64, label: region.label };
        space.freed.insert(region.base, freed);
        if space.freed.len() > REMEMBERED {
            space.freed.pop_first();
        }
        Ok(())
    }

    /// Copies `bytes` to the device.
    ///
    /// # Errors
    /// If the range does not lie in one live allocation.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut space = self.space();
        let (index, offset) = space.range("write", address, bytes.len())?;
        let region = &mut space.live[index];
        region.data[offset..offset + bytes.len()].copy_from_slice(bytes);
        region.init.set(offset, bytes.len(), true);
        Ok(())
    }

    /// Copies from the device.
    ///
    /// # Errors
    /// If the range does not lie in one live allocation, or holds a byte nobody wrote.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let space = self.space();
        let bytes = out.len();
        let (index, offset) = space.range("read", address, bytes)?;
        let region = &space.live[index];
        if let Some(offset) = region.first_missing(offset, bytes) {
            let label = region.label.clone();
            return Err(MemoryError::Uninitialised { op: "read", address, bytes, offset, label });
        }
        out.copy_from_slice(&region.data[offset..offset + bytes]);
        Ok(())
    }

    /// Copies from device to device; unwritten bytes stay unwritten. The ranges may overlap.
    ///
    /// # Errors
    /// If a range does not lie in one live allocation.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), MemoryError> {
        let mut space = self.space();
        let (source, offset) = space.range("copy", from, bytes)?;
        let (target, at) = space.range("copy", to, bytes)?;
        let region = &space.live[source];
        let data = region.data[offset..offset + bytes].to_vec();
        let whole = region.init.all(offset, bytes);
        let written: Vec<bool> = if whole {
            Vec::new()
        } else {
            (offset..offset + bytes).map(|i| region.init.all(i, 1)).collect()
        };
        let region = &mut space.live[target];
        region.data[at..at + bytes].copy_from_slice(&data);
        region.init.set(at, bytes, true);
        for (i, _) in written.iter().enumerate().filter(|&(_, written)| !written) {
            region.init.set(at + i, 1, false);
        }
        Ok(())
    }

    /// Writes `pattern` `count` times.
    ///
    /// # Errors
    /// If the range does not lie in one live allocation, or the pattern is not 1, 2 or 4 bytes long.
    pub fn fill(&self, address: u64, pattern: &[u8], count: usize) -> Result<(), MemoryError> {
        if !matches!(pattern.len(), 1 | 2 | 4) {
            return Err(MemoryError::Pattern { bytes: pattern.len() });
        }
        let mut space = self.space();
        let bytes = pattern.len().saturating_mul(count);
        let (index, offset) = space.range("fill", address, bytes)?;
        let region = &mut space.live[index];
        for chunk in region.data[offset..offset + bytes].chunks_exact_mut(pattern.len()) {
            chunk.copy_from_slice(pattern);
        }
        region.init.set(offset, bytes, true);
        Ok(())
    }

    /// Returns the live allocations by rising address.
    pub fn live(&self) -> Vec<Allocation> {
        let allocation =
            |r: &Region| Allocation { address: r.base, bytes: r.data.len(), label: r.label.clone() };
        self.space().live.iter().map(allocation).collect()
    }

    /// The bytes allocated.
    pub fn live_bytes(&self) -> usize {
        self.space().live.iter().map(|region| region.data.len()).sum()
    }
}
