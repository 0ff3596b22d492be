//! Queries, keys and values in the tensors that projections wrote.

use super::heads::Heads;
use crate::Result;
use fp8_kernels::Tensor;
use fp8_kernels::ops::{self, HeadsTensor};

/// The queries, keys and values of an attention, in the tensors that they were computed in: attention reads the heads where
/// they are.
#[derive(Debug)]
pub(crate) enum Operands<T> {
    /// Queries, keys and values, each `[batch, seq, heads, head_dim]`.
    Three([T; 3]),
    /// Queries, as above, and the output of a projection of keys and values, `[batch, keys, features]`.
    QueriesAndKv(T, T, Heads),
    /// The output of a projection of all three, `[batch, seq, features]`.
    Qkv(T, Heads),
    /// The same, of which the queries are read, and a cache's keys and values.
    Cached(T, [T; 2], Heads),
}

impl<T: HeadsTensor> Operands<T> {
    /// Returns the heads of queries, keys and values.
    pub(crate) fn heads(&self) -> Result<[ops::Heads<'_, T>; 3]> {
        let in_qkv =
            |qkv, &Heads { heads, groups, head_dim }: &Heads| ops::Heads::qkv(qkv, heads, groups, head_dim);
        Ok(match self {
            Self::Three([q, k, v]) => [q.into(), k.into(), v.into()],
            Self::QueriesAndKv(q, kv, heads) => {
                let [k, v] = ops::Heads::kv(kv, heads.groups, heads.head_dim)?;
                [q.into(), k, v]
            }
            Self::Qkv(qkv, heads) => in_qkv(qkv, heads)?,
            Self::Cached(qkv, [k, v], heads) => {
                let [q, ..] = in_qkv(qkv, heads)?;
                [q, k.into(), v.into()]
            }
        })
    }
}

impl<T> Operands<T> {
    /// Returns the same queries with keys and values of a cache.
    pub(crate) fn with_cached(self, [k, v]: [T; 2]) -> Self {
        match self {
            Self::Three([q, ..]) | Self::QueriesAndKv(q, ..) => Self::Three([q, k, v]),
            Self::Qkv(qkv, heads) | Self::Cached(qkv, _, heads) => Self::Cached(qkv, [k, v], heads),
        }
    }

    /// Returns the same with each tensor replaced by what `f` makes of it.
    pub(crate) fn map<U>(&self, f: impl Fn(&T) -> Result<U>) -> Result<Operands<U>> {
        Ok(match self {
            Self::Three([q, k, v]) => Operands::Three([f(q)?, f(k)?, f(v)?]),
            Self::QueriesAndKv(q, kv, heads) => Operands::QueriesAndKv(f(q)?, f(kv)?, *heads),
            Self::Qkv(qkv, heads) => Operands::Qkv(f(qkv)?, *heads),
            Self::Cached(qkv, [k, v], heads) => Operands::Cached(f(qkv)?, [f(k)?, f(v)?], *heads),
        })
    }
}

impl Operands<Tensor> {
    /// Returns queries, keys and values as tensors of their own: copies where they are parts of one.
    pub(crate) fn separate(&self) -> Result<[Tensor; 3]> {
        Ok(match self {
            Self::Three(tensors) => tensors.clone(),
            Self::QueriesAndKv(q, kv, heads) => {
                let [k, v] = heads.split_kv(kv)?;
                [q.clone(), k, v]
            }
            Self::Qkv(qkv, heads) => heads.split_qkv(qkv)?,
            Self::Cached(qkv, [k, v], heads) => {
                let [q, ..] = heads.split_qkv(qkv)?;
                [q, k.clone(), v.clone()]
            }
        })
    }
}
