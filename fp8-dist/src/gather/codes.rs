//! All-gather of tensors that are in FP8 already: codes and factors of the shards, one after the other, are those of the whole.
//!
//! | factors | rowwise codes | columnwise codes |
//! |---|---|---|
//! | one | any shards | made of the rowwise codes |
//! | 128 × 128 | shards of 128 rows | made of the rowwise codes |
//! | 1 × 128, MX, 1 × 16 | any shards | gathered: shards of 128, of 32, of 16 rows |
//! | 16 × 16 | shards of 16 rows | made of the rowwise codes |
//! | rows | any shards | never: each factor spans all rows of a shard |
//!
//! "Shards of 128 rows" means that each shard except the last has a multiple of 128. The transposes of shards are not contiguous in
//! the transpose of the whole tensor: columnwise codes that are gathered are transposed before and after. Those of NVFP4, two of which
//! share a byte, are transposed in bytes, of which such a shard has whole ones for each of its rows.
//!
//! NVFP4 has factors for blocks of 1 × 16 or 16 × 16, which are gathered, and one for the tensor and copy, which is compared.

use super::gatherer::{Factor, Gatherer};
use crate::{Error, Result};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{Fp8Tensor, Shape, Tensor, ops};

/// Gathers the shards of a tensor.
pub(crate) fn gather(group: &dyn Gatherer, what: &str, shard: &Fp8Tensor) -> Result<Fp8Tensor> {
    let label = label(what, shard);
    let call = || format!("gather_codes `{what}`");
    let unit = unit(shard).ok_or_else(|| Error::Shape {
        call: call(),
        shape: *shard.shape(),
        world_size: 1,
        remedy: "columnwise factors for rows span a whole shard: gather a tensor without a columnwise copy",
    })?;
    let dims = shard.shape().len();
    let has_blocks = shard.blocks().is_some() || shard.columnwise_blocks().is_some();
    if dims < 2 && (has_blocks || shard.rowwise().is_none()) {
        let remedy =
            "scales for blocks, and columnwise codes alone, need two dimensions: reshape it to [1, n]";
        return Err(Error::Shape { call: call(), shape: *shard.shape(), world_size: 1, remedy });
    }
    if unit > 1 {
        let (fits, world_size) = group.are_multiples(&label, shard.matrix()[0], unit, shard.device())?;
        if !fits {
            let remedy = "each shard but the last needs a multiple of 128 rows (MX blocks: 32, NVFP4: 16), so that no block is in two shards";
            return Err(Error::Shape { call: call(), shape: *shard.shape(), world_size, remedy });
        }
    }
    match shard.rowwise() {
        Some(_) => join(group, what, &label, &call(), shard),
        None => join_columns(group, what, &label, &call(), shard),
    }
}

/// Describes what must be equal on all ranks besides factors and rows.
pub(crate) fn label(what: &str, shard: &Fp8Tensor) -> String {
    let layout = |blocks: Option<Blocks>| blocks.map_or("all".to_owned(), |blocks| blocks.to_string());
    let rowwise = shard.rowwise().map(|_| format!(", factors for {}", layout(shard.blocks())));
    let mixed = if shard.has_hadamard() { " of a Hadamard transform" } else { "" };
    let columnwise = shard
        .columnwise()
        .map(|_| format!(", columnwise factors for {}{mixed}", layout(shard.columnwise_blocks())));
    [Some(format!("{what}: codes of {}", shard.encoding())), rowwise, columnwise]
        .into_iter()
        .flatten()
        .collect()
}

/// Joins shards whose blocks are each within one. All have rowwise codes.
pub(crate) fn join(
    group: &dyn Gatherer,
    what: &str,
    label: &str,
    call: &str,
    shard: &Fp8Tensor,
) -> Result<Fp8Tensor> {
    let stored = shard.stored_codes();
    // Packed codes have fewer bytes a row than the tensor has elements.
    let width = stored.shape().last_dim();
    let codes = if shard.tensor_scale().is_some() { shard.shape().with_last(width) } else { *shard.shape() };
    let rowwise = Parts {
        codes: &stored.reshape(codes)?,
        factors: shard.scale_inv(),
        blocks: shard.blocks(),
        tensor_scale: shard.tensor_scale(),
    };
    let names = [label, &factors_name(what, shard.blocks())];
    let [codes, factors] = rowwise.gather(group, names, call)?;
    let columnwise = match Parts::of_columns(shard) {
        Some(columns) if !is_made_of_rows(shard.blocks()) => {
            let names = [&*format!("{what}: columnwise codes"), &format!("{what}: columnwise scales")];
            Some(columns.gather_turned(group, names, call)?.into())
        }
        _ => None,
    };
    let whole = shard.joined(codes, factors, columnwise)?;
    Ok(if shard.columnwise().is_some() { whole.with_columnwise()? } else { whole })
}

/// Joins shards that have columnwise codes alone.
fn join_columns(
    group: &dyn Gatherer,
    what: &str,
    label: &str,
    call: &str,
    shard: &Fp8Tensor,
) -> Result<Fp8Tensor> {
    let Some(columns) = Parts::of_columns(shard) else { return Ok(shard.clone()) };
    let names = [label, &factors_name(what, columns.blocks)];
    let [codes, factors] = columns.gather_turned(group, names, call)?;
    let mut dims = shard.shape().to_vec();
    if let Some(rows) = dims.first_mut() {
        *rows = match shard.shape().len() {
            2 if columns.tensor_scale.is_none() => codes.shape().last_dim(),
            _ => group.rows(&format!("{what}: rows"), *rows, shard.device())?.iter().sum(),
        };
    }
    let shape = Shape::from_slice(&dims).unwrap_or(*shard.shape());
    Ok(shard.joined_columns(shape, codes, factors)?)
}

/// Returns whether the columnwise codes are the transpose of the rowwise ones.
fn is_made_of_rows(blocks: Option<Blocks>) -> bool {
    matches!(blocks, None | Some(Blocks::B128x128 | Blocks::B16x16))
}

/// Returns the number of rows of which each shard except the last must have a multiple. `None` if the shards cannot be joined.
fn unit(shard: &Fp8Tensor) -> Option<usize> {
    let rowwise = shard.rowwise().map(|_| match shard.blocks() {
        Some(Blocks::B128x128) => 128,
        Some(Blocks::B16x16) => 16,
        _ => 1,
    });
    let columnwise = shard.columnwise().map(|_| match shard.columnwise_blocks() {
        None => Some(1),
        Some(Blocks::B1x128 | Blocks::B128x128) => Some(128),
        Some(Blocks::Mx32) => Some(32),
        Some(Blocks::B1x16 | Blocks::B16x16) => Some(16),
        Some(_) => None,
    });
    Some(rowwise.unwrap_or(1).max(columnwise.unwrap_or(Some(1))?))
}

/// Names the gather of the factors.
fn factors_name(what: &str, blocks: Option<Blocks>) -> String {
    format!("{what}: {}", if blocks.is_some() { "scales" } else { "the scale" })
}

/// The codes and factors of a copy.
struct Parts<'a> {
    codes: &'a Tensor,
    factors: &'a Tensor,
    blocks: Option<Blocks>,
    /// The factors of the tensor in NVFP4.
    tensor_scale: Option<&'a Tensor>,
}

impl<'a> Parts<'a> {
    /// The columnwise copy, if there is one.
    fn of_columns(shard: &'a Fp8Tensor) -> Option<Self> {
        Some(Self {
            codes: shard.columnwise()?,
            factors: shard.columnwise_scale_inv()?,
            blocks: shard.columnwise_blocks(),
            tensor_scale: shard.columnwise_tensor_scale(),
        })
    }

    /// Gathers codes and factors along dimension 0. A single factor is compared.
    fn gather(
        &self,
        group: &dyn Gatherer,
        [name, factors_name]: [&str; 2],
        call: &str,
    ) -> Result<[Tensor; 2]> {
        let Self { codes, factors, blocks, tensor_scale } = *self;
        if blocks.is_none() {
            let factor = Factor { name: factors_name, call, value: factors };
            return Ok([group.gather_codes(name, codes, &factor)?, factors.clone()]);
        }
        let codes = match tensor_scale {
            Some(scale) => {
                let decode = ops::rows(scale, 1..2)?;
                let factor = Factor { name: &format!("{factors_name}, of the tensor"), call, value: &decode };
                group.gather_codes(name, codes, &factor)?
            }
            None => group.all_gather(name, codes)?,
        };
        Ok([codes, group.all_gather(factors_name, factors)?])
    }

    /// Like [`gather`](Self::gather), along the second dimension of codes `[cols, n]`.
    fn gather_turned(&self, group: &dyn Gatherer, names: [&str; 2], call: &str) -> Result<[Tensor; 2]> {
        let turn = |factors: &Tensor| match self.blocks {
            Some(_) => ops::transpose(factors),
            None => Ok(factors.clone()),
        };
        let Parts { codes, factors, blocks, tensor_scale } = *self;
        let turned = Parts { codes: &ops::transpose(codes)?, factors: &turn(factors)?, blocks, tensor_scale };
        let [codes, factors] = turned.gather(group, names, call)?;
        Ok([ops::transpose(&codes)?, turn(&factors)?])
    }
}
