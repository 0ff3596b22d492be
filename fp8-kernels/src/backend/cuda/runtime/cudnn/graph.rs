//! A graph of operations on tensors, before the library knows of it.
//!
//! Tensors have four extents and as many strides, in elements. Virtual ones are never stored: the library computes them where
//! the next operation needs them. All others are found at a [`Place`], an address given at each execution, or are one number.

use super::numbers::{DataType, Mode, Reduce};

/// The role of a stored tensor, by which it gets its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Query,
    Key,
    Value,
    Output,
    /// The log-sum-exp of each row of scores.
    Stats,
    OutputGradient,
    QueryGradient,
    KeyGradient,
    ValueGradient,
    /// `Σ dy · o` of each row: memory that only the library uses.
    RowSums,
    /// Sums of the queries' gradients in f32: memory that only the library uses.
    QuerySums,
    QueryLengths,
    KeyLengths,
    /// The elements before each sequence of a packed tensor: of queries, and of keys.
    QueryOffsets,
    KeyOffsets,
    /// The rows' numbers before each sequence.
    StatsOffsets,
    /// The factor for scores, on the host.
    Scale,
}

/// A number that a graph contains, on the host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Number {
    F32(f32),
    I32(i32),
}

/// The place of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Storage {
    Virtual,
    At(Place),
    Number(Number),
}

/// A tensor of the graph it was added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorId(usize);

impl TensorId {
    /// The number by which the library knows the tensor.
    pub(super) fn unique(self) -> i64 {
        self.0 as i64 + 1
    }
}

pub(super) type Four = [i64; 4];

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tensor {
    pub(super) extents: Four,
    pub(super) strides: Four,
    pub(super) data_type: DataType,
    pub(super) storage: Storage,
    /// The elements before each batch entry, where that is not the first stride times its number.
    pub(super) ragged: Option<TensorId>,
}

impl Tensor {
    /// A virtual tensor without gaps.
    pub(super) fn dense(extents: Four, data_type: DataType) -> Self {
        Self { extents, strides: dense(extents), data_type, storage: Storage::Virtual, ragged: None }
    }

    pub(super) fn at(self, place: Place) -> Self {
        Self { storage: Storage::At(place), ..self }
    }

    pub(super) fn strided(self, strides: Four) -> Self {
        Self { strides, ..self }
    }

    pub(super) fn ragged(self, offsets: Option<TensorId>) -> Self {
        Self { ragged: offsets, ..self }
    }

    /// The same elements with the last two axes exchanged.
    pub(super) fn transposed(self) -> Self {
        let ([a, b, c, d], [e, f, g, h]) = (self.extents, self.strides);
        Self { extents: [a, b, d, c], strides: [e, f, h, g], ..self }
    }

    pub(super) fn is_number(&self) -> bool {
        matches!(self.storage, Storage::Number(_) | Storage::At(Place::Scale))
    }
}

/// Strides of a tensor without gaps.
pub(super) fn dense([_, b, c, d]: Four) -> Four {
    [b * c * d, c * d, d, 1]
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Operation {
    /// `y = mode(x, b, t)`, elementwise; extents of 1 repeat.
    Pointwise {
        mode: Mode,
        precision: DataType,
        axis: Option<i64>,
        x: TensorId,
        b: Option<TensorId>,
        t: Option<TensorId>,
        y: TensorId,
    },
    /// `c = a · b`, summed in f32; groups of heads share one of `b`.
    Matmul {
        a: TensorId,
        b: TensorId,
        c: TensorId,
        /// The rows, columns and products that are real in each batch entry, where that is not all.
        real: [Option<TensorId>; 3],
    },
    /// Sums or maxima over the axes whose extent differs.
    Reduction { reduce: Reduce, x: TensorId, y: TensorId },
    /// The same elements by other extents and strides.
    Reshape { x: TensorId, y: TensorId },
}

/// Operations in the order in which they were added.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Graph {
    pub(super) tensors: Vec<Tensor>,
    pub(super) operations: Vec<Operation>,
}

impl Graph {
    pub(super) fn add(&mut self, tensor: Tensor) -> TensorId {
        self.tensors.push(tensor);
        TensorId(self.tensors.len() - 1)
    }

    pub(super) fn number(&mut self, number: Number) -> TensorId {
        let data_type = match number {
            Number::F32(_) => DataType::F32,
            Number::I32(_) => DataType::I32,
        };
        self.add(Tensor { storage: Storage::Number(number), ..Tensor::dense([1; 4], data_type) })
    }

    pub(super) fn tensor(&self, id: TensorId) -> Tensor {
        self.tensors[id.0]
    }

    /// Adds `y = mode(x, b, t)`, computed in the type of `y`.
    pub(super) fn pointwise(
        &mut self,
        mode: Mode,
        x: TensorId,
        others: [Option<TensorId>; 2],
        y: Tensor,
    ) -> TensorId {
        let precision = match y.data_type {
            DataType::Bf16 | DataType::F16 => DataType::F32,
            other => other,
        };
        let [b, t] = others;
        let y = self.add(y);
        self.operations.push(Operation::Pointwise { mode, precision, axis: None, x, b, t, y });
        y
    }

    /// Adds a tensor of `like`'s extents that has each element's index along an axis.
    pub(super) fn index(&mut self, like: TensorId, axis: i64) -> TensorId {
        let y = self.add(Tensor::dense(self.tensor(like).extents, DataType::I32));
        let (mode, precision) = (Mode::Index, DataType::I32);
        self.operations.push(Operation::Pointwise {
            mode,
            precision,
            axis: Some(axis),
            x: like,
            b: None,
            t: None,
            y,
        });
        y
    }

    pub(super) fn matmul(
        &mut self,
        a: TensorId,
        b: TensorId,
        c: Tensor,
        real: [Option<TensorId>; 3],
    ) -> TensorId {
        let c = self.add(c);
        self.operations.push(Operation::Matmul { a, b, c, real });
        c
    }

    pub(super) fn reduce(&mut self, reduce: Reduce, x: TensorId, y: Tensor) -> TensorId {
        let y = self.add(y);
        self.operations.push(Operation::Reduction { reduce, x, y });
        y
    }

    pub(super) fn reshape(&mut self, x: TensorId, y: Tensor) -> TensorId {
        let y = self.add(y);
        self.operations.push(Operation::Reshape { x, y });
        y
    }

    /// The tensors that need an address: all stored ones, and those that are one number.
    pub(super) fn bound(&self) -> impl Iterator<Item = (TensorId, Storage)> {
        let stored = |(index, tensor): (usize, &Tensor)| match tensor.storage {
            Storage::Virtual => None,
            storage => Some((TensorId(index), storage)),
        };
        self.tensors.iter().enumerate().filter_map(stored)
    }
}
