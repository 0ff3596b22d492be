//! Tensors and operations of a finalized graph, and what tells one structure of a graph from another.

use std::fmt::Write;
use std::sync::Arc;

/// `cudnnDataType_t`, of those that attention uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    F32,
    F16,
    I32,
    Bf16,
    Boolean,
}

impl Type {
    pub(super) const fn from_number(number: i32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            2 => Self::F16,
            4 => Self::I32,
            9 => Self::Bf16,
            11 => Self::Boolean,
            _ => return None,
        })
    }

    pub(super) const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Boolean => 1,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::I32 => "i32",
            Self::Bf16 => "bf16",
            Self::Boolean => "bool",
        }
    }

    pub(super) const fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    pub(super) id: i64,
    pub(super) kind: Type,
    pub(super) extents: [usize; 4],
    pub(super) strides: [usize; 4],
    pub(super) alignment: u64,
    pub(super) is_virtual: bool,
    pub(super) is_number: bool,
    /// The elements before each batch entry, where that is not the first stride times its number.
    pub(super) offsets: Option<Arc<Tensor>>,
}

impl Tensor {
    pub(super) fn numel(&self) -> usize {
        self.extents.iter().product()
    }

    /// The place of an element in a tensor of these extents without gaps.
    pub(super) fn index(&self, [b, h, i, j]: [usize; 4]) -> usize {
        let [_, heads, rows, columns] = self.extents;
        ((b * heads + h) * rows + i) * columns + j
    }
}

/// `cudnnPointwiseMode_t`, of those that attention uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Add,
    Mul,
    Div,
    Sub,
    Exp,
    Log,
    Identity,
    Greater,
    GreaterOrEqual,
    Less,
    And,
    Index,
    Select,
}

impl Mode {
    pub(super) const fn from_number(number: i32) -> Option<Self> {
        Some(match number {
            0 => Self::Add,
            1 => Self::Mul,
            6 => Self::Div,
            9 => Self::Sub,
            13 => Self::Exp,
            15 => Self::Log,
            21 => Self::Identity,
            302 => Self::Greater,
            303 => Self::GreaterOrEqual,
            304 => Self::Less,
            400 => Self::And,
            501 => Self::Index,
            601 => Self::Select,
            _ => return None,
        })
    }

    /// The number of inputs.
    pub(super) const fn inputs(self) -> usize {
        match self {
            Self::Exp | Self::Log | Self::Identity | Self::Index => 1,
            Self::Select => 3,
            _ => 2,
        }
    }

    /// Whether the result is a truth value.
    pub(super) const fn is_condition(self) -> bool {
        matches!(self, Self::Greater | Self::GreaterOrEqual | Self::Less | Self::And)
    }
}

/// A descriptor that an operation has besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Part {
    Pointwise {
        mode: Mode,
        number: i32,
        axis: Option<usize>,
    },
    /// The value of elements that no real row, column or product gives.
    Matmul {
        padding: Option<f64>,
    },
    Reduction {
        is_maximum: bool,
    },
}

#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a graph has two dozen")]
pub(super) enum Operation {
    Pointwise { mode: Mode, number: i32, axis: Option<usize>, inputs: Vec<Tensor>, y: Tensor },
    Matmul { a: Tensor, b: Tensor, c: Tensor, real: [Option<Tensor>; 3], padding: Option<f64> },
    Reduction { is_maximum: bool, x: Tensor, y: Tensor },
    Reshape { x: Tensor, y: Tensor },
}

impl Operation {
    /// The tensors that it reads, in a fixed order.
    pub(super) fn inputs(&self) -> Vec<&Tensor> {
        match self {
            Self::Pointwise { inputs, .. } => inputs.iter().collect(),
            Self::Matmul { a, b, real, .. } => [a, b].into_iter().chain(real.iter().flatten()).collect(),
            Self::Reduction { x, .. } | Self::Reshape { x, .. } => vec![x],
        }
    }

    pub(super) const fn output(&self) -> &Tensor {
        match self {
            Self::Pointwise { y, .. } | Self::Reduction { y, .. } | Self::Reshape { y, .. } => y,
            Self::Matmul { c, .. } => c,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Pointwise { number, axis: Some(axis), .. } => format!("pointwise {number} axis {axis}"),
            Self::Pointwise { number, axis: None, .. } => format!("pointwise {number}"),
            Self::Matmul { real, .. } => {
                let real = real.iter().map(|real| if real.is_some() { 'r' } else { '-' });
                format!("matmul {}", real.collect::<String>())
            }
            Self::Reduction { is_maximum, .. } => format!("reduction {}", if *is_maximum { 3 } else { 0 }),
            Self::Reshape { .. } => "reshape".to_owned(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Graph {
    /// By id.
    pub(super) tensors: Vec<Tensor>,
    pub(super) operations: Vec<Operation>,
}

impl Graph {
    pub(super) fn tensor(&self, id: i64) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.id == id)
    }

    /// A hash of the operations and how they are connected, whatever the extents, strides and 16-bit type of their tensors.
    pub(super) fn structure(&self) -> u64 {
        let mut text = String::new();
        let mut seen: Vec<i64> = Vec::new();
        for operation in &self.operations {
            text += &operation.name();
            for tensor in operation.inputs().into_iter().chain([operation.output()]) {
                append(tensor, &mut seen, &mut text);
            }
            text.push('\n');
        }
        hash(&text)
    }
}

/// Appends a tensor's number, and at its first occurrence what kind of tensor it is.
fn append(tensor: &Tensor, seen: &mut Vec<i64>, text: &mut String) {
    if let Some(number) = seen.iter().position(|id| *id == tensor.id) {
        let _ = write!(text, " {number}");
        return;
    }
    seen.push(tensor.id);
    let kind = if tensor.kind.is_half() { "half" } else { tensor.kind.name() };
    let storage = match (tensor.is_virtual, tensor.is_number) {
        (true, _) => "virtual",
        (_, true) => "number",
        _ => "stored",
    };
    let _ = write!(text, " {}:{kind}:{storage}", seen.len() - 1);
    if let Some(offsets) = &tensor.offsets {
        text.push_str(" by");
        append(offsets, seen, text);
    }
}

/// FNV-1a, 64 bits.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
