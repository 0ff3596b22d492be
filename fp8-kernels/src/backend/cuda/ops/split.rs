//! `split` and `concat` on a GPU: one copy of a range of columns per part.

use super::{Buffer, Gpu, Grid, In, Out, kernels};
use crate::{Result, Shape, Tensor};

/// A range of columns in a matrix: the distance between its rows, and the offset of the first column; in elements.
#[derive(Clone, Copy)]
struct Columns {
    pitch: usize,
    offset: usize,
}

/// The largest power of two up to 16 that divides all of `bytes`.
pub(super) fn unit(bytes: &[usize]) -> usize {
    1 << bytes.iter().fold(16, |all, bytes| all | bytes).trailing_zeros()
}

/// Copies `width` elements of `rows` rows of `x` into `y`.
fn copy(gpu: &Gpu, [x, y]: [&Buffer; 2], [rows, width]: [usize; 2], [from, to]: [Columns; 2]) -> Result<()> {
    let bytes =
        [width, from.pitch, from.offset, to.pitch, to.offset].map(|elements| elements * x.dtype().size());
    let unit = unit(&bytes);
    let [width, x_pitch, x_offset, y_pitch, y_offset] = bytes.map(|bytes| (bytes / unit) as u64);
    let rows = rows as u64;
    let kernel = gpu.load(kernels::SPLIT_COPY)?;
    let args = kernels::SplitCopy {
        x: In::void(x),
        y: Out::void(y),
        rows,
        width,
        x_pitch,
        x_offset,
        y_pitch,
        y_offset,
        unit: unit as i32,
    };
    // SAFETY: in units of which each number is a whole one and to which a buffer's start is aligned; offset + width ≤
    // pitch on either side, and both have `rows` rows of their pitch: one is the whole matrix, the other a part of
    // it.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, rows * width), &args) }
}

pub(crate) fn split(gpu: &Gpu, x: &Tensor, sizes: &[usize]) -> Result<Vec<Tensor>> {
    let ([rows, cols], values) = (x.shape().matrix(), x.cuda("split")?);
    let mut offset = 0;
    let part = |&size: &usize| {
        let out = gpu.alloc(x.dtype(), rows * size)?;
        let [from, to] = [Columns { pitch: cols, offset }, Columns { pitch: size, offset: 0 }];
        copy(gpu, [values, &out], [rows, size], [from, to])?;
        offset += size;
        Ok(Tensor::from_cuda(out, x.shape().with_last(size), x.device()))
    };
    sizes.iter().map(part).collect()
}

/// `first` is the first of `parts`; all have its dtype and leading dimensions. `shape` is the result's.
pub(crate) fn concat(gpu: &Gpu, first: &Tensor, parts: &[&Tensor], shape: Shape) -> Result<Tensor> {
    let [rows, cols] = shape.matrix();
    let out = gpu.alloc(first.dtype(), shape.numel())?;
    let mut offset = 0;
    for part in parts {
        let width = part.shape().last_dim();
        let [from, to] = [Columns { pitch: width, offset: 0 }, Columns { pitch: cols, offset }];
        copy(gpu, [part.cuda("concat")?, &out], [rows, width], [from, to])?;
        offset += width;
    }
    Ok(Tensor::from_cuda(out, shape, first.device()))
}

#[cfg(test)]
mod tests {
    use super::unit;

    #[test]
    fn units_divide_everything() {
        assert_eq!([unit(&[]), unit(&[0, 32, 48]), unit(&[0])], [16; 3]);
        assert_eq!([unit(&[32, 8]), unit(&[32, 12, 0]), unit(&[64, 2]), unit(&[16, 33])], [8, 4, 2, 1]);
    }
}
