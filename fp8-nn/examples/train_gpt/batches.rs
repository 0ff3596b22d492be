//! Batches: windows of the text, as functions of (seed, step), so that a resumed training sees what it would have.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::text::Corpus;

/// At most this many windows of the held-out text are evaluated, spread evenly over it.
const MAX_HELD_OUT_WINDOWS: usize = 256;

/// `rows` windows of `len` bytes, row by row, and for each byte the one that follows it.
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
}

/// The random stream `stream` of `seed`: 0 is for the initial weights, `step` (from 1) for a step's batch,
/// `u64::MAX` for the sample.
pub(crate) fn stream(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

/// The training batch of `step`, from 1: `rows` windows at random places.
pub(crate) fn training(corpus: &Corpus, seed: u64, step: usize, rows: usize, len: usize) -> Batch {
    let text = corpus.train();
    let places = (text.len() - len) as u64; // a window has len + 1 bytes
    let mut rng = stream(seed, step as u64);
    let starts: Vec<usize> = (0..rows).map(|_| rng.random_range(0..places) as usize).collect();
    Batch::new(starts.iter().map(|&start| &text[start..=start + len]), len)
}

/// The held-out text as batches of at most `rows` windows of `len` bytes, none of them twice; of a text shorter than
/// a window, all as one shorter window.
pub(crate) fn held_out(corpus: &Corpus, rows: usize, len: usize) -> Vec<Batch> {
    let text = corpus.held_out();
    let len = len.min(text.len() - 1);
    let all = (text.len() - 1) / len;
    let count = all.min(MAX_HELD_OUT_WINDOWS);
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
        let batches = held_out(&corpus, 5, 16);
        let rows: Vec<usize> = batches.iter().map(|batch| batch.rows).collect();
        assert_eq!(rows, [5, 5, 2]);
        let ids: Vec<i32> = batches.iter().flat_map(|batch| batch.ids.iter().copied()).collect();
        let bytes: Vec<i32> = corpus.held_out()[..192].iter().map(|&byte| i32::from(byte)).collect();
        assert_eq!(ids, bytes);
    }

    #[test]
    fn a_short_held_out_text_is_one_window() {
        let corpus = corpus(100, 64); // 10 bytes held out
        let batches = held_out(&corpus, 4, 64);
        assert_eq!(batches.len(), 1);
        assert_eq!((batches[0].len, batches[0].rows), (9, 1));
    }

    #[test]
    fn long_held_out_texts_are_sampled_evenly() {
        let corpus = corpus(200_000, 16); // 1249 windows
        let batches = held_out(&corpus, 8, 16);
        assert_eq!(batches.iter().map(|batch| batch.rows).sum::<usize>(), MAX_HELD_OUT_WINDOWS);
        assert!(batches.iter().all(|batch| batch.rows == 8));
    }
}
