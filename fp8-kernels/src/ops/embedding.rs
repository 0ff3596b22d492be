//! Looks up rows of a table by id, and adds their gradients.

use super::Part;
use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Looks up rows of a table: `y[i, :] = table[ids[i], :]`.
///
/// `ids` is i32 of up to five dimensions, and `table` is `[vocabulary, hidden]` in f32, bf16 or f16. The result has the
/// shape of `ids` followed by `hidden`, and the table's dtype.
///
/// # Errors
/// Ids that are not i32; a table that is not a float matrix; an id outside the table, which a GPU reports at the next call
/// that waits for it.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let table = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// let ids = Tensor::from_vec(vec![1, 0, 1], [3], &Device::cpu())?;
/// assert_eq!(ops::embedding(&ids, &table)?.to_vec::<f32>()?, [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    run("embedding", ids, table, None)
}

/// Looks up the rows that a part of a table has: [`embedding`](embedding()) where `table` is rows `part.first ..` of a
/// vocabulary of `part.total`.
///
/// Rows of `y` whose id is in another part are zeros. So the results of all parts, whose tables together are the whole one, add
/// up to that of the whole table.
///
/// # Errors
/// Those of [`embedding`](embedding()), with an id outside the whole vocabulary; a part that does not end within it.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let table = Tensor::from_vec(vec![5.0f32, 6.0, 7.0, 8.0], [2, 2], &Device::cpu())?;
/// let ids = Tensor::from_vec(vec![1, 3], [2], &Device::cpu())?;
/// let y = ops::embedding_part(&ids, &table, ops::Part { first: 2, total: 4 })?;
/// assert_eq!(y.to_vec::<f32>()?, [0.0, 0.0, 7.0, 8.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn embedding_part(ids: &Tensor, table: &Tensor, part: Part) -> Result<Tensor> {
    run("embedding_part", ids, table, Some(part))
}

fn run(op: &'static str, ids: &Tensor, table: &Tensor, part: Option<Part>) -> Result<Tensor> {
    table.expect_float(op, "table")?;
    let (shape, part) = check(op, ids, table, part)?;
    dispatch!(table.device(), embedding::embedding(ids, table, part, shape))
}

/// Adds the gradient of [`embedding`](embedding())'s table to `dtable`: `dtable[ids[i], :] += dy[i, :]`.
///
/// `dy` has the shape of the lookup's result and is f32, bf16 or f16; `dtable` is f32 `[vocabulary, hidden]`. Rows of `dy`
/// with the same id are added in the order of the ids, so the result is the same each time. `name` identifies `dtable` in
/// errors.
///
/// # Errors
/// Those of [`embedding`](embedding()); a `dy` of another shape; a `dtable` that is not f32 or shares its storage.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let ids = Tensor::from_vec(vec![1, 1, 0], [3], &Device::cpu())?;
/// let dy = Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3, 1], &Device::cpu())?;
/// let mut dtable = Tensor::zeros([2, 1], DType::F32, &Device::cpu())?;
/// ops::embedding_backward(&dy, &ids, &mut dtable, "embedding.weight.main_grad")?;
/// assert_eq!(dtable.to_vec::<f32>()?, [4.0, 3.0]); // row 0 from the last id, row 1 from the first two
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn embedding_backward(dy: &Tensor, ids: &Tensor, dtable: &mut Tensor, name: &str) -> Result<()> {
    run_backward("embedding_backward", dy, ids, dtable, None, name)
}

/// Adds the gradient of a part of a table to `dtable`: [`embedding_backward`] where `dtable` is rows `part.first ..` of a
/// vocabulary of `part.total`.
///
/// Rows of `dy` whose id is in another part are left out. The result is the same, to the bit, as those rows of the gradient of
/// the whole table.
///
/// # Errors
/// Those of [`embedding_backward`], with an id outside the whole vocabulary; a part that does not end within it.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let ids = Tensor::from_vec(vec![3, 1, 3], [3], &Device::cpu())?;
/// let dy = Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3, 1], &Device::cpu())?;
/// let mut dtable = Tensor::zeros([2, 1], DType::F32, &Device::cpu())?;
/// let part = ops::Part { first: 2, total: 4 };
/// ops::embedding_part_backward(&dy, &ids, &mut dtable, part, "embedding.weight.main_grad")?;
/// assert_eq!(dtable.to_vec::<f32>()?, [0.0, 5.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn embedding_part_backward(
    dy: &Tensor,
    ids: &Tensor,
    dtable: &mut Tensor,
    part: Part,
    name: &str,
) -> Result<()> {
    run_backward("embedding_part_backward", dy, ids, dtable, Some(part), name)
}

fn run_backward(
    op: &'static str,
    dy: &Tensor,
    ids: &Tensor,
    dtable: &mut Tensor,
    part: Option<Part>,
    name: &str,
) -> Result<()> {
    dy.expect_float(op, "dy")?;
    dtable.expect_dtype(op, "dtable", DType::F32)?;
    dtable.device().expect_same(op, dy.device())?;
    let (rhs, part) = check(op, ids, dtable, part)?;
    if *dy.shape() != rhs {
        let (lhs, what) = (*dy.shape(), "dy and the lookup's result");
        return Err(Error::Shapes { op, what, lhs, rhs, remedy: "dy has the shape of ids, then hidden" });
    }
    dispatch!(dtable.device(), embedding::embedding_backward(dy, ids, dtable, part, name))
}

/// Returns the result's shape, and the rows that the table has: all of its own unless a part is given.
fn check(op: &'static str, ids: &Tensor, table: &Tensor, part: Option<Part>) -> Result<(Shape, Part)> {
    ids.expect_dtype(op, "ids", DType::I32)?;
    table.device().expect_same(op, ids.device())?;
    let &[rows, hidden] = &**table.shape() else {
        let remedy = "a table is [vocabulary, hidden]".to_owned();
        return Err(Error::Shape { op, shape: *table.shape(), remedy });
    };
    let part = part.unwrap_or(Part::whole(rows));
    part.check(op, "part", rows)?;
    let mut dims = ids.shape().to_vec();
    dims.push(hidden);
    let shape = Shape::from_slice(&dims).ok_or_else(|| Error::Shape {
        op,
        shape: *ids.shape(),
        remedy: format!("ids have at most {} dimensions, the result one more", Shape::MAX_RANK - 1),
    })?;
    shape.check_size(op)?;
    Ok((shape, part))
}
