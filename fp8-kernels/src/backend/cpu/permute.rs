//! Reference of `permute`.

use super::{Buffer, parallel};
use crate::element::Element;
use crate::host::Array;
use crate::ops::Order;
use crate::{Result, Shape, Tensor};

/// `shape` is the result's.
pub(crate) fn permute(x: &Tensor, order: &Order, shape: Shape) -> Result<Tensor> {
    fn of<T: Element>(x: &Tensor, data: &[T], order: &Order, shape: Shape) -> Result<Tensor> {
        let mut out = Array::for_overwrite("permute", data.len())?;
        let [outer @ .., cols] = order.dims;
        let [strides @ .., apart] = order.strides;
        parallel::rows(&mut out, cols, |first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(cols)) {
                let (mut rest, mut start) = (row, 0);
                for (dim, stride) in outer.iter().zip(strides).rev() {
                    start += rest % dim * stride;
                    rest /= dim;
                }
                if apart == 1 {
                    out.copy_from_slice(&data[start..start + cols]);
                } else {
                    out.iter_mut().zip(data[start..].iter().step_by(apart)).for_each(|(o, x)| *o = *x);
                }
            }
        });
        Ok(Tensor::on_cpu(out, shape, x.device()))
    }
    match x.cpu_buffer("permute")? {
        Buffer::F32(data) => of(x, data, order, shape),
        Buffer::BF16(data) => of(x, data, order, shape),
        Buffer::F16(data) => of(x, data, order, shape),
        Buffer::I32(data) => of(x, data, order, shape),
        Buffer::U8(data) => of(x, data, order, shape),
    }
}
