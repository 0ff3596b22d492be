//! Elements of stored tensors, read and written one row at a time over strides.

use half::{bf16, f16};
use ptx_interp::Memory;

use super::graph::{Tensor, Type};
use crate::fault::Fault;

/// A tensor's elements on the device.
pub(super) struct Stored<'a> {
    pub(super) tensor: &'a Tensor,
    pub(super) address: u64,
    /// Elements before each batch entry, and before the end, where rows are ragged.
    pub(super) offsets: Option<Vec<usize>>,
}

impl Stored<'_> {
    /// The axis of the last two that goes over rows: the one whose elements are further apart.
    fn row_axis(&self) -> usize {
        if self.tensor.strides[2] >= self.tensor.strides[3] { 2 } else { 3 }
    }

    /// The extents to which the last two axes of a batch entry reach. Ragged tensors have as many rows as are before the next entry.
    pub(super) fn reach(&self, batch: usize) -> [usize; 2] {
        let mut reach = [self.tensor.extents[2], self.tensor.extents[3]];
        if let Some(offsets) = &self.offsets {
            let axis = self.row_axis();
            let elements = offsets[batch + 1].saturating_sub(offsets[batch]);
            let rows = elements / self.tensor.strides[axis].max(1);
            reach[axis - 2] = reach[axis - 2].min(rows);
        }
        reach
    }

    fn at(&self, [b, h, i, j]: [usize; 4]) -> u64 {
        let strides = self.tensor.strides;
        let start = match &self.offsets {
            Some(offsets) => offsets[b],
            None => b * strides[0],
        };
        let element = start + h * strides[1] + i * strides[2] + j * strides[3];
        self.address + (element * self.tensor.kind.size()) as u64
    }

    /// The first `rows` by `columns` elements of a batch entry and head.
    pub(super) fn read(
        &self,
        memory: &Memory,
        [b, h]: [usize; 2],
        [rows, columns]: [usize; 2],
    ) -> Result<Vec<f32>, Fault> {
        let (kind, strides) = (self.tensor.kind, self.tensor.strides);
        let mut all = vec![0.0; rows * columns];
        if strides[3] <= 1 {
            for (i, row) in all.chunks_exact_mut(columns.max(1)).enumerate() {
                row.copy_from_slice(&read(memory, self.at([b, h, i, 0]), columns, kind)?);
            }
        } else {
            for j in 0..columns {
                let column = if strides[2] == 1 {
                    read(memory, self.at([b, h, 0, j]), rows, kind)?
                } else {
                    let element = |i| Ok(read(memory, self.at([b, h, i, j]), 1, kind)?[0]);
                    (0..rows).map(element).collect::<Result<Vec<f32>, Fault>>()?
                };
                column.iter().enumerate().for_each(|(i, value)| all[i * columns + j] = *value);
            }
        }
        Ok(all)
    }

    /// Writes the elements of a batch entry and head, `extents[2]` by `extents[3]` of them, as far as there is room.
    pub(super) fn write(&self, memory: &Memory, [b, h]: [usize; 2], values: &[f32]) -> Result<(), Fault> {
        let [rows, columns] = self.reach(b);
        let (all, kind) = (self.tensor.extents[3], self.tensor.kind);
        for (i, row) in values.chunks_exact(all).take(rows).enumerate() {
            if self.tensor.strides[3] == 1 || columns == 1 {
                memory.write(self.at([b, h, i, 0]), &bytes(&row[..columns], kind))?;
            } else {
                for (j, value) in row[..columns].iter().enumerate() {
                    memory.write(self.at([b, h, i, j]), &bytes(&[*value], kind))?;
                }
            }
        }
        Ok(())
    }
}

fn read(memory: &Memory, address: u64, count: usize, kind: Type) -> Result<Vec<f32>, Fault> {
    let mut bytes = vec![0; count * kind.size()];
    memory.read(address, &mut bytes)?;
    let halves = || bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair));
    let words = || bytes.as_chunks::<4>().0.iter();
    Ok(match kind {
        Type::F32 => words().map(|word| f32::from_le_bytes(*word)).collect(),
        Type::I32 => words().map(|word| i32::from_le_bytes(*word) as f32).collect(),
        Type::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Type::Bf16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        Type::Boolean => bytes.iter().map(|byte| f32::from(*byte)).collect(),
    })
}

fn bytes(values: &[f32], kind: Type) -> Vec<u8> {
    match kind {
        Type::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Type::I32 => values.iter().flat_map(|v| (*v as i32).to_le_bytes()).collect(),
        Type::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Type::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Type::Boolean => values.iter().map(|v| u8::from(*v != 0.0)).collect(),
    }
}

/// A value as a tensor of this type keeps it.
pub(super) fn rounded(value: f32, kind: Type) -> f32 {
    match kind {
        Type::F16 => f16::from_f32(value).to_f32(),
        Type::Bf16 => bf16::from_f32(value).to_f32(),
        Type::F32 | Type::I32 | Type::Boolean => value,
    }
}
