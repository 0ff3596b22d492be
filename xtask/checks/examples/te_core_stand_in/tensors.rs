//! Tensors: their parameters, and loading and storing their numbers.

use std::ffi::{c_int, c_void};
use std::slice;

use fp8_format::{E4M3, E5M2};
use half::bf16;

use crate::{check, fail};

/// `NVTEDType`.
pub(crate) mod dtype {
    use std::ffi::c_int;
    pub(crate) const BYTE: c_int = 0;
    pub(crate) const INT32: c_int = 2;
    pub(crate) const F32: c_int = 4;
    pub(crate) const BF16: c_int = 6;
    pub(crate) const E4M3: c_int = 7;
    pub(crate) const E5M2: c_int = 8;
}

/// `NVTETensorParam`.
pub(crate) const ROWWISE: usize = 0;
pub(crate) const COLUMNWISE: usize = 1;
pub(crate) const SCALE: usize = 2;
pub(crate) const AMAX: usize = 3;
pub(crate) const ROWWISE_SCALE_INV: usize = 4;
pub(crate) const COLUMNWISE_SCALE_INV: usize = 5;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Shape {
    data: [usize; 15],
    ndim: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Basic {
    data: *mut c_void,
    pub(crate) dtype: c_int,
    shape: Shape,
}

pub(crate) struct Tensor(pub(crate) [Basic; 6]);

pub(crate) type Handle = *mut Tensor;

impl Basic {
    pub(crate) fn dims(&self) -> &[usize] {
        &self.shape.data[..self.shape.ndim]
    }

    pub(crate) fn len(&self) -> usize {
        self.dims().iter().product()
    }

    pub(crate) fn matrix(&self) -> [usize; 2] {
        <[usize; 2]>::try_from(self.dims())
            .unwrap_or_else(|_| fail(&format!("{:?} is no matrix", self.dims())))
    }

    pub(crate) fn is_there(&self) -> bool {
        !self.data.is_null()
    }

    fn size(&self) -> usize {
        check(self.is_there(), "a tensor has no data");
        let size = match self.dtype {
            dtype::F32 | dtype::INT32 => 4,
            dtype::BF16 => 2,
            dtype::BYTE | dtype::E4M3 | dtype::E5M2 => 1,
            other => fail(&format!("unknown type {other}")),
        };
        self.len() * size
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: whoever set the parameter vouches for memory of that type and shape.
        unsafe { slice::from_raw_parts(self.data.cast(), self.size()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: whoever set the parameter vouches for memory of that type and shape.
        unsafe { slice::from_raw_parts_mut(self.data.cast(), self.size()) }
    }

    pub(crate) fn load(&self) -> Vec<f32> {
        let bytes = self.bytes();
        match self.dtype {
            dtype::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_ne_bytes(b)).collect(),
            dtype::BF16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_ne_bytes(b).to_f32()).collect(),
            dtype::E4M3 => bytes.iter().map(|&b| E4M3::from_bits(b).to_f32()).collect(),
            dtype::E5M2 => bytes.iter().map(|&b| E5M2::from_bits(b).to_f32()).collect(),
            other => fail(&format!("type {other} holds no numbers")),
        }
    }

    pub(crate) fn store(&mut self, values: &[f32]) {
        check(values.len() == self.len(), "an output has another shape");
        let dtype = self.dtype;
        let bytes = self.bytes_mut();
        match dtype {
            dtype::F32 => {
                bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_ne_bytes());
            }
            dtype::BF16 => {
                let chunks = bytes.as_chunks_mut().0.iter_mut();
                chunks.zip(values).for_each(|(b, &v)| *b = bf16::from_f32(v).to_ne_bytes());
            }
            other => fail(&format!("type {other} is not written without a scale")),
        }
    }
}

pub(crate) fn tensor<'a>(handle: Handle) -> &'a mut Tensor {
    check(!handle.is_null(), "a tensor is null");
    // SAFETY: handles come from nvte_create_tensor and are in nobody else's hands during a call.
    unsafe { &mut *handle }
}

pub(crate) fn data<'a>(handle: Handle) -> &'a mut Basic {
    &mut tensor(handle).0[ROWWISE]
}

/// One float of a quantized tensor's.
pub(crate) fn cell(of: &Tensor, parameter: usize) -> Option<f32> {
    let cell = &of.0[parameter];
    cell.is_there().then(|| {
        check(cell.dtype == dtype::F32 && cell.len() == 1, "a scale or amax is not one f32");
        cell.load()[0]
    })
}

pub(crate) fn transposed<T: Copy>(values: &[T], [rows, cols]: [usize; 2]) -> Vec<T> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c])).collect()
}

/// Writes values into a tensor of any type, codes with their transpose and cells.
pub(crate) fn write(handle: Handle, values: &[f32]) {
    let out = tensor(handle);
    let mut codes = out.0[ROWWISE];
    if codes.dtype != dtype::E4M3 {
        return codes.store(values);
    }
    check(codes.len() == values.len(), "the output has another shape");
    let scale = cell(out, SCALE).unwrap_or(1.0);
    let bits: Vec<u8> = values.iter().map(|x| E4M3::from_f32_saturating(x * scale).to_bits()).collect();
    codes.bytes_mut().copy_from_slice(&bits);
    let mut turned = out.0[COLUMNWISE];
    if turned.is_there() {
        let [rows, cols] = codes.matrix();
        check(turned.dtype == codes.dtype, "rows and columns have different types");
        check(turned.dims() == [cols, rows], "the transpose has another shape");
        check(
            out.0[COLUMNWISE_SCALE_INV].data == out.0[ROWWISE_SCALE_INV].data,
            "rows and columns have different scales",
        );
        turned.bytes_mut().copy_from_slice(&transposed(&bits, [rows, cols]));
    }
    let amax = values.iter().fold(cell(out, AMAX).unwrap_or(0.0), |amax, x| amax.max(x.abs()));
    if out.0[AMAX].is_there() {
        out.0[AMAX].store(&[amax]);
    }
    check(cell(out, ROWWISE_SCALE_INV).is_some(), "a quantized output has no scale_inv");
    out.0[ROWWISE_SCALE_INV].store(&[1.0 / scale]);
}

/// True if the call was a query, which has been answered.
pub(crate) fn queried(workspace: Handle, dtype: c_int, dims: &[usize]) -> bool {
    let wanted = &mut tensor(workspace).0[ROWWISE];
    if wanted.is_there() {
        check(wanted.dtype == dtype && wanted.dims() == dims, "the workspace has another shape");
        return false;
    }
    wanted.dtype = dtype;
    wanted.shape.ndim = dims.len();
    wanted.shape.data[..dims.len()].copy_from_slice(dims);
    true
}

pub(crate) fn column_sums(values: &[f32], cols: usize) -> Vec<f32> {
    let mut sums = vec![0.0; cols];
    for row in values.chunks(cols) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    sums
}
#[unsafe(no_mangle)]
extern "C" fn nvte_create_tensor(scaling: c_int) -> Handle {
    check(scaling == 0, "only one scale for a tensor");
    let shape = Shape { data: [0; 15], ndim: 1 };
    Box::into_raw(Box::new(Tensor([Basic { data: std::ptr::null_mut(), dtype: dtype::F32, shape }; 6])))
}

#[unsafe(no_mangle)]
extern "C" fn nvte_destroy_tensor(handle: Handle) {
    // SAFETY: it comes from nvte_create_tensor and is given back once.
    drop(unsafe { Box::from_raw(handle) });
}

#[unsafe(no_mangle)]
extern "C" fn nvte_set_tensor_param_v2(handle: Handle, parameter: c_int, basic: &Basic, size: usize) {
    check(size == size_of::<Basic>(), "the parameter has another size");
    tensor(handle).0[usize::try_from(parameter).unwrap_or(usize::MAX)] = *basic;
}

#[unsafe(no_mangle)]
extern "C" fn nvte_tensor_shape(handle: Handle) -> Shape {
    data(handle).shape
}

#[unsafe(no_mangle)]
extern "C" fn nvte_tensor_type(handle: Handle) -> c_int {
    data(handle).dtype
}
