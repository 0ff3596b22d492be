//! Norms of the heads of queries and keys.

use super::layer_norm::NormCore;
use crate::{NormOptions, Parameter, Placement, Result, TensorParallel, composite};
use fp8_kernels::ops::NormStats;
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::Backward;

/// Normalizes each head of queries and of keys before RoPE. All heads share one weight.
#[derive(Debug)]
pub(crate) struct QkNorm {
    q_norm: NormCore,
    k_norm: NormCore,
}

composite!(QkNorm { q_norm, k_norm });

/// The inputs of the two norms, with their statistics.
#[derive(Debug)]
pub(crate) struct QkNormSaved {
    q: (Tensor, NormStats),
    k: (Tensor, NormStats),
}

impl QkNorm {
    /// Parameters are `<path>.q_norm.*` and `<path>.k_norm.*`, of `head_dim` elements.
    pub(crate) fn new(
        path: &str,
        head_dim: usize,
        options: NormOptions,
        params_dtype: DType,
        ranks: Option<&TensorParallel>,
        device: &Device,
    ) -> Result<Self> {
        let norm = |name: &str| -> Result<NormCore> {
            let norm = NormCore::new(&format!("{path}.{name}"), head_dim, options, params_dtype, device)?;
            // Each rank sums the gradients of its heads.
            Ok(match ranks {
                Some(ranks) => norm.placed(&Placement::Partial, ranks),
                None => norm,
            })
        };
        Ok(Self { q_norm: norm("q_norm")?, k_norm: norm("k_norm")? })
    }

    pub(crate) const fn q_weight(&self) -> &Parameter {
        &self.q_norm.weight
    }

    pub(crate) const fn k_weight(&self) -> &Parameter {
        &self.k_norm.weight
    }
}

/// Returns normalized queries and keys, `[batch, seq, heads, head_dim]` as given.
pub(crate) fn forward(norm: &QkNorm, q: Tensor, k: Tensor) -> Result<(Tensor, Tensor, QkNormSaved)> {
    let ((q_out, q_stats), (k_out, k_stats)) = (norm.q_norm.forward(&q)?, norm.k_norm.forward(&k)?);
    Ok((q_out, k_out, QkNormSaved { q: (q, q_stats), k: (k, k_stats) }))
}

/// Returns the gradients of queries and keys as they were before, and adds those of the weights.
pub(crate) fn backward(
    cx: &Backward<'_>,
    norm: Option<&mut QkNorm>,
    saved: Option<&QkNormSaved>,
    dq: Tensor,
    dk: Tensor,
) -> Result<(Tensor, Tensor)> {
    let (Some(norm), Some(saved)) = (norm, saved) else { return Ok((dq, dk)) };
    let QkNormSaved { q: (q, q_stats), k: (k, k_stats) } = saved;
    Ok((norm.q_norm.backward(cx, q, q_stats, &dq)?, norm.k_norm.backward(cx, k, k_stats, &dk)?))
}
