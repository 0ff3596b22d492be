//! Reference of `dropout`.

use super::floats::{Floats, build_flat};
use super::parallel;
use crate::ops::DropoutKey;
use crate::{Result, Tensor};
use fp8_format::philox::philox4x32_10;

/// Random numbers of one counter.
const LANES: usize = 4;
// Every piece of work starts at a whole counter.
const _: () = assert!(parallel::CHUNK.is_multiple_of(LANES));

pub(crate) fn dropout(x: &Tensor, p: f32, key: DropoutKey) -> Result<Tensor> {
    let data = Floats::of(x, "dropout", "x")?;
    // Exact: p has 24 significant bits, and p < 1.
    let threshold = (f64::from(p) * 2f64.powi(32)) as u32;
    let factor = 1.0 / (1.0 - p);
    build_flat("dropout", *x.shape(), x.dtype(), x.device(), |first, out| {
        let mut scratch = Vec::new();
        let data = data.read(first..first + out.len(), &mut scratch);
        for (i, (out, data)) in out.chunks_mut(LANES).zip(data.chunks(LANES)).enumerate() {
            let counter = key.offset.wrapping_add((first / LANES + i) as u64);
            let random = philox4x32_10(counter, key.seed);
            for ((o, &v), r) in out.iter_mut().zip(data).zip(random) {
                *o = if r >= threshold { v * factor } else { 0.0 };
            }
        }
    })
}
