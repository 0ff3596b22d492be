//! The work that is measured.

use crate::blocks;
use crate::work::{Group, decoding, encoding, reading};
use fp8_format::slice::Path;

/// All that is measured, with each of these numbers of threads; tasks of the same bytes beside each other.
pub(crate) fn groups(threads: &[usize]) -> Vec<Group> {
    let mut merged: Vec<Group> = Vec::new();
    let single = Path::available().flat_map(|path| {
        let works = encoding(path, 1).into_iter().chain(blocks::quantization(path));
        works.chain(reading(path)).chain(decoding(path)).chain([blocks::nvfp4(path)]).collect::<Vec<_>>()
    });
    let several = threads.iter().filter(|threads| **threads > 1);
    let several = several.flat_map(|threads| encoding(Path::best(), *threads));
    for group in single.chain(several) {
        match merged.iter_mut().find(|same| same.lines == group.lines && same.threads == group.threads) {
            Some(same) => same.tasks.extend(group.tasks),
            None => merged.push(group),
        }
    }
    merged
}
