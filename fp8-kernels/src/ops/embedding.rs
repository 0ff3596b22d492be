//! Looks up rows of a table by id, and adds their gradients.

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
    let op = "embedding";
    table.expect_float(op, "table")?;
    let shape = check(op, ids, table)?;
    dispatch!(table.device(), embedding::embedding(ids, table, shape))
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
    let op = "embedding_backward";
    dy.expect_float(op, "dy")?;
    dtable.expect_dtype(op, "dtable", DType::F32)?;
    dtable.device().expect_same(op, dy.device())?;
    let rhs = check(op, ids, dtable)?;
    if *dy.shape() != rhs {
        let (lhs, what) = (*dy.shape(), "dy and the lookup's result");
        return Err(Error::Shapes { op, what, lhs, rhs, remedy: "dy has the shape of ids, then hidden" });
    }
    dispatch!(dtable.device(), embedding::embedding_backward(dy, ids, dtable, name))
}

/// Returns the result's shape.
fn check(op: &'static str, ids: &Tensor, table: &Tensor) -> Result<Shape> {
    ids.expect_dtype(op, "ids", DType::I32)?;
    table.device().expect_same(op, ids.device())?;
    let &[_, hidden] = &**table.shape() else {
        let remedy = "a table is [vocabulary, hidden]".to_owned();
        return Err(Error::Shape { op, shape: *table.shape(), remedy });
    };
    let mut dims = ids.shape().to_vec();
    dims.push(hidden);
    let shape = Shape::from_slice(&dims).ok_or_else(|| Error::Shape {
        op,
        shape: *ids.shape(),
        remedy: format!("ids have at most {} dimensions, the result one more", Shape::MAX_RANK - 1),
    })?;
    shape.check_size(op)?;
    Ok(shape)
}
