//! The positions of a batch that are real, and the sequences that they form.

use crate::backend::Backend;
use crate::{DType, Device, Error, Result, Shape, Tensor, host};

/// The sequences that the queries and keys of [`attention`](crate::ops::attention()) hold. A query attends only to the keys of
/// its own sequence.
///
/// ```
/// use fp8_kernels::ops::{self, ScoreOptions, Packing, Sequences};
/// use fp8_kernels::{Device, Tensor};
///
/// // Two sequences, of one and of two positions: packed one behind the other, and as two rows with padding.
/// let options = ScoreOptions { softmax_scale: Some(0.0), ..Default::default() };
/// let packed = Sequences::Packed(Packing::new(&[1, 2], &Device::cpu())?);
/// let x = Tensor::from_vec(vec![5.0f32, 1.0, 3.0], [1, 3, 1, 1], &Device::cpu())?;
/// let (o, _) = ops::attention(&x, &x, &x, &packed, options)?;
/// assert_eq!(o.to_vec::<f32>()?, [5.0, 1.0, 2.0]);
///
/// let lengths = Tensor::from_vec(vec![1, 2], [2], &Device::cpu())?;
/// let x = Tensor::from_vec(vec![5.0f32, 9.0, 1.0, 3.0], [2, 2, 1, 1], &Device::cpu())?;
/// let (o, _) = ops::attention(&x, &x, &x, &Sequences::padded(&lengths), options)?;
/// assert_eq!(o.to_vec::<f32>()?, [5.0, 5.0, 1.0, 2.0]); // the second row is padding, and sees what is real
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub enum Sequences {
    /// Each batch entry is one sequence without padding.
    #[default]
    Full,
    /// Each batch entry is one sequence, whose first positions are real and whose others are padding.
    Padded {
        /// The number of real queries in each batch entry, i32 `[batch]`. The others give 0 and have no gradient. `None`: all.
        queries: Option<Tensor>,
        /// The number of real keys in each batch entry, i32 `[batch]`. No query attends to the others. `None`: all.
        keys: Option<Tensor>,
    },
    /// One batch entry holds several sequences, one behind the other.
    Packed(Packing),
}

impl Sequences {
    /// Returns sequences of which batch entry b has `key_lengths[b]` real keys. All queries are computed, those of padding too,
    /// whose results mean nothing. `key_lengths` is i32 `[batch]`.
    pub fn padded(key_lengths: &Tensor) -> Self {
        Self::Padded { queries: None, keys: Some(key_lengths.clone()) }
    }

    /// The lengths of padded sequences: of queries, and of keys.
    pub(crate) fn lengths(&self) -> [Option<&Tensor>; 2] {
        match self {
            Self::Padded { queries, keys } => [queries.as_ref(), keys.as_ref()],
            Self::Full | Self::Packed(_) => [None, None],
        }
    }

    pub(crate) fn packing(&self) -> Option<&Packing> {
        match self {
            Self::Packed(packing) => Some(packing),
            Self::Full | Self::Padded { .. } => None,
        }
    }

    /// Checks everything but the lengths' values.
    pub(crate) fn check(
        &self,
        op: &'static str,
        device: &Device,
        [batch, queries, keys]: [usize; 3],
    ) -> Result<()> {
        let [query_lengths, key_lengths] = self.lengths();
        let all = [
            ("query_lengths", "query_lengths and the batch", query_lengths),
            ("key_lengths", "key_lengths and the batch", key_lengths),
        ];
        for (name, what, lengths) in all {
            let Some(lengths) = lengths else { continue };
            lengths.expect_dtype(op, name, DType::I32)?;
            device.expect_same(op, lengths.device())?;
            if **lengths.shape() != [batch] {
                let (lhs, rhs) = (*lengths.shape(), Shape::from([batch]));
                return Err(Error::Shapes { op, what, lhs, rhs, remedy: "give one length per batch entry" });
            }
        }
        let Some(packing) = self.packing() else { return Ok(()) };
        device.expect_same(op, packing.positions.device())?;
        let [packed_queries, packed_keys] = packing.positions_of;
        let (lhs, rhs) = (Shape::from([batch, queries, keys]), Shape::from([1, packed_queries, packed_keys]));
        if lhs != rhs {
            let what = "[batch, queries, keys] and the packing's";
            let remedy = "packed sequences are one batch entry, with as many positions as the packing";
            return Err(Error::Shapes { op, what, lhs, rhs, remedy });
        }
        Ok(())
    }
}

/// Sequences one behind the other, without padding between them: Transformer Engine's `thd` layout, whose `cu_seqlens` are the
/// sums of the lengths before each sequence.
///
/// Queries and keys of a sequence may differ in number, as in cross attention. Positions behind the last sequence are padding:
/// queries there give 0, and keys get no gradient.
///
/// ```
/// use fp8_kernels::Device;
/// use fp8_kernels::ops::{Packing, PackingCapacity};
///
/// let capacity = PackingCapacity { sequences: 4, queries: 8, keys: 8 };
/// let mut packing = Packing::with_capacity(&[3, 2], &[3, 2], capacity, &Device::cpu())?;
/// assert_eq!(packing.positions().to_vec::<i32>()?, [0, 1, 2, 0, 1, 0, 0, 0]);
/// packing.set(&[1, 1, 6], &[1, 1, 6])?; // the next batch, in the same memory: a recorded step reads it in its next replay
/// assert_eq!(packing.positions().to_vec::<i32>()?, [0, 0, 0, 1, 2, 3, 4, 5]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Packing {
    /// The sequences, and the padding behind them as the last one.
    sequences: Vec<Ends>,
    /// The numbers of queries and of keys, with padding.
    positions_of: [usize; 2],
    /// The largest number of sequences.
    most: usize,
    /// The position of each query in its sequence, i32 `[1, queries]`.
    positions: Tensor,
    /// The tiles that the blocks of a GPU's kernels own, of queries and of keys, i32 `[tiles, 5]`: the first row, and the ends
    /// of its sequence. `None` on the CPU.
    tiles: Option<[Tensor; 2]>,
}

/// The ends of a sequence: begin and end of its queries, then of its keys.
pub(crate) type Ends = [usize; 4];

/// Rows that a block of a GPU's kernels owns.
pub(crate) const TILE: usize = 64;

/// The capacity of a [`Packing`]. The example of [`Packing`] uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackingCapacity {
    /// The largest number of sequences.
    pub sequences: usize,
    /// The number of queries, with padding: the extent of the tensor.
    pub queries: usize,
    /// The number of keys, with padding.
    pub keys: usize,
}

impl Packing {
    /// Creates the packing of sequences with these lengths, whose queries and keys are the same positions.
    ///
    /// # Errors
    /// More than 2³¹ − 1 positions.
    pub fn new(lengths: &[usize], device: &Device) -> Result<Self> {
        Self::cross(lengths, lengths, device)
    }

    /// Creates the packing of sequences with these numbers of queries and of keys, as in cross attention.
    ///
    /// # Errors
    /// Different numbers of sequences; more than 2³¹ − 1 positions.
    pub fn cross(queries: &[usize], keys: &[usize], device: &Device) -> Result<Self> {
        let capacity =
            PackingCapacity { sequences: queries.len(), queries: total(queries)?, keys: total(keys)? };
        Self::with_capacity(queries, keys, capacity, device)
    }

    /// Creates a packing with room for others: [`set`](Self::set) replaces its sequences.
    ///
    /// # Errors
    /// Different numbers of sequences; more sequences, queries or keys than there is room for; room for more than 2³¹ − 1
    /// positions.
    pub fn with_capacity(
        queries: &[usize],
        keys: &[usize],
        capacity: PackingCapacity,
        device: &Device,
    ) -> Result<Self> {
        let (most, positions_of) = (capacity.sequences, [capacity.queries, capacity.keys]);
        let sequences = sequences(queries, keys, positions_of, most)?;
        let positions = Tensor::from_vec(positions(&sequences)?, [1, capacity.queries], device)?;
        let table = |side: usize| {
            // Every sequence, and the padding, has at most one tile that is not full.
            let count = (positions_of[side] / TILE).saturating_add(most).saturating_add(1);
            Tensor::from_vec(tiles(&sequences, side, count)?, [count, 5], device)
        };
        let tiles = match device.backend() {
            Backend::Cpu => None,
            Backend::Cuda(_) => Some([table(0)?, table(1)?]),
        };
        Ok(Self { sequences, positions_of, most, positions, tiles })
    }

    /// Replaces the sequences, in the same memory.
    ///
    /// # Errors
    /// Those of [`with_capacity`](Self::with_capacity); a packing that has clones; a step that is being recorded.
    pub fn set(&mut self, queries: &[usize], keys: &[usize]) -> Result<()> {
        let sequences = sequences(queries, keys, self.positions_of, self.most)?;
        // A clone of the packing shares the positions, and so does a clone of them alone: refused before anything is written.
        self.positions.write(&positions(&sequences)?, "the packing's positions")?;
        if let Some(tables) = &mut self.tiles {
            for (side, table) in tables.iter_mut().enumerate() {
                let count = table.shape().matrix()[0];
                table.write(&tiles(&sequences, side, count)?, "the packing's tiles")?;
            }
        }
        self.sequences = sequences;
        Ok(())
    }

    /// Returns the number of queries, with padding.
    pub fn queries(&self) -> usize {
        self.positions_of[0]
    }

    /// Returns the number of keys, with padding.
    pub fn keys(&self) -> usize {
        self.positions_of[1]
    }

    /// Returns the largest number of queries that a sequence has.
    pub fn longest(&self) -> usize {
        let real = self.sequences.split_last().map_or(&[][..], |(_, real)| real);
        real.iter().map(|[begin, end, ..]| end - begin).max().unwrap_or(0)
    }

    /// Returns the position of each query in its own sequence, i32 `[1, queries]`, as rotary embeddings need it. Padding has
    /// position 0.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// The sequences, and the padding behind them.
    pub(crate) fn sequences(&self) -> &[Ends] {
        &self.sequences
    }

    /// The tables of tiles of queries and of keys.
    pub(crate) fn tiles(&self) -> Option<&[Tensor; 2]> {
        self.tiles.as_ref()
    }
}

const OP: &str = "packing";

fn no_room(option: &'static str, room: usize, needed: usize) -> Error {
    let remedy = format!("the sequences need {needed}: give at least as many");
    Error::Option { op: OP, option, value: room.to_string(), remedy }
}

fn total(lengths: &[usize]) -> Result<usize> {
    let sum = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
    sum.filter(|&sum| sum <= MOST).ok_or_else(|| too_many("lengths", "a sum of more".to_owned()))
}

/// The largest number of positions: kernels count in 32 bits.
const MOST: usize = i32::MAX as usize;

fn too_many(option: &'static str, value: String) -> Error {
    Error::Option { op: OP, option, value, remedy: format!("give at most {MOST} positions") }
}

fn sequences(queries: &[usize], keys: &[usize], room: [usize; 2], most: usize) -> Result<Vec<Ends>> {
    if queries.len() != keys.len() {
        let value = format!("{} of queries and {} of keys", queries.len(), keys.len());
        let remedy = "each sequence has a length of queries and one of keys".to_owned();
        return Err(Error::Option { op: OP, option: "lengths", value, remedy });
    }
    if queries.len() > most {
        return Err(no_room("sequences", most, queries.len()));
    }
    for (option, lengths, room) in [("queries", queries, room[0]), ("keys", keys, room[1])] {
        let needed = total(lengths)?;
        if room > MOST {
            return Err(too_many(option, room.to_string()));
        }
        if needed > room {
            return Err(no_room(option, room, needed));
        }
    }
    let mut begin = [0, 0];
    let mut all = host::room(OP, queries.len() + 1)?;
    for (&queries, &keys) in queries.iter().zip(keys) {
        let end = [begin[0] + queries, begin[1] + keys];
        all.push([begin[0], end[0], begin[1], end[1]]);
        begin = end;
    }
    all.push([begin[0], room[0], begin[1], room[1]]);
    Ok(all)
}

/// The position of each query in its sequence; 0 in the padding.
fn positions(sequences: &[Ends]) -> Result<Vec<i32>> {
    let Some((&[begin, end, ..], real)) = sequences.split_last() else { return Ok(Vec::new()) };
    let mut all = host::room(OP, end)?;
    real.iter().for_each(|&[begin, end, ..]| all.extend(0..(end - begin) as i32));
    all.resize(begin.max(end), 0);
    Ok(all)
}

/// The tiles of one side, `count` of them: those that are left own nothing.
fn tiles(sequences: &[Ends], side: usize, count: usize) -> Result<Vec<i32>> {
    let mut all = host::room(OP, count.saturating_mul(5))?;
    let padding = sequences.len() - 1;
    for (index, &[queries, queries_end, keys, keys_end]) in sequences.iter().enumerate() {
        let [begin, end] = [[queries, queries_end], [keys, keys_end]][side];
        // What is padding on this side meets nothing on the other.
        let mut ends = [queries, queries_end, keys, keys_end];
        if index == padding {
            ends[3 - 2 * side] = ends[2 - 2 * side];
        }
        for first in (begin..end).step_by(TILE) {
            all.push(first as i32);
            all.extend(ends.map(|end| end as i32));
        }
    }
    all.resize(count.saturating_mul(5), 0);
    Ok(all)
}
