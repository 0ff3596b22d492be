//! A row-major, contiguous array on a device.
//!
//! Cloning shares the storage, and shared storage never changes: an operation that works in place needs a tensor that does
//! not share its storage, or returns an error that names it.

use crate::backend::cpu::{Buffer, Widened};
use crate::backend::{Backend, cuda};
use crate::element::Element;
use crate::host::{self, Array};
use crate::{DType, Device, Error, MemoryKind, Result, Shape};
use half::{bf16, f16};
use std::fmt;
use std::sync::Arc;

/// A row-major, contiguous array on a device.
///
/// Cloning shares the storage, and shared storage never changes: an operation that works in place needs a tensor whose
/// storage no other tensor shares, or returns an error that names it. A shape has up to six dimensions.
///
/// ```
/// use fp8_kernels::{Device, Tensor};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    shape: Shape,
    device: Device,
    storage: Storage,
}

#[derive(Debug, Clone)]
pub(crate) enum Storage {
    Cpu(Buffer),
    Cuda(cuda::Buffer),
}

impl Tensor {
    /// Makes a tensor with `data` as its elements.
    ///
    /// # Errors
    /// A number of elements that does not fill the shape; a shape that no tensor can have
    /// ([`Shape::check_size`]).
    pub fn from_vec<T: Element>(data: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Result<Self> {
        let shape = shape.into();
        if data.len() != shape.numel() {
            return Err(Error::Elements { op: "from_vec", len: data.len(), shape });
        }
        shape.check_size("from_vec")?;
        match device.backend() {
            Backend::Cpu => Ok(Self::on_cpu(data, shape, device)),
            Backend::Cuda(gpu) => {
                let buffer = gpu.alloc(T::DTYPE, data.len())?;
                gpu.write(buffer.ptr(), bytemuck::cast_slice(&data))?;
                Ok(Self::from_cuda(buffer, shape, device))
            }
        }
    }

    /// Makes a tensor of zeros.
    ///
    /// # Errors
    /// A shape that no tensor can have ([`Shape::check_size`]); the device is out of memory or failed.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        shape.check_size("zeros")?;
        match device.backend() {
            Backend::Cpu => {
                Ok(Self::from_buffer(Buffer::zeros("zeros", dtype, shape.numel())?, shape, device))
            }
            Backend::Cuda(gpu) => Ok(Self::from_cuda(gpu.zeros(dtype, shape.numel())?, shape, device)),
        }
    }

    /// Makes a tensor whose elements all have one value, rounded to `dtype`.
    ///
    /// # Errors
    /// A dtype that is not a float; a shape that no tensor can have ([`Shape::check_size`]); the device is out of memory or
    /// failed.
    pub fn full(value: f32, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        shape.check_size("full")?;
        match device.backend() {
            Backend::Cpu => {
                let buffer = Buffer::full("full", value, dtype, shape.numel())?;
                Ok(Self::from_buffer(buffer, shape, device))
            }
            Backend::Cuda(gpu) if dtype == DType::F32 => {
                Ok(Self::from_cuda(gpu.filled_f32(value, shape.numel())?, shape, device))
            }
            Backend::Cuda(_) => Self::full(value, shape, dtype, &Device::cpu())?.to_device(device),
        }
    }

    /// Makes a tensor of one f32.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn scalar(value: f32, device: &Device) -> Result<Self> {
        Self::from_vec(vec![value], [], device)
    }

    /// Copies the tensor to another device, through the host. On the same device, whatever its transpose policy, the storage
    /// is shared instead.
    ///
    /// # Errors
    /// A device that is out of memory or failed; none if both are the CPU.
    ///
    /// ```
    /// use fp8_kernels::{Device, Tensor, TransposePolicy};
    /// let x = Tensor::scalar(3.0, &Device::cpu())?;
    /// let y = x.to_device(&Device::cpu().with_transpose_policy(TransposePolicy::OnDemand))?;
    /// assert_eq!((y.item()?, x.holders()), (3.0, 1));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.device.backend() == device.backend() {
            return Ok(Self { device: device.clone(), ..self.clone() });
        }
        match self.dtype() {
            DType::F32 => Self::from_vec(self.to_vec::<f32>()?, self.shape, device),
            DType::BF16 => Self::from_vec(self.to_vec::<bf16>()?, self.shape, device),
            DType::F16 => Self::from_vec(self.to_vec::<f16>()?, self.shape, device),
            DType::I32 => Self::from_vec(self.to_vec::<i32>()?, self.shape, device),
            DType::U8 => Self::from_vec(self.to_vec::<u8>()?, self.shape, device),
        }
    }

    /// Returns the dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match &self.storage {
            Storage::Cpu(buffer) => buffer.dtype(),
            Storage::Cuda(buffer) => buffer.dtype(),
        }
    }

    /// Returns the device that the tensor is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Replaces all elements in place, so that a recorded step reads the new ones. Errors refer to the tensor as `name`.
    ///
    /// # Errors
    /// Another number of elements or another type; storage that is shared; a step that is being recorded, because each replay
    /// would write the same elements.
    ///
    /// ```
    /// use fp8_kernels::{Device, Tensor};
    /// let mut x = Tensor::from_vec(vec![0i32; 3], [3], &Device::cpu())?;
    /// x.write(&[1, 2, 3], "x")?;
    /// assert_eq!(x.to_vec::<i32>()?, [1, 2, 3]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn write<T: Element>(&mut self, values: &[T], name: &str) -> Result<()> {
        if values.len() != self.numel() {
            return Err(Error::Elements { op: "write", len: values.len(), shape: self.shape });
        }
        self.expect_dtype("write", "the tensor", T::DTYPE)?;
        self.device.expect_eager("write", "write inputs before the replay")?;
        match &self.storage {
            Storage::Cpu(_) => self.as_mut_slice::<T>(name)?.copy_from_slice(values),
            Storage::Cuda(_) => {
                let address = self.cuda_mut(name)?.ptr();
                self.device.gpu("write")?.write(address, bytemuck::cast_slice(values))?;
            }
        }
        Ok(())
    }

    /// Replaces all elements in place by those of `other`, so that a recorded step reads the new ones. Errors refer to the
    /// tensor as `name`.
    ///
    /// # Errors
    /// Another shape, type or device; storage that is shared; the device failed.
    ///
    /// ```
    /// use fp8_kernels::{Device, Tensor};
    /// let mut x = Tensor::from_vec(vec![0i32; 3], [3], &Device::cpu())?;
    /// x.copy_from(&Tensor::from_vec(vec![1, 2, 3], [3], &Device::cpu())?, "x")?;
    /// assert_eq!(x.to_vec::<i32>()?, [1, 2, 3]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn copy_from(&mut self, other: &Self, name: &str) -> Result<()> {
        let op = "copy_from";
        self.expect_same_shape(op, "the tensor and its new elements", other)?;
        other.expect_dtype(op, "the new elements", self.dtype())?;
        self.device.expect_same(op, &other.device)?;
        match &self.storage {
            Storage::Cuda(_) => {
                let (to, from) = (self.cuda_mut(name)?.ptr(), other.cuda(op)?);
                self.device.gpu(op)?.copy(to, from.ptr(), from.bytes())
            }
            Storage::Cpu(_) => match self.dtype() {
                DType::F32 => self.copy_on_cpu::<f32>(other, name),
                DType::BF16 => self.copy_on_cpu::<bf16>(other, name),
                DType::F16 => self.copy_on_cpu::<f16>(other, name),
                DType::I32 => self.copy_on_cpu::<i32>(other, name),
                DType::U8 => self.copy_on_cpu::<u8>(other, name),
            },
        }
    }

    /// Sets all elements to 0 in place. Errors refer to the tensor as `name`.
    ///
    /// # Errors
    /// Storage that is shared; the device failed.
    pub fn set_zero(&mut self, name: &str) -> Result<()> {
        match &mut self.storage {
            Storage::Cuda(_) => {
                let buffer = self.cuda_mut(name)?;
                let (address, bytes) = (buffer.ptr(), buffer.bytes());
                self.device.gpu("set_zero")?.clear_bytes(address, bytes)
            }
            Storage::Cpu(_) => self.clear_on_cpu(name),
        }
    }

    /// Copies the elements to the host.
    ///
    /// # Errors
    /// Another element type than `T`.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        match &self.storage {
            Storage::Cpu(buffer) => host::copied("to_vec", elements::<T>(buffer, "to_vec")?),
            Storage::Cuda(buffer) => {
                self.expect_dtype("to_vec", "the tensor", T::DTYPE)?;
                let mut data = host::zeroed("to_vec", buffer.len())?;
                self.device.gpu("to_vec")?.download(buffer.ptr(), &mut data)?;
                Ok(data)
            }
        }
    }

    /// Copies the elements of a float tensor to the host, as f32.
    ///
    /// # Errors
    /// A dtype that is not a float.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        match &self.storage {
            Storage::Cpu(buffer) => buffer.to_f32_vec("to_f32_vec"),
            Storage::Cuda(_) => {
                self.expect_float("to_f32_vec", "the tensor")?;
                self.to_device(&Device::cpu())?.to_f32_vec()
            }
        }
    }

    /// Returns the element of a float tensor that has only one.
    ///
    /// # Errors
    /// Another number of elements, or a dtype that is not a float.
    pub fn item(&self) -> Result<f32> {
        let other = || Error::Shape {
            op: "item",
            shape: self.shape,
            remedy: "item reads a tensor of one element; use to_vec".to_owned(),
        };
        if self.numel() != 1 {
            self.expect_float("item", "the tensor")?;
            return Err(other());
        }
        self.to_f32_vec()?.first().copied().ok_or_else(other)
    }

    /// Returns the same elements in another shape. The storage is shared.
    ///
    /// # Errors
    /// A shape with another number of elements, or one that no tensor can have ([`Shape::check_size`]).
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.numel() != self.numel() {
            return Err(Error::Elements { op: "reshape", len: self.numel(), shape });
        }
        shape.check_size("reshape")?;
        Ok(Self { shape, ..self.clone() })
    }

    /// Returns the number of other tensors that share this storage. It is 0 for a tensor without elements.
    pub fn holders(&self) -> usize {
        match &self.storage {
            Storage::Cpu(_) if self.numel() == 0 => 0,
            Storage::Cpu(buffer) => buffer.holders(),
            Storage::Cuda(buffer) => buffer.holders(),
        }
    }

    /// Returns a number that identifies the storage among those of all tensors that exist on the device. Tensors that share
    /// storage have the same number.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, Tensor};
    /// let zeros = || Tensor::zeros([2], DType::F32, &Device::cpu());
    /// let (x, y) = (zeros()?, zeros()?);
    /// assert_eq!(x.storage_number(), x.reshape([2, 1])?.storage_number());
    /// assert_ne!(x.storage_number(), y.storage_number());
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn storage_number(&self) -> u64 {
        match &self.storage {
            Storage::Cpu(buffer) => buffer.address(),
            Storage::Cuda(buffer) => buffer.ptr(),
        }
    }

    /// Returns the elements of a tensor in host memory.
    ///
    /// # Errors
    /// Another element type than `T`, or a device whose memory the host cannot read.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.cpu_slice("as_slice")
    }

    /// Returns the elements of a tensor in host memory, mutably. Errors refer to the tensor as `name`.
    ///
    /// # Errors
    /// Shared storage, another element type than `T`, or a device whose memory the host cannot write.
    pub fn as_mut_slice<T: Element>(&mut self, name: &str) -> Result<&mut [T]> {
        let (dtype, holders) = (self.dtype(), self.holders());
        let op = "as_mut_slice";
        let buffer = match &mut self.storage {
            Storage::Cpu(buffer) => Some(buffer),
            Storage::Cuda(_) => None,
        };
        let buffer = buffer.ok_or_else(|| Error::HostMemory { op, device: self.device.to_string() })?;
        let data = T::unwrap_mut(buffer).ok_or(Error::DType {
            op,
            what: "the tensor",
            found: dtype,
            expected: T::DTYPE.name(),
        })?;
        if data.is_empty() {
            return Ok(&mut []);
        }
        Arc::get_mut(data)
            .map(|data| &mut data[..])
            .ok_or_else(|| Error::Shared { name: name.to_owned(), holders })
    }

    fn copy_on_cpu<T: Element>(&mut self, other: &Self, name: &str) -> Result<()> {
        self.as_mut_slice::<T>(name)?.copy_from_slice(other.as_slice()?);
        Ok(())
    }

    fn clear_on_cpu(&mut self, name: &str) -> Result<()> {
        match self.dtype() {
            DType::F32 => self.as_mut_slice::<f32>(name)?.fill(0.0),
            DType::BF16 => self.as_mut_slice::<bf16>(name)?.fill(bf16::ZERO),
            DType::F16 => self.as_mut_slice::<f16>(name)?.fill(f16::ZERO),
            DType::I32 => self.as_mut_slice::<i32>(name)?.fill(0),
            DType::U8 => self.as_mut_slice::<u8>(name)?.fill(0),
        }
        Ok(())
    }

    /// Makes a tensor on the CPU. The caller has checked the shape, here and below.
    /// Counts the memory of the tensor, and of all that share it, as of another kind in
    /// [`Device::memory_report`].
    pub fn set_memory_kind(&self, kind: MemoryKind) {
        match &self.storage {
            Storage::Cpu(buffer) => buffer.set_memory_kind(kind),
            Storage::Cuda(buffer) => buffer.set_memory_kind(kind),
        }
    }

    pub(crate) fn on_cpu<T: Element>(data: impl Into<Array<T>>, shape: Shape, device: &Device) -> Self {
        let data = data.into();
        debug_assert!(shape.check_size("on_cpu").is_ok() && data.len() == shape.numel(), "{shape}");
        Self { shape, device: device.clone(), storage: Storage::Cpu(T::wrap(Arc::new(data))) }
    }

    pub(crate) fn from_buffer(buffer: Buffer, shape: Shape, device: &Device) -> Self {
        debug_assert!(shape.check_size("from_buffer").is_ok(), "{shape}");
        Self { shape, device: device.clone(), storage: Storage::Cpu(buffer) }
    }

    pub(crate) fn cpu_slice<T: Element>(&self, op: &'static str) -> Result<&[T]> {
        elements(self.cpu_buffer(op)?, op)
    }

    /// Returns the values in f32: borrowed if they are f32, otherwise widened.
    pub(crate) fn cpu_f32(&self, op: &'static str) -> Result<Widened<'_>> {
        self.cpu_buffer(op)?.read_f32(op)
    }

    /// Returns the buffer in host memory, or an error that names `op`. All CPU code that uses elements calls it.
    pub(crate) fn cpu_buffer(&self, op: &'static str) -> Result<&Buffer> {
        let buffer = match &self.storage {
            Storage::Cpu(buffer) => Some(buffer),
            Storage::Cuda(_) => None,
        };
        buffer.ok_or_else(|| Error::HostMemory { op, device: self.device.to_string() })
    }

    pub(crate) fn from_cuda(buffer: cuda::Buffer, shape: Shape, device: &Device) -> Self {
        debug_assert!(shape.check_size("from_cuda").is_ok() && buffer.len() == shape.numel(), "{shape}");
        Self { shape, device: device.clone(), storage: Storage::Cuda(buffer) }
    }

    /// Returns the elements of a tensor on a GPU.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<&cuda::Buffer> {
        match &self.storage {
            Storage::Cuda(buffer) => Ok(buffer),
            Storage::Cpu(_) => {
                Err(Error::Devices { op, lhs: self.device.to_string(), rhs: "a GPU".to_owned() })
            }
        }
    }

    /// Returns the elements of a tensor on a GPU, to change. Errors refer to the tensor as `name`.
    #[expect(
        clippy::needless_pass_by_ref_mut,
        reason = "changing elements needs exclusive access to the tensor"
    )]
    pub(crate) fn cuda_mut(&mut self, name: &str) -> Result<&cuda::Buffer> {
        match self.holders() {
            0 => self.cuda("in-place update"),
            holders => Err(Error::Shared { name: name.to_owned(), holders }),
        }
    }

    /// Checks that the elements are floats. The error names the argument.
    pub(crate) fn expect_float(&self, op: &'static str, what: &'static str) -> Result<()> {
        if self.dtype().is_float() {
            return Ok(());
        }
        Err(Error::DType { op, what, found: self.dtype(), expected: "f32, bf16 or f16" })
    }

    pub(crate) fn expect_dtype(&self, op: &'static str, what: &'static str, dtype: DType) -> Result<()> {
        if self.dtype() == dtype {
            return Ok(());
        }
        Err(Error::DType { op, what, found: self.dtype(), expected: dtype.name() })
    }

    /// Checks that both tensors have one shape. The error names the pair.
    pub(crate) fn expect_same_shape(&self, op: &'static str, what: &'static str, other: &Self) -> Result<()> {
        if self.shape == other.shape {
            return Ok(());
        }
        let (lhs, rhs) = (self.shape, other.shape);
        Err(Error::Shapes { op, what, lhs, rhs, remedy: "both must have one shape" })
    }
}

/// Prints shape, dtype and device, and the first values of a tensor on the CPU.
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}, {}, {}", self.shape, self.dtype().name(), self.device)?;
        match &self.storage {
            Storage::Cpu(buffer) => write!(f, ", {buffer:?})"),
            Storage::Cuda(_) => f.write_str(")"),
        }
    }
}

fn elements<'a, T: Element>(buffer: &'a Buffer, op: &'static str) -> Result<&'a [T]> {
    let other = || Error::DType { op, what: "the tensor", found: buffer.dtype(), expected: T::DTYPE.name() };
    T::unwrap(buffer).map(|data| &data[..]).ok_or_else(other)
}
