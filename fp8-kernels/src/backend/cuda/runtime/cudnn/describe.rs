//! A graph in the library's descriptors.

use super::descriptor::Descriptor;
use super::graph::{Graph, Operation, Storage, Tensor, TensorId};
use super::library::{Cudnn, Failure, Handle};
use super::numbers::{Attribute, DataType, Kind, ValueType};
use std::ffi::c_int;

/// The alignment in bytes that the library may assume of every tensor.
const ALIGNMENT: u64 = 16;

/// The device that a graph is planned for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Target<'a> {
    /// That of a handle.
    Handle(Handle),
    /// One that is described, and need not be there.
    #[cfg_attr(not(test), expect(dead_code, reason = "the check plans for a device that is not there"))]
    Described(&'a Descriptor),
}

/// The descriptor of a graph, and all those that it was made of.
#[derive(Debug)]
pub(super) struct Described {
    pub(super) graph: Descriptor,
    _parts: Vec<Descriptor>,
}

impl Graph {
    pub(super) fn describe(&self, library: &Cudnn, target: Target<'_>) -> Result<Described, Failure> {
        let mut tensors: Vec<Descriptor> = Vec::with_capacity(self.tensors.len());
        for (index, tensor) in self.tensors.iter().enumerate() {
            // Offsets are added before the tensors that have them.
            let offsets = tensor.ragged.and_then(|offsets| tensors.get(place(offsets)));
            let described = describe_tensor(library, index as i64 + 1, tensor, offsets)?;
            tensors.push(described);
        }
        let mut parts = Vec::new();
        let mut operations = Vec::with_capacity(self.operations.len());
        for operation in &self.operations {
            operations.push(describe_operation(library, operation, &tensors, &mut parts)?);
        }
        let graph = Descriptor::new(library, Kind::OperationGraph)?;
        let graph = match target {
            Target::Handle(handle) => graph.library_handle(Attribute::GraphHandle, handle)?,
            Target::Described(_) => graph,
        };
        let all: Vec<&Descriptor> = operations.iter().collect();
        let graph = graph.descriptors(Attribute::GraphOperations, &all)?.finalize()?;
        parts.extend(tensors);
        parts.extend(operations);
        Ok(Described { graph, _parts: parts })
    }
}

/// The index of a tensor in its graph.
fn place(id: TensorId) -> usize {
    usize::try_from(id.unique() - 1).unwrap_or(usize::MAX)
}

fn describe_tensor(
    library: &Cudnn,
    id: i64,
    tensor: &Tensor,
    offsets: Option<&Descriptor>,
) -> Result<Descriptor, Failure> {
    let descriptor = Descriptor::new(library, Kind::Tensor)?
        .data_type(Attribute::TensorType, tensor.data_type)?
        .ints(Attribute::TensorExtents, &tensor.extents)?
        .ints(Attribute::TensorStrides, &tensor.strides)?
        .ints(Attribute::TensorId, &[id])?
        .ints(Attribute::TensorAlignment, &[ALIGNMENT as i64])?
        .flag(Attribute::TensorIsVirtual, tensor.storage == Storage::Virtual)?
        .flag(Attribute::TensorIsByValue, tensor.is_number())?;
    match offsets {
        Some(offsets) => descriptor.descriptors(Attribute::TensorRaggedOffsets, &[offsets])?.finalize(),
        None => descriptor.finalize(),
    }
}

fn describe_operation(
    library: &Cudnn,
    operation: &Operation,
    tensors: &[Descriptor],
    parts: &mut Vec<Descriptor>,
) -> Result<Descriptor, Failure> {
    let of = |id: TensorId| [&tensors[place(id)]];
    let (described, part) = match *operation {
        Operation::Pointwise { mode, precision, axis, x, b, t, y } => {
            let part = Descriptor::new(library, Kind::Pointwise)?
                .choice(Attribute::PointwiseMode, ValueType::PointwiseMode, mode as c_int)?
                .data_type(Attribute::PointwisePrecision, precision)?;
            let part = match axis {
                Some(axis) => part.ints(Attribute::PointwiseAxis, &[axis])?,
                None => part,
            };
            let part = part.finalize()?;
            let mut described = Descriptor::new(library, Kind::PointwiseOperation)?
                .descriptors(Attribute::PointwiseDescriptor, &[&part])?
                .descriptors(Attribute::PointwiseX, &of(x))?;
            for (attribute, other) in [(Attribute::PointwiseB, b), (Attribute::PointwiseT, t)] {
                if let Some(other) = other {
                    described = described.descriptors(attribute, &of(other))?;
                }
            }
            (described.descriptors(Attribute::PointwiseY, &of(y))?, Some(part))
        }
        Operation::Matmul { a, b, c, real } => {
            let part = Descriptor::new(library, Kind::Matmul)?
                .data_type(Attribute::MatmulComputeType, DataType::F32)?;
            let part = match real {
                [None, None, None] => part,
                _ => part.double(Attribute::MatmulPadding, 0.0)?,
            };
            let part = part.finalize()?;
            let mut described = Descriptor::new(library, Kind::MatmulOperation)?
                .descriptors(Attribute::MatmulA, &of(a))?
                .descriptors(Attribute::MatmulB, &of(b))?
                .descriptors(Attribute::MatmulC, &of(c))?
                .descriptors(Attribute::MatmulDescriptor, &[&part])?;
            let extents = [Attribute::MatmulRows, Attribute::MatmulColumns, Attribute::MatmulDepth];
            for (attribute, lengths) in extents.into_iter().zip(real) {
                if let Some(lengths) = lengths {
                    described = described.descriptors(attribute, &of(lengths))?;
                }
            }
            (described, Some(part))
        }
        Operation::Reduction { reduce, x, y } => {
            let part = Descriptor::new(library, Kind::Reduction)?
                .choice(Attribute::ReductionOperator, ValueType::ReductionOperator, reduce as c_int)?
                .data_type(Attribute::ReductionComputeType, DataType::F32)?
                .finalize()?;
            let described = Descriptor::new(library, Kind::ReductionOperation)?
                .descriptors(Attribute::ReductionX, &of(x))?
                .descriptors(Attribute::ReductionY, &of(y))?
                .descriptors(Attribute::ReductionDescriptor, &[&part])?;
            (described, Some(part))
        }
        Operation::Reshape { x, y } => {
            let described = Descriptor::new(library, Kind::ReshapeOperation)?
                .descriptors(Attribute::ReshapeX, &of(x))?
                .descriptors(Attribute::ReshapeY, &of(y))?;
            (described, None)
        }
    };
    parts.extend(part);
    described.finalize()
}
