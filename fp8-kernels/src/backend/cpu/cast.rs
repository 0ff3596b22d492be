//! Reference of `cast`.

use super::Floats;
use super::floats::build_flat;
use crate::{DType, Result, Tensor};

pub(crate) fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    use crate::element::Float;
    let floats = Floats::of(x, "cast", "x")?;
    build_flat("cast", *x.shape(), dtype, x.device(), |start, out| {
        let range = start..start + out.len();
        match floats {
            Floats::F32(data) => out.copy_from_slice(&data[range]),
            Floats::BF16(data) => Float::widen(&data[range], out),
            Floats::F16(data) => Float::widen(&data[range], out),
        }
    })
}
