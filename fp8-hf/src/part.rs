//! The rows and columns of a parameter's tensors that a rank has.

use super::parameter_source::ParameterSource;
use fp8_nn::{Parameter, Placement};
use std::ops::Range;

/// The part that a rank reads of the tensors of a parameter, as the files store them.
#[derive(Debug)]
pub(super) enum Part {
    All,
    /// Ranges of the rows of all tensors together, of which one follows the other.
    Rows(Vec<Range<usize>>),
    Columns(Vec<Range<usize>>),
}

impl Part {
    /// Returns the part of this rank.
    pub(super) fn new(parameter: &Parameter, source: &ParameterSource) -> Self {
        match parameter.placement() {
            Placement::Cut(cut) => match (cut.dim() == 0) != source.is_transposed {
                true => Self::Rows(cut.ranges().to_vec()),
                false => Self::Columns(cut.ranges().to_vec()),
            },
            _ => Self::All,
        }
    }

    /// Returns the rows of a tensor of `height` rows, whose first is row `first` of all.
    pub(super) fn rows(&self, first: usize, height: usize) -> Vec<Range<usize>> {
        let Self::Rows(ranges) = self else { return std::iter::once(0..height).collect() };
        let inside = |range: &Range<usize>| {
            let (start, end) = (range.start.max(first), range.end.min(first + height));
            (start < end).then(|| start - first..end - first)
        };
        ranges.iter().filter_map(inside).collect()
    }

    /// Returns the columns of a tensor of `width` columns.
    pub(super) fn columns(&self, width: usize) -> Vec<Range<usize>> {
        match self {
            Self::Columns(ranges) => ranges.clone(),
            _ => std::iter::once(0..width).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_fused_tensors_are_those_of_each() {
        // q, k and v of 8, 4 and 4 rows: the second of two ranks.
        let part = Part::Rows(vec![4..8, 10..12, 14..16]);
        let rows: Vec<_> = [(0, 8), (8, 4), (12, 4)].map(|(first, height)| part.rows(first, height)).into();
        assert_eq!(rows.concat(), [4..8, 2..4, 2..4]);
        assert_eq!(part.columns(5), std::slice::from_ref(&(0..5)));
        assert_eq!(Part::All.rows(3, 2), std::slice::from_ref(&(0..2)));
        // A range may reach over several tensors.
        assert_eq!(Part::Rows(vec![1..7, 9..10]).rows(4, 8), [0..3, 5..6]);
    }
}
