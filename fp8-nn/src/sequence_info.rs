//! Describes the sequences in the input of an attention.

use crate::arguments::Argument;
use crate::{Error, Result};
use fp8_kernels::ops::{Packing, Positions, Sequences};
use fp8_kernels::{Device, Tensor};

/// Describes the sequences in the input of layers with attention: which positions are real and belong together, and the
/// position of each token in its sequence.
///
/// [`Module::forward_with_info`](crate::Module::forward_with_info) takes it. By default, each batch entry is one sequence without padding.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
///
/// let device = Device::cpu();
/// let options = TransformerLayerOptions {
///     hidden_size: 32,
///     ffn_hidden_size: 64,
///     attention: AttentionOptions { num_attention_heads: 4, rope: true, ..Default::default() },
///     ..Default::default()
/// };
/// let block = TransformerLayer::new("block", options, &device, &mut StdRng::seed_from_u64(1))?;
/// let mut scaling = Scaling::new(&block, &device)?;
/// let mut run = |values: &[f32], info: &SequenceInfo| -> Result<Vec<f32>> {
///     let x = Tensor::from_vec(values.to_vec(), [1, values.len() / 32, 32], &device)?;
///     let mut cx = scaling.scope(&DelayedScaling::default().into(), &AutocastOptions { enabled: false, ..Default::default() })?;
///     let (y, _) = block.forward_with_info(&mut cx, &x, info)?;
///     cx.commit()?;
///     Ok(y.to_f32_vec()?)
/// };
/// // Sequences of three and of two positions, one behind the other: no padding is computed.
/// let values: Vec<f32> = (0..5 * 32).map(|i| (i as f32).sin()).collect();
/// let packed = run(&values, &SequenceInfo::packed(ops::Packing::new(&[3, 2], &device)?))?;
/// assert_eq!(packed[3 * 32..], run(&values[3 * 32..], &SequenceInfo::default())?);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct SequenceInfo {
    /// The positions of the batch that are real, and which of them belong together. Default: all are real, and each batch
    /// entry is one sequence.
    pub sequences: Sequences,
    /// The position of each token for rotary embeddings, i32 `[batch, seq]`. Default: `None`, which counts from 0 in each
    /// sequence.
    pub positions: Option<Tensor>,
    /// `[batch, seq]` of all tokens, where ranks have parts of them (sequence parallelism) and the input is `[tokens / ranks, …]`.
    /// Layers with attention require it there, and need it nowhere else; [`Gpt`](crate::Gpt) sets it. Default: `None`.
    pub batch_and_length: Option<[usize; 2]>,
}

impl SequenceInfo {
    /// Describes sequences with padding at their ends: `lengths` (i32 `[batch]`) says how many positions of each are real. No
    /// position attends to the others.
    pub fn padded(lengths: &Tensor) -> Self {
        Sequences::padded(lengths).into()
    }

    /// Describes sequences one behind the other in one batch entry.
    pub fn packed(packing: Packing) -> Self {
        Sequences::Packed(packing).into()
    }

    /// Whether it is what a layer assumes that is told nothing.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.sequences, Sequences::Full) && self.positions.is_none()
    }

    fn packing(&self) -> Option<&Packing> {
        match &self.sequences {
            Sequences::Packed(packing) => Some(packing),
            Sequences::Full | Sequences::Padded { .. } => None,
        }
    }

    /// The positions that queries and keys are rotated by.
    pub(crate) fn rotary(&self) -> Positions<'_> {
        let given = self.positions.as_ref().or_else(|| self.packing().map(Packing::positions));
        given.map_or(Positions::From(0), Positions::Of)
    }

    /// The number of positions that the longest sequence has among `seq` of a batch entry, as far as it is known here.
    pub(crate) fn longest(&self, seq: usize) -> usize {
        match (&self.positions, self.packing()) {
            (Some(_), _) => 0,
            (None, Some(packing)) => packing.longest(),
            (None, None) => seq,
        }
    }

    /// Checks it against the input of self-attention, `[batch, seq, …]`, before anything is computed.
    pub(crate) fn check(&self, layer: &str, [batch, seq]: [usize; 2], device: &Device) -> Result<()> {
        check_sequences(&self.sequences, layer, [batch, seq, seq], device)?;
        if let Some(positions) = &self.positions {
            let fits = **positions.shape() == [batch, seq];
            let positions = Argument::new(layer, "positions", positions).integer()?.on(device)?;
            positions.shape(fits, || format!("[{batch}, {seq}], one per token"))?;
        }
        Ok(())
    }
}

/// Checks sequences against the `[batch, queries, keys]` of an attention, before anything is computed.
pub(crate) fn check_sequences(
    sequences: &Sequences,
    layer: &str,
    [batch, queries, keys]: [usize; 3],
    device: &Device,
) -> Result<()> {
    let integers = |name, tensor| Argument::new(layer, name, tensor).integer()?.on(device);
    match sequences {
        Sequences::Full => Ok(()),
        Sequences::Padded { queries, keys } => {
            for (name, lengths) in [("query_lengths", queries), ("key_lengths", keys)] {
                let Some(lengths) = lengths else { continue };
                let fits = **lengths.shape() == [batch];
                integers(name, lengths)?.shape(fits, || format!("[{batch}], one per sequence"))?;
            }
            Ok(())
        }
        Sequences::Packed(packing) => {
            integers("the packing", packing.positions())?;
            if (1, packing.queries(), packing.keys()) == (batch, queries, keys) {
                return Ok(());
            }
            let value = format!("{} queries and {} keys", packing.queries(), packing.keys());
            let remedy = if queries == keys {
                format!(
                    "expected as many of both as the input, [{batch}, {queries}, …], has positions, in one batch entry"
                )
            } else {
                format!(
                    "expected {queries} queries and {keys} keys, as the inputs have positions, in one batch entry"
                )
            };
            Err(Error::Option { part: layer.to_owned(), option: "packing", value, remedy })
        }
    }
}

impl From<Sequences> for SequenceInfo {
    fn from(sequences: Sequences) -> Self {
        Self { sequences, ..Self::default() }
    }
}
