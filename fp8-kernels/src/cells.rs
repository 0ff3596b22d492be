//! Numbers that operations write while others read the table they stand in: amaxes, scales, counts.
//!
//! They lie in contiguous blocks on a device, so that all of a table is one copy; a [`Cell`] or [`Counters`] is a handle
//! on one entry. Where the host cannot reach the device's memory, reading one waits for the work that was queued before.

use crate::backend::{Backend, cuda};
use crate::{Device, Error, Result, host};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// One f32 of a block. Clones are handles on the same number.
///
/// ```
/// use fp8_kernels::{Cell, Device};
/// let cell = Cell::new(2.0, &Device::cpu())?;
/// cell.merge_max(5.0)?;
/// assert_eq!(cell.read()?, 5.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cell {
    cells: Cells,
    index: usize,
}

impl Cell {
    /// A block of its own, with this value.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn new(value: f32, device: &Device) -> Result<Self> {
        Ok(Self { cells: Cells::new(1, value, device)?, index: 0 })
    }

    /// Its value. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<f32> {
        self.cells.read_one(self.index)
    }

    /// Replaces its value.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn write(&self, value: f32) -> Result<()> {
        self.cells.write(self.index, &[value])
    }

    /// Keeps the larger of its value and `amax`. A signed-integer maximum: right for all values ≥ 0 over
    /// [`REST`](crate::REST); infinity stays, NaN counts as larger still.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn merge_max(&self, amax: f32) -> Result<()> {
        self.cells.merge_max(self.index, &[amax])
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        &self.cells.device
    }

    /// Its address on a GPU.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        Ok(self.cells.cuda(op)?.ptr() + 4 * self.index as u64)
    }

    /// Whether the host knows, without asking the device, that a scale stands here for good. False only costs time.
    pub(crate) fn is_known_set(&self) -> bool {
        match &self.cells.block {
            CellBlock::Cuda(_, known) => known.is_set(self.index),
            CellBlock::Cpu(_) => false,
        }
    }

    /// What the host knows of its block, and its place there. None on the CPU.
    pub(crate) fn known(&self) -> Option<(&cuda::Known, usize)> {
        match &self.cells.block {
            CellBlock::Cuda(_, known) => Some((known, self.index)),
            CellBlock::Cpu(_) => None,
        }
    }

    /// One f32 on a GPU, which queued work fills.
    pub(crate) fn from_cuda(buffer: cuda::Buffer, known: cuda::Known, device: &Device) -> Self {
        let block = CellBlock::Cuda(buffer, Arc::new(known));
        Self { cells: Cells { device: device.clone(), block }, index: 0 }
    }
}

/// What quantizing one slot cost in values, summed over calls. Clones are handles on the same counts.
#[derive(Debug, Clone)]
pub struct Counters {
    counts: Counts,
    /// The index of its first count.
    start: usize,
}

/// What [`Counters`] held when they were read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct CounterValues {
    /// Finite values that, scaled, round beyond the format's largest value: above 464 in E4M3, from 61440 on in E5M2.
    pub saturated: u64,
    /// Values other than 0 that became 0.
    pub underflowed: u64,
    /// Values quantized.
    pub elements: u64,
    /// NaN values. They are stored as NaN and leave the amax alone, so this count is the only trace of them.
    pub nan: u64,
}

impl CounterValues {
    /// The number of counts that one slot has in a block.
    pub(crate) const LEN: usize = 4;

    /// One per slot, from their block.
    pub(crate) fn from_block(counts: &[u64]) -> Vec<Self> {
        let (slots, _) = counts.as_chunks::<{ Self::LEN }>();
        let values = |&[saturated, underflowed, elements, nan]: &[u64; Self::LEN]| Self {
            saturated,
            underflowed,
            elements,
            nan,
        };
        slots.iter().map(values).collect()
    }
}

impl Counters {
    /// A block of its own, all zero.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { counts: Counts::new(CounterValues::LEN, device)?, start: 0 })
    }

    /// Its values. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<CounterValues> {
        let counts = self.counts.read(self.range())?;
        Ok(CounterValues::from_block(&counts).into_iter().next().unwrap_or_default())
    }

    /// Back to zero.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset(&self) -> Result<()> {
        self.counts.reset(self.range())
    }

    /// Where they lie.
    pub fn device(&self) -> &Device {
        &self.counts.device
    }

    /// Their address on a GPU: [`CounterValues::LEN`] u64.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        Ok(self.counts.cuda(op)?.ptr() + 8 * self.start as u64)
    }

    /// Adds one tensor's counts, in host memory.
    pub(crate) fn add(&self, counts: CounterValues) -> Result<()> {
        let CounterValues { saturated, underflowed, elements, nan } = counts;
        let cells = self.counts.cpu("count")?.get(self.range()).unwrap_or_default();
        cells.iter().zip([saturated, underflowed, elements, nan]).for_each(|(cell, count)| {
            cell.fetch_add(count, Relaxed);
        });
        Ok(())
    }

    fn range(&self) -> Range<usize> {
        self.start..self.start + CounterValues::LEN
    }
}

/// Contiguous f32 on a device. Clones share it. Ranges lie within it: that is for the caller to see to, and what does not
/// is left out.
#[derive(Debug, Clone)]
pub(crate) struct Cells {
    device: Device,
    block: CellBlock,
}

#[derive(Debug, Clone)]
enum CellBlock {
    /// The bits of each, so that an integer maximum is the maximum of amaxes.
    Cpu(Arc<Vec<AtomicI32>>),
    Cuda(cuda::Buffer, Arc<cuda::Known>),
}

impl Cells {
    /// `len` times `value`.
    pub(crate) fn new(len: usize, value: f32, device: &Device) -> Result<Self> {
        let block = match device.backend() {
            Backend::Cpu => {
                let cells = if bits(value) == 0 {
                    host::zeroed("cells", len)?
                } else {
                    host::collect("cells", (0..len).map(|_| AtomicI32::new(bits(value))))?
                };
                CellBlock::Cpu(Arc::new(cells))
            }
            Backend::Cuda(gpu) => {
                let cells = gpu.filled_f32(value, len)?;
                CellBlock::Cuda(cells, Arc::new(cuda::Known::new(gpu, len, value)?))
            }
        };
        Ok(Self { device: device.clone(), block })
    }

    /// Another block with the same values, copied where they lie.
    pub(crate) fn duplicate(&self) -> Result<Self> {
        let block = match &self.block {
            CellBlock::Cpu(cells) => {
                let cells = cells.iter().map(|cell| AtomicI32::new(cell.load(Relaxed)));
                CellBlock::Cpu(Arc::new(host::collect("cells", cells)?))
            }
            CellBlock::Cuda(cells, known) => {
                let gpu = self.device.gpu("duplicate")?;
                let copy = gpu.alloc(crate::DType::F32, cells.len())?;
                gpu.copy(copy.ptr(), cells.ptr(), cells.bytes())?;
                CellBlock::Cuda(copy, Arc::new(known.of_copy()?))
            }
        };
        Ok(Self { device: self.device.clone(), block })
    }

    /// A handle on each.
    pub(crate) fn handles(&self, range: Range<usize>) -> Result<Vec<Cell>> {
        host::collect("cells", range.map(|index| Cell { cells: self.clone(), index }))
    }

    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<f32>> {
        match &self.block {
            CellBlock::Cpu(cells) => {
                host::collect("cells", cells.get(range).unwrap_or_default().iter().map(value))
            }
            CellBlock::Cuda(cells, _) => {
                let range = within(range, cells.len());
                let mut values = host::zeroed::<f32>("cells", range.len())?;
                self.device.gpu("read")?.download(cells.ptr() + 4 * range.start as u64, &mut values)?;
                Ok(values)
            }
        }
    }

    pub(crate) fn read_one(&self, index: usize) -> Result<f32> {
        match &self.block {
            CellBlock::Cpu(cells) => Ok(cells.get(index).map_or(0.0, value)),
            CellBlock::Cuda(..) => Ok(self.read(index..index + 1)?.first().copied().unwrap_or(0.0)),
        }
    }

    pub(crate) fn write(&self, start: usize, values: &[f32]) -> Result<()> {
        match &self.block {
            CellBlock::Cpu(cells) => {
                let cells = cells.get(start..).unwrap_or_default();
                cells.iter().zip(values).for_each(|(cell, &value)| cell.store(bits(value), Relaxed));
            }
            CellBlock::Cuda(cells, known) => {
                let range = within(start..start.saturating_add(values.len()), cells.len());
                let bytes = bytemuck::cast_slice(&values[..range.len()]);
                self.device.gpu("write")?.write(cells.ptr() + 4 * range.start as u64, bytes)?;
                known.written(range, |i| values[i]);
            }
        }
        Ok(())
    }

    pub(crate) fn fill(&self, range: Range<usize>, value: f32) -> Result<()> {
        match &self.block {
            CellBlock::Cpu(cells) => {
                let cells = cells.get(range).unwrap_or_default();
                cells.iter().for_each(|cell| cell.store(bits(value), Relaxed));
            }
            CellBlock::Cuda(cells, known) => {
                let range = within(range, cells.len());
                let address = cells.ptr() + 4 * range.start as u64;
                self.device.gpu("fill")?.fill_f32(address, value, range.len())?;
                known.written(range, |_| value);
            }
        }
        Ok(())
    }

    /// Each from `start` on keeps the larger of itself and its value, as [`Cell::merge_max`] says.
    pub(crate) fn merge_max(&self, start: usize, values: &[f32]) -> Result<()> {
        match &self.block {
            CellBlock::Cpu(cells) => {
                let cells = cells.get(start..).unwrap_or_default();
                cells.iter().zip(values).for_each(|(cell, &value)| {
                    cell.fetch_max(bits(value), Relaxed);
                });
            }
            CellBlock::Cuda(cells, _) => {
                let range = within(start..start.saturating_add(values.len()), cells.len());
                let address = cells.ptr() + 4 * range.start as u64;
                cuda::ops::cells::merge_max(self.device.gpu("merge_max")?, address, &values[..range.len()])?;
            }
        }
        Ok(())
    }

    /// Each that is below 0 becomes `value`.
    pub(crate) fn replace_negative(&self, value: f32) -> Result<()> {
        match &self.block {
            CellBlock::Cpu(cells) => {
                let negative = cells.iter().filter(|cell| self::value(cell) < 0.0);
                negative.for_each(|cell| cell.store(bits(value), Relaxed));
            }
            CellBlock::Cuda(cells, _) => {
                cuda::ops::cells::replace_negative(self.device.gpu("replace_negative")?, cells, value)?;
            }
        }
        Ok(())
    }

    /// Work that may have set scales has been queued.
    pub(crate) fn refresh_known(&self) -> Result<()> {
        match &self.block {
            CellBlock::Cuda(cells, known) => known.refresh(cells),
            CellBlock::Cpu(_) => Ok(()),
        }
    }

    /// On a GPU, or an error that names `op`.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<&cuda::Buffer> {
        match &self.block {
            CellBlock::Cuda(buffer, _) => Ok(buffer),
            CellBlock::Cpu(_) => {
                Err(Error::Devices { op, lhs: self.device.to_string(), rhs: "a GPU".to_owned() })
            }
        }
    }

    /// In host memory, or an error that names `op`.
    pub(crate) fn cpu(&self, op: &'static str) -> Result<&[AtomicI32]> {
        let host = match &self.block {
            CellBlock::Cpu(cells) => Some(cells.as_slice()),
            CellBlock::Cuda(..) => None,
        };
        host.ok_or_else(|| Error::HostMemory { op, device: self.device.to_string() })
    }
}

/// Contiguous u64 on a device, all zero at first. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Counts {
    device: Device,
    block: CountBlock,
}

#[derive(Debug, Clone)]
enum CountBlock {
    Cpu(Arc<Vec<AtomicU64>>),
    /// Eight bytes each.
    Cuda(cuda::Buffer),
}

impl Counts {
    pub(crate) fn new(len: usize, device: &Device) -> Result<Self> {
        let block = match device.backend() {
            Backend::Cpu => CountBlock::Cpu(Arc::new(host::zeroed("counts", len)?)),
            Backend::Cuda(gpu) => CountBlock::Cuda(gpu.zeros(crate::DType::U8, len.saturating_mul(8))?),
        };
        Ok(Self { device: device.clone(), block })
    }

    /// The counters of each of `slots` slots.
    pub(crate) fn handles(&self, slots: usize) -> Result<Vec<Counters>> {
        let handle = |slot| Counters { counts: self.clone(), start: slot * CounterValues::LEN };
        host::collect("counts", (0..slots).map(handle))
    }

    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<u64>> {
        match &self.block {
            CountBlock::Cpu(counts) => {
                let counts = counts.get(range).unwrap_or_default();
                host::collect("counts", counts.iter().map(|count| count.load(Relaxed)))
            }
            CountBlock::Cuda(counts) => {
                let range = within(range, counts.len() / 8);
                let mut values = host::zeroed::<u64>("counts", range.len())?;
                self.device.gpu("read")?.download(counts.ptr() + 8 * range.start as u64, &mut values)?;
                Ok(values)
            }
        }
    }

    /// Replaces the first ones.
    pub(crate) fn write(&self, values: &[u64]) -> Result<()> {
        match &self.block {
            CountBlock::Cpu(counts) => {
                counts.iter().zip(values).for_each(|(count, &value)| count.store(value, Relaxed));
            }
            CountBlock::Cuda(counts) => {
                let len = values.len().min(counts.len() / 8);
                self.device.gpu("write")?.write(counts.ptr(), bytemuck::cast_slice(&values[..len]))?;
            }
        }
        Ok(())
    }

    /// Back to zero.
    pub(crate) fn reset(&self, range: Range<usize>) -> Result<()> {
        match &self.block {
            CountBlock::Cpu(counts) => {
                counts.get(range).unwrap_or_default().iter().for_each(|count| count.store(0, Relaxed));
            }
            CountBlock::Cuda(counts) => {
                let range = within(range, counts.len() / 8);
                let address = counts.ptr() + 8 * range.start as u64;
                self.device.gpu("reset")?.clear_bytes(address, 8 * range.len())?;
            }
        }
        Ok(())
    }

    /// On a GPU, or an error that names `op`.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<&cuda::Buffer> {
        match &self.block {
            CountBlock::Cuda(buffer) => Ok(buffer),
            CountBlock::Cpu(_) => {
                Err(Error::Devices { op, lhs: self.device.to_string(), rhs: "a GPU".to_owned() })
            }
        }
    }

    /// In host memory, or an error that names `op`.
    pub(crate) fn cpu(&self, op: &'static str) -> Result<&[AtomicU64]> {
        let host = match &self.block {
            CountBlock::Cpu(counts) => Some(counts.as_slice()),
            CountBlock::Cuda(_) => None,
        };
        host.ok_or_else(|| Error::HostMemory { op, device: self.device.to_string() })
    }
}

/// The part of `range` below `len`.
fn within(range: Range<usize>, len: usize) -> Range<usize> {
    let start = range.start.min(len);
    start..range.end.clamp(start, len)
}

const fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

/// Of a cell in host memory.
pub(crate) fn value(cell: &AtomicI32) -> f32 {
    f32::from_bits(cell.load(Relaxed) as u32)
}

/// Of a cell in host memory.
pub(crate) fn store(cell: &AtomicI32, value: f32) {
    cell.store(bits(value), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{REST, UNSET};

    #[test]
    fn a_block_is_read_and_written_in_ranges() {
        let cells = Cells::new(5, REST, &Device::cpu()).unwrap();
        cells.write(1, &[2.0, -3.0]).unwrap();
        assert_eq!(cells.read(0..5).unwrap(), [REST, 2.0, -3.0, REST, REST]);
        let copy = cells.duplicate().unwrap();
        cells.fill(3..5, 4.0).unwrap();
        cells.replace_negative(UNSET).unwrap();
        cells.merge_max(0, &[0.0, 1.0, f32::INFINITY, 4.0, 5.0]).unwrap();
        assert_eq!(cells.read(0..5).unwrap(), [0.0, 2.0, f32::INFINITY, 4.0, 5.0]);
        assert_eq!(copy.read(0..5).unwrap(), [REST, 2.0, -3.0, REST, REST]);
    }

    #[test]
    fn handles_stand_for_one_entry() {
        let cells = Cells::new(3, 0.0, &Device::cpu()).unwrap();
        let handles = cells.handles(1..3).unwrap();
        handles[1].clone().write(7.0).unwrap();
        assert_eq!((handles[0].read().unwrap(), cells.read_one(2).unwrap()), (0.0, 7.0));
    }

    #[test]
    fn counters_of_one_block_do_not_touch_each_other() {
        let counts = Counts::new(8, &Device::cpu()).unwrap();
        let handles = counts.handles(2).unwrap();
        let all =
            |saturated, underflowed, elements, nan| CounterValues { saturated, underflowed, elements, nan };
        handles[1].add(all(1, 2, 3, 7)).unwrap();
        handles[1].add(all(1, 0, 3, 1)).unwrap();
        handles[0].add(all(5, 5, 5, 5)).unwrap();
        handles[0].reset().unwrap();
        let sums = all(2, 2, 6, 8);
        assert_eq!(handles[1].read().unwrap(), sums);
        assert_eq!(CounterValues::from_block(&counts.read(0..8).unwrap()), [CounterValues::default(), sums]);
    }
}
