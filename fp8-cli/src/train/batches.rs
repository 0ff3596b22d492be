//! Batches: windows of the text. A batch depends on the seed and the step alone, so a resumed training sees the same
//! batches as one that was never stopped.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::train::text::Corpus;

/// `rows` windows of `len` bytes, row by row, and as targets the byte after each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) rows: usize,
    pub(crate) len: usize,
    pub(crate) ids: Vec<i32>,
    pub(crate) targets: Vec<i32>,
}

impl Batch {
    fn new<'a>(windows: impl IntoIterator<Item = &'a [u8]>, len: usize) -> Self {
        let (mut ids, mut targets, mut rows) = (Vec::new(), Vec::new(), 0);
        for window in windows {
            ids.extend(window[..len].iter().map(|&byte| i32::from(byte)));
            targets.extend(window[1..=len].iter().map(|&byte| i32::from(byte)));
            rows += 1;
        }
        Self { rows, len, ids, targets }
    }

    /// Returns some of the rows.
    pub(crate) fn rows_of(&self, rows: Range<usize>) -> Self {
        let places = rows.start * self.len..rows.end * self.len;
        let (ids, targets) = (self.ids[places.clone()].to_vec(), self.targets[places].to_vec());
        Self { rows: rows.len(), len: self.len, ids, targets }
    }
}

/// Returns the random stream `stream` of `seed`: 0 draws the initial weights, `step` (from 1) the batch of that step,
/// and `u64::MAX` the sample.
pub(crate) fn stream(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

/// Returns the training batch of `step` (counted from 1): `rows` windows from random places.
pub(crate) fn training(corpus: &Corpus, seed: u64, step: usize, rows: usize, len: usize) -> Batch {
    let text = corpus.train();
    let places = (text.len() - len) as u64; // a window has len + 1 bytes
    let mut rng = stream(seed, step as u64);
    let starts: Vec<usize> = (0..rows).map(|_| rng.random_range(0..places) as usize).collect();
    Batch::new(starts.iter().map(|&start| &text[start..=start + len]), len)
}

/// Returns at most `most` windows of `len` bytes, spread evenly over the held-out text, in batches of at most `rows`.
/// Windows do not overlap. A text shorter than a window is one shorter window.
pub(crate) fn held_out(corpus: &Corpus, rows: usize, len: usize, most: usize) -> Vec<Batch> {
    let text = corpus.held_out();
    let len = len.min(text.len() - 1);
    let all = (text.len() - 1) / len;
    let count = all.min(most);
    let starts: Vec<usize> = (0..count).map(|index| index * all / count * len).collect();
    let windows = |starts: &[usize]| Batch::new(starts.iter().map(|&start| &text[start..=start + len]), len);
    starts.chunks(rows).map(windows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(len: usize, seq: usize) -> Corpus {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, (0..len).map(|index| (index % 251) as u8).collect::<Vec<u8>>()).unwrap();
        Corpus::load(Some(&path), seq).unwrap()
    }

    #[test]
    fn a_batch_depends_on_seed_and_step_alone() {
        let corpus = corpus(5000, 32);
        let batch = training(&corpus, 7, 3, 4, 32);
        assert_eq!((batch.rows, batch.len, batch.ids.len()), (4, 32, 128));
        assert_eq!(batch, training(&corpus, 7, 3, 4, 32));
        assert_ne!(batch, training(&corpus, 7, 4, 4, 32));
        assert_ne!(batch, training(&corpus, 8, 3, 4, 32));
        for row in 0..4 {
            let (ids, targets) = (&batch.ids[row * 32..][..32], &batch.targets[row * 32..][..32]);
            assert_eq!(ids[1..], targets[..31]);
        }
    }

    #[test]
    fn the_only_window_of_a_short_text_is_found() {
        let corpus = corpus(36, 31); // 32 bytes to train on
        let batch = training(&corpus, 1, 1, 3, 31);
        assert_eq!(batch.ids[..31], batch.ids[31..62]);
    }

    #[test]
    fn held_out_windows_are_taken_once() {
        let corpus = corpus(2000, 16); // 200 bytes held out: 12 windows
        let batches = held_out(&corpus, 5, 16, 256);
        let rows: Vec<usize> = batches.iter().map(|batch| batch.rows).collect();
        assert_eq!(rows, [5, 5, 2]);
        let ids: Vec<i32> = batches.iter().flat_map(|batch| batch.ids.iter().copied()).collect();
        let bytes: Vec<i32> = corpus.held_out()[..192].iter().map(|&byte| i32::from(byte)).collect();
        assert_eq!(ids, bytes);
    }

    #[test]
    fn a_short_held_out_text_is_one_window() {
        let corpus = corpus(100, 64); // 10 bytes held out
        let batches = held_out(&corpus, 4, 64, 256);
        assert_eq!(batches.len(), 1);
        assert_eq!((batches[0].len, batches[0].rows), (9, 1));
    }

    #[test]
    fn long_held_out_texts_are_sampled_evenly() {
        let corpus = corpus(200_000, 16); // 1249 windows
        let batches = held_out(&corpus, 8, 16, 256);
        assert_eq!(batches.iter().map(|batch| batch.rows).sum::<usize>(), 256);
        assert!(batches.iter().all(|batch| batch.rows == 8));
    }
}
