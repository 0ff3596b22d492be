//! Sequences as the tensors of one forward pass.

use crate::data::{IGNORED, Sequence};
use crate::{Error, Result};
use fp8_kernels::ops::{Packing, PackingCapacity, Sequences};
use fp8_kernels::{Device, Tensor};
use fp8_nn::SequenceInfo;

/// Positions are filled up to a multiple of this, which GEMMs of GPUs ask for.
const MULTIPLE: usize = 16;
/// Pieces for which a recorded step has room: one in so many tokens, and at least so many.
const TOKENS_PER_PIECE: usize = 16;
const PIECES: usize = 64;

/// The tokens of some sequences, one behind the other, without the padding between them.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    ids: Vec<i32>,
    targets: Vec<i32>,
    lengths: Vec<usize>,
}

/// The tensors of a micro-batch, `[1, tokens]`.
#[derive(Debug)]
pub(super) struct MicroBatch {
    pub(super) ids: Tensor,
    pub(super) targets: Tensor,
    pub(super) info: SequenceInfo,
}

impl Tokens {
    /// Adds a sequence of at most `seq` tokens from a vocabulary.
    pub(super) fn push(&mut self, sequence: &Sequence, seq: usize, vocab_size: usize) -> Result<()> {
        sequence.check(seq, vocab_size)?;
        let real = sequence.lengths.iter().sum::<usize>();
        self.ids.extend(&sequence.ids[..real]);
        self.targets.extend(&sequence.targets[..real]);
        self.lengths.extend(sequence.lengths.iter().filter(|&&length| length > 0));
        Ok(())
    }

    pub(super) fn learned(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether a recorded step has room for the pieces.
    pub(super) fn fits(&self, room: usize) -> bool {
        self.lengths.len() <= pieces(room)
    }

    /// Adds padding up to `room` tokens, or to a multiple that GEMMs take, and up to one of `parts`.
    fn pad(&mut self, room: Option<usize>, parts: usize) {
        let len =
            room.unwrap_or_else(|| self.ids.len().max(1).next_multiple_of(MULTIPLE)).max(self.ids.len());
        let step = if room.is_none() { MULTIPLE } else { 1 };
        let len = (len..).step_by(step).find(|len| len.is_multiple_of(parts.max(1))).unwrap_or(len);
        self.ids.resize(len, 0);
        self.targets.resize(len, IGNORED);
    }
}

fn pieces(room: usize) -> usize {
    (room / TOKENS_PER_PIECE).max(PIECES).min(room)
}

impl MicroBatch {
    /// Makes tensors of `room` tokens, or of as many as there are, in `parts` equal parts.
    pub(super) fn new(
        mut tokens: Tokens,
        room: Option<usize>,
        parts: usize,
        device: &Device,
    ) -> Result<Self> {
        tokens.pad(room, parts);
        let shape = [1, tokens.ids.len()];
        let most = room.map_or(tokens.lengths.len(), |room| pieces(room).max(tokens.lengths.len()));
        let capacity = PackingCapacity { sequences: most, queries: shape[1], keys: shape[1] };
        let packing = Packing::with_capacity(&tokens.lengths, &tokens.lengths, capacity, device)?;
        Ok(Self {
            ids: Tensor::from_vec(tokens.ids, shape, device)?,
            targets: Tensor::from_vec(tokens.targets, shape, device)?,
            info: SequenceInfo::packed(packing),
        })
    }

    /// Replaces the tokens, in the same memory.
    pub(super) fn set(&mut self, mut tokens: Tokens) -> Result<()> {
        tokens.pad(Some(self.ids.numel()), 1);
        self.ids.write(&tokens.ids, "ids")?;
        self.targets.write(&tokens.targets, "targets")?;
        if let Sequences::Packed(packing) = &mut self.info.sequences {
            packing.set(&tokens.lengths, &tokens.lengths)?;
        }
        Ok(())
    }
}

impl Sequence {
    fn check(&self, seq: usize, vocab_size: usize) -> Result<()> {
        let refused = |option, value: String, remedy: String| {
            Err(Error::Option { part: "Sequence".to_owned(), option, value, remedy })
        };
        let (ids, targets) = (self.ids.len(), self.targets.len());
        if ids > seq {
            return refused(
                "ids",
                format!("{ids} tokens"),
                format!("expected at most {seq}, as the trainer's `seq` says"),
            );
        }
        if ids != targets {
            return refused(
                "targets",
                format!("{targets} tokens"),
                format!("expected {ids}, one for each of `ids`"),
            );
        }
        let real = self.lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
        let Some(real) = real.filter(|&real| real <= ids) else {
            return refused(
                "lengths",
                format!("{:?}", self.lengths),
                format!("expected a sum of at most {ids}, the tokens"),
            );
        };
        let is_known = |token: i32| usize::try_from(token).is_ok_and(|token| token < vocab_size);
        if let Some(id) = self.ids.iter().find(|&&id| !is_known(id)) {
            return refused(
                "ids",
                id.to_string(),
                format!("expected 0 to {}, the vocabulary", vocab_size.saturating_sub(1)),
            );
        }
        if let Some(target) = self.targets.iter().find(|&&target| target != IGNORED && !is_known(target)) {
            let remedy = format!("expected 0 to {}, or {IGNORED}", vocab_size.saturating_sub(1));
            return refused("targets", target.to_string(), remedy);
        }
        if self.targets[real..].iter().any(|&target| target != IGNORED) {
            let remedy = "padding learns nothing: expected lengths that hold all targets".to_owned();
            return refused("lengths", format!("{:?}", self.lengths), remedy);
        }
        Ok(())
    }
}
