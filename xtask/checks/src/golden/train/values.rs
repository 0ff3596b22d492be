//! Values of safetensors files.

use super::super::hf::check::{Check, text};
use safetensors::SafeTensors;

/// The f32 values of a tensor.
pub(super) fn floats(tensors: &SafeTensors<'_>, name: &str) -> Check<Vec<f32>> {
    let view = tensors.tensor(name).map_err(text)?;
    if view.dtype() != safetensors::Dtype::F32 {
        return Err(format!("`{name}` is {:?}: expected F32", view.dtype()));
    }
    Ok(view.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
}

/// The integers of an i64 tensor.
pub(super) fn integers(tensors: &SafeTensors<'_>, name: &str) -> Check<(Vec<i32>, Vec<usize>)> {
    let view = tensors.tensor(name).map_err(text)?;
    if view.dtype() != safetensors::Dtype::I64 {
        return Err(format!("`{name}` is {:?}: expected I64", view.dtype()));
    }
    let values =
        view.data().as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes) as i32).collect();
    Ok((values, view.shape().to_vec()))
}
