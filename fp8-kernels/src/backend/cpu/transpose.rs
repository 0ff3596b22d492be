//! Reference of `transpose`, in blocks that fit the first cache.

use super::{Buffer, parallel};
use crate::element::Element;
use crate::host::Array;
use crate::{Result, Shape, Tensor};
use fp8_format::E4M3;
use fp8_format::slice::Codec;

const BLOCK: usize = 32;

pub(crate) fn transpose(x: &Tensor) -> Result<Tensor> {
    let [rows, cols] = x.shape().matrix();
    fn of<T: Element>(x: &Tensor, data: &[T], rows: usize, cols: usize) -> Result<Tensor> {
        Ok(Tensor::on_cpu(transpose_slice(data, rows, cols)?, Shape::from([cols, rows]), x.device()))
    }
    match x.cpu_buffer("transpose")? {
        Buffer::F32(data) => of(x, data, rows, cols),
        Buffer::BF16(data) => of(x, data, rows, cols),
        Buffer::F16(data) => of(x, data, rows, cols),
        Buffer::I32(data) => of(x, data, rows, cols),
        Buffer::U8(data) => {
            Ok(Tensor::on_cpu(transpose_codes(data, rows, cols)?, Shape::from([cols, rows]), x.device()))
        }
    }
}

/// `data` is `[rows, cols]`, codes or other bytes.
pub(crate) fn transpose_codes(data: &[u8], rows: usize, cols: usize) -> Result<Array<u8>> {
    let mut out = Array::for_overwrite("transpose", data.len())?;
    // Bytes of either encoding move alike.
    let (codes, columns) =
        (bytemuck::cast_slice::<u8, E4M3>(data), bytemuck::cast_slice_mut::<u8, E4M3>(&mut out));
    Codec::new().parallel().transpose(codes, rows, cols, columns)?;
    Ok(out)
}

/// `data` is `[rows, cols]`.
fn transpose_slice<T: Element>(data: &[T], rows: usize, cols: usize) -> Result<Array<T>> {
    let mut out = Array::for_overwrite("transpose", data.len())?;
    if data.is_empty() {
        return Ok(out);
    }
    parallel::for_each(out.chunks_mut(BLOCK * rows).enumerate(), |(block, out)| {
        let first = block * BLOCK;
        let width = out.len() / rows;
        for top in (0..rows).step_by(BLOCK) {
            for (j, column) in out.chunks_exact_mut(rows).enumerate().take(width) {
                let column = &mut column[top..rows.min(top + BLOCK)];
                for (i, o) in column.iter_mut().enumerate() {
                    *o = data[(top + i) * cols + first + j];
                }
            }
        }
    });
    Ok(out)
}
