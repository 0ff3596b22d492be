//! Rows of a table by id: `y[i, :] = table[ids[i], :]`; backward adds `dy[i, :]` to row `ids[i]`.
//!
//! `ids` is i32 of any shape, `table` `[vocabulary, hidden]` in f32, bf16 or f16; the result has the shape of `ids` with
//! `hidden` behind it, and the table's type. Gradients are f32; a row's are added in the order of the ids.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Looks up `ids`.
///
/// # Errors
/// Ids of another type than i32 or out of range, a table that is not a float matrix.
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

/// `dtable[ids[i], :] += dy[i, :]`, in f32. `name` is what an error calls `dtable`.
///
/// # Errors
/// As [`embedding`]; `dy` of another shape than the lookup's result, `dtable` of another type than f32, or shared.
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

/// The result's shape.
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
