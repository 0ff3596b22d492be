//! Evaluating a graph, when its turn in the stream comes.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use ptx_interp::Memory;

use super::graph::{Graph, Mode, Operation, Tensor};
use super::memory::{Stored, rounded};
use crate::code::Code;
use crate::fault::Fault;

/// One queued execution of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Evaluation {
    pub(super) graph: Arc<Graph>,
    pub(super) bound: BTreeMap<i64, Bound>,
    /// Address and bytes.
    pub(super) workspace: (u64, u64),
}

/// The place of a tensor's elements, unless it is virtual.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bound {
    Address(u64),
    Number(f32),
}

/// The elements of tensors that operations have written, without gaps.
type Written = BTreeMap<i64, Rc<Vec<f32>>>;

impl Evaluation {
    /// Runs all operations in order and answers with the simulated nanoseconds that took.
    pub(crate) fn perform(&self, memory: &Memory) -> Result<u64, Fault> {
        // Whoever else keeps anything there loses it.
        memory.fill(self.workspace.0, &[0x5a], self.workspace.1 as usize)?;
        let (mut written, mut work) = (Written::new(), 0);
        for operation in &self.graph.operations {
            let mut values = match operation {
                Operation::Pointwise { mode, axis, inputs, y, .. } => {
                    self.pointwise(memory, &written, *mode, *axis, inputs, y)?
                }
                Operation::Matmul { a, b, c, real, padding } => {
                    work += c.numel() * a.extents[3];
                    self.matmul(memory, &written, [a, b, c], real, *padding)?
                }
                Operation::Reduction { is_maximum, x, y } => {
                    reduced(&self.all(memory, &written, x)?, x, y, *is_maximum)
                }
                Operation::Reshape { x, y } => reshaped(&self.all(memory, &written, x)?, x, y),
            };
            let y = operation.output();
            values.iter_mut().for_each(|value| *value = rounded(*value, y.kind));
            if let Some(stored) = self.stored(memory, y)? {
                let size = y.extents[2] * y.extents[3];
                for (head, values) in values.chunks_exact(size).enumerate() {
                    stored.write(memory, [head / y.extents[1], head % y.extents[1]], values)?;
                }
            }
            written.insert(y.id, Rc::new(values));
        }
        Ok(2000 + work as u64 / 1000)
    }

    /// The tensor on the device, if it is stored.
    fn stored<'a>(&self, memory: &Memory, tensor: &'a Tensor) -> Result<Option<Stored<'a>>, Fault> {
        let Some(Bound::Address(address)) = self.bound.get(&tensor.id).copied() else { return Ok(None) };
        let offsets = match &tensor.offsets {
            None => None,
            Some(list) => Some(self.list(memory, list)?),
        };
        Ok(Some(Stored { tensor, address, offsets }))
    }

    /// Numbers of batch entries.
    fn list(&self, memory: &Memory, tensor: &Tensor) -> Result<Vec<usize>, Fault> {
        let Some(Bound::Address(address)) = self.bound.get(&tensor.id).copied() else {
            return Err(defect("numbers of batch entries without an address"));
        };
        let mut all = Vec::with_capacity(tensor.extents[0]);
        for entry in 0..tensor.extents[0] {
            let mut bytes = [0; 4];
            memory.read(address + (entry * tensor.strides[0] * 4) as u64, &mut bytes)?;
            let number = i32::from_le_bytes(bytes);
            all.push(usize::try_from(number).map_err(|_| defect(&format!("a length of {number}")))?);
        }
        Ok(all)
    }

    /// All elements of a tensor. Those that a ragged one has not are NaN.
    fn all(&self, memory: &Memory, written: &Written, tensor: &Tensor) -> Result<Rc<Vec<f32>>, Fault> {
        if let Some(values) = written.get(&tensor.id) {
            return Ok(Rc::clone(values));
        }
        if let Some(Bound::Number(number)) = self.bound.get(&tensor.id) {
            return Ok(Rc::new(vec![*number; tensor.numel()]));
        }
        let stored = self.stored(memory, tensor)?.ok_or_else(|| defect("a tensor without elements"))?;
        let [batch, heads, rows, columns] = tensor.extents;
        let mut all = vec![f32::NAN; tensor.numel()];
        for (head, values) in all.chunks_exact_mut(rows * columns).enumerate() {
            let at = [head / heads, head % heads];
            debug_assert!(at[0] < batch);
            let [there, across] = stored.reach(at[0]);
            let found = stored.read(memory, at, [there, across])?;
            for (i, row) in found.chunks_exact(across.max(1)).enumerate() {
                values[i * columns..][..row.len()].copy_from_slice(row);
            }
        }
        Ok(Rc::new(all))
    }

    fn pointwise(
        &self,
        memory: &Memory,
        written: &Written,
        mode: Mode,
        axis: Option<usize>,
        inputs: &[Tensor],
        y: &Tensor,
    ) -> Result<Vec<f32>, Fault> {
        let mut values = Vec::with_capacity(inputs.len());
        // Only the extents of what an index is of count.
        let read = if mode == Mode::Index { &[] } else { inputs };
        for input in read {
            values.push((input, self.all(memory, written, input)?));
        }
        let mut all = Vec::with_capacity(y.numel());
        let [batch, heads, rows, columns] = y.extents;
        for b in 0..batch {
            for h in 0..heads {
                for i in 0..rows {
                    for j in 0..columns {
                        let at = [b, h, i, j];
                        let of = |input: usize| {
                            let (tensor, values) = &values[input];
                            let mut place = at;
                            for (index, extent) in place.iter_mut().zip(tensor.extents) {
                                *index %= extent; // 0 where the extent is 1
                            }
                            values[tensor.index(place)]
                        };
                        let flag = |value: bool| f32::from(u8::from(value));
                        all.push(match mode {
                            Mode::Add => of(0) + of(1),
                            Mode::Mul => of(0) * of(1),
                            Mode::Div => of(0) / of(1),
                            Mode::Sub => of(0) - of(1),
                            Mode::Exp => of(0).exp(),
                            Mode::Log => of(0).ln(),
                            Mode::Identity => of(0),
                            Mode::Greater => flag(of(0) > of(1)),
                            Mode::GreaterOrEqual => flag(of(0) >= of(1)),
                            Mode::Less => flag(of(0) < of(1)),
                            Mode::And => flag(of(0) != 0.0 && of(1) != 0.0),
                            Mode::Index => axis.map_or(0, |axis| at[axis]) as f32,
                            Mode::Select => of(if of(2) != 0.0 { 0 } else { 1 }),
                        });
                    }
                }
            }
        }
        Ok(all)
    }

    /// Only real rows, columns and products are read. What they do not give is the padding value, or NaN without one.
    fn matmul(
        &self,
        memory: &Memory,
        written: &Written,
        [a, b, c]: [&Tensor; 3],
        real: &[Option<Tensor>; 3],
        padding: Option<f64>,
    ) -> Result<Vec<f32>, Fault> {
        let mut lists = [None, None, None];
        for (list, tensor) in lists.iter_mut().zip(real) {
            *list = tensor.as_ref().map(|tensor| self.list(memory, tensor)).transpose()?;
        }
        let [batch, heads, m, n] = c.extents;
        let (k, groups) = (a.extents[3], b.extents[1]);
        let mut all = vec![padding.map_or(f32::NAN, |padding| padding as f32); c.numel()];
        for entry in 0..batch {
            let extent = |list: &Option<Vec<usize>>, all: usize| match list {
                Some(list) if list[entry] > all => Err(defect(&format!("{} of {all} are real", list[entry]))),
                Some(list) => Ok(list[entry]),
                None => Ok(all),
            };
            let [rows, columns, depth] =
                [extent(&lists[0], m)?, extent(&lists[1], n)?, extent(&lists[2], k)?];
            for head in 0..heads {
                let left = self.matrix(memory, written, a, [entry, head], [rows, depth])?;
                let group = head / (heads / groups);
                let right = self.matrix(memory, written, b, [entry, group], [depth, columns])?;
                for i in 0..rows {
                    let start = c.index([entry, head, i, 0]);
                    let sums = &mut all[start..start + columns];
                    sums.fill(0.0);
                    for (x, row) in left[i * depth..][..depth].iter().zip(right.chunks_exact(columns.max(1)))
                    {
                        for (sum, y) in sums.iter_mut().zip(row) {
                            *sum += x * y;
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    /// The first `rows` by `columns` elements of a head.
    fn matrix(
        &self,
        memory: &Memory,
        written: &Written,
        tensor: &Tensor,
        [b, h]: [usize; 2],
        [rows, columns]: [usize; 2],
    ) -> Result<Vec<f32>, Fault> {
        match written.get(&tensor.id) {
            Some(values) => {
                let row = |i| &values[tensor.index([b, h, i, 0])..][..columns];
                Ok((0..rows).flat_map(row).copied().collect())
            }
            None => match self.stored(memory, tensor)? {
                Some(stored) => stored.read(memory, [b, h], [rows, columns]),
                None => Err(defect("a matrix without elements")),
            },
        }
    }
}

/// Each element of `y` is reduced from neighbours of `x`, in order.
fn reduced(values: &[f32], x: &Tensor, y: &Tensor, is_maximum: bool) -> Vec<f32> {
    let mut all = vec![if is_maximum { f32::NEG_INFINITY } else { 0.0 }; y.numel()];
    let [batch, heads, rows, columns] = x.extents;
    let factors: Vec<usize> = x.extents.iter().zip(y.extents).map(|(x, y)| x / y).collect();
    let mut values = values.iter();
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..rows {
                for j in 0..columns {
                    let place = [b / factors[0], h / factors[1], i / factors[2], j / factors[3]];
                    let (into, value) =
                        (&mut all[y.index(place)], values.next().copied().unwrap_or(f32::NAN));
                    // A NaN stays.
                    *into = match is_maximum {
                        true if value.is_nan() || into.is_nan() => f32::NAN,
                        true => into.max(value),
                        false => *into + value,
                    };
                }
            }
        }
    }
    all
}

/// The elements of `x` by the extents and strides of `y`: both lay them out in one memory, in which each element of `y` is found.
fn reshaped(values: &[f32], x: &Tensor, y: &Tensor) -> Vec<f32> {
    let memory: HashMap<usize, f32> = places(x).zip(values.iter().copied()).collect();
    places(y).map(|place| memory.get(&place).copied().unwrap_or(f32::NAN)).collect()
}

/// The place of each element by its strides.
fn places(tensor: &Tensor) -> impl Iterator<Item = usize> {
    let ([batch, heads, rows, columns], [b, h, i, j]) = (tensor.extents, tensor.strides);
    (0..batch * heads * rows * columns).map(move |element| {
        let (row, column) = (element / columns, element % columns);
        let (head, row) = (row / rows, row % rows);
        head / heads * b + head % heads * h + row * i + column * j
    })
}

/// An error for what a real library does not define.
fn defect(what: &str) -> Fault {
    Fault { code: Code::LAUNCH_FAILED, text: format!("cuDNN graph: {what}") }
}
