//! A row-major, contiguous array on a device.
//!
//! Cloning shares the storage. Shared storage never changes: operations that work in place ask for unique storage, or
//! say who shares it.

use crate::cpu::Buffer;
use crate::dtype::Element;
use crate::{DType, Device, Error, Result, Shape};
use std::sync::Arc;

/// See the module's text. Shapes have up to six dimensions; dtypes are [`DType`].
///
/// ```
/// use fp8_kernels::{Device, Tensor};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tensor {
    shape: Shape,
    device: Device,
    storage: Storage,
}

#[derive(Debug, Clone)]
pub(crate) enum Storage {
    Cpu(Buffer),
}

impl Tensor {
    /// Takes `data` as the tensor's elements.
    ///
    /// # Errors
    /// A number of elements that does not fill the shape.
    pub fn from_vec<T: Element>(data: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Result<Self> {
        let shape = shape.into();
        if data.len() != shape.numel() {
            return Err(Error::Elements { op: "from_vec", len: data.len(), shape });
        }
        Ok(Self::on_cpu(data, shape, device))
    }

    /// Zeros.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Self {
        let shape = shape.into();
        Self { shape, device: device.clone(), storage: Storage::Cpu(Buffer::zeros(dtype, shape.numel())) }
    }

    /// One value everywhere, rounded to `dtype`.
    ///
    /// # Errors
    /// A dtype that is not a float.
    pub fn full(value: f32, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        let buffer = Buffer::from_f32(vec![value; shape.numel()], dtype, "full")?;
        Ok(Self { shape, device: device.clone(), storage: Storage::Cpu(buffer) })
    }

    /// One f32.
    pub fn scalar(value: f32, device: &Device) -> Self {
        Self::on_cpu(vec![value], Shape::from([]), device)
    }

    /// The extents, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match &self.storage {
            Storage::Cpu(buffer) => buffer.dtype(),
        }
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The elements, copied to the host.
    ///
    /// # Errors
    /// Another element type than `T`.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.cpu_slice::<T>("to_vec")?.to_vec())
    }

    /// The elements as f32, copied to the host, whichever float type they have.
    ///
    /// # Errors
    /// A dtype that is not a float.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        match &self.storage {
            Storage::Cpu(buffer) => Ok(buffer.read_f32("to_f32_vec")?.into_owned()),
        }
    }

    /// The single element of a one-element float tensor.
    ///
    /// # Errors
    /// Another number of elements, or a dtype that is not a float.
    pub fn item(&self) -> Result<f32> {
        match self.to_f32_vec()?.as_slice() {
            [value] => Ok(*value),
            _ => Err(Error::Shape {
                op: "item",
                shape: self.shape,
                remedy: "item reads a tensor of one element; use to_vec".to_owned(),
            }),
        }
    }

    /// The same elements in another shape; the storage is shared.
    ///
    /// # Errors
    /// A shape with another number of elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.numel() != self.numel() {
            return Err(Error::Elements { op: "reshape", len: self.numel(), shape });
        }
        Ok(Self { shape, ..self.clone() })
    }

    /// How many other tensors share this storage.
    pub fn holders(&self) -> usize {
        match &self.storage {
            Storage::Cpu(buffer) => buffer.holders(),
        }
    }

    /// The elements of a tensor in host memory.
    ///
    /// # Errors
    /// Another element type than `T`, or a device whose memory the host cannot read.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.cpu_slice("as_slice")
    }

    /// The elements of a tensor in host memory, to change. `name` is what an error calls the buffer.
    ///
    /// # Errors
    /// Shared storage, another element type than `T`, or a device whose memory the host cannot write.
    pub fn as_mut_slice<T: Element>(&mut self, name: &str) -> Result<&mut [T]> {
        let (dtype, holders) = (self.dtype(), self.holders());
        let Storage::Cpu(buffer) = &mut self.storage;
        let data = T::unwrap_mut(buffer).ok_or(Error::DType {
            op: "as_mut_slice",
            what: "the tensor",
            found: dtype,
            expected: T::DTYPE.name(),
        })?;
        Arc::get_mut(data)
            .map(Vec::as_mut_slice)
            .ok_or_else(|| Error::Shared { name: name.to_owned(), holders })
    }

    pub(crate) fn on_cpu<T: Element>(data: Vec<T>, shape: Shape, device: &Device) -> Self {
        Self { shape, device: device.clone(), storage: Storage::Cpu(T::wrap(Arc::new(data))) }
    }

    pub(crate) fn from_buffer(buffer: Buffer, shape: Shape, device: &Device) -> Self {
        Self { shape, device: device.clone(), storage: Storage::Cpu(buffer) }
    }

    pub(crate) fn cpu_slice<T: Element>(&self, op: &'static str) -> Result<&[T]> {
        let Storage::Cpu(buffer) = &self.storage;
        T::unwrap(buffer).map(|data| data.as_slice()).ok_or(Error::DType {
            op,
            what: "the tensor",
            found: self.dtype(),
            expected: T::DTYPE.name(),
        })
    }

    pub(crate) fn buffer(&self) -> &Buffer {
        let Storage::Cpu(buffer) = &self.storage;
        buffer
    }

    /// Float elements or an error that names the argument.
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

    /// Both of one shape or an error that names the pair.
    pub(crate) fn expect_same_shape(&self, op: &'static str, what: &'static str, other: &Self) -> Result<()> {
        if self.shape == other.shape {
            return Ok(());
        }
        let (lhs, rhs) = (self.shape, other.shape);
        Err(Error::Shapes { op, what, lhs, rhs, remedy: "both must have one shape" })
    }
}
