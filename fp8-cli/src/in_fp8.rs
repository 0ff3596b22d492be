//! Models that are written in FP8 by way of a folder in high precision.

use fp8_hf::{AtomicFolder, Error, Folder, QuantizeOptions, Result, Scheme, expect_new, quantize};
use std::path::Path;

/// Writes the model that `write` writes to the path that it is given to the new folder `out`, in FP8. What was written in between is beside
/// `out`, and is removed, by a later program if this one is killed.
pub(crate) fn write(out: &Path, scheme: Scheme, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    expect_new(out)?;
    let temporary = AtomicFolder::create(out).map_err(|source| Error::Io { path: out.to_owned(), source })?;
    let whole = temporary.path().join("high-precision");
    write(&whole)?;
    let options = QuantizeOptions { scheme, ..Default::default() };
    quantize(&Folder::open(&whole)?, out, &options, &Default::default()).map(drop)
}
