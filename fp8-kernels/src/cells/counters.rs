//! Counts of saturated and underflowed values, and the block in which the counts of many slots are stored.

use super::span::Span;
use crate::backend::{Backend, cuda};
use crate::{Device, Error, Result, host};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of the values that quantizing one slot saturated or flushed to zero, summed over calls.
///
/// Clones are handles on the same counts.
///
/// ```
/// use fp8_kernels::{Cell, CounterValues, Counters, Device, Encoding, ScalePolicy, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let (scale, counters) = (Cell::new(1.0, &cpu)?, Counters::new(&cpu)?);
/// let slot = Slot { counters: Some(&counters), ..Slot::fixed(Encoding::E4M3, &scale, &rule) };
/// ops::quantize(&Tensor::from_vec(vec![1.0f32, 1e3, 1e-6, f32::NAN], [4], &cpu)?, &slot)?;
/// let expected = CounterValues { saturated: 1, underflowed: 1, elements: 4, nan: 1 };
/// assert_eq!(counters.read()?, expected);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Clone)]
pub struct Counters {
    counts: Counts,
    /// The index of its first count; the block has all four.
    start: usize,
}

/// The values of [`Counters`] at the time they were read.
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
    /// Allocates counts for one slot, all zero.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { counts: Counts::new(CounterValues::LEN, device)?, start: 0 })
    }

    /// Returns the counts. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<CounterValues> {
        let counts = self.counts.read(self.range())?;
        Ok(CounterValues::from_block(&counts).into_iter().next().unwrap_or_default())
    }

    /// Sets the counts to zero.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset(&self) -> Result<()> {
        self.counts.reset(self.range())
    }

    /// Returns the device that the counts are on.
    pub fn device(&self) -> &Device {
        &self.counts.device
    }

    /// Their address on a GPU: [`CounterValues::LEN`] u64.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        Ok(self.counts.cuda(op)? + 8 * self.start as u64)
    }

    /// Adds one tensor's counts, in host memory.
    pub(crate) fn add(&self, counts: CounterValues) -> Result<()> {
        let CounterValues { saturated, underflowed, elements, nan } = counts;
        let all = self.counts.cpu("count")?;
        let cells = Span::within("count", self.range(), all.len())?;
        cells.of(all).iter().zip([saturated, underflowed, elements, nan]).for_each(|(cell, count)| {
            cell.fetch_add(count, Relaxed);
        });
        Ok(())
    }

    fn range(&self) -> Range<usize> {
        self.start..self.start + CounterValues::LEN
    }
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.counts.block {
            CountBlock::Cpu(_) => {
                let values = self.read().unwrap_or_default();
                write!(f, "Counters({values:?}, {})", self.counts.device)
            }
            CountBlock::Cuda(_) => write!(f, "Counters({})", self.counts.device),
        }
    }
}

/// A block of u64 on a device, all zero at first, or a part of one. Clones share it. A range that it does not have is an error.
#[derive(Clone)]
pub(crate) struct Counts {
    device: Device,
    block: CountBlock,
    /// The first count of this part within the block. `end` is one past its last.
    start: usize,
    end: usize,
}

#[derive(Clone)]
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
        Ok(Self { device: device.clone(), block, start: 0, end: len })
    }

    /// Makes a block of a buffer on a GPU, which queued work fills.
    pub(crate) fn from_cuda(buffer: cuda::Buffer, device: &Device) -> Self {
        let end = buffer.len() / 8;
        Self { device: device.clone(), block: CountBlock::Cuda(buffer), start: 0, end }
    }

    /// Returns some of the counts, which it shares.
    pub(crate) fn part(&self, range: Range<usize>) -> Result<Self> {
        let range = Span::within("counts", range, self.len())?.range();
        Ok(Self { start: self.start + range.start, end: self.start + range.end, ..self.clone() })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns whether both are handles on the same block.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (&self.block, &other.block) {
            (CountBlock::Cpu(counts), CountBlock::Cpu(other)) => Arc::ptr_eq(counts, other),
            (CountBlock::Cuda(counts), CountBlock::Cuda(other)) => counts.ptr() == other.ptr(),
            _ => false,
        }
    }

    const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns the counters of each of `slots` slots.
    pub(crate) fn handles(&self, slots: usize) -> Result<Vec<Counters>> {
        Span::within("counts", 0..slots.saturating_mul(CounterValues::LEN), self.len())?;
        let handle = |slot| Counters { counts: self.clone(), start: slot * CounterValues::LEN };
        host::collect("counts", (0..slots).map(handle))
    }

    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<u64>> {
        let span = Span::within("read", range, self.len())?;
        match &self.block {
            CountBlock::Cpu(counts) => {
                host::collect("counts", span.of(self.own(counts)).iter().map(|count| count.load(Relaxed)))
            }
            CountBlock::Cuda(_) => {
                let mut values = host::zeroed::<u64>("counts", span.range().len())?;
                self.device.gpu("read")?.download(self.cuda("read")? + span.offset::<u64>(), &mut values)?;
                Ok(values)
            }
        }
    }

    /// Replaces the first counts.
    pub(crate) fn write(&self, values: &[u64]) -> Result<()> {
        let span = Span::within("write", 0..values.len(), self.len())?;
        match &self.block {
            CountBlock::Cpu(counts) => {
                let counts = span.of(self.own(counts)).iter();
                counts.zip(values).for_each(|(count, &value)| count.store(value, Relaxed));
            }
            CountBlock::Cuda(_) => {
                self.device.gpu("write")?.write(self.cuda("write")?, bytemuck::cast_slice(values))?;
            }
        }
        Ok(())
    }

    /// Sets the counts of the range back to zero.
    pub(crate) fn reset(&self, range: Range<usize>) -> Result<()> {
        let span = Span::within("reset", range, self.len())?;
        match &self.block {
            CountBlock::Cpu(counts) => {
                span.of(self.own(counts)).iter().for_each(|count| count.store(0, Relaxed));
            }
            CountBlock::Cuda(_) => {
                let address = self.cuda("reset")? + span.offset::<u64>();
                self.device.gpu("reset")?.clear_bytes(address, 8 * span.range().len())?;
            }
        }
        Ok(())
    }

    /// Returns their address on a GPU, or an error that names `op`.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        Ok(self.buffer(op)?.ptr() + 8 * self.start as u64)
    }

    /// Returns the whole block on a GPU, or an error that names `op`.
    pub(crate) fn buffer(&self, op: &'static str) -> Result<&cuda::Buffer> {
        match &self.block {
            CountBlock::Cuda(buffer) => Ok(buffer),
            CountBlock::Cpu(_) => {
                Err(Error::Devices { op, lhs: self.device.to_string(), rhs: "a GPU".to_owned() })
            }
        }
    }

    /// Returns those of a block in host memory that belong to it.
    fn own<'a>(&self, block: &'a [AtomicU64]) -> &'a [AtomicU64] {
        block.get(self.start..self.end).unwrap_or_default()
    }

    /// In host memory, or an error that names `op`.
    pub(crate) fn cpu(&self, op: &'static str) -> Result<&[AtomicU64]> {
        let host = match &self.block {
            CountBlock::Cpu(counts) => Some(self.own(counts)),
            CountBlock::Cuda(_) => None,
        };
        host.ok_or_else(|| Error::HostMemory { op, device: self.device.to_string() })
    }
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Counts({}, {})", self.len(), self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_part_of_a_block_shares_its_counts() {
        let counts = Counts::new(8, &Device::cpu()).unwrap();
        let part = counts.part(2..6).unwrap().part(1..3).unwrap();
        part.write(&[5, 6]).unwrap();
        assert_eq!(counts.read(0..8).unwrap(), [0, 0, 0, 5, 6, 0, 0, 0]);
        part.reset(1..2).unwrap();
        assert_eq!((part.read(0..2).unwrap(), part.cpu("read").unwrap().len()), (vec![5, 0], 2));
        for error in [part.read(0..3).unwrap_err(), part.part(1..4).unwrap_err()] {
            assert!(error.to_string().contains("this block has 2, numbered from 0"), "{error}");
        }
    }

    #[test]
    fn counts_that_the_block_does_not_have_are_an_error() {
        let counts = Counts::new(8, &Device::cpu()).unwrap();
        let all = [
            counts.read(8..9).unwrap_err(),
            counts.write(&[0; 9]).unwrap_err(),
            counts.reset(0..9).unwrap_err(),
            counts.handles(3).unwrap_err(),
        ];
        for error in all {
            assert!(error.to_string().contains("this block has 8, numbered from 0"), "{error}");
        }
    }
}
