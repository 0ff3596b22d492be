//! The graphs of attention: the operations of NVIDIA's cudnn-frontend, by which the library recognizes its fused kernels.
//!
//! Scores are `[batch, heads, queries, keys]`, in f32 and never stored. Forward:
//!
//! ```text
//! s = q·kᵀ · scale, masked with −∞;  m = max s;  e = exp(s − m);  z = Σ e;  stats = m + ln z;  o = (e / z)·v
//! ```
//!
//! Backward: with `d = Σ dy·o` of each row and `p = exp(s − stats)`, `dv = pᵀ·dy`, `ds = (dy·vᵀ − d) · p · scale`,
//! `dk = dsᵀ·q` and `dq = ds·k`. With groups of heads the gradients of each head are rounded to the tensors' type, and then
//! added up, as the library's kernels do.

use super::graph::{Four, Graph, Number, Place, Tensor, TensorId};
use super::numbers::{DataType, Mode, Reduce};

/// The type of a call's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Bf16,
    F16,
}

impl Element {
    const fn data_type(self) -> DataType {
        match self {
            Self::Bf16 => DataType::Bf16,
            Self::F16 => DataType::F16,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// The distances in elements between batch entries, rows and heads of a tensor whose elements of a head are neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) batch: i64,
    pub(crate) row: i64,
    pub(crate) head: i64,
}

impl Layout {
    /// `[batch, rows, heads, head_dim]` without gaps.
    pub(crate) fn dense(rows: usize, heads: usize, head_dim: usize) -> Self {
        let [rows, heads, head_dim] = [rows, heads, head_dim].map(|extent| extent as i64);
        Self { batch: rows * heads * head_dim, row: heads * head_dim, head: head_dim }
    }

    fn strides(self) -> Four {
        [self.batch, self.head, self.row, 1]
    }
}

/// The keys that a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Mask {
    /// No key to the right of its own.
    pub(crate) causal: bool,
    /// No more keys to the left of its own.
    pub(crate) left: Option<u32>,
    /// The last query's own key is the last one.
    pub(crate) bottom_right: bool,
}

/// The positions that are real.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lengths {
    All,
    /// The first ones of each batch entry.
    Padded,
    /// Sequences one behind the other, each of which is a batch entry of the graph. The rows of q and o have one distance.
    #[cfg_attr(not(test), expect(dead_code, reason = "only the check plans packed sequences so far"))]
    Packed,
}

/// The way in which the parts of a query's gradient are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Sums {
    /// In f32 memory, by atomic additions or in order, as the kernel chooses.
    InMemory,
    /// Without f32 memory of the caller's.
    Direct,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Forward,
    Backward(Sums),
}

/// A call of attention, but for its addresses and scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Attention {
    pub(crate) direction: Direction,
    pub(crate) element: Element,
    /// Batch entries, or sequences of a packed one.
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    /// The queries of a batch entry; the largest number of a sequence.
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
    pub(crate) mask: Mask,
    pub(crate) lengths: Lengths,
    /// The layouts of q and dq, k and dk, v and dv, o and dy.
    pub(crate) q: Layout,
    pub(crate) k: Layout,
    pub(crate) v: Layout,
    pub(crate) o: Layout,
    pub(crate) dq: Layout,
    pub(crate) dk: Layout,
    pub(crate) dv: Layout,
    pub(crate) dy: Layout,
    /// The distance between two heads' rows of statistics, and between two batch entries'. Rows are neighbours.
    pub(crate) stats_head: i64,
    pub(crate) stats_batch: i64,
}

impl Attention {
    pub(crate) fn graph(&self) -> Graph {
        let mut builder = Builder::new(self);
        match self.direction {
            Direction::Forward => builder.forward(),
            Direction::Backward(sums) => builder.backward(sums),
        }
        builder.graph
    }
}

struct Builder<'a> {
    call: &'a Attention,
    graph: Graph,
    /// The numbers of real queries and keys of each batch entry.
    real: [Option<TensorId>; 2],
    /// Offsets of packed queries, keys and statistics.
    ragged: [Option<TensorId>; 3],
    element: DataType,
    /// Extents of scores, and of their rows.
    scores: Four,
    rows: Four,
}

impl<'a> Builder<'a> {
    fn new(call: &'a Attention) -> Self {
        let mut graph = Graph::default();
        let [batch, heads, queries, keys] =
            [call.batch, call.heads, call.queries, call.keys].map(|extent| extent as i64);
        let mut list = |extent, place| graph.add(Tensor::dense([extent, 1, 1, 1], DataType::I32).at(place));
        let real = match call.lengths {
            Lengths::All => [None; 2],
            Lengths::Padded | Lengths::Packed => {
                [Place::QueryLengths, Place::KeyLengths].map(|place| Some(list(batch, place)))
            }
        };
        let ragged = match call.lengths {
            Lengths::All | Lengths::Padded => [None; 3],
            Lengths::Packed => [Place::QueryOffsets, Place::KeyOffsets, Place::StatsOffsets]
                .map(|place| Some(list(batch + 1, place))),
        };
        let element = call.element.data_type();
        let (scores, rows) = ([batch, heads, queries, keys], [batch, heads, queries, 1]);
        Self { call, graph, real, ragged, element, scores, rows }
    }

    /// A stored tensor with the rows and heads of queries.
    fn of_queries(&mut self, place: Place, layout: Layout) -> TensorId {
        let [batch, heads, queries, _] = self.scores;
        let extents = [batch, heads, queries, self.call.head_dim as i64];
        let tensor = Tensor::dense(extents, self.element).strided(layout.strides()).at(place);
        self.graph.add(tensor.ragged(self.ragged[0]))
    }

    /// A tensor with the rows and groups of keys.
    fn of_keys(&self, place: Place, layout: Layout) -> Tensor {
        let [batch, _, _, keys] = self.scores;
        let extents = [batch, self.call.groups as i64, keys, self.call.head_dim as i64];
        Tensor::dense(extents, self.element).strided(layout.strides()).at(place).ragged(self.ragged[1])
    }

    /// The rows' statistics.
    fn stats(&self) -> Tensor {
        let strides = [self.call.stats_batch, self.call.stats_head, 1, 1];
        let tensor = Tensor::dense(self.rows, DataType::F32).strided(strides);
        tensor.at(Place::Stats).ragged(self.ragged[2])
    }

    fn scores(&self, data_type: DataType) -> Tensor {
        Tensor::dense(self.scores, data_type)
    }

    fn row(&self) -> Tensor {
        Tensor::dense(self.rows, DataType::F32)
    }

    fn scale(&mut self) -> TensorId {
        self.graph.add(Tensor::dense([1; 4], DataType::F32).at(Place::Scale))
    }

    /// `x` where the condition holds, −∞ elsewhere.
    fn only_where(&mut self, x: TensorId, condition: TensorId) -> TensorId {
        let hidden = self.graph.number(Number::F32(f32::NEG_INFINITY));
        let y = self.scores(DataType::F32);
        self.graph.pointwise(Mode::Select, x, [Some(hidden), Some(condition)], y)
    }

    fn compare(&mut self, mode: Mode, x: TensorId, b: TensorId) -> TensorId {
        let y = self.scores(DataType::Boolean);
        self.graph.pointwise(mode, x, [Some(b), None], y)
    }

    /// Hides padding.
    fn only_real(&mut self, scores: TensorId) -> TensorId {
        let [Some(queries), Some(keys)] = self.real else { return scores };
        let [row, column] = [2, 3].map(|axis| self.graph.index(scores, axis));
        let is_query = self.compare(Mode::Less, row, queries);
        let is_key = self.compare(Mode::Less, column, keys);
        let is_real = self.compare(Mode::And, is_query, is_key);
        self.only_where(scores, is_real)
    }

    /// Hides the keys that the mask hides.
    fn masked(&mut self, mut scores: TensorId) -> TensorId {
        let Mask { causal, left, bottom_right } = self.call.mask;
        let [_, _, queries, keys] = self.scores;
        // The distance from a query's number to that of its own key.
        let shift = if bottom_right { keys - queries } else { 0 };
        if causal {
            let [mut row, column] = [2, 3].map(|axis| self.graph.index(scores, axis));
            if bottom_right {
                for (mode, extent) in [(Mode::Add, keys), (Mode::Sub, queries)] {
                    let extent = self.graph.number(Number::I32(extent as i32));
                    let y = self.scores(DataType::I32);
                    row = self.graph.pointwise(mode, row, [Some(extent), None], y);
                }
            }
            let sees = self.compare(Mode::GreaterOrEqual, row, column);
            scores = self.only_where(scores, sees);
        }
        if let Some(left) = left {
            // column ≥ row + shift − left, by floats: the library's own form of a window.
            let [row, column] = [2, 3].map(|axis| self.graph.index(scores, axis));
            let reach = self.graph.number(Number::F32((i64::from(left) + 1 - shift) as f32));
            let y = self.scores(DataType::F32);
            let end = self.graph.pointwise(Mode::Add, column, [Some(reach), None], y);
            let sees = self.compare(Mode::Greater, end, row);
            scores = self.only_where(scores, sees);
        }
        scores
    }

    /// `q·kᵀ · scale` without padding.
    fn scaled_scores(&mut self, q: TensorId, k: TensorId) -> TensorId {
        let [queries, keys] = self.real;
        let y = self.scores(DataType::F32);
        let products = self.graph.matmul(q, k, y, [queries, keys, None]);
        let scale = self.scale();
        let scaled = self.graph.pointwise(Mode::Mul, products, [Some(scale), None], y);
        self.only_real(scaled)
    }

    fn forward(&mut self) {
        let call = *self.call;
        let q = self.of_queries(Place::Query, call.q);
        let k = self.of_keys(Place::Key, call.k).transposed();
        let k = self.graph.add(k);
        let v = self.graph.add(self.of_keys(Place::Value, call.v));
        let scores = self.scaled_scores(q, k);
        let scores = self.masked(scores);
        let (wide, row) = (self.scores(DataType::F32), self.row());
        let largest = self.graph.reduce(Reduce::Max, scores, row);
        let below = self.graph.pointwise(Mode::Sub, scores, [Some(largest), None], wide);
        let exponentials = self.graph.pointwise(Mode::Exp, below, [None; 2], wide);
        let sum = self.graph.reduce(Reduce::Add, exponentials, row);
        let logarithm = self.graph.pointwise(Mode::Log, sum, [None; 2], row);
        let stats = self.stats();
        self.graph.pointwise(Mode::Add, largest, [Some(logarithm), None], stats);
        let narrow = self.scores(self.element);
        let probabilities = self.graph.pointwise(Mode::Div, exponentials, [Some(sum), None], narrow);
        let [queries, keys] = self.real;
        let [batch, heads, rows, _] = self.scores;
        let o = Tensor::dense([batch, heads, rows, call.head_dim as i64], self.element);
        let o = o.strided(call.o.strides()).at(Place::Output).ragged(self.ragged[0]);
        self.graph.matmul(probabilities, v, o, [queries, None, keys]);
    }

    fn backward(&mut self, sums: Sums) {
        let call = *self.call;
        let [queries, keys] = self.real;
        let q = self.of_queries(Place::Query, call.q);
        let k = self.of_keys(Place::Key, call.k).transposed();
        let k = self.graph.add(k);
        let v = self.of_keys(Place::Value, call.v).transposed();
        let v = self.graph.add(v);
        let o = self.of_queries(Place::Output, call.o);
        let dy = self.of_queries(Place::OutputGradient, call.dy);
        let stats = self.graph.add(self.stats());
        let (wide, row) = (self.scores(DataType::F32), self.row());

        let [batch, heads, rows, _] = self.scores;
        let per_query = Tensor::dense([batch, heads, rows, call.head_dim as i64], DataType::F32);
        let products = self.graph.pointwise(Mode::Mul, dy, [Some(o), None], per_query);
        let row_sums = self.graph.reduce(Reduce::Add, products, row);
        let one = self.graph.number(Number::F32(1.0));
        let row_sums = self.graph.pointwise(Mode::Mul, row_sums, [Some(one), None], row.at(Place::RowSums));

        let scores = self.scaled_scores(q, k);
        let below = self.graph.pointwise(Mode::Sub, scores, [Some(stats), None], wide);
        let below = self.masked(below);
        let probabilities = self.graph.pointwise(Mode::Exp, below, [None; 2], wide);
        let dv = self.of_keys(Place::ValueGradient, call.dv);
        self.gradient_of_keys(probabilities, dy, dv);

        let slopes = self.graph.matmul(dy, v, wide, [queries, keys, None]);
        let slopes = self.graph.pointwise(Mode::Sub, slopes, [Some(row_sums), None], wide);
        let slopes = self.graph.pointwise(Mode::Mul, slopes, [Some(probabilities), None], wide);
        let scale = self.scale();
        let slopes = self.graph.pointwise(Mode::Mul, slopes, [Some(scale), None], wide);
        let dk = self.of_keys(Place::KeyGradient, call.dk);
        self.gradient_of_keys(slopes, q, dk);

        let like_k = self.graph.tensor(k).transposed();
        let like_k = Tensor { storage: super::graph::Storage::Virtual, ..like_k };
        let k = self.graph.reshape(k, like_k);
        let real = [queries, None, keys];
        match sums {
            Sums::Direct => {
                let dq = Tensor { data_type: self.element, ..per_query };
                let dq = dq.strided(call.dq.strides()).at(Place::QueryGradient).ragged(self.ragged[0]);
                self.graph.matmul(slopes, k, dq, real);
            }
            Sums::InMemory => {
                let sums = self.graph.matmul(slopes, k, per_query.at(Place::QuerySums), real);
                let dq = Tensor { data_type: self.element, ..per_query };
                let dq = dq.strided(call.dq.strides()).at(Place::QueryGradient).ragged(self.ragged[0]);
                self.graph.pointwise(Mode::Identity, sums, [None; 2], dq);
            }
        }
    }

    /// `out = weightsᵀ · of_queries`, summed over the heads of a group.
    fn gradient_of_keys(&mut self, weights: TensorId, of_queries: TensorId, out: Tensor) {
        let [queries, keys] = self.real;
        let turned = Tensor { data_type: self.element, ..self.scores(self.element).transposed() };
        let turned = self.graph.reshape(weights, turned);
        let real = [keys, None, queries];
        if self.call.groups == self.call.heads {
            self.graph.matmul(turned, of_queries, out, real);
            return;
        }
        let [batch, _, rows, head_dim] = out.extents;
        let each = Tensor::dense([batch, self.call.heads as i64, rows, head_dim], self.element);
        let each = self.graph.matmul(turned, of_queries, each, real);
        self.graph.reduce(Reduce::Add, each, out);
    }
}
