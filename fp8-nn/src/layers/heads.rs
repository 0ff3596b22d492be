//! The sizes of an attention's heads.

use crate::{AttentionOptions, Error, Result, TensorParallel, init};
use fp8_kernels::{Tensor, ops};

/// Query heads, key and value heads, and the size of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) head_dim: usize,
}

impl Heads {
    /// Checks the options of the layer at `path`.
    pub(crate) fn new(path: &str, hidden_size: usize, attention: &AttentionOptions) -> Result<Self> {
        let heads = attention.num_attention_heads;
        let groups = attention.num_gqa_groups.unwrap_or(heads);
        init::check_positive(
            path,
            &[("hidden_size", hidden_size), ("num_attention_heads", heads), ("num_gqa_groups", groups)],
        )?;
        let refuse = |option, value: String, remedy: String| {
            Err(Error::Option { part: path.to_owned(), option, value, remedy })
        };
        if attention.kv_channels.is_none() && !hidden_size.is_multiple_of(heads) {
            let remedy = format!("expected a divisor of hidden_size {hidden_size}, or kv_channels given");
            return refuse("num_attention_heads", heads.to_string(), remedy);
        }
        if !heads.is_multiple_of(groups) {
            let remedy = format!("expected a divisor of the {heads} heads");
            return refuse("num_gqa_groups", groups.to_string(), remedy);
        }
        let head_dim = attention.kv_channels.unwrap_or(hidden_size / heads);
        init::check_positive(path, &[("kv_channels", head_dim)])?;
        let all = groups.checked_mul(2).and_then(|both| heads.checked_add(both));
        if all.and_then(|all| all.checked_mul(head_dim)).is_none() {
            let remedy = format!("{heads} heads of this size do not fit into memory");
            return refuse("kv_channels", head_dim.to_string(), remedy);
        }
        if let Some(scale) = attention.softmax_scale.filter(|scale| !scale.is_finite()) {
            let remedy = "expected a finite number, or None for 1/√(size of a head)".to_owned();
            return refuse("softmax_scale", scale.to_string(), remedy);
        }
        Ok(Self { heads, groups, head_dim })
    }

    /// The heads that this rank has.
    pub(crate) fn of_rank(self, path: &str, ranks: Option<&TensorParallel>) -> Result<Self> {
        let Some(ranks) = ranks else { return Ok(self) };
        ranks.expect_even(path, "num_attention_heads", self.heads)?;
        ranks.expect_even(path, "num_gqa_groups", self.groups)?;
        let n = ranks.size();
        Ok(Self { heads: self.heads / n, groups: self.groups / n, ..self })
    }

    /// Features of queries, keys and values.
    pub(crate) const fn widths(&self) -> [usize; 3] {
        let of_groups = self.groups * self.head_dim;
        [self.q_width(), of_groups, of_groups]
    }

    /// Copies queries, keys and values from the output of one projection, `[batch, seq, features]`, to `[batch, seq, heads,
    /// head_dim]` each.
    pub(crate) fn split_qkv(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let (batch, seq) = tokens(qkv);
        let parts = ops::split(qkv, &self.widths())?;
        let part = |i: usize, heads: usize| parts[i].reshape([batch, seq, heads, self.head_dim]);
        Ok([part(0, self.heads)?, part(1, self.groups)?, part(2, self.groups)?])
    }

    /// The same of keys and values.
    pub(crate) fn split_kv(&self, kv: &Tensor) -> Result<[Tensor; 2]> {
        let (batch, seq) = tokens(kv);
        let parts = ops::split(kv, &[self.groups * self.head_dim; 2])?;
        let part = |i: usize| parts[i].reshape([batch, seq, self.groups, self.head_dim]);
        Ok([part(0)?, part(1)?])
    }

    /// Features of all queries.
    pub(crate) const fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Features of all keys and values.
    pub(crate) const fn kv_width(&self) -> usize {
        2 * self.groups * self.head_dim
    }
}

/// Returns batch and length of `[batch, seq, features]`.
fn tokens(x: &Tensor) -> (usize, usize) {
    let extent = |dim: usize| x.shape().get(dim).copied().unwrap_or_default();
    (extent(0), extent(1))
}
