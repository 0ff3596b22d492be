//! Reference of `rows`.

use super::{Buffer, parallel};
use crate::element::Element;
use crate::host::Array;
use crate::{Result, Shape, Tensor};

/// `shape` is the result's.
pub(crate) fn rows(x: &Tensor, start: usize, shape: Shape) -> Result<Tensor> {
    fn of<T: Element>(x: &Tensor, data: &[T], start: usize, shape: Shape) -> Result<Tensor> {
        let mut out = Array::for_overwrite("rows", shape.numel())?;
        let first = start * shape[1..].iter().product::<usize>();
        let source = &data[first..first + out.len()];
        parallel::zip(&mut out, source, |out, source| out.copy_from_slice(source));
        Ok(Tensor::on_cpu(out, shape, x.device()))
    }
    match x.cpu_buffer("rows")? {
        Buffer::F32(data) => of(x, data, start, shape),
        Buffer::BF16(data) => of(x, data, start, shape),
        Buffer::F16(data) => of(x, data, start, shape),
        Buffer::I32(data) => of(x, data, start, shape),
        Buffer::U8(data) => of(x, data, start, shape),
    }
}
