//! Queries and keys that belong together, the keys that a query sees, and the probabilities that are dropped.

use super::super::dropout::Mask;
use crate::host;
use crate::ops::{Diagonal, Ends, Problem, Sequences};
use crate::{Error, Result, Tensor};
use std::ops::Range;

/// A sequence: its queries and keys in a batch entry.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) batch: usize,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Span {
    pub(super) fn visible(&self, p: &Problem<'_>) -> Visible {
        let (queries, keys) = (self.queries.len(), self.keys.len());
        let [left, right] = p.window;
        let offset = match p.diagonal {
            Diagonal::TopLeft => [0, 0],
            Diagonal::BottomRight => [keys, queries],
        };
        Visible { keys, left, right, offset }
    }
}

/// The keys of its sequence that a query sees.
#[derive(Clone, Copy)]
pub(super) struct Visible {
    keys: usize,
    left: Option<usize>,
    right: Option<usize>,
    /// Query i stands at the key i + the first of these − the second.
    offset: [usize; 2],
}

impl Visible {
    /// From the first key that `query` sees to one past the last. Both grow with `query`.
    #[inline(always)]
    pub(super) fn of(&self, query: usize) -> [usize; 2] {
        let [ahead, behind] = self.offset;
        let own = query + ahead;
        let begin = self.left.map_or(0, |left| own.saturating_sub(left.saturating_add(behind)));
        let end = self
            .right
            .map_or(self.keys, |right| own.saturating_add(right).saturating_add(1).saturating_sub(behind));
        [begin.min(self.keys), end.min(self.keys)]
    }
}

/// The dropped probabilities of a sequence and head, from the first of its queries and keys on.
#[derive(Clone, Copy)]
pub(super) struct Dropped {
    pub(super) mask: Mask,
    /// The element of the first query and key.
    start: u64,
    /// The keys of a row of probabilities.
    keys: usize,
}

impl Dropped {
    pub(super) fn new(p: &Problem<'_>) -> Result<Option<Self>> {
        p.dropout.map(|dropout| Ok(Self { mask: Mask::new(dropout)?, start: 0, keys: p.keys })).transpose()
    }

    pub(super) fn of(self, span: &Span, head: usize, p: &Problem<'_>) -> Self {
        let [batch, head, queries, keys] = [span.batch, head, p.queries, p.keys].map(|number| number as u64);
        let [first, total] = [p.mask_heads.first, p.mask_heads.total].map(|heads| heads as u64);
        let row = (batch * total + first + head) * queries + span.queries.start as u64;
        Self { start: row.wrapping_mul(keys).wrapping_add(span.keys.start as u64), ..self }
    }

    /// Calls `f` with the position of each of these keys, from 0 on, and whether it is kept.
    #[inline(always)]
    pub(super) fn each(&self, query: usize, keys: Range<usize>, f: impl FnMut(usize, bool)) {
        let row = self.start.wrapping_add(query as u64 * self.keys as u64);
        self.mask.each(row + keys.start as u64..row + keys.end as u64, f);
    }
}

/// The sequences of a batch, in the order of their queries.
pub(super) fn spans(op: &'static str, sequences: &Sequences, p: &Problem<'_>) -> Result<Vec<Span>> {
    if let Some(packing) = sequences.packing() {
        // The last one is the padding, which sees nothing and is seen by nothing.
        let real = packing.sequences().split_last().map_or(&[][..], |(_, real)| real);
        let span = |&[begin, end, keys, keys_end]: &Ends| Span {
            batch: 0,
            queries: begin..end,
            keys: keys..keys_end,
        };
        return host::collect(op, real.iter().map(span));
    }
    let [queries, keys] = sequences.lengths();
    let queries = Lengths::new(op, "query length", queries, p.queries)?;
    let keys = Lengths::new(op, "key length", keys, p.keys)?;
    // Nothing is seen, by however many batch entries.
    let batch = if [p.queries, p.keys, p.heads].contains(&0) { 0 } else { p.batch };
    let span = |batch| Span { batch, queries: 0..queries.of(batch), keys: 0..keys.of(batch) };
    host::collect(op, (0..batch).map(span))
}

/// The sequences of one batch entry.
pub(super) fn of_batch(spans: &[Span], batch: usize) -> &[Span] {
    let [first, end] = [batch, batch + 1].map(|batch| spans.partition_point(|span| span.batch < batch));
    &spans[first..end]
}

/// Each sequence with each head, in the order of their rows in `[batch, heads, queries]`.
pub(super) fn in_order<'a>(spans: &'a [Span], p: &Problem<'_>) -> impl Iterator<Item = (&'a Span, usize)> {
    let entries = spans.chunk_by(|a, b| a.batch == b.batch);
    let heads = p.heads;
    entries.flat_map(move |spans| (0..heads).flat_map(move |head| spans.iter().map(move |span| (span, head))))
}

/// The number of queries or keys that are not padding, per batch entry.
#[derive(Clone, Copy)]
struct Lengths<'a> {
    /// One for each batch entry; without them all positions count.
    given: Option<&'a [i32]>,
    most: usize,
}

impl<'a> Lengths<'a> {
    fn new(op: &'static str, what: &'static str, lengths: Option<&'a Tensor>, most: usize) -> Result<Self> {
        let given = lengths.map(Tensor::as_slice::<i32>).transpose()?;
        let is_valid = |length: i32| usize::try_from(length).is_ok_and(|length| length <= most);
        let wrong = given.unwrap_or_default().iter().enumerate().find(|&(_, &length)| !is_valid(length));
        match wrong {
            None => Ok(Self { given, most }),
            Some((position, &length)) => {
                let (value, limit) = (length.into(), most + 1);
                Err(Error::Index { op, what, value, position, limit })
            }
        }
    }

    fn of(self, batch: usize) -> usize {
        let given = self.given.and_then(|given| given.get(batch));
        given.map_or(self.most, |&length| usize::try_from(length).unwrap_or(0))
    }
}
