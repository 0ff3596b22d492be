//! Reference of `embedding`.

use super::{Buffer, parallel};
use crate::element::Element;
use crate::host::{self, Array};
use crate::{Error, Result, Shape, Tensor};

pub(crate) fn embedding(ids: &Tensor, table: &Tensor, shape: Shape) -> Result<Tensor> {
    let op = "embedding";
    let rows = rows(op, ids, table)?;
    fn gather<T: Element>(rows: &[usize], table: &[T], shape: Shape, like: &Tensor) -> Result<Tensor> {
        let hidden = shape.last_dim();
        let mut out = Array::for_overwrite("embedding", shape.numel())?;
        parallel::rows(&mut out, hidden, |first, out| {
            for (out, &row) in out.chunks_exact_mut(hidden).zip(&rows[first..]) {
                out.copy_from_slice(&table[row * hidden..(row + 1) * hidden]);
            }
        });
        Ok(Tensor::on_cpu(out, shape, like.device()))
    }
    match table.cpu_buffer(op)? {
        Buffer::F32(data) => gather(&rows, data, shape, table),
        Buffer::BF16(data) => gather(&rows, data, shape, table),
        Buffer::F16(data) => gather(&rows, data, shape, table),
        _ => table.expect_float(op, "table").map(|()| table.clone()),
    }
}

pub(crate) fn embedding_backward(dy: &Tensor, ids: &Tensor, dtable: &mut Tensor, name: &str) -> Result<()> {
    let op = "embedding_backward";
    let rows = rows(op, ids, dtable)?;
    let dy = dy.cpu_f32(op)?;
    let hidden = dtable.shape().last_dim();
    let out = dtable.as_mut_slice::<f32>(name)?;
    if hidden == 0 {
        return Ok(());
    }
    // Positions by row, those of one row in their order: each task adds to rows of its own, always in the same order.
    let mut order = host::collect(op, 0..rows.len())?;
    order.sort_by_key(|&position| rows[position]);
    let step = parallel::rows_per_chunk(hidden);
    parallel::for_each(out.chunks_mut(step * hidden).enumerate(), |(chunk, out)| {
        let (first, last) = (chunk * step, chunk * step + out.len() / hidden);
        let from = order.partition_point(|&position| rows[position] < first);
        let to = order.partition_point(|&position| rows[position] < last);
        super::dispatch::vectorized(|| {
            for &position in &order[from..to] {
                let start = (rows[position] - first) * hidden;
                let dy = &dy[position * hidden..(position + 1) * hidden];
                out[start..start + hidden].iter_mut().zip(dy).for_each(|(o, v)| *o += v);
            }
        });
    });
    Ok(())
}

/// The ids as rows of `table`.
fn rows(op: &'static str, ids: &Tensor, table: &Tensor) -> Result<Vec<usize>> {
    let limit = table.shape().matrix()[0];
    let row = |(position, &id): (usize, &i32)| {
        let row = usize::try_from(id).ok().filter(|&row| row < limit);
        row.ok_or(Error::Index { op, what: "id", value: id.into(), position, limit })
    };
    host::try_collect(op, ids.as_slice::<i32>()?.iter().enumerate().map(row))
}
