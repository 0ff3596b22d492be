//! Reference of `split` and `concat`.

use super::{Buffer, parallel};
use crate::element::Element;
use crate::host::Array;
use crate::{Result, Shape, Tensor};

pub(crate) fn split(x: &Tensor, sizes: &[usize]) -> Result<Vec<Tensor>> {
    fn of<T: Element>(x: &Tensor, data: &[T], sizes: &[usize]) -> Result<Vec<Tensor>> {
        let [rows, cols] = x.shape().matrix();
        let ends = sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        let part = |(&size, end): (&usize, usize)| {
            let mut out = Array::for_overwrite("split", rows * size)?;
            parallel::rows(&mut out, size, |first, out| {
                let source = data[first * cols..].chunks_exact(cols);
                out.chunks_exact_mut(size)
                    .zip(source)
                    .for_each(|(o, x)| o.copy_from_slice(&x[end - size..end]));
            });
            Ok(Tensor::on_cpu(out, x.shape().with_last(size), x.device()))
        };
        sizes.iter().zip(ends).map(part).collect()
    }
    match x.cpu_buffer("split")? {
        Buffer::F32(data) => of(x, data, sizes),
        Buffer::BF16(data) => of(x, data, sizes),
        Buffer::F16(data) => of(x, data, sizes),
        Buffer::I32(data) => of(x, data, sizes),
        Buffer::U8(data) => of(x, data, sizes),
    }
}

/// `first` is the first of `parts`; all have its dtype and leading dimensions. `shape` is the result's.
pub(crate) fn concat(first: &Tensor, parts: &[&Tensor], shape: Shape) -> Result<Tensor> {
    fn of<T: Element>(first: &Tensor, parts: &[&Tensor], shape: Shape) -> Result<Tensor> {
        let slices = parts
            .iter()
            .map(|part| Ok((part.cpu_slice::<T>("concat")?, part.shape().last_dim())))
            .collect::<Result<Vec<_>>>()?;
        let cols = shape.last_dim();
        let mut out = Array::for_overwrite("concat", shape.numel())?;
        parallel::rows(&mut out, cols, |first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(cols)) {
                let mut rest = out;
                for (data, width) in &slices {
                    let (part, others) = rest.split_at_mut(*width);
                    part.copy_from_slice(&data[row * width..(row + 1) * width]);
                    rest = others;
                }
            }
        });
        Ok(Tensor::on_cpu(out, shape, first.device()))
    }
    match first.cpu_buffer("concat")? {
        Buffer::F32(_) => of::<f32>(first, parts, shape),
        Buffer::BF16(_) => of::<half::bf16>(first, parts, shape),
        Buffer::F16(_) => of::<half::f16>(first, parts, shape),
        Buffer::I32(_) => of::<i32>(first, parts, shape),
        Buffer::U8(_) => of::<u8>(first, parts, shape),
    }
}
