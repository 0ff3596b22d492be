//! Blocks of f32 on a device, and handles on single entries.

use super::span::Span;
use crate::backend::{Backend, cuda};
use crate::{DType, Device, Error, Result, Shape, Tensor, host};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// A single f32 on a device, such as an amax or a scale. Clones are handles on the same number.
///
/// ```
/// use fp8_kernels::{Cell, Device};
/// let cell = Cell::new(2.0, &Device::cpu())?;
/// cell.merge_max(5.0)?;
/// assert_eq!(cell.read()?, 5.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Clone)]
pub struct Cell {
    cells: Cells,
    /// Within the block.
    index: usize,
}

impl Cell {
    /// Allocates a cell with this value.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn new(value: f32, device: &Device) -> Result<Self> {
        Ok(Self { cells: Cells::new(1, value, device)?, index: 0 })
    }

    /// Returns the value. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<f32> {
        self.cells.read_one(self.index)
    }

    /// Replaces the value.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn write(&self, value: f32) -> Result<()> {
        self.cells.write(self.index, &[value])
    }

    /// Returns the value as a tensor of one f32, without reading it to the host. On a GPU it is the value after the work that is
    /// queued so far.
    ///
    /// ```
    /// use fp8_kernels::{Cell, Device};
    /// let amax = Cell::new(2.0, &Device::cpu())?.to_tensor()?;
    /// assert_eq!((amax.shape().numel(), amax.item()?), (1, 2.0));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn to_tensor(&self) -> Result<Tensor> {
        match &self.cells.block {
            CellBlock::Cpu(_) => Tensor::scalar(self.read()?, self.device()),
            CellBlock::Cuda(..) => {
                let gpu = self.device().gpu("to_tensor")?;
                let copy = gpu.alloc(DType::F32, 1)?;
                gpu.copy(copy.ptr(), self.cuda("to_tensor")?, size_of::<f32>())?;
                Ok(Tensor::from_cuda(copy, Shape::from([]), self.device()))
            }
        }
    }

    /// Replaces the value by the larger of itself and `amax`. The bits are compared as signed integers, which is right for
    /// amaxes and [`REST`](crate::REST). NaN counts as larger than infinity.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn merge_max(&self, amax: f32) -> Result<()> {
        self.cells.merge_max(self.index, &[amax])
    }

    /// Replaces the value by the larger of itself and the value of `other`, as [`merge_max`](Self::merge_max) does, without
    /// reading either to the host.
    ///
    /// ```
    /// use fp8_kernels::{Cell, Device};
    /// let (cell, other) = (Cell::new(2.0, &Device::cpu())?, Cell::new(5.0, &Device::cpu())?);
    /// cell.merge_cell(&other)?;
    /// assert_eq!(cell.read()?, 5.0);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// Cells on different devices; the device failed.
    pub fn merge_cell(&self, other: &Self) -> Result<()> {
        let op = "merge_cell";
        self.device().expect_same(op, other.device())?;
        match self.device().backend() {
            Backend::Cpu => self.merge_max(other.read()?),
            Backend::Cuda(gpu) => cuda::ops::cells::merge_cell(gpu, self.cuda(op)?, other.cuda(op)?),
        }
    }

    /// Returns the device that the cell is on.
    pub fn device(&self) -> &Device {
        &self.cells.device
    }

    /// Allocates one block of cells with these values.
    ///
    /// ```
    /// use fp8_kernels::{Cell, Device};
    /// let cells = Cell::block(&[1.0, 2.0], &Device::cpu())?;
    /// assert_eq!(cells[1].read()?, 2.0);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn block(values: &[f32], device: &Device) -> Result<Vec<Self>> {
        let cells = Cells::new(values.len(), 0.0, device)?;
        cells.write(0, values)?;
        cells.handles(0..values.len())
    }

    /// Returns the address of the cell on a GPU.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<u64> {
        Ok(self.cells.cuda(op)?.ptr() + 4 * self.index as u64)
    }

    /// Returns whether the host knows, without reading from the device, that a confirmed scale is stored here. A false
    /// negative only costs time.
    pub(crate) fn is_known_set(&self) -> bool {
        match &self.cells.block {
            CellBlock::Cuda(_, known) => known.is_set(self.index),
            CellBlock::Cpu(_) => false,
        }
    }

    /// Returns whether the cell contains a scale above 0, as far as the host knows without waiting for the device.
    pub(crate) fn is_determined(&self) -> bool {
        match &self.cells.block {
            CellBlock::Cuda(_, known) => known.is_set(self.index),
            CellBlock::Cpu(cells) => cells.get(self.index).is_some_and(|cell| value(cell) > 0.0),
        }
    }

    /// Makes operations use the magnitude of the cell, also if it is [`UNSET`](crate::UNSET): they then do not look for the
    /// tensor's own amax, and can be recorded in a graph. It has no effect on the CPU, which reads the cell.
    ///
    /// ```
    /// use fp8_kernels::{Cell, Device};
    /// let scale = Cell::new(128.0, &Device::cpu())?;
    /// scale.assume_determined();
    /// assert_eq!(scale.read()?, 128.0);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn assume_determined(&self) {
        if let CellBlock::Cuda(_, known) = &self.cells.block {
            known.was_read(self.index);
        }
    }

    /// Returns what the host knows about the block, and the cell's index in it; `None` on the CPU.
    pub(crate) fn known_to_host(&self) -> Option<(&cuda::Known, usize)> {
        match &self.cells.block {
            CellBlock::Cuda(_, known) => Some((known, self.index)),
            CellBlock::Cpu(_) => None,
        }
    }

    /// Makes a cell of one f32 on a GPU, which queued work fills.
    pub(crate) fn from_cuda(buffer: cuda::Buffer, known: cuda::Known, device: &Device) -> Self {
        let block = CellBlock::Cuda(buffer, Arc::new(known));
        Self { cells: Cells { device: device.clone(), block }, index: 0 }
    }
}

impl fmt::Debug for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cells.block {
            CellBlock::Cpu(cells) => {
                let value = cells.get(self.index).map(value).unwrap_or_default();
                write!(f, "Cell({value:?}, {})", self.cells.device)
            }
            CellBlock::Cuda(..) => write!(f, "Cell({})", self.cells.device),
        }
    }
}

/// A block of f32 on a device. Clones share it. A range beyond the block is an error.
#[derive(Clone)]
pub(crate) struct Cells {
    device: Device,
    block: CellBlock,
}

#[derive(Clone)]
enum CellBlock {
    /// The bits of each value: their integer maximum is the maximum of amaxes.
    Cpu(Arc<Vec<AtomicI32>>),
    Cuda(cuda::Buffer, Arc<cuda::Known>),
}

impl Cells {
    /// Allocates `len` cells of one value.
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

    /// Copies the block on its device.
    pub(crate) fn duplicate(&self) -> Result<Self> {
        let block = match &self.block {
            CellBlock::Cpu(cells) => {
                let cells = cells.iter().map(|cell| AtomicI32::new(cell.load(Relaxed)));
                CellBlock::Cpu(Arc::new(host::collect("cells", cells)?))
            }
            CellBlock::Cuda(cells, known) => {
                let gpu = self.device.gpu("duplicate")?;
                let copy = gpu.alloc(DType::F32, cells.len())?;
                gpu.copy(copy.ptr(), cells.ptr(), cells.bytes())?;
                CellBlock::Cuda(copy, Arc::new(known.of_copy()?))
            }
        };
        Ok(Self { device: self.device.clone(), block })
    }

    /// Replaces the values by those of `other`, a block of the same length on the same device, without waiting.
    pub(crate) fn copy_from(&self, other: &Self) -> Result<()> {
        let op = "copy_from";
        Span::within(op, 0..other.len(), self.len())?;
        self.device.expect_same(op, &other.device)?;
        match (&self.block, &other.block) {
            (CellBlock::Cpu(to), CellBlock::Cpu(from)) => {
                to.iter().zip(from.iter()).for_each(|(to, from)| to.store(from.load(Relaxed), Relaxed));
                Ok(())
            }
            _ => {
                let (to, from) = (self.cuda(op)?, other.cuda(op)?);
                self.device.gpu(op)?.copy(to.ptr(), from.ptr(), from.bytes())
            }
        }
    }

    fn len(&self) -> usize {
        match &self.block {
            CellBlock::Cpu(cells) => cells.len(),
            CellBlock::Cuda(cells, _) => cells.len(),
        }
    }

    /// Returns a handle on each cell of the range.
    pub(crate) fn handles(&self, range: Range<usize>) -> Result<Vec<Cell>> {
        let range = Span::within("cells", range, self.len())?.range();
        host::collect("cells", range.map(|index| Cell { cells: self.clone(), index }))
    }

    /// Returns a handle on one cell.
    pub(crate) fn handle(&self, index: usize) -> Result<Cell> {
        Span::within("cells", index..index.saturating_add(1), self.len())?;
        Ok(Cell { cells: self.clone(), index })
    }

    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<f32>> {
        let span = Span::within("read", range, self.len())?;
        match &self.block {
            CellBlock::Cpu(cells) => host::collect("cells", span.of(cells).iter().map(value)),
            CellBlock::Cuda(cells, _) => {
                let mut values = host::zeroed::<f32>("cells", span.range().len())?;
                self.device.gpu("read")?.download(cells.ptr() + span.offset::<f32>(), &mut values)?;
                Ok(values)
            }
        }
    }

    pub(crate) fn read_one(&self, index: usize) -> Result<f32> {
        let span = Span::within("read", index..index.saturating_add(1), self.len())?;
        let mut read = [0.0];
        match &self.block {
            CellBlock::Cpu(cells) => {
                read.iter_mut().zip(span.of(cells)).for_each(|(read, cell)| *read = value(cell));
            }
            CellBlock::Cuda(cells, _) => {
                self.device.gpu("read")?.download(cells.ptr() + span.offset::<f32>(), &mut read)?;
            }
        }
        let [value] = read;
        Ok(value)
    }

    /// Replaces the cells from `start` on.
    pub(crate) fn write(&self, start: usize, values: &[f32]) -> Result<()> {
        let span = Span::within("write", start..start.saturating_add(values.len()), self.len())?;
        match &self.block {
            CellBlock::Cpu(cells) => {
                let cells = span.of(cells).iter();
                cells.zip(values).for_each(|(cell, &value)| store(cell, value));
            }
            CellBlock::Cuda(cells, known) => {
                let address = cells.ptr() + span.offset::<f32>();
                self.device.gpu("write")?.write(address, bytemuck::cast_slice(values))?;
                known.written(span.range(), |i| values[i]);
            }
        }
        Ok(())
    }

    pub(crate) fn fill(&self, range: Range<usize>, value: f32) -> Result<()> {
        let span = Span::within("fill", range, self.len())?;
        match &self.block {
            CellBlock::Cpu(cells) => span.of(cells).iter().for_each(|cell| store(cell, value)),
            CellBlock::Cuda(cells, known) => {
                let address = cells.ptr() + span.offset::<f32>();
                self.device.gpu("fill")?.fill_f32(address, value, span.range().len())?;
                known.written(span.range(), |_| value);
            }
        }
        Ok(())
    }

    /// Combines the cells from `start` on with `values`, each as [`Cell::merge_max`] does.
    pub(crate) fn merge_max(&self, start: usize, values: &[f32]) -> Result<()> {
        let span = Span::within("merge_max", start..start.saturating_add(values.len()), self.len())?;
        match &self.block {
            CellBlock::Cpu(cells) => {
                span.of(cells).iter().zip(values).for_each(|(cell, &value)| {
                    cell.fetch_max(bits(value), Relaxed);
                });
            }
            CellBlock::Cuda(cells, _) => {
                let address = cells.ptr() + span.offset::<f32>();
                cuda::ops::cells::merge_max(self.device.gpu("merge_max")?, address, values)?;
            }
        }
        Ok(())
    }

    /// Replaces every negative value by `value`.
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

    /// Notes that queued work may have set scales.
    pub(crate) fn refresh_known(&self) -> Result<()> {
        match &self.block {
            CellBlock::Cuda(cells, known) => known.refresh(cells),
            CellBlock::Cpu(_) => Ok(()),
        }
    }

    /// Returns the block on a GPU, or an error that names `op`.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<&cuda::Buffer> {
        match &self.block {
            CellBlock::Cuda(buffer, _) => Ok(buffer),
            CellBlock::Cpu(_) => {
                Err(Error::Devices { op, lhs: self.device.to_string(), rhs: "a GPU".to_owned() })
            }
        }
    }

    /// Returns the block in host memory, or an error that names `op`.
    pub(crate) fn cpu(&self, op: &'static str) -> Result<&[AtomicI32]> {
        let host = match &self.block {
            CellBlock::Cpu(cells) => Some(cells.as_slice()),
            CellBlock::Cuda(..) => None,
        };
        host.ok_or_else(|| Error::HostMemory { op, device: self.device.to_string() })
    }
}

impl fmt::Debug for Cells {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cells({}, {})", self.len(), self.device)
    }
}

const fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

/// Returns the value of a cell in host memory.
pub(crate) fn value(cell: &AtomicI32) -> f32 {
    f32::from_bits(cell.load(Relaxed) as u32)
}

/// Replaces the value of a cell in host memory.
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
    fn a_range_that_the_block_does_not_have_is_an_error() {
        let cells = Cells::new(3, 0.0, &Device::cpu()).unwrap();
        let all = [
            cells.read(1..4).unwrap_err(),
            cells.read_one(3).unwrap_err(),
            cells.write(2, &[1.0, 2.0]).unwrap_err(),
            cells.fill(4..4, 1.0).unwrap_err(),
            cells.merge_max(usize::MAX, &[1.0]).unwrap_err(),
            cells.handles(0..4).unwrap_err(),
        ];
        for error in all {
            let text = error.to_string();
            assert!(text.contains("this block has 3, numbered from 0"), "{text}");
        }
        assert_eq!(cells.read(0..3).unwrap(), [0.0; 3]);
        assert!(cells.read(3..3).unwrap().is_empty());
    }
}
