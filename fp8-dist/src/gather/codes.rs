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

use super::shard::AllGather;
use crate::{Error, Result};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{Fp8Tensor, Shape, Tensor, ops};

/// Gathers the shards of a tensor.
pub(crate) fn gather(all_gather: AllGather<'_>, what: &str, shard: &Fp8Tensor) -> Result<Fp8Tensor> {
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
        let (fits, world_size) =
            are_multiples(all_gather, &label, shard.matrix()[0], shard.stored_codes(), unit)?;
        if !fits {
            let remedy = "each shard but the last needs a multiple of 128 rows (MX blocks: 32), so that no block is in two shards";
            return Err(Error::Shape { call: call(), shape: *shard.shape(), world_size, remedy });
        }
    }
    match shard.rowwise() {
        Some(_) => join(all_gather, what, &label, &call(), shard),
        None => join_columns(all_gather, what, &label, &call(), shard),
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
    all_gather: AllGather<'_>,
    what: &str,
    label: &str,
    call: &str,
    shard: &Fp8Tensor,
) -> Result<Fp8Tensor> {
    let codes = all_gather(label, &shard.stored_codes().reshape(*shard.shape())?)?;
    let factors = match shard.blocks() {
        Some(_) => all_gather(&format!("{what}: scales"), shard.scale_inv())?,
        None => one_factor(all_gather, &format!("{what}: the scale"), call, shard.scale_inv())?,
    };
    let columnwise = match (shard.columnwise(), shard.columnwise_scale_inv()) {
        (Some(codes), Some(factors)) if !is_made_of_rows(shard.blocks()) => {
            let codes = gather_columns(all_gather, &format!("{what}: columnwise codes"), codes)?;
            let name = format!("{what}: columnwise scales");
            let factors = match shard.columnwise_blocks() {
                Some(_) => gather_columns(all_gather, &name, factors)?,
                None => one_factor(all_gather, &name, call, factors)?,
            };
            Some((codes, factors))
        }
        _ => None,
    };
    let whole = shard.joined(codes, factors, columnwise)?;
    Ok(if shard.columnwise().is_some() { whole.with_columnwise()? } else { whole })
}

/// Joins shards that have columnwise codes alone.
fn join_columns(
    all_gather: AllGather<'_>,
    what: &str,
    label: &str,
    call: &str,
    shard: &Fp8Tensor,
) -> Result<Fp8Tensor> {
    let turned = shard.transposed()?;
    let codes = gather_columns(all_gather, label, &turned.stored_codes().reshape(turned.matrix())?)?;
    let factors = match turned.blocks() {
        Some(_) => gather_columns(all_gather, &format!("{what}: scales"), turned.scale_inv())?,
        None => one_factor(all_gather, &format!("{what}: the scale"), call, turned.scale_inv())?,
    };
    let whole = turned.joined(codes, factors, None)?.transposed()?.for_backward();
    let mut dims = shard.shape().to_vec();
    let Some(rows) = dims.first_mut() else { return Ok(whole) };
    *rows = match shard.shape().len() {
        2 => whole.matrix()[0],
        _ => {
            let mine = Tensor::from_vec(rows.to_le_bytes().to_vec(), [1, 8], shard.device())?;
            let all = all_gather(&format!("{what}: rows"), &mine)?.to_vec::<u8>()?;
            all.as_chunks::<8>().0.iter().map(|rows| usize::from_le_bytes(*rows)).sum()
        }
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

/// Returns whether each shard except the last has a multiple of `unit` rows, and the number of ranks. All ranks get the same answer.
pub(crate) fn are_multiples(
    all_gather: AllGather<'_>,
    label: &str,
    rows: usize,
    on: &Tensor,
    unit: usize,
) -> Result<(bool, usize)> {
    let mine = Tensor::from_vec(vec![i32::from(rows.is_multiple_of(unit))], [1], on.device())?;
    let all = all_gather(label, &mine)?.to_vec::<i32>()?;
    let fits = all.split_last().is_none_or(|(_, others)| others.iter().all(|&is_multiple| is_multiple == 1));
    Ok((fits, all.len()))
}

/// Returns the factor that all ranks have.
fn one_factor(all_gather: AllGather<'_>, name: &str, call: &str, own: &Tensor) -> Result<Tensor> {
    let all = all_gather(name, &own.reshape([1])?)?.to_vec::<f32>()?;
    let mut others = (1..).zip(all.iter().skip(1));
    match (
        all.first(),
        others.find(|(_, factor)| all.first().map(|first| first.to_bits()) != Some(factor.to_bits())),
    ) {
        (Some(first), Some((rank, factor))) => Err(Error::Scales {
            call: call.to_owned(),
            rank,
            value: Some(factor.recip()),
            other: 0,
            other_value: Some(first.recip()),
        }),
        _ => Ok(own.clone()),
    }
}

/// Gathers `[cols, n]` of each rank along the second dimension.
fn gather_columns(all_gather: AllGather<'_>, what: &str, part: &Tensor) -> Result<Tensor> {
    Ok(ops::transpose(&all_gather(what, &ops::transpose(part)?)?)?)
}
