//! Reference of `compare_calls`.

use crate::{Error, Result, Tensor};

pub(crate) fn compare_calls(what: &str, calls: &Tensor, scales: Option<&Tensor>) -> Result<()> {
    let (calls, scales) = (calls.as_slice::<i32>()?, scales.map(Tensor::as_slice::<f32>).transpose()?);
    for (rank, call) in calls.iter().enumerate() {
        let what = || what.to_owned();
        if *call != calls[0] {
            return Err(Error::RankCalls { what: what(), rank });
        }
        let Some(&[first, ..]) = scales else { continue };
        let value = scales.and_then(|scales| scales.get(rank)).copied().unwrap_or(first);
        if value.to_bits() != first.to_bits() || !(value.is_finite() && value > 0.0) {
            return Err(Error::RankScales { what: what(), rank, value, other_value: first });
        }
    }
    Ok(())
}
