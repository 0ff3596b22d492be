//! Windows of tokens from files.

use crate::failure::Failure;
use fp8_hf::{Config, Dtype, TokenFile, Weights};
use std::path::Path;

const NAME: &str = "input_ids";

/// Reads at most `most` windows of tokens for a model. Reads no more of the file than these.
pub(crate) fn read_ids(path: &Path, config: &Config, most: usize) -> Result<Vec<Vec<i32>>, Failure> {
    let refused = |problem: String| Failure::input(format!("--ids {}: {problem}", path.display()));
    let weights = Weights::open(path)
        .map_err(|error| Failure::of_file("--ids", "expected a safetensors file", error))?;
    let info = weights.info(NAME).ok_or_else(|| {
        refused(format!("there is no `{NAME}`: expected it as [windows, tokens] in I32 or I64"))
    })?;
    let (&[rows, seq], Dtype::I32 | Dtype::I64) = (&info.shape[..], info.dtype) else {
        return Err(refused(format!(
            "`{NAME}` is {:?} {:?}: expected [windows, tokens] in I32 or I64",
            info.dtype, info.shape
        )));
    };
    let longest = config.longest_sequence();
    if seq < 2 || seq > longest {
        return Err(refused(format!(
            "windows of {seq} tokens: expected 2 to {longest}, the longest of the model"
        )));
    }
    let count = rows.min(most);
    if count == 0 {
        return Err(refused(format!("`{NAME}` has shape [0, {seq}]: expected at least one window")));
    }
    let size = info.dtype.bitsize() / 8;
    let too_large = || {
        refused(format!("{count} windows of {seq} tokens do not fit in memory: read fewer with --windows"))
    };
    let mut windows = Vec::new();
    // What the tokens take is asked for at once, so that a file that claims too many is refused before it is read.
    let all = count.checked_mul(seq).ok_or_else(too_large)?;
    Vec::<i32>::new().try_reserve_exact(all).map_err(|_| too_large())?;
    windows.try_reserve_exact(count).map_err(|_| too_large())?;
    let mut bytes = vec![0; seq * size];
    for window in 0..count {
        weights.read(NAME, (window * seq * size) as u64, &mut bytes)?;
        let ids: Vec<i64> = match info.dtype {
            Dtype::I32 => bytes.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect(),
            _ => bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
        };
        let fits = |(position, &id): (usize, &i64)| match i32::try_from(id) {
            Ok(token) if usize::try_from(token).is_ok_and(|token| token < config.vocab_size) => Ok(token),
            _ => Err(refused(format!(
                "token {id} in window {window} at position {position}: expected 0 to {}, the tokens of the vocabulary",
                config.vocab_size.saturating_sub(1)
            ))),
        };
        windows.push(ids.iter().enumerate().map(fits).collect::<Result<_, _>>()?);
    }
    Ok(windows)
}

/// Cuts a file of llm.c or nanoGPT into windows of `seq` tokens, of which it reads at most `most`.
pub(crate) fn read_shard(
    path: &Path,
    config: &Config,
    seq: usize,
    most: usize,
) -> Result<Vec<Vec<i32>>, Failure> {
    let file = TokenFile::open(path)?;
    let wanted = (seq as u64).saturating_mul(most as u64);
    let tokens = file.read(0..file.len().min(wanted), config.vocab_size)?;
    // Nothing follows a token that is alone.
    Ok(tokens.chunks(seq).filter(|window| window.len() > 1).map(<[i32]>::to_vec).collect())
}
