//! The origin of sequences.

use crate::Result;
use crate::data::{Sequence, Sequences};
use sha2::{Digest as _, Sha256};

/// Sequences that a run reads by their numbers: a part of a [`Dataset`](crate::data::Dataset), or a vector.
///
/// ```
/// use fp8_hf::SequenceSource;
/// use fp8_hf::data::Sequence;
/// let data = vec![Sequence { ids: vec![1, 2], targets: vec![2, 3], lengths: vec![2] }];
/// assert_eq!((SequenceSource::len(&data), SequenceSource::read(&data, 0)?), (1, data[0].clone()));
/// # Ok::<(), fp8_hf::Error>(())
/// ```
pub trait SequenceSource: Send + Sync {
    /// Returns the number of sequences.
    fn len(&self) -> usize;

    /// Returns true if there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the sequence with a number below [`len`](Self::len).
    ///
    /// # Errors
    /// A file that cannot be read.
    fn read(&self, index: usize) -> Result<Sequence>;

    /// Returns a text that differs for other sequences, by which a resumed run knows its data.
    fn digest(&self) -> String;
}

impl SequenceSource for Sequences {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn read(&self, index: usize) -> Result<Sequence> {
        Self::read(self, index)
    }

    fn digest(&self) -> String {
        Self::digest(self).to_owned()
    }
}

impl SequenceSource for Vec<Sequence> {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn read(&self, index: usize) -> Result<Sequence> {
        self.get(index).cloned().ok_or_else(|| crate::Error::Option {
            part: "SequenceSource".to_owned(),
            option: "index",
            value: index.to_string(),
            remedy: format!("expected less than {}", Self::len(self)),
        })
    }

    fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for sequence in self {
            hash.update(format!("{:?}", (&sequence.ids, &sequence.targets, &sequence.lengths)));
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
