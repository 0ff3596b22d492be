//! The same bits for any number of threads, and each time on a GPU.

use super::case::Outcome;
use super::compare;
use fp8_kernels::{Result, Tensor};

/// `run` gives tensors of equal bits in pools of 1, 2 and 3 threads; twice the same on a GPU.
pub(crate) fn same_bits(what: &str, run: impl Fn() -> Result<Vec<Tensor>> + Send + Sync) -> Outcome {
    let mut first: Option<Vec<Tensor>> = None;
    for threads in 1..=3 {
        let on_gpu = first.iter().flatten().any(|tensor| tensor.device().to_string() != "cpu");
        if on_gpu && threads == 3 {
            break;
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        let got = pool.install(&run)?;
        let want = first.get_or_insert_with(|| got.clone());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let what = format!("{what}, tensor {i}, {threads} threads against 1");
            compare::same(&what, &got.to_f32_vec()?, &want.to_f32_vec()?, got.shape().last_dim())?;
        }
    }
    Ok(())
}
