//! All-gather of tensors that are in FP8 already: codes and factors of the shards, one after the other, are those of the whole.
//!
//! | factors | rowwise codes | columnwise codes |
//! |---|---|---|
//! | one | any shards | made of the rowwise codes |
//! | 128 × 128 | shards of 128 rows | made of the rowwise codes |
//! | 1 × 128, MX | any shards | gathered: shards of 128, of 32 rows |
//! | rows | any shards | never: each factor spans all rows of a shard |
//!
//! "Shards of 128 rows" means that each shard except the last has a multiple of 128. The transposes of shards are not contiguous in
//! the transpose of the whole tensor: columnwise codes that are gathered are transposed before and after.

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
            let remedy = "each shard but the last needs a multiple of 128 rows (MX blocks: 32), so that no block is in two shards";
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
    let columnwise =
        shard.columnwise().map(|_| format!(", columnwise factors for {}", layout(shard.columnwise_blocks())));
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
    let rowwise = [&shard.stored_codes().reshape(*shard.shape())?, shard.scale_inv()];
    let names = [label, &factors_name(what, shard.blocks())];
    let [codes, factors] = gather_layout(group, names, call, rowwise, shard.blocks())?;
    let columnwise = match (shard.columnwise(), shard.columnwise_scale_inv()) {
        (Some(codes), Some(factors)) if !is_made_of_rows(shard.blocks()) => {
            let names = [&*format!("{what}: columnwise codes"), &format!("{what}: columnwise scales")];
            let blocks = shard.columnwise_blocks();
            Some(gather_columns(group, names, call, [codes, factors], blocks)?.into())
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
    let turned = shard.transposed()?;
    let columnwise = [&turned.stored_codes().reshape(turned.matrix())?, turned.scale_inv()];
    let names = [label, &factors_name(what, turned.blocks())];
    let [codes, factors] = gather_columns(group, names, call, columnwise, turned.blocks())?;
    let whole = turned.joined(codes, factors, None)?.transposed()?.for_backward();
    let mut dims = shard.shape().to_vec();
    let Some(rows) = dims.first_mut() else { return Ok(whole) };
    *rows = match shard.shape().len() {
        2 => whole.matrix()[0],
        _ => group.total_rows(&format!("{what}: rows"), *rows, shard.device())?,
    };
    Ok(whole.reshape(Shape::from_slice(&dims).unwrap_or(*shard.shape()))?)
}

/// Returns whether the columnwise codes are the transpose of the rowwise ones.
fn is_made_of_rows(blocks: Option<Blocks>) -> bool {
    matches!(blocks, None | Some(Blocks::B128x128))
}

/// Returns the number of rows of which each shard except the last must have a multiple. `None` if the shards cannot be joined.
fn unit(shard: &Fp8Tensor) -> Option<usize> {
    let rowwise = shard.rowwise().map(|_| if shard.blocks() == Some(Blocks::B128x128) { 128 } else { 1 });
    let columnwise = shard.columnwise().map(|_| match shard.columnwise_blocks() {
        None => Some(1),
        Some(Blocks::B1x128 | Blocks::B128x128) => Some(128),
        Some(Blocks::Mx32) => Some(32),
        Some(_) => None,
    });
    Some(rowwise.unwrap_or(1).max(columnwise.unwrap_or(Some(1))?))
}

/// Names the gather of the factors.
fn factors_name(what: &str, blocks: Option<Blocks>) -> String {
    format!("{what}: {}", if blocks.is_some() { "scales" } else { "the scale" })
}

/// Gathers codes and factors along dimension 0. A single factor is compared.
fn gather_layout(
    group: &dyn Gatherer,
    [name, factors_name]: [&str; 2],
    call: &str,
    [codes, factors]: [&Tensor; 2],
    blocks: Option<Blocks>,
) -> Result<[Tensor; 2]> {
    if blocks.is_some() {
        return Ok([group.all_gather(name, codes)?, group.all_gather(factors_name, factors)?]);
    }
    let factor = Factor { name: factors_name, call, value: factors };
    Ok([group.gather_codes(name, codes, &factor)?, factors.clone()])
}

/// Like [`gather_layout`], along the second dimension of codes `[cols, n]`.
fn gather_columns(
    group: &dyn Gatherer,
    names: [&str; 2],
    call: &str,
    [codes, factors]: [&Tensor; 2],
    blocks: Option<Blocks>,
) -> Result<[Tensor; 2]> {
    let turn = |factors: &Tensor| match blocks {
        Some(_) => ops::transpose(factors),
        None => Ok(factors.clone()),
    };
    let turned = [&ops::transpose(codes)?, &turn(factors)?];
    let [codes, factors] = gather_layout(group, names, call, turned, blocks)?;
    Ok([ops::transpose(&codes)?, turn(&factors)?])
}
