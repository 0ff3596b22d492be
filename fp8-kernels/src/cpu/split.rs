//! Reference of `split` and `concat`.

use super::{Buffer, parallel};
use crate::dtype::Element;
use crate::{Result, Tensor};

pub(crate) fn split(x: &Tensor, sizes: &[usize]) -> Result<Vec<Tensor>> {
    fn of<T: Element>(x: &Tensor, data: &[T], sizes: &[usize]) -> Vec<Tensor> {
        let [rows, cols] = x.shape().matrix();
        let ends = sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        let part = |(&size, end): (&usize, usize)| {
            let mut out = vec![T::default(); rows * size];
            parallel::rows(&mut out, size, |first, out| {
                let source = data[first * cols..].chunks_exact(cols);
                out.chunks_exact_mut(size)
                    .zip(source)
                    .for_each(|(o, x)| o.copy_from_slice(&x[end - size..end]));
            });
            Tensor::on_cpu(out, x.shape().with_last(size), x.device())
        };
        sizes.iter().zip(ends).map(part).collect()
    }
    Ok(match x.cpu_buffer("split")? {
        Buffer::F32(data) => of(x, data, sizes),
        Buffer::BF16(data) => of(x, data, sizes),
        Buffer::F16(data) => of(x, data, sizes),
        Buffer::I32(data) => of(x, data, sizes),
        Buffer::U8(data) => of(x, data, sizes),
    })
}

/// `first` is the first of `parts`; all have its dtype and leading dimensions.
pub(crate) fn concat(first: &Tensor, parts: &[&Tensor]) -> Result<Tensor> {
    fn of<T: Element>(first: &Tensor, parts: &[&Tensor]) -> Result<Tensor> {
        let slices = parts
            .iter()
            .map(|part| Ok((part.cpu_slice::<T>("concat")?, part.shape().last_dim())))
            .collect::<Result<Vec<_>>>()?;
        let cols = slices.iter().map(|(_, width)| width).sum();
        let mut out = vec![T::default(); first.shape().matrix()[0] * cols];
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
        Ok(Tensor::on_cpu(out, first.shape().with_last(cols), first.device()))
    }
    match first.cpu_buffer("concat")? {
        Buffer::F32(_) => of::<f32>(first, parts),
        Buffer::BF16(_) => of::<half::bf16>(first, parts),
        Buffer::F16(_) => of::<half::f16>(first, parts),
        Buffer::I32(_) => of::<i32>(first, parts),
        Buffer::U8(_) => of::<u8>(first, parts),
    }
}
