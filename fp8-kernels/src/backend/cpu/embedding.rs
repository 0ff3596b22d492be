//! Reference of `embedding`.

use super::{Buffer, parallel};
use crate::element::Element;
use crate::host::{self, Array};
use crate::ops::Part;
use crate::{Error, Result, Shape, Tensor};

pub(crate) fn embedding(ids: &Tensor, table: &Tensor, part: Part, shape: Shape) -> Result<Tensor> {
    let op = "embedding";
    let rows = rows(op, ids, table, part)?;
    fn gather<T: Element>(
        rows: &[Option<usize>],
        table: &[T],
        shape: Shape,
        like: &Tensor,
    ) -> Result<Tensor> {
        let hidden = shape.last_dim();
        let mut out = Array::for_overwrite("embedding", shape.numel())?;
        parallel::rows(&mut out, hidden, |first, out| {
            for (out, &row) in out.chunks_exact_mut(hidden).zip(&rows[first..]) {
                match row {
                    Some(row) => out.copy_from_slice(&table[row * hidden..(row + 1) * hidden]),
                    None => out.fill(T::zeroed()),
                }
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

pub(crate) fn embedding_backward(
    dy: &Tensor,
    ids: &Tensor,
    dtable: &mut Tensor,
    part: Part,
    name: &str,
) -> Result<()> {
    let op = "embedding_backward";
    let rows = rows(op, ids, dtable, part)?;
    let dy = dy.cpu_f32(op)?;
    let hidden = dtable.shape().last_dim();
    let out = dtable.as_mut_slice::<f32>(name)?;
    if hidden == 0 {
        return Ok(());
    }
    // By row, positions of one row in their order: each task adds to rows of its own, always in the same order.
    let here = |(position, &row): (usize, &Option<usize>)| row.map(|row| (row, position));
    let mut order = host::room(op, rows.len())?;
    order.extend(rows.iter().enumerate().filter_map(here));
    order.sort_by_key(|&(row, _)| row);
    let step = parallel::rows_per_chunk(hidden);
    parallel::for_each(out.chunks_mut(step * hidden).enumerate(), |(chunk, out)| {
        let (first, last) = (chunk * step, chunk * step + out.len() / hidden);
        let from = order.partition_point(|&(row, _)| row < first);
        let to = order.partition_point(|&(row, _)| row < last);
        super::dispatch::vectorized(|| {
            for &(row, position) in &order[from..to] {
                let start = (row - first) * hidden;
                let dy = &dy[position * hidden..(position + 1) * hidden];
                out[start..start + hidden].iter_mut().zip(dy).for_each(|(o, v)| *o += v);
            }
        });
    });
    Ok(())
}

/// The ids as rows of `table`; `None` for one that another part has.
fn rows(op: &'static str, ids: &Tensor, table: &Tensor, part: Part) -> Result<Vec<Option<usize>>> {
    let (limit, len) = (part.total, table.shape().matrix()[0]);
    let row = |(position, &id): (usize, &i32)| {
        let row = usize::try_from(id).ok().filter(|&row| row < limit);
        let row = row.ok_or(Error::Index { op, what: "id", value: id.into(), position, limit })?;
        Ok(row.checked_sub(part.first).filter(|&row| row < len))
    };
    host::try_collect(op, ids.as_slice::<i32>()?.iter().enumerate().map(row))
}
